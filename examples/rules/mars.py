"""MARS: Unleashing the Power of Variance Reduction for Training Large
Models, Yuan et al. 2024 (arXiv:2411.10438).

c = clip(g + gamma b1 / (1 - b1) (g - last)), then Adam with c

Use MARS to pretrain language models. This file contains the variant of MARS
that needs only one gradient per step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, Wide, root


class MARS(Optimizer):
    betas: Betas = Betas(0.95, 0.99)
    gamma: float = 0.025
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment
        last: Wide

    def corrected(self, g: Tensor, s: State, t: float):
        b1, _ = self.betas
        share = torch.where(t > 1, self.gamma * b1 / (1 - b1), 0.0)
        return g + share * (g - s.last)

    def measure(self, mean, numel: Tensor, g: Tensor, s: State, t: float):
        c = self.corrected(g, s, t)
        return {"norm": root(mean(c * c) * numel).clamp_min(1.0)}

    def direction(self, g: Tensor, s: State, t: float, norm: Tensor):
        b1, b2 = self.betas
        c = self.corrected(g, s, t) / norm
        m = b1 * s.exp_avg + (1 - b1) * c
        v = b2 * s.exp_avg_sq + (1 - b2) * c * c
        d = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return d, self.State(m, v, g)
