"""Grokfast: Accelerated Grokking by Amplifying Slow Gradients,
Lee et al. 2024 (arXiv:2405.20233).

h = alpha h + (1 - alpha) g, beginning with h = g,
then Adam with the gradient g + amplify h

Use Grokfast for small algorithmic data sets on which the validation loss
falls long after the training loss. Grokfast amplifies the slowly changing
component of the gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class Grokfast(Optimizer):
    betas: Betas = Betas(0.9, 0.98)
    alpha: float = 0.98
    amplify: float = 2.0
    eps: float = 1e-8

    class State(NamedTuple):
        slow: Tensor
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        kept = torch.where(t > 1, self.alpha, 0.0)
        slow = kept * s.slow + (1 - kept) * g
        g = g + self.amplify * slow
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        d = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return d, self.State(slow, m, v)
