"""AdaNorm: Adaptive Gradient Norm Correction based Optimizer for CNNs,
Dubey et al. 2022 (arXiv:2210.06364).

n = gamma n + (1 - gamma) |g|, m = 0.9 m + 0.1 g max(1, n / |g|), x -= lr m

Image networks: no gradient is smaller than it used to be. Here with momentum alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Shaped, root


class AdaNorm(Optimizer):
    gamma: float = 0.95

    class State(NamedTuple):
        m: Shaped
        norm: Shaped

    def init(self, p: Tensor):
        return self.State(None, ())

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        size = root((d * d).sum())
        norm = self.gamma * s.norm + (1 - self.gamma) * size
        scale = torch.where(norm > size, norm / size.clamp_min(1e-12), 1.0)
        m = 0.9 * s.m + 0.1 * scale * d
        return m, self.State(m, norm)
