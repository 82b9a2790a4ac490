"""AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed
Gradients, Zhuang et al. 2020 (arXiv:2010.07468).

v = b2 v + (1 - b2) (g - m)^2 + eps, x -= lr m / sqrt(v)

Use AdaBelief instead of Adam for image models, GANs and recurrent networks.
The results depend strongly on eps. Typical values of eps lie between 1e-16
and 1e-8.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class AdaBelief(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    eps: float = 1e-16

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_var: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_var + (1 - b2) * (g - m) ** 2 + self.eps
        d = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return d, self.State(m, v)
