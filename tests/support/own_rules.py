"""Rules of papers as users write them, each beside its loop of plain tensors in float64."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.core.philox import normals
from optimi_func.rules import Betas, Optimizer, SecondMoment, Shaped, Wide, root, where


class LARS(Optimizer):
    """Momentum of gradients in proportion to the parameter's norm (arXiv:1708.03888)."""

    momentum: float = 0.9
    trust: float = 0.1
    l2: float = 0.1

    class State(NamedTuple):
        exp_avg: Tensor

    def measure(self, mean: Any, g: Tensor, x: Tensor):
        norm = root(mean(x * x))
        return {"ratio": norm / (root(mean(g * g)) + self.l2 * norm + 1e-6)}

    def direction(self, g: Tensor, s: State, x: Tensor, ratio: Tensor):
        m = self.momentum * s.exp_avg + self.trust * ratio * (g + self.l2 * x)
        return m, self.State(m)


def lars(params: Any, grads: Any, lr: float, trust: float = 0.1) -> Any:
    for i, p in enumerate(params):
        m = 0 * p
        for step in grads:
            norm, other = [x.norm() / max(1, x.numel()) ** 0.5 for x in (p, step[i])]
            ratio = norm / (other + 0.1 * norm + 1e-6)
            m = 0.9 * m + trust * ratio * (step[i] + 0.1 * p)
            p = p - lr * m
        params[i] = p
    return params


class AdamP(Optimizer):
    """Adam without its part along the parameter, if g has none (arXiv:2006.08217)."""

    betas: Betas = Betas(0.9, 0.99)
    delta: float = 0.1
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment

    def adam(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m, v = b1 * s.exp_avg + (1 - b1) * g, b2 * s.exp_avg_sq + (1 - b2) * g * g
        return m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps), self.State(m, v)

    def measure(self, mean: Any, numel: Tensor, g: Tensor, s: State, x: Tensor, t: float):
        d, _ = self.adam(g, s, t)
        square, along = mean(x * x), mean(x * d)
        cosine = mean(g * x).abs() / (root(mean(g * g) * square) + 1e-12)
        apart = cosine < self.delta / numel.sqrt()
        return {"share": torch.where(apart, along / square, 0.0)}

    def direction(self, g: Tensor, s: State, x: Tensor, t: float, share: Tensor):
        d, s = self.adam(g, s, t)
        return d - share * x, s


def adamp(params: Any, grads: Any, lr: float, delta: float = 0.1) -> Any:
    for i, p in enumerate(params):
        m, v = 0 * p, 0 * p
        for t, step in enumerate(grads, 1):
            g = step[i]
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            d = m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
            cosine = (g * p).sum().abs() / (g.norm() * p.norm() + 1e-12)
            if cosine < delta / max(1, p.numel()) ** 0.5:
                d = d - (d * p).sum() / (p * p).sum() * p
            p = p - lr * d
        params[i] = p
    return params


class MARS(Optimizer):
    """Adam of corrected gradients, of a norm of at most 1 (arXiv:2411.10438)."""

    betas: Betas = Betas(0.95, 0.99)
    gamma: float = 0.025
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: SecondMoment
        last: Wide

    def corrected(self, g: Tensor, s: State, t: float):
        b1, _ = self.betas
        return g + torch.where(t > 1, self.gamma * b1 / (1 - b1), 0.0) * (g - s.last)

    def measure(self, mean: Any, numel: Tensor, g: Tensor, s: State, t: float):
        c = self.corrected(g, s, t)
        return {"norm": root(mean(c * c) * numel).clamp_min(1.0)}

    def direction(self, g: Tensor, s: State, t: float, norm: Tensor):
        b1, b2 = self.betas
        c = self.corrected(g, s, t) / norm
        m, v = b1 * s.exp_avg + (1 - b1) * c, b2 * s.exp_avg_sq + (1 - b2) * c * c
        d = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return d, self.State(m, v, g)


