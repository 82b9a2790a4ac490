"""Conda: Column-Normalized Adam for Training Large Language Models Faster,
Wang et al. 2025 (arXiv:2509.24218).

v = b2 v + (1 - b2) (U^T g)^2, x -= lr U (U^T m / sqrt(v)),
where U S V^T = m at every `gap`-th step

Use Conda for language models. Conda runs Adam in the basis of the
momentum's singular vectors. In this basis, Conda divides the momentum by
the square root of the second moment.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Shaped, root, where


class Conda(Optimizer):
    betas: Betas = Betas(0.9, 0.99)
    eps: float = 1e-8
    gap: int = 2000

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: Shaped
        basis: Shaped  # U

    def init(self, p: Tensor):
        short = min(p.shape)
        return self.State(None, (short, p.shape[1]), (p.shape[0], short))

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "Conda takes matrices"

    def direction(self, g: Tensor, s: State):
        b1, _ = self.betas
        return g, s._replace(exp_avg=b1 * s.exp_avg + (1 - b1) * g)

    def whole(self, d: Tensor, s: State, t: float, exp_avg: Tensor):
        (b1, b2), basis = self.betas, s.basis
        if (due := (t == 1) | (t % self.gap == 0)) is not False:
            u, _, _ = torch.linalg.svd(exp_avg, full_matrices=False)
            basis = where(due, u, basis)
        v = b2 * s.exp_avg_sq + (1 - b2) * (basis.mT @ d) ** 2
        u = basis.mT @ exp_avg / (1 - b1**t)
        u = u / (root(v / (1 - b2**t)) + self.eps)
        return basis @ u, self.State(None, v, basis)
