"""Ad Click Prediction: a View from the Trenches, McMahan et al. (KDD 2013).

n += g^2, z += lr g - (sqrt(n) - sqrt(last n)) x,
x = -shrink(z, lr l1) / (beta + sqrt(n))

Use FTRL for sparse linear models. The paper calls this rule
"FTRL-Proximal". Initialize the weights to 0, because FTRL pulls the weights
towards their initial values.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Wide, root


class FTRL(Optimizer):
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0

    class State(NamedTuple):
        start: Wide
        z: Wide
        n: Wide

    def init(self, p: Tensor):
        return self.State(p, None, None)

    def direction(self, g: Tensor, s: State, x: Tensor):
        n = s.n + g * g
        z = s.z + self.lr * g - (root(n) - root(s.n)) * (x - s.start)
        return g, self.State(s.start, z, n)

    def after(self, x: Tensor, u: Tensor, s: State):
        shrunk = s.z.sign() * (s.z.abs() - self.lr * self.l1).clamp_min(0.0)
        scale = self.beta + root(s.n) + self.lr * self.l2
        return s.start - shrunk / scale - x, s
