"""Learning-Rate-Free Learning by D-Adaptation, Defazio & Mishchenko 2023
(arXiv:2301.07733).

s += lr d g, d = max(d, (|s|^2 - sum (lr d |g|)^2) / (2 |s|)), x -= lr d g

Use D-Adaptation to train without tuning a learning rate. D-Adaptation
estimates d, the distance from the initial parameters to a solution. Set lr
to 1 divided by the norm of the first gradient.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Wide, maximum


class DAdaptation(Optimizer):
    first: float = 1e-3

    class State(NamedTuple):
        total: Wide  # s

    class Running(NamedTuple):
        d: float = 0.0
        squares: float = 0.0

    def direction(self, g: Tensor, s: State, r: Running):
        rate = maximum(r.d, self.first)
        return rate * g, self.State(s.total + self.lr * rate * g), r

    def sums(self, g: Tensor, s: State):
        return g * g, s.total**2

    def join(self, r: Running, sums):
        d = maximum(r.d, self.first)
        squares = r.squares + (self.lr * d) ** 2 * sums[0]
        found = (sums[1] - squares) / (2 * sums[1] ** 0.5 + 1e-30)
        return self.Running(maximum(d, found), squares)
