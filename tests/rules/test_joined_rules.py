"""Users' rules with sums over all parameters: `sums` and `join`."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Wide
from optimi_func.testing import check_rule


class DoG(Optimizer):
    """Ivgi et al. 2023, arXiv:2302.12022, by the sums up to the step before."""

    first: float = 0.05

    class State(NamedTuple):
        start: Wide

    class Running(NamedTuple):
        factor: float = 0.0
        far: float = 0.0
        squares: float = 0.0

    def init(self, p: Tensor) -> State:
        return self.State(p)

    def direction(self, g: Tensor, s: State, r: Running):
        return g, s, r

    def after(self, x: Tensor, u: Tensor, s: State, r: Running):
        return r.factor * u, s

    def sums(self, g: Tensor, s: State, x: Tensor):
        return {"squares": g * g, "far": (x - s.start) ** 2}

    def join(self, r: Running, sums: dict[str, Any]):
        far = torch.maximum(torch.maximum(r.far, sums["far"] ** 0.5), self.first)
        squares = r.squares + sums["squares"]
        return self.Running(far / (squares + 1e-8) ** 0.5, far, squares)


def loop(params: list[Tensor], grads: Any, lr: float, first: float = 0.05) -> list[Tensor]:
    start, factor, far, squares = params, 0.0, first, 0.0
    for step in grads:
        far = max(far, sum([((p - x) ** 2).sum() for p, x in zip(params, start)]) ** 0.5)
        squares += sum([(g * g).sum() for g in step])
        params = [p - lr * factor * g for p, g in zip(params, step)]
        factor = far / (squares + 1e-8) ** 0.5
    return params


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_users_rule_with_sums_is_its_loop(compile: bool) -> None:
    allowed = {"bfloat16": 0.2, "bfloat16 exact": 0.2}  # d follows small differences
    options: dict[str, Any] = {"lr": 1.0, "first": 0.5, "steps": 8}
    check_rule(DoG, loop, compile=compile, allowed=allowed, **options)


def test_each_group_has_sums_of_its_own_and_shows_the_first_scalar() -> None:
    ps = [torch.ones(3, requires_grad=True) for _ in range(3)]
    groups = [{"params": ps[:1]}, {"params": ps[1:], "first": 0.2}]
    optimizer = DoG(groups, lr=1.0, compile=False)
    grads = [[torch.full((3,), float(i + j)) for i in (1, 2, 3)] for j in range(4)]
    for step in grads:
        for p, g in zip(ps, step):
            p.grad = g
        optimizer.step()
    for part, first in (slice(0, 1), 0.05), (slice(1, 3), 0.2):
        found = [p.detach().double() for p in ps[part]]
        start = [torch.ones(3, dtype=torch.float64) for _ in found]
        want = loop(start, [[g.double() for g in step[part]] for step in grads], 1.0, first)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=0.0)
    shown = [group["factor"] for group in optimizer.param_groups]
    assert shown == [optimizer.state[p]["factor"].item() for p in (ps[0], ps[2])]
    assert 0.0 < shown[0] != shown[1] > 0.0


def test_a_parameter_without_a_gradient_counts_with_a_gradient_of_0() -> None:
    ps = [torch.ones(2, requires_grad=True), torch.ones(5, requires_grad=True)]
    optimizer = DoG(ps, lr=1.0, compile=False)
    for i in range(3):
        for p in ps:
            p.grad = torch.full_like(p, 2.0)
        ps[1].grad = None if i == 2 else ps[1].grad
        optimizer.step()
    assert optimizer.state[ps[0]]["squares"].item() == 4.0 * (7 + 7 + 2)
    # The distance of the second counts still.
    moved = (ps[1] - 1.0).square().sum() + 2 * 2.0**2 * 0.05**2 / 28
    assert optimizer.state[ps[0]]["far"].item() == pytest.approx(moved.item() ** 0.5)


class Sized(Optimizer):
    """Its factor is the sum of all squares of parameters."""

    class Running(NamedTuple):
        total: float = 0.0

    def direction(self, g: Tensor, r: Running):
        return g, r

    def sums(self, g: Tensor, x: Tensor):
        return x * x

    def join(self, r: Running, sums: Any):
        return self.Running(sums)


def test_parameters_that_never_had_a_gradient_count() -> None:
    params = [torch.full((2,), 3.0), torch.full((3,), 2.0), torch.ones(9)]
    value = Sized.pure(lr=0.0)
    _, state = value.step(params[:2], [torch.ones(2), None], value.init(params[:2]))
    ps = [p.clone().requires_grad_(i < 2) for i, p in enumerate(params)]
    optimizer = Sized(ps, lr=0.0, compile=False)
    ps[0].grad = torch.ones(2)
    optimizer.step()
    total = optimizer.state[ps[0]]["total"].item()
    assert total == state.leaves[0].running.total.item() == 2 * 9 + 3 * 4
    assert [*optimizer.state] == ps[:1]


def test_cautious_is_refused_with_sums() -> None:
    with pytest.raises(ValueError, match="DoG: cautious=True with sums: allowed is False"):
        DoG.pure(lr=1.0, cautious=True)
    with pytest.raises(ValueError, match="DoG: cautious=True with sums"):
        DoG([torch.ones(1, requires_grad=True)], lr=1.0, cautious=True)


class One(NamedTuple):
    total: float = 0.0


class Rate(NamedTuple):
    size: float = 0.0


SUMS: dict[str, Any] = {
    "Running": One,
    "direction": lambda self, g, r: (g, r),
    "sums": lambda self, g: g * g,
    "join": lambda self, r, sums: One(r.total + sums),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no join": ({"join": None}, r"has no join: `sums` go with"),
    "no sums": ({"sums": None}, r"has no sums: `sums` go with"),
    "no Running": (
        {"Running": None, "direction": lambda self, g: g},
        r"has no Running: `sums` go with",
    ),
    "means": ({"means": lambda self, mean, g: mean(g)}, r"has means: `sums` go with"),
    "a number": ({"sums": lambda self, g: 2.0}, r"sums returned 2\.0: allowed are tensors"),
    "a scalar": ({"sums": lambda self, g: self.size}, r"sums returned .*allowed are tens"),
    "no element": ({"sums": lambda self, g: g.flip(0)}, r"sums is not elementwise"),
    "tensors": (
        {"join": lambda self, r, sums: sums},
        r"join returned .*allowed is self\.Running\(\.\.\.\) of scalars",
    ),
    "the step": (
        {"join": lambda self, r, sums, t: r},
        r"join takes r, sums, t: allowed are",
    ),
    "an option": (
        {
            "Running": Rate,
            "direction": lambda self, g, r: (g, r),
            "join": lambda self, r, sums: Rate(sums),
        },
        r"Running has a field 'size', which is an option",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sums_that_are_refused(name: str) -> None:
    body, said = REFUSED[name]
    made = {k: x for k, x in {**SUMS, **body}.items() if x is not None}
    with pytest.raises(TypeError, match=said):
        type(
            "Summing",
            (Optimizer,),
            {"__annotations__": {"size": float}, "size": 0.5, **made},
        )
    type("Summing", (Optimizer,), SUMS)
