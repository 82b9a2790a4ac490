"""LDoG, of DoG is SGD's Best Friend: A Parameter-Free Dynamic Step Size Schedule,
Ivgi et al. 2023 (arXiv:2302.12022).

x -= lr max |x - x0| / sqrt(sum |g|^2) g, with norms of each tensor

Fine-tuning with lr = 1, where DoG is too slow for some layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Shaped, root


class LDoG(Optimizer):
    first: float = 1e-4

    class State(NamedTuple):
        start: Shaped
        far: Shaped
        squares: Shaped

    def init(self, p: Tensor):
        return self.State(p, (), ())

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, x: Tensor):
        distance = root(((x - s.start) ** 2).sum())
        far = torch.maximum(s.far, distance).clamp_min(self.first)
        squares = s.squares + (d * d).sum()
        return far / root(squares + 1e-8) * d, self.State(s.start, far, squares)
