"""SGD, with momentum and Nesterov: the rules, the pure optimizer and the class."""

from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from optimi_func.classes.base import POSITIONAL, BaseOptimizer
from optimi_func.classes.fields import Float
from optimi_func.classes.forms import step_function, with_options
from optimi_func.core.checks import check_number
from optimi_func.core.math import choose, moment
from optimi_func.core.rule import (
    Direction,
    InitOptions,
    MomentStorage,
    PyTree,
    Rule,
    Scalar,
    gradient_rule,
)
from optimi_func.pure.functional import FunctionalOptimizer, Number, derived
from optimi_func.pure.tree import TreeState
from optimi_func.state.convert import Counterparts

__all__ = ["SGD", "sgd", "sgd_init", "sgd_step"]


class State(NamedTuple):
    momentum_buffer: Tensor  # b


class Coeffs(NamedTuple):
    momentum: Scalar
    one_minus_dampening: Scalar  # 1 at the first step where b starts as the gradient
    nesterov_momentum: Scalar  # the momentum again, as Nesterov looks ahead with it


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(moment(p, kept))


def coeffs(
    t: Scalar, *, momentum: Scalar, dampening: bool | Scalar, torch_init: bool
) -> Coeffs:
    is_flag = isinstance(dampening, bool)
    tau = (momentum if dampening else 0.0) if is_flag else dampening
    starts_whole = torch_init or not is_flag
    rest = choose(t == 1, 1.0, 1.0 - tau) if starts_whole else 1.0 - tau
    return Coeffs(momentum, rest, momentum)


def accumulate(c: Any) -> Any:
    # In Nesterov's g + momentum * b, b has the whole gradient and g is the last microbatch.
    return c._replace(momentum=1.0)


def direction(g: Tensor, s: State, c: Any) -> Direction:
    b = c.momentum * s.momentum_buffer + c.one_minus_dampening * g
    return Direction(b, State(b))


def look_ahead(g: Tensor, s: State, c: Coeffs) -> Direction:
    b, new, _ = direction(g, s, c)
    return Direction(g + c.nesterov_momentum * b, new)


momentum_rule = Rule("sgd_momentum", State, init, coeffs, direction, None, accumulate)
nesterov_rule = Rule("sgd_nesterov", State, init, coeffs, look_ahead, None, accumulate)


def is_on(number: object) -> bool:
    """Return False if a number is 0 on the host, and True for tensors and schedules."""
    return isinstance(number, Tensor) or callable(number) or number != 0


@dataclass(frozen=True, kw_only=True, repr=False)
class sgd(FunctionalOptimizer):
    """`SGD` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts(
        in_torch=torch.optim.SGD,
        torch_counts_steps=False,
        torch_options=lambda group: (
            {"dampening": group["momentum"]} if group["dampening"] is True else {}
        ),
        optimi_names={"exp_avg": "momentum_buffer"},
        bitsandbytes=State._fields,
    )

    lr: Number = 1e-3
    momentum: Number = 0.0
    dampening: bool | Number = False
    decouple_wd: bool = False
    torch_init: bool = False
    nesterov: bool = False

    @derived
    def rule(self) -> Rule[Any, Any]:
        if not is_on(self.momentum):
            return gradient_rule
        return nesterov_rule if self.nesterov else momentum_rule

    def check(self) -> None:
        super().check()
        check_number("momentum", "momentum", self.momentum, below=1.0)
        if not isinstance(self.dampening, bool):
            check_number("dampening", "dampening", self.dampening)
        # A schedule's momentum may be 0 at a step, which is not another rule.
        if self.nesterov and (self.rule is gradient_rule or is_on(self.dampening)):
            raise ValueError(
                f"Invalid nesterov: nesterov=True with momentum={self.momentum} and "
                f"dampening={self.dampening}: allowed with a momentum and no dampening"
            )

    def likely_mistakes(self) -> list[str]:
        found = super().likely_mistakes()
        if self.rule is gradient_rule and is_on(self.dampening):
            found.append(f"dampening={self.dampening} has no effect without momentum.")
        elif self.torch_init and self.dampening is not True:
            found.append("torch_init=True has no effect without dampening=True.")
        return found


@with_options
def sgd_init(
    params: PyTree, *, momentum: Number = 0.0, **options: Unpack[InitOptions]
) -> TreeState:
    """Return fresh SGD state: with a `momentum_buffer` unless momentum is the number 0."""
    return sgd(lr=0.0, momentum=momentum).init(params, **options)


sgd_step = step_function(sgd)


class SGD(BaseOptimizer):
    """SGD: step against the gradient, or against a decaying sum of gradients.

        b <- momentum * b + (1 - dampening) * g,   p <- p - lr * b

    Nesterov steps along g + momentum * b instead of b, and momentum = 0 along g.

    Args:
        momentum: Share of b kept, in [0, 1); 0 needs no buffer. May change in mid-run.
        weight_decay: Decay coefficient: added to the gradient as weight_decay * p, or
            (decouple_wd) multiplied by lr, or (decouple_lr) by lr / max_lr.
        dampening: True makes b a moving average (dampening = momentum). A number is
            torch's dampening, with torch's start: the first b is the whole gradient.
        decouple_wd: Subtract decay from the parameter, not through the gradient.
        torch_init: With dampening=True, start b as the first gradient too.
        nesterov: Look ahead; needs momentum and no dampening.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Sutskever, Martens, Dahl & Hinton, "On the importance of initialization and
        momentum in deep learning", ICML 2013.

    >>> w = torch.ones(2, requires_grad=True)
    >>> SGD([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    factory = sgd
    _positional = ("decouple_lr", "max_lr", "torch_init", *POSITIONAL)

    lr: Float = Float(1e-3)
    momentum: InitVar[float] = 0.0
    weight_decay: InitVar[float] = 0.0
    dampening: InitVar[bool | float] = False
    decouple_wd: InitVar[bool] = False
    _: KW_ONLY
    torch_init: InitVar[bool] = False
    nesterov: InitVar[bool] = False
