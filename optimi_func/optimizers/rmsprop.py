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

    With momentum, lr * b is subtracted from p, where b <- momentum * b + g / (sqrt(v) +
    eps). With centered=True, the divisor is a standard deviation: v is replaced by v - m^2,
    where m is the mean gradient.

    Args:
        alpha: Fraction of v (and of m) that carries over from one step to the next.
        eps: Added to the square root of v.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        momentum: Fraction of b that carries over from one step to the next. With
            momentum=0, b is not stored. The momentum may change during a run.
        centered: Divide by the gradient's standard deviation instead of its root mean
            square.
        tf_like: Use TensorFlow's formula, as in many published reinforcement-learning
            results. In TensorFlow's formula, v begins at 1, and eps is added to v before
            the square root is taken.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

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
        """True if momentum is on."""
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


rmsprop, rmsprop_init, rmsprop_step = functions(RMSprop)
