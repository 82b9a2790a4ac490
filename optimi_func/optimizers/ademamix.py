"""AdEMAMix (Pagliardini et al. 2024): the rule, the pure optimizer and the class."""

import math
from dataclasses import InitVar, dataclass
from typing import NamedTuple

from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.fields import Float
from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.checks import check_number
from optimi_func.core.math import (
    choose,
    log,
    moment,
    power,
    root,
    slow_moment,
    sqrt,
    warmed,
)
from optimi_func.core.rule import Direction, MomentStorage, Rule, Scalar
from optimi_func.pure.functional import FunctionalOptimizer, Number

__all__ = ["AdEMAMix", "ademamix", "ademamix_init", "ademamix_step"]


class State(NamedTuple):
    exp_avg: Tensor  # m1
    exp_avg_slow: Tensor  # m2
    exp_avg_sq: Tensor  # v


class Coeffs(NamedTuple):
    beta1: Scalar
    one_minus_beta1: Scalar
    beta2: Scalar
    one_minus_beta2: Scalar
    beta3: Scalar  # of this step
    one_minus_beta3: Scalar
    inv_bias_correction1: Scalar  # 1 / (1 - b1^t)
    inv_sqrt_bias_correction2: Scalar  # 1 / sqrt(1 - b2^t)
    alpha: Scalar  # of this step
    eps: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(moment(p, kept), slow_moment(p), slow_moment(p))


def coeffs(
    t: Scalar,
    *,
    betas: tuple[Scalar, Scalar, Scalar],
    eps: Scalar,
    alpha: Scalar,
    alpha_warmup: Scalar,
    beta3_warmup: Scalar,
) -> Coeffs:
    b1, b2, b3 = betas
    # The half-life of m2 in steps, which grows linearly in t from that of b1 to that of b3.
    first, last = _half_life(b1), _half_life(b3)
    half_life = first + warmed(t, beta3_warmup) * (last - first)
    none = half_life == 0
    warming = choose(none, 0.0, 0.5 ** (1.0 / choose(none, 1.0, half_life)))
    b3 = choose(t >= beta3_warmup, b3, warming)
    inverses = 1.0 / (1.0 - power(b1, t)), 1.0 / sqrt(1.0 - power(b2, t))
    alpha = alpha * warmed(t, alpha_warmup)
    return Coeffs(b1, 1.0 - b1, b2, 1.0 - b2, b3, 1.0 - b3, *inverses, alpha, eps)


def _half_life(beta: Scalar) -> Scalar:
    none = beta == 0
    return choose(none, 0.0, math.log(0.5) / log(choose(none, 0.5, beta)))


def accumulate(c: Coeffs) -> Coeffs:
    # Both means become those of the whole gradient: see Adam.
    return c._replace(beta1=1.0, beta2=1.0, beta3=1.0)


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    fast = c.beta1 * s.exp_avg + c.one_minus_beta1 * g
    slow = c.beta3 * s.exp_avg_slow + c.one_minus_beta3 * g
    v = c.beta2 * s.exp_avg_sq + c.one_minus_beta2 * (g * g)
    d = c.inv_bias_correction1 * fast + c.alpha * slow
    d = d / (c.inv_sqrt_bias_correction2 * root(v) + c.eps)
    return Direction(d, State(fast, slow, v))


ademamix_rule = Rule("ademamix", State, init, coeffs, direction, accumulate=accumulate)


@dataclass(frozen=True, kw_only=True, repr=False)
class ademamix(FunctionalOptimizer, rule=ademamix_rule):
    """`AdEMAMix` as a value: `init` and `step` over a tree of parameters."""

    narrow = 1

    lr: Number = 1e-3
    betas: tuple[Number, Number, Number] = (0.9, 0.999, 0.9999)
    eps: Number = 1e-8
    alpha: Number = 8.0
    alpha_warmup: Number = 0
    beta3_warmup: Number = 0

    def check(self) -> None:
        super().check()
        check_number("share of the slow mean", "alpha", self.alpha)
        check_number("warmup of alpha", "alpha_warmup", self.alpha_warmup)
        check_number("warmup of beta3", "beta3_warmup", self.beta3_warmup)


ademamix_init = init_function(ademamix_rule)
ademamix_step = step_function(ademamix)


class AdEMAMix(BaseOptimizer):
    """AdEMAMix: AdamW with a second, much slower mean of the gradients.

        m1 <- b1 * m1 + (1 - b1) * g,   m2 <- b3(t) * m2 + (1 - b3(t)) * g
        v <- b2 * v + (1 - b2) * g^2
        p <- p - lr * (m1hat + alpha(t) * m2) / (sqrt(vhat) + eps) - lr * weight_decay * p

    with m1hat and vhat corrected for bias as in Adam, and m2 not. Old gradients remain
    useful over tens of thousands of steps. m2 and v are float32 whatever the storage,
    because bfloat16 could not follow them.

    Args:
        betas: b1, b2 and b3, each in [0, 1): how much of m1, v and m2 a step keeps.
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr.
        eps: Added to the root, after the bias correction.
        alpha: How much m2 counts, from 0; the authors' code has 2, their paper 8.
        alpha_warmup: Steps over which alpha grows from 0, linearly; usually all steps of
            the training. It is not in the state, so give it again when resuming.
        beta3_warmup: Steps over which m2's half-life grows from b1's to b3's, linearly.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Pagliardini, Ablin & Grangier, "The AdEMAMix Optimizer: Better, Faster, Older",
        arXiv:2409.03137.

    >>> w = torch.ones(2, requires_grad=True)
    >>> AdEMAMix([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.8999, 0.8999])
    """

    factory = ademamix

    lr: Float = Float(1e-3)
    betas: InitVar[tuple[float, float, float]] = (0.9, 0.999, 0.9999)
    weight_decay: InitVar[float] = 0.0
    eps: InitVar[float] = 1e-8
    alpha: InitVar[float] = 8.0
    alpha_warmup: InitVar[float] = 0
    beta3_warmup: InitVar[float] = 0
