"""SOAP (Vyas et al. 2024)."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func.core.checks import check_whole, value_of
from optimi_func.core.math import choose, power, sqrt, symmetric
from optimi_func.core.rehearsal import device_type, is_rehearsed
from optimi_func.core.rule import Scalar
from optimi_func.core.torch_private import is_unwatched, level_of
from optimi_func.rules import Betas, Body, Float, Shaped, functions, root, rounded

# Square matrices by the dimension that they belong to.
Squares: TypeAlias = dict[int, Tensor]

__all__ = ["SOAP", "soap", "soap_init", "soap_step"]


class SOAP(Body, name="soap"):
    """SOAP: Adam in the eigenbases of Shampoo's factors L and R.

        L <- b3 * L + (1 - b3) * gg^T,   R <- b3 * R + (1 - b3) * g^Tg
        z  = Q_L^T g Q_R
        m <- b1 * m + (1 - b1) * z,   v <- b2 * v + (1 - b2) * z^2
        p <- p - lr * c * Q_L [m / (sqrt(v) + eps)] Q_R^T - lr * weight_decay * p

    Here g is the gradient of a matrix, and c = sqrt(1 - b2^(t-1)) / (1 - b1^(t-1)). Adam
    normalizes each element of the gradient separately. SOAP rotates the gradient first,
    because the elements of the rotated gradient are nearly uncorrelated.

    The first step initializes L and R, and sets Q_L and Q_R to the eigenvectors of L and R.
    In the first step, only weight decay moves the parameters. After that, SOAP updates the
    bases every precondition_frequency steps, at the end of a step: Q <- QR(L Q). Updating
    the bases is expensive. Each update of the bases also reorders v in the same way as the
    columns of Q, and rotates m into the new bases. A pure step that is traced, vmapped or
    run on an accelerator cannot read its step count. If a pure step cannot read its step
    count, it always computes new bases, but uses them only if an update is due. If you
    differentiate through a step, the bases are treated as constants.

    SOAP's state is stored in float32 or wider. The state consists of m and v, which have
    the shape of p, and of the vectors `factors` and `bases`. The vectors `factors` and
    `bases` each contain n^2 elements for every rotated dimension of size n.

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True.
        eps: Added to the square root of v, before the bias correction.
        shampoo_beta: b3, in [0, 1): the fraction of L and R that carries over from one step
            to the next. A value below 0 means b2.
        precondition_frequency: Number of steps from one change of the bases to the next.
        max_precond_dim: Largest size of a dimension that is rotated. With the default,
            an embedding whose vocabulary exceeds max_precond_dim is rotated only along
            its width, and a convolution is rotated along each dimension.
        merge_dims: Merge neighbouring dimensions as long as the product of their sizes is
            at most max_precond_dim.
        precondition_1d: Rotate vectors too. By default, vectors are updated by Adam.
        normalize_grads: Divide each parameter's update by the update's root mean square.
        correct_bias: Apply bias correction. With correct_bias=False, c = 1.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321,
        as in the authors' code. However, the authors' code applies no weight decay in the
        first step, and in later steps it applies weight decay after the update.

    >>> w = torch.eye(2, requires_grad=True)
    >>> optimizer = SOAP([w], lr=0.1, weight_decay=0.0, compile=False)
    >>> for _ in range(2):  # the first gradient moves nothing
    ...     w.grad = torch.diag(torch.tensor([1.0, -2.0]))
    ...     optimizer.step()
    >>> w.detach()
    tensor([[0.9000, 0.0000],
            [0.0000, 1.1000]])
    """

    lr: Float = Float(3e-3)
    betas: Betas = Betas(0.95, 0.95)
    weight_decay: Float = Float(1e-2)
    eps: Float = Float(1e-8, "epsilon")
    _: KW_ONLY
    shampoo_beta: Float = Float(-1.0, "beta of the factors", below=1.0, least=-math.inf)
    precondition_frequency: int = 10
    max_precond_dim: int = 10000
    merge_dims: bool = False
    precondition_1d: bool = False
    normalize_grads: bool = False
    correct_bias: bool = True

    class State(NamedTuple):
        exp_avg: Shaped  # m, in the bases
        exp_avg_sq: Shaped  # v, in the bases
        factors: Shaped  # L of each rotated side, one after the other in a vector
        bases: Shaped  # Q of each

    def check(self) -> None:
        for name in ("precondition_frequency", "max_precond_dim"):
            check_whole(name, getattr(self, name), 1)

    def sides(self, shape: torch.Size) -> tuple[list[int], dict[int, int]]:
        """Return the shape, perhaps merged, and the sizes of the rotated dimensions."""
        sizes, most = list(shape), self.max_precond_dim
        if self.merge_dims and len(shape) > 1:
            sizes = [1]
            for n in shape:
                sizes += [] if sizes[-1] * n <= most else [1]
                sizes[-1] *= n
        rotates = (len(shape) > 1 or self.precondition_1d) and 0 not in shape
        return sizes, {i: n for i, n in enumerate(sizes) if rotates and 1 < n <= most}

    def times(self, t: Scalar) -> tuple[Any, ...]:
        """Return t, whether t > 1, the steps since the first, and whether bases change."""
        value = value_of(t) if isinstance(t, Tensor) else t
        at = t if value is None else value
        later, since = at > 1, choose(at > 1, at - 1.0, 1.0)
        return at, later, since, later & (since % self.precondition_frequency == 0)

    def init(self, p: Tensor):
        squares = (sum(n * n for n in self.sides(p.shape)[1].values()),)
        return self.State._make((None, None, squares, squares))

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: Scalar):
        at, later, since, refreshes = self.times(t)
        (b1, b2), b3, scale = self.betas, self.shampoo_beta, 1.0
        if self.correct_bias:
            scale = sqrt(1.0 - power(b2, since)) / (1.0 - power(b1, since))
        share = 1.0 - choose(b3 < 0, b2, b3)
        b1, b2 = choose(later, b1, 1.0), choose(later, b2, 1.0)
        scalars = b1, 1.0 - b1, b2, 1.0 - b2, share, scale, self.eps
        b1, a1, b2, a2, share, scale, eps = [rounded(x, d) for x in scalars]
        shape, sides = self.sides(d.shape)
        # Owners of shards do not know the order of memory, on which results would depend.
        g, m, v = (y.reshape(shape).contiguous() for y in (d, *s[:2]))
        factors, flat = s[2:]
        bases = known(flat, sides, at)
        z = rotated(g, bases)
        m = b1 * m + a1 * z
        v = b2 * v + a2 * (z * z)
        u = rotated(m / (root(v) + eps), bases, back=True)
        u = scale * (u / root((u * u).mean()) if self.normalize_grads else u)
        if sides:
            rows = [g.movedim(i, 0).reshape(n, -1) for i, n in sides.items()]
            products = torch.cat([symmetric(y, y.mT).flatten() for y in rows])
            factors = (factors + share * (products - factors)).detach()
            now = squares(factors, sides)
            (flat,) = changed(at == 1, lambda: eigen(now)[1:], flat)
            new = partial(refreshed, m, v, now, bases)
            m, v, flat = changed(refreshes, new, m, v, flat)
        return u.reshape(d.shape), self.State(
            m.reshape(d.shape), v.reshape(d.shape), factors, flat
        )


def is_readable(x: Tensor) -> bool:
    """Return True if the values of x can be read without waiting for a device."""
    return is_unwatched() and x.device.type == "cpu" and level_of(x) < 0


def squares(flat: Tensor, sides: dict[int, int]) -> Squares:
    """Return the square matrices that a vector of `State` contains."""
    parts = flat.split([n * n for n in sides.values()])
    return {i: x.unflatten(0, (n, n)) for (i, n), x in zip(sides.items(), parts)}


def known(flat: Tensor, sides: dict[int, int], at: Any) -> Squares:
    """Return detached bases, because they have no derivative at equal eigenvalues."""
    bases = squares(flat.detach(), sides)
    # Of a leaf whose first gradient comes late in its tree: they are not known yet.
    for i, q in bases.items():
        on_cpu = is_rehearsed(q.device) and device_type(q.device) == "cpu"
        if not (on_cpu or is_readable(q)):
            bases[i] = torch.where(q.any(), q, torch.ones_like(q[0]).diag())
        elif at == 1 if on_cpu else not q[0].any():  # a row of a basis has a length of 1
            bases[i] = torch.ones_like(q[0]).diag()
    return bases


def changed(
    when: bool | Tensor, make: Callable[[], tuple[Tensor, ...]], *old: Tensor
) -> tuple[Tensor, ...]:
    """Return the new tensors from `make` if `when` is true, else the old tensors."""
    if when is False:
        return old
    new = make()
    if not isinstance(when, Tensor):
        return new
    return tuple([torch.where(when, *both) for both in zip(new, old)])


def rotated(x: Tensor, bases: Squares, back: bool = False) -> Tensor:
    """Return x with each dimension rotated into its basis, or back if `back` is True."""
    for i, q in bases.items():
        x = (x.movedim(i, -1) @ (q.mT if back else q)).movedim(-1, i)
    return x


def eigh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors, computed in float64 where float32 fails.

    If many rows are 0, LAPACK may raise an error or return NaN in float32. A compiled graph
    does not check for NaN. A torch.func transformation cannot check for NaN, so float64 is
    always used there.
    """
    if torch.compiler.is_compiling():
        return torch.linalg.eigh(x)
    if level_of(x) < 0:
        with suppress(torch.linalg.LinAlgError):
            values, vectors = torch.linalg.eigh(x)
            if x.is_meta or not is_unwatched() or vectors.isfinite().all():
                return values, vectors
    values, vectors = torch.linalg.eigh(x.double())
    return values.to(x.dtype), vectors.to(x.dtype)


def eigen(factors: Squares) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of all factors, in descending order, and the eigenvectors."""
    values: list[Tensor] = []
    vectors: list[Tensor] = []
    for x in factors.values():
        # eigh would raise for what is not finite, when others have moved.
        found, q = eigh(x.nan_to_num(0.0, 0.0, 0.0))
        values.append(found.flip(-1))
        vectors.append(q.flip(-1).flatten())
    return torch.cat(values), torch.cat(vectors)


def refreshed(m: Tensor, v: Tensor, factors: Squares, old: Squares) -> tuple[Tensor, ...]:
    """Return m, v and the bases after one QR iteration of each basis with its factor."""
    new: Squares = {}
    for i, q in old.items():
        image = factors[i] @ q
        order = (q * image).sum(0).argsort(descending=True)
        v = v.index_select(i, order)
        new[i] = torch.linalg.qr(image.index_select(1, order))[0]
    bases = torch.cat([q.flatten() for q in new.values()])
    return rotated(rotated(m, old, back=True), new), v, bases


soap, soap_init, soap_step = functions(SOAP)
