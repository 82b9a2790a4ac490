"""RMSprop (Hinton 2012), plain, centered and with momentum."""

from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.core.checks import is_on
from optimi_func.rules import (
    Coupled,
    Float,
    Moment,
    SecondMoment,
    Wide,
    choice,
    functions,
    root,
    where,
)
from optimi_func.state.convert import Counterparts

__all__ = ["RMSprop", "rmsprop", "rmsprop_init", "rmsprop_step"]


class RMSprop(Coupled, name="rmsprop"):
    """RMSprop: step along the gradient, divided by its root mean square.

        v <- alpha * v + (1 - alpha) * g^2
        p <- p - lr * g / (sqrt(v) + eps)

    With momentum the step is b <- momentum * b + g / (sqrt(v) + eps) instead. With
    centered=True, v - m^2 takes the place of v, where m is the mean gradient: the divisor
    is then a standard deviation.

    Args:
        alpha: Share of v (and of m) that a step keeps.
        eps: Added to the root.
        weight_decay: Decay coefficient: added to the gradient as weight_decay * p, or
            (decouple_wd) multiplied by lr, or (decouple_lr) by lr / max_lr.
        momentum: Share of b kept; 0 needs no buffer. It may change during a run.
        centered: Divide by the root of the variance instead of the mean square.
        tf_like: Use TensorFlow's form, as many results of reinforcement learning do. v
            begins at 1, and eps is added to v before its root is taken.
        decouple_wd: Subtract decay from the parameter, not through the gradient.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Tieleman & Hinton, "Lecture 6.5: Divide the gradient by a running average of its
        recent magnitude", Coursera 2012. Centered: Graves, arXiv:1308.0850.

    >>> w = torch.ones(2, requires_grad=True)
    >>> RMSprop([w], lr=0.01, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    lr: Float = Float(1e-2)
    alpha: Float = Float(0.99)
    eps: Float = Float(1e-8, "epsilon")
    weight_decay: Float = Float(0.0)
    momentum: Float = Float(0.0)
    centered: bool = False
    _: KW_ONLY
    tf_like: bool = False

    counterparts = Counterparts(in_torch=torch.optim.RMSprop)
    _positional = ("capturable", "foreach", "maximize")

    @choice
    def averages(self) -> bool:
        """True if there is a momentum."""
        return is_on(self.momentum)

    class Plain(NamedTuple):
        square_avg: SecondMoment  # v

    class Momentum(NamedTuple):
        square_avg: SecondMoment
        momentum_buffer: Moment  # b

    class Centered(NamedTuple):  # the difference of two means needs all their digits
        square_avg: Wide
        grad_avg: Wide  # m

    class Both(NamedTuple):
        square_avg: Wide
        grad_avg: Wide
        momentum_buffer: Moment

    @property
    def State(self) -> type[Plain | Momentum | Centered | Both]:
        if self.centered:
            return self.Both if self.averages else self.Centered
        return self.Momentum if self.averages else self.Plain

    def direction(self, g: Tensor, s: Both, t: float):
        v = self.alpha * s.square_avg + (1 - self.alpha) * (g * g)
        if self.tf_like:
            v = v + where(t == 1, self.alpha, 0.0)
        new, spread = [v], v
        if self.centered:
            new.append(m := self.alpha * s.grad_avg + (1 - self.alpha) * g)
            spread = v - m * m
        d = g / (root(spread + self.eps) if self.tf_like else root(spread) + self.eps)
        if self.averages:
            new.append(d := self.momentum * s.momentum_buffer + d)
        return d, self.State(*new)


Plain, Momentum = RMSprop.Plain, RMSprop.Momentum  # found by torch.load(weights_only=True)
Centered, Both = RMSprop.Centered, RMSprop.Both
rmsprop, rmsprop_init, rmsprop_step = functions(RMSprop)
