"""Removed names and arguments: errors say what to use instead."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from optimi_func import sgd, unroll

NAMES = [
    ("optimi_func", "Backtracking", "strong_wolfe"),
    ("optimi_func.transforms", "BacktrackingState", "strong_wolfe"),
    ("optimi_func.transforms", "LookaheadState", "slow parameters"),
    ("optimi_func.transforms", "SamState", "ascent, which has no state"),
    ("optimi_func.transforms", "backtracking", "strong_wolfe"),
    ("optimi_func.transforms", "lookahead", r"torch\.lerp .* class Lookahead"),
    ("optimi_func.transforms", "sam", r"transforms\.ascent .* class SAM"),
]
ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: unroll(sgd(lr=1.0), torch.sum, P, None, [0], checkpoint_every=2),  # pyright: ignore
        "unroll has no argument 'checkpoint_every', .* torch.utils.checkpoint",
    ),
]
P = torch.zeros(1)


@pytest.mark.parametrize(("module", "name", "text"), NAMES)
def test_a_removed_name(module: str, name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=f"removed in 0.3: use .*{text}"):
        getattr(import_module(module), name)
    with pytest.raises(ImportError, match=f"removed in 0.3: use .*{text}"):
        exec(f"from {module} import {name}")


@pytest.mark.parametrize(("call", "text"), ARGUMENTS)
def test_a_removed_argument(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()
