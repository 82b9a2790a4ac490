"""Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
Pre-training, Liu et al. 2023 (arXiv:2305.14342).

m = 0.96 m + 0.04 g, x -= lr clip(m / (rho h), -1, 1)

Use Sophia for pretraining. Your program has to pass the Hessian's diagonal
to the optimizer as `hessian`. Instead of the exact diagonal, you can pass a
mean of several estimates.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer


class Sophia(Optimizer):
    rho: float = 0.04

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State, hessian: Tensor):
        m = 0.96 * s.exp_avg + 0.04 * g
        u = (m / (self.rho * hessian).clamp_min(1e-12)).clamp(-1, 1)
        return u, self.State(m)
