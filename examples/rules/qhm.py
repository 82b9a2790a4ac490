"""Quasi-hyperbolic Momentum and Adam for Deep Learning, Ma & Yarats 2018
(arXiv:1810.06801).

m = b m + (1 - b) g, x -= lr ((1 - nu) g + nu m)

Use QHM if you want to tune a single rule that interpolates between SGD,
momentum and Nesterov's momentum (nu = b). Begin with nu = 0.7 and b =
0.999.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer


class QHM(Optimizer):
    momentum: float = 0.999
    nu: float = 0.7

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State):
        m = self.momentum * s.exp_avg + (1 - self.momentum) * g
        return (1 - self.nu) * g + self.nu * m, self.State(m)
