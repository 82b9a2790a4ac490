"""An optimizer that the package does not have, through all of the package.

Sign-SGD with momentum (Bernstein et al. 2018, arXiv:1802.04434). The lines between markers
are shown by docs/house.md, step by step.
"""

import copy
import dataclasses
import inspect
import io
import pickle

# --8<-- [start:imports]
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from optimi_func import compiled, population, prepare_for_gradient_release
from optimi_func.core.checks import check_number
from optimi_func.core.math import moment
from optimi_func.core.rule import Direction, Rule, Scalar
from optimi_func.optimizers._forms import (
    compiled_functions,
    init_function,
    step_function,
)
from optimi_func.optimizers.base import BaseOptimizer
from optimi_func.pure.functional import FunctionalOptimizer, Number
from optimi_func.transforms import inject

# --8<-- [end:imports]

# The rule


# --8<-- [start:rule]
class State(NamedTuple):
    momentum_buffer: Tensor


class Coeffs(NamedTuple):
    momentum: Scalar
    one_minus_momentum: Scalar


def init(p: Tensor, dtype: torch.dtype) -> State:
    return State(moment(p, dtype))


def coeffs(t: Scalar, *, momentum: Scalar) -> Coeffs:
    del t
    return Coeffs(momentum, 1.0 - momentum)


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    m = c.momentum * s.momentum_buffer + c.one_minus_momentum * g
    return Direction(m.sign(), State(m))


signsgd_rule = Rule(
    *("signsgd", State, init, coeffs, direction),
    accumulate=lambda c: c._replace(momentum=1.0),
)
# --8<-- [end:rule]

# The pure optimizer


# --8<-- [start:value]
@dataclass(frozen=True, kw_only=True)
class signsgd(FunctionalOptimizer, rule=signsgd_rule):
    momentum: Number = 0.9

    def check(self) -> None:
        super().check()
        check_number("momentum", "momentum", self.momentum, below=1.0)


signsgd_init = init_function(signsgd_rule)
signsgd_step = step_function(signsgd)
compiled_signsgd_step, compiled_signsgd_step_ = compiled_functions(signsgd)
# --8<-- [end:value]

# The class


# --8<-- [start:class]
class SignSGD(BaseOptimizer):
    factory = signsgd

    lr: InitVar[float | Tensor]
    momentum: InitVar[float] = 0.9
    weight_decay: InitVar[float] = 0.0


# --8<-- [end:class]


@dataclass(frozen=True, kw_only=True)
class clipped(signsgd, rule=signsgd_rule):
    limit: Number = 1.0


# What it is given


OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.1}
STEPS = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(i: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(i))


# --8<-- [start:reference]
def reference() -> list[Tensor]:
    """The paper's loop."""
    net = model()
    moments = [torch.zeros_like(p) for p in net.parameters()]
    for i in range(STEPS):
        net(batch(i)).square().sum().backward()
        for p, m in zip(net.parameters(), moments):
            m.mul_(0.8).add_(0.2 * p.grad)
            with torch.no_grad():
                p.sub_(0.1 * (m.sign() + 0.1 * p))
            p.grad = None
    return [p.detach() for p in net.parameters()]


# --8<-- [end:reference]


