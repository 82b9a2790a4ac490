"""Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
Networks, Ginsburg et al. 2019 (arXiv:1905.11286).

v = b2 v + (1 - b2) |g|^2, one for each tensor, m = b1 m + g / sqrt(v), x -= lr m

Speech and image networks, at half of Adam's state.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Shaped, root, where


class NovoGrad(Optimizer):
    betas: Betas = Betas(0.95, 0.98)
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Shaped
        norm: Shaped  # v

    def init(self, p: Tensor):
        return self.State(None, (1,))

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float):
        b1, b2 = self.betas
        square = (d * d).sum().reshape(1)
        v = where(t == 1, square, b2 * s.norm + (1 - b2) * square)
        m = b1 * s.exp_avg + d / (root(v) + self.eps).reshape(())
        return m, self.State(m, v)
