"""Closing the Generalization Gap of Adaptive Gradient Methods in Training
Deep Neural Networks, Chen et al. 2018 (arXiv:1806.06763).

v = max(v, b2 u + (1 - b2) g^2), x -= lr m / v^power

Use Padam for image networks. Padam interpolates between AMSGrad (power =
1/2) and SGD with momentum (power = 0).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, Wide, root


class Padam(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    power: float = 0.125
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment
        largest: Wide

    def direction(self, g: Tensor, s: State):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        top = torch.maximum(s.largest, v)
        u = m / (root(top) + self.eps) ** (2 * self.power)
        return u, self.State(m, v, top)
