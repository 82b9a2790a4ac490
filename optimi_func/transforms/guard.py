"""Steps that are not taken: gradients with an inf or a NaN."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func._rule import PureOptimizer, PyTree, Storage, check_pure
from optimi_func.transforms._trees import (
    Transform,
    Trees,
    check_state,
    choose_tree,
    count_from,
    inner_eval_params,
)


class FiniteState(NamedTuple):
    """The state of `apply_if_finite`."""

    consecutive: Tensor  # 0-d float32: steps in a row up to now with an inf or a NaN
    skipped: Tensor  # 0-d float32: steps not taken, in all
    inner: Any


@dataclass(frozen=True, eq=False)
class Guard(Transform):
    """An optimizer that skips bad gradients: see `apply_if_finite`."""

    optimizer: PureOptimizer
    max_consecutive: int | None

    def init(
        self,
        params: PyTree,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
        storage: Storage | str | None = None,
    ) -> FiniteState:
        """Fresh state: see `FunctionalOptimizer.init`."""
        inner = self.optimizer.init(
            params, kahan_sum=kahan_sum, state_dtype=state_dtype, storage=storage
        )
        return FiniteState(count_from(params), count_from(params), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: FiniteState
    ) -> tuple[PyTree, FiniteState]:
        """One update, or none."""
        state = check_state(state, FiniteState, "apply_if_finite")
        trees = Trees.check(params, grads)
        device = state.skipped.device
        finite = torch.ones((), dtype=torch.bool, device=device)
        for g in trees.grads:
            if g is not None:
                finite = finite & g.detach().isfinite().all().to(device)
        consecutive = torch.where(finite, 0.0, state.consecutive + 1.0)
        taken = finite
        if self.max_consecutive is not None:
            taken = finite | (consecutive > self.max_consecutive)
        # A NaN in the branch not taken would be one in the derivative of both.
        safe = [
            None if g is None else torch.where(taken.to(g.device), g, 0.0)
            for g in trees.grads
        ]
        safe = pytree.tree_unflatten(safe, trees.spec)
        moved, inner = self.optimizer.step(params, safe, state.inner)
        skipped = state.skipped + (~taken).to(state.skipped.dtype)
        return (
            choose_tree(taken, moved, params),
            FiniteState(consecutive, skipped, choose_tree(taken, inner, state.inner)),
        )

    def eval_params(self, params: PyTree, state: FiniteState) -> PyTree:
        """The optimizer's: see `FunctionalOptimizer.eval_params`."""
        inner = check_state(state, FiniteState, "apply_if_finite").inner
        return inner_eval_params(self.optimizer, params, inner)


def apply_if_finite(
    optimizer: PureOptimizer, *, max_consecutive: int | None = None
) -> Guard:
    """Skip a step any of whose gradients holds an inf or a NaN.

    A skipped step changes nothing: no parameter, no moment, no count of steps; the counts
    of skips, `state.consecutive` and `state.skipped`, apart. The choice is made on the
    device and waits for nothing.

    A graph cannot raise, so there is none for a run that skips for ever: either look at
    `state.consecutive` on the host now and then, or give `max_consecutive`, after which
    bad gradients are let through and the loss shows it, as optax does.

    Args:
        optimizer: The optimizer.
        max_consecutive: The most steps in a row to skip; 0 skips none. None: no limit.

    Returns:
        An optimizer; its state is a `FiniteState`.

    Raises:
        ValueError: max_consecutive is negative or no whole number.

    >>> from optimi_func import sgd
    >>> opt = apply_if_finite(sgd(lr=1.0))
    >>> p = torch.ones(2)
    >>> p, state = opt.step(p, torch.tensor([1.0, float("nan")]), opt.init(p))
    >>> p, state.skipped, state.inner.step
    (tensor([1., 1.]), tensor(1.), tensor(0.))
    """
    if max_consecutive is not None and (
        type(max_consecutive) is not int or max_consecutive < 0
    ):
        raise ValueError(
            f"max_consecutive={max_consecutive!r}: allowed are whole numbers from 0, and "
            "None"
        )
    return Guard(check_pure("apply_if_finite", optimizer, ""), max_consecutive)
