"""SGDP, from AdamP: Slowing Down the Slowdown for Momentum Optimizers on
Scale-invariant Weights, Heo et al. 2020 (arXiv:2006.08217).

m = b m + g, without its part along x if g is almost orthogonal to x,
x -= lr m

Use SGDP for ResNets and other networks with normalization layers, because
weights in such networks keep growing under SGD with momentum.
"""

from typing import NamedTuple

import torch

from optimi_func import SGD
from optimi_func.hooks import hook
from optimi_func.rules import root


@hook
class projected(NamedTuple):
    delta: float = 0.1

    means, sized = 4, True

    def update(self, d, g, x):
        square, along, gx, gg, numel = yield [x * x, x * d, g * x, g * g]
        cosine = gx.abs() / (root(gg * square) + 1e-12)
        apart = cosine < self.delta / numel.sqrt()
        yield d - torch.where(apart, along / square, 0.0) * x


class SGDP(SGD):
    momentum: float = 0.9
    delta: float = 0.1

    def own_hooks(self):
        return (*super().own_hooks(), projected(self.delta))
