"""Connections between Schedule-Free Optimizers, AdEMAMix, and Accelerated
SGD Variants, Morwani et al. 2025 (arXiv:2502.02431).

m = b1 m + g, x -= lr (m + alpha g) / sqrt(v)

Use Simplified AdEMAMix for large batches. Simplified AdEMAMix is AdEMAMix
with a single momentum near 1. Set lr to at most (1 - b1) times the learning
rate that you would use with Adam.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class SimplifiedAdEMAMix(Optimizer):
    betas: Betas = Betas(0.99, 0.95)
    alpha: float = 0.0
    eps: float = 1e-8

    class State(NamedTuple):
        momentum: Tensor
        exp_avg_sq: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m, v = b1 * s.momentum + g, b2 * s.exp_avg_sq + (1 - b2) * g * g
        u = (m + self.alpha * g) / (root(v / (1 - b2**t)) + self.eps)
        return u, self.State(m, v)
