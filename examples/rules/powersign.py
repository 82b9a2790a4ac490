"""Neural Optimizer Search with Reinforcement Learning, Bello et al. 2017
(arXiv:1709.07417).

x -= lr exp(sign(g) sign(m)) g

Use PowerSign if steps should be larger where the gradient and the momentum
have the same sign. Like Lion, PowerSign was found by an automated search.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer


class PowerSign(Optimizer):
    beta: float = 0.9

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State):
        m = self.beta * s.exp_avg + (1 - self.beta) * g
        return torch.exp(g.sign() * m.sign()) * g, self.State(m)
