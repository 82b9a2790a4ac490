"""AdaShift: Decorrelation and Convergence of Adaptive Learning Rate
Methods, Zhou et al. 2018 (arXiv:1810.00143).

v = b v + (1 - b) g[t - n]^2,
x -= lr mean(g[t - n + 1], ..., g[t]) / sqrt(v)

Use AdaShift for problems on which Adam does not converge. AdaShift
normalizes each gradient by a second moment that is computed only from older
gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, SecondMoment, root


class AdaShift(Optimizer):
    beta: float = 0.999
    keep: int = 3
    eps: float = 1e-6

    @property
    def State(self):
        last = [(f"g{i}", Tensor) for i in range(self.keep)]
        return NamedTuple("State", [("v", SecondMoment), *last])

    def direction(self, g: Tensor, s, t: float):
        n, gs = t - self.keep, [*s[2:], g]
        on = torch.where(n > 0, 1.0, 0.0)
        v = self.beta * s.v + (1 - self.beta) * on * s[1] ** 2
        share = torch.where(n > 0, 1 - self.beta**n, 1.0)
        m = sum(gs[1:], gs[0]) / self.keep
        return on * m / (root(v / share) + self.eps), self.State(v, *gs)
