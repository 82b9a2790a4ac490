"""AdEMAMix (Pagliardini et al. 2024)."""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from optimi_func.core.rule import Scalar
from optimi_func.rules import Body, Float, Moment, ThreeBetas, Wide, functions, root, where

__all__ = ["AdEMAMix", "ademamix", "ademamix_init", "ademamix_step"]


class AdEMAMix(Body, name="ademamix"):
    """AdEMAMix: AdamW with a second, much slower mean of the gradients.

        m1 <- b1 * m1 + (1 - b1) * g,   m2 <- b3(t) * m2 + (1 - b3(t)) * g
        v <- b2 * v + (1 - b2) * g^2
        u = (m1hat + alpha(t) * m2) / (sqrt(vhat) + eps)
        p <- p - lr * u - lr * weight_decay * p

    m1hat and vhat are m1 and v after Adam's bias correction. m2 has no bias correction.
    Through the slow mean m2, a gradient influences tens of thousands of later steps. m2 and
    v are stored in float32 in every storage mode, because bfloat16 would round away the
    small changes in m2 and v in each step.

    Args:
        betas: b1, b2 and b3, each in [0, 1): the fractions of m1, v and m2 that carry over
            from one step to the next.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment.
        alpha: Factor on m2, at least 0. The authors' code uses 2, and their paper uses 8.
        alpha_warmup: Number of steps over which alpha grows linearly from 0, usually the
            length of the whole run. alpha_warmup is not part of the state, so pass it again
            when you resume a run.
        beta3_warmup: Number of steps over which b3(t) grows from b1 to b3. During this
            warmup, the half-life of m2 grows linearly.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Pagliardini, Ablin & Grangier, "The AdEMAMix Optimizer: Better, Faster, Older",
        arXiv:2409.03137.

    >>> w = torch.ones(2, requires_grad=True)
    >>> AdEMAMix([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.8999, 0.8999])
    """

    lr: Float = Float(1e-3)
    betas: ThreeBetas = ThreeBetas(0.9, 0.999, 0.9999)
    weight_decay: Float = Float(0.0)
    eps: Float = Float(1e-8, "epsilon")
    alpha: Float = Float(8.0, "share of the slow mean")
    alpha_warmup: Float = Float(0, "warmup of alpha")
    beta3_warmup: Float = Float(0, "warmup of beta3")

    class State(NamedTuple):
        exp_avg: Moment  # m1
        exp_avg_slow: Wide  # m2
        exp_avg_sq: Wide  # v

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2, _ = self.betas
        return self.with_moments(g, s, t, b1, b2, self.beta3(t))

    def accumulate(self, g: Tensor, s: State, t: float):
        # Both means become those of the whole gradient: see Adam.
        return self.with_moments(g, s, t, 1.0, 1.0, 1.0)

    def with_moments(self, g: Tensor, s: State, t: float, *kept: Scalar):
        b1, b2, b3 = *self.betas[:2], self.beta3(t)
        fast = kept[0] * s.exp_avg + (1 - b1) * g
        slow = kept[2] * s.exp_avg_slow + (1 - b3) * g
        v = kept[1] * s.exp_avg_sq + (1 - b2) * (g * g)
        d = 1 / (1 - b1**t) * fast + self.alpha * warmed(t, self.alpha_warmup) * slow
        d = d / (1 / (1 - b2**t) ** 0.5 * root(v) + self.eps)
        return d, self.State(fast, slow, v)

    def beta3(self, t: float) -> Scalar:
        """Return b3(t)."""
        # The half-life of m2 in steps grows linearly in t from that of b1 to that of b3.
        b1, _, b3 = self.betas
        first, last = half_life(b1), half_life(b3)
        now = first + warmed(t, self.beta3_warmup) * (last - first)
        warming = where(now == 0, 0.0, 0.5 ** (1 / where(now == 0, 1.0, now)))
        return where(t >= self.beta3_warmup, b3, warming)


def warmed(t: Scalar, warmup: Scalar) -> Scalar:
    """Return the factor of a linear warmup at step t, in [0, 1]."""
    return where(t < warmup, t / where(warmup > 0, warmup, 1.0), 1.0)


def half_life(beta: Scalar) -> Scalar:
    """Return the number of steps after which a gradient's weight in a mean has halved."""
    known = cast(Tensor, where(beta == 0, 0.5, beta))  # to torch a stand-in is one
    return where(beta == 0, 0.0, math.log(0.5) / torch.log(known))


ademamix, ademamix_init, ademamix_step = functions(AdEMAMix)
