"""What a class body may say, what it costs, and what is said of mistakes in it."""

import copy
import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad

from optimi_func import SGD, AdamW, lamb, population, sgd
from optimi_func.rules import Float, Optimizer, Shaped, Wide, check_number, root, rounded
from optimi_func.testing import check_rule

P = torch.tensor([1.0, 2.0])


def made(name: str = "Made", **body: Any) -> Any:
    """Return an Optimizer whose class body is given; `fields` are annotated floats."""
    fields = body.pop("fields", {})
    body = {"direction": lambda self, g: g, **fields, **body}
    return type(
        name, (Optimizer,), {"__annotations__": dict.fromkeys(fields, float), **body}
    )


def stepped(value: Any, p: Tensor = P, g: Tensor = P) -> Tensor:
    return value.step(p, g, value.init(p))[0]


# Imports

FIRST = """
import sys
from typing import NamedTuple
import torch
from torch import Tensor
from optimi_func.rules import Optimizer, SecondMoment

class SignSGD(Optimizer):
    momentum: float = 0.9

    class State(NamedTuple):
        exp_avg: Tensor
        square: SecondMoment

    def direction(self, g, s):
        m = self.momentum * s.exp_avg + (1 - self.momentum) * g
        return m.sign(), self.State(m, s.square)

w = torch.ones(2, requires_grad=True)
SignSGD([w], lr=0.1, compile=False).step((3 * w).sum().backward)
assert w[0] < 1.0
print({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules))
"""


def test_the_first_rule_imports_no_compiler() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FIRST], check=True, capture_output=True, text=True
    )
    assert found.stdout == "set()\n"


# State


class One(NamedTuple):
    m: Tensor


def test_an_error_within_a_state_property_is_raised() -> None:
    state = property(lambda self: self.missing)
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        made(direction=lambda self, g, s: (g, s), State=state)


class History(Optimizer):
    """The sum of the last gradients, in a State whose fields an option chooses."""

    length: int = 2

    @property
    def State(self) -> Any:
        return NamedTuple("Kept", [(f"g{i}", Tensor) for i in range(self.length)])

    def init(self, p: Tensor):
        return self.State(*[None] * self.length)

    def direction(self, g: Tensor, s: Any):
        kept = [g, *s][: self.length]
        return sum([*kept], 0.0 * g), self.State(*[1.0 * x for x in kept])


@pytest.mark.parametrize("length", [1, 3])
def test_a_property_may_make_its_state_anew(length: int) -> None:
    value = History.pure(lr=1.0, length=length)
    p, state = P, value.init(P)
    w = nn.Parameter(P.clone())
    optimizer = History([w], lr=1.0, length=length, compile=False)
    grads = [10.0**i * torch.ones(2) for i in range(5)]
    for i, g in enumerate(grads):
        before, (p, state) = p, value.step(p, g, state)
        torch.testing.assert_close(before - p, sum(grads[max(0, i + 1 - length) : i + 1]))
        w.grad = g
        optimizer.step()
    torch.testing.assert_close(w.detach(), p)


def test_init_reads_hyperparameters() -> None:
    class Adagrad(Optimizer):
        initial: float = 0.1

        class State(NamedTuple):
            square: Wide

        def init(self, p: Tensor) -> State:
            return self.State(self.initial * torch.ones_like(p))

        def direction(self, g: Tensor, s: State):
            v = s.square + g * g
            return g / v.sqrt(), self.State(v)

    for given in (0.5, torch.tensor(0.5), lambda step: 0.5 + step):
        got = stepped(Adagrad.pure(lr=1.0, initial=given))
        torch.testing.assert_close(got, P - P / (0.5 + P * P).sqrt())
    a, b = nn.Parameter(P.clone()), nn.Parameter(P.clone())
    groups = [{"params": [("a", a)]}, {"params": [("b", b)], "initial": 3.0}]
    optimizer = Adagrad(groups, lr=1.0, compile=False)
    optimizer.init_state()
    assert optimizer.state[a]["square"].tolist() == pytest.approx([0.1, 0.1])
    assert optimizer.state[b]["square"].tolist() == [3.0, 3.0]
    a.grad = b.grad = P
    optimizer.step()
    torch.testing.assert_close(b.detach(), P - P / (3.0 + P * P).sqrt())
    hyper = {"lr": 0.1, "initial": torch.tensor([1.0, 2.0])}
    members = population.init(Adagrad.pure, {"w": P}, hyper, n=2)
    assert members.state.leaves["w"].rule_state.square.tolist() == [[1.0, 1.0], [2.0, 2.0]]


# Decay and means


