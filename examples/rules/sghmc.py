"""Stochastic Gradient Hamiltonian Monte Carlo, Chen et al. 2014
(arXiv:1402.4102).

v = (1 - friction) v - lr g + sqrt(2 friction lr temperature) z, x += v,
with normal z

Use SGHMC to sample from a posterior. The samples of SGHMC are less
correlated than the samples of SGLD. Keep lr constant.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Wide


class SGHMC(Optimizer):
    friction: float = 0.1
    temperature: float = 1e-2
    seed: int = 0

    class State(NamedTuple):
        momentum: Wide  # -v / lr

    def direction(self, g: Tensor, s: State, z: Tensor):
        square = 2 * self.friction * self.temperature / self.lr
        noise = torch.where(self.lr > 0, square, 0.0) ** 0.5 * z
        m = (1 - self.friction) * s.momentum + g + noise
        return m, self.State(m)
