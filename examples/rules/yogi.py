"""Adaptive Methods for Nonconvex Optimization, Zaheer et al. (NeurIPS
2018).

v -= (1 - b2) sign(v - g^2) g^2, x -= lr m / sqrt(v)

Use Yogi if Adam's second moment forgets past gradients too fast, for
example with sparse gradients or on the server in federated learning.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Wide


class Yogi(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    eps: float = 1e-3

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: Wide

    def init(self, p: Tensor):
        return self.State(None, torch.full_like(p, 1e-6))

    def direction(self, g: Tensor, s: State):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = s.exp_avg_sq - (1 - b2) * (s.exp_avg_sq - g * g).sign() * g * g
        return m / (v.sqrt() + self.eps), self.State(m, v)
