"""LaProp: Separating Momentum and Adaptivity in Adam, Ziyin et al. 2020
(arXiv:2002.04839).

m = b1 m + (1 - b1) g / sqrt(v), x -= lr m

Use LaProp for noisy gradients. LaProp normalizes each gradient before
adding it to the momentum, so b1 can be near 1 while b2 is small. Adam
diverges if b1 is near 1 and b2 is small.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class LaProp(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        scaled = g / (root(v / (1 - b2**t)) + self.eps)
        m = b1 * s.exp_avg + (1 - b1) * scaled
        return m / (1 - b1**t), self.State(m, v)
