"""Bayesian Learning via Stochastic Gradient Langevin Dynamics, Welling &
Teh (ICML 2011).

x -= lr g + sqrt(2 lr temperature) z, with normal z

Use SGLD to sample from a posterior, for example to estimate uncertainty.
The loss has to be the sum over all data, not the mean over a batch.
"""

import torch
from torch import Tensor

from optimi_func.rules import Optimizer


class SGLD(Optimizer):
    temperature: float = 1e-2
    seed: int = 0

    def direction(self, g: Tensor, z: Tensor):
        square = torch.where(
            self.lr > 0, 2 * self.temperature / self.lr, 0.0
        )
        return g + square**0.5 * z