class OwnLamb(Optimizer):
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Wide
        exp_avg_sq: Wide

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m, v = b1 * s.exp_avg + (1 - b1) * g, b2 * s.exp_avg_sq + (1 - b2) * g * g
        d = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + self.eps)
        return d, self.State(m, v)

    def after(self, mean: Any, x: Tensor, u: Tensor):
        return u * root(mean(x * x)) * self.lr / root(mean(u * u))


HOWS: list[dict[str, Any]] = [{"compile": False}, {"foreach": True}]


DECAYS: list[dict[str, Any]] = [
    {"weight_decay": 0.3},
    {"weight_decay": 5e-4, "decouple_lr": True, "max_lr": 0.1},
    {"weight_decay": 0.3, "corrected_decay": True, "max_lr": 0.2},
    {"weight_decay": 0.3, "cautious_decay": True},
]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("how", [*HOWS, pytest.param({}, marks=pytest.mark.full)])
def test_means_of_the_update_have_its_decay_in_them(
    how: dict[str, Any], decay: dict[str, Any]
) -> None:
    drawn = torch.Generator().manual_seed(0)
    x, *grads = torch.randn(4, 40, generator=drawn, dtype=torch.float64)
    rates = [0.0, 0.1, 0.05]  # a warmup from 0
    p, q = x, x
    own, state = (f(lr=0.1, **decay).init(x) for f in (OwnLamb.pure, lamb))
    w = nn.Parameter(x.clone())
    optimizer = OwnLamb([w], lr=0.1, **decay, **how)
    for lr, g in zip(rates, grads):
        ours, theirs = (f(lr=lr, eps=1e-6, **decay) for f in (OwnLamb.pure, lamb))
        p, own = ours.step(p, g, own)
        q, state = theirs.step(q, g, state)
        optimizer.param_groups[0]["lr"], w.grad = lr, g
        optimizer.step()
    assert (p - x).abs().max() > 0.1
    torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(w.detach(), p, rtol=1e-12, atol=1e-12)


def test_after_returns_a_state_only_if_it_changes_it() -> None:
    class Halved(Optimizer):
        class State(NamedTuple):
            exp_avg: Tensor

        def direction(self, g: Tensor, s: State):
            return g, self.State(g)

        def after(self, u: Tensor):
            return 0.5 * u

    value = Halved.pure(lr=0.5)
    p, state = value.step(P, P, value.init(P))
    assert torch.equal(p, 0.75 * P)
    assert torch.equal(state.leaves.rule_state.exp_avg, P)


# Hyperparameters


class Clipped(Optimizer):
    clip: float = math.inf

    def direction(self, g: Tensor):
        return g.clamp(-self.clip, self.clip)


def test_a_default_of_inf_allows_inf() -> None:
    torch.testing.assert_close(stepped(Clipped.pure(lr=1.0)), 0.0 * P)
    w = nn.Parameter(P.clone())
    optimizer = Clipped([w], lr=1.0, compile=False)
    w.grad = P
    optimizer.step()
    assert w.tolist() == [0.0, 0.0]

    def moved(clip: Any) -> Tensor:
        return stepped(Clipped.pure(lr=1.0, clip=clip)).sum()

    for given in (torch.tensor(math.inf), lambda step: torch.tensor(math.inf)):
        assert moved(given) == 0.0
    assert grad(moved)(torch.tensor(math.inf)) == 0.0
    assert grad(moved)(torch.tensor(1.5)) == -1.0
    for wrong in (-1.0, math.nan, torch.tensor(-1.0), lambda step: -1.0):
        with pytest.raises(ValueError, match=r"allowed is at least 0\.0 and at most inf"):
            moved(wrong)


def test_a_negative_default_allows_negative_numbers() -> None:
    shifted = made(direction=lambda self, g: g + self.shift, fields={"shift": -1.0})
    torch.testing.assert_close(stepped(shifted.pure(lr=1.0, shift=-3.0)), 3.0 + 0.0 * P)
    with pytest.raises(ValueError, match="shift=inf: allowed is finite, at least -inf"):
        shifted.pure(lr=1.0, shift=math.inf)
    for name, wrong in (("beta", -0.1), ("betas", 1.0)):
        bounded = made(fields={"beta": 0.9, "betas": (0.9, 0.99)})
        given = {name: (0.9, wrong) if name == "betas" else wrong}
        with pytest.raises(
            ValueError, match=f"{name}={wrong}: allowed is finite, at least"
        ):
            bounded.pure(lr=1.0, **given)


