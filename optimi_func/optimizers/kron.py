"""PSGD with Kronecker factors (Li 2015)."""

import math
from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.core.checks import check_whole
from optimi_func.core.math import choose, norm, symmetric
from optimi_func.core.rule import Scalar
from optimi_func.rules import Body, Float, Moment, Shaped, functions, root

__all__ = ["Kron", "kron", "kron_init", "kron_step"]


class Kron(Body, name="kron"):
    """PSGD Kron: step along the momentum, decorrelated by one matrix for each dimension.

        m <- momentum * m + (1 - momentum) * g,   d = m / (1 - momentum^t)
        u  = Q^T Q d,   Q = the product of a Q_i for each dimension
        p <- p - lr * u * min(1, 1.1 / rms(u)) - lr * weight_decay * p

    Q is the Kronecker product of triangular factors Q_i, one for each dimension of the
    parameter. Each Q_i begins as the identity. Q_i is diagonal instead of triangular if the
    parameter is a vector, if dimension i has size 1, or if dimension i is larger than
    max_size_triangular.

    A fit of the preconditioner updates all factors: Q_i <- Q_i - precond_lr * triu(A - B)
    Q_i / |A + B|. Here A and B are the Gram matrices of Q d and Q^-T z along dimension i.
    The tensor z contains standard normal random numbers. Because a fit is expensive, only a
    fraction of the steps includes a fit. At step t, this fraction is
    max(precond_update_prob, exp((f + 1 - t) / 2f)), with f = precond_flat_start. Fits take
    place at evenly spaced steps. If a pure step cannot read its step count, the step always
    computes a fit, and uses the result only if a fit is due. A pure step cannot read its
    step count if it is traced, vmapped or run on an accelerator.

    Args:
        momentum: Fraction of m that carries over from one step to the next, in [0, 1).
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True.
        precond_lr: Step size of a fit: a factor on the change in each Q_i.
        precond_update_prob: Lowest fraction of steps that include a fit, in [0, 1].
        precond_flat_start: Number of initial steps that all include a fit. After the
            initial steps, the fraction of steps with a fit falls.
        max_size_triangular: Largest size of a dimension for which Q_i is triangular.
        seed: Seed of the random numbers z that are drawn in steps with a fit.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Li, "Preconditioned Stochastic Gradient Descent", arXiv:1512.04202, as in
        github.com/evanatyourservice/kron_torch.

    >>> w = torch.eye(2, requires_grad=True)
    >>> Kron([w], lr=0.1, compile=False).step((3 * w).sum().backward)
    >>> (w.detach() - torch.eye(2)).square().mean().sqrt()  # at most 1.1 lr
    tensor(0.1100)
    """

    lr: Float = Float(1e-3)
    momentum: Float = Float(0.9, "momentum", below=1.0)
    weight_decay: Float = Float(0.0)
    _: KW_ONLY
    precond_lr: Float = Float(0.1, "rate of the factors")
    precond_update_prob: Float = Float(0.03, "share of fits", most=1.0)
    precond_flat_start: Float = Float(500.0, "flat start")
    max_size_triangular: int = 8192
    seed: int = 0

    class State(NamedTuple):
        momentum_buffer: Moment  # m
        factors: Shaped  # the Q_i one after the other

    def check(self) -> None:
        check_whole("max_size_triangular", self.max_size_triangular, 1)
        check_whole("seed", self.seed, 0)

    def shapes(self, sizes: torch.Size) -> list[tuple[int, ...]]:
        """Return the shapes of the Q_i."""
        most = self.max_size_triangular if len(sizes) > 1 else 1
        return [(n, n) if 1 < n <= most else (n,) for n in sizes or (1,)]

    def init(self, p: Tensor):
        ones = [
            torch.ones(n[0], dtype=torch.float32, device=p.device)
            for n in self.shapes(p.shape)
        ]
        pairs = zip(ones, self.shapes(p.shape))
        first = [x if len(n) == 1 else x.diag().flatten() for x, n in pairs]
        return self.State._make((None, torch.cat(first)))

    def direction(self, g: Tensor, s: State, t: float):
        m = self.momentum * s.momentum_buffer + (1 - self.momentum) * g
        return m / (1 - self.momentum**t), s._replace(momentum_buffer=m)

    def whole(self, d: Tensor, s: State, t: Scalar, normal: Any):
        shapes = self.shapes(d.shape)
        x = d.reshape(d.shape or (1,)).contiguous()  # whatever its order of memory
        parts = s.factors.split([math.prod(n) for n in shapes])
        qs = [q.view(n) for q, n in zip(parts, shapes)]
        flat, least = self.precond_flat_start, self.precond_update_prob
        share = math.e ** ((flat + 1.0 - t) / (2.0 * flat + 1e-12))
        fits = (t * (5**0.5 - 1) / 2) % 1.0 < choose(share > least, share, least)
        if d.numel() and fits is not False:
            new = fitted(qs, x, normal(x.shape), self.precond_lr)
            qs = [y if fits is True else torch.where(fits, y, q) for y, q in zip(new, qs)]
        for i, q in enumerate(qs):
            x = along(q if q.dim() == 1 else q.mT, along(q, x, i), i)
        x = x * (1.1 / (root((x * x).mean()) + 1e-6)).clamp_max(1.0)
        factors = torch.cat([q.flatten() for q in qs])
        return x.reshape(d.shape), s._replace(factors=factors)


def along(q: Tensor, x: Tensor, i: int) -> Tensor:
    """Return x multiplied by Q along dimension i."""
    y = x.movedim(i, -1)
    return (y * q if q.dim() == 1 else y @ q.mT).movedim(-1, i)


def fitted(qs: list[Tensor], a: Tensor, b: Tensor, rate: Scalar) -> list[Tensor]:
    """Fit the factors to direction `a` and noise `b`. Give all factors the same maximum."""
    for i, q in enumerate(qs):
        if q.dim() == 1:
            back = 1.0 / q
        else:
            one = torch.ones_like(q[0]).diag()
            back = torch.linalg.solve_triangular(q, one, upper=True).mT
        a, b = along(q, a, i), along(back, b, i)
    new: list[Tensor] = []
    for i, q in enumerate(qs):
        rows = [y.movedim(i, 0).reshape(len(q), -1) for y in (a, b)]
        if q.dim() == 1:
            aa, bb = [(y * y).sum(1) for y in rows]
            change, size = (aa - bb) * q, (aa + bb).amax()
        else:
            aa, bb = [symmetric(y, y.mT) for y in rows]
            change, size = (aa - bb).triu() @ q, lower_bound(aa + bb)
        new.append(q - rate * change / size)
    maxima = torch.stack([q.abs().amax() for q in new])
    return [q * x for q, x in zip(new, maxima.log().mean().exp() / maxima)]


def lower_bound(x: Tensor) -> Tensor:
    """Return a lower bound for the largest eigenvalue of a positive matrix."""
    most = x.amax()
    x = x / most
    longest = (x * x).sum(1).argmax(0, keepdim=True)
    y = x @ x.index_select(0, longest)[0]  # an index would wait for a device
    return most * norm(x @ (y / norm(y)))


kron, kron_init, kron_step = functions(Kron)
