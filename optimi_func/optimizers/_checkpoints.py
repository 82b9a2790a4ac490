"""What a class saves and loads: state dicts, torch's and a pure optimizer's state."""

import threading
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from optimi_func._distributed import distribute_like
from optimi_func._functional import FunctionalOptimizer
from optimi_func._rule import Rule
from optimi_func._saved import (
    Counterparts,
    LoadReport,
    as_torchs,
    as_tree,
    common,
    find_entries,
    own_names,
)
from optimi_func._tree import TreeState
from optimi_func.execution.plans import Spec
from optimi_func.optimizers._groups import (
    Group,
    GroupNumbers,
    first_param,
    group_storage,
    on_host,
)
from optimi_func.optimizers._state import (
    adopt,
    beside,
    loaded_groups,
    loaded_tree,
    named_entries,
    without_shared_memory,
)

# Hooks of ours come and go while torch goes through them: by one thread at a time.
_hooking = threading.RLock()


class Checkpoints(Optimizer):
    """The part of a class that turns its state into others, and back."""

    # What torch and optimi call and keep otherwise.
    counterparts: ClassVar[Counterparts] = Counterparts()
    keywords: ClassVar[tuple[str, ...]]  # of the factory, lr first
    _numbers: GroupNumbers
    group_of: Callable[[Tensor], Group]

    def _rule_of(self, group: Group) -> Rule[Any, Any]:
        return self._numbers.bind(group, on_host).rule

    def state_dict(self) -> dict[str, Any]:
        """The state by number of parameter, and the groups, as torch's.

        Tensors that lie side by side in memory for the step are copied: what is saved is
        that of the parameter alone.
        """
        names = {x for group in self.param_groups for x in own_names(self._rule_of(group))}
        with _hooking:
            handle = self.register_state_dict_post_hook(
                lambda _, packed: without_shared_memory(packed, names), prepend=True
            )
            try:
                return super().state_dict()
            finally:
                handle.remove()

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch.optim's class of the same name loads it, to go on alike.

        For those that torch has; compensations are left out. torch's RAdam adds eps to
        the root before its correction, ours after.

        Raises:
            ValueError: A class or an option that torch does not have.
        """
        name = type(self).__name__
        return as_torchs(name, self.keywords, self.counterparts, self.state_dict())

    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        state_dict: dict[str, Any],
        *,
        strict: bool = True,
        keep_dtypes: bool = False,
        match: Literal["names", "order"] = "names",
    ) -> LoadReport:
        """Load a state: ours, torch.optim's of the same name, or optimi's.

        Where the optimizer and the state both have parameter names, entries are found by
        name, whatever their order and groups; else by order, as torch does, and names that
        only the state has become the optimizer's. What torch.compile ("_orig_mod") and
        DistributedDataParallel ("module") add to names does not count. Hyperparameters
        are the file's; how the step is carried out (kahan_sum, state_dtype, compile,
        foreach, triton, capturable, gradient_release) stays as it is here. Tensors are
        copied, into the dtypes that fresh state would have; torch casts all to the
        parameter's. What others keep in a parameter's state is copied as it is, its
        tensors onto the parameter's device.

        Args:
            state_dict: From `state_dict`.
            strict: Refuse names that only one side has; False lets new parameters begin
                anew, leaves out old ones and reports both.
            keep_dtypes: Keep every dtype as it was saved.
            match: "order" looks at no names, as torch does not.

        Returns:
            The names that only one side has.

        Raises:
            ValueError: Groups, names, numbers, fields or shapes that do not fit, or not
                one name that does; nothing is loaded then.
        """
        made: dict[Tensor, dict[str, Any]] = {}
        reports: list[LoadReport] = []

        def prepare(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            with torch.inference_mode(False):
                found = find_entries(
                    given, self.param_groups, strict, match, self.counterparts
                )
                groups, entries = loaded_groups(
                    found, self.param_groups, self._rule_of, keep_dtypes
                )
            reports.append(found.report)
            made.update(entries)
            return {**given, "state": found.others, "param_groups": groups}

        def restore(_: Optimizer) -> None:
            self.state.update(made)

        with _hooking:
            # After the user's own pre-hooks, and before the user's own post-hooks.
            handles = [
                self.register_load_state_dict_pre_hook(prepare),
                self.register_load_state_dict_post_hook(restore, prepend=True),
            ]
            try:
                super().load_state_dict(state_dict)
            finally:
                for handle in handles:
                    handle.remove()
        return reports[-1]

    def functional(self) -> tuple[FunctionalOptimizer, TreeState]:
        """This optimizer as a pure one, with its state for the tree {name: parameter}.

        What has a gradient to come is in the tree: parameters that never had a gradient
        and do not require one are left out. Nothing shares memory with this optimizer.

        Returns:
            The optimizer with the numbers of now; lr and weight_decay by name where
            groups differ in them. The state, its `leaves` by name.

        Raises:
            ValueError: Parameters without names, groups that differ in other numbers, or
                parameters that have taken different numbers of steps.

        >>> from optimi_func import SGD
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        >>> sgd, state = optimizer.functional()
        >>> params = {name: p.detach() for name, p in model.named_parameters()}
        >>> grads = {name: torch.ones_like(p) for name, p in params.items()}
        >>> params, state = sgd.step(params, grads, state)
        >>> optimizer.load_functional(state, params)
        >>> optimizer.state[model.bias]["momentum_buffer"]
        tensor([1.])
        """
        bounds: list[FunctionalOptimizer] = []
        entries: list[dict[str, dict[str, Any]]] = []
        for group in self.param_groups:
            bounds.append(self._numbers.bind(group, on_host))
            spec = Spec(bounds[-1].rule, group_storage(group), group["capturable"])
            entries.append(named_entries(self.state, group, spec))
        optimizer = common(bounds, list(map(list, entries)))
        merged = {name: entry for some in entries for name, entry in some.items()}
        return optimizer, as_tree(optimizer.rule, merged, first_param(self.param_groups))

    def load_functional(
        self, state: TreeState, params: dict[str, Tensor] | None = None
    ) -> None:
        """Go on from a pure optimizer's state, as `functional` gave it.

        Args:
            state: With `leaves` by name; those of other parameters stay as they are.
            params: Values for the parameters themselves, by name.

        Raises:
            ValueError: Names that no parameter has, shapes or fields that do not fit;
                nothing is loaded then.
        """
        made, moved = loaded_tree(state, params or {}, self.param_groups, self._rule_of)
        for p, entry in made.items():
            rule = self._rule_of(self.group_of(p))
            made[p] = {**beside(rule, self.state.get(p, {})), **entry}
        adopt(self.state, made)
        with torch.no_grad():
            for p, x in moved:
                p.copy_(distribute_like(p, x))
