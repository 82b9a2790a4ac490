"""AdamHD: Decoupled Huber Decay Regularization for Language Model
Pre-Training, Guo & Fan 2025 (arXiv:2511.14721).

x -= lr adam(g), then x / (1 + tau) if |x| <= (1 + tau) delta,
else x - tau delta sign(x),
tau = lr weight_decay, delta = a running mean of |x|

Use AdamHD for pretraining. In AdamHD, weight decay reduces small weights in
proportion to their size. Like an L1 penalty, weight decay in AdamHD reduces
large weights by a constant amount.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Number, Optimizer, SecondMoment, root


class AdamHD(Optimizer, decay="own"):
    betas: Betas = Betas(0.9, 0.999)
    eps: float = 1e-8
    beta: float = 0.99

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment
        delta: Number

    def measure(self, mean, s: State, x: Tensor, t: float):
        size = mean(x.abs())
        delta = self.beta * s.delta + (1 - self.beta) * size
        return {"delta": torch.where(t == 1, size, delta)}

    def direction(self, g: Tensor, s: State):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        return m / (root(v) + self.eps), self.State(m, v, s.delta)

    def after(self, x: Tensor, u: Tensor, s: State):
        y, tau = x + u, self.lr * self.weight_decay
        small = y.abs() <= (1 + tau) * s.delta
        less = y - tau * s.delta * y.sign()
        return torch.where(small, y / (1 + tau), less) - x, s
