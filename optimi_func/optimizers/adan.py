"""Adan (Xie et al. 2022)."""

from dataclasses import KW_ONLY
from typing import NamedTuple

from torch import Tensor

from optimi_func.classes.base import POSITIONAL
from optimi_func.rules import (
    Body,
    Float,
    Former,
    Moment,
    SecondMoment,
    ThreeBetas,
    functions,
    root,
    rounded,
    where,
)
from optimi_func.state.convert import Counterparts

__all__ = ["Adan", "adan", "adan_init", "adan_step"]


class Adan(Body, name="adan"):
    """Adan: Adam that extrapolates the gradient along its recent change.

        m <- b1 * m + (1 - b1) * g,   w <- b2 * w + (1 - b2) * (g - g_prev)
        n <- b3 * n + (1 - b3) * (g + b2 * (g - g_prev))^2
        p <- p - lr * (mhat + b2 * what) / (sqrt(nhat) + eps)
        p <- p / (1 + lr * weight_decay)

    The suffix "hat" marks moments after a bias correction like Adam's. g_prev is the
    gradient of the previous step. In the first step, g_prev equals g.

    Args:
        betas: b1, b2 and b3, each in [0, 1): the fractions of m, w and n that carry over
            from one step to the next. Each beta in the paper is 1 minus the corresponding
            beta here.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment.
        adam_wd: Subtract weight decay as AdamW does, instead of dividing p by 1 + lr *
            weight_decay.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing
        Deep Models", arXiv:2208.06677.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = Adan([w], lr=0.1, weight_decay=0.0, compile=False)
    >>> optimizer.step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    betas: ThreeBetas = ThreeBetas(0.98, 0.92, 0.99)
    weight_decay: Float = Float(2e-2)
    eps: Float = Float(1e-6, "epsilon")
    _: KW_ONLY
    adam_wd: bool = False

    counterparts = Counterparts(optimi_negated=("prev_grad",))
    _positional = ("decouple_lr", "max_lr", "adam_wd", *POSITIONAL)

    class State(NamedTuple):
        exp_avg: Moment  # m
        exp_avg_diff: Moment  # w
        exp_avg_sq: SecondMoment  # n
        prev_grad: Former  # g_prev

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2, b3 = self.betas
        change = where(t > 1, 1.0, 0.0) * (g - s.prev_grad)
        m = b1 * s.exp_avg + (1 - b1) * g
        w = b2 * s.exp_avg_diff + (1 - b2) * change
        ahead = g + b2 * change
        n = b3 * s.exp_avg_sq + (1 - b3) * (ahead * ahead)
        d = 1 / (1 - b1**t) * m + rounded(b2) * (1 / (1 - b2**t)) * w
        d = d / (1 / (1 - b3**t) ** 0.5 * root(n) + self.eps)
        return d, self.State(m, w, n, g)

    def usual_decay(self):
        return "decoupled" if self.adam_wd else "proximal"


adan, adan_init, adan_step = functions(Adan)
