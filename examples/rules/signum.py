"""signSGD: Compressed Optimisation for Non-Convex Problems,
Bernstein et al. 2018 (arXiv:1802.04434).

m = b m + (1 - b) g, x -= lr sign(m)

Use Signum if you want to store only half as much state as Adam. You can
also use Signum as a baseline for Lion, or for distributed training in which
processes vote on the sign of each update.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer


class Signum(Optimizer):
    momentum: float = 0.9

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State):
        m = self.momentum * s.exp_avg + (1 - self.momentum) * g
        return m.sign(), self.State(m)
