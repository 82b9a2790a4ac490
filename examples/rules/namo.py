"""Adam Improves Muon: Adaptive Moment Estimation with Orthogonalized
Momentum, Zhang et al. 2026 (arXiv:2602.17080).

v = b2 v + (1 - b2) |g|^2, x -= lr a (polar(m) + weight_decay x),
a = |m| / sqrt(v)

Use NAMO instead of Muon if you want an adaptive step size. NAMO takes small
steps for a matrix if the matrix's gradients are mostly noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Shaped, root


class NAMO(Optimizer, decay="own"):
    betas: Betas = Betas(0.95, 0.99)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        square: Shaped  # v

    def init(self, p: Tensor):
        return self.State(None, ())

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "NAMO takes matrices"

    def direction(self, g: Tensor, s: State):
        b1, _ = self.betas
        return g, s._replace(exp_avg=b1 * s.exp_avg + (1 - b1) * g)

    def whole(
        self, d: Tensor, s: State, t, x, exp_avg: Tensor, weight_decay
    ):
        b1, b2 = self.betas
        v = b2 * s.square + (1 - b2) * (d * d).sum()
        size = root((exp_avg * exp_avg).sum()) / (root(v) + self.eps)
        a = size * (1 - b2**t) ** 0.5 / (1 - b1**t)
        u, _, vh = torch.linalg.svd(exp_avg, full_matrices=False)
        return a * (u @ vh + weight_decay * x), self.State(None, v)
