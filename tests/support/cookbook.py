"""Loops of plain tensors in float64 for the rules of `examples/rules`, from their papers.

A loop has the name of its rule's file. `each` makes those over one tensor loops over all.
"""

import math
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from noise import plain_normals
from torch import Tensor

from optimi_func.rules import Body

FOLDER = Path(__file__).parents[2] / "examples" / "rules"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))


def rule_of(name: str) -> Any:
    """Return the class of a file of `examples/rules`."""
    found = [
        x
        for x in vars(import_module(name)).values()
        if isinstance(x, type) and issubclass(x, Body) and x.__module__ == name
    ]
    (cls,) = found
    return cls


def each(loop: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return the loop over all parameters of a loop over one and its gradients."""

    @wraps(loop)
    def whole(params: Any, grads: Any, **hyper: Any) -> list[Tensor]:
        return [loop(p, gs, **hyper) for p, *gs in zip(params, *grads)]

    return whole


def moments(m: Tensor, v: Tensor, g: Tensor, betas: Any) -> tuple[Tensor, Tensor]:
    b1, b2 = betas
    return m + (1 - b1) * (g - m), v + (1 - b2) * (g.square() - v)


def corrected(x: Tensor, beta: float, t: int) -> Tensor:
    return x / (1 - beta**t)


@each
def laprop(p: Tensor, gs: Any, lr: float, betas: Any, eps: float) -> Tensor:
    mu, nu = betas
    m = n = 0 * p
    c = 0.0
    for t, g in enumerate(gs, 1):
        n = nu * n + (1 - nu) * g**2
        c = mu * c + (1 - mu)
        m = mu * m + (1 - mu) * g / (corrected(n, nu, t).sqrt() + eps)
        p = p - lr * m / c
    return p


@each
def adabelief(p: Tensor, gs: Any, lr: float, betas: Any, eps: float) -> Tensor:
    b1, b2 = betas
    m = s = 0 * p
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (g - m).square() + eps
        p = p - lr * corrected(m, b1, t) / (corrected(s, b2, t).sqrt() + eps)
    return p


@each
def yogi(p: Tensor, gs: Any, lr: float, eps: float) -> Tensor:
    m, v = 0 * p, torch.full_like(p, 1e-6)
    for g in gs:
        m, v = 0.9 * m + 0.1 * g, v - 0.001 * torch.sign(v - g**2) * g**2
        p = p - lr * m / (v.sqrt() + eps)
    return p


@each
def qhadam(p: Tensor, gs: Any, lr: float, betas: Any, nus: Any, eps: float) -> Tensor:
    m = v = 0 * p
    for t, g in enumerate(gs, 1):
        m, v = moments(m, v, g, betas)
        first = torch.lerp(g, corrected(m, betas[0], t), nus[0])
        second = torch.lerp(g**2, corrected(v, betas[1], t), nus[1])
        p = p - lr * first / (second.sqrt() + eps)
    return p


@each
def qhm(p: Tensor, gs: Any, lr: float, momentum: float, nu: float) -> Tensor:
    m = 0 * p
    for g in gs:
        m = momentum * m + (1 - momentum) * g
        p = p - lr * torch.lerp(g, m, nu)
    return p


@each
def ef_signsgd(p: Tensor, gs: Any, lr: float) -> Tensor:
    e = 0 * p
    for g in gs:
        q = lr * g + e
        d = q.norm(p=1) / max(1, q.numel()) * q.sign()
        p, e = p - d, q - d
    return p


@each
def ldog(p: Tensor, gs: Any, lr: float, first: float) -> Tensor:
    start, far, squares = p, first, 1e-8
    for g in gs:
        far, squares = max(far, (p - start).norm().item()), squares + square_of([g])
        p = p - lr * far / squares**0.5 * g
    return p


@each
def signum(p: Tensor, gs: Any, lr: float, momentum: float) -> Tensor:
    m = 0 * p
    for g in gs:
        m = momentum * m + (1 - momentum) * g
        p = p - lr * ((m > 0).double() - (m < 0).double())
    return p


@each
def grams(p: Tensor, gs: Any, lr: float, betas: Any, eps: float) -> Tensor:
    m = v = 0 * p
    for t, g in enumerate(gs, 1):
        m, v = moments(m, v, g, betas)
        u = corrected(m, betas[0], t) / (corrected(v, betas[1], t).sqrt() + eps)
        p = p - lr * torch.sign(g) * torch.abs(u)
    return p


@each
def lars(p: Tensor, gs: Any, lr: float, trust: float, l2: float) -> Tensor:
    m = 0 * p
    for g in gs:
        norm, other = [x.norm() / max(1, x.numel()) ** 0.5 for x in (p, g)]
        ratio = norm / (other + l2 * norm + 1e-6)
        m = 0.9 * m + trust * ratio * (g + l2 * p)
        p = p - lr * m
    return p


def apart(p: Tensor, g: Tensor, d: Tensor, delta: float) -> Tensor:
    """Return d without its part along p if the gradient has next to none."""
    cosine = (g * p).sum().abs() / (g.norm() * p.norm() + 1e-12)
    if cosine < delta / max(1, p.numel()) ** 0.5:
        d = d - (d * p).sum() / (p * p).sum() * p
    return d


@each
def adamp(p: Tensor, gs: Any, lr: float, betas: Any, delta: float, eps: float) -> Tensor:
    m = v = 0 * p
    for t, g in enumerate(gs, 1):
        m, v = moments(m, v, g, betas)
        d = corrected(m, betas[0], t) / (corrected(v, betas[1], t).sqrt() + eps)
        p = p - lr * apart(p, g, d, delta)
    return p


@each
def sgdp(p: Tensor, gs: Any, lr: float, momentum: float, delta: float) -> Tensor:
    m = 0 * p
    for g in gs:
        m = momentum * m + g
        p = p - lr * apart(p, g, m, delta)
    return p


@each
def mars(p: Tensor, gs: Any, lr: float, gamma: float) -> Tensor:
    m, v, last = 0 * p, 0 * p, gs[0]
    for t, g in enumerate(gs, 1):
        c = g + gamma * 19.0 * (g - last)
        last = g
        c = c / max(1.0, c.norm().item())
        m, v = moments(m, v, c, (0.95, 0.99))
        p = p - lr * corrected(m, 0.95, t) / (corrected(v, 0.99, t).sqrt() + 1e-6)
    return p


@each
def novograd(p: Tensor, gs: Any, lr: float, betas: Any) -> Tensor:
    m, v = 0 * p, (gs[0] ** 2).sum()
    for g in gs:
        v = betas[1] * v + (1 - betas[1]) * (g**2).sum()
        m = betas[0] * m + g / (v.sqrt() + 1e-6)
        p = p - lr * m
    return p


@each
def psgd(p: Tensor, gs: Any, lr: float, rate: float) -> Tensor:
    q = torch.eye(len(p), dtype=p.dtype)
    for g in gs:
        a = torch.einsum("ij,jk,lk,ml->im", q, g, g, q)
        b = g.shape[1] * torch.linalg.inv(q @ q.T)
        size = torch.linalg.matrix_norm(a + b, torch.inf)
        q = q - rate * torch.triu(a - b) / size @ q
        p = p - lr * q.T @ (q @ g)
    return p


@each
def galore(p: Tensor, gs: Any, lr: float, rank: int) -> Tensor:
    values, vectors = torch.linalg.eigh(gs[0] @ gs[0].T)
    basis = vectors[:, values.argsort(descending=True)[:rank]]
    u, _, _ = torch.linalg.svd(gs[0])
    basis = basis * (basis * u[:, :rank]).sum(0).sign()
    m = v = torch.zeros(rank, p.shape[1], dtype=p.dtype)
    for t, g in enumerate(gs, 1):
        m, v = moments(m, v, basis.T @ g, (0.9, 0.999))
        u = corrected(m, 0.9, t) / (corrected(v, 0.999, t).sqrt() + 1e-6)
        p = p - lr * basis @ u
    return p


def d_adaptation(params: Any, grads: Any, lr: float, first: float) -> Any:
    d, squares, total = first, 0.0, [0 * p for p in params]
    for step in grads:
        params = [p - lr * d * g for p, g in zip(params, step)]
        total = [s + lr * d * g for s, g in zip(total, step)]
        squares += sum([(lr * d * g).square().sum().item() for g in step])
        square = sum([s.square().sum().item() for s in total])
        d = max(d, (square - squares) / (2 * square**0.5))
    return params


def drawn(params: Any, seed: int, t: int) -> list[Tensor]:
    """Return the noise of a step, from 0."""
    noise = [plain_normals(seed, t, i, p.numel()) for i, p in enumerate(params)]
    return [z.to(p.dtype).view(p.shape) for p, z in zip(params, noise)]


def drawn_whole(
    seed: int, t: int, place: int, *shapes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Return what `normal` draws for the parameter at a place, in calls of these shapes."""
    counts = [-(-math.prod(shape) // 4) * 4 for shape in shapes]
    # Counted from 2^31, so that they are other numbers than those of directions.
    z = plain_normals(seed, t, 2**31 + place, sum(counts))
    parts = zip(z.split(counts), shapes)
    return tuple([x[: math.prod(shape)].view(shape) for x, shape in parts])


def apollo(
    params: Any, grads: Any, lr: float, rank: int, gap: int, scale: float, seed: int
) -> Any:
    def one(i: int, p: Tensor, gs: Any) -> Tensor:
        m = v = torch.zeros(rank, p.shape[1], dtype=p.dtype)
        for t, g in enumerate(gs, 1):
            if t % gap == 1:
                (z,) = drawn_whole(seed, t - 1, i, (rank, p.shape[0]))
            r = z @ g / rank**0.5
            m, v = moments(m, v, r, (0.9, 0.999))
            u = corrected(m, 0.9, t) / (corrected(v, 0.999, t).sqrt() + 1e-6)
            p = p - lr * scale * g * u.norm(dim=0) / (r.norm(dim=0) + 1e-6)
        return p

    return [one(i, p, gs) for i, (p, *gs) in enumerate(zip(params, *grads))]


def sgld(params: Any, grads: Any, lr: float, temperature: float, seed: int) -> Any:
    for t, step in enumerate(grads):
        for i, (p, z) in enumerate(zip(params, drawn(params, seed, t))):
            params[i] = p - lr * step[i] - (2 * lr * temperature) ** 0.5 * z
    return params


def psgld(
    params: Any,
    grads: Any,
    lr: float,
    alpha: float,
    eps: float,
    temperature: float,
    seed: int,
) -> Any:
    vs = [0 * p for p in params]
    for t, step in enumerate(grads):
        for i, (p, z) in enumerate(zip(params, drawn(params, seed, t))):
            vs[i] = alpha * vs[i] + (1 - alpha) * step[i] ** 2
            scale = 1 / (vs[i].sqrt() + eps)
            params[i] = p - lr * scale * step[i] - (2 * lr * temperature * scale) ** 0.5 * z
    return params


def sghmc(
    params: Any, grads: Any, lr: float, friction: float, temperature: float, seed: int
) -> Any:
    vs = [0 * p for p in params]
    for t, step in enumerate(grads):
        for i, (p, z) in enumerate(zip(params, drawn(params, seed, t))):
            noise = (2 * friction * lr * temperature) ** 0.5 * z
            vs[i] = (1 - friction) * vs[i] - lr * step[i] - noise
            params[i] = p + vs[i]
    return params


@each
def sophia(p: Tensor, gs: Any, lr: float, rho: float) -> Tensor:
    m = 0 * p
    for g in gs:
        m, h = 0.96 * m + 0.04 * g, hessian_of(g)
        d = m / torch.maximum(rho * h, torch.tensor(1e-12))
        p = p - lr * d.minimum(torch.tensor(1.0)).maximum(torch.tensor(-1.0))
    return p


@each
def adahessian(
    p: Tensor, gs: Any, lr: float, betas: Any, power: float, eps: float
) -> Tensor:
    m = v = 0 * p
    for t, g in enumerate(gs, 1):
        m, _ = moments(m, v, g, betas)
        _, v = moments(m, v, hessian_of(g), betas)
        scale = corrected(v, betas[1], t).sqrt() ** power + eps
        p = p - lr * corrected(m, betas[0], t) / scale
    return p


def hessian_of(g: Tensor) -> Tensor:
    """Return values to give as a Hessian's diagonal, made of the gradient."""
    return 1.5 + g.cos()


@each
def adam_mini(p: Tensor, gs: Any, lr: float, betas: Any) -> Tensor:
    (b1, b2), rows = betas, []
    for i, row in enumerate(p):
        m, v = 0 * row, 0.0
        for t, g in enumerate(gs, 1):
            m = b1 * m + (1 - b1) * g[i]
            v = b2 * v + (1 - b2) * g[i].square().mean().item()
            row = row - lr * corrected(m, b1, t) / ((v / (1 - b2**t)) ** 0.5 + 1e-6)
        rows.append(row)
    return torch.stack(rows)


@each
def came(p: Tensor, gs: Any, lr: float, betas: Any, eps: Any, clip: float) -> Tensor:
    b1, b2, b3 = betas
    m = 0 * p
    r, c, rr, cc = 0.0, 0.0, 0.0, 0.0
    for g in gs:
        v = g**2 + eps[0]
        r, c = b2 * r + (1 - b2) * v.sum(1), b2 * c + (1 - b2) * v.sum(0)
        u = g / (torch.outer(r, c) / r.sum()).sqrt()
        u = u / max(1.0, u.norm().item() / u.numel() ** 0.5 / clip)
        m = b1 * m + (1 - b1) * u
        v = (u - m) ** 2 + eps[1]
        rr, cc = b3 * rr + (1 - b3) * v.sum(1), b3 * cc + (1 - b3) * v.sum(0)
        p = p - lr * m / (torch.outer(rr, cc) / rr.sum()).sqrt()
    return p


@each
def sm3(p: Tensor, gs: Any, lr: float) -> Tensor:
    rows, columns = [0.0] * p.shape[0], [0.0] * p.shape[1]
    p = p.clone()
    for g in gs:
        v = torch.zeros_like(p)
        for i in range(len(rows)):
            for j in range(len(columns)):
                v[i, j] = min(rows[i], columns[j]) + g[i, j] ** 2
                if v[i, j] > 0:
                    p[i, j] -= lr * g[i, j] / v[i, j] ** 0.5
        rows, columns = v.max(1).values.tolist(), v.max(0).values.tolist()
    return p


@each
def sinkgd(p: Tensor, gs: Any, lr: float, rounds: int) -> Tensor:
    m, n = p.shape
    for g in gs:
        for _ in range(rounds):
            g = n**0.5 * g / (g.norm(dim=1)[:, None] + n**0.5 * 1e-8)
            g = m**0.5 * g / (g.norm(dim=0)[None] + m**0.5 * 1e-8)
        p = p - lr * g
    return p


def square_of(tensors: Any) -> float:
    """Return the sum of all squares."""
    return sum([x.square().sum().item() for x in tensors])


def dog(params: Any, grads: Any, lr: float, first: float) -> Any:
    start, far, squares, factor = params, first, 1e-8, 0.0
    for step in grads:
        far = max(far, square_of([p - s for p, s in zip(params, start)]) ** 0.5)
        squares += square_of(step)
        params = [p - lr * factor * g for p, g in zip(params, step)]
        factor = far / squares**0.5
    return params


@each
def ano(p: Tensor, gs: Any, lr: float, betas: Any, eps: float) -> Tensor:
    (b1, b2), m, v = betas, 0 * p, 0 * p
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * torch.sign(g**2 - v) * g**2
        p = p - lr * g.abs() * m.sign() / (corrected(v, b2, t).sqrt() + eps)
    return p


@each
def bcos(p: Tensor, gs: Any, lr: float, beta: float, eps: float) -> Tensor:
    m, b = gs[0], beta
    for g in gs:
        o, m = m, b * m + (1 - b) * g
        v = (
            (3 * b**2 - 2 * b**3) * o**2
            + (1 - b) ** 2 * g**2
            + 2 * b * (1 - b) ** 2 * o * g
        )
        p = p - lr * m / (v.sqrt() + eps)
    return p


@each
def mvn_grad(p: Tensor, gs: Any, lr: float, betas: Any, eps: float) -> Tensor:
    (b1, b2), m, n, v = betas, 0 * p, 0 * p, 0 * p
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (g - m) ** 2
        n = b1 * n + (1 - b1) * g / (corrected(v, b2, t).sqrt() + eps)
        p = p - lr * corrected(n, b1, t)
    return p


def adagc(
    params: Any, grads: Any, lr: float, betas: Any, beta: float, ratio: float, warm: float
) -> Any:
    state = [(0 * p, 0 * p, 0.0) for p in params]
    for t, step in enumerate(grads, 1):
        early = min(1.0 / (square_of(step) ** 0.5 + 1e-8), 1.0)
        for i, g in enumerate(step):
            (m, v, r), n = state[i], float(g.norm())
            if t < warm:
                h = early
                r = h * n if t == 1 else min(r, h * n)
            else:
                h = min(ratio * r / n, 1.0) if n else 1.0
                r = beta * r + (1 - beta) * h * n
            m, v = moments(m, v, h * g, betas)
            u = corrected(m, betas[0], t) / (corrected(v, betas[1], t).sqrt() + 1e-8)
            params, state[i] = replaced(params, i, params[i] - lr * u), (m, v, r)
    return params


def replaced(items: Any, i: int, new: Any) -> list[Any]:
    return [new if j == i else x for j, x in enumerate(items)]


def polar(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the polar factor, and the singular values."""
    u, values, v = torch.linalg.svd(m, full_matrices=False)
    return u @ v, values


@each
def adago(p: Tensor, gs: Any, lr: float, momentum: float, most: float, start: float) -> Any:
    m, v = 0 * p, start**2
    for g in gs:
        m = momentum * m + (1 - momentum) * g
        n = min(float(g.norm()), most)
        v += n**2
        p = p - max(1e-4, lr * n / v**0.5) * polar(m)[0]
    return p


@each
def polargrad(p: Tensor, gs: Any, lr: float, momentum: float) -> Tensor:
    m = 0 * p
    for g in gs:
        m = momentum * m + (1 - momentum) * g
        factor, values = polar(m)
        p = p - lr * values.sum() * factor
    return p


@each
def conda(p: Tensor, gs: Any, lr: float, betas: Any, eps: float, gap: int) -> Tensor:
    (b1, b2), m, v, basis = betas, 0 * p, 0.0, p
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        if t == 1 or t % gap == 0:
            basis = torch.linalg.svd(m, full_matrices=False)[0]
        v = b2 * v + (1 - b2) * (basis.T @ g) ** 2
        u = basis.T @ corrected(m, b1, t) / (corrected(v, b2, t).sqrt() + eps)
        p = p - lr * basis @ u
    return p


@each
def dion(p: Tensor, gs: Any, lr: float, momentum: float, rank: int, seed: int) -> Tensor:
    m, (q,) = 0 * p, drawn_whole(seed, 0, 2**31 - 1, (p.shape[1], min(rank, *p.shape)))
    for g in gs:
        b = m + g
        basis = torch.linalg.qr(b @ q)[0]
        r = b.T @ basis
        m, q = b - (1 - momentum) * basis @ r.T, r / (r.norm(dim=0) + 1e-8)
        p = p - lr * (p.shape[0] / p.shape[1]) ** 0.5 * basis @ q.T
    return p


@each
def focus(
    p: Tensor, gs: Any, lr: float, betas: Any, gamma: float, weight_decay: float
) -> Tensor:
    (b1, b2), m, c = betas, 0 * p, 0 * p
    for t, g in enumerate(gs, 1):
        m, c = b1 * m + (1 - b1) * g, b2 * c + (1 - b2) * p
        hat = corrected(c, b2, t)
        p = p - lr * weight_decay * hat
        p = p - lr * (gamma * (p - hat).sign() + m.sign())
    return p


@each
def namo(
    p: Tensor, gs: Any, lr: float, betas: Any, eps: float, weight_decay: float
) -> Tensor:
    (b1, b2), m, v = betas, 0 * p, 0.0
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * float(g.norm()) ** 2
        a = (1 - b2**t) ** 0.5 / (1 - b1**t) * m.norm() / (v**0.5 + eps)
        p = p - lr * a * (polar(m)[0] + weight_decay * p)
    return p


@each
def adamhd(
    p: Tensor, gs: Any, lr: float, betas: Any, eps: float, beta: float, weight_decay: float
) -> Tensor:
    (b1, b2), m, v, delta, tau = betas, 0 * p, 0 * p, 0.0, lr * weight_decay
    for t, g in enumerate(gs, 1):
        n = float(p.abs().mean()) if p.numel() else 0.0
        delta = n if t == 1 else beta * delta + (1 - beta) * n
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        y = p - lr * m / (v.sqrt() + eps)
        far = y - tau * delta * y.sign()
        p = torch.where(y.abs() <= (1 + tau) * delta, y / (1 + tau), far)
    return p


@each
def racs(p: Tensor, gs: Any, lr: float, beta: float, alpha: float, growth: float) -> Any:
    rows, columns, last = p.new_zeros(len(p)), p.new_ones(p.shape[1]), 0.0
    for t, g in enumerate(gs, 1):
        rows = beta * rows + (1 - beta) * (g**2).mean(1)
        columns = beta * columns + (1 - beta) * (g**2).mean(0)
        u = g / (rows[:, None] + 1e-8).sqrt() / (columns[None] + 1e-8).sqrt()
        n = float(u.norm())
        k = growth / max(n / (last + 1e-8), growth) if t > 1 else 1.0
        p, last = p - lr * alpha * k * u, n * k
    return p


@each
def splus(p: Tensor, gs: Any, lr: float, betas: Any, gap: int) -> Tensor:
    (b1, b2), m, left, right = betas, 0 * p, 0.0, 0.0
    q, r = [torch.eye(n, dtype=p.dtype) for n in p.shape]
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        p = p - lr * 2 / sum(p.shape) * q @ (q.T @ m @ r).sign() @ r.T
        if t == 1 or t % gap == 0:
            q, r = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
    return p


def dowg(params: Any, grads: Any, lr: float, first: float) -> Any:
    start, far, weighted, factor = params, first**2, 0.0, 0.0
    for step in grads:
        far = max(far, square_of([p - s for p, s in zip(params, start)]))
        weighted += far * square_of(step)
        params = [p - lr * factor * g for p, g in zip(params, step)]
        factor = far / weighted**0.5
    return params


@each
def adashift(p: Tensor, gs: Any, lr: float, beta: float, keep: int, eps: float) -> Tensor:
    v = 0 * p
    for t in range(keep, len(gs)):
        v = beta * v + (1 - beta) * gs[t - keep] ** 2
        m = torch.stack(gs[t - keep + 1 : t + 1]).mean(0)
        p = p - lr * m / (corrected(v, beta, t - keep + 1).sqrt() + eps)
    return p


@each
def spam(
    p: Tensor,
    gs: Any,
    lr: float,
    betas: Any,
    theta: float,
    every: int,
    warm: int,
    eps: float,
) -> Tensor:
    m = v = 0 * p
    for t, g in enumerate(gs):
        k = t % every
        if k == 0:
            m = v = 0 * p
        spike = (g * g > theta * v) & (v > 0)
        g = torch.where(spike, g.sign() * (theta * v).sqrt(), g)
        m, v = moments(m, v, g, betas)
        d = corrected(m, betas[0], k + 1) / (corrected(v, betas[1], k + 1).sqrt() + eps)
        wave = 0.5 * (1 - math.cos(math.pi * (k + 1) / warm))
        p = p - lr * d * (wave if t >= every and k < warm else 1.0)
    return p


@each
def srsgd(p: Tensor, gs: Any, lr: float, every: int) -> Tensor:
    v = p
    for t, g in enumerate(gs):
        k, new = t % every, p - lr * g
        p, v = new + k / (k + 3) * (new - v), new
    return p


@each
def adabound(
    p: Tensor, gs: Any, lr: float, betas: Any, final: float, gamma: float
) -> Tensor:
    m = v = 0 * p
    for t, g in enumerate(gs, 1):
        m, v = moments(m, v, g, betas)
        rate = lr * (1 - betas[1] ** t) ** 0.5 / (1 - betas[0] ** t) / (v.sqrt() + 1e-8)
        low, high = final * (1 - 1 / (gamma * t + 1)), final * (1 + 1 / (gamma * t))
        p = p - rate.clamp(low, high) * m
    return p


@each
def adamod(p: Tensor, gs: Any, lr: float, betas: Any, eps: float) -> Tensor:
    m = v = s = 0 * p
    for t, g in enumerate(gs, 1):
        m, v = moments(m, v, g, betas[:2])
        rate = lr / (corrected(v, betas[1], t).sqrt() + eps)
        s = betas[2] * s + (1 - betas[2]) * rate
        p = p - torch.where(rate > s, s, rate) * corrected(m, betas[0], t)
    return p


@each
def adanorm(p: Tensor, gs: Any, lr: float, gamma: float) -> Tensor:
    m, norm = 0 * p, 0.0
    for g in gs:
        size = float(g.norm())
        norm = gamma * norm + (1 - gamma) * size
        m = 0.9 * m + 0.1 * g * (norm / size if 0 < size < norm else 1.0)
        p = p - lr * m
    return p


@each
def kourkoutas(
    p: Tensor, gs: Any, lr: float, beta: Any, low: Any, high: Any, alpha: Any, eps: Any
) -> Tensor:
    m, v, r = 0 * p, 0 * p, 0.0
    for g in gs:
        size = float(g.norm())
        r = alpha * r + (1 - alpha) * size
        raw = size / (r + 1e-9)
        b2 = high - (high - low) * raw / (1 + raw)
        m, v = moments(m, v, g, (beta, b2))
        p = p - lr * m / (v.sqrt() + eps)
    return p


@each
def madgrad(p: Tensor, gs: Any, lr: float, momentum: float, eps: float) -> Tensor:
    start, s, v = p, 0 * p, 0 * p
    for k, g in enumerate(gs):
        rate = lr * math.sqrt(k + 1)
        s, v = s + rate * g, v + rate * g**2
        z = start - s / (v.pow(1 / 3) + eps)
        p = momentum * p + (1 - momentum) * z
    return p


@each
def ftrl(p: Tensor, gs: Any, lr: float, l1: float, l2: float, beta: float) -> Tensor:
    w, z, n = 0 * p, 0 * p, 0 * p
    for g in gs:
        sigma = ((n + g**2).sqrt() - n.sqrt()) / lr
        z, n = z + g - sigma * w, n + g**2
        w = -(z - z.sign() * l1) / ((beta + n.sqrt()) / lr + l2)
        w = torch.where(z.abs() <= l1, 0.0, w)
    return p + w


@each
def cocob(p: Tensor, gs: Any, lr: float, alpha: float) -> Tensor:
    assert lr == 1
    start, largest, sizes, reward, theta = p, 0 * p + 1e-8, 0 * p, 0 * p, 0 * p
    for g in gs:
        g = -g
        largest, sizes = torch.maximum(largest, g.abs()), sizes + g.abs()
        reward = torch.relu(reward + (p - start) * g)
        theta = theta + g
        bottom = largest * torch.maximum(sizes + largest, alpha * largest)
        p = start + theta / bottom * (largest + reward)
    return p


@each
def grokfast(
    p: Tensor, gs: Any, lr: float, betas: Any, alpha: float, amplify: float, eps: float
) -> Tensor:
    m, v, h = 0 * p, 0 * p, gs[0]
    for t, g in enumerate(gs, 1):
        h = torch.lerp(g, h, alpha)
        m, v = moments(m, v, g + amplify * h, betas)
        p = p - lr * corrected(m, betas[0], t) / (corrected(v, betas[1], t).sqrt() + eps)
    return p


@each
def padam(p: Tensor, gs: Any, lr: float, betas: Any, power: float, eps: float) -> Tensor:
    m = v = top = 0 * p
    for g in gs:
        m, v = moments(m, v, g, betas)
        top = torch.where(v > top, v, top)
        p = p - lr * m / (top.sqrt() + eps).pow(2 * power)
    return p


@each
def diffgrad(p: Tensor, gs: Any, lr: float, betas: Any, eps: float) -> Tensor:
    m = v = last = 0 * p
    for t, g in enumerate(gs, 1):
        m, v = moments(m, v, g, betas)
        friction = 1 / (1 + torch.exp(-torch.abs(last - g)))
        last = g
        d = corrected(m, betas[0], t) / (corrected(v, betas[1], t).sqrt() + eps)
        p = p - lr * friction * d
    return p


@each
def aggmo(p: Tensor, gs: Any, lr: float, betas: Any) -> Tensor:
    vs = torch.zeros(len(betas), *p.shape, dtype=p.dtype)
    for g in gs:
        for i, beta in enumerate(betas):
            vs[i] = beta * vs[i] - g
        p = p + lr * vs.mean(0)
    return p


@each
def powersign(p: Tensor, gs: Any, lr: float, beta: float) -> Tensor:
    m = 0 * p
    for g in gs:
        m = beta * m + (1 - beta) * g
        p = p - lr * g * math.e ** torch.sign(g * m)
    return p


@each
def fromage(p: Tensor, gs: Any, lr: float) -> Tensor:
    for g in gs:
        if g.norm() > 0:
            p = p - lr * p.norm() / g.norm() * g
        p = p / math.sqrt(1 + lr**2)
    return p


@each
def kate(p: Tensor, gs: Any, lr: float, eta: float, eps: float) -> Tensor:
    m = b = 0 * p
    for g in gs:
        b = b + g**2
        m = m + eta * g**2 + (g / (b + eps).sqrt()) ** 2
        p = p - lr * m.sqrt() / (b + eps) * g
    return p


@each
def simplified_ademamix(
    p: Tensor, gs: Any, lr: float, betas: Any, alpha: float, eps: float
) -> Tensor:
    m = v = 0 * p
    for t, g in enumerate(gs, 1):
        m, v = betas[0] * m + g, torch.lerp(g**2, v, betas[1])
        p = p - lr * (m + alpha * g) / (corrected(v, betas[1], t).sqrt() + eps)
    return p


@each
def pnm(p: Tensor, gs: Any, lr: float, momentum: float, negative: float) -> Tensor:
    ms = [0 * p, 0 * p]
    for t, g in enumerate(gs):
        ms[t % 2] = momentum**2 * ms[t % 2] + (1 - momentum**2) * g
        d = (1 + negative) * ms[t % 2] - negative * ms[(t + 1) % 2]
        p = p - lr * d / math.hypot(1 + negative, negative)
    return p


@each
def adams(p: Tensor, gs: Any, lr: float, betas: Any, eps: float) -> Tensor:
    b1, b2 = betas
    m = 0 * p
    for g in gs:
        v = b2 * m.square() + (1 - b2) * g.square()
        m = b1 * m + (1 - b1) * g
        p = p - lr * m / (v.sqrt() + eps)
    return p


@each
def adam_atan2(p: Tensor, gs: Any, lr: float, betas: Any) -> Tensor:
    m = v = 0 * p
    for t, g in enumerate(gs, 1):
        m, v = moments(m, v, g, betas)
        m_hat, root = corrected(m, betas[0], t), corrected(v, betas[1], t).sqrt()
        d = torch.atan(m_hat / torch.where(root > 0, root, 1.0))
        p = p - lr * d
    return p


@each
def nsgdm(p: Tensor, gs: Any, lr: float, momentum: float) -> Tensor:
    m = 0 * p
    for g in gs:
        m = momentum * m + (1 - momentum) * g
        p = p - lr * m / max(m.norm().item(), 1e-12)
    return p


B = (0.8, 0.95)
HESSIAN = {"extras": lambda grads: {"hessian": [hessian_of(g) for g in grads]}}
# Signs of sums that are nearly 0 differ between dtypes, and have no derivatives.
SIGNS = dict.fromkeys(("derivatives", "float32", "bfloat16", "bfloat16 exact"), 2.0)
# d follows small differences.
ROUNDED = {"allowed": {"bfloat16": 0.4, "bfloat16 exact": 0.4}}
# Hyperparameters other than the defaults, and what else `check_rule` takes.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adabelief": ({"betas": B, "eps": 1e-3}, {}),
    # The bounds of the rate do not follow lr.
    "adabound": (
        {"betas": B, "final": 0.05, "gamma": 0.2},
        {"allowed": {"lr of 0": 0.1}},
    ),
    "adahessian": ({"betas": B, "power": 0.8, "eps": 1e-2}, HESSIAN),
    "adam_atan2": ({"betas": B}, {}),
    "adam_mini": ({"betas": B}, {}),
    "adamod": ({"betas": (0.8, 0.95, 0.9), "eps": 1e-2}, {}),
    "adamp": ({"betas": B, "delta": 0.5, "eps": 1e-3}, {}),
    "adams": ({"betas": B, "eps": 1e-2}, {}),
    "adanorm": ({"gamma": 0.8}, {}),
    "adashift": ({"beta": 0.9, "keep": 2, "eps": 0.1}, {}),
    "aggmo": ({"betas": (0.0, 0.5, 0.9)}, {}),
    "apollo": ({"rank": 3, "gap": 3, "scale": 0.5, "seed": 7}, {}),
    "came": ({"betas": (0.8, 0.95, 0.9), "eps": (1e-3, 1e-3), "clip": 0.9}, {}),
    "cocob": ({"alpha": 3.0}, {"lr": 1.0}),
    "d_adaptation": ({"first": 0.1}, ROUNDED),
    "diffgrad": ({"betas": B, "eps": 1e-2}, {}),
    "dog": ({"first": 0.1}, {"lr": 1.0}),
    "dowg": ({"first": 0.1}, {"lr": 1.0}),
    "ef_signsgd": ({}, {}),
    "fromage": ({}, {}),
    "ftrl": ({"l1": 0.5, "l2": 0.1, "beta": 0.7}, {"lr": 0.1}),
    "galore": ({"rank": 3}, {}),
    "grams": ({"betas": B, "eps": 1e-2}, {}),
    "grokfast": ({"betas": B, "alpha": 0.7, "amplify": 1.5, "eps": 1e-2}, {}),
    "kate": ({"eta": 0.3, "eps": 1e-2}, {}),
    "kourkoutas": (
        {"beta": 0.8, "low": 0.5, "high": 0.95, "alpha": 0.7, "eps": 1e-2},
        {},
    ),
    "laprop": ({"betas": B, "eps": 1e-2}, {}),
    "lars": ({"trust": 0.2, "l2": 0.1}, {}),
    # With lr=1 the first step is as long as `first`, where the maximum has a kink.
    "ldog": ({"first": 0.1}, {"lr": 0.8}),
    "madgrad": ({"momentum": 0.7, "eps": 1e-2}, {}),
    "mars": ({"gamma": 0.03}, {}),
    "novograd": ({"betas": (0.9, 0.95)}, {}),
    "nsgdm": ({"momentum": 0.8}, {}),
    "padam": ({"betas": B, "power": 0.2, "eps": 1e-2}, {}),
    "pnm": ({"momentum": 0.8, "negative": 0.7}, {}),
    "powersign": ({"beta": 0.8}, {}),
    "psgd": ({"rate": 0.1}, {}),
    "psgld": ({"alpha": 0.9, "eps": 1e-2, "temperature": 0.1, "seed": 7}, {}),
    "qhadam": ({"betas": B, "nus": (0.7, 0.9), "eps": 1e-2}, {}),
    "qhm": ({"momentum": 0.8, "nu": 0.6}, {}),
    "sgdp": ({"momentum": 0.8, "delta": 0.5}, {}),
    "sghmc": ({"friction": 0.2, "temperature": 0.1, "seed": 7}, {}),
    "sgld": ({"temperature": 0.1, "seed": 7}, {}),
    "signum": ({"momentum": 0.8}, {}),
    "simplified_ademamix": ({"betas": B, "alpha": 0.5, "eps": 1e-2}, {}),
    "sinkgd": ({"rounds": 3}, {}),
    "sm3": ({}, {}),
    "sophia": ({"rho": 1.0}, HESSIAN),
    "spam": ({"betas": B, "theta": 2.0, "every": 3, "warm": 2, "eps": 1e-3}, {}),
    "srsgd": ({"every": 3}, {}),
    "yogi": ({"eps": 0.01}, {}),
    "adagc": (
        {"betas": B, "beta": 0.7, "ratio": 1.05, "warm": 3.5},
        {"extras": lambda step: {"total": torch.stack([g.norm() for g in step]).norm()}},
    ),
    # The least rate does not follow lr.
    "adago": (
        {"momentum": 0.8, "most": 2.0, "start": 0.5},
        {"allowed": {"lr of 0": 1e-3}},
    ),
    "ano": ({"betas": B, "eps": 1e-2}, {}),
    "bcos": ({"beta": 0.8, "eps": 1e-2}, {}),
    "conda": ({"betas": B, "eps": 1e-2, "gap": 4}, {}),
    "dion": ({"momentum": 0.8, "rank": 2, "seed": 7}, {}),
    "adamhd": ({"betas": B, "eps": 1e-2, "beta": 0.7, "weight_decay": 0.3}, {}),
    "focus": ({"betas": B, "gamma": 0.3, "weight_decay": 0.2}, {"allowed": SIGNS}),
    "namo": ({"betas": B, "eps": 1e-2, "weight_decay": 0.2}, {}),
    "mvn_grad": ({"betas": B, "eps": 1e-2}, {}),
    "polargrad": ({"momentum": 0.8}, {}),
    "racs": ({"beta": 0.8, "alpha": 0.1, "growth": 1.1}, {}),
    "splus": ({"betas": B, "gap": 4}, {"allowed": SIGNS}),
}
