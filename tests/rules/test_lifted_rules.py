"""Rules of random trees against plain torch in float64, in every way to run them."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap
from trees import TREES, Tree, evaluate, is_defined, written

from optimi_func import adamw
from optimi_func.rules import Optimizer, Wide, maximum, minimum

LR, WIDE, STEPS = 0.5, torch.float64, 3
VALUES = [0.0, 1.0, 0.5, 0.37, 0.9, 1.9, 3.0]
POINTS = [0.0, 1.0, -1.0, 0.5, 2.0, -0.3, 0.75, -2.0, 0.25, 0.0]
GRADS = [1.0, 0.0, -0.5, 2.0, -1.0, 0.3, 0.0, 0.75, -3.0, 0.5]


def of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=WIDE)


def gradient(t: int) -> Tensor:
    return of(GRADS) * (2 - t) + 0.0  # the pipeline makes 0 of -0


def split(x: Tensor) -> list[Tensor]:
    """The elements in parameters of three shapes."""
    return [x[:6], x[6:9].reshape(3, 1), x[9]]


def rule_of(trees: list[Tree]) -> type[Optimizer]:
    """A rule that keeps the value of each tree in a field of its state."""
    fields: Any = [(x, Wide) for x in ("s", *[f"f{i}" for i in range(len(trees))])]

    class Trees(Optimizer):
        a: float = 0.5
        b: float = 0.9
        State = NamedTuple("State", fields)  # type: ignore

        def direction(self, g: Tensor, s: Any, t: float, x: Tensor):
            given = {"g": g, "s": s.s, "t": t, "x": x, "a": self.a, "b": self.b}
            found = [evaluate(tree, given, traced=True) for tree in trees]
            return g, self.State(0.5 * s.s + g, *found)  # type: ignore

    return Trees


# The reference


@contextmanager
def in_double() -> Generator[None]:
    """Plain torch makes float64 of bools and integers."""
    torch.set_default_dtype(WIDE)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def inputs(hyper: dict[str, float], step: int) -> dict[str, Tensor]:
    """Return what a tree is made of at a step."""
    x, s = of(POINTS), torch.zeros_like(of(POINTS))
    for t in range(1, step):
        x, s = x - LR * gradient(t), 0.5 * s + gradient(t)
    scalars = {name: torch.tensor(y, dtype=WIDE) for name, y in hyper.items()}
    t = torch.tensor(float(step), dtype=WIDE)
    return {**scalars, "x": x, "s": s, "g": gradient(step), "t": t}


def expected(tree: Tree, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the values of a tree, and by how much rounding may move them."""
    with in_double():
        values = evaluate(tree, given)
        errors = values.abs() * 1e-13
        for seed in range(2):
            turn = count(seed)
            moved = evaluate(tree, given, lambda: 1e-14 * (-1) ** (next(turn) // 2))  # noqa: B023
            errors = errors + 20 * torch.where(values.isfinite(), moved - values, 0.0).abs()
    return values, errors


def assert_near(tree: Tree, how: str, got: Tensor, want: Tensor, error: Tensor) -> None:
    same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= error)
    # Where rounding decides, as between a large number and infinity, nothing is known.
    same |= error.isnan() | (error > 1e-3 * want.abs()) | (want.abs() > 1e290)
    text = f"{how}: {written(tree)}: {got.tolist()} for {want.tolist()}"
    assert same.all() and got.shape == want.shape, text


# Ways to run a rule


def pure_values(
    cls: type[Optimizer], hyper: dict[str, Any], steps: int, ps: list[Tensor]
) -> list[list[Any]]:
    """The state of each parameter at each step."""
    value, found = cls.pure(lr=LR, **hyper), list[list[Any]]()
    state, shapes = value.init(ps), [p.shape for p in ps]
    for t in range(1, steps + 1):
        sizes = [p.numel() for p in ps]
        parts = gradient(t)[: sum(sizes)].split(sizes)
        gs = [x.reshape(shape) for x, shape in zip(parts, shapes)]
        ps, state = value.step(ps, gs, state)
        found.append([getattr(x, "rule_state", x) for x in state.leaves])
    return found


def class_values(
    cls: type[Optimizer], hyper: dict[str, Any], steps: int, **how: Any
) -> list[list[Any]]:
    ps = [nn.Parameter(p.clone()) for p in split(of(POINTS))]
    optimizer = cls(ps, lr=LR, **hyper, **how)
    found = list[list[Any]]()
    for t in range(1, steps + 1):
        for p, g in zip(ps, split(gradient(t))):
            p.grad = g
        optimizer.step()
        fields = cls.pure(lr=LR).rule.state._fields
        found.append([[optimizer.state[p][x].clone() for x in fields] for p in ps])
    return found


def check_values(
    cls: type[Optimizer], trees: list[Tree], hyper: dict[str, float], compile: bool = False
) -> None:
    """Raise unless all ways to run a rule have the values of plain torch."""
    ps, n = split(of(POINTS)), STEPS
    given = {name: torch.tensor(x, dtype=WIDE) for name, x in hyper.items()}
    two = [torch.stack([given[x], given[x] + 1.0]) for x in "ab"]
    mapped = vmap(lambda a, b: pure_values(cls, {"a": a, "b": b}, n, ps))(*two)
    more = {name: x + 1.0 for name, x in hyper.items()}
    runs: dict[str, tuple[Any, dict[str, float]]] = {
        "pure": (pure_values(cls, hyper, n, ps), hyper),
        "tensors": (pure_values(cls, given, n, ps), hyper),
        "first member": ([[[y[0] for y in x] for x in now] for now in mapped], hyper),
        "second member": ([[[y[1] for y in x] for x in now] for now in mapped], more),
        "class": (class_values(cls, hyper, n, compile=compile), hyper),
    }
    if not compile:
        device: dict[str, Any] = {"compile": False, "capturable": True}
        runs["foreach"] = class_values(cls, hyper, n, foreach=True), hyper
        runs["capturable"] = class_values(cls, given, n, **device), hyper
    for i, tree in enumerate(trees):
        for t in range(1, n + 1):
            wanted = [(x, *expected(tree, inputs(x, t))) for x in (hyper, more)]
            for how, (states, own) in runs.items():
                got = torch.cat([x[i + 1].reshape(-1) for x in states[t - 1]])
                (want,) = [x[1:] for x in wanted if x[0] is own]
                assert_near(tree, how, got, *want)
                shapes = [x[i + 1].shape for x in states[t - 1]]
                assert shapes == [p.shape for p in ps], (how, written(tree))


def slopes(tree: Tree, hyper: dict[str, float], name: str, step: int) -> Tensor:
    """Return derivatives of a tree by finite differences, NaN where it is rough."""
    size, v = 1e-5, list[Tensor]()
    with in_double():
        for k in (-2, -1, 0, 1, 2):
            v.append(evaluate(tree, inputs({**hyper, name: hyper[name] + k * size}, step)))
    near, far = (v[3] - v[1]) / (2 * size), (v[4] - v[0]) / (4 * size)
    kink = 0.1 * (v[3] - 2 * v[2] + v[1]).abs() / size
    rounding = expected(tree, inputs(hyper, step))[1] / size
    smooth = (near - far).abs() + kink + rounding < 1e-4 * (near.abs() + 1.0)
    return near.where(smooth & (near.abs() < 1e6), torch.nan)


def plain_slope(tree: Tree, hyper: dict[str, float], name: str, step: int, i: int) -> float:
    """Return a derivative of plain torch, which is another one in the corner of a clamp."""
    given = {k: x[i] if x.dim() else x for k, x in inputs(hyper, step).items()}
    given[name].requires_grad_()
    with in_double():
        y = evaluate(tree, given) + 0.0 * given[name]
    return torch.autograd.grad(y, given[name])[0].item()


def check_slopes(cls: type[Optimizer], trees: list[Tree], hyper: dict[str, float]) -> int:
    """Raise unless derivatives are those of differences; return how many were compared."""
    step, number = 2, 0
    leaves: dict[str, Any] = {k: torch.tensor(x, dtype=WIDE) for k, x in hyper.items()}
    for x in leaves.values():
        x.requires_grad_()
    # Each element is a parameter: another one's infinity is not its own.
    states = pure_values(cls, leaves, step, list(of(POINTS).split(1)))[-1]
    for i, tree in enumerate(trees):
        wanted = torch.stack([slopes(tree, hyper, name, step) for name in leaves], 1)
        for j, (state, want) in enumerate(zip(states, wanted, strict=True)):
            if want.isnan().all():
                continue
            y = state[i + 1].sum() + 0.0 * sum(leaves.values())
            found = torch.autograd.grad(y, [*leaves.values()], retain_graph=True)
            for name, x, slope in zip(leaves, found, want):
                number += not slope.isnan().item()
                if slope.isnan() or abs(x - slope) <= 1e-3 * (1 + abs(slope)):
                    continue
                plain = plain_slope(tree, hyper, name, step, j)
                text = f"d/d{name} {written(tree)}: {x} for {slope}, {hyper}, {j}"
                alike = math.isclose(x.item(), plain, rel_tol=1e-6)
                # Of a power of a negative base, and of 0 * inf: in the half of a where
                # that is not chosen, or after a division by 0.
                unknown = math.isnan(plain) and (x.isnan().item() or "pow" in text)
                assert alike or unknown, text
    return number


# Programs, each on its own line

PROGRAMS: list[Any] = [
    # Derivatives by an exponent.
    lambda o: o.g * o.t**-o.b,
    lambda o: o.g * torch.pow(o.t, o.b),
    lambda o: o.g * torch.pow(input=o.t, exponent=o.b),
    lambda o: o.g * (o.t + 1) ** o.b,
    lambda o: o.g * o.b**o.b,
    lambda o: o.g * 2**o.b + o.g.abs() ** o.b,
    # 0**0, and other values and derivatives at 0.
    lambda o: o.g * o.a ** (o.t - 1),
    lambda o: o.g * (1 - o.a**o.t),
    lambda o: o.g * o.a**0.5 + o.a.sqrt() + torch.sqrt(o.a) + o.a**0.3,
    lambda o: o.g * o.b + (o.a * o.g).abs() ** 0.3 + (o.a * o.g).abs().sqrt(),
    # Roots and powers of negative numbers.
    lambda o: o.g**-0.5 + o.g**0.5 + o.g.sqrt() + o.g**1.5,
    lambda o: o.g.abs() ** 0.01 + o.g * torch.sqrt(o.t - 2) + (o.t - 2) ** o.b,
    # Numbers of comparisons and integers.
    lambda o: o.g * ((o.t > 0) * 0.9999),
    lambda o: o.g * ((o.t > 0) + (o.t > 1)),
    lambda o: o.g * ((o.t > 0) + (o.g > 1)),
    lambda o: o.g * (1 / o.t.long()) + (o.g > 0) * 0.9999 + 0.1 / o.x.long(),
    lambda o: torch.where(o.g > 0, o.b, 1.0) + torch.where(o.g > 0, 0.9999, 1.0),
    lambda o: o.g * torch.where(o.t > 1, o.b, 0.9999) + torch.where(o.t > 1, o.b, o.g),
    lambda o: torch.where((o.t > 1) & (o.g > 0), 0.1, o.g) + (~(o.t > 1) | (o.g > 0)) * o.g,
    lambda o: torch.where((o.g > 0) ^ (o.t > 1), o.t.long() % 2, o.g.long() // 2) + o.g,
    lambda o: o.g * torch.exp(o.t > 1) + torch.sqrt(o.t.long()) + torch.exp(o.g > 0),
    # Integer division and remainder.
    lambda o: (
        o.g * (o.t // (o.b + 0.25) + 5 % (o.b + 0.4) + o.t % 2) + o.g % 0.5 + o.g // 0.5
    ),
    # Keywords.
    lambda o: (
        o.s.add(o.g, alpha=1 - o.b) + o.s.sub(o.g, alpha=o.b) + torch.add(o.s, o.g, alpha=2)
    ),
    lambda o: o.s.addcmul(o.g, o.x, value=o.b) + torch.addcdiv(o.s, o.g, o.x, value=-o.b),
    lambda o: o.s.addcmul(o.g, o.x, value=0.5) + o.g.clamp(min=o.s) + o.g.clamp(max=0.25),
    lambda o: (
        o.g.clamp(min=-o.b, max=0.5) + o.g.clamp(-0.5, o.b) + torch.clamp(o.g, min=0.1)
    ),
    lambda o: (
        +o.g + torch.lerp(o.s, o.g, o.b) + o.t.clamp(0, o.b) * torch.lerp(o.g, o.s, 0.25)
    ),
    lambda o: torch.lerp(o.s, o.g, o.a.long()) + o.s.lerp(o.g, weight=(o.b > 0.2) + 1),
    lambda o: o.g.where(o.s > o.g, o.b) + torch.nan_to_num(o.g / o.x, nan=0.5, posinf=2.0),
    # Of two tensors, two scalars, one of each, and numbers.
    lambda o: (
        maximum(o.g, o.b + 0.07) * minimum(o.a - 0.07, o.g)
        + minimum(o.s, maximum(o.g, o.x))
    ),
    lambda o: torch.maximum(o.g, o.b) * torch.minimum(o.a, o.s) + torch.atan2(o.b, o.g),
    lambda o: (
        o.g * maximum(0.25, o.t - 1.5) * minimum(o.b, o.t) + maximum(2, minimum(3, o.s))
    ),
]


@pytest.mark.parametrize("a", [0.0, 0.5])
def test_programs_are_those_of_plain_torch(a: float) -> None:
    cls, hyper = rule_of(PROGRAMS), {"a": a, "b": 0.3}
    check_values(cls, PROGRAMS, hyper)
    check_slopes(cls, PROGRAMS, hyper)


@pytest.mark.full
def test_compiled_programs() -> None:
    some = PROGRAMS[::3]
    check_values(rule_of(some), some, {"a": 0.0, "b": 0.3}, compile=True)


def test_derivatives_of_roots_and_powers_at_0_are_finite() -> None:
    """Plain torch has 0 * inf there."""
    for fn in (
        lambda o: torch.sqrt(o.a * o.g),
        lambda o: (o.a * o.g) ** 0.5,
        lambda o: (o.a * o.g) ** 0.3,
        lambda o: (o.a * o.g) ** (o.b * 0.5),
        lambda o: o.g * (o.a * o.t) ** 0.3,
        lambda o: o.g * torch.sqrt(o.a),
    ):
        a = torch.tensor(0.0, dtype=WIDE, requires_grad=True)
        ((state,),) = pure_values(rule_of([fn]), {"a": a, "b": 0.5}, 1, [of([1.0])])
        assert state[1].item() == 0.0
        assert torch.autograd.grad(state[1].sum(), a)[0].item() == 0.0
        # Of a member, too, whose own requires_grad is False.
        slope = grad(
            lambda x, cls: vmap(
                lambda y: pure_values(cls, {"a": y, "b": 0.5}, 1, [of([1.0])])[0][0][1]
            )(x).sum()
        )(torch.zeros(2, dtype=WIDE), rule_of([fn]))
        assert slope.tolist() == [0.0, 0.0]


def test_second_derivatives_by_a_beta_of_0() -> None:
    def after(beta: Tensor) -> Tensor:
        value, p = adamw(lr=0.1, betas=(beta, 0.9)), of([1.0, -0.5])
        state = value.init(p)
        for _ in range(3):
            p, state = value.step(p, p.clone(), state)
        return p.square().sum()

    zero, small = torch.zeros((), dtype=WIDE), torch.tensor(1e-6, dtype=WIDE)
    about = (grad(after)(small) - grad(after)(zero)) / small
    torch.testing.assert_close(grad(grad(after))(zero), about, rtol=1e-4, atol=1e-6)


def test_steps_of_float32_stay_in_float32() -> None:
    """Hyperparameters in float64 widen nothing; elsewhere foreach could not write it."""
    trees: list[Any] = [
        lambda o: torch.where(o.g > 0, o.a, o.b),
        lambda o: (o.g > 0) * o.a,
        lambda o: torch.lerp(o.s, o.g, o.a),
        lambda o: o.g * o.a,
    ]
    given = {name: torch.tensor(0.3, dtype=WIDE) for name in "ab"}
    cls = rule_of(trees)
    value = cls.pure(lr=0.1, **given)
    g = [torch.ones(3), torch.ones(())]
    s = value.rule.state(*[torch.zeros(3)] * 5)
    c = value.rule.coeffs(1.0, **value.numbers)
    new = value.rule.direction(g[0], s, c, g[0]).state
    assert {x.dtype for x in new} == {torch.float32}


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda g: g.fill_(1.0), "writes in place"),
        (lambda g: g.shape[0], "reads .shape"),
        (lambda g: g if g > 0 else -g, "decides by the value"),
        (lambda g: g.unknown(), "cannot be traced: .* no attribute 'unknown'"),
        (lambda g: (g > 0) - (g > 1), "cannot be traced: Subtraction"),
        (lambda g: torch.maximum(g, 0.5), "cannot be traced: maximum"),  # type: ignore
        (lambda g: g * float(g), "cannot be traced"),
        (lambda g: g / g.norm(), "norm has another shape"),
        (lambda g: g * [1.0][1], "cannot be traced"),
    ],
)
def test_errors_name_the_line(write: Any, text: str) -> None:
    def direction(self: Any, g: Tensor) -> Any:
        d = g + 1
        return write(d)

    with pytest.raises(TypeError, match=text) as raised:
        type("Wrong", (Optimizer,), {"direction": direction})
    line = write.__code__.co_firstlineno
    assert f"Wrong.direction ({__file__}:{line})" in str(raised.value)


HYPER = st.fixed_dictionaries({"a": st.sampled_from(VALUES), "b": st.sampled_from(VALUES)})
SOME = st.lists(TREES.filter(is_defined), min_size=8, max_size=8)
HOW: dict[str, Any] = {"suppress_health_check": [*HealthCheck]}


@settings(max_examples=25, phases=[Phase.generate], **HOW)
@given(SOME, HYPER)
def test_random_rules_are_those_of_plain_torch(
    trees: list[Tree], hyper: dict[str, float]
) -> None:
    cls = rule_of(trees)
    check_values(cls, trees, hyper)
    check_slopes(cls, trees, hyper)


@pytest.mark.night
@settings(max_examples=150, **HOW)
@given(SOME, HYPER)
def test_many_random_rules_are_those_of_plain_torch(
    trees: list[Tree], hyper: dict[str, float]
) -> None:
    cls = rule_of(trees)
    check_values(cls, trees, hyper)
    check_slopes(cls, trees, hyper)


@pytest.mark.full
@settings(max_examples=2, phases=[Phase.generate], **HOW)
@given(SOME, HYPER)
def test_compiled_random_rules(trees: list[Tree], hyper: dict[str, float]) -> None:
    check_values(rule_of(trees), trees, hyper, compile=True)
