"""APOLLO: SGD-like Memory, AdamW-level Performance, Zhu et al. 2024
(arXiv:2412.05270).

x -= lr scale g diag(|u_j| / |r_j|), u = adam(r), r = P g,
with a new normal P at every `gap`-th step

Use APOLLO for pretraining if Adam's moments do not fit into memory. Unlike
GaLore, APOLLO needs no singular value decomposition.
"""

from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, Shaped, root, where


class APOLLO(Optimizer):
    betas: Betas = Betas(0.9, 0.999)
    rank: int = 256
    gap: int = 200
    scale: float = 1.0
    seed: int = 0

    class State(NamedTuple):
        exp_avg: Shaped
        exp_avg_sq: Shaped
        sketch: Shaped

    def init(self, p: Tensor):
        small = self.rank, p.shape[1]
        return self.State(small, small, (self.rank, p.shape[0]))

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "APOLLO takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float, normal: Any):
        (b1, b2), sketch = self.betas, s.sketch
        if (due := (t - 1) % self.gap == 0) is not False:
            sketch = where(
                due, normal(sketch.shape) / self.rank**0.5, sketch
            )
        r = sketch @ d
        m = b1 * s.exp_avg + (1 - b1) * r
        v = b2 * s.exp_avg_sq + (1 - b2) * r * r
        u = m / (1 - b1**t) / (root(v / (1 - b2**t)) + 1e-6)
        ratio = root((u * u).sum(0)) / (root((r * r).sum(0)) + 1e-6)
        return self.scale * ratio * d, self.State(m, v, sketch)
