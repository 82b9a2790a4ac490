"""Shampoo (Gupta et al. 2018), as it is used today, and KL-Shampoo (Lin et al. 2025)."""

from dataclasses import KW_ONLY
from functools import partial, reduce
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.core.checks import check_flag
from optimi_func.core.math import choose, norm, power, symmetric
from optimi_func.core.rule import Scalar
from optimi_func.optimizers.soap import (
    SOAP,
    Squares,
    changed,
    eigen,
    known,
    rotated,
    squares,
)
from optimi_func.rules import Betas, Float, Shaped, functions, root, rounded

__all__ = ["Shampoo", "shampoo", "shampoo_init", "shampoo_step"]

RIDGE = 1e-6  # share of the largest eigenvalue that is added to all
KL_START = 0.1  # the eigenvalues that KL-Shampoo begins with


class Shampoo(SOAP, name="shampoo"):
    """Shampoo: step along the momentum, multiplied by inverse roots of covariances.

        L <- b3 * L + (1 - b3) * gg^T,   R <- b3 * R + (1 - b3) * g^Tg
        m <- b1 * m + (1 - b1) * g,      u = L^(-1/4) m R^(-1/4)
        p <- p - lr * u * ||a|| / ||u|| - lr * weight_decay * p

    Here g is the gradient of a matrix, a is the step that Adam would take, and u is scaled
    to the norm ||a||. The formulas use m, L and R after bias correction. The order of the
    roots is twice the number of dimensions that have a factor. If both dimensions of a
    matrix have a factor, the roots are fourth roots.

    KL-Shampoo (kl=True) fits both factors jointly to the covariance of the gradients. For
    an m x n matrix, KL-Shampoo's formulas are

        L <- b3 * L + (1 - b3) / n * g R^-1 g^T
        R <- b3 * R + (1 - b3) / m * g^T L^-1 g
        u = L^(-1/2) m R^(-1/2)

    In KL-Shampoo, u already has the size of Adam's step, so Adam's v is not stored.

    The first step initializes L, R and their roots, and moves the parameters only by weight
    decay. After that, Shampoo decomposes L and R and computes new roots once every
    precondition_frequency steps, at the end of a step. KL-Shampoo stores eigenvectors and
    eigenvalues instead of roots. Every precondition_frequency steps, KL-Shampoo replaces
    the eigenvectors Q with QR(L Q). KL-Shampoo's eigenvalues start at 0.1, and are moving
    averages over all steps. Adam updates all vectors, and also every matrix in which no
    dimension has a factor. If you differentiate through a step, the roots are treated
    as constants.

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and of Adam's v that carry over
            from one step to the next.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True.
        eps: Added to the square root of Adam's v. KL-Shampoo divides m by a product of
            roots, and also adds eps to this product.
        shampoo_beta: b3, in [0, 1): the fraction of L and R that carries over from one step
            to the next. A value below 0 means b2.
        correct_bias: Apply bias correction to m, v, L and R. KL-Shampoo's authors use
            False.
        kl: Use KL-Shampoo.
        graft: Scale u to the norm of Adam's step. To compute this norm, Shampoo also stores
            Adam's v. None means True for Shampoo and False for KL-Shampoo.

    Arguments not named here are described under `SOAP`, or under `BaseOptimizer` if all
    optimizers share them.

    References:
        Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization",
        arXiv:1802.09568; Shi et al., "A Distributed Data-Parallel PyTorch Implementation
        of the Distributed Shampoo Optimizer for Training Neural Networks At-Scale",
        arXiv:2309.06497; Lin et al., "Understanding and Improving Shampoo and SOAP via
        Kullback-Leibler Minimization", arXiv:2509.03378.

    >>> w = torch.eye(2, requires_grad=True)
    >>> optimizer = Shampoo([w], lr=0.1, weight_decay=0.0, compile=False)
    >>> for _ in range(2):  # the first gradient moves nothing
    ...     w.grad = torch.diag(torch.tensor([1.0, -2.0]))
    ...     optimizer.step()
    >>> w.detach()
    tensor([[0.9000, 0.0000],
            [0.0000, 1.1000]])
    """

    lr: Float = Float(1e-3)
    betas: Betas = Betas(0.9, 0.98)
    _: KW_ONLY
    kl: bool = False
    graft: bool | None = None

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleVariableOverride]
        exp_avg: Shaped  # m
        exp_avg_sq: Shaped  # Adam's v, or nothing where no step is Adam's
        factors: Shaped  # L of each rotated side, one after the other in a vector
        bases: Shaped  # the inverse root of each, or KL-Shampoo's eigenvectors
        eigenvalues: Shaped  # of each, KL-Shampoo's

    def check(self) -> None:
        super().check()
        check_flag("graft", self.graft, none=True)

    @property
    def grafts(self) -> bool:
        """True if steps are scaled to the norm of Adam's step."""
        return not self.kl if self.graft is None else self.graft

    def init(self, p: Tensor) -> Any:
        sides = self.sides(p.shape)[1].values()
        n = (sum(n * n for n in sides),)
        v = None if self.grafts or not sides else (0,)
        count = sum(sides) if self.kl else 0
        ones = torch.ones(count, dtype=torch.float32, device=p.device)
        return self.State._make((None, v, n, n, ones))

    def whole(self, d: Tensor, s: Any, t: Scalar) -> Any:
        at, later, since, refreshes = self.times(t)
        (b1, b2), b3 = self.betas, self.shampoo_beta
        b3 = choose(b3 < 0, b2, b3)
        ends = [(b1, since), (b2, since), (b3, at)]
        ends = [1.0 / (1.0 - power(b, n)) if self.correct_bias else 1.0 for b, n in ends]
        b1, b2 = choose(later, b1, 1.0), choose(later, b2, 1.0)
        scalars = *ends, b1, 1.0 - b1, b2, 1.0 - b2, b3, 1.0 - b3, self.eps
        c1, c2, c3, b1, a1, b2, a2, b3, a3, eps = [rounded(x, d) for x in scalars]
        shape, sides = self.sides(d.shape)
        v, factors, flat, values = s[1:]
        # Owners of shards do not know the order of memory, on which results would depend.
        g, m = (y.reshape(shape).contiguous() for y in (d, s.exp_avg))
        m = b1 * m + a1 * g
        u = mean = c1 * m
        if self.grafts or not sides:
            v = b2 * v + a2 * (d * d)
            u = mean / (root(c2 * v.reshape(shape)) + eps)
        if sides:
            bases, length = known(flat, sides, at), norm(u)
            if self.kl:
                values, scales = scaled(values.detach(), sides, len(shape))
                scale = reduce(mul, scales.values())
                u = rotated(mean, bases) * (scale / (1.0 + eps * scale))
                u = rotated(u, bases, back=True)
                products, sizes = fitted(g.detach(), bases, scales)
                values = b3 * values + a3 * sizes
            else:
                u = rotated(mean, bases)
                rows = [g.detach().movedim(i, 0).reshape(n, -1) for i, n in sides.items()]
                products = torch.cat([symmetric(y, y.mT).flatten() for y in rows])
            if self.grafts:
                u = u * (length / norm(u).clamp_min(1e-12))
            factors = b3 * factors.detach() + a3 * products
            now = squares(factors, sides)
            if self.kl:
                flat, values = changed(at == 1, partial(begun, now), flat, values)
                new = partial(turned, now, bases, values)
                flat, values = changed(refreshes, new, flat, values)
            else:
                roots = partial(inverse_roots, now, c3)
                (flat,) = changed((at == 1) | refreshes, roots, flat)
        u = u / root((u * u).mean()) if self.normalize_grads else u
        state = self.State(m.reshape(d.shape), v, factors, flat, values)
        return u.reshape(d.shape), state


