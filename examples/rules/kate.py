"""Remove that Square Root: A New Efficient Scale-Invariant Version of
AdaGrad, Choudhury et al. 2024 (arXiv:2403.02648).

b += g^2, m += eta g^2 + g^2 / b, x -= lr sqrt(m) / b g

Use KATE for problems where Adagrad works well, for example for generalized
linear models whose features have very different scales.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Wide, root


class KATE(Optimizer):
    eta: float = 0.1
    eps: float = 1e-8

    class State(NamedTuple):
        squares: Wide  # b
        scaled: Wide  # m

    def direction(self, g: Tensor, s: State):
        b = s.squares + g * g
        m = s.scaled + self.eta * g * g + g * g / (b + self.eps)
        return root(m) / (b + self.eps) * g, self.State(b, m)
