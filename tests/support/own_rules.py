"""A rule of tests alone, beside its loop of plain tensors; others: `examples/rules`."""

from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, root


class NormedLAMB(Optimizer):
    """LAMB of gradients over their norms: means before the direction, and of it."""

    betas: Betas = Betas(0.9, 0.99)
    eps: float = 1e-3

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def measure(self, mean: Any, numel: Tensor, g: Tensor):
        return {"norm": root(mean(g * g) * numel) + self.eps}

    def direction(self, g: Tensor, s: State, norm: Tensor):
        (b1, b2), c = self.betas, g / norm
        m, v = b1 * s.exp_avg + (1 - b1) * c, b2 * s.exp_avg_sq + (1 - b2) * c * c
        return m / (root(v) + self.eps), self.State(m, v)

    def means(self, mean: Any, d: Tensor, x: Tensor, decay: Tensor):
        r = d + decay
        return (root(mean(r * r)) + self.eps) / (root(mean(x * x)) + self.eps)


def normed_lamb(
    params: Any, grads: Any, lr: float, weight_decay: float, eps: float = 1e-3
) -> Any:
    for i, p in enumerate(params):
        m, v, size = 0 * p, 0 * p, max(1, p.numel()) ** 0.5
        for step in grads:
            c = step[i] / (step[i].norm() + eps)
            m, v = 0.9 * m + 0.1 * c, 0.99 * v + 0.01 * c * c
            r = m / (v.sqrt() + eps) + weight_decay * p
            p = p - lr * r * (p.norm() / size + eps) / (r.norm() / size + eps)
        params[i] = p
    return params
