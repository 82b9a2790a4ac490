"""Methods that save and load state dicts: ours, torch.optim's, and pure states."""

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from optimi_func.core import checks
from optimi_func.core.distributed import distribute_like, to_local
from optimi_func.core.hooks import plain
from optimi_func.core.packed import flatten
from optimi_func.core.pairs import as_real
from optimi_func.core.rule import Rule, Storage
from optimi_func.core.storage import group_storage, own_names
from optimi_func.core.torch_private import in_distributed_checkpoint, unwrapped
from optimi_func.core.tree import TreeState, seed_tensor
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state import convert, stored
from optimi_func.state.convert import Counterparts, Entry, Group, LoadReport, Match
from optimi_func.state.describe import describe
from optimi_func.state.entry import (
    check_options,
    ensure_state,
    insert_made,
    named_params,
    stuck_moments,
)
from optimi_func.state.names import Names


class Fitted(NamedTuple):
    """The fields that `load_fitting` has taken over."""

    taken: dict[str, list[str]]  # fields, by name of the parameter
    anew: dict[str, list[str]]  # fields that begin anew
    unused: list[str]  # names in the state of which nothing was taken


# Taken while our hooks are registered, because torch iterates over the dict of all hooks.
_hooking = threading.RLock()
_THEIRS = {"differentiable": False, "fused": None}
REST = "kahan_comp"


def counterparts_of(owner: object) -> Counterparts:
    """Return the counterparts in other libraries of a class or a pure optimizer."""
    value = getattr(owner, "factory", owner)
    return getattr(value, "counterparts", None) or Counterparts()


def _written(p: Tensor) -> tuple[int, int]:
    """Return what changes if somebody writes to a parameter or replaces its memory."""
    (part,) = to_local([p])
    return p._version, part.data_ptr()


def _as_strings(optimizer: Any, packed: StateDict) -> None:
    """Save dtypes and Storage as strings, and what a group shows of its state as numbers.

    Schedules are not saved, as torch's do not save their functions.
    torch.distributed.checkpoint cannot gather a dtype. weights_only=True refuses classes.
    """
    # That alone is to see a {}: it writes none to files, but asks for a key for each
    # option of a running optimizer.
    shared = in_distributed_checkpoint()
    for mine, group in zip(optimizer.named_groups(), packed["param_groups"]):
        if "param_names" in mine:
            group["param_names"] = mine["param_names"]
        for name, x in (optimizer.lead_of(mine) or {}).items():
            if isinstance(x, Tensor) and group.get(name) is x:
                group[name] = x.item()
        for name in ("state_dtype", "storage"):
            if group[name] is not None:
                group[name] = str(group[name])
        group["hooks"] = tuple(map(plain, group["hooks"]))
        left_out = _add_torchs_options(optimizer, group)
        for name in optimizer.scheduled(mine):
            del group[name]
            left_out.add(name)
        if shared:
            group.update({name: {} for name in left_out})


def _add_torchs_options(optimizer: Any, group: Group) -> set[str]:
    """Add torch's options to a group, and return those that torch's class lacks.

    If an option of ours has another value than its default, neither is done: files lack a
    key for each class then, and loading raises.
    """
    cls, usual = counterparts_of(optimizer).in_torch, optimizer._arguments
    if cls is None:
        return set()
    theirs = convert.torchs_options(counterparts_of(optimizer))
    added = {convert.DECAY: group.get("decouple_wd", True), **_THEIRS}
    ours = {k for k in usual if k in group and k not in theirs}
    left_out = {k for k in ours if k in convert.POLICY or group[k] == usual[k].default}
    left_out |= ours & {"decouple_wd"} if convert.DECAY in theirs else set()
    # Not if torch has other names for ours. Schedulers add max_lr to torch's groups too.
    if not (theirs <= {*group, *added} and ours <= left_out | {"max_lr"}):
        return set()
    group.update({k: x for k, x in added.items() if k in theirs and k not in group})
    return left_out


