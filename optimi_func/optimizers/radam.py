"""RAdam (Liu et al. 2020)."""

from dataclasses import KW_ONLY

import torch
from torch import Tensor

from optimi_func.core.rule import Scalar
from optimi_func.optimizers.adam import Moments
from optimi_func.rules import Coupled, functions, where
from optimi_func.state.convert import DECAYS, Counterparts, Group

__all__ = ["RAdam", "radam", "radam_init", "radam_step"]


def rectification(t: Scalar, beta2: Scalar, least: float) -> tuple[bool | Tensor, Scalar]:
    """Return whether rho > `least`, and the factor r. `least` must be 4 or more."""
    decayed = beta2**t
    rho_inf = 2.0 / (1.0 - beta2) - 1.0
    rho = rho_inf - 2.0 * t * decayed / (1.0 - decayed)
    enough = rho > least
    # If rho <= 4, r is undefined and its derivative not finite, so 6 takes rho's place.
    x, x_inf = where(enough, rho, 6.0), where(enough, rho_inf, 6.0)
    r = ((x - 4.0) * (x - 2.0) * x_inf / ((x_inf - 4.0) * (x_inf - 2.0) * x)) ** 0.5
    return enough, r


class Rectified(Moments):
    """Base class of RAdam and Ranger."""

    torch_form = False

    def scaled(self, mhat: Tensor, root: Tensor, t: float) -> Tensor:
        enough, r = rectification(t, self.betas[1], 5.0)
        eps = self.eps
        if self.torch_form:
            eps = eps / (1 - self.betas[1] ** t) ** 0.5
        # One of the two scalars is 0, because a branch would need another graph.
        adapted = where(enough, r, 0.0) / (root + eps)
        return mhat * (adapted + where(enough, 0.0, 1.0))


def _our_options(group: Group) -> Group:
    """Return torch_form=True for groups of optimi_func.optim.RAdam, which do not set it."""
    theirs = group.get("torch_form") == {} and "decouple_wd" not in group
    return {"torch_form": True} if theirs else {}


class RAdam(Rectified, name="radam"):
    """RAdam: Adam that divides by the second moment only after averaging enough gradients.

        rho_inf = 2 / (1 - b2) - 1,   rho = rho_inf - 2 * t * b2^t / (1 - b2^t)
        r^2 = (rho - 4)(rho - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho)
        p <- p - lr * r * mhat / (sqrt(vhat) + eps)  once rho > 5, before: lr * mhat

    mhat and vhat are Adam's moments after bias correction. While rho is at most 5, v
    averages too few gradients to be reliable, and the step is lr * mhat. RAdam's correction
    replaces the warmup that Adam needs.

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
        torch_form: Add eps to the square root of v before the bias correction, as
            torch.optim.RAdam does.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Liu et al., "On the Variance of the Adaptive Learning Rate", arXiv:1908.03265.

    >>> w = torch.ones(2, requires_grad=True)
    >>> RAdam([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    decouple_wd: bool = False
    _: KW_ONLY
    torch_form: bool = False
    usual_decay = Coupled.usual_decay

    counterparts = Counterparts(
        in_torch=torch.optim.RAdam, torch_names=DECAYS, our_options=_our_options
    )


radam, radam_init, radam_step = functions(RAdam)
