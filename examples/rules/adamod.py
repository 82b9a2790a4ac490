"""An Adaptive and Momental Bound Method for Stochastic Learning,
Ding et al. 2019 (arXiv:1910.12249).

s = b3 s + (1 - b3) lr / sqrt(v), x -= min(lr / sqrt(v), s) m

Use AdaMod to train transformers without a warmup. AdaMod caps the step size
of each element at a running mean of the element's step sizes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import (
    Optimizer,
    SecondMoment,
    ThreeBetas,
    Wide,
    root,
)


class AdaMod(Optimizer):
    betas: ThreeBetas = ThreeBetas(0.9, 0.999, 0.999)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment
        rate: Wide

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2, b3 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        rate = self.lr / (root(v / (1 - b2**t)) + self.eps)
        return m, self.State(m, v, b3 * s.rate + (1 - b3) * rate)

    def after(self, x: Tensor, u: Tensor, s: State, t: float):
        b1, b2, _ = self.betas
        rate = self.lr / (root(s.exp_avg_sq / (1 - b2**t)) + self.eps)
        return -torch.minimum(rate, s.rate) * s.exp_avg / (1 - b1**t), s
