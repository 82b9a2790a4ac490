"""Adan (Xie et al. 2022): the rule, the pure optimizer and the class."""

from dataclasses import KW_ONLY, InitVar, dataclass
from typing import NamedTuple

from torch import Tensor

from optimi_func.classes.base import POSITIONAL, BaseOptimizer
from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.math import (
    choose,
    moment,
    power,
    root,
    second_moment,
    sqrt,
    wide_moment,
)
from optimi_func.core.rule import DecayKind, Direction, MomentStorage, Rule, Scalar
from optimi_func.pure.functional import FunctionalOptimizer, Number, derived
from optimi_func.state.convert import Counterparts

__all__ = ["Adan", "adan", "adan_init", "adan_step"]


class State(NamedTuple):
    exp_avg: Tensor  # m
    exp_avg_diff: Tensor  # w
    exp_avg_sq: Tensor  # n
    prev_grad: Tensor  # g_prev


class Coeffs(NamedTuple):
    beta1: Scalar
    one_minus_beta1: Scalar
    beta2: Scalar
    one_minus_beta2: Scalar
    beta3: Scalar
    one_minus_beta3: Scalar
    has_prev: Scalar  # 0 at the first gradient, then 1
    inv_bias_correction1: Scalar  # 1 / (1 - b1^t)
    inv_bias_correction2: Scalar
    inv_sqrt_bias_correction3: Scalar  # 1 / sqrt(1 - b3^t)
    eps: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    m, w, v = moment(p, kept), moment(p, kept), second_moment(p, kept)
    return State(m, w, v, wide_moment(p, kept))


def coeffs(t: Scalar, *, betas: tuple[Scalar, Scalar, Scalar], eps: Scalar) -> Coeffs:
    b1, b2, b3 = betas
    return Coeffs(
        *(b1, 1.0 - b1, b2, 1.0 - b2, b3, 1.0 - b3),
        has_prev=choose(t > 1, 1.0, 0.0),
        inv_bias_correction1=1.0 / (1.0 - power(b1, t)),
        inv_bias_correction2=1.0 / (1.0 - power(b2, t)),
        inv_sqrt_bias_correction3=1.0 / sqrt(1.0 - power(b3, t)),
        eps=eps,
    )


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    change = c.has_prev * (g - s.prev_grad)
    m = c.beta1 * s.exp_avg + c.one_minus_beta1 * g
    w = c.beta2 * s.exp_avg_diff + c.one_minus_beta2 * change
    ahead = g + c.beta2 * change
    n = c.beta3 * s.exp_avg_sq + c.one_minus_beta3 * (ahead * ahead)
    d = c.inv_bias_correction1 * m + c.beta2 * c.inv_bias_correction2 * w
    d = d / (c.inv_sqrt_bias_correction3 * root(n) + c.eps)
    return Direction(d, State(m, w, n, g))


adan_rule = Rule("adan", State, init, coeffs, direction)


@dataclass(frozen=True, kw_only=True, repr=False)
class adan(FunctionalOptimizer, rule=adan_rule):
    """`Adan` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts(optimi_negated=("prev_grad",))

    betas: tuple[Number, Number, Number] = (0.98, 0.92, 0.99)
    weight_decay: Number = 2e-2
    eps: Number = 1e-6
    adam_wd: bool = False

    @derived
    def decay(self) -> DecayKind:
        return super().decay if self.adam_wd else self._decay_kind("proximal")


adan_init = init_function(adan_rule)
adan_step = step_function(adan)


class Adan(BaseOptimizer):
    """Adan: Adam that looks ahead along the change of the gradient.

        m <- b1 * m + (1 - b1) * g,   w <- b2 * w + (1 - b2) * (g - g_prev)
        n <- b3 * n + (1 - b3) * (g + b2 * (g - g_prev))^2
        p <- (p - lr * (mhat + b2 * what) / (sqrt(nhat) + eps)) / (1 + lr * weight_decay)

    with mhat, what and nhat corrected for bias as in Adam. At the first step g_prev is g.

    Args:
        betas: b1, b2 and b3, each in [0, 1): how much a step keeps (1 - the paper's).
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr.
        eps: Added to the root, after the bias correction.
        adam_wd: Subtract decay as in AdamW, instead of Adan's division.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing
        Deep Models", arXiv:2208.06677.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Adan([w], lr=0.1, weight_decay=0.0, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    factory = adan
    _positional = ("decouple_lr", "max_lr", "adam_wd", *POSITIONAL)

    lr: InitVar[float | Tensor]
    betas: InitVar[tuple[float, float, float]] = (0.98, 0.92, 0.99)
    weight_decay: InitVar[float] = 2e-2
    eps: InitVar[float] = 1e-6
    _: KW_ONLY
    adam_wd: InitVar[bool] = False
