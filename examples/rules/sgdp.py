"""SGDP, from AdamP: Slowing Down the Slowdown for Momentum Optimizers on
Scale-invariant Weights, Heo et al. 2020 (arXiv:2006.08217).

m = b m + g, without its part along x if g is almost orthogonal to x,
x -= lr m

Use SGDP for ResNets and other networks with normalization layers, because
weights in such networks keep growing under SGD with momentum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, root


class SGDP(Optimizer):
    momentum: float = 0.9
    delta: float = 0.1

    class State(NamedTuple):
        buffer: Tensor

    def measure(self, mean, numel: Tensor, g: Tensor, s: State, x: Tensor):
        m = self.momentum * s.buffer + g
        square, along = mean(x * x), mean(x * m)
        cosine = mean(g * x).abs() / (root(mean(g * g) * square) + 1e-12)
        apart = cosine < self.delta / numel.sqrt()
        return {"share": torch.where(apart, along / square, 0.0)}

    def direction(self, g: Tensor, s: State, x: Tensor, share: Tensor):
        m = self.momentum * s.buffer + g
        return m - share * x, self.State(m)