def mars(params: Any, grads: Any, lr: float, gamma: float = 0.025) -> Any:
    for i, p in enumerate(params):
        m, v, last = 0 * p, 0 * p, grads[0][i]
        for t, step in enumerate(grads, 1):
            c = step[i] + gamma * 19.0 * (step[i] - last)
            last = step[i]
            c = c / max(1.0, c.norm().item())
            m, v = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c * c
            p = p - lr * m / (1 - 0.95**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
        params[i] = p
    return params


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


class NovoGrad(Optimizer):
    """Momentum of gradients over their norms, one v for a tensor (arXiv:1905.11286)."""

    betas: Betas = Betas(0.95, 0.98)
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Shaped
        norm: Shaped  # v

    def init(self, p: Tensor) -> Any:
        made: Any = self.State
        return made(None, (1,))

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float):
        b1, b2 = self.betas
        square = (d * d).sum().reshape(1)
        v = where(t == 1, square, b2 * s.norm + (1 - b2) * square)
        m = b1 * s.exp_avg + d / (root(v) + self.eps).reshape(())
        return m, self.State(m, v)


def novograd(params: Any, grads: Any, lr: float, betas: Any = (0.95, 0.98)) -> Any:
    for i, p in enumerate(params):
        m, v = 0 * p, (grads[0][i] ** 2).sum()
        for step in grads:
            v = betas[1] * v + (1 - betas[1]) * (step[i] ** 2).sum()
            m = betas[0] * m + step[i] / (v.sqrt() + 1e-6)
            p = p - lr * m
        params[i] = p
    return params


class PSGD(Optimizer):
    """Q^TQ g, with Q for the rows alone, which whitens g (arXiv:1512.04202)."""

    rate: float = 0.2

    class State(NamedTuple):
        q: Shaped

    def init(self, p: Tensor) -> State:
        return self.State(torch.eye(p.shape[0], dtype=p.dtype, device=p.device))

    def refuses(self, p: Tensor) -> str | None:
        return None if p.dim() == 2 else "PSGD takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        one = torch.ones_like(s.q[0]).diag()
        back = torch.linalg.solve_triangular(s.q, one, upper=True)
        a, b = s.q @ d @ d.mT @ s.q.mT, d.shape[1] * back.mT @ back
        q = s.q - self.rate * ((a - b) / (a + b).abs().sum(1).max()).triu() @ s.q
        return q.mT @ q @ d, self.State(q)


def psgd(params: Any, grads: Any, lr: float, rate: float = 0.2) -> Any:
    for i, p in enumerate(params):
        q = torch.eye(len(p), dtype=p.dtype)
        for step in grads:
            g = step[i]
            a = torch.einsum("ij,jk,lk,ml->im", q, g, g, q)
            b = g.shape[1] * torch.linalg.inv(q @ q.T)
            size = torch.linalg.matrix_norm(a + b, torch.inf)
            q = q - rate * torch.triu(a - b) / size @ q
            p = p - lr * q.T @ (q @ g)
        params[i] = p
    return params


class GaLore(Optimizer):
    """Adam in the space of g's leading left vectors (arXiv:2403.03507)."""

    betas: Betas = Betas(0.9, 0.99)
    rank: int = 2
    gap: int = 200

    class State(NamedTuple):
        exp_avg: Shaped
        exp_avg_sq: Shaped
        basis: Shaped

    def init(self, p: Tensor) -> Any:
        made: Any = self.State
        small = self.rank, p.shape[1]
        return made(small, small, (p.shape[0], self.rank))

    def refuses(self, p: Tensor) -> str | None:
        fits = p.dim() == 2 and self.rank <= min(p.shape)
        return None if fits else f"GaLore takes matrices of rank {self.rank} and more"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float):
        (b1, b2), basis = self.betas, s.basis
        if (due := (t - 1) % self.gap == 0) is not False:
            # At other steps of a t that is a tensor, the basis of another matrix.
            u, _, _ = torch.linalg.svd(where(due, d, s.basis @ s.exp_avg), False)
            basis = where(due, u[:, : self.rank], basis)
        g = basis.mT @ d
        m, v = b1 * s.exp_avg + (1 - b1) * g, b2 * s.exp_avg_sq + (1 - b2) * g * g
        u = m / (1 - b1**t) / (root(v / (1 - b2**t)) + 1e-6)
        return basis @ u, self.State(m, v, basis)


