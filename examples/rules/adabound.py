"""Adaptive Gradient Methods with Dynamic Bound of Learning Rate,
Luo et al. 2019 (arXiv:1902.09843).

x -= clip(lr / sqrt(v), final (1 - 1 / (gamma t + 1)),
final (1 + 1 / (gamma t))) m

Use AdaBound if you would otherwise begin training with Adam and switch to
SGD later. AdaBound's steps gradually approach those of SGD with the
learning rate `final`. A learning-rate schedule changes lr, but not `final`.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class AdaBound(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    final: float = 0.1
    gamma: float = 1e-3

    class State(NamedTuple):
        m: Tensor
        v: SecondMoment

    def direction(self, g: Tensor, s: State):
        b1, b2 = self.betas
        m, v = b1 * s.m + (1 - b1) * g, b2 * s.v + (1 - b2) * g * g
        return g, self.State(m, v)

    def after(self, x: Tensor, u: Tensor, s: State, t: float):
        b1, b2 = self.betas
        rate = self.lr * (1 - b2**t) ** 0.5 / (1 - b1**t)
        rate = rate / (root(s.v) + 1e-8)
        low, high = 1 - 1 / (self.gamma * t + 1), 1 + 1 / (self.gamma * t)
        return -rate.clamp(self.final * low, self.final * high) * s.m, s