def test_a_check_sets_the_bounds() -> None:
    class Free(Optimizer):
        betas: tuple[float, float] = (0.9, 0.5)
        bias: float = 0.0

        def check(self) -> None:
            check_number("bias", "bias", self.bias, above=-10.0)

        def direction(self, g: Tensor):
            return self.betas[1] * g + self.bias

    for bias in (-3.0, torch.tensor(-3.0), lambda step: step - 3.0):
        value = Free.pure(lr=1.0, betas=(0.9, 1.0), bias=bias)
        torch.testing.assert_close(stepped(value), 3.0 + 0.0 * P)
    for wrong in (-11.0, lambda step: step - 11.0):
        with pytest.raises(ValueError, match=r"bias=-11\.0: allowed is finite, above -10"):
            stepped(Free.pure(lr=1.0, bias=wrong))
    with pytest.raises(ValueError, match="betas=nan"):
        Free.pure(lr=1.0, betas=(0.9, math.nan))
    Free([nn.Parameter(P.clone())], lr=1.0, betas=(0.9, 1.5), bias=-1.0)


# Fields


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
@pytest.mark.parametrize("annotated", [False, True])
def test_another_default_alone_is_one(name: str, annotated: bool) -> None:
    body: dict[str, Any] = {name: Float(0.25) if annotated else 0.25}
    body |= {"__annotations__": {name: Float}} if annotated else {}
    cls: Any = type("Changed", (AdamW,), body)
    values = cls([nn.Parameter(P.clone())]), cls.pure(), inspect.signature(cls).parameters
    optimizer, pure, parameters = values
    assert optimizer.param_groups[0][name] == 0.25
    assert getattr(pure, name) == parameters[name].default == 0.25


def test_another_default_needs_no_annotation() -> None:
    class A(Optimizer):
        beta: float = 0.5

        def direction(self, g: Tensor):
            return self.beta * g

    class B(A):
        beta = 2.0
        lr = 1.0
        weight_decay = 0.5

    torch.testing.assert_close(stepped(B.pure(lr=1.0, weight_decay=0.0)), P - 2.0 * P)
    w = nn.Parameter(P.clone())
    optimizer = B([w], compile=False)
    assert [optimizer.param_groups[0][x] for x in ("beta", "lr", "weight_decay")] == [
        2,
        1,
        0.5,
    ]
    assert inspect.signature(B.pure).parameters["weight_decay"].default == 0.5
    w.grad = P
    optimizer.step()
    torch.testing.assert_close(w.detach(), P - 2.0 * P - 0.5 * P)
    torch.testing.assert_close(stepped(A.pure(lr=1.0)), 0.5 * P)


class Kinds(Optimizer):
    k: int = 1

    def direction(self, g: Tensor):
        return {bool: 3.0, float: 2.0, int: 1.0}[type(self.k)] * g


def test_equal_options_of_other_types_have_rules_of_their_own() -> None:
    for k, want in ((1, 1.0), (True, 3.0), (1.0, 2.0), (1, 1.0)):
        torch.testing.assert_close(stepped(Kinds.pure(lr=1.0, k=k)), P - want * P)
        w = nn.Parameter(P.clone())
        optimizer = Kinds([w], lr=1.0, k=k, compile=False)
        w.grad = P
        optimizer.step()
        torch.testing.assert_close(w.detach(), P - want * P)


def test_a_static_field_takes_no_tensor_and_no_schedule() -> None:
    class Maybe(Optimizer):
        clip: float | None = None
        fn: Any = torch.sign

        def direction(self, g: Tensor):
            g = self.fn(g)
            return g if self.clip is None else g.clamp(-self.clip, self.clip)

    for make, name in ((Kinds.pure, "k"), (Maybe.pure, "clip")):
        for given in (torch.tensor(2.0), lambda step: step):
            with pytest.raises(
                TypeError, match=f"{name} is static: a tensor or a schedule"
            ):
                make(lr=1.0, **{name: given})
    with pytest.raises(TypeError, match="k is static"):
        population.init(Kinds.pure, P, {"lr": 0.1, "k": torch.tensor([1, 2])}, n=2)
    torch.testing.assert_close(stepped(Maybe.pure(lr=1.0, clip=0.5)), P - 0.5)
    torch.testing.assert_close(stepped(Maybe.pure(lr=1.0, fn=torch.tanh)), P - P.tanh())


def test_an_extra_may_be_a_dict_in_a_graph() -> None:
    class Scaled(Optimizer):
        def direction(self, g: Tensor, h: Tensor):
            return g / h

    value, tree = Scaled.pure(lr=1.0), {"a": P, "b": 2.0 * P}

    def step(params: Any, h: Any) -> Any:
        return value.step(params, params, value.init(params), h=h)[0]

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for h in ({"a": P, "b": P}, torch.tensor(2.0)):
        got, want = compiled(tree, h), step(tree, h)
        torch.testing.assert_close(got, want)


