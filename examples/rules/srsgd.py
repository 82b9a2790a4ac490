"""Scheduled Restart Momentum for Accelerated Stochastic Gradient Descent,
Wang et al. 2020 (arXiv:2002.10583).

v = x - lr g, x = v + k / (k + 3) (v - last v),
k restarts at 0 at every `every`-th step

Use SRSGD for image networks. SRSGD is SGD with a Nesterov momentum that
grows from step to step. The momentum is reset at regular intervals so that
noise does not accumulate.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Wide


class SRSGD(Optimizer):
    every: int = 40

    class State(NamedTuple):
        v: Wide

    def init(self, p: Tensor):
        return self.State(p)

    def direction(self, g: Tensor, s: State):
        return g, s

    def after(self, x: Tensor, u: Tensor, s: State, t: float):
        k = (t - 1) % self.every
        return u + k / (k + 3) * (x + u - s.v), self.State(x + u)
