"""AdaGC: Improving Training Stability for Large Language Model Pretraining,
Wang et al. 2025 (arXiv:2502.11034).

h = min(1, ratio r / |g|), r = b r + (1 - b) |h g|, x -= lr adam(h g),
with one r for each tensor

Use AdaGC for pretraining if the loss has spikes. AdaGC limits the gradient
norm of each tensor to `ratio` times a running mean of this norm. During the
first `warm` steps, AdaGC instead limits the joint norm of all gradients to
the value of `most`. Pass the joint norm as `optimizer.step(total=norm)`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import (
    Betas,
    Number,
    Optimizer,
    SecondMoment,
    minimum,
    root,
)


class AdaGC(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    beta: float = 0.98  # b
    most: float = 1.0
    ratio: float = 1.05
    warm: float = 100.0
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment
        norm: Number  # r

    def measure(self, mean, numel, g: Tensor, s: State, t, total):
        size = root(mean(g * g) * numel)
        early = minimum(self.most / (mean(total) + self.eps), 1.0)
        late = minimum(self.ratio * s.norm / size.clamp_min(1e-30), 1.0)
        h = torch.where(t < self.warm, early, late)
        least = torch.where(t == 1, h * size, minimum(s.norm, h * size))
        norm = self.beta * s.norm + (1 - self.beta) * h * size
        return {"norm": torch.where(t < self.warm, least, norm), "h": h}

    def direction(self, g: Tensor, s: State, t, h, total=0.0):
        (b1, b2), g = self.betas, h * g
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        u = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return u, self.State(m, v, s.norm)
