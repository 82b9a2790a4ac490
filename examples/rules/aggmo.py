"""Aggregated Momentum: Stability Through Passive Damping, Lucas et al. 2018
(arXiv:1804.00325).

v[i] = b[i] v[i] + g, x -= lr mean(v)

Use AggMo if a momentum near 1 causes oscillations. AggMo averages several
momentum buffers that have different betas, usually 0, 0.9 and 0.99.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer


class AggMo(Optimizer):
    betas: tuple[float, ...] = (0.0, 0.9, 0.99)

    @property
    def State(self):
        names = [f"v{i}" for i in range(len(self.betas))]
        return NamedTuple("State", [(name, Tensor) for name in names])

    def direction(self, g: Tensor, s):
        vs = [b * v + g for b, v in zip(self.betas, s)]
        return sum(vs[1:], vs[0]) / len(vs), self.State(*vs)
