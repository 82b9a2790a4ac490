"""The parameters at which sharpness-aware minimization computes gradients: `ascent`."""

from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_flag, check_number
from optimi_func.core.distributed import whole
from optimi_func.core.math import norm, total_norm
from optimi_func.core.rule import PyTree, Scalar
from optimi_func.transforms._trees import Trees, like
from optimi_func.transforms.gradients import Grads

T = TypeVar("T")


def ascent(params: T, grads: PyTree, rho: Scalar = 0.05, adaptive: bool = False) -> T:
    """Move the parameters by rho along the gradient, to the point that SAM evaluates.

        p + rho * g / |g|
        p + rho * T^2 g / |T g|,  T = |p| + 0.01      with adaptive

    |g| is the joint norm of all gradients. Sharpness-aware minimization (SAM) computes the
    gradients at the returned parameters, and uses these gradients for a step of any
    optimizer from `params`. Parameters without a gradient are returned unchanged.

    Args:
        params: The parameter tree.
        grads: The gradients at params, as a tree with the same structure.
        rho: The distance, at least 0.
        adaptive: Scale the move of each element by the size of the element, as in the
            second formula. Use a rho that is about ten times as large.

    Raises:
        ValueError: rho is negative, or a gradient does not fit its parameter.
        TypeError: rho is a schedule, or adaptive is not a bool.

    References:
        Foret et al., "Sharpness-Aware Minimization for Efficiently Improving
        Generalization", arXiv:2010.01412; Kwon et al., "ASAM", arXiv:2102.11600.

    >>> import torch
    >>> from optimi_func import sgd
    >>> opt = sgd(lr=0.25)
    >>> gradient = torch.func.grad(lambda p: (p * p).sum() / 2)
    >>> p = torch.tensor([3.0, 4.0])
    >>> near = ascent(p, gradient(p), rho=1.0)
    >>> opt.step(p, gradient(near), opt.init(p))[0]  # p - (p + p / 5) / 4
    tensor([2.1000, 2.8000])
    """
    check_constant("rho", rho)
    check_flag("adaptive", adaptive)
    trees = Trees.check(params, grads)
    moves = ascent_moves(trees.params, trees.wide_grads(), rho, adaptive)
    near = [p if u is None else (p + u).to(p.dtype) for p, u in zip(trees.params, moves)]
    return pytree.tree_unflatten(near, trees.spec)


def check_constant(name: str, x: object, **bounds: float) -> None:
    """Raise an error if x is not a number or 0-d tensor within these bounds."""
    if callable(x):
        raise TypeError(f"{name}={x!r}: allowed are numbers and 0-d tensors")
    check_number("number", name, x, **bounds)


def ascent_moves(ps: list[Tensor], gs: Grads, rho: Scalar, adaptive: bool) -> list[Any]:
    """Return the term that `ascent` adds to each parameter, or None without a gradient."""
    sizes = [p.abs() + 0.01 if adaptive else 1.0 for p in ps]
    scaled = [None if g is None else t * g for g, t in zip(gs, sizes)]
    size = total_norm([whole(norm(x)) for x in scaled if x is not None])
    factor = rho / size.clamp_min(1e-12)
    return [None if x is None else like(factor, x) * t * x for x, t in zip(scaled, sizes)]
