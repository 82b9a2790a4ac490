"""ADOPT (Taniguchi et al. 2024)."""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import (
    Betas,
    Body,
    Coupled,
    Float,
    Moment,
    Wide,
    functions,
    root,
    rounded,
    where,
)

__all__ = ["ADOPT", "adopt", "adopt_init", "adopt_step"]


class ADOPT(Body, name="adopt"):
    """ADOPT: Adam that divides each gradient by the root mean square of earlier gradients.

        m <- b1 * m + (1 - b1) * clip(g / max(sqrt(v), eps), (t - 1)^(1/4))
        p <- p - lr * m
        v <- b2 * v + (1 - b2) * g^2

    The first step sets v = g^2 and does not move the parameters. When a gradient is divided
    by the root of v, v does not yet contain this gradient. ADOPT therefore converges with
    any b2, whereas Adam may not converge. v is stored in float32 in every storage mode,
    because bfloat16 would round away the small change in v in each step.

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        eps: Lower bound for the divisor of the gradient, sqrt(v).
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta2 with the
        Optimal Rate", arXiv:2411.02853, plus the clipping that the authors' code added.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = ADOPT([w], lr=0.1, compile=False)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(2)
    ...     optimizer.step()
    >>> w.detach()
    tensor([0.9900, 0.9900])
    """

    lr: Float = Float(1e-3)
    betas: Betas = Betas(0.9, 0.9999)
    weight_decay: Float = Float(0.0)
    eps: Float = Float(1e-6, "epsilon")
    decouple_wd: bool = False
    usual_decay = Coupled.usual_decay

    class State(NamedTuple):
        exp_avg: Moment  # m
        exp_avg_sq: Wide  # v, one gradient behind

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        limit = rounded((t - 1) ** 0.25)
        scaled = g / root(s.exp_avg_sq).clamp_min(self.eps)
        m = b1 * s.exp_avg + (1 - b1) * scaled.clamp_min(-limit).clamp_max(limit)
        kept, added = where(t > 1, b2, 0.0), where(t > 1, 1 - b2, 1.0)
        return m, self.State(m, kept * s.exp_avg_sq + added * (g * g))

    def after(self, u: Tensor, s: State, t: float):
        return where(t > 1, u, 0.0), s  # 0 times a u that is not finite would be NaN


adopt, adopt_init, adopt_step = functions(ADOPT)