def begun(factors: Squares) -> tuple[Tensor, Tensor]:
    """Return KL-Shampoo's initial eigenvectors and eigenvalues."""
    values, vectors = eigen(factors)
    return vectors, torch.full_like(values, KL_START)


def turned(factors: Squares, bases: Squares, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL-Shampoo's eigenvectors after a QR iteration, and the same eigenvalues."""
    images = [factors[i] @ q for i, q in bases.items()]
    return torch.cat([torch.linalg.qr(x)[0].flatten() for x in images]), values


def inverse_roots(factors: Squares, scale: Scalar) -> tuple[Tensor]:
    """Return the inverse roots of scale * factor for all factors, as one vector."""
    values, flat = eigen(factors)
    sides = {i: len(x) for i, x in factors.items()}
    roots: list[Tensor] = []
    for q, x in zip(squares(flat, sides).values(), values.split([*sides.values()])):
        x = scale * x.clamp_min(0.0)
        x = torch.where(x.any(), x + RIDGE * x.max(), 1.0)
        half = q * x ** (-0.25 / len(sides))
        roots.append(symmetric(half, half.mT).flatten())
    return (torch.cat(roots),)


def scaled(values: Tensor, sides: dict[int, int], dim: int) -> tuple[Tensor, Squares]:
    """Return the eigenvalues, bounded as in KL-Shampoo's code, and their inverse roots."""
    most = [min(max(10.0, n), 4000.0) for n in sides.values() for _ in range(n)]
    values = values.maximum(values.new_tensor(most) ** -2)
    roots = zip(sides.items(), values.rsqrt().split([*sides.values()]))
    return values, {i: x.view(n, *[1] * (dim - 1 - i)) for (i, n), x in roots}


def fitted(g: Tensor, bases: Squares, scales: Squares) -> tuple[Tensor, Tensor]:
    """Return the terms that a gradient adds to KL-Shampoo's factors and eigenvalues."""
    z = rotated(g, bases)
    products: list[Tensor] = []
    sizes: list[Tensor] = []
    for i, q in bases.items():
        y = reduce(mul, [x for j, x in scales.items() if j != i], z)
        rows = rotated(y, {i: q}, back=True).contiguous()
        rows = rows.movedim(i, 0).reshape(len(q), -1)
        products.append(len(q) / g.numel() * symmetric(rows, rows.mT).flatten())
        sizes.append(y.movedim(i, 0).reshape(len(q), -1).square().mean(1))
    return torch.cat(products), torch.cat(sizes)


shampoo, shampoo_init, shampoo_step = functions(Shampoo)
