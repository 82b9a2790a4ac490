"""`every_k`: one step from the gradients of several micro-batches."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_whole
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.rule import PureOptimizer, PyTree, check_pure
from optimi_func.pure.tree import flatten_params, match_tree
from optimi_func.transforms._trees import Around, Trees, choose_tree, count_from

Reduction: TypeAlias = Literal["mean", "sum"]


class EveryState(NamedTuple):
    """The state of `every_k`."""

    calls: Tensor  # 0-d float32: those since the last step
    sums: PyTree  # of their gradients, at least float32
    inner: Any


@dataclass(frozen=True, eq=False)
class Every(Around[EveryState], state=EveryState, name="every_k"):
    """An optimizer that steps every k-th time: see `every_k`."""

    k: int
    reduction: Reduction

    def _around(self, params: PyTree, inner: Any) -> EveryState:
        tensors, spec = flatten_params(params)
        zeros = [torch.zeros_like(p, dtype=compute_dtype(p.dtype)) for p in tensors]
        return EveryState(count_from(params), pytree.tree_unflatten(zeros, spec), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: EveryState
    ) -> tuple[PyTree, EveryState]:
        """Add a gradient; every k-th call is an update."""
        state = self.checked(state)
        trees = Trees.check(params, grads)
        before = match_tree("state.sums", state.sums, trees.spec, params)
        due = state.calls + 1.0 >= self.k
        share = self.k if self.reduction == "mean" else 1
        sums, whole = list(before), list(trees.grads)
        for i, g in enumerate(trees.grads):
            if g is not None:
                total = before[i] + g.to(before[i].dtype)
                whole[i] = total / share
                sums[i] = torch.where(due.to(g.device), 0.0, total)
        gradient = pytree.tree_unflatten(whole, trees.spec)
        moved, inner = self._step(params, gradient, state.inner)
        return choose_tree(due, moved, params), EveryState(
            torch.where(due, 0.0, state.calls + 1.0),
            pytree.tree_unflatten(sums, trees.spec),
            choose_tree(due, inner, state.inner),
        )


def every_k(optimizer: PureOptimizer, k: int, *, reduction: Reduction = "mean") -> Every:
    """Step once every k calls, along the mean or the sum of their gradients.

        s <- s + g;   every k-th call: step along s / k ("mean") or s ("sum"), then s <- 0

    Exact: k micro-batches of one size, each with the mean of its losses, make the step of
    the whole batch. Sums are float32, or float64 for float64 parameters. Between steps the
    parameters stay, and so does the optimizer's state, its count of steps included.

    Every call computes a step and all but the k-th discard it, because a graph has no
    branches; a loop in eager mode saves that by adding up gradients itself. A leaf whose
    k-th gradient is None does not move in that step and keeps its sum for the next.

    Args:
        optimizer: The optimizer.
        k: Calls a step, at least 1.
        reduction: "mean" divides the sum by k; "sum" is for losses divided already.

    Raises:
        ValueError: k is not a whole number from 1, or reduction is neither.

    >>> from optimi_func import sgd
    >>> opt = every_k(sgd(lr=1.0), 2)
    >>> p = torch.tensor(0.0)
    >>> p, state = opt.step(p, torch.tensor(1.0), opt.init(p))
    >>> p, state.calls
    (tensor(0.), tensor(1.))
    >>> p, state = opt.step(p, torch.tensor(3.0), state)
    >>> p, state.calls
    (tensor(-2.), tensor(0.))
    """
    check_whole("k", k, 1)
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r}: allowed are {get_args(Reduction)}")
    return Every(check_pure("every_k", optimizer, ""), k, reduction)
