"""PolarGrad: A Class of Matrix-Gradient Optimizers from a Unifying
Preconditioning Perspective, Lau et al. 2025 (arXiv:2505.21799).

x -= lr |m|_* polar(m), where |m|_* is the sum of the singular values

Use PolarGrad instead of Muon if the steps should shrink together with the
gradient. This file computes a singular value decomposition, whereas
`Muon(adjust_lr_fn="nuclear")` uses an iterative method.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer


class PolarGrad(Optimizer):
    momentum: float = 0.95

    class State(NamedTuple):
        exp_avg: Tensor

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "PolarGrad takes matrices"

    def direction(self, g: Tensor, s: State):
        m = self.momentum * s.exp_avg + (1 - self.momentum) * g
        return m, self.State(m)

    def whole(self, d: Tensor):
        u, values, v = torch.linalg.svd(d, full_matrices=False)
        return values.sum() * (u @ v)
