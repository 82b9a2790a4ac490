"""Adam-mini: Use Fewer Learning Rates To Gain More, Zhang et al. 2024
(arXiv:2406.16793).

v = b2 v + (1 - b2) mean(g^2), one v for each row, x -= lr m / sqrt(v)

Use Adam-mini for language models if Adam's state is too large. Adam-mini's
state is half as large as Adam's, because Adam-mini stores only one
second-moment value per row. In the paper, MLPs and output layers have one
second-moment value per row.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Shaped, root


class AdamMini(Optimizer):
    betas: Betas = Betas(0.9, 0.99)
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Shaped
        rows: Shaped

    def init(self, p: Tensor):
        return self.State(None, (p.shape[0], 1))

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "AdamMini takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * d
        v = b2 * s.rows + (1 - b2) * (d * d).mean(1, keepdim=True)
        u = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return u, self.State(m, v)
