"""Users' rules whose direction reads means over the parameter: `measure`."""

from typing import Any, NamedTuple

import pytest
import torch
from own_rules import LARS
from tiers import row
from torch import Tensor

from optimi_func import compiled, population, prepare_for_gradient_release
from optimi_func.rules import Optimizer


class Shifted(Optimizer):
    """Steps by the mean of the gradient, times the number of elements."""

    factor: float = 1.0

    def measure(self, mean: Any, numel: Tensor, g: Tensor):
        return {"total": self.factor * mean(g) * numel}

    def direction(self, g: Tensor, total: Tensor):
        return 0.0 * g + total


@pytest.mark.parametrize("how", [{"compile": False}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7,), ()], ids=str)
def test_numbers_are_those_of_the_whole_parameter(how: Any, shape: Any) -> None:
    ps = [torch.zeros(shape, requires_grad=True), torch.zeros(2, requires_grad=True)]
    optimizer = Shifted(ps, lr=1.0, factor=2.0, **how)
    for p in ps:
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p in ps:
        assert p.grad is not None
        want = torch.full_like(p, -2.0 * p.grad.sum().item())
        torch.testing.assert_close(p.detach(), want)


def test_slices_of_a_large_parameter_know_the_whole() -> None:
    p = torch.zeros(1_000_000, requires_grad=True)
    optimizer = Shifted([p], lr=1.0, compile=False)
    p.grad = torch.linspace(-1.0, 1.5, p.numel())
    optimizer.step()
    torch.testing.assert_close(p[:2].detach(), torch.full((2,), -0.25e6))
    assert torch.equal(p, p[:1].expand_as(p))


class Twice(Shifted):
    """Steps by the mean of d, which is that of g over its norm, and of x."""

    def direction(self, g: Tensor, x: Tensor, total: Tensor):
        return g / total + x

    def means(self, mean: Any, d: Tensor):
        return mean(d)


@pytest.mark.parametrize("n", [5, 1_000_000])
@pytest.mark.parametrize(
    "how",
    [
        row({"compile": False}, id="eager"),
        row({"foreach": True}, id="foreach"),
        row({"compile": True}, id="kernels", tier="full"),
    ],
)
def test_means_before_and_after_the_direction(n: int, how: Any) -> None:
    p = torch.linspace(1.0, 2.0, n, dtype=torch.float64, requires_grad=True)
    g = torch.linspace(3.0, 5.0, n, dtype=torch.float64)
    x = p.detach().clone()
    d = g / g.sum() + x
    want = x - 0.1 * (d / d.mean() + 0.5 * x)
    short = p[:3].detach().clone().requires_grad_()
    optimizer = Twice([p, short], lr=0.1, weight_decay=0.5, **how)
    p.grad, short.grad = g, g[:3].clone()
    optimizer.step()
    torch.testing.assert_close(p.detach(), want, rtol=1e-12, atol=0.0)
    d = g[:3] / g[:3].sum() + x[:3]
    want = x[:3] - 0.1 * (d / d.mean() + 0.5 * x[:3])
    torch.testing.assert_close(short.detach(), want, rtol=1e-12, atol=0.0)


@pytest.mark.full
def test_means_before_and_after_the_direction_are_three_kernels(graphs: Any) -> None:
    for n in (5, 70_000):
        trees = [torch.linspace(1.0, 2.0, n + i) for i in range(3)]
        grads = [torch.linspace(3.0, 5.0, n + i) for i in range(3)]
        value = Twice.pure(lr=0.1, weight_decay=0.5)
        found, _ = compiled.step(value, trees, grads, value.init(trees))
        want, _ = value.step(trees, grads, value.init(trees))
        torch.testing.assert_close(found, want, rtol=1e-6, atol=0.0)
    assert graphs() == 3  # two measure, and one moves


def test_release_accumulates_and_members_are_measured_apart() -> None:
    p = torch.zeros(4, requires_grad=True)
    model = torch.nn.ParameterList([p])
    optimizer = Shifted(model.parameters(), lr=1.0, gradient_release=True, compile=False)
    how: Any = {"accumulation": "buffer", "accumulation_steps": 2}
    prepare_for_gradient_release(model, optimizer, **how)
    for i in (1.0, 2.0):
        (i * model[0]).sum().backward()
    assert model[0].tolist() == [-12.0] * 4
    hyper = {"factor": torch.tensor([1.0, 2.0])}
    members = population.init(
        Shifted.pure, {"w": torch.zeros(4)}, {"lr": torch.ones(2), **hyper}, n=2
    )
    members = population.step(
        Shifted.pure, members, {"w": torch.tensor([1.0, 3.0])[:, None].expand(2, 4)}
    )
    assert members.params["w"][:, 0].tolist() == [-4.0, -24.0]


def test_parts_of_a_gradient_are_measured_by_themselves() -> None:
    class Summed(LARS):
        def accumulate(self, g: Tensor, s: Any, x: Tensor, ratio: Tensor):
            return self.direction(g, s, x, ratio)

    w = torch.nn.ParameterList([torch.full((3,), 2.0)])
    hyper: Any = {"lr": 1.0, "momentum": 1.0, "trust": 1.0, "l2": 0.0}
    optimizer = Summed(w, **hyper, gradient_release=True, compile=False)
    how: Any = {"accumulation": "states", "accumulation_steps": 2}
    prepare_for_gradient_release(w, optimizer, **how)
    for i in (1.0, -3.0):  # halves of each; the ratio does not depend on their sizes
        (i * w[0]).sum().backward()
    torch.testing.assert_close(w[0].detach(), torch.full((3,), 2.0))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "whole": (
        {"whole": lambda self, d: d},
        r"has measure and whole: allowed is one of both",
    ),
    "no mean": ({"measure": lambda self, g: {"total": g}}, r"measure\(g\) returned"),
    "a tensor": (
        {"measure": lambda self, mean, g: {"total": mean(g) * g}},
        r"g is not known in this method \(means are taken at once",
    ),
    "a mean of a mean": (
        {"measure": lambda self, mean, g: {"total": mean(g - mean(g))}},
        r"means are taken at once",
    ),
    "a number": (
        {"measure": lambda self, mean, g: {"total": (mean(g), self.factor)[1]}},
        r"returned .*allowed is a dict of numbers that are computed of means",
    ),
    "no dict": ({"measure": lambda self, mean, g: mean(g)}, r"allowed is a dict of num"),
    "an argument": (
        {
            "measure": lambda self, mean, g: {"t": mean(g)},
            "direction": lambda self, g, t: g,
        },
        r"measure returned 't', which is an argument of methods or an option",
    ),
    "no elements": (
        {"measure": lambda self, mean, g: {"total": mean(g.flip(0))}},
        r"measure is not elementwise",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_measures_that_are_refused(name: str) -> None:
    body, said = REFUSED[name]
    with pytest.raises(TypeError, match=said):
        type("Wrong", (Shifted,), body)


def test_cautious_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cautious=True with measure: allowed is False"):
        Shifted.pure(lr=1.0, cautious=True)


class Named(NamedTuple):
    total: Any


def test_numbers_in_a_tuple_with_names() -> None:
    body = {"measure": lambda self, mean, g: Named(mean(g))}
    value: Any = type("InTuple", (Shifted,), body).pure(lr=1.0)
    p = torch.zeros(2)
    moved, _ = value.step(p, torch.tensor([1.0, 2.0]), value.init(p))
    assert moved.tolist() == [-1.5, -1.5]
