"""Large Batch Training of Convolutional Networks, You et al. 2017
(arXiv:1708.03888).

m = b m + trust |x| / (|g| + l2 |x|) (g + l2 x), x -= lr m

Use LARS for convolutional networks with batches of thousands of examples,
and for self-supervised learning.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, root


class LARS(Optimizer):
    momentum: float = 0.9
    trust: float = 1e-3
    l2: float = 5e-4

    class State(NamedTuple):
        exp_avg: Tensor

    def measure(self, mean, g: Tensor, x: Tensor):
        norm = root(mean(x * x))
        return {"ratio": norm / (root(mean(g * g)) + self.l2 * norm + 1e-6)}

    def direction(self, g: Tensor, s: State, x: Tensor, ratio: Tensor):
        move = self.trust * ratio * (g + self.l2 * x)
        m = self.momentum * s.exp_avg + move
        return m, self.State(m)
