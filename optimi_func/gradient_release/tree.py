"""A pure optimizer under gradient release."""

from typing import ClassVar

from torch import Tensor

from optimi_func.core.checks import check_accumulates, check_apart
from optimi_func.core.distributed import comparable, to_local
from optimi_func.core.rule import Microbatch
from optimi_func.core.tree import FlatTree, TreeState
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.sums import Part
from optimi_func.execution.trees import TreeUpdate
from optimi_func.pure.functional import FunctionalOptimizer


class TreeOptimizer:
    """A FunctionalOptimizer over {name: parameter} that owns its state.

    It has the methods of BaseOptimizer that a Runner calls.
    """

    optimizer_accumulation: ClassVar[bool] = False

    def __init__(self, optimizer: FunctionalOptimizer, params: dict[str, Tensor]) -> None:
        self.optimizer = optimizer
        self._params = params
        pairs = zip(params, to_local([*params.values()]))
        check_apart(pairs, "params[{!r}]".format, "tie them as one parameter")
        self._places = {p: i for i, p in enumerate(params.values())}
        self._state = optimizer.init(params)
        self._shown = comparable(optimizer, type)
        self._step: TreeUpdate | None = None  # the step of the running backward

    @property
    def state(self) -> TreeState:
        """The state, which is updated in place; an assigned one is checked first."""
        return self._state

    @state.setter
    def state(self, state: TreeState) -> None:
        FlatTree.of(self._params, self._params, state).check(self.optimizer)
        self._state, self._step = state, None

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        microbatches: list[Microbatch],
        write: bool,
        count: bool,
    ) -> dict[Tensor, Part]:
        """Update leaves in place; `finish_step` counts the step of the whole tree."""
        with kernel_context(params[0].device):
            if self._step is None:
                tree = FlatTree.of(self._params, self._params, self._state)
                tree.check(self.optimizer)
                self._step = TreeUpdate.of(self.optimizer, tree, "auto")
            places = [self._places[p] for p in params]
            parts = self._step.update(places, grads, microbatches, write)
        return {p: parts[i] for p, i in zip(params, places) if i in parts}

    def finish_step(self, parts: dict[Tensor, Part], count: bool) -> None:
        """End the backward's step, and count it if `count`."""
        step, self._step = self._step, None
        if step is not None and parts:
            with kernel_context(self._state.step.device):
                step.finish_step({self._places[p]: part for p, part in parts.items()})
        if count:
            with kernel_context(self._state.step.device):
                self._state.step.add_(1.0)

    def numbers(self, of_device: object = None) -> dict[str, object]:
        """Return the hyperparameters, to compare."""
        return {"optimizer": self._shown}

    def check_accumulates(self) -> None:
        """Raise if accumulation="states" cannot work with this optimizer."""
        check_accumulates(self.optimizer.rule, self.optimizer.every_hook)

    def group_of(self, param: Tensor) -> dict[str, bool]:
        """Return the options of a parameter, as if it were in a param group."""
        return {"capturable": False}

    find_group = group_of

    def check_lists(self) -> None:
        """Do nothing, because a tree stays as it is."""

    def check_train_mode(self, what: str) -> None:
        """Do nothing, because a tree's parameters are always those to train."""
