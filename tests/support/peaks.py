"""A rule of maxima over a tensor, before its direction and after it, and its loop."""

from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.rules import Optimizer, root


class Peak(Optimizer):
    """Divides gradients, and then the move, by their largest magnitude and a mean."""

    share: float = 0.1

    class State(NamedTuple):
        exp_avg: Tensor

    def measure(self, mean: Any, top: Any, g: Tensor, x: Tensor):
        return {"size": top(g.abs()) + mean(g.abs()) + self.share * top(x)}

    def direction(self, g: Tensor, s: State, size: Tensor):
        m = 0.9 * s.exp_avg + g / (size.abs() + 0.1)
        return m, self.State(m)

    def after(self, mean: Any, top: Any, u: Tensor):
        size = top(u.abs()) + root(mean(u * u)) + 0.01 * self.lr
        return self.lr / size * u


def peak(params: Any, grads: Any, lr: float, share: float = 0.1) -> Any:
    for i, p in enumerate(params):
        m = 0 * p
        for g in [step[i] for step in grads if p.numel()]:
            size = g.abs().max() + g.abs().mean() + share * p.max()
            m = 0.9 * m + g / (size.abs() + 0.1)
            p = p - lr * m / (m.abs().max() + (m * m).mean().sqrt() + 0.01)
        params[i] = p
    return params
