"""Optimizers that the package does not have, made by the class body of their update."""

import copy
import dataclasses
import gc
import inspect
import math
import pickle
import random
import weakref
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from forked import run_script
from sophia import Sophia
from torch import Tensor, nn

import optimi_func
from optimi_func import (
    Mixed,
    adamw,
    compiled,
    population,
    testing,
)
from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.runtime import runtime
from optimi_func.rules import Optimizer, SecondMoment, Wide, check_number

# Rules


class SignSGD(Optimizer):
    """Bernstein et al. 2018, arXiv:1802.04434."""

    momentum: float = 0.9

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State):
        m = self.momentum * s.exp_avg + (1 - self.momentum) * g
        return m.sign(), self.State(m)

    def accumulate(self, g: Tensor, s: State):
        m = s.exp_avg + (1 - self.momentum) * g
        return m.sign(), self.State(m)

    def check(self) -> None:
        check_number("momentum", "momentum", self.momentum, below=1.0)


class AdaBelief(Optimizer):
    """Zhuang et al. 2020, arXiv:2010.07468."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    class Plain(NamedTuple):
        exp_avg: Tensor
        exp_avg_var: SecondMoment

    class Largest(NamedTuple):
        exp_avg: Tensor
        exp_avg_var: SecondMoment
        largest: Wide

    @property
    def State(self) -> Any:
        return self.Largest if self.amsgrad else self.Plain

    def direction(self, g: Tensor, s: Any, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_var + (1 - b2) * (g - m).square() + self.eps
        new = (m, v, torch.maximum(s.largest, v)) if self.amsgrad else (m, v)
        d = m / (1 - b1**t) / ((new[-1] / (1 - b2**t)).sqrt() + self.eps)
        return d, self.State(*new)


class Orthogonal(Optimizer, decay="l2"):
    """A matrix's momentum with all its singular values nearer to 1."""

    momentum: float = 0.9
    steps: int = 5

    class State(NamedTuple):
        buffer: Tensor

    def direction(self, g: Tensor, s: State):
        b = self.momentum * s.buffer + g
        return b, self.State(b)

    def whole(self, d: Tensor) -> Tensor:
        x = d / d.norm().clamp_min(1e-7)
        for _ in range(self.steps):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        return self.momentum * x


# Their loops


def sign_sgd(params: Any, grads: Any, lr: float, momentum: float) -> Any:
    for i, p in enumerate(params):
        m = 0 * p
        for step in grads:
            m = momentum * m + (1 - momentum) * step[i]
            p = p - lr * m.sign()
        params[i] = p
    return params


def adabelief(params: Any, grads: Any, lr: float, amsgrad: bool = False) -> Any:
    for i, p in enumerate(params):
        m, v, top = 0 * p, 0 * p, 0 * p
        for t, step in enumerate(grads, 1):
            m = 0.9 * m + 0.1 * step[i]
            v = 0.999 * v + 0.001 * (step[i] - m) ** 2 + 1e-8
            top = torch.maximum(top, v) if amsgrad else v
            p = p - lr * m / (1 - 0.9**t) / ((top / (1 - 0.999**t)).sqrt() + 1e-8)
        params[i] = p
    return params


def orthogonal(params: Any, grads: Any, lr: float) -> Any:
    for i, p in enumerate(params):
        b = 0 * p
        for step in grads:
            b = 0.9 * b + step[i]
            x = b / b.norm()
            for _ in range(5):
                x = 1.5 * x - 0.5 * x @ x.mT @ x
            p = p - lr * 0.9 * x
        params[i] = p
    return params


ROWS = [
    (SignSGD, sign_sgd, {"momentum": 0.8}),
    (AdaBelief, adabelief, {}),
    (AdaBelief, adabelief, {"amsgrad": True}),
    (Orthogonal, orthogonal, {}),
]


@pytest.mark.parametrize(
    ("cls", "loop", "hyper"), ROWS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_a_class_body_is_its_loop_in_every_way_to_run_it(
    cls: Any, loop: Any, hyper: Any, small: None
) -> None:
    testing.check_rule(cls, loop, compile=False, steps=6, **hyper)


STEPS = 6
SHARED: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = (5, 4), (3, 4)
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in shapes]


def gradients(dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        [
            torch.randn(p.shape, generator=random, dtype=torch.float64).to(dtype)
            for p in start()
        ]
        for _ in range(STEPS)
    ]


