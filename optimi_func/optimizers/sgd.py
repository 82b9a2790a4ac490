"""SGD, with momentum and Nesterov."""

import math
from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.classes.base import POSITIONAL
from optimi_func.core.checks import is_on
from optimi_func.core.rule import NoState, Scalar
from optimi_func.rules import Body, Coupled, Float, Moment, choice, functions, where
from optimi_func.state.convert import Counterparts

__all__ = ["SGD", "sgd", "sgd_init", "sgd_step"]


class SGD(Body, name="sgd"):
    """SGD: step against the gradient, or against a decaying sum of gradients.

        b <- momentum * b + (1 - dampening) * g,   p <- p - lr * b

    With nesterov=True, lr * (g + momentum * b) is subtracted from p instead of lr * b. With
    momentum=0, lr * g is subtracted.

    Args:
        momentum: Fraction of b that carries over from one step to the next, in [0, 1). With
            momentum=0, b is not stored. The momentum may change during a run.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        dampening: True sets the dampening to the value of momentum, so that b is a moving
            average. A number has the same meaning as in torch.optim.SGD. If dampening is a
            number, b starts as the first gradient.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.
        torch_init: Initialize b with the first gradient even if dampening=True.
        nesterov: Use Nesterov momentum, which requires a momentum above 0 and no dampening.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Sutskever, Martens, Dahl & Hinton, "On the importance of initialization and
        momentum in deep learning", ICML 2013.

    >>> w = torch.ones(2, requires_grad=True)
    >>> SGD([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    lr: Float = Float(1e-3)
    momentum: Float = Float(0.0, "momentum", below=1.0)
    weight_decay: Float = Float(0.0)
    dampening: Float = Float(
        False, "dampening", bool, argument=bool | float, least=-math.inf
    )
    decouple_wd: bool = False
    _: KW_ONLY
    torch_init: bool = False
    nesterov: bool = False
    usual_decay = Coupled.usual_decay

    counterparts = Counterparts(
        in_torch=torch.optim.SGD,
        torch_counts_steps=False,
        torch_options=lambda group: (
            {"dampening": group["momentum"]} if group["dampening"] is True else {}
        ),
        optimi_names={"exp_avg": "momentum_buffer"},
        bitsandbytes=("momentum_buffer",),
    )
    _positional = ("decouple_lr", "max_lr", "torch_init", *POSITIONAL)

    class Buffer(NamedTuple):
        momentum_buffer: Moment  # b

    @choice
    def averages(self) -> bool:
        """True if momentum is on, even if its schedule is 0 at some steps."""
        return is_on(self.momentum)

    @property
    def State(self) -> type[Buffer | NoState]:
        return self.Buffer if self.averages else NoState

    def direction(self, g: Tensor, s: Buffer, t: float):
        return self.along(g, s, t, self.momentum) if self.averages else (g, s)

    def accumulate(self, g: Tensor, s: Buffer, t: float):
        # In Nesterov's g + momentum * b, b has the whole gradient and g is the last
        # microbatch.
        return self.along(g, s, t, 1.0) if self.averages else None

    def along(self, g: Tensor, s: Buffer, t: float, kept: Scalar):
        flag = isinstance(self.dampening, bool)
        tau = self.momentum if self.dampening is True else 0.0 if flag else self.dampening
        share = 1.0 - tau
        if self.torch_init or self.dampening is not True:
            share = where(t == 1, 1.0, share)  # b starts as the gradient
        b = kept * s.momentum_buffer + share * g
        d = g + self.momentum * b if self.nesterov else b
        return d, s._replace(momentum_buffer=b)

    def check(self) -> None:
        if self.nesterov and (not self.averages or is_on(self.dampening)):
            raise ValueError(
                f"Invalid nesterov: nesterov=True with momentum={self.momentum} and "
                f"dampening={self.dampening}: allowed with a momentum and no dampening"
            )

    def mistakes(self) -> list[str]:
        if not self.averages and is_on(self.dampening):
            return [f"dampening={self.dampening} has no effect without momentum."]
        if self.torch_init and self.dampening is not True:
            return ["torch_init=True has no effect without dampening=True."]
        return []


State = SGD.Buffer  # the name of this class in saved files
sgd, sgd_init, sgd_step = functions(SGD)
