"""Adadelta (Zeiler 2012)."""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Coupled, Float, SecondMoment, functions, root
from optimi_func.state.convert import Counterparts

__all__ = ["Adadelta", "adadelta", "adadelta_init", "adadelta_step"]


class Adadelta(Coupled, name="adadelta"):
    """Adadelta: RMSprop whose steps are scaled by the root mean square of recent steps.

        v <- rho * v + (1 - rho) * g^2
        d = sqrt(a + eps) / sqrt(v + eps) * g,   p <- p - lr * d
        a <- rho * a + (1 - rho) * d^2

    The size of the steps does not depend on the scale of the loss, so lr is usually 1. The
    first steps move each element by about sqrt(eps).

    Args:
        rho: Fraction of the averages v and a that carries over from one step to the next,
            at most 1.
        eps: Added to each of the averages v and a before its square root is taken.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Zeiler, "ADADELTA: An Adaptive Learning Rate Method", arXiv:1212.5701.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Adadelta([w], eps=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.2929, 0.2929])
    """

    lr: Float = Float(1.0)
    rho: Float = Float(0.9, most=1.0)
    eps: Float = Float(1e-6, "epsilon")
    weight_decay: Float = Float(0.0)

    counterparts = Counterparts(in_torch=torch.optim.Adadelta)
    _positional = ("foreach",)

    class State(NamedTuple):
        square_avg: SecondMoment  # v
        acc_delta: SecondMoment  # a

    def direction(self, g: Tensor, s: State):
        v = self.rho * s.square_avg + (1 - self.rho) * (g * g)
        d = root(s.acc_delta + self.eps) / root(v + self.eps) * g
        return d, self.State(v, self.rho * s.acc_delta + (1 - self.rho) * (d * d))


adadelta, adadelta_init, adadelta_step = functions(Adadelta)