def stepped(
    cls: type[Optimizer], dtype: torch.dtype = torch.float64, **how: Any
) -> list[Tensor]:
    """The parameters after steps of the class."""
    ps = [nn.Parameter(p) for p in start(dtype)]
    optimizer = cls(ps, **SHARED, **how)
    for gs in gradients(dtype):
        for p, g in zip(ps, gs):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in ps]


def assert_close(got: Any, want: Any, rtol: float = 1e-12) -> None:
    for x, y, z in zip(got, want, start(), strict=True):
        torch.testing.assert_close(x.double() - z, y.double() - z, rtol=rtol, atol=rtol)


@pytest.mark.full
@pytest.mark.parametrize("cls", [SignSGD, AdaBelief, Orthogonal])
def test_the_pure_step_is_traced_and_has_kernels(cls: type[Optimizer]) -> None:
    value, want = cls.pure(**SHARED), stepped(cls, compile=False)
    traced = torch.compile(value.step, fullgraph=True, backend="eager")
    for step in traced, partial(compiled.step, value):
        ps, state = start(), value.init(start())
        for gs in gradients():
            ps, state = step(ps, gs, state)
        assert_close(ps, want)


def test_a_static_option_chooses_a_rule() -> None:
    largest, last = (stepped(AdaBelief, amsgrad=x, compile=False) for x in (True, False))
    assert not torch.equal(largest[0], last[0])
    value = AdaBelief.pure(lr=0.1, amsgrad=True)
    assert value.init(start()).leaves[0].largest.dtype == torch.float64
    assert value.rule.state._fields == ("exp_avg", "exp_avg_var", "largest")
    assert AdaBelief.pure(lr=0.1).rule is AdaBelief.pure(lr=0.2, eps=1e-6).rule


def test_fields_are_stored_as_annotated() -> None:
    half = [torch.ones(2, dtype=torch.float16)]
    leaf = AdaBelief.pure(lr=0.1, amsgrad=True).init(half).leaves[0]
    dtypes = leaf.exp_avg.dtype, leaf.exp_avg_var.dtype, leaf.largest.dtype
    assert dtypes == (torch.float16, torch.float32, torch.float32)
    many = [torch.ones(1 << 14, dtype=torch.bfloat16)]
    leaf = AdaBelief.pure(lr=0.1, amsgrad=True).init(many, storage="compact").leaves[0]
    assert isinstance(leaf.largest, Tensor)
    assert not isinstance(leaf.exp_avg, Tensor) and not isinstance(leaf.exp_avg_var, Tensor)
    # No warning of a beta for a moment that is not in bfloat16.
    low = torch.ones(2, dtype=torch.bfloat16)
    value = Wider.pure(lr=0.1)
    value.step(low, low.clone(), value.init(low))


class Wider(Optimizer):
    betas: tuple[float, float] = (0.9, 0.999)

    class State(NamedTuple):
        m: Tensor
        v: Wide

    def direction(self, g: Tensor, s: State):
        b1, b2 = self.betas
        return g, self.State(b1 * s.m + (1 - b1) * g, b2 * s.v + (1 - b2) * g * g)


# Gradient release


# Saving


@pytest.mark.parametrize("cls", [SignSGD, AdaBelief, Orthogonal])
def test_copies_go_on_and_values_are_pickled(cls: type[Optimizer]) -> None:
    def run(ps: list[Any], optimizer: Any, some: Any) -> Any:
        for gs in some:
            for p, g in zip(ps, gs):
                p.grad = g
            optimizer.step()
        return optimizer

    ps: list[Any] = [nn.Parameter(p) for p in start()]
    how: dict[str, Any] = {**SHARED, "compile": False}
    named = [("a", ps[0]), ("b", ps[1])]
    first = run(ps, cls(named, **how), gradients()[:3])
    copies = [copy.deepcopy((ps, first)), pickle.loads(pickle.dumps((ps, first)))]
    run(ps, first, gradients()[3:])
    for others, optimizer in copies:
        run(others, optimizer, gradients()[3:])
        for x, y in zip(ps, others, strict=True):
            assert torch.equal(x, y)
    value, tree = first.functional()
    assert value == cls.pure(**SHARED)
    assert pickle.loads(pickle.dumps(value)).rule is value.rule
    stored = pickle.loads(pickle.dumps(tree))
    assert type(stored.leaves["a"].rule_state) is value.rule.state


