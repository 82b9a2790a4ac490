"""Memory-Efficient Adaptive Optimization, Anil et al. 2019
(arXiv:1901.11150).

v[i, j] = min(row[i], column[j]) + g^2, row and column store the maxima of v,
x -= lr g / sqrt(v)

Use SM3 for large embeddings, because SM3 stores almost no state. SM3 is an
approximation of Adagrad. This file contains the variant SM3-II without
momentum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.rules import Optimizer, Shaped, root


class SM3(Optimizer):
    eps: float = 1e-12

    class State(NamedTuple):
        rows: Shaped
        columns: Shaped

    def init(self, p: Tensor):
        return self.State((p.shape[0], 1), (1, p.shape[1]))

    def refuses(self, p: Tensor):
        return None if p.dim() == 2 else "SM3 takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        v = torch.minimum(s.rows, s.columns) + d * d
        rows, columns = v.amax(1, keepdim=True), v.amax(0, keepdim=True)
        return d / (root(v) + self.eps), self.State(rows, columns)
