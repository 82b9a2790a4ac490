"""Whose parameters a release updates: a class's, or a tree's by a pure optimizer."""

from typing import Protocol

from torch import Tensor

from optimi_func._checks import check_accumulates
from optimi_func._functional import FunctionalOptimizer
from optimi_func._rule import Microbatch
from optimi_func._tree import FlatTree, TreeState
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.trees import TreeStep
from optimi_func.optimizers import BaseOptimizer


class Owner(Protocol):
    """What a release asks of the optimizer behind it."""

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        microbatches: list[Microbatch],
        write: bool,
        count: bool,
    ) -> None:
        """Update parameters by their gradients, as `BaseOptimizer.update`."""
        ...

    def check_accumulates(self) -> None:
        """Refuse a rule whose state cannot take a gradient in parts."""
        ...

    def groups(self) -> object:
        """What of the groups decides whether options can be honoured, to compare."""
        ...

    def accumulates(self) -> bool:
        """Whether `optimizer_accumulation` is True: state moves, parameters don't."""
        ...

    def on_host(self, p: Tensor) -> bool:
        """Whether p's numbers may be read without making a device wait."""
        ...

    def check_train_mode(self, what: str) -> None:
        """Refuse a backward at parameters that are not those to train."""
        ...

    def end(self, count: bool) -> None:
        """A backward has ended, and with it, if `count`, a step."""
        ...


class ClassOwner:
    """A class: groups, state and counts are its own."""

    def __init__(self, optimizer: BaseOptimizer) -> None:
        self.optimizer = optimizer
        self.update = optimizer.update
        self.check_accumulates = optimizer.check_accumulates
        self.check_train_mode = optimizer.check_train_mode

    def groups(self) -> object:
        """The groups, their sizes, and whether each counts its steps on the device."""
        groups = self.optimizer.param_groups
        return [(id(g), len(g["params"]), g["capturable"]) for g in groups]

    def accumulates(self) -> bool:
        """The flag's value now."""
        return self.optimizer.optimizer_accumulation

    def on_host(self, p: Tensor) -> bool:
        """On CPU, unless its group asks for device counts."""
        capturable = self.optimizer.group_of(p)["capturable"]
        return p.device.type == "cpu" and not capturable

    def end(self, count: bool) -> None:
        """Each parameter's steps have been counted with its update."""


class TreeOwner:
    """A FunctionalOptimizer over the tree {name: parameter}, whose state is kept here."""

    def __init__(self, optimizer: FunctionalOptimizer, params: dict[str, Tensor]) -> None:
        self.optimizer = optimizer
        self._params = params
        self._places = {p: i for i, p in enumerate(params.values())}
        self._set(optimizer.init(params))

    @property
    def state(self) -> TreeState:
        """The live state, updated in place; assigned, it is checked first."""
        return self._state

    @state.setter
    def state(self, state: TreeState) -> None:
        FlatTree.check(self.optimizer.rule, self._params, self._params, state)
        self._set(state)

    def _set(self, state: TreeState) -> None:
        self._state = state
        # The step that a backward is in.
        self._now: TreeStep | None = None

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        microbatches: list[Microbatch],
        write: bool,
        count: bool,
    ) -> None:
        """Update leaves in place; the tree's one step ends with the backward."""
        del count
        with kernel_context(params[0].device):
            if self._now is None:
                tree = FlatTree.check(
                    self.optimizer.rule, self._params, self._params, self._state
                )
                self._now = TreeStep(self.optimizer, tree, "auto")
            places = [self._places[p] for p in params]
            self._now.update(places, grads, microbatches, write)

    def check_accumulates(self) -> None:
        """Refuse a rule without a sum over gradients, and what needs the whole of it."""
        check_accumulates(self.optimizer.rule, self.optimizer.cautious)

    def groups(self) -> object:
        """None: a tree has no groups."""
        return None

    def accumulates(self) -> bool:
        """False: only classes have the flag."""
        return False

    def on_host(self, p: Tensor) -> bool:
        """On CPU."""
        return p.device.type == "cpu"

    def check_train_mode(self, what: str) -> None:
        """A tree's parameters are always those."""

    def end(self, count: bool) -> None:
        """Count the tree's step."""
        self._now = None
        if count:
            with kernel_context(self._state.step.device):
                self._state.step.add_(1.0)