SCRIPT = """
import sys
from typing import NamedTuple
import torch
from torch import Tensor
from optimi_func.rules import Optimizer

class Mine(Optimizer):
    class State(NamedTuple):
        m: Tensor

    def direction(self, g: Tensor, s: State):
        m = 0.9 * s.m + g
        return m, self.State(m)

p = torch.nn.Parameter(torch.ones(3))
optimizer = Mine([p], lr=0.1, compile=False)
if len(sys.argv) > 2:
    p.data, state = torch.load(sys.argv[1], weights_only=True)
    optimizer.load_state_dict(state)
for _ in range(2):
    p.grad = 2 * p.detach()
    optimizer.step()
torch.save((p.data, optimizer.state_dict()), sys.argv[1])
print(p.tolist(), Mine.pure(lr=0.1).rule.digest)
"""


@pytest.mark.full
def test_a_class_of_main_in_two_processes(tmp_path: Any) -> None:
    script, file = tmp_path / "mine.py", str(tmp_path / "state.pt")
    script.write_text(SCRIPT)
    first = run_script(script, file)
    second = run_script(script, file, "resume")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    p, m = 1.0, 0.0
    for _ in range(4):
        m = 0.9 * m + 2 * p
        p -= 0.1 * m
    numbers, digest = second.stdout.split("] ")
    assert [float(x) for x in numbers[1:].split(",")] == pytest.approx([p] * 3)
    assert first.stdout.split("] ")[1] == digest


# Transforms, populations, derivatives


def test_extras_are_given_to_the_pure_step() -> None:
    p, g, h = start(), gradients()[0], [x.abs() for x in start()]
    value = Sophia.pure(lr=0.1)
    got, _ = value.step(p, g, value.init(p), hessian=h)
    for x, y, z, w in zip(got, p, g, h, strict=True):
        want = y - 0.1 * (0.04 * z / (0.04 * w)).clamp(-1, 1)
        torch.testing.assert_close(x, want)
    same, _ = value.step(p, g, value.init(p), hessian=torch.tensor(0.5))
    assert not torch.equal(same[0], got[0])
    # Members with a Hessian of their own, and one for all.
    hyper = {"lr": torch.tensor([0.1, 0.2])}
    members = population.init(Sophia.pure, p, hyper, n=2)
    twice = [torch.stack([x, x]) for x in g]
    own = [torch.stack([x, 2 * x]) for x in h]
    found = population.step(Sophia.pure, members, twice, hessian=own).params
    shared = population.step(Sophia.pure, members, twice, hessian=torch.tensor(0.5)).params
    for i, (lr, factor) in enumerate([(0.1, 1), (0.2, 2)]):
        one = Sophia.pure(lr=lr)
        for many, given in (
            (found, [factor * x for x in h]),
            (shared, torch.tensor(0.5)),
        ):
            alone, _ = one.step(p, g, one.init(p), hessian=given)
            for x, y in zip(many, alone, strict=True):
                torch.testing.assert_close(x[i], y)


# The package's own


# What is defined again


def defined(scale: float) -> type[Optimizer]:
    class Scaled(Optimizer):
        class State(NamedTuple):
            m: Tensor

        def direction(self, g: Tensor, s: State):
            m = 0.9 * s.m + g * scale
            return m, self.State(m)

    return Scaled


def test_a_digest_is_of_the_graph() -> None:
    one, again, other = defined(1.5), defined(1.5), defined(2.5)
    assert one.pure(lr=0.1).rule.digest == again.pure(lr=0.1).rule.digest
    assert one.pure(lr=0.1).rule.digest != other.pure(lr=0.1).rule.digest
    assert optimi_func.adamw(lr=0.1).rule.digest == optimi_func.adam(lr=1.0).rule.digest
    p = torch.ones(2)
    moved = [c.pure(lr=0.1).step(p, p, c.pure(lr=0.1).init(p))[0][0] for c in (one, other)]
    assert moved == pytest.approx([0.85, 0.75])
    # States are those of the class that was defined last.
    assert type(again.pure(lr=0.1).init(p).leaves.rule_state) is again.State  # type: ignore


