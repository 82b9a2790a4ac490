"""LDoG, from DoG is SGD's Best Friend: A Parameter-Free Dynamic Step Size
Schedule, Ivgi et al. 2023 (arXiv:2302.12022).

x -= lr max |x - x0| / sqrt(sum |g|^2) g, with separate norms for each tensor

Use LDoG for finetuning with lr = 1 if DoG is too slow for some layers. LDoG
is DoG with a separate step size for each tensor.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Number, Optimizer, Wide, root


class LDoG(Optimizer):
    first: float = 1e-4

    class State(NamedTuple):
        start: Wide
        far: Number
        squares: Number

    def init(self, p: Tensor):
        return self.State(p, None, None)

    def measure(self, mean, numel: Tensor, g: Tensor, s: State, x: Tensor):
        distance = root(numel * mean((x - s.start) ** 2))
        far = torch.maximum(s.far, distance).clamp_min(self.first)
        return {"far": far, "squares": s.squares + numel * mean(g * g)}

    def direction(self, g: Tensor, s: State):
        return s.far / root(s.squares + 1e-8) * g, s
