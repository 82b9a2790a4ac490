"""Derivatives of a solution by the implicit function theorem."""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from optimi_func.core.rule import PyTree
from optimi_func.core.torch_private import level_of
from optimi_func.fitting.quasi_newton import flat, parts, tensors_of

T = TypeVar("T")
# (params, args) -> residuals, as flat lists of tensors.
Residual: TypeAlias = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
_Product: TypeAlias = Callable[[Tensor], Tensor]
_vjp: Any = torch.func.vjp

# Up to so many unknowns a matrix is made and factored; its columns come in groups.
_DENSE, _GROUP = 256, 64


def implicit_root(optimality: Callable[..., object], params: T, *args: PyTree) -> T:
    """Return `params`, with the derivatives of a solution of optimality(params, *args) = 0.

        dp = -H^-1 (d optimality / d args) dargs,   H = d optimality / d p

    If you differentiated through the loop that found the solution, the tensors of all its
    steps would have to be stored. This function solves a linear system in the backward pass
    instead. Up to 256 unknowns, it factors the matrix H. For more unknowns, it uses
    conjugate gradients. You can compute derivatives of any order.

    Args:
        optimality: A function `(params, *args) -> tree` whose result has the structure of
            params, such as the gradient of a loss. torch.func has to support its
            operations. H has to be symmetric and positive definite, like the Hessian at a
            strict minimum.
        params: The solution.
        args: Trees of tensors on which the solution depends.

    Raises:
        RuntimeError: optimality uses a tensor that requires a derivative but is not in
            params or args. The backward pass raises the same error if H is not symmetric
            and positive definite. If H of one problem in a batch is not, a warning is
            emitted instead, and the derivatives of this problem's solution are NaN.

    >>> a = torch.tensor([4.0], requires_grad=True)
    >>> root = torch.tensor([4.0]) ** (1 / 3)
    >>> x = implicit_root(lambda x, a: x**3 - a, root, a)
    >>> torch.autograd.grad(x.sum(), a)[0]  # 1 / (3 x^2)
    tensor([0.1323])
    """
    (leaves, params_of), (tensors, args_of) = map(tensors_of, (params, args))

    def residual(p: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
        return tensors_of(optimality(params_of(p), *args_of(xs)))[0]

    if torch.is_grad_enabled():
        constants = [[x.detach() for x in some] for some in (leaves, tensors)]
        for x in residual(*constants):
            _check_constant(x)
    solved: Any = _Root.apply(residual, len(leaves), *leaves, *tensors)
    return params_of(solved)


def _check_constant(x: Tensor) -> None:
    """Raise if x, computed from constants, has a derivative by something else."""
    while level_of(x) > 0 and not x.requires_grad:
        if forward_ad.unpack_dual(x).tangent is not None:
            break
        x = torch.func.debug_unwrap(x, recurse=False)
    if level_of(x) > 0 or x.requires_grad:
        node: Any = x.grad_fn
        while node is not None and not hasattr(node, "variable"):
            node = next((n for n, _ in node.next_functions if n is not None), None)
        source = x if node is None else node.variable
        raise RuntimeError(
            "loss or optimality takes a tensor from elsewhere, which depends on one of "
            f"shape {tuple(source.shape)} and {source.dtype} that needs a derivative. A "
            "solution has derivatives by args alone: pass it in args, or detach it"
        )


class _Root(torch.autograd.Function):
    """The identity of the solution, whose backward solves for the derivative by args."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        residual: Residual, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple([x.clone() for x in tensors[:count]])

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        ctx.residual, ctx.count, *tensors = inputs
        # The outputs, because the derivative's derivative moves the solution too.
        ctx.save_for_backward(*output, *tensors[ctx.count :])

    @staticmethod
    def jvp(ctx: object, *tangents: object) -> object:
        raise NotImplementedError(
            "a solution has derivatives backward, and none forward: use torch.func.grad, "
            "vjp or jacrev in place of jvp and jacfwd"
        )

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[object, ...]:
        count, residual = ctx.count, ctx.residual
        params, given = [*ctx.saved_tensors[:count]], [*ctx.saved_tensors[count:]]
        floats = [i for i, x in enumerate(given) if x.is_floating_point() or x.is_complex()]

        def linear(u: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
            p, rest, wanted = xs[:count], xs[count:-count], xs[-count:]
            _, by_params = _vjp(lambda p: residual(p, rest), p)
            return [x - y for x, y in zip(by_params(u)[0], wanted)]

        def moved(xs: list[Tensor]) -> list[Tensor]:
            now = [*given]
            for i, x in zip(floats, xs):
                now[i] = x
            return residual(params, now)

        _, by_params = _vjp(
            lambda p: residual(p, [x.detach() for x in given]), [x.detach() for x in params]
        )
        solution = _solved(lambda u: by_params(u)[0], [x.detach() for x in outer])
        # It is a root too, so that derivatives of derivatives go on through it.
        solved: Any = _Root.apply(linear, count, *solution, *params, *given, *outer)
        _, by_given = _vjp(moved, [given[i] for i in floats])
        grads: list[Tensor | None] = [None] * len(given)
        for i, x in zip(floats, by_given([-u for u in solved])[0]):
            grads[i] = x
        return (None, None, *[None] * count, *grads)


def _solved(product: Callable[..., list[Tensor]], wanted: list[Tensor]) -> list[Tensor]:
    """Return x with product(x) = wanted, for a symmetric positive definite product."""
    eps = max([torch.finfo(x.dtype).eps for x in wanted])
    solve = _factored if sum([x.numel() for x in wanted]) <= _DENSE else _iterated
    x, fails = solve(lambda u: flat(product(parts(u, wanted))), flat(wanted), eps)
    failed = torch.func.debug_unwrap(fails, recurse=True)
    if bool(failed.any()):
        why = (
            "the derivative of a solution needs a symmetric positive definite derivative "
            "of optimality (Hessian of loss) there: is it a minimum, and the only one near?"
        )
        if failed.dim() == 0:
            raise RuntimeError(why)
        many = f"{int(failed.sum())} of {failed.numel()} solutions have the derivative NaN"
        warnings.warn(f"{many}: {why}", stacklevel=2)
    return parts(torch.where(fails, torch.nan, x), wanted)


def _factored(product: _Product, wanted: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x with product(x) = wanted by the scaled matrix, and True if it has none."""
    eye = torch.eye(wanted.numel(), dtype=wanted.dtype, device=wanted.device)
    h = torch.func.vmap(product, chunk_size=_GROUP)(eye)
    scale = h.diagonal().abs().sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    h = h / scale / scale[:, None]
    factor, info = torch.linalg.cholesky_ex((h + h.mT) / 2)
    x = torch.cholesky_solve((wanted / scale)[:, None], factor)[:, 0] / scale
    return x, (info > 0) | ~((h - h.mT).abs().amax() <= eps**0.5)


def _iterated(product: _Product, wanted: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x with product(x) = wanted by conjugate gradients, and True if it has none.

    They stop at the precision of the dtype, or after twice as many products as elements.
    Members of a batch that are done change no more.
    """
    x, r, p = torch.zeros_like(wanted), wanted, wanted
    rr = r.dot(r)
    least, fails = rr * eps * eps, rr < 0
    for _ in range(2 * wanted.numel()):
        goes = rr > least
        if not bool(torch.func.debug_unwrap(goes, recurse=True).any()):
            break
        hp = product(p)
        bent = p.dot(hp)
        fails = fails | (goes & ~(bent > 0) & (rr > least / eps))
        goes = goes & (bent > 0)
        step = torch.where(goes, rr / torch.where(goes, bent, 1.0), 0.0)
        x, r = x + step * p, r - step * hp
        now = r.dot(r)
        p = r + torch.where(goes, now / torch.where(goes, rr, 1.0), 0.0) * p
        rr = torch.where(goes, now, 0.0)
    left = torch.where(fails, 0.0, (wanted - product(x)).norm() / wanted.norm())
    left = torch.func.debug_unwrap(left, recurse=True)
    if bool((left > eps**0.5).any()):
        warnings.warn(
            "conjugate gradients for the derivative of a solution end with a residual of "
            f"{float(left.max()):.1e} of the right side after {2 * wanted.numel()} "
            "products: give the unknowns a like scale",
            stacklevel=2,
        )
    return x, fails
