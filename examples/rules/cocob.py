"""Training Deep Networks without Learning Rates Through Coin Betting,
Orabona & Tommasi 2017 (arXiv:1705.07795).

x = x0 - total (L + reward) / (L max(G + L, alpha L)), L = max |g|,
G = sum |g|

Use COCOB to train without tuning a learning rate. With lr = 1, COCOB takes
the same steps as in the paper. Other values of lr scale these steps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Wide


class COCOB(Optimizer):
    alpha: float = 100.0

    class State(NamedTuple):
        start: Wide
        largest: Wide
        sizes: Wide
        reward: Wide
        total: Wide

    def init(self, p: Tensor):
        return self.State(p, torch.full_like(p, 1e-8), None, None, None)

    def direction(self, g: Tensor, s: State, x: Tensor):
        largest = torch.maximum(s.largest, g.abs())
        reward = (s.reward - (x - s.start) * g).clamp_min(0.0)
        sums = s.sizes + g.abs(), reward, s.total + g
        return g, self.State(s.start, largest, *sums)

    def after(self, x: Tensor, u: Tensor, s: State):
        scale = torch.maximum(s.sizes + s.largest, self.alpha * s.largest)
        bet = s.total / (s.largest * scale) * (s.largest + s.reward)
        return s.start - self.lr * bet - x, s
