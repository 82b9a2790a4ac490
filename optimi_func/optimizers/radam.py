"""RAdam (Liu et al. 2020): the rule, the pure optimizer and the class."""

from dataclasses import InitVar, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.math import choose, power, root, sqrt
from optimi_func.core.rule import Direction, Rule, Scalar
from optimi_func.optimizers import _adam as adam
from optimi_func.state.convert import Counterparts

__all__ = ["RAdam", "radam", "radam_init", "radam_step"]


class Coeffs(NamedTuple):
    adam: adam.Coeffs
    rectification: Scalar  # r once rho > 5, before that 0
    unrectified: Scalar  # 1 before that, then 0


def rectification(t: Scalar, beta2: Scalar, least: float) -> tuple[bool | Tensor, Scalar]:
    """Return rho > least, which must be at least 4, and r."""
    decayed = power(beta2, t)
    rho_inf = 2.0 / (1.0 - beta2) - 1.0
    rho = rho_inf - 2.0 * t * decayed / (1.0 - decayed)
    enough = rho > least
    # If rho <= 4, r is undefined and its derivative not finite, so 6 takes rho's place.
    x, x_inf = choose(enough, rho, 6.0), choose(enough, rho_inf, 6.0)
    r = sqrt((x - 4.0) * (x - 2.0) * x_inf / ((x_inf - 4.0) * (x_inf - 2.0) * x))
    return enough, r


def coeffs(t: Scalar, *, betas: tuple[Scalar, Scalar], eps: Scalar) -> Coeffs:
    enough, r = rectification(t, betas[1], 5.0)
    inner = adam.coeffs(t, betas=betas, eps=eps)
    return Coeffs(inner, choose(enough, r, 0.0), choose(enough, 0.0, 1.0))


def accumulate(c: Coeffs) -> Coeffs:
    return c._replace(adam=adam.accumulate(c.adam))


def direction(g: Tensor, s: adam.State, c: Coeffs) -> Direction:
    m, v = new = adam.moments(g, s.exp_avg, s.exp_avg_sq, c.adam)
    mhat = c.adam.inv_bias_correction1 * m
    # One of the two scalars is 0, because a branch would need another graph.
    denominator = c.adam.inv_sqrt_bias_correction2 * root(v) + c.adam.eps
    return Direction(mhat * (c.rectification / denominator + c.unrectified), new)


radam_rule = Rule("radam", adam.State, adam.init, coeffs, direction, accumulate=accumulate)


@dataclass(frozen=True, kw_only=True, repr=False)
class radam(adam.AdamLikeValue, rule=radam_rule):
    """`RAdam` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts(in_torch=torch.optim.RAdam)

    decouple_wd: bool = False


radam_init = init_function(radam_rule)
radam_step = step_function(radam)


class RAdam(adam.AdamLike):
    """RAdam: Adam that uses v only after enough gradients.

        rho_inf = 2 / (1 - b2) - 1,   rho = rho_inf - 2 * t * b2^t / (1 - b2^t)
        r^2 = (rho - 4)(rho - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho)
        p <- p - lr * r * mhat / (sqrt(vhat) + eps)  once rho > 5, before: lr * mhat

    with Adam's bias corrected m and v. This replaces the warmup that Adam needs.

    Args:
        betas: b1 and b2, each in [0, 1): how much of m and v a step keeps.
        weight_decay: Decay coefficient: added to the gradient as weight_decay * p, or
            (decouple_wd) multiplied by lr, or (decouple_lr) by lr / max_lr.
        eps: Added to the root, after the bias correction.
        decouple_wd: Subtract decay from the parameter, not through the gradient.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Liu et al., "On the Variance of the Adaptive Learning Rate", arXiv:1908.03265.

    >>> w = torch.ones(2, requires_grad=True)
    >>> RAdam([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    factory = radam

    decouple_wd: InitVar[bool] = False
