"""NAdam (Dozat 2016)."""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.core.rule import Scalar
from optimi_func.rules import (
    Betas,
    Coupled,
    Float,
    Moment,
    SlowSecondMoment,
    functions,
    root,
)
from optimi_func.state.convert import DECAYS, Counterparts

__all__ = ["NAdam", "nadam", "nadam_init", "nadam_step"]


class NAdam(Coupled, name="nadam"):
    """NAdam: Adam with Nesterov momentum.

        m <- b1 * m + (1 - b1) * g,   v <- b2 * v + (1 - b2) * g^2
        mu_t = b1 * (1 - 0.96^(t * momentum_decay) / 2),   M_t = mu_1 * ... * mu_t
        d = (1 - mu_t) / (1 - M_t) * g + mu_{t+1} / (1 - M_{t+1}) * m
        p <- p - lr * d / (sqrt(vhat) + eps)

    Here vhat = v / (1 - b2^t). The momentum mu_t rises from b1 / 2 to b1 during the run.

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        momentum_decay: The rate at which mu_t rises from step to step. With a larger
            momentum_decay, mu_t rises faster.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Dozat, "Incorporating Nesterov Momentum into Adam", ICLR workshop 2016.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = NAdam([w], lr=0.1, momentum_decay=0.0, compile=False)
    >>> optimizer.step(w.sum().backward)
    >>> w.detach()
    tensor([0.8944, 0.8944])
    """

    lr: Float = Float(2e-3)
    betas: Betas = Betas(0.9, 0.999)
    eps: Float = Float(1e-8, "epsilon")
    weight_decay: Float = Float(0.0)
    momentum_decay: Float = Float(4e-3)

    counterparts = Counterparts(in_torch=torch.optim.NAdam, torch_names=DECAYS)
    _positional = ("decouple_wd",)

    class State(NamedTuple):
        exp_avg: Moment  # m
        exp_avg_sq: SlowSecondMoment  # v

    class Running(NamedTuple):
        mu_product: Scalar = 1.0  # M

    def direction(self, g: Tensor, s: State, t: float, r: Running):
        b1, b2 = self.betas
        mu = b1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay))
        ahead = b1 * (1 - 0.5 * 0.96 ** ((t + 1) * self.momentum_decay))
        product = r.mu_product * mu
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * (g * g)
        d = (1 - mu) / (1 - product) * g + ahead / (1 - product * ahead) * m
        d = d / (1 / (1 - b2**t) ** 0.5 * root(v) + self.eps)
        return d, self.State(m, v), self.Running(product)


nadam, nadam_init, nadam_step = functions(NAdam)
