"""Dion: Distributed Orthonormalized Updates, Ahn et al. 2025
(arXiv:2504.05295).

B = m + g, P = orth(B Q), R = B^T P, m = B - (1 - mu) P R^T, Q = R / |R_j|,
x -= lr sqrt(rows / columns) P Q^T

Use Dion instead of Muon if a low-rank update is enough. Dion orthogonalizes
only `rank` columns with a QR decomposition. The rest of the update remains
in the momentum and is applied in later steps.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Shaped, root


class Dion(Optimizer):
    momentum: float = 0.95  # mu
    rank: int = 128
    seed: int = 0

    class State(NamedTuple):
        error: Shaped  # m
        basis: Shaped  # Q

    def init(self, p: Tensor, normal: Any):
        rank = min(self.rank, *p.shape)
        return self.State(p.shape, normal((p.shape[1], rank)))

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "Dion takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        b, (rows, columns) = s.error + d, d.shape
        p, _ = torch.linalg.qr(b @ s.basis)
        r = b.mT @ p
        basis = r / (root((r * r).sum(0)) + 1e-8)
        error = b - (1 - self.momentum) * p @ r.mT
        u = (rows / columns) ** 0.5 * p @ basis.mT
        return u, self.State(error, basis)
