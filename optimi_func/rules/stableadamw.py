"""StableAdamW: Adam that slows down where the gradient outgrows its second moment.

Wortsman et al. 2023, arXiv:2304.13013, with AdaFactor's update clipping (Shazeer &
Stern 2018, arXiv:1804.04235). Moments and d are Adam's; the whole move of the tensor is
divided by max(1, RMS):

    RMS^2 = mean(g^2 / max(v / (1 - b2^t), eps^2))
"""

from torch import Tensor

from optimi_func._rule import Direction, Rule
from optimi_func.rules import adam


def direction(g: Tensor, s: adam.State, c: adam.Coeffs) -> Direction:
    m, v = new = adam.moments(g, s.exp_avg, s.exp_avg_sq, c)
    # In roots: eps^2 leaves float32's range long before eps does.
    root = c.unbias2 * adam.root(v)
    ratio = g / root.clamp_min(c.eps)
    return Direction(c.unbias1 * m / (root + c.eps), new, spread=ratio * ratio)


stableadamw = Rule(
    "stableadamw",
    *(adam.State, adam.init, adam.coeffs, direction),
    accumulate=adam.accumulate,
    per_tensor=True,
)
