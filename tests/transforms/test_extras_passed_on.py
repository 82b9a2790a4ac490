"""Extras of a rule through transforms and unrolled runs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

from optimi_func import sgd, unroll
from optimi_func.rules import Optimizer
from optimi_func.transforms import (
    GradientTransform,
    apply_if_finite,
    chain,
    every_k,
    masked,
    partition,
)


class Weighed(Optimizer):
    def direction(self, g: Tensor, weight: Tensor):
        return weight * g


P = {"a": torch.zeros(2), "b": torch.zeros(3)}
G = {"a": torch.ones(2), "b": torch.ones(3)}
W = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0, 5.0])}


def weighed() -> Any:
    return Weighed.pure(lr=1.0)


def test_every_k_gives_the_extras_of_the_kth_call() -> None:
    opt = every_k(weighed(), 2)
    p, state = opt.step(P, G, opt.init(P), weight=torch.tensor(9.0))
    assert p["a"].tolist() == [0.0, 0.0]
    p, state = opt.step(p, G, state, weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[-1, -2], [-3, -4, -5]]


def test_apply_if_finite_passes_extras_on() -> None:
    opt = apply_if_finite(weighed())
    p, state = opt.step(P, G, opt.init(P), weight=W)
    assert p["a"].tolist() == [-1, -2]
    bad = {**G, "b": torch.full((3,), torch.nan)}
    q, _ = opt.step(p, bad, state, weight=W)
    assert torch.equal(q["a"], p["a"])


def test_parts_get_their_part_of_the_extras_that_they_take() -> None:
    opt = partition(("a", weighed()), rest=sgd(lr=1.0))
    p, _ = opt.step(P, G, opt.init(P), weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[-1, -2], [-1, -1, -1]]
    both = partition(("a", weighed()), rest=every_k(weighed(), 1))
    p, _ = both.step(P, G, both.init(P), weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[-1, -2], [-3, -4, -5]]
    p, _ = both.step(P, G, both.init(P), weight=torch.tensor(2.0))
    assert [p["a"].tolist(), p["b"].tolist()] == [[-2, -2], [-2, -2, -2]]
    alone = masked(weighed(), "b")
    p, _ = alone.step(P, G, alone.init(P), weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[0, 0], [-3, -4, -5]]


def test_a_chain_around_a_partition_keeps_what_parts_take() -> None:
    def scaled(grads: Any, state: Any, step: Tensor, weight: Any) -> Any:
        return [None if g is None else 10.0 * g for g in grads], state

    parts = partition(("a", weighed()), rest=sgd(lr=1.0))
    opt = chain(GradientTransform(lambda params: (), scaled), parts)
    p, _ = opt.step(P, G, opt.init(P), weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[-10, -20], [-10, -10, -10]]


def test_extras_that_nobody_takes_are_named() -> None:
    opt = partition(("a", sgd(lr=1.0)), rest=sgd(lr=1.0))
    with pytest.raises(TypeError, match="partition got the extra 'weight': no part takes"):
        opt.step(P, G, opt.init(P), weight=W)


def test_unrolled_steps_take_extras_and_return_aux() -> None:
    def loss(p: Any, x: Tensor) -> Any:
        return (p * x).sum(), {"seen": x, "p": p}

    def extras(p: Any, g: Any, x: Tensor) -> Any:
        return {"weight": 0.5 * x}

    def end(lr: Tensor) -> Any:
        xs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([1.0, 1.0])]
        how: Any = {"hyper": {"lr": lr}, "extras": extras, "has_aux": True}
        return unroll(Weighed.pure, loss, torch.zeros(2), None, xs, **how)

    run, aux = end(torch.tensor(2.0))
    assert run.params.tolist() == [-11.0, -21.0] and run.losses.shape == (3,)
    assert aux["seen"].tolist() == [[1, 2], [3, 4], [1, 1]]
    assert aux["p"].tolist() == [[0, 0], [-1, -4], [-10, -20]]
    found = grad(lambda lr: end(lr)[0].params.sum())(torch.tensor(2.0))
    assert found.item() == -16.0
