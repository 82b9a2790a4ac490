"""Names and arguments that are gone: errors say what to use instead."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import optimi_func
from optimi_func import (
    Adam,
    AdamW,
    Lion,
    MuonAdamW,
    adam,
    adamw,
    lion,
    prepare_for_gradient_release,
    sgd,
    unroll,
)
from optimi_func.core.removed import REMOVED

# The module, the name, and a part of what is said.
NAMES = [
    ("optimi_func", "Backtracking", "strong_wolfe"),
    ("optimi_func.gradient_release", "CLIPPING", r"docs/release\.md"),
    ("optimi_func.population", "from_class", r"optimizer\.functional"),
    ("optimi_func.population", "load_member", r"optimizer\.load_functional"),
    ("optimi_func.population", "state_dicts", r"for name, p in members\.params"),
    ("optimi_func.population", "unstack", r"lambda x: x\[i\]"),
    ("optimi_func.transforms", "BacktrackingState", "strong_wolfe"),
    ("optimi_func.transforms", "InjectState", "0-d tensors for numbers"),
    ("optimi_func.transforms", "LookaheadState", "slow parameters"),
    ("optimi_func.transforms", "SamState", "ascent, which has no state"),
    ("optimi_func.transforms", "backtracking", "strong_wolfe"),
    ("optimi_func.transforms", "inject", r"adamw\(lr=lr, .*\)\.step\(params, grads"),
    ("optimi_func.transforms", "lookahead", r"torch\.lerp .* class Lookahead"),
    ("optimi_func.transforms", "sam", r"transforms\.ascent .* class SAM"),
]
P = torch.zeros(2, requires_grad=True)


def released(**options: Any) -> Any:
    return prepare_for_gradient_release(nn.Linear(2, 1), adamw(lr=1e-3), **options)


def stepped(**options: Any) -> Any:
    model = nn.Linear(2, 1)
    with prepare_for_gradient_release(model, adamw(lr=1e-3)) as handle:
        return handle.backward(lambda: model(torch.ones(2)).sum(), **options)


def unrolled(**options: Any) -> Any:
    return unroll(sgd(lr=1.0), torch.sum, P, None, [0], **options)


# What takes it no more, the argument, and a part of what is said.
ARGUMENTS: list[tuple[Callable[..., Any], str, str]] = [
    (lambda **o: Adam([P], **o), "modulus", "both parts"),
    (lambda **o: AdamW([P], **o), "modulus", "both parts"),
    (lambda **o: adam(lr=0.1, **o), "modulus", "both parts"),
    (lambda **o: adamw(lr=0.1, **o), "modulus", "both parts"),
    (lambda **o: AdamW([P], **o), "divide_state", "ZeroRedundancyOptimizer"),
    (lambda **o: optimi_func.population.perturb(**o), "noise", "randn_like"),
    (released, "how", r"clip_global_norm alone, .* handle\.backward\("),
    (stepped, "how", "clip_global_norm alone"),
    (released, "pending_bytes", "wait for up to 1 MiB"),
    (unrolled, "checkpoint_every", r"torch\.utils\.checkpoint"),
]
METHODS = [("track", r"Stats\(optimizer\)"), ("stats", r"Stats\(optimizer\)")]


@pytest.mark.parametrize(("module", "name", "text"), NAMES)
def test_a_name_says_what_to_use(module: str, name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=f"{name!r}, which was removed: use .*{text}"):
        getattr(import_module(module), name)
    with pytest.raises(ImportError, match=f"{name!r}, which was removed: use .*{text}"):
        exec(f"from {module} import {name}")


@pytest.mark.parametrize(("call", "name", "text"), ARGUMENTS)
def test_an_argument_says_what_to_use(
    call: Callable[..., Any], name: str, text: str
) -> None:
    with pytest.raises(TypeError, match=f"{name!r}, which was removed: use .*{text}"):
        call(**{name: 1})


@pytest.mark.parametrize(("name", "text"), METHODS)
def test_a_method_says_what_to_use(name: str, text: str) -> None:
    optimizer = AdamW([P], compile=False)
    with pytest.raises(AttributeError, match=f"{name!r}, which was removed: use .*{text}"):
        getattr(optimizer, name)


def test_every_row_of_the_table_is_tried() -> None:
    tried = {name for _, name, _ in [*NAMES, *ARGUMENTS]} | {name for name, _ in METHODS}
    names = {key: key.rstrip(")").partition("(") for key in REMOVED}
    assert tried == {argument or name for name, _, argument in names.values()}


@pytest.mark.parametrize("name", sorted({name for _, name, _ in ARGUMENTS} | {"sam"}))
def test_others_arguments_are_not_spoken_of(name: str) -> None:
    """Nobody has removed an argument that a function never had."""
    wrong = {name: 1}
    for call in (Lion, lion, MuonAdamW):
        with pytest.raises(TypeError, match=name) as e:
            call([P], **wrong) if call is Lion else call(lr=0.1, **wrong)
        assert ("removed" in str(e.value)) == (f"({name})" in REMOVED)
