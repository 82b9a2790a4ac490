"""DoG is SGD's Best Friend: A Parameter-Free Dynamic Step Size Schedule,
Ivgi et al. 2023 (arXiv:2302.12022).

x -= lr max |x - x0| / sqrt(sum |g|^2) g

Use DoG for finetuning with lr = 1. DoG computes the size of each step from
norms that were measured in earlier steps, so the first step does not change
the parameters.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Wide, maximum


class DoG(Optimizer):
    first: float = 1e-3

    class State(NamedTuple):
        start: Wide

    class Running(NamedTuple):
        factor: float = 0.0
        far: float = 0.0
        squares: float = 0.0

    def init(self, p: Tensor):
        return self.State(p)

    def direction(self, g: Tensor, s: State, r: Running):
        return r.factor * g, s, r

    def sums(self, g: Tensor, s: State, x: Tensor):
        return g * g, (x - s.start) ** 2

    def join(self, r: Running, sums):
        squares, distance = r.squares + sums[0], sums[1] ** 0.5
        far = maximum(maximum(r.far, distance), self.first)
        return self.Running(far / (squares + 1e-8) ** 0.5, far, squares)
