"""Derivatives of a solution by the implicit function theorem."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.rule import PyTree
from optimi_func.core.torch_private import transform_level

T = TypeVar("T")


def implicit_root(optimality: Callable[..., object], params: T, *args: PyTree) -> T:
    """Return `params`, with the derivatives of a solution of optimality(params, *args) = 0.

        dp = -H^-1 (d optimality / d args) dargs,   H = d optimality / d p

    Differentiating the loop that found the solution would keep each of its steps. This
    takes one conjugate-gradient solve, in backward.

    Args:
        optimality: `(params, *args) -> tree like params`: the gradient of a loss, of
            operations that torch.func takes. H has to be symmetric and positive definite,
            as the Hessian at a strict minimum is.
        params: The solution.
        args: Trees of tensors that the solution depends on.

    >>> a = torch.tensor([4.0], requires_grad=True)
    >>> x = implicit_root(lambda x, a: x**3 - a, torch.tensor([4.0]) ** (1 / 3), a)
    >>> torch.autograd.grad(x.sum(), a)[0]  # 1 / (3 x^2)
    tensor([0.1323])
    """
    leaves, spec = pytree.tree_flatten(params)
    given, given_spec = pytree.tree_flatten(args)
    solved = _Root.apply(optimality, spec, given_spec, len(leaves), *leaves, *given)
    return pytree.tree_unflatten(list(solved), spec)


class _Root(torch.autograd.Function):
    """The identity of the solution, whose backward solves for the derivative by args."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        optimality: object, spec: object, given_spec: object, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple([x.clone() for x in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: object) -> None:
        ctx.optimality, ctx.spec, ctx.given_spec, ctx.count, *tensors = inputs
        at = [i for i, x in enumerate(tensors) if isinstance(x, Tensor)]
        ctx.at, ctx.others = at, [None if i in {*at} else x for i, x in enumerate(tensors)]
        ctx.save_for_backward(*[tensors[i] for i in at])

    @staticmethod
    def jvp(ctx: object, *tangents: object) -> object:
        raise NotImplementedError(
            "a solution has derivatives backward, and none forward: use torch.func.grad, "
            "vjp or jacrev in place of jvp and jacfwd"
        )

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[object, ...]:
        tensors = [*ctx.others]
        for i, x in zip(ctx.at, ctx.saved_tensors):
            tensors[i] = x
        count = ctx.count
        params, given = tensors[:count], tensors[count:]
        floats = [i for i, x in enumerate(given) if isinstance(x, Tensor) and moves(x)]

        def optimal(p: list[Tensor], xs: list[object]) -> list[Tensor]:
            now = [*given]
            for i, x in zip(floats, xs):
                now[i] = x
            args = pytree.tree_unflatten(now, ctx.given_spec)
            residual = ctx.optimality(pytree.tree_unflatten(p, ctx.spec), *args)
            return pytree.tree_leaves(residual)

        moving = [given[i] for i in floats]
        vjp: Any = torch.func.vjp
        _, by_params = vjp(lambda p: optimal(p, moving), params)
        _, by_given = vjp(lambda xs: optimal(params, xs), moving)
        solved = conjugate_gradients(lambda u: by_params(u)[0], list(outer))
        (pulled,) = by_given([-x for x in solved])
        grads: list[Tensor | None] = [None] * len(given)
        for i, x in zip(floats, pulled):
            grads[i] = x
        return (None, None, None, None, *[None] * count, *grads)


def moves(x: Tensor) -> bool:
    """Return True if derivatives pass through x."""
    return x.is_floating_point() or x.is_complex()


def conjugate_gradients(
    product: Callable[[list[Tensor]], list[Tensor]], wanted: list[Tensor]
) -> list[Tensor]:
    """Return x with product(x) = wanted, for a symmetric positive definite product.

    It stops at the precision of the dtype, or after twice as many products as elements. In
    vmap, where a loop cannot end by values, members that are done change no more.
    """
    x, r = [torch.zeros_like(v) for v in wanted], wanted
    p, rr = r, _dot(r, r)
    eps = torch.finfo(rr.dtype).eps
    least, at_once = rr * eps * eps, transform_level() == 0
    for _ in range(2 * sum([v.numel() for v in wanted])):
        if at_once and not bool(rr > least):
            break
        hp = product(p)
        bent = _dot(p, hp)
        if at_once and bool((bent <= 0) & (rr > least / eps)):
            raise RuntimeError(
                "the derivative of a solution needs a positive definite derivative of "
                f"optimality there, which has a direction of curvature {float(bent):.2g}: "
                "is it a minimum, and the only one near?"
            )
        goes = (rr > least) & (bent > 0)
        step = torch.where(goes, rr / torch.where(goes, bent, 1.0), 0.0)
        x = [a + step * b for a, b in zip(x, p)]
        r = [a - step * b for a, b in zip(r, hp)]
        now = _dot(r, r)
        share = torch.where(goes, now / torch.where(goes, rr, 1.0), 0.0)
        p = [a + share * b for a, b in zip(r, p)]
        rr = torch.where(goes, now, 0.0)
    return x


def _dot(x: list[Tensor], y: list[Tensor]) -> Tensor:
    """Return the inner product of two lists of tensors."""
    return torch.stack([(a * b.conj()).real.sum() for a, b in zip(x, y)]).sum()
