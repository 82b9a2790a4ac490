"""CAME: Confidence-guided Adaptive Memory Efficient Optimization,
Luo et al. 2023 (arXiv:2307.02047).

u = clip(g / sqrt(v)), m = b1 m + (1 - b1) u,
x -= lr m / sqrt(mean of (u - m)^2)

Use CAME if you need an optimizer that stores as little state as Adafactor
with momentum but converges faster. CAME stores each mean of squares as one
vector of row means and one vector of column means.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Shaped, ThreeBetas, root


class CAME(Optimizer):
    betas: ThreeBetas = ThreeBetas(0.9, 0.999, 0.9999)
    eps: tuple[float, float] = (1e-30, 1e-16)
    clip: float = 1.0

    class State(NamedTuple):
        exp_avg: Shaped
        rows: Shaped
        columns: Shaped
        apart_rows: Shaped
        apart_columns: Shaped

    def init(self, p: Tensor):
        rows, columns = (p.shape[0], 1), (1, p.shape[1])
        return self.State(None, rows, columns, rows, columns)

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "CAME takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        (b1, b2, b3), (e1, e2) = self.betas, self.eps
        r = b2 * s.rows + (1 - b2) * (d * d + e1).mean(1, keepdim=True)
        c = b2 * s.columns + (1 - b2) * (d * d + e1).mean(0, keepdim=True)
        u = d * (r.mean() / (r * c)).sqrt()
        u = u / (root((u * u).mean()) / self.clip).clamp_min(1.0)
        m = b1 * s.exp_avg + (1 - b1) * u
        apart = (u - m) ** 2 + e2
        ar = b3 * s.apart_rows + (1 - b3) * apart.mean(1, keepdim=True)
        ac = b3 * s.apart_columns + (1 - b3) * apart.mean(0, keepdim=True)
        u = m * (ar.mean() / (ar * ac)).sqrt()
        return u, self.State(m, r, c, ar, ac)
