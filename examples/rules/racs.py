"""Towards Efficient Optimizer Design for LLM via Structured Fisher
Approximation with a Low-Rank Extension, Gong et al. 2025
(arXiv:2502.07752).

r = b r + (1 - b) mean_j(g^2), c = b c + (1 - b) mean_i(g^2),
x -= lr alpha g / sqrt(r c)

Use RACS for pretraining if there is almost no memory for optimizer state.
RACS stores one value for each row and one value for each column.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Shaped, root, where


class RACS(Optimizer):
    beta: float = 0.9  # b
    alpha: float = 0.05
    growth: float = 1.01  # largest growth of the update's norm per step
    eps: float = 1e-8

    class State(NamedTuple):
        rows: Shaped
        columns: Shaped
        norm: Shaped

    def init(self, p: Tensor):
        return self.State((p.shape[0], 1), p.new_ones(1, p.shape[1]), ())

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "RACS takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float):
        b, square = self.beta, d * d
        rows = b * s.rows + (1 - b) * square.mean(1, keepdim=True)
        columns = b * s.columns + (1 - b) * square.mean(0, keepdim=True)
        u = d / (root(rows + self.eps) * root(columns + self.eps))
        norm = root((u * u).sum())
        ratio = norm / (s.norm + self.eps)
        limit = self.growth / ratio.clamp_min(self.growth)
        limit = where(t == 1, 1.0, limit)
        u = self.alpha * limit * u
        return u, self.State(rows, columns, limit * norm)
