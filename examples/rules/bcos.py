"""Stochastic Approximation with Block Coordinate Optimal Stepsizes, Jiang &
Xiao 2025 (arXiv:2507.08963).

x -= lr m / sqrt(v), v = (3 b^2 - 2 b^3) o^2 + (1 - b)^2 g (g + 2 b o),
where o is the previous m

Use BCOS if you want results like Adam's but have memory for only one
moment. BCOS estimates the second moment from the first moment.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, root


class BCOS(Optimizer):
    beta: float = 0.9
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State, t: float):
        b = self.beta
        old = torch.where(t == 1, g, s.exp_avg)
        m = b * old + (1 - b) * g
        v = (1 - b) ** 2 * g * (g + 2 * b * old)
        v = (3 * b**2 - 2 * b**3) * old * old + v
        return m / (root(v) + self.eps), self.State(m)
