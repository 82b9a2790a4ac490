"""On the Distance between Two Neural Networks and the Stability of
Learning, Bernstein et al. 2020 (arXiv:2002.03432).

x = (x - lr |x| / |g| g) / sqrt(1 + lr^2)

Use Fromage to train GANs, image models and transformers with a single
learning rate near 0.01. The division by sqrt(1 + lr^2) keeps the norm of a
weight from growing.
"""

from typing import NamedTuple

from optimi_func import SGD
from optimi_func.hooks import hook
from optimi_func.rules import root


@hook
class relative_and_shrunk(NamedTuple):
    def scale(self, n, lr):
        length = (1 + lr**2) ** 0.5
        ratio = root(n.xx) / root(n.dd).clamp_min(1e-12)
        # b is (1 - 1 / length) / lr, without a division by lr
        return ratio / length, lr / (length * (length + 1))


class Fromage(SGD):
    def own_hooks(self):
        return (*super().own_hooks(), relative_and_shrunk())