def _by_name(state_dict: Group, counterparts: Counterparts) -> dict[str, Entry]:
    """Return the entries of a state dict by name, in our names and values."""
    by_name: dict[str, Entry] = {}
    state_dict = convert.under_our_names(state_dict, counterparts)
    for group in state_dict["param_groups"]:
        if group["params"] and "param_names" not in group:
            raise ValueError(
                "a group of the state has no 'param_names', by which entries are found: "
                "put a list there, [name for name, _ in model.named_parameters()] for an "
                "optimizer of model.parameters()"
            )
        names = zip(group.get("param_names", ()), group["params"])
        entries = {name: state_dict["state"].get(i) for name, i in names}
        by_name |= {name: x for name, x in entries.items() if x}
    return by_name


def _left_at_zero(names: list[object]) -> list[str]:
    """Return a warning about parameters of these names, if there are any."""
    if not names:
        return []
    return [
        f"{len(names)} parameters ({names[0]}, ...) have taken steps, but all of their "
        "moments are 0 in the state. That is right if their gradients were 0. Otherwise "
        "the checkpoint has the moments in another form, and allow_partial_load=True left "
        "them out: save and load decoded_state_dict()"
    ]


class Checkpoints(Optimizer):
    """The methods of an optimizer that save, load and convert its state."""

    # The hyperparameters' keys in param groups, lr first, and the factory's names of those
    # that are others, as of optimi_func.optim.
    keywords: ClassVar[tuple[str, ...]]
    _our_names: ClassVar[Mapping[str, str]] = {}
    _arguments: ClassVar[dict[str, Any]]  # the constructor's, each of them a `Field`
    _names: Names
    _fixed: ClassVar[Group] = {}  # what the constructor sets, and no state changes
    bound_of: Callable[[Group], FunctionalOptimizer]
    group_of: Callable[[Tensor], Group]
    named_groups: Callable[[], list[Group]]
    name_of: Callable[[Tensor], str | None]
    _factory_of: Callable[[Group], tuple[type[FunctionalOptimizer], tuple[str, ...]]]
    _check_numbers: Callable[[Group], None]
    init_state: Callable[[], None]
    note_loaded: Callable[[], None]  # completes what was loaded
    holds_averages = False  # within `EMA.applied`
    # By id of the parameter: what `_written` returned after load_master_state_dict.
    _masters: Mapping[int, object] = MappingProxyType({})

    def rule_of(self, group: Group) -> Rule:
        """Return a group's rule. Raise if a hyperparameter is out of range."""
        return self.bound_of(group).rule

    def scheduled(self, group: Group) -> list[str]:
        """Return the hyperparameters of a group that are schedules."""
        numbers = {k: group[k] for k in self._factory_of(group)[1]}
        return [k for k, x in numbers.items() if any(map(callable, flatten((x,))))]

    def _under_keys(self, options: Group) -> Group:
        """Return options of the factory's names under the keys of param groups."""
        keys = {ours: key for key, ours in self._our_names.items()}
        return convert.renamed(options, keys)

    def rules(self) -> list[Rule]:
        """Return the rule of each group."""
        return list(map(self.rule_of, self.param_groups))

    def check_train_mode(self, what: str) -> None:
        """Raise an error if the parameters are averaged or evaluation weights."""
        if self.holds_averages:
            raise RuntimeError(
                f"{what} inside of EMA.applied(): leave it, the parameters are averages"
            )

    def state_dict(self) -> StateDict:
        """Return the state by parameter number, and the param groups, as torch.optim does.

        The state of parameters that are no longer in any param group is left out, with a
        warning. If the boundary of a shard cuts a group of 64 elements, this optimizer
        cannot store the parameter's moments in 8 bits. If torch.distributed.checkpoint
        calls this method, the processes gather these moments, one parameter at a time, so
        that the checkpoint contains them in 8 bits, as in a run with one process.

        Raises:
            ValueError: A parameter without a name was added to a param group that has
                names.
        """
        packed = self._packed()
        if in_distributed_checkpoint():
            self._change_entries(packed, stored.with_whole_codes)
        return packed

    def _packed(self) -> StateDict:
        """Return the `state_dict` with the tensors of this optimizer."""
        with _hooking, self.register_state_dict_post_hook(_as_strings, prepend=True):
            return unwrapped(super(Checkpoints, self._without_strangers()).state_dict)()

    def _change_entries(
        self, packed: StateDict, change: Callable[[Rule, Tensor, Storage, Entry], Entry]
    ) -> None:
        """Replace each parameter's entry in a state dict of this optimizer."""
        every = [(group, p) for group in self.param_groups for p in group["params"]]
        for i, (group, p) in enumerate(every):
            if isinstance(entry := packed["state"].get(i), dict):
                how = self.rule_of(group), p, group_storage(group)
                packed["state"][i] = change(*how, entry)

    def _without_strangers(self) -> "Checkpoints":
        """Return this optimizer, or one that shares all but the state of no group's."""
        members = {id(p) for group in self.param_groups for p in group["params"]}
        odd = [p for p in self.state if isinstance(p, Tensor) and id(p) not in members]
        if not odd:
            return self
        names = [self.name_of(p) or f"of shape {tuple(p.shape)}" for p in odd]
        checks.warn_user(
            f"the state of {len(odd)} parameters that are in no group is not saved: "
            f"{names[:3]}. optimizer.state.pop(p) drops it, and a group keeps it"
        )
        view = object.__new__(type(self))
        view.__dict__ = dict(self.__dict__)
        left_out = {*map(id, odd)}
        view.state = {p: x for p, x in self.state.items() if id(p) not in left_out}  # pyright: ignore[reportAttributeAccessIssue]
        return view

    def torch_state_dict(self) -> StateDict:
        """Return the state for torch.optim's class of the same name, if torch has one.

        With this state, torch's class continues with the same steps, with two exceptions:
        compensations are left out, and torch's RAdam adds eps to the square root before the
        bias correction, whereas the RAdam of this package adds eps after the bias
        correction.

        Raises:
            ValueError: torch has no class of this name, or does not have an option that is
                used.
        """
        name = type(self).__name__
        state = self.decoded_state_dict()
        return convert.as_torchs(name, self.keywords, counterparts_of(self), state)

    def decoded_state_dict(self) -> StateDict:
        """Return the state_dict with moments in 8 bits decoded to float32.

        `load_state_dict` can load this state with any storage. Use this method to change
        the storage if you save and load with torch.distributed.checkpoint, which loads into
        the existing tensors.
        """
        packed = self._packed()
        self._change_entries(packed, lambda r, p, _, entry: stored.decoded(r, p, entry))
        return packed

    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Return a model's parameters in float32, by name, with their compensations added.

        A bfloat16 parameter has 8 significant bits, or 16 to 24 together with its
        compensation. Parameters without a compensation are converted to float32. float64,
        integer and complex parameters keep their dtype. If the optimizer contains none of
        the model's parameters, a ValueError is raised.
        """
        params = self._params_of(model).items()
        return {
            k: stored.master(p, self.state.get(p, {}).get("kahan_comp")) for k, p in params
        }

    def _params_of(self, model: torch.nn.Module) -> dict[str, Tensor]:
        checks.check_module("(load_)master_state_dict", model)
        params: dict[str, Tensor] = dict(model.named_parameters())
        if {*params.values()}.isdisjoint(p for g in self.param_groups for p in g["params"]):
            raise ValueError("none of the model's parameters is the optimizer's")
        return params

    def load_master_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Tensor]
    ) -> None:
        """Set a model's parameters and their compensations from a `master_state_dict`.

        You can also pass the state_dict() of a float32 model. If weights have no
        compensation, a warning says that they are rounded.

        Raises:
            TypeError, ValueError: Names, shapes or types do not fit, or the optimizer
                contains none of the model's parameters. Nothing is loaded in this case.
        """
        self.check_train_mode("load_master_state_dict()")
        params = self._params_of(model)
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict={checks.shown(state_dict)}: allowed is a dict by name"
            )
        # A model's own has buffers too, and a tied parameter under each of its names.
        known = dict(model.named_parameters(remove_duplicate=False)).keys()
        known |= dict(model.named_buffers(remove_duplicate=False)).keys()
        lacking = {"nothing for": sorted(params.keys() - state_dict.keys())}
        lacking["no parameters"] = sorted(state_dict.keys() - known)
        if problems := [f"{text} {names}" for text, names in lacking.items() if names]:
            raise ValueError(f"state_dict: {', and '.join(problems)}")
        for name, p in params.items():
            x = state_dict[name]
            if not isinstance(x, Tensor):
                raise TypeError(f"state_dict[{name!r}]={x!r:.80}: allowed is a tensor")
            shape, own_shape = (tuple(as_real(x).shape) for x in (x, p))
            if shape != own_shape:
                raise ValueError(
                    f"state_dict[{name!r}] has shape {shape}, its parameter {own_shape}"
                )
            checks.check_source(f"state_dict[{name!r}]", state_dict[name], p)
        self.init_state()
        with torch.no_grad():
            for name, p in params.items():
                entry = self.state.get(p, {})
                stored.set_master(p, entry.get("kahan_comp"), state_dict[name])
                if "step" in entry and entry["step"] == 0:
                    # Fields that begin as the parameter would be those of another one.
                    fresh = stored.plain_entry(self.bound_of(self.group_of(p)), p)
                    for field, x in fresh.items():
                        if field in entry:
                            as_real(entry[field]).copy_(as_real(x))
        self._masters = {id(p): _written(p) for p in params.values()}

    def _find(self, state_dict: StateDict, strict: bool, match: str) -> Match:
        """Find the saved options of each group and the saved entry of each parameter."""
        keywords = *self.keywords, *self._our_names.values()
        arguments = state_dict, self.named_groups(), strict, match, keywords
        return convert.find_entries(*arguments, counterparts_of(self))

    def describe(self) -> str:
        """Return a table of the storage formats and the bytes of each param group.

        For a frozen parameter without state, only the parameter itself is counted. State
        that a trainable parameter does not have yet is counted as if it had been created.
        For DTensors, the local shards are counted.

        >>> from optimi_func import AdamW
        >>> model = torch.nn.Linear(128, 128)
        >>> print(AdamW(model.parameters(), lr=1e-3).describe())
        group  tensors  elements  parameters  moments  in codes    bytes    each
            0        2    16,512     float32  float32     0.0 %  198,144  12.000
        """
        return describe(self.state, self.param_groups, self.bound_of)

    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        state_dict: StateDict,
        *,
        strict: bool = True,
        keep_dtypes: bool = False,
        match: Literal["names", "order"] = "names",
    ) -> LoadReport:
        """Load a state dict of this class, or of its counterpart in torch.optim or optimi.

        If the optimizer and the state dict both have parameter names, entries are matched
        by name, in any order and in any param groups. Otherwise, entries are matched by
        order, as in torch. If only the state dict has names, the optimizer takes over these
        names. Prefixes that torch.compile ("_orig_mod") and DistributedDataParallel
        ("module") add to names are ignored.

        Hyperparameters are loaded too. If entries are matched by name, a param group gets
        the hyperparameters of the saved group that contains its parameters. Options that
        concern how the step runs are not loaded (storage, kahan_sum, state_dtype, compile,
        foreach, triton, capturable, gradient_release).

        Tensors are copied to the dtypes that a new state would have, whereas torch casts
        all tensors to the dtype of the parameter. Values that other code stores in a
        parameter's state are copied too, and tensors among them are moved to the
        parameter's device. No parameter is written to. If the class has a method `eval()`,
        the mode is loaded too. If the loaded mode is eval mode, `train()` sets the
        parameters.

        Args:
            state_dict: The state dict, as `state_dict` returned it.
            strict: Raise an error for names that only the optimizer or only the state dict
                has. With False, a parameter that is missing from the state dict gets a new
                state, a name that only the state dict has is ignored, and both are
                reported.
            keep_dtypes: Keep every dtype as it was saved.
            match: "names", or "order" to ignore names, as torch does.

        Returns:
            The names that only the optimizer has (`missing`), and the names that only the
            state dict has (`unexpected`).

        Raises:
            TypeError: state_dict is not a dict, a value in an entry is not a tensor, or
                8-bit codes were cast to another dtype.
            ValueError: Groups, names, hyperparameters, fields or shapes do not fit.
                Examples are names that only one of the two has (if strict), no common
                names, a different number of groups (if matched by order), and groups that
                were joined or divided after saving and have different values of a
                hyperparameter. Nothing is loaded in this case.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict={state_dict!r:.80}: allowed is a dict, as saved")
        made: dict[Tensor, Entry] = {}
        reports: list[LoadReport] = []

        def prepare(_: Optimizer, given: StateDict) -> StateDict:
            with torch.inference_mode(False):
                matched = self._find(given, strict, match)
                groups, entries = self._loaded(matched, keep_dtypes)
            reports.append(matched.report)
            made.update(entries)
            return {**given, "state": matched.others, "param_groups": groups}

        def restore(_: Optimizer) -> None:
            self.state.update(made)
            self.note_loaded()

        # The groups, the state and the names are replaced, and none of them is written to.
        before = dict(vars(self))
        self._names = self._names.copy()
        former = [group.get("betas") for group in self.param_groups]
        try:
            with (
                _hooking,
                # They run after the user's pre-hooks and before the user's post-hooks.
                self.register_load_state_dict_pre_hook(prepare),
                self.register_load_state_dict_post_hook(restore, prepend=True),
            ):
                unwrapped(super().load_state_dict)(state_dict)
            for betas, group in zip(former, self.param_groups):
                if group.get("betas") != betas and not keep_dtypes:
                    checks.warn(stuck_moments(group, self.bound_of(group)))
        except BaseException:
            vars(self).update(before)
            raise
        return reports[-1]

    def load_fitting(self, state_dict: StateDict) -> Fitted:
        """Load the tensors that fit from the state of another rule, and reset the others.

        If you switch from AdamW to MuonAdamW, embeddings and norms keep their moments. If
        you switch from Muon to NorMuon, matrices keep their momentum. Entries are matched
        by name, in state dicts of this package and of torch.optim. From each entry, this
        method loads the fields that the new rule also has, with the same shape, and the
        compensation of the weight. A rule that depends on the step count, for example for a
        bias correction, gets either all of its fields or none. The hyperparameters of this
        optimizer do not change. Load the model before you call this method.

        Args:
            state_dict: A state dict from `state_dict`, or a dict of several state dicts,
                such as the result of `torch_state_dict` of a Mixed optimizer, or {"muon":
                ..., "adamw": ...} with state dicts of torch's classes.

        Returns:
            The fields that were loaded (`taken`) and reset (`anew`) for each parameter, and
            the names in the state dict that were not used (`unused`).

        Raises:
            ValueError: The parameters have no names. Nothing is loaded in this case.

        >>> from optimi_func import AdamW, MuonAdamW
        >>> from torch.nn import Embedding, Linear, Sequential
        >>> model = Sequential(Embedding(5, 4), Linear(4, 4), Linear(4, 5))
        >>> model[1].bias = None
        >>> old = AdamW(model.named_parameters(), lr=1e-3)
        >>> old.init_state()
        >>> found = MuonAdamW(model, lr=1e-3).load_fitting(old.state_dict())
        >>> found.anew, len(found.taken)
        ({'1.weight': ['momentum_buffer']}, 3)
        """
        self.check_train_mode("load_fitting()")
        several = "param_groups" not in state_dict
        states = list(state_dict.values()) if several else [state_dict]
        packed, report = self._packed(), Fitted({}, {}, [])
        groups = self.named_groups()
        ours = [name for group in groups for name, _ in named_params(group)]
        packed["state"], names = {}, dict[str, None]()
        for mine, named, group in zip(self.param_groups, groups, packed["param_groups"]):
            saved: dict[str, Entry] = {}
            for state in states:
                state = convert.with_names(state, groups)
                saved |= _by_name(state, counterparts_of(self._factory_of(mine)[0]))
            names |= dict.fromkeys(saved)
            theirs, bound = convert.same_names(ours, list(saved)), self.bound_of(mine)
            for (name, p), i in zip(named_params(named), group["params"]):
                entry = saved.get(theirs.get(name, ""), {})
                fitted, fields = stored.fitting(bound, p, entry)
                lacking = [x for x in bound.rule.state._fields if x not in fields]
                packed["state"] |= {i: fitted} if fitted else {}
                report.taken.update({name: fields} if fields else {})
                report.anew.update({name: lacking} if lacking else {})
        used = {convert.same_names(ours, list(names)).get(name) for name in report.taken}
        report.unused.extend(name for name in names if name not in used)
        self.load_state_dict(packed)
        return report

    def _loaded(
        self, match: Match, keep_dtypes: bool
    ) -> tuple[list[Group], dict[Tensor, Entry]]:
        """Return the groups and entries that a saved state becomes, checked and copied."""
        groups: list[Group] = []
        made: dict[Tensor, Entry] = {}
        flags = {k for k, x in self._arguments.items() if x.argument is bool}
        flags, lost, empty = {*flags, "train_mode"}, list[object](), list[object]()
        every = self.param_groups, self.named_groups(), match.groups, match.entries
        for mine, named, options, entries in zip(*every):
            first = sum(len(group["params"]) for group in groups)
            places = list(range(first, first + len(entries)))
            fixed = self._fixed | {name: mine[name] for name in self.scheduled(mine)}
            given = self._under_keys(options)
            for name in flags & mine.keys() & given.keys():
                checks.check_flag(name, given[name])
            group = {**named, **given, **fixed, "params": places}
            check_options(mine, given)
            self._check_numbers(group)
            bound = self.bound_of(group)
            convert.check_kind(options, bound.decay)
            if "decouple_wd" not in mine:
                group.pop("decouple_wd", None)
            if "train_mode" in mine:
                group["train_mode"] = options.get("train_mode", True)
            groups.append(group)
            storage, capturable = group_storage(mine), mine["capturable"]
            names = group.get("param_names", places)
            load = stored.loading(bound, capturable, storage, keep_dtypes)
            for name, p, saved in zip(names, mine["params"], entries):
                if self._lacks_rest(p, saved):
                    if not keep_dtypes and self._masters.get(id(p)) == _written(p):
                        saved = stored.with_rest(bound, p, saved, self.state[p])
                    elif any(map(bool, map(Tensor.any, to_local([self.state[p][REST]])))):
                        lost.append(name)
                if saved is not None:
                    made[p] = load(name, p, saved)
                    if stored.lacks_moments(bound.rule, p, storage, made[p]):
                        empty.append(name)
        checks.warn(_left_at_zero(empty))
        if lost:
            checks.warn_user(
                f"the state has no 'kahan_comp' of {len(lost)} parameters "
                f"({lost[0]}, ...): their weights now end with the bits of their dtype. "
                "That is right if the weights were loaded too. Otherwise call "
                "load_master_state_dict(model, masters) after load_state_dict, with "
                "masters = master_state_dict(model) from before"
            )
        mode = all(group.get("train_mode", True) for group in groups)
        groups = [g | {"train_mode": mode} if "train_mode" in g else g for g in groups]
        return groups, made

    def _lacks_rest(self, p: Tensor, saved: object) -> bool:
        """Return True if a saved entry lacks the compensation that p has now."""
        lacks = saved is None or (isinstance(saved, dict) and saved.get(REST) is None)
        return lacks and isinstance(self.state.get(p, {}).get(REST), Tensor)

    def _named_entries(self, named: Group, bound: FunctionalOptimizer) -> dict[str, Entry]:
        """Return the complete entries, by name, of parameters that have or get state.

        `named` is one of `named_groups`.
        """
        storage, entries = group_storage(named), dict[str, Entry]()
        how = bound, storage, named["capturable"]
        for name, p in named_params(named):
            if "step" in self.state.get(p, {}) or p.requires_grad:
                entry = ensure_state(self.state, {}, f"[{name!r}]", p, *how)
                seed = seed_tensor(storage, p)
                entries[name] = entry if seed is None else {**entry, "kahan_comp": seed}
        return entries

    def _first_param(self) -> Tensor:
        groups = self.param_groups
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        return next((p for group in groups for p in group["params"]), none)

    def _loaded_tree(
        self, state: TreeState, params: Mapping[str, Tensor]
    ) -> tuple[dict[Tensor, Entry], list[tuple[Tensor, Tensor]]]:
        """Check and copy a pure optimizer's state, whose `leaves` are a dict by name.

        Returns the entries, and for each of `params` the parameter and its new value.
        """
        groups = zip(self.param_groups, self.named_groups())
        home = {n: (group, p) for group, named in groups for n, p in named_params(named)}
        entries = convert.from_tree(state)
        for name, x in {**entries, **params}.items():
            if name not in home:
                raise ValueError(f"{name!r} is no parameter: allowed are {list(home)}")
            if name in params:
                checks.check_source(f"params[{name!r}]", params[name], home[name][1])
            if isinstance(x, Tensor) and x.shape != home[name][1].shape:
                raise ValueError(
                    f"params[{name!r}] has shape {tuple(x.shape)}, its parameter "
                    f"{tuple(home[name][1].shape)}"
                )
        made: dict[Tensor, Entry] = {}
        for name, entry in entries.items():
            group, p = home[name]
            bound, storage = self.bound_of(group), group_storage(group)
            entry = convert.checked(bound, "state.leaves", name, p, entry)
            plain = not (storage.coded or stored.has_codes(bound.rule, entry))
            with torch.no_grad():
                capturable = group["capturable"]
                made[p] = stored.fit(bound, p, entry, storage, capturable, plain, copy=True)
        return made, [(home[name][1], x) for name, x in params.items()]

    def functional(self) -> tuple[FunctionalOptimizer, TreeState]:
        """Return a pure optimizer and its state for the tree {name: parameter}.

        Parameters that have no state and do not require a gradient are left out. The
        results share no memory with this optimizer.

        Returns:
            The pure optimizer with the present hyperparameters, and the state, whose
            `leaves` is a dict by name. If param groups differ in lr or weight_decay, these
            two hyperparameters are dicts by name.

        Raises:
            ValueError: Parameters have no names, param groups differ in other
                hyperparameters, or parameters have taken different numbers of steps.

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
        entries: list[dict[str, dict[str, object]]] = []
        for group, named in zip(self.param_groups, self.named_groups()):
            bounds.append(self.bound_of(group))
            entries.append(self._named_entries(named, bounds[-1]))
        optimizer = convert.common(bounds, list(map(list, entries)))
        merged = {name: entry for part in entries for name, entry in part.items()}
        return optimizer, convert.as_tree(optimizer.rule, merged, self._first_param())

    def load_functional(
        self, state: TreeState, params: dict[str, Tensor] | None = None
    ) -> None:
        """Continue from the state of a pure optimizer, as `functional` returns it.

        Args:
            state: A state whose `leaves` is a dict by name. Parameters that are not in this
                dict keep their state.
            params: New values of the parameters, by name.

        Raises:
            ValueError: A name belongs to no parameter, or shapes or fields do not fit.
                Nothing is loaded in this case.
        """
        self.check_train_mode("load_functional()")
        self._take_over(*self._loaded_tree(state, params or {}))

    def _take_over(
        self, made: dict[Tensor, Entry], moved: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Replace entries, except for other code's values, and write parameters."""
        for p, entry in made.items():
            names = own_names(self.rule_of(self.group_of(p)))
            others = {k: x for k, x in self.state.get(p, {}).items() if k not in names}
            made[p] = {**others, **entry}
        insert_made(self.state, made)
        with torch.no_grad():
            for p, x in moved:
                p.copy_(distribute_like(p, x))
            self.note_loaded()
