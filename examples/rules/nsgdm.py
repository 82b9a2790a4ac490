"""Momentum Improves Normalized SGD, Cutkosky & Mehta 2020
(arXiv:2002.03305).

m = b m + (1 - b) g, x -= lr m / |m|

Use NSGDM for gradients with heavy-tailed noise, and for differentially
private training. In NSGDM, the Euclidean norm of each tensor's step is lr.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, root


class NSGDM(Optimizer):
    momentum: float = 0.9

    class State(NamedTuple):
        exp_avg: Tensor

    def moment(self, g: Tensor, s: State):
        return self.momentum * s.exp_avg + (1 - self.momentum) * g

    def measure(self, mean, numel: Tensor, g: Tensor, s: State):
        m = self.moment(g, s)
        return {"norm": root(mean(m * m) * numel)}

    def direction(self, g: Tensor, s: State, norm: Tensor):
        m = self.moment(g, s)
        return m / norm.clamp_min(1e-12), self.State(m)
