"""Positive-Negative Momentum: Manipulating Stochastic Gradient Noise to
Improve Generalization, Xie et al. 2021 (arXiv:2103.17182).

m[t] = b^2 m[t - 2] + (1 - b^2) g,
x -= lr ((1 + b0) m[t] - b0 m[t - 1]) / norm

Use PNM for image networks. PNM increases the gradient noise of small
batches without changing the mean of the gradient.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer


class PNM(Optimizer):
    momentum: float = 0.9
    negative: float = 1.0  # b0

    class State(NamedTuple):
        last: Tensor
        before: Tensor

    def direction(self, g: Tensor, s: State):
        square, n = self.momentum**2, self.negative
        m = square * s.before + (1 - square) * g
        norm = ((1 + n) ** 2 + n**2) ** 0.5
        return ((1 + n) * m - n * s.last) / norm, self.State(m, s.last)
