"""Rules of tests alone, beside their loops of plain tensors; others: `examples/rules`."""

from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, Shaped, Wide, root


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

    def after(self, mean: Any, x: Tensor, u: Tensor):
        scale = (root(mean(x * x)) + self.eps) / (root(mean(u * u)) + self.eps * self.lr)
        return self.lr * scale * u


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


class Tangent(Optimizer):
    """Moves without their part along x, scaled by their largest magnitude."""

    class State(NamedTuple):
        exp_avg: Tensor
        former: Wide

    def measure(self, mean: Any, g: Tensor):
        return {"size": root(mean(g * g)) + 0.1}

    def direction(self, g: Tensor, s: State, size: Tensor):
        m = 0.9 * s.exp_avg + g / size
        return m, self.State(m, s.former)

    def after(self, mean: Any, top: Any, x: Tensor, u: Tensor, s: State, size: Tensor):
        size = (0.1 + size) / (top(u.abs()) + 0.1)
        u = size * (u - mean(u * x) / (mean(x * x) + 1e-6) * x)
        return u + 0.1 * s.former, self.State(s.exp_avg, u)


def tangent(params: Any, grads: Any, lr: float, weight_decay: float) -> Any:
    for i, p in enumerate(params):
        m, former = 0 * p, 0 * p
        for g in [step[i] for step in grads if p.numel()]:
            size = g.square().mean().sqrt() + 0.1
            m = 0.9 * m + g / size
            u = -lr * (m + weight_decay * p)
            size = (0.1 + size) / (u.abs().max() + 0.1)
            u = size * (u - (u * p).mean() / (p.square().mean() + 1e-6) * p)
            p, former = p + u + 0.1 * former, u
        params[i] = p
    return params


class Sphere(Optimizer):
    """Steps of rows of one length, after which the norm of x is what it was."""

    class State(NamedTuple):
        exp_avg: Tensor
        moved: Wide
        count: Shaped

    def init(self, p: Tensor) -> Any:
        return self.State(None, None, ())  # type: ignore

    def refuses(self, p: Tensor) -> str | None:
        return None if p.dim() == 2 and p.numel() else "Sphere takes matrices"

    def direction(self, g: Tensor, s: State):
        m = 0.9 * s.exp_avg + g
        return m, s._replace(exp_avg=m)

    def whole(self, d: Tensor, s: State) -> Any:
        d = d / (root((d * d).sum(1, keepdim=True)) + 0.1) / (1 + s.count)
        return d, s._replace(count=s.count + 1)

    def after(self, mean: Any, x: Tensor, u: Tensor, s: State):
        y = x + u + 0.1 * s.moved
        u = root(mean(x * x)) / root(mean(y * y)) * y - x
        return u, s._replace(moved=u)


def sphere(params: Any, grads: Any, lr: float, weight_decay: float) -> Any:
    for i, p in enumerate(params):
        m, moved = 0 * p, 0 * p
        for t, step in enumerate(grads, 1):
            m = 0.9 * m + step[i]
            d = m / (m.norm(dim=1, keepdim=True) + 0.1) / t
            y = p - lr * (d + weight_decay * p) + 0.1 * moved
            p, before = y * (p.norm() / y.norm()), p
            moved = p - before
        params[i] = p
    return params
