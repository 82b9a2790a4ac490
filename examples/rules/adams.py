"""AdamS: Momentum Itself Can Be A Normalizer for LLM Pretraining and
Post-training, Zhang et al. 2025 (arXiv:2505.16363).

v = b2 last m^2 + (1 - b2) g^2, m = b1 m + (1 - b1) g, x -= lr m / sqrt(v)

Use AdamS for language models, with the same hyperparameters as Adam. AdamS
computes the second moment from the first moment, so AdamS needs only half
as much state as Adam.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, root


class AdamS(Optimizer):
    betas: Betas = Betas(0.9, 0.95)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State):
        b1, b2 = self.betas
        v = b2 * s.exp_avg**2 + (1 - b2) * g * g
        m = b1 * s.exp_avg + (1 - b1) * g
        return m / (root(v) + self.eps), self.State(m)
