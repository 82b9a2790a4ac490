"""Coefficients of a rule in numbers: each operation means what it means in torch.

The class computes them in plain Python, where a step count that is on the device makes
tensors of them. At the boundary of a comparison the two must not differ.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from optimi_func.rules import Optimizer, Wide

# From numbers t, the step from 1 on, and a = 2, that a rule computes with.
COMPARED = [operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne]
CHOICES: dict[str, tuple[Callable[..., Any], Callable[..., float]]] = {
    op.__name__: (
        lambda t, a, op=op: torch.where(op(t, a), 3.0, 0.25),
        lambda t, a, op=op: 3.0 if op(t, a) else 0.25,
    )
    for op in COMPARED
}
CHOICES |= {
    f"{op.__name__} of numbers in turn": (
        lambda t, a, op=op: torch.where(op(a, t), a, t * t),
        lambda t, a, op=op: a if op(a, t) else t * t,
    )
    for op in COMPARED
}
CHOICES |= {
    "and": (
        lambda t, a: torch.where((t >= a) & (t < 4.0), 5.0, 0.5),
        lambda t, a: 5.0 if t >= a and t < 4.0 else 0.5,
    ),
    "or": (
        lambda t, a: torch.where((t < a) | (t == 4.0), 5.0, 0.5),
        lambda t, a: 5.0 if t < a or t == 4.0 else 0.5,
    ),
    "xor": (
        lambda t, a: torch.where((t <= a) ^ (t >= a), 5.0, 0.5),
        lambda t, a: 5.0 if (t <= a) != (t >= a) else 0.5,
    ),
}
ARITHMETIC: dict[str, tuple[Callable[..., Any], Callable[..., float]]] = {
    "add": (lambda t, a: t + a, lambda t, a: t + a),
    "sub": (lambda t, a: a - t, lambda t, a: a - t),
    "mul": (lambda t, a: t * a, lambda t, a: t * a),
    "div": (lambda t, a: a / t, lambda t, a: a / t),
    "neg": (lambda t, a: -t + a, lambda t, a: a - t),
    "pow": (lambda t, a: a**-t, lambda t, a: a**-t),
    "pow of t": (lambda t, a: (t + a) ** 0.37, lambda t, a: (t + a) ** 0.37),
    "mod": (lambda t, a: t % a + 0.5, lambda t, a: t % a + 0.5),
    "mod of a negative": (lambda t, a: (-t) % 3.0 + a, lambda t, a: (-t) % 3.0 + a),
    "floordiv": (lambda t, a: t // a + 0.5, lambda t, a: t // a + 0.5),
    "sqrt": (lambda t, a: torch.sqrt(t + a), lambda t, a: math.sqrt(t + a)),
    "clamp": (lambda t, a: torch.clamp(t, a, 3.0), lambda t, a: min(max(t, a), 3.0)),
    "minimum": (lambda t, a: torch.minimum(t, a), min),
    "maximum": (lambda t, a: torch.maximum(t, a), max),
    "lerp": (lambda t, a: torch.lerp(t, a, 0.3), lambda t, a: t + 0.3 * (a - t)),
    "exp and log": (
        lambda t, a: torch.exp(-t) + torch.log(t + a),
        lambda t, a: math.exp(-t) + math.log(t + a),
    ),
}
EXPRESSIONS = CHOICES | ARITHMETIC


def rule_of(expression: Callable[..., Any]) -> type[Optimizer]:
    """A rule whose step and state are the gradient times a coefficient."""

    class Scaled(Optimizer):
        a: float = 2.0

        class State(NamedTuple):
            last: Wide

        def direction(self, g: Tensor, s: Any, t: float):
            factor = expression(t, self.a)
            return factor * g, self.State(s.last + factor * g)

    return Scaled


WAYS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "foreach": {"foreach": True},
    "capturable": {"compile": False, "capturable": True},
    "a tensor as hyperparameter": {"compile": False, "a": torch.tensor(2.0)},
}


@pytest.mark.parametrize("way", [*WAYS, "pure", "a scheduled hyperparameter"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_coefficient_is_what_it_says_at_each_step(name: str, way: str) -> None:
    expression, known = EXPRESSIONS[name]
    cls, start = rule_of(expression), torch.linspace(-1.0, 1.0, 4, dtype=torch.float64)
    g = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    x, p = start.clone(), nn.Parameter(start.clone())
    if way in WAYS:
        optimizer = cls([p], lr=1.0, **WAYS[way])
    else:
        given: Any = {"a": lambda step: 2.0} if "scheduled" in way else {}
        value = cls.pure(lr=1.0, **given)
        tree, state = start.clone(), value.init(start)
    for t in range(1, 6):
        x = x - known(float(t), 2.0) * g
        if way in WAYS:
            p.grad = g.clone()
            optimizer.step()
            got = p.detach()
        else:
            tree, state = value.step(tree, g, state)
            got = tree
        torch.testing.assert_close(got, x, rtol=1e-13, atol=1e-13, msg=f"step {t}")


def test_a_number_and_a_tensor_divide_alike() -> None:
    """torch multiplies a number by the reciprocal, which rounds twice."""

    class Quotient(Optimizer):
        scale: float = 0.3

        def direction(self, g: Tensor) -> Tensor:
            return self.scale / (1.0 + g.abs())

    p, g = torch.randn(2, 1000, dtype=torch.float64)
    ends = []
    for scale in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        optimizer = Quotient.pure(lr=0.5, scale=scale)
        ends.append(optimizer.step(p, g, optimizer.init(p))[0])
    assert torch.equal(*ends)
