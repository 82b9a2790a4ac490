"""AdamP: Slowing Down the Slowdown for Momentum Optimizers on
Scale-invariant Weights, Heo et al. 2020 (arXiv:2006.08217).

d = m / sqrt(v), without its part along x if g is almost orthogonal to x,
x -= lr d

Use AdamP for networks with normalization layers, because weights in such
networks keep growing under Adam. AdamP removes the component of each update
that would only change the norm of the weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class AdamP(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    delta: float = 0.1
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def adam(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        u = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return u, self.State(m, v)

    def measure(
        self, mean, numel, g: Tensor, s: State, x: Tensor, t: float
    ):
        d, _ = self.adam(g, s, t)
        square, along = mean(x * x), mean(x * d)
        cosine = mean(g * x).abs() / (root(mean(g * g) * square) + 1e-12)
        apart = cosine < self.delta / numel.sqrt()
        return {"share": torch.where(apart, along / square, 0.0)}

    def direction(self, g: Tensor, s: State, x: Tensor, t: float, share):
        d, s = self.adam(g, s, t)
        return d - share * x, s
