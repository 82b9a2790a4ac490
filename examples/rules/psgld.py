"""Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural
Networks, Li et al. 2015 (arXiv:1512.07666).

x -= lr g / sqrt(v) + sqrt(2 lr temperature / sqrt(v)) z, with normal z

Use pSGLD to sample from a posterior if the parameters have different
scales. The paper's formula also has a term with the derivative of the
second moment v. Like most implementations, this file leaves out the
derivative term.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, SecondMoment, root


class PSGLD(Optimizer):
    alpha: float = 0.99
    eps: float = 1e-5
    temperature: float = 1e-2
    seed: int = 0

    class State(NamedTuple):
        exp_avg_sq: SecondMoment

    def direction(self, g: Tensor, s: State, z: Tensor):
        v = self.alpha * s.exp_avg_sq + (1 - self.alpha) * g * g
        scale = 1 / (root(v) + self.eps)
        square = torch.where(
            self.lr > 0, 2 * self.temperature / self.lr, 0.0
        )
        return scale * g + root(square * scale) * z, self.State(v)
