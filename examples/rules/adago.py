"""AdaGrad Meets Muon: Adaptive Stepsizes for Orthogonal Updates, Zhang et
al. 2025 (arXiv:2509.02981).

n = min(|g|, most), v += n^2, x -= max(lr n / sqrt(v), least) polar(m)

Use AdaGO instead of Muon if the step size should decrease by itself, as in
Adagrad. AdaGO keeps a sum of the squared gradient norms. The initial value
of this sum is the square of the hyperparameter `start`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Shaped, maximum, minimum, root


class AdaGO(Optimizer, lr="inside"):
    momentum: float = 0.95
    most: float = 1.0
    least: float = 1e-4
    start: float = 1e-3

    class State(NamedTuple):
        exp_avg: Tensor
        total: Shaped  # v

    def init(self, p: Tensor):
        return self.State(None, p.new_zeros(()) + self.start**2)

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "AdaGO takes matrices"

    def direction(self, g: Tensor, s: State):
        m = self.momentum * s.exp_avg + (1 - self.momentum) * g
        return g, s._replace(exp_avg=m)

    def whole(self, d: Tensor, s: State, exp_avg: Tensor, lr: float):
        size = minimum(root((d * d).sum()), self.most)
        total = s.total + size * size
        u, _, v = torch.linalg.svd(exp_avg, full_matrices=False)
        rate = maximum(lr * size / root(total), self.least)
        return rate * (u @ v), self.State(None, total)
