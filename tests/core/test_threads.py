"""Caches that threads share: another thread may empty or fill one at any moment."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from optimi_func import adamw, rules
from optimi_func.core import storage
from optimi_func.core.runtime import runtime
from optimi_func.functional import adafactor, adamw_step
from optimi_func.rules import methods


class Emptied(dict[Any, Any]):
    """A dict that another thread empties as soon as something was written to it."""

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        self.clear()

    def setdefault(self, key: object, value: object = None) -> Any:
        found = super().setdefault(key, value)
        self.clear()
        return found


def test_values_that_another_thread_drops_are_returned(monkeypatch: Any) -> None:
    monkeypatch.setattr(adamw, "_made", Emptied())
    assert adamw.kept(lr=0.1, eps=1e-7) == adamw(lr=0.1, eps=1e-7)


def test_shapes_that_another_thread_drops_are_returned(monkeypatch: Any) -> None:
    optimizer = adafactor(lr=0.1)
    rule, numbers = optimizer.rule, optimizer.init_numbers
    monkeypatch.setattr(runtime, "inits", {rule.init: Emptied()})
    shapes = storage.own_shapes(rule, numbers, torch.ones(3, 2))
    assert rule.whole_fields and {*shapes} == {*rule.whole_fields}


def test_threads_that_trace_at_a_time_get_one_rule(monkeypatch: Any) -> None:
    """Plans and kernels are found by the rule, so two would be compiled twice."""

    class Sign(rules.Optimizer):
        nesterov: bool = False

        class State(NamedTuple):
            m: Tensor

        def direction(self, g: Tensor, s: State) -> Any:
            m = 0.9 * s.m + g
            return (g + m if self.nesterov else m), self.State(m)

    trace, inside = methods.Methods.rule, list[Any]()

    def overtaken(self: Any, *args: Any, **how: Any) -> Any:
        found = trace(self, *args, **how)
        if not inside:
            inside.append(None)
            inside.append(Sign.pure(lr=1.0, nesterov=True).rule)  # another thread's
        return found

    monkeypatch.setattr(methods.Methods, "rule", overtaken)
    assert Sign.pure(lr=0.1, nesterov=True).rule is inside[1]


@pytest.fixture
def busy() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_step_with_more_values_than_are_kept(busy: None) -> None:
    """Each thread gets its own numbers' results, while all fill and empty the caches."""
    p, g = torch.ones(2, dtype=torch.float64), torch.full((2,), 3.0, dtype=torch.float64)
    state = adamw(lr=0.1).init(p)
    factored = adafactor(lr=0.1)

    def step(i: int) -> float:
        new, _ = adamw_step(p, g, state, lr=0.1, weight_decay=0.0, eps=float(i + 1))
        factored.init(torch.empty(2 + i, 3, device="meta"))
        return float(new[0])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(step, [*range(300)] * 2))
    want = [1.0 - 0.1 * 3.0 / (3.0 + i + 1) for i in range(300)] * 2
    assert found == pytest.approx(want, rel=1e-12)
