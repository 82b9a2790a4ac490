"""Adagrad (Duchi, Hazan & Singer 2011)."""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Coupled, Float, Wide, functions, root
from optimi_func.state.convert import Counterparts

__all__ = ["Adagrad", "adagrad", "adagrad_init", "adagrad_step"]


class Adagrad(Coupled, name="adagrad"):
    """Adagrad: divide each gradient by the root of the accumulated squared gradients.

        v <- v + g^2
        p <- p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(v) + eps)

    Steps become shorter as v grows. For elements that rarely receive a gradient, v stays
    small and steps stay large.

    Args:
        lr_decay: How fast lr falls: at step t, lr is divided by 1 + (t - 1) * lr_decay.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        initial_accumulator_value: Initial value of v, in units of a squared gradient.
        eps: Added to the square root of v.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Duchi, Hazan & Singer, "Adaptive Subgradient Methods for Online Learning and
        Stochastic Optimization", JMLR 12, 2011.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Adagrad([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    lr: Float = Float(1e-2)
    lr_decay: Float = Float(0.0)
    weight_decay: Float = Float(0.0)
    initial_accumulator_value: Float = Float(0.0)
    eps: Float = Float(1e-10, "epsilon")

    counterparts = Counterparts(in_torch=torch.optim.Adagrad)
    _positional = ("foreach",)

    class State(NamedTuple):
        sum: Wide  # v, which grows by less than bfloat16 could show

    def init(self, p: Tensor):
        return self.State(torch.zeros_like(p) + self.initial_accumulator_value)

    def direction(self, g: Tensor, s: State, t: float):
        v = s.sum + g * g
        d = 1 / (1 + (t - 1) * self.lr_decay) * g / (root(v) + self.eps)
        return d, self.State(v)


adagrad, adagrad_init, adagrad_step = functions(Adagrad)