def galore(params: Any, grads: Any, lr: float, rank: int = 2) -> Any:
    for i, p in enumerate(params):
        values, vectors = torch.linalg.eigh(grads[0][i] @ grads[0][i].T)
        basis = vectors[:, values.argsort(descending=True)[:rank]]
        u, _, _ = torch.linalg.svd(grads[0][i])
        basis = basis * (basis * u[:, :rank]).sum(0).sign()
        m = v = torch.zeros(rank, p.shape[1], dtype=p.dtype)
        for t, step in enumerate(grads, 1):
            g = basis.T @ step[i]
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            u = m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
            p = p - lr * basis @ u
        params[i] = p
    return params


class DAdaptation(Optimizer):
    """SGD by an estimate d of the distance to a solution, lr is 1/G (arXiv:2301.07733)."""

    first: float = 1e-3

    class State(NamedTuple):
        total: Wide  # s

    class Running(NamedTuple):
        d: float = 0.0
        squares: float = 0.0

    def direction(self, g: Tensor, s: State, r: Running):
        rate = torch.maximum(r.d, self.first)
        return rate * g, self.State(s.total + self.lr * rate * g), r

    def sums(self, g: Tensor, s: State):
        return g * g, s.total**2

    def join(self, r: Running, sums: Any):
        d = torch.maximum(r.d, self.first)
        squares = r.squares + (self.lr * d) ** 2 * sums[0]
        found = (sums[1] - squares) / (2 * sums[1] ** 0.5 + 1e-30)
        return self.Running(torch.maximum(d, found), squares)


def d_adaptation(params: Any, grads: Any, lr: float, first: float = 1e-3) -> Any:
    d, squares, total = first, 0.0, [0 * p for p in params]
    for step in grads:
        params = [p - lr * d * g for p, g in zip(params, step)]
        total = [s + lr * d * g for s, g in zip(total, step)]
        squares += sum([(lr * d * g).square().sum().item() for g in step])
        square = sum([s.square().sum().item() for s in total])
        d = max(d, (square - squares) / (2 * square**0.5))
    return params


ROUNDED = {"bfloat16": 0.4, "bfloat16 exact": 0.4}  # d follows small differences


class SGLD(Optimizer):
    """Langevin dynamics of the loss over a temperature (Welling & Teh, ICML 2011)."""

    temperature: float = 1e-2
    seed: int = 0

    def direction(self, g: Tensor, z: Tensor):
        square = torch.where(self.lr > 0, 2 * self.temperature / self.lr, 0.0)
        return g + square**0.5 * z


def sgld(params: Any, grads: Any, lr: float, temperature: float, seed: int) -> Any:
    for t, step in enumerate(grads):
        now = torch.tensor(seed), torch.tensor(t)
        for i, (p, z) in enumerate(zip(params, normals(*now, [*params]))):
            params[i] = p - lr * step[i] - (2 * lr * temperature) ** 0.5 * z
    return params


class Sophia(Optimizer):
    """A mean of gradients over a Hessian's diagonal, clipped (arXiv:2305.14342)."""

    rho: float = 0.04

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State, hessian: Tensor):
        m = 0.96 * s.exp_avg + 0.04 * g
        return (m / (self.rho * hessian).clamp_min(1e-12)).clamp(-1, 1), self.State(m)


# With options and the bounds of rows where a right rule errs more, or jumps.

RULES: list[tuple[Any, Any, dict[str, Any]]] = [
    (LARS, lars, {"trust": 0.2}),
    (AdamP, adamp, {"delta": 0.5}),
    (MARS, mars, {"gamma": 0.03}),
    (NormedLAMB, normed_lamb, {"weight_decay": 0.1}),
    (NovoGrad, novograd, {"betas": (0.9, 0.95)}),
    (PSGD, psgd, {"rate": 0.1}),
    (GaLore, galore, {"rank": 3}),
    (SGLD, sgld, {"temperature": 0.1, "seed": 7}),
    (DAdaptation, d_adaptation, {"first": 0.1, "allowed": ROUNDED}),
]
