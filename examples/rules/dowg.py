"""DoWG Unleashed: An Efficient Universal Parameter-Free Gradient Descent
Method, Khaled et al. 2023 (arXiv:2305.16284).

far = max |x - x0|, v += far^2 |g|^2, x -= lr far^2 / sqrt(v) g

Use DoWG for finetuning with lr = 1. DoWG is similar to DoG, but less
conservative. DoWG computes the size of each step from norms that were
measured in earlier steps.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Wide, maximum


class DoWG(Optimizer):
    first: float = 1e-3

    class State(NamedTuple):
        start: Wide

    class Running(NamedTuple):
        factor: float = 0.0
        far: float = 0.0
        weighted: float = 0.0

    def init(self, p: Tensor):
        return self.State(p)

    def direction(self, g: Tensor, s: State, r: Running):
        return r.factor * g, s, r

    def sums(self, g: Tensor, s: State, x: Tensor):
        return g * g, (x - s.start) ** 2

    def join(self, r: Running, sums):
        far = maximum(maximum(r.far, sums[1] ** 0.5), self.first)
        weighted = r.weighted + far**2 * sums[0]
        factor = far**2 / (weighted + 1e-30) ** 0.5
        return self.Running(factor, far, weighted)
