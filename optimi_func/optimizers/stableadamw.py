"""StableAdamW (Wortsman et al. 2023): the rule, the pure optimizer and the class."""

from dataclasses import InitVar, dataclass

from torch import Tensor

from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.math import root
from optimi_func.core.rule import Direction, Means, Rule, Scalar
from optimi_func.optimizers import _adam as adam
from optimi_func.pure.functional import Number

__all__ = ["StableAdamW", "stableadamw", "stableadamw_init", "stableadamw_step"]


def direction(g: Tensor, s: adam.State, c: adam.Coeffs) -> Direction:
    m, v = new = adam.moments(g, s.exp_avg, s.exp_avg_sq, c)
    root_v = c.inv_sqrt_bias_correction2 * root(v)
    d = c.inv_bias_correction1 * m / (root_v + c.eps)
    return Direction(d, new, root_v)


def measure(
    g: Tensor, x: Tensor, d: Tensor, decaying: Tensor, root_v: Tensor, c: adam.Coeffs
) -> list[Tensor]:
    # g / sqrt(max(vhat, eps^2)), by roots, because eps^2 may underflow in float32.
    ratio = g / root_v.clamp_min(c.eps)
    return [ratio * ratio]


def settle(
    means: list[Tensor], scale: Scalar, lr: Scalar, decay: Scalar, c: adam.Coeffs
) -> Tensor:
    (mean_square,) = means
    return mean_square.clamp_min(1.0).sqrt()


stableadamw_rule = Rule(
    *("stableadamw", adam.State, adam.init, adam.coeffs, direction),
    accumulate=adam.accumulate,
    means=Means(1, measure, settle),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class stableadamw(adam.AdamLikeValue, rule=stableadamw_rule):
    """`StableAdamW` as a value: `init` and `step` over a tree of parameters."""

    weight_decay: Number = 1e-2


stableadamw_init = init_function(stableadamw_rule)
stableadamw_step = step_function(stableadamw)


class StableAdamW(adam.AdamLike):
    """StableAdamW: AdamW with smaller steps if the gradient outgrows its second moment.

        RMS^2 = mean(g^2 / max(vhat, eps^2))            over each tensor
        p <- p - (lr / max(1, RMS)) * (mhat / (sqrt(vhat) + eps) + weight_decay * p)

    with Adam's bias corrected m and v. This is AdaFactor's update clipping
    (arXiv:1804.04235), which replaces gradient clipping and needs no hyperparameter.

    Args:
        betas: b1 and b2, each in [0, 1): how much of m and v a step keeps.
        weight_decay: Decay coefficient, multiplied by lr / max(1, RMS), or
            (decouple_lr) by that over max_lr.
        eps: Added to the root, after the bias correction; its square bounds vhat.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Wortsman et al., "Stable and low-precision training for large-scale
        vision-language models", arXiv:2304.13013.

    >>> w = torch.ones(2, requires_grad=True)
    >>> StableAdamW([w], lr=0.1, weight_decay=0.5, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.8500, 0.8500])
    """

    factory = stableadamw

    weight_decay: InitVar[float] = 1e-2
