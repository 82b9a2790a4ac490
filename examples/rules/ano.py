"""Ano: Faster is Better in Noisy Landscape, Kegreisz 2025
(arXiv:2508.18258).

x -= lr |g| sign(m) / sqrt(v), v += (1 - b2) sign(g^2 - v) g^2

Use Ano for noisy gradients, as in reinforcement learning. In Ano, the
momentum determines the direction of a step, and the current gradient
determines the size of the step.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class Ano(Optimizer):
    betas: Betas = Betas(0.92, 0.99)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        sign = (g * g - s.exp_avg_sq).sign()
        v = b2 * s.exp_avg_sq + (1 - b2) * sign * g * g
        u = g.abs() * m.sign() / (root(v / (1 - b2**t)) + self.eps)
        return u, self.State(m, v)
