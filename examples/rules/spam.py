"""SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM Training,
Huang et al. 2025 (arXiv:2501.06842).

g = sign(g) sqrt(theta v) where g^2 > theta v, then Adam,
restarted at every `every`-th step

Use SPAM for language models if the loss has spikes. SPAM clips individual
gradient elements that spike, and restarts Adam at regular intervals. After
each restart, the step size increases gradually over the next `warm` steps.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class SPAM(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    theta: float = 5000.0
    every: int = 500
    warm: int = 150
    eps: float = 1e-6

    class State(NamedTuple):
        m: Tensor
        v: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        (b1, b2), k = self.betas, (t - 1) % self.every
        keep = torch.where(k == 0, 0.0, 1.0)
        v = keep * s.v
        spike = (g * g > self.theta * v) & (v > 0)
        g = torch.where(spike, g.sign() * (self.theta * v).sqrt(), g)
        m, v = b1 * keep * s.m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        wave = 0.5 * (1 - torch.cos(math.pi * (k + 1) / self.warm))
        scale = torch.where((t > self.every) & (k < self.warm), wave, 1.0)
        d = (
            m
            / (1 - b1 ** (k + 1))
            / (root(v / (1 - b2 ** (k + 1))) + self.eps)
        )
        return scale * d, self.State(m, v)
