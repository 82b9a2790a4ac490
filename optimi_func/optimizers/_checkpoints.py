"""What a class saves and loads: state dicts, torch's and a pure optimizer's state."""

import threading
from collections.abc import Callable, Mapping
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
    Match,
    as_torchs,
    as_tree,
    common,
    find_entries,
    own_names,
)
from optimi_func._stored import decoded, master, set_master
from optimi_func._tree import TreeState
from optimi_func.execution.plans import Spec
from optimi_func.optimizers._describe import describe
from optimi_func.optimizers._groups import (
    Group,
    GroupNumbers,
    first_param,
    group_storage,
    on_host,
)
from optimi_func.optimizers._state import (
    beside,
    insert_made,
    loaded_groups,
    loaded_tree,
    named_entries,
    without_shared_memory,
)

# Hooks of ours come and go while torch goes through them: by one thread at a time.
_hooking = threading.RLock()


def counterparts_of(owner: Any) -> Counterparts:
    """What a class, or the value that it has, is called and keeps in other libraries."""
    value = getattr(owner, "factory", owner)
    return getattr(value, "counterparts", None) or Counterparts()


class Checkpoints(Optimizer):
    """The part of a class that turns its state into others, and back."""

    keywords: ClassVar[tuple[str, ...]]  # of the factory, lr first
    _numbers: GroupNumbers
    group_of: Callable[[Tensor], Group]
    init_state: Callable[[], None]

    def rule_of(self, group: Group) -> Rule[Any, Any]:
        return self._numbers.bind(group, on_host).rule

    def check_train_mode(self, what: str) -> None:
        """Raise if the parameters are not those to train: see `Evaluated`."""

    def state_dict(self) -> dict[str, Any]:
        """The state by number of parameter, and the groups, as torch's.

        Tensors that lie side by side in memory for the step are copied: what is saved is
        that of the parameter alone.
        """
        names = {x for group in self.param_groups for x in own_names(self.rule_of(group))}
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
        state = self.decoded_state_dict()
        return as_torchs(name, self.keywords, counterparts_of(self), state)

    def decoded_state_dict(self) -> dict[str, Any]:
        """The state_dict with every moment a plain float32, whatever it is kept in.

        `load_state_dict` takes it into any storage. torch.distributed.checkpoint, which
        loads into the tensors that are there, moves a state between storages by it.
        """
        packed = self.state_dict()
        every = [(group, p) for group in self.param_groups for p in group["params"]]
        for i, (group, p) in enumerate(every):
            if isinstance(packed["state"].get(i), dict):
                rule = self.rule_of(group)
                packed["state"][i] = decoded(rule, p, packed["state"][i])
        return packed

    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """A model's parameters in float32, by name, with what is kept beside them.

        A bfloat16 parameter of 8 bits has, with its compensation or remainder, 16 to 24;
        this gives all of them. Others are converted, or as they are.
        """
        return {
            name: master(p, self.state.get(p, {}).get("kahan_comp"))
            for name, p in model.named_parameters()
        }

    def load_master_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Tensor]
    ) -> None:
        """Set a model's parameters, and what is kept beside them, to float32 values.

        Args:
            model: Whose parameters.
            state_dict: From `master_state_dict`, by name.

        Raises:
            ValueError: Names or shapes that do not fit; nothing is loaded then.
        """
        params = dict(model.named_parameters())
        if params.keys() != state_dict.keys():
            raise ValueError(
                f"state_dict: nothing for {sorted(params.keys() - state_dict.keys())}, and "
                f"no parameters {sorted(state_dict.keys() - params.keys())}"
            )
        for name, x in state_dict.items():
            if x.shape != params[name].shape:
                raise ValueError(
                    f"state_dict[{name!r}] has shape {tuple(x.shape)}, its parameter "
                    f"{tuple(params[name].shape)}"
                )
        self.init_state()
        with torch.no_grad():
            for name, p in params.items():
                set_master(p, self.state.get(p, {}).get("kahan_comp"), state_dict[name])

    def _find(self, state_dict: dict[str, Any], strict: bool, match: str) -> Match:
        """A saved state, laid out as this optimizer is."""
        counterparts = counterparts_of(self)
        return find_entries(state_dict, self.param_groups, strict, match, counterparts)

    def describe(self) -> str:
        """A table: how each group's parameters and moments are kept, and their bytes.

        What has no state yet is counted as it will be made; of DTensors what lies here.

        >>> from optimi_func import AdamW
        >>> model = torch.nn.Linear(128, 128).bfloat16()
        >>> print(AdamW(model.parameters(), lr=1e-3, storage="compact").describe())
        group  tensors  elements       parameters         moments  in codes   bytes   each
            0        2    16,512  bfloat16 + int8  8bit, bfloat16    99.2 %  84,864  5.140
        """
        return describe(self.state, self.param_groups, self.rule_of)

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
                found = self._find(given, strict, match)
                groups, entries = loaded_groups(
                    found, self.param_groups, self.rule_of, keep_dtypes
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
        self.check_train_mode("functional()")
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
        self.check_train_mode("load_functional()")
        made, moved = loaded_tree(state, params or {}, self.param_groups, self.rule_of)
        self._take_over(made, moved)

    def _take_over(
        self, made: dict[Tensor, dict[str, Any]], moved: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Let parameters have these states and values, beside what is others'."""
        for p, entry in made.items():
            rule = self.rule_of(self.group_of(p))
            made[p] = {**beside(rule, self.state.get(p, {})), **entry}
        insert_made(self.state, made)
        with torch.no_grad():
            for p, x in moved:
                p.copy_(distribute_like(p, x))
