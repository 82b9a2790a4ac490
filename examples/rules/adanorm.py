"""AdaNorm: Adaptive Gradient Norm Correction based Optimizer for CNNs,
Dubey et al. 2022 (arXiv:2210.06364).

n = gamma n + (1 - gamma) |g|, m = 0.9 m + 0.1 g max(1, n / |g|), x -= lr m

Use AdaNorm for image networks. If the norm of a gradient is below the
running mean of the norms, AdaNorm scales the gradient so that its norm
equals the running mean. This file combines AdaNorm with momentum, not with
Adam.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Number, Optimizer, root


class AdaNorm(Optimizer):
    gamma: float = 0.95

    class State(NamedTuple):
        exp_avg: Tensor
        norm: Number  # n

    def measure(self, mean, numel: Tensor, g: Tensor, s: State):
        size = root(mean(g * g) * numel)
        norm = self.gamma * s.norm + (1 - self.gamma) * size
        scale = torch.where(norm > size, norm / size.clamp_min(1e-12), 1.0)
        return {"norm": norm, "scale": scale}

    def direction(self, g: Tensor, s: State, scale: Tensor):
        m = 0.9 * s.exp_avg + 0.1 * scale * g
        return m, self.State(m, s.norm)
