"""Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training
of Deep Networks, Ginsburg et al. 2019 (arXiv:1905.11286).

v = b2 v + (1 - b2) |g|^2, one v for each tensor, m = b1 m + g / sqrt(v),
x -= lr m

Use NovoGrad for speech and image networks. NovoGrad's state is half as
large as Adam's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Number, Optimizer, root


class NovoGrad(Optimizer):
    betas: Betas = Betas(0.95, 0.98)
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Tensor
        norm: Number  # v

    def measure(self, mean, numel: Tensor, g: Tensor, s: State, t: float):
        square = mean(g * g) * numel
        beta = torch.where(t == 1, 0.0, self.betas[1])
        return {"norm": beta * s.norm + (1 - beta) * square}

    def direction(self, g: Tensor, s: State):
        m = self.betas[0] * s.exp_avg + g / (root(s.norm) + self.eps)
        return m, self.State(m, s.norm)
