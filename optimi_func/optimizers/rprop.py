"""Rprop (Riedmiller & Braun 1993)."""

import math
from dataclasses import KW_ONLY
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func.classes.fields import Floats
from optimi_func.core.rule import Scalar
from optimi_func.pure.functional import Number
from optimi_func.rules import Body, Float, Former, Wide, check_number, functions, where
from optimi_func.state.convert import Counterparts

__all__ = ["Rprop", "rprop", "rprop_init", "rprop_step"]


Pair: TypeAlias = Floats[tuple[Scalar, Scalar], tuple[Number, Number]]


class Rprop(Body, name="rprop", lr="inside"):
    """Rprop: step along the sign of the gradient, with a step size for each element.

        size <- size * (b if g * g_prev > 0, a if g * g_prev < 0, else 1)
        g <- 0 where g * g_prev < 0
        p <- p - sign(g) * size

    Each step size stays within the range given by step_sizes. Rprop is made for gradients
    that are computed from the whole data set, because the noise of mini-batches flips the
    signs of gradients. lr is only the initial step size, so learning-rate schedules have no
    effect on the step sizes.

    Args:
        lr: The initial step size of every element.
        etas: The factors a in (0, 1) and b above 1. Step sizes shrink by the factor a, and
            grow by the factor b.
        step_sizes: The smallest and the largest step size.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True. torch's Rprop has no weight decay.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Riedmiller & Braun, "A direct adaptive method for faster backpropagation learning:
        the RPROP algorithm", ICNN 1993.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Rprop([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    lr: Float = Float(1e-2)
    etas: Pair = Floats(0.5, 1.2)
    step_sizes: Pair = Floats(1e-6, 50.0, most=math.inf)
    _: KW_ONLY
    weight_decay: Float = Float(0.0)

    counterparts = Counterparts(in_torch=torch.optim.Rprop)
    _positional = ()

    class State(NamedTuple):
        prev: Former  # g_prev
        step_size: Wide

    def check(self) -> None:
        check_number("etas[0]", "etas[0]", self.etas[0], above=0.0, below=1.0)
        check_number("etas[1]", "etas[1]", self.etas[1], above=1.0)

    def direction(self, g: Tensor, s: State, t: float):
        (less, more), (least, most) = self.etas, self.step_sizes
        # 0 until the first step.
        size = where(t == 1, self.lr, 0.0) + where(t == 1, 0.0, 1.0) * s.step_size
        sign = (g * s.prev).sign()
        size = size * where(sign > 0, more, where(sign < 0, less, 1.0))
        size = size.clamp_min(least).clamp_max(most)
        g = where(sign < 0, 0.0, g)
        return g.sign() * size, self.State(g, size)


rprop, rprop_init, rprop_step = functions(Rprop)
