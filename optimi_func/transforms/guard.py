"""`apply_if_finite`: skip steps whose gradients hold an inf or a NaN."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_whole
from optimi_func.core.rule import PureOptimizer, PyTree, check_pure
from optimi_func.transforms._trees import Around, Trees, choose_tree, count_from


class FiniteState(NamedTuple):
    """The state of `apply_if_finite`."""

    consecutive: Tensor  # 0-d float32: steps in a row up to now with an inf or a NaN
    skipped: Tensor  # 0-d float32: steps not taken, in all
    inner: Any


@dataclass(frozen=True, eq=False)
class Guard(Around[FiniteState], state=FiniteState, name="apply_if_finite"):
    """An optimizer that skips bad gradients: see `apply_if_finite`."""

    max_consecutive: int | None

    def _around(self, params: PyTree, inner: Any) -> FiniteState:
        return FiniteState(count_from(params), count_from(params), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: FiniteState
    ) -> tuple[PyTree, FiniteState]:
        """Return the result of one update, or of none if a gradient is not finite."""
        state = self.checked(state)
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
        # A NaN in the branch that is not taken would make the derivative NaN too.
        safe = [
            None if g is None else torch.where(taken.to(g.device), g, 0.0)
            for g in trees.grads
        ]
        safe = pytree.tree_unflatten(safe, trees.spec)
        moved, inner = self._step(params, safe, state.inner)
        skipped = state.skipped + (~taken).to(state.skipped.dtype)
        return (
            choose_tree(taken, moved, params),
            FiniteState(consecutive, skipped, choose_tree(taken, inner, state.inner)),
        )


def apply_if_finite(
    optimizer: PureOptimizer, *, max_consecutive: int | None = None
) -> Guard:
    """Skip a step any of whose gradients holds an inf or a NaN.

    A skipped step changes no parameter, no moment and no count of steps, only the counts
    of skips, `state.consecutive` and `state.skipped`. The choice is made on the device,
    without synchronizing.

    A graph cannot raise, so a run may skip for ever unnoticed. Either read
    `state.consecutive` on the host now and then, or give `max_consecutive`: after that many
    skips bad gradients are let through and the loss shows it, as in optax.

    Reverse mode through a skipped step is NaN if the loss itself overflowed (0 * inf);
    forward mode is right, and so is a detached gradient.

    Args:
        optimizer: The optimizer.
        max_consecutive: The most steps in a row to skip; 0 skips none. None: no limit.

    Raises:
        ValueError: max_consecutive is negative or no whole number.

    >>> from optimi_func import sgd
    >>> opt = apply_if_finite(sgd(lr=1.0))
    >>> p = torch.ones(2)
    >>> p, state = opt.step(p, torch.tensor([1.0, float("nan")]), opt.init(p))
    >>> p, state.skipped, state.inner.step
    (tensor([1., 1.]), tensor(1.), tensor(0.))
    """
    check_whole("max_consecutive", max_consecutive, 0, none=True)
    return Guard(check_pure("apply_if_finite", optimizer, ""), max_consecutive)
