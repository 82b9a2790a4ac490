"""Gradient Multi-Normalization for Stateless and Memory-Efficient LLM
Training, Scetbon et al. 2025 (arXiv:2502.06742).

g is divided by the root mean square of each row, then by the root mean
square of each column, and both divisions are repeated `rounds` times

Use SinkGD for the hidden matrices of language models if you do not want to
store any optimizer state.
"""

from torch import Tensor

from optimi_func.rules import Optimizer, root


class SinkGD(Optimizer):
    rounds: int = 5
    eps: float = 1e-8

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "SinkGD takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor):
        for _ in range(self.rounds):
            d = d / (root((d * d).mean(1, keepdim=True)) + self.eps)
            d = d / (root((d * d).mean(0, keepdim=True)) + self.eps)
        return d
