"""Momentum Improves Normalized SGD, Cutkosky & Mehta 2020
(arXiv:2002.03305).

m = b m + (1 - b) g, x -= lr m / |m|

Use NSGDM for gradients with heavy-tailed noise, and for differentially
private training. In NSGDM, the Euclidean norm of each tensor's step is lr.
"""

from typing import NamedTuple

from optimi_func import SGD
from optimi_func.hooks import hook
from optimi_func.rules import root


@hook
class normalized(NamedTuple):
    sized = True  # so that n.numel is there

    def scale(self, n, lr):
        return 1.0 / root(n.dd * n.numel).clamp_min(1e-12)


class NSGDM(SGD):
    momentum: float = 0.9
    dampening: bool = True

    def own_hooks(self):
        return (*super().own_hooks(), normalized())
