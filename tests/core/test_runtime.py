"""The caches of a process: what is forgotten is made again, and changes no result."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

import optimi_func
from optimi_func.core.runtime import Runtime, runtime


def moved() -> tuple[list[Tensor], Tensor]:
    """Return weights after a class's step, a pure step, and one with means."""
    torch.manual_seed(0)
    ps = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    made = [optimi_func.AdamW, optimi_func.StableAdamW]
    for p, cls in zip(ps, made):
        p.grad = torch.randn_like(p)
        cls([p], lr=0.1, compile=False).step()
    value, x = optimi_func.lion(lr=0.1), torch.randn(5)
    x, _ = value.step(x, torch.randn(5), value.init(x))
    return [p.detach() for p in ps], x


def test_a_process_that_forgets_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for x in fields(Runtime):  # what other tests have cached comes back
        monkeypatch.setattr(runtime, x.name, getattr(runtime, x.name))
    before = moved()
    assert runtime.programs and runtime.requests and runtime.tree_plans
    optimi_func.core.checks.is_first("said before")
    runtime.forget()
    assert not any([runtime.programs, runtime.requests, runtime.tree_plans, runtime.said])
    assert optimi_func.core.checks.is_first("said before")
    torch.testing.assert_close(moved(), before, rtol=0.0, atol=0.0)
    assert runtime.programs and runtime.requests and runtime.tree_plans
