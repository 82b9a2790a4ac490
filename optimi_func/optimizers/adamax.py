"""Adamax (Kingma & Ba 2015)."""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Coupled, Float, Moment, Wide, functions
from optimi_func.state.convert import Counterparts

__all__ = ["Adamax", "adamax", "adamax_init", "adamax_step"]


class Adamax(Coupled, name="adamax"):
    """Adamax: Adam that divides by the largest recent gradient, not by a root mean square.

        m <- b1 * m + (1 - b1) * g,   u <- max(b2 * u, |g| + eps)
        p <- p - lr / (1 - b1^t) * m / u

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and u that carry over from one
            step to the next.
        eps: Added to the absolute value of the gradient, |g|.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Kingma & Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980,
        section 7.1.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Adamax([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    lr: Float = Float(2e-3)
    betas: Betas = Betas(0.9, 0.999)
    eps: Float = Float(1e-8, "epsilon")
    weight_decay: Float = Float(0.0)

    counterparts = Counterparts(in_torch=torch.optim.Adamax)
    _positional = ("foreach",)

    class State(NamedTuple):
        exp_avg: Moment  # m
        exp_inf: Wide  # u, which bfloat16 would round back to what it was

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        u = torch.maximum(b2 * s.exp_inf, g.abs() + self.eps)
        return 1 / (1 - b1**t) * m / u, self.State(m, u)


adamax, adamax_init, adamax_step = functions(Adamax)
