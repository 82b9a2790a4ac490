"""ADAHESSIAN: An Adaptive Second Order Optimizer for Machine Learning,
Yao et al. 2020 (arXiv:2006.00719).

v = b2 v + (1 - b2) h^2, x -= lr m / sqrt(v)^power

Use AdaHessian for problems where a second backward pass pays off. Your
program has to pass an estimate of the Hessian's diagonal to the optimizer
as `hessian`. The estimate is z * Hz, where H is the Hessian and z contains
random signs. For convolutions, average the estimate over the elements of
each kernel.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment


class AdaHessian(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    power: float = 1.0
    eps: float = 1e-4

    class State(NamedTuple):
        exp_avg: Tensor
        exp_hessian_sq: SecondMoment

    def direction(self, g: Tensor, s: State, t: float, hessian: Tensor):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_hessian_sq + (1 - b2) * hessian * hessian
        scale = (v / (1 - b2**t)) ** (self.power / 2) + self.eps
        return m / (1 - b1**t) / scale, self.State(m, v)
