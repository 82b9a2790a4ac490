"""SPlus: A Stable Whitening Optimizer for Efficient Neural Network
Training, Frans et al. 2025 (arXiv:2506.07254).

x -= lr 2 / (m + n) Q sign(Q^T m R) R^T,
where Q and R are eigenvectors of E[g g^T] and E[g^T g]

Use SPlus if the same lr should work for networks of all widths. SPlus takes
steps in the eigenbasis of Shampoo's matrices, and recomputes this
eigenbasis only every `gap` steps. The authors of SPlus evaluate their
models with averaged weights. To average the weights, use
`EMA(optimizer, 0.999)`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Shaped, where


class SPlus(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    gap: int = 100

    class State(NamedTuple):
        exp_avg: Tensor
        left: Shaped
        right: Shaped
        q: Shaped
        r: Shaped

    def init(self, p: Tensor):
        m, n = p.shape
        q, r = torch.eye(m).to(p), torch.eye(n).to(p)
        return self.State(None, (m, m), (n, n), q, r)

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "SPlus takes matrices"

    def direction(self, g: Tensor, s: State):
        b1, _ = self.betas
        return g, s._replace(exp_avg=b1 * s.exp_avg + (1 - b1) * g)

    def whole(self, d: Tensor, s: State, t: float, exp_avg: Tensor):
        _, b2 = self.betas
        left = b2 * s.left + (1 - b2) * d @ d.mT
        right = b2 * s.right + (1 - b2) * d.mT @ d
        u = s.q @ (s.q.mT @ exp_avg @ s.r).sign() @ s.r.mT
        q, r = s.q, s.r
        if (due := (t == 1) | (t % self.gap == 0)) is not False:
            q = where(due, torch.linalg.eigh(left)[1], q)
            r = where(due, torch.linalg.eigh(right)[1], r)
        return u * (2 / sum(d.shape)), self.State(None, left, right, q, r)
