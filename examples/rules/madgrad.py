"""Adaptivity without Compromise: A Momentumized, Adaptive, Dual Averaged
Gradient Method, Defazio & Jelassi 2021 (arXiv:2101.11075).

s += lr sqrt(t) g, v += lr sqrt(t) g^2,
x += (1 - momentum) (x0 - s / cbrt(v) - x)

Use MADGRAD for image reconstruction, for sparse problems, and for other
problems where Adagrad works well.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Wide


class MADGRAD(Optimizer):
    momentum: float = 0.9
    eps: float = 1e-6

    class State(NamedTuple):
        start: Wide
        total: Wide
        squares: Wide

    def init(self, p: Tensor):
        return self.State(p, None, None)

    def direction(self, g: Tensor, s: State, t: float):
        rate = self.lr * t**0.5
        total, squares = s.total + rate * g, s.squares + rate * g * g
        return g, self.State(s.start, total, squares)

    def after(self, x: Tensor, u: Tensor, s: State):
        z = s.start - s.total / (s.squares ** (1 / 3) + self.eps)
        return (1 - self.momentum) * (z - x), s