def train(net: nn.Module, optimizer: SignSGD, start: int = 0, stop: int = STEPS) -> None:
    for i in range(start, stop):
        net(batch(i)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_reference(params: Any) -> None:
    for got, want in zip(params, reference()):
        torch.testing.assert_close(got.detach(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "how",
    [
        {"compile": False},
        pytest.param({"compile": True}, marks=pytest.mark.full),
        {"foreach": True},
    ],
    ids=str,
)
def test_class(how: dict[str, bool]) -> None:
    net = model()
    train(net, SignSGD(net.parameters(), **OPTIONS, **how))
    assert_reference(net.parameters())


@pytest.mark.parametrize(
    "step",
    [
        signsgd_step,
        pytest.param(compiled_signsgd_step, marks=pytest.mark.full),
        pytest.param(compiled_signsgd_step_, marks=pytest.mark.full),
    ],
    ids=lambda step: step.__name__,
)
def test_functions(step) -> None:
    net = model()
    params = [p.detach().clone() for p in net.parameters()]
    state = signsgd_init(params)
    for i in range(STEPS):
        for p, value in zip(net.parameters(), params):
            p.data.copy_(value)
        grads = torch.autograd.grad(net(batch(i)).square().sum(), list(net.parameters()))
        params, state = step(params, list(grads), state, **OPTIONS)
    assert_reference(params)


def test_gradient_release() -> None:
    net = model()
    optimizer = SignSGD(net.parameters(), **OPTIONS, gradient_release=True, compile=False)
    prepare_for_gradient_release(net, optimizer)
    train(net, optimizer)
    assert_reference(net.parameters())


def test_state_dict() -> None:
    net = model()
    optimizer = SignSGD(net.named_parameters(), **OPTIONS, compile=False)
    train(net, optimizer, stop=3)
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    values, state = torch.load(file, weights_only=True)
    net = model()
    net.load_state_dict(values)
    optimizer = SignSGD(net.named_parameters(), lr=1.0, compile=False)
    optimizer.load_state_dict(state)
    train(net, optimizer, start=3)
    assert_reference(net.parameters())
    assert optimizer.functional()[0] == signsgd(**OPTIONS)
    with pytest.raises(ValueError, match=r"torch\.optim has no SignSGD"):
        optimizer.torch_state_dict()


# --8<-- [start:given]
def test_transforms_and_populations() -> None:
    p, g = torch.ones(2), torch.tensor([1.0, -1.0])
    injected = inject(signsgd(lr=0.1))
    state = injected.init(p)
    assert set(state.hyper) == {"lr", "weight_decay", "momentum"}
    assert injected.step(p, g, state)[0].tolist() == pytest.approx([0.9, 1.1])
    lrs = torch.tensor([0.1, 0.2])
    members = population.init(signsgd, p, {"lr": lrs}, n=2)
    after = population.step(signsgd, members, torch.stack([g, g])).params
    assert after[:, 0].tolist() == pytest.approx([0.9, 0.8])
    assert vmap(signsgd_init)(torch.ones(3, 2)).leaves.momentum_buffer.shape == (3, 2)


def test_the_constructor_is_made_of_the_fields() -> None:
    names = list(inspect.signature(SignSGD).parameters)
    assert names[:5] == ["params", "lr", "momentum", "weight_decay", "decouple_lr"]
    net = model()
    optimizer = SignSGD(net.parameters(), 0.1, 0.8, maximize=True)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["maximize"]) == (0.1, 0.8, True)
    assert not hasattr(optimizer, "momentum") and not hasattr(optimizer, "maximize")
    with pytest.raises(TypeError, match="missing a required argument: 'lr'"):
        SignSGD(net.parameters())  # type: ignore
    with pytest.raises(
        TypeError, match=r"SignSGD has no argument 'momentun': did you .*'momentum'"
    ):
        SignSGD(net.parameters(), lr=0.1, momentun=0.8)  # type: ignore
    with pytest.raises(TypeError, match=r"which lacks \['weight_decay', 'momentum'\]"):
        type("Lacking", (BaseOptimizer,), {"factory": signsgd})


def test_a_subclass_inherits_the_fields() -> None:
    class Clipped(SignSGD):
        factory = clipped
        limit: InitVar[float] = 1.0

    names = list(inspect.signature(Clipped).parameters)
    assert names[:5] == ["params", "lr", "momentum", "weight_decay", "limit"]
    group = Clipped(model().parameters(), lr=0.1).param_groups[0]
    assert (group["momentum"], group["limit"]) == (0.9, 1.0)


def test_a_value_keeps_its_rule_through_copies() -> None:
    value = signsgd(lr=0.1, momentum=0.8)
    for again in (
        copy.copy(value),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
        dataclasses.replace(value),
    ):
        assert again == value and hash(again) == hash(value)
        assert again.rule is signsgd_rule and again.numbers == {"momentum": 0.8}
    other = value.with_lr(0.2)
    assert (other.lr, other.rule, other.numbers) == (0.2, signsgd_rule, value.numbers)
    assert dataclasses.replace(value, momentum=0.7).numbers == {"momentum": 0.7}


def test_errors_name_the_argument() -> None:
    for door in (signsgd, lambda **k: SignSGD([torch.ones(1, requires_grad=True)], **k)):
        with pytest.raises(ValueError, match=r"Invalid momentum: momentum=1\.5"):
            door(lr=0.1, momentum=1.5)
    with pytest.raises(TypeError, match="FunctionalOptimizer"):
        compiled.step(signsgd, torch.ones(1), torch.ones(1), None)  # type: ignore


# --8<-- [end:given]
