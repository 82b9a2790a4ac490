"""MVN-Grad: Adaptive Optimization via Momentum on Variance-Normalized
Gradients, Patitucci & Mokhtari 2026 (arXiv:2602.10204).

v = b2 v + (1 - b2) (g - m)^2, n = b1 n + (1 - b1) g / sqrt(v), x -= lr n

Use MVN-Grad for spiky gradients. MVN-Grad divides each gradient by the
gradient's standard deviation before adding it to the momentum. LaProp
divides by the root mean square of the gradients instead.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class MVNGrad(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        normed: Tensor
        exp_var: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_var + (1 - b2) * (g - m) * (g - m)
        scaled = g / (root(v / (1 - b2**t)) + self.eps)
        n = b1 * s.normed + (1 - b1) * scaled
        return n / (1 - b1**t), self.State(m, n, v)