@pytest.mark.full
def test_kernels_are_kept_by_digest() -> None:
    def run(scale: float) -> Tensor:
        p = nn.Parameter(torch.ones(64))
        optimizer = defined(scale)([p], lr=0.1, compile=True)
        p.grad = torch.ones(64)
        optimizer.step()
        return p.detach()

    assert run(1.5)[0].item() == pytest.approx(0.85)
    count = len(runtime.kernels)
    for _ in range(3):
        assert run(1.5)[0].item() == pytest.approx(0.85)
    assert len(runtime.kernels) == count
    assert run(2.5)[0].item() == pytest.approx(0.75)
    assert len(runtime.kernels) == count + 1


def test_a_class_that_is_defined_again_is_freed() -> None:
    def use() -> list[Any]:
        cls = defined(random.random())
        p = nn.Parameter(torch.ones(3))
        for optimizer in (
            cls([p], lr=0.1, compile=False),
            Mixed([("p", p)], ("p", cls.pure(lr=0.1)), compile=False),
        ):
            p.grad = torch.ones(3)
            optimizer.step()
        return [weakref.ref(cls), weakref.ref(cls.pure(lr=0.1).rule)]

    found = [use() for _ in range(3)]
    gc.collect()
    assert [x() for refs in found for x in refs] == [None] * 6


def test_mixed_tells_rules_by_their_classes() -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    parts = ("a.*", SignSGD.pure(lr=0.1)), ("b.weight", Orthogonal.pure(lr=0.2))
    optimizer = Mixed(net.named_parameters(), *parts, rest=adamw(lr=0.3), compile=False)
    rules = [group["rule"] for group in optimizer.param_groups]
    assert rules == ["SignSGD", "Orthogonal", "adamw"]
    net["b"](net["a"](torch.ones(2, 3))).sum().backward()
    optimizer.step()
    copied = Mixed(net.named_parameters(), *parts, rest=adamw(lr=0.3), compile=False)
    copied.load_state_dict(optimizer.state_dict())
    same = defined(1.0).pure(lr=0.1), defined(2.0).pure(lr=0.1)
    with pytest.raises(ValueError, match="two optimizers called 'Scaled'"):
        Mixed(net.named_parameters(), ("a.*", same[0]), rest=same[1])


# The constructor


def test_the_constructor_is_made_of_the_fields() -> None:
    names = list(inspect.signature(SignSGD).parameters)
    assert names[:4] == ["params", "lr", "momentum", "weight_decay"]
    p = nn.Parameter(torch.ones(2))
    optimizer = SignSGD([p], 0.1, 0.8, maximize=True)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["maximize"]) == (0.1, 0.8, True)
    assert not hasattr(optimizer, "momentum") and not hasattr(optimizer, "maximize")
    assert isinstance(optimizer, torch.optim.Optimizer) and SignSGD.factory is SignSGD.pure
    assert repr(SignSGD.pure(lr=0.1, momentum=0.8)) == "SignSGD.pure(lr=0.1, momentum=0.8)"
    with pytest.raises(TypeError, match=r"which lacks \['weight_decay', 'momentum'\]"):
        type("Lacking", (BaseOptimizer,), {"factory": SignSGD.pure})


class Nesterov(SignSGD):
    """A subclass has the fields of its base, and changes a default."""

    ahead: float = 0.5
    weight_decay: float = 0.3

    def direction(self, g: Tensor, s: Any):
        m, new = super().direction(g, s)
        return self.look(m, g), new

    def look(self, m: Tensor, g: Tensor) -> Tensor:
        return m + self.ahead * g


def test_a_subclass_inherits_fields_and_methods() -> None:
    names = list(inspect.signature(Nesterov).parameters)
    assert {*names[:5]} == {"params", "lr", "momentum", "weight_decay", "ahead"}
    p = torch.ones(2)
    value = Nesterov.pure(lr=0.1, ahead=2.0)
    assert value.weight_decay == 0.3
    moved = value.step(p, p, value.init(p))[0]
    torch.testing.assert_close(moved, p - 0.1 * (1 + 2.0) - 0.1 * 0.3)
    group = Nesterov([nn.Parameter(p)], lr=0.1).param_groups[0]
    assert (group["weight_decay"], group["ahead"]) == (0.3, 0.5)


def test_a_value_keeps_its_rule_through_copies() -> None:
    value = SignSGD.pure(lr=0.1, momentum=0.8)
    for again in (copy.copy(value), copy.deepcopy(value), dataclasses.replace(value)):
        assert again == value and hash(again) == hash(value)
        assert again.rule is value.rule and again.numbers == {"momentum": 0.8}
    other = value.with_lr(0.2)
    assert (other.lr, other.rule, other.numbers) == (0.2, value.rule, value.numbers)
    assert dataclasses.replace(value, momentum=0.7).numbers == {"momentum": 0.7}


