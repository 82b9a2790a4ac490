"""Grams: Gradient Descent with Adaptive Momentum Scaling, Cao et al. 2024
(arXiv:2412.17107).

x -= lr |m| / sqrt(v) sign(g)

Use Grams if you want steps with the magnitudes of Adam's steps and the
signs of the current gradient. Grams is related to the `cautious=True`
option of other optimizers.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class Grams(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        d = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return d.abs() * g.sign(), self.State(m, v)
