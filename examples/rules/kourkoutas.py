"""Kourkoutas-Beta: A Sunspike-Driven Adam Optimizer with Desert Flair,
Kassinos 2025 (arXiv:2508.12996).

r = a r + (1 - a) |g|, s = |g| / (|g| + r), b2 = high - (high - low) s,
x -= lr m / sqrt(v)

Use Kourkoutas-Beta for physics-informed networks and other models with
spiky gradients. Kourkoutas-Beta lowers beta2 while a gradient spikes. In
this file, each tensor has its own beta2. In the paper, each layer has its
own beta2.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Number, Optimizer, SecondMoment, root


class Kourkoutas(Optimizer):
    beta: float = 0.9
    low: float = 0.88
    high: float = 0.999
    alpha: float = 0.93  # a
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment
        norm: Number  # r

    def measure(self, mean, numel: Tensor, g: Tensor, s: State):
        size = root(mean(g * g) * numel)
        norm = self.alpha * s.norm + (1 - self.alpha) * size
        spike = size / (size + norm + 1e-9)
        return {
            "norm": norm,
            "b2": self.high - (self.high - self.low) * spike,
        }

    def direction(self, g: Tensor, s: State, b2: Tensor):
        m = self.beta * s.exp_avg + (1 - self.beta) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        return m / (root(v) + self.eps), self.State(m, v, s.norm)