def test_a_direction_may_read_lr_and_decay() -> None:
    class Reads(Optimizer):
        def direction(self, g: Tensor):
            return g * self.lr + self.weight_decay  # type: ignore

    p = torch.ones(2)
    value = Reads.pure(lr=0.5, weight_decay=0.1)
    got = value.step(p, p, value.init(p))[0]
    torch.testing.assert_close(got, p - 0.5 * (0.5 + 0.1) - 0.05)
    again = value.with_lr(0.1).step(p, p, value.init(p))[0]
    torch.testing.assert_close(again, p - 0.1 * (0.1 + 0.1) - 0.01)
    # Of each subtree its own, in every way to give the state.
    rates = {"lr": {"a": 0.5, "b": lambda t: 0.1}, "weight_decay": {"a": 0.0, "b": 0.1}}
    value, tree = Reads.pure(**rates), {"a": p, "b": p}
    got = value.step(tree, tree, value.init(tree))[0]
    torch.testing.assert_close(got, {"a": p - 0.5 * 0.5, "b": again})


def test_groups_whose_rates_are_read_are_a_pure_step() -> None:
    class Ramp(Optimizer):
        class Running(NamedTuple):
            n: float = 0.0

        def coeffs(self, r: Any, lr: float, weight_decay: float):
            return {"k": lr + weight_decay + r.n}

        def direction(self, g: Tensor, c: Any, r: Any):
            return c["k"] * g, self.Running(r.n + 1.0)

    ps = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))}
    decays = {"a": 0.5, "b": 0.1}
    groups: list[Any] = [
        {"params": [(n, ps[n])], "weight_decay": x} for n, x in decays.items()
    ]
    optimizer = Ramp(groups, lr=0.1, compile=False)
    value, state = optimizer.functional()
    tree = {n: p.detach().clone() for n, p in ps.items()}
    for _ in range(3):
        for p in ps.values():
            p.grad = torch.ones(2)
        optimizer.step()
        tree, state = value.step(tree, {n: torch.ones(2) for n in tree}, state)
    assert all(torch.equal(p, tree[n]) for n, p in ps.items())
    assert not torch.equal(ps["a"], ps["b"])


class Lifted(Optimizer):
    betas: tuple[float, float] = (0.9, 0.99)

    class State(NamedTuple):
        m: Tensor
        v: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m, v = b1 * s.m + (1 - b1) * g, b2 * s.v + (1 - b2) * g * g
        d = m * (1 / (1 - b1**t)) / ((v * (1 / (1 - b2**t))).sqrt() + 1e-8)
        return d, self.State(m, v)


