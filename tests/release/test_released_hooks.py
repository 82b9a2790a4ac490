"""Hooks under gradient release: the bits of the usual step, and what reads a gradient."""

from functools import partial
from typing import Any

import pytest
import torch
from released import both, make, prepared, train

from optimi_func import AdamW, Muon
from optimi_func.hooks import cautious, floor, hyperball, radial_brake

BALL = {"hooks": [cautious(), hyperball()], "weight_decay": 0.0}
ROWS = {"hooks": [floor(0.9, "row"), radial_brake(0.5)]}
MATRICES = {"hooks": [floor(0.9, "row"), hyperball("matrix")], "weight_decay": 0.0}
BF16 = torch.bfloat16
CASES = [(AdamW, BALL), (AdamW, ROWS), (Muon, MATRICES)]


@pytest.mark.parametrize("storage", [None, "compact", "exact"])
@pytest.mark.parametrize(("cls", "options"), CASES, ids=["ball", "rows", "matrices"])
def test_released_steps_are_the_usual_ones(cls: Any, options: Any, storage: Any) -> None:
    how = options if cls is Muon else {**options, "storage": storage}
    both(partial(train, steps=4), partial(make, cls, BF16, **how))


def test_a_hook_that_reads_no_gradient_takes_the_parts_of_a_step() -> None:
    model, _, handle = prepared(make(**ROWS), accumulation="states", accumulation_steps=2)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        assert all(map(torch.equal, before, model.parameters()))
        model(torch.randn(8, 16)).square().mean().backward()
    assert not any(map(torch.equal, before, model.parameters()))
    handle.remove()
