"""Quasi-hyperbolic Momentum and Adam for Deep Learning, Ma & Yarats 2018
(arXiv:1810.06801).

x -= lr ((1 - n1) g + n1 m) / sqrt((1 - n2) g^2 + n2 v)

Use QHAdam if you want to tune a single rule that interpolates between SGD,
Adam and NAdam. Begin with a value between 0.7 and 0.995 for `nus[0]`, which
is n1 in the formula. Set `betas[0]` closer to 1 than you would with Adam.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class QHAdam(Optimizer):
    betas: Betas = Betas(0.995, 0.999)
    nus: tuple[float, float] = (0.7, 1.0)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        (b1, b2), (n1, n2) = self.betas, self.nus
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        first = (1 - n1) * g + n1 * m / (1 - b1**t)
        second = (1 - n2) * g * g + n2 * v / (1 - b2**t)
        return first / (root(second) + self.eps), self.State(m, v)
