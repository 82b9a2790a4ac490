"""Adam (Kingma & Ba 2015), AdamW and AMSGrad: rules, pure optimizers and classes."""

from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.forms import step_function, with_options
from optimi_func.core.math import (
    moment,
    power,
    root,
    second_moment,
    sqrt,
    wide_second_moment,
)
from optimi_func.core.rule import (
    Direction,
    InitOptions,
    MomentStorage,
    PyTree,
    Rule,
    Scalar,
)
from optimi_func.pure.functional import FunctionalOptimizer, Number, derived
from optimi_func.pure.tree import TreeState
from optimi_func.state.convert import Counterparts

__all__ = [
    "Adam",
    "AdamW",
    "adam",
    "adam_init",
    "adam_step",
    "adamw",
    "adamw_init",
    "adamw_step",
]


class State(NamedTuple):
    exp_avg: Tensor  # m
    exp_avg_sq: Tensor  # v


class AMSGradState(NamedTuple):
    exp_avg: Tensor  # m
    exp_avg_sq: Tensor  # v
    max_exp_avg_sq: Tensor  # the largest v so far


class Coeffs(NamedTuple):
    beta1: Scalar
    one_minus_beta1: Scalar
    beta2: Scalar
    one_minus_beta2: Scalar
    inv_bias_correction1: Scalar  # 1 / (1 - b1^t)
    inv_sqrt_bias_correction2: Scalar  # 1 / sqrt(1 - b2^t)
    eps: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(moment(p, kept), second_moment(p, kept))


def coeffs(t: Scalar, *, betas: tuple[Scalar, Scalar], eps: Scalar) -> Coeffs:
    b1, b2 = betas
    inverses = 1.0 / (1.0 - power(b1, t)), 1.0 / sqrt(1.0 - power(b2, t))
    return Coeffs(b1, 1.0 - b1, b2, 1.0 - b2, *inverses, eps)


def accumulate(c: Coeffs) -> Coeffs:
    # m is that of the summed gradient, but v sums the squares of the microbatches'
    # gradients (AdamA, arXiv:2305.19982).
    return c._replace(beta1=1.0, beta2=1.0)


def moments(g: Tensor, m: Tensor, v: Tensor, c: Coeffs) -> State:
    m = c.beta1 * m + c.one_minus_beta1 * g
    return State(m, c.beta2 * v + c.one_minus_beta2 * (g * g))


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    m, v = new = moments(g, s.exp_avg, s.exp_avg_sq, c)
    d = c.inv_bias_correction1 * m / (c.inv_sqrt_bias_correction2 * root(v) + c.eps)
    return Direction(d, new)


def amsgrad_init(p: Tensor, kept: MomentStorage) -> AMSGradState:
    return AMSGradState(*init(p, kept), wide_second_moment(p, kept))


def amsgrad_direction(g: Tensor, s: AMSGradState, c: Coeffs) -> Direction:
    m, v = moments(g, s.exp_avg, s.exp_avg_sq, c)
    largest = torch.maximum(s.max_exp_avg_sq, v)
    d = c.inv_bias_correction1 * m / (c.inv_sqrt_bias_correction2 * root(largest) + c.eps)
    return Direction(d, AMSGradState(m, v, largest))


adam_rule = Rule("adam", State, init, coeffs, direction, accumulate=accumulate)
amsgrad_rule = Rule(
    "amsgrad", AMSGradState, amsgrad_init, coeffs, amsgrad_direction, None, accumulate
)


def rule_of(optimizer: "adam | adamw") -> Rule[Any, Any]:
    return amsgrad_rule if optimizer.amsgrad else adam_rule


@dataclass(frozen=True, kw_only=True, repr=False)
class AdamLikeValue(FunctionalOptimizer):
    """Base class of pure optimizers with Adam's hyperparameters and, mostly, defaults."""

    lr: Number = 1e-3
    betas: tuple[Number, Number] = (0.9, 0.99)
    eps: Number = 1e-6


@dataclass(frozen=True, kw_only=True, repr=False)
class adam(AdamLikeValue):
    """`Adam` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts(in_torch=torch.optim.Adam, bitsandbytes=State._fields)

    decouple_wd: bool = False
    amsgrad: bool = False

    rule = derived(rule_of)


@dataclass(frozen=True, kw_only=True, repr=False)
class adamw(AdamLikeValue):
    """`AdamW` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts(in_torch=torch.optim.AdamW, bitsandbytes=State._fields)

    weight_decay: Number = 1e-2
    amsgrad: bool = False

    rule = derived(rule_of)


@with_options
def adam_init(
    params: PyTree, *, amsgrad: bool = False, **options: Unpack[InitOptions]
) -> TreeState:
    """Return fresh Adam or AdamW state: see `FunctionalOptimizer.init`.

    >>> adam_init({"w": torch.zeros(2)}).leaves["w"].exp_avg
    tensor([0., 0.])
    """
    return adam(lr=0.0, amsgrad=amsgrad).init(params, **options)


adamw_init = adam_init
adam_step = step_function(adam)
adamw_step = step_function(adamw)


class AdamLike(BaseOptimizer):
    """Base class of optimizers with Adam's hyperparameters and, mostly, its defaults."""

    lr: InitVar[float | Tensor] = 1e-3
    betas: InitVar[tuple[float, float]] = (0.9, 0.99)
    weight_decay: InitVar[float] = 0.0
    eps: InitVar[float] = 1e-6


class Adam(AdamLike):
    """Adam: step along the mean gradient, measured in its own root mean square.

        m <- b1 * m + (1 - b1) * g,   v <- b2 * v + (1 - b2) * g^2
        p <- p - lr * mhat / (sqrt(vhat) + eps)

    with mhat = m / (1 - b1^t) and vhat = v / (1 - b2^t).

    Args:
        betas: b1 and b2, each in [0, 1): how much of m and v a step keeps.
        weight_decay: Decay coefficient: added to the gradient as weight_decay * p, or
            (decouple_wd) multiplied by lr, or (decouple_lr) by lr / max_lr.
        eps: Added to the root, after the bias correction.
        decouple_wd: Subtract decay from the parameter, not through the gradient.
        amsgrad: Divide by the largest v so far instead of v (arXiv:1904.09237).

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Kingma & Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Adam([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    factory = adam

    decouple_wd: InitVar[bool] = False
    _: KW_ONLY
    amsgrad: InitVar[bool] = False


class AdamW(AdamLike):
    """AdamW: Adam with weight decay that does not go through the moments.

        p <- p - lr * mhat / (sqrt(vhat) + eps) - lr * weight_decay * p

    with Adam's bias corrected m and v.

    Args:
        betas: b1 and b2, each in [0, 1): how much of m and v a step keeps.
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr.
        eps: Added to the root, after the bias correction.
        amsgrad: Divide by the largest v so far instead of v (arXiv:1904.09237).

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.

    >>> w = torch.ones(2, requires_grad=True)
    >>> AdamW([w], lr=0.1, weight_decay=0.5, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.8500, 0.8500])
    """

    factory = adamw

    weight_decay: InitVar[float] = 1e-2
    _: KW_ONLY
    amsgrad: InitVar[bool] = False
