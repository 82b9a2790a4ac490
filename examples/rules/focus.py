"""FOCUS: First Order Concentrated Updating Scheme, Liu et al. 2025
(arXiv:2501.12243).

c = b2 c + (1 - b2) x,
x -= lr (sign(m) + gamma sign(x - c) + weight_decay c)

Use FOCUS for language models if the loss has sharp valleys. FOCUS is Lion
with an additional term that pulls each weight towards a running mean of the
weight.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Wide


class FOCUS(Optimizer, decay="own"):
    betas: Betas = Betas(0.9, 0.999)
    gamma: float = 0.1

    class State(NamedTuple):
        exp_avg: Tensor
        center: Wide  # c

    def direction(self, g: Tensor, s: State, x: Tensor, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        c = b2 * s.center + (1 - b2) * x
        decay = self.weight_decay * c / (1 - b2**t)
        pull = (x - self.lr * decay - c / (1 - b2**t)).sign()
        return m.sign() + self.gamma * pull + decay, self.State(m, c)
