"""GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection,
Zhao et al. 2024 (arXiv:2403.03507).

x -= lr P adam(P^T g),
P = the first `rank` left singular vectors of g at every `gap`-th step

Use GaLore for pretraining and finetuning if Adam's moments do not fit into
memory. GaLore runs Adam on a low-rank projection of each gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Shaped, root, where


class GaLore(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    rank: int = 128
    gap: int = 200

    class State(NamedTuple):
        exp_avg: Shaped
        exp_avg_sq: Shaped
        basis: Shaped

    def init(self, p: Tensor):
        small = self.rank, p.shape[1]
        return self.State(small, small, (p.shape[0], self.rank))

    def refuses(self, p: Tensor):
        if p.dim() != 2 or self.rank > min(p.shape):
            return f"GaLore takes matrices of rank {self.rank} and more"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float):
        (b1, b2), basis = self.betas, s.basis
        if (due := (t - 1) % self.gap == 0) is not False:
            # If t is a tensor, every step runs the SVD, but few use it.
            x = where(due, d, s.basis @ s.exp_avg)
            u, _, _ = torch.linalg.svd(x, full_matrices=False)
            basis = where(due, u[:, : self.rank], basis)
        g = basis.mT @ d
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        u = m / (1 - b1**t) / (root(v / (1 - b2**t)) + 1e-6)
        return basis @ u, self.State(m, v, basis)
