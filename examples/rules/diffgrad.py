"""diffGrad: An Optimization Method for Convolutional Neural Networks,
Dubey et al. 2019 (arXiv:1909.11015).

x -= lr sigmoid(|g - last g|) m / sqrt(v)

Use diffGrad for image networks. diffGrad is Adam with smaller steps for
elements whose gradient hardly changes from one step to the next.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, Wide, root


class DiffGrad(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment
        last: Wide

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_sq + (1 - b2) * g * g
        d = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return (g - s.last).abs().sigmoid() * d, self.State(m, v, g)
