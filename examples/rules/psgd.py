"""Preconditioned Stochastic Gradient Descent, Li 2015 (arXiv:1512.04202).

x -= lr Q^T Q g, with a triangular Q that is fitted so that Q g is white

Use PSGD for ill-conditioned problems. This file contains a variant of PSGD
that preconditions only the rows of a matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Shaped


class PSGD(Optimizer):
    rate: float = 0.2

    class State(NamedTuple):
        q: Shaped

    def init(self, p: Tensor):
        one = torch.eye(len(p), dtype=p.dtype, device=p.device)
        return self.State(one)

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "PSGD takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        one = torch.ones_like(s.q[0]).diag()
        back = torch.linalg.solve_triangular(s.q, one, upper=True)
        a, b = s.q @ d @ d.mT @ s.q.mT, d.shape[1] * back.mT @ back
        move = ((a - b) / (a + b).abs().sum(1).max()).triu()
        q = s.q - self.rate * move @ s.q
        return q.mT @ q @ d, self.State(q)
