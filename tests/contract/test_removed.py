"""Names and arguments that are gone: the error says what to use instead."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from optimi_func import adamw, prepare_for_gradient_release


def released(**options: Any) -> Any:
    return prepare_for_gradient_release(nn.Linear(2, 1), adamw(lr=1e-3), **options)


def stepped(**options: Any) -> Any:
    model = nn.Linear(2, 1)
    with prepare_for_gradient_release(model, adamw(lr=1e-3)) as handle:
        return handle.backward(lambda: model(torch.ones(2)).sum(), **options)


CALLS: list[tuple[Callable[..., object], dict[str, object], str]] = [
    (released, {"how": "lagged"}, r"clip_global_norm alone, .* handle\.backward\("),
    (stepped, {"how": "lagged"}, "clip_global_norm alone"),
    (released, {"pending_bytes": 0}, "wait for up to 1 MiB"),
]


@pytest.mark.parametrize(("call", "options", "instead"), CALLS)
def test_a_removed_argument_is_named(
    call: Callable[..., object], options: dict[str, object], instead: str
) -> None:
    (name,) = options
    with pytest.raises(TypeError, match=f"{name!r}, removed in 0.3: use .*{instead}"):
        call(**options)


NAMES = [("optimi_func.gradient_release", "CLIPPING", r"docs/release\.md")]


@pytest.mark.parametrize(("module", "name", "instead"), NAMES)
def test_a_removed_name_is_named(module: str, name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"removed in 0.3: use .*{instead}"):
        getattr(import_module(module), name)
    with pytest.raises(ImportError, match=f"removed in 0.3: use .*{instead}"):
        exec(f"from {module} import {name}")
