"""Scaling Exponents Across Parameterizations and Optimizers,
Everett et al. 2024 (arXiv:2407.05872).

x -= lr atan2(m, sqrt(v))

Use Adam-atan2 for gradients of any scale, including the tiny gradients of
very large models. Adam-atan2 is Adam without eps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class AdamAtan2(Optimizer):
    betas: Betas = Betas(0.9, 0.999)

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        u = torch.atan2(m / (1 - b1**t), root(v / (1 - b2**t)))
        return u, self.State(m, v)
