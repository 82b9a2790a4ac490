"""Error Feedback Fixes SignSGD and other Gradient Compression Schemes,
Karimireddy et al. 2019 (arXiv:1901.09847).

p = g + e, x -= lr mean(|p|) sign(p), e = p - mean(|p|) sign(p)

Use EF-SignSGD if gradients are compressed to their signs. EF-SignSGD adds
the error of each compression to the next gradient. This error feedback
makes sign-based steps converge. Keep lr constant, or change it slowly.
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, Wide


class EFSignSGD(Optimizer):
    class State(NamedTuple):
        error: Wide

    def measure(self, mean, g: Tensor, s: State):
        return {"size": mean((g + s.error).abs())}

    def direction(self, g: Tensor, s: State, size: Tensor):
        p = g + s.error
        d = size * p.sign()
        return d, self.State(p - d)