class Explicit(Lifted):
    """The same, with the scalar work in `coeffs`."""

    class Coeffs(NamedTuple):
        b1: Any
        a1: Any
        b2: Any
        a2: Any
        m: Any
        v: Any

    def coeffs(self, t: float) -> Coeffs:
        b1, b2 = self.betas
        return self.Coeffs(b1, 1 - b1, b2, 1 - b2, 1 / (1 - b1**t), 1 / (1 - b2**t))

    def direction(self, g: Tensor, s: Any, c: Coeffs) -> Any:  # type: ignore
        m, v = c.b1 * s.m + c.a1 * g, c.b2 * s.v + c.a2 * g * g
        return m * c.m / ((v * c.v).sqrt() + 1e-8), self.State(m, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", [{"compile": False}, {"foreach": True}], ids=str)
def test_explicit_coeffs_are_the_lifted_ones(dtype: torch.dtype, how: Any) -> None:
    lifted, explicit = (stepped(x, dtype, **how) for x in (Lifted, Explicit))
    assert all(map(torch.equal, lifted, explicit))


def test_explicit_coeffs_are_called_at_every_step() -> None:
    class Tabled(Optimizer):
        scales: tuple[float, float] = (1.0, 2.0)
        reverse: bool = False

        class Running(NamedTuple):
            steps: float = 0.0

        def coeffs(self, t: float, r: Any, lr: float) -> dict[str, float]:
            scale = self.scales[int(t) % 2] if t < 3 else math.sqrt(t)
            return {"scale": -scale if self.reverse else scale, "more": lr + r.steps}

        def direction(self, g: Tensor, r: Running, c: dict[str, float]):
            return g * c["scale"] + c["more"], self.Running(r.steps + 1)

    for reverse in (False, True):
        value = Tabled.pure(lr=0.5, reverse=reverse)
        assert value.rule.numbers == ("scales",)
        p, want = torch.zeros(1), 0.0
        state = value.init(p)
        for i, scale in enumerate([2.0, 1.0, math.sqrt(3), 2.0]):
            p, state = value.step(p, torch.ones(1), state)
            want -= 0.5 * ((-scale if reverse else scale) + 0.5 + i)
            assert p.item() == pytest.approx(want)


def test_other_coeffs_share_kernels_but_not_scalars() -> None:
    def scaled(scale: float) -> Any:
        def coeffs(self: Any, t: float) -> dict[str, float]:
            return {"scale": scale}

        def direction(self: Any, g: Tensor, c: Any) -> Tensor:
            return g * c["scale"]

        return type("Scaled", (Optimizer,), {"coeffs": coeffs, "direction": direction})

    one, two, p = scaled(1.0).pure(lr=0.1), scaled(2.0).pure(lr=0.1), torch.ones(1)
    assert one.rule.digest == two.rule.digest
    assert two.step(p, p, two.init(p))[0].item() == pytest.approx(0.8)
    assert one.step(p, p, one.init(p))[0].item() == pytest.approx(0.9)


def test_whole_takes_its_arguments_by_name() -> None:
    class Timed(Optimizer):
        def direction(self, gradient: Tensor):
            return gradient

        def whole(self, t: float, d: Tensor) -> Tensor:
            return d * (t + 1)

    p = torch.ones(2)
    value = Timed.pure(lr=0.1)
    torch.testing.assert_close(value.step(p, p, value.init(p))[0], p - 0.2)


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda t, b: torch.where(t < 2, 1.0, 1 / (1 - b ** (t - 1))), 1.0),
        (lambda t, b: 1 / (t - 1), math.inf),
        (lambda t, b: (t - 1) / (1 - t), math.nan),
        (lambda t, b: (t - 1) ** -0.5, math.inf),
        (lambda t, b: (t - 1) ** 2, 0.0),
        (lambda t, b: (t - 2) ** 3, -1.0),
        (lambda t, b: (t - 2) ** b, math.nan),
        (lambda t, b: (t - 2) ** 0.5, math.nan),
        (lambda t, b: torch.sqrt(t - 2), math.nan),
        (lambda t, b: (b - b) ** t, 0.0),
        (lambda t, b: 2.0 ** (t * 1024), math.inf),
        (lambda t, b: (-2.0) ** (t * 1025), -math.inf),
        (lambda t, b: (t * 1e300) ** 2, math.inf),
        (lambda t, b: 1 / 2.0 ** (t * 1024), 0.0),
        (lambda t, b: t % (t - 1), math.nan),
        (lambda t, b: t // (t - 1), math.inf),
    ],
)
def test_scalars_have_the_infinities_of_tensors(fn: Any, want: float) -> None:
    class Scalars(Optimizer):
        b: float = 0.5

        def direction(self, g: Tensor, t: float):
            return g * fn(t, self.b)

    p = torch.ones(2)
    for b in (0.5, torch.tensor(0.5)):
        value = Scalars.pure(lr=1.0, b=b)
        got = value.step(torch.zeros(2), p, value.init(p))[0]
        torch.testing.assert_close(got, torch.full((2,), -want), equal_nan=True)


# Refusals

CONSTANT = torch.ones(3)


class One(NamedTuple):
    m: Tensor


def test_a_field_is_a_hyperparameter_by_its_default() -> None:
    class Loose(Optimizer):
        betas: tuple = (0.9, 0.5)  # type: ignore
        scale: float | None = 2.0

        def direction(self, g: Tensor):
            return g * self.betas[1] * self.scale  # type: ignore

        def step(self, *args: Any, **kwargs: Any) -> Any:
            return super().step(*args, **kwargs)

    assert Loose.pure.choices == ("hooks",)  # type: ignore
    p = torch.ones(2)
    value = Loose.pure(lr=0.1, betas=(0.9, torch.tensor(0.25)))
    torch.testing.assert_close(value.step(p, p, value.init(p))[0], p - 0.05)
