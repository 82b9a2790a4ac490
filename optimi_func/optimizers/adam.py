"""Adam (Kingma & Ba 2015), AdamW and AMSGrad."""

from dataclasses import KW_ONLY
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from optimi_func.core.rule import Scalar
from optimi_func.optimizers.mars import Corrected, refuse_mars
from optimi_func.rules import (
    Betas,
    Body,
    Coupled,
    Float,
    Former,
    Largest,
    Moment,
    SecondMoment,
    functions,
    root,
)
from optimi_func.state.convert import DECAYS, Counterparts

__all__ = ["Adam", "adam", "adam_init", "adam_step"]
__all__ += ["AdamW", "adamw", "adamw_init", "adamw_step"]


class Moments(Body):
    """Base class of optimizers with Adam's hyperparameters and moments."""

    lr: Float = Float(1e-3)
    betas: Betas = Betas(0.9, 0.99)
    weight_decay: Float = Float(0.0)
    eps: Float = Float(1e-6, "epsilon")

    class Plain(NamedTuple):
        exp_avg: Moment  # m
        exp_avg_sq: SecondMoment  # v

    State: ClassVar[type[NamedTuple]] = Plain

    def direction(self, g: Tensor, s: Plain, t: float):
        return self.with_moments(g, s, t, *self.betas)

    def accumulate(self, g: Tensor, s: Plain, t: float):
        # m is that of the summed gradient, but v sums the squares of the microbatches'
        # gradients (AdamA, arXiv:2305.19982).
        return self.with_moments(g, s, t, 1.0, 1.0)

    def with_moments(
        self,
        g: Tensor,
        s: "Plain | Adam.AMSGradState",
        t: float,
        kept1: Scalar,
        kept2: Scalar,
    ):
        b1, b2 = self.betas
        m = kept1 * s.exp_avg + (1 - b1) * g
        v = kept2 * s.exp_avg_sq + (1 - b2) * (g * g)
        new = s._replace(exp_avg=m, exp_avg_sq=v)
        if isinstance(s, Adam.AMSGradState):
            v = torch.maximum(s.max_exp_avg_sq, v)
            new = new._replace(max_exp_avg_sq=v)
        return self.scaled(1 / (1 - b1**t) * m, self.root(v, t), t), new

    def root(self, v: Tensor, t: float) -> Tensor:
        """Return the square root of v after bias correction."""
        return 1 / (1 - self.betas[1] ** t) ** 0.5 * root(v)

    def scaled(self, mhat: Tensor, root: Tensor, t: float) -> Tensor:
        """Return the direction, given the bias-corrected mean gradient and root of v."""
        return mhat / (root + self.eps)


class Adam(Moments, name="adam"):
    """Adam: step along the mean gradient, divided by the root of the mean squared gradient.

        m <- b1 * m + (1 - b1) * g,   v <- b2 * v + (1 - b2) * g^2
        p <- p - lr * mhat / (sqrt(vhat) + eps)

    Here mhat = m / (1 - b1^t) and vhat = v / (1 - b2^t) are the moments after bias
    correction.

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.
        amsgrad: In the divisor, replace v by the largest v so far, element by element
            (arXiv:1904.09237).

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Kingma & Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Adam([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    decouple_wd: bool = False
    _: KW_ONLY
    amsgrad: bool = False
    usual_decay = Coupled.usual_decay

    counterparts = Counterparts(
        in_torch=torch.optim.Adam, torch_names=DECAYS, bitsandbytes=Moments.Plain._fields
    )

    class AMSGradState(NamedTuple):
        exp_avg: Moment
        exp_avg_sq: SecondMoment
        max_exp_avg_sq: Largest  # the largest v so far

    @property
    def State(self) -> type[Moments.Plain | AMSGradState]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.AMSGradState if self.amsgrad else self.Plain


class AdamW(Corrected, Moments, name="adamw"):
    """AdamW: Adam with decoupled weight decay, which does not pass through the moments.

        p <- p - lr * mhat / (sqrt(vhat) + eps) - lr * weight_decay * p

    mhat and vhat are Adam's moments after bias correction.

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment.
        amsgrad: In the divisor, replace v by the largest v so far, element by element
            (arXiv:1904.09237).
        mars: Setting this factor turns on MARS. MARS replaces g by g + mars * b1 / (1 - b1)
            * (g - g_prev), where g_prev is the gradient of the previous step. If the result
            has a norm above 1, MARS scales it to a norm of 1. The paper uses mars=0.025
            with betas of 0.95 and 0.99, and a larger lr than for AdamW. MARS also stores
            g_prev, and cannot be combined with amsgrad. None turns MARS off.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101;
        Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large
        Models", arXiv:2411.10438.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = AdamW([w], lr=0.1, weight_decay=0.5, compile=False)
    >>> optimizer.step(w.sum().backward)
    >>> w.detach()
    tensor([0.8500, 0.8500])
    """

    weight_decay: Float = Float(1e-2)
    _: KW_ONLY
    amsgrad: bool = False

    counterparts = Counterparts(
        in_torch=torch.optim.AdamW,
        torch_options=refuse_mars,
        bitsandbytes=Moments.Plain._fields,
    )
    # `Corrected` has the methods `direction` and `accumulate`. They are the following two
    # methods of Moments, unless `mars` is set.
    plain_direction = Moments.direction
    plain_accumulate = Moments.accumulate

    AMSGradState = Adam.AMSGradState

    class WithFormer(NamedTuple):
        exp_avg: Moment
        exp_avg_sq: SecondMoment
        prev_grad: Former  # g_prev

    @property
    def State(self) -> type[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.mars is not None:
            return self.WithFormer
        return self.AMSGradState if self.amsgrad else self.Plain

    def check(self) -> None:
        if self.mars is not None and self.amsgrad:
            raise ValueError(f"Invalid amsgrad: amsgrad=True with mars={self.mars}")


State = Moments.Plain  # the name of this class in saved files
adam, adam_init, adam_step = functions(Adam)
adamw, adamw_init, adamw_step = functions(AdamW)