class Noisy(Optimizer):
    seed: int = 0

    def direction(self, g: Tensor, z: Tensor):
        return g + z

    def whole(self, d: Tensor) -> Tensor:
        return 2 * d


@pytest.mark.parametrize("how", HOWS[:1])
def test_noise_goes_with_whole(how: dict[str, Any]) -> None:
    p, g, value = torch.ones(3, 2), torch.ones(3, 2), Noisy.pure(lr=0.1)
    w = p.clone().requires_grad_()
    w.grad = g
    Noisy([w], lr=0.1, **how).step()
    torch.testing.assert_close(w.detach(), value.step(p, g, value.init(p))[0])


class Rows(Optimizer):
    class State(NamedTuple):
        rows: Shaped

    def init(self, p: Tensor) -> Any:
        return self.State((p.shape[0],))  # type: ignore

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        return d, s


def test_an_error_in_whole_says_its_line() -> None:
    class Odd(Rows):
        def whole(self, d: Tensor, s: Any):
            return d @ d, s  # line

    class Reads(Rows):
        def whole(self, d: Tensor, s: Any):
            return d * self.lr, s  # line

    lines = Path(__file__).read_text().splitlines()
    odd, reads = [i for i, x in enumerate(lines, 1) if x.endswith("s  # line")]
    for cls, line, said in (
        (Odd, odd, "same reduction dim"),
        (Reads, reads, "no attribute 'lr'"),
    ):
        with pytest.raises(ValueError, match=rf"{said}.* \(.*test_own_rules\.py:{line}\)$"):
            cls.pure(lr=0.1).init(torch.ones(2, 3))
        with pytest.raises(ValueError, match=rf"takes no shape: .*py:{line}\)"):
            check_rule(cls)


K = torch.tensor(0.5, dtype=torch.float64)
BODIES: dict[str, Any] = {
    "numpy on the right": lambda g, x, a: a * np.sqrt(2) * g + (a + np.float64(2.5)) * x,
    "numpy on the left": lambda g, x, a: np.float64(0.7) / a * g - np.float32(0.5) * a * x,
    "a condition on a number of numpy": lambda g, x, a: torch.where(
        a > np.float64(0.2), g, x
    ),
    "rsub": lambda g, x, a: torch.rsub(g, x, alpha=a),
    "elu": lambda g, x, a: torch.nn.functional.elu(g, alpha=a),
    "masked_fill": lambda g, x, a: g.masked_fill(x > 0, value=a),
    "addcmul": lambda g, x, a: torch.addcmul(g, tensor1=x, tensor2=g, value=a),
    "clip": lambda g, x, a: torch.clip(g, min=-a, max=0.5) + g.clip(-1.0, a),
    "a tensor of a number": lambda g, x, a: torch.as_tensor(a) * g + x,
    "rounded numbers": lambda g, x, a: (
        torch.where(rounded(a) > 0.2, g, x)
        + torch.where(g > 0, rounded(a), 0.0)
        + 1 / rounded(a)
        + rounded(a).clamp(max=0.2)
    ),
    "numbers of a constant": lambda g, x, a: g * K.item() + float(K) * a * x,
    "copies of a number": lambda g, x, a: copy.copy(a) * g + copy.deepcopy(a) * x,
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("tensor", [False, True])
def test_bodies_mean_what_they_mean_in_torch(name: str, tensor: bool) -> None:
    class Body(Optimizer):
        a: float = 0.3

        def direction(self, g: Tensor, x: Tensor) -> Tensor:
            return BODIES[name](g, x, self.a)

    x = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)
    g = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64)
    # torch divides a number by a tensor in two ways, which differ in the last bit.
    expected = BODIES[name](g, x, torch.tensor(0.3, dtype=torch.float64))
    a = torch.tensor(0.3, dtype=torch.float64) if tensor else 0.3
    value = Body.pure(lr=1.0, a=a)
    got = x - value.step(x, g, value.init(x))[0]
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


def test_a_tensor_of_a_number_has_a_derivative() -> None:
    class Body(Optimizer):
        a: float = 0.3

        def direction(self, g: Tensor) -> Tensor:
            return g * torch.tensor(self.a)

    def after(a: Tensor) -> Tensor:
        value = Body.pure(lr=1.0, a=a)
        return value.step(P, P, value.init(P))[0].sum()

    assert grad(after)(torch.tensor(0.3)).item() == pytest.approx(-P.sum().item())


def test_a_rule_may_be_traced_among_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGD, "_rules", {})
    monkeypatch.setattr(SGD, "_known", [])
    with FakeTensorMode():
        value, x = sgd(lr=0.1, momentum=0.9), torch.ones(2)
        moved, _ = value.step(x, x, value.init(x))
    assert isinstance(moved, FakeTensor) and moved.shape == (2,) and SGD._rules
