"""Find and convert the entries of state dicts: ours, torch's, optimi's, bitsandbytes'."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict
from torch.utils import _pytree as pytree

from optimi_func.core import storage
from optimi_func.core.checks import warn_user
from optimi_func.core.rule import Options, Rule
from optimi_func.core.tree import LeafState, TreeState, running_tensors
from optimi_func.pure.functional import FunctionalOptimizer

# torch's options that are no fields here: groups have them if they were given.
TORCHS = ("fused", "differentiable")
# Options about how the step runs. They are not loaded from a file.
POLICY = (*Options.__annotations__, *TORCHS)
# torch's name of an option of Adam, NAdam and RAdam, and both names.
DECAY = "decoupled_weight_decay"
DECAYS = {DECAY: "decouple_wd"}
_OUR_DECAYS = ("decouple_lr", "decouple_wd", "cautious_decay", "corrected_decay")

# The training point y of a parameter, in the entry of an optimizer in eval mode.
TRAIN_PARAM = "train_param"

# Fields that stay in an entry of others when the option that needs them is turned off.
_TURNED_OFF: dict[tuple[str, ...], str] = {
    (): "momentum_buffer",
    ("exp_avg", "exp_avg_sq"): "max_exp_avg_sq",
}

# Parts that torch.compile, activation checkpointing and FSDP add to parameter names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

Entry = dict[str, Any]
Group = dict[str, Any]


class LoadReport(NamedTuple):
    """Names of parameters that only the optimizer or only the loaded state has."""

    missing: list[str]  # the optimizer's, which start with fresh state
    unexpected: list[str]  # the state's, which were not loaded


@dataclass(frozen=True, kw_only=True)
class Counterparts:
    """Differences to the optimizer of the same name in torch.optim and in optimi.

    Attributes:
        in_torch: torch.optim's class, if it can go on from a state of ours.
        torch_counts_steps: True if that class keeps a step count for each parameter.
        torch_names: Our names of torch's options, by torch's names.
        torch_options: Returns the options of one of our groups whose values torch changes.
        our_options: Returns the options of one of torch's groups whose values we change.
        optimi_names: Our names of optimi's fields, by optimi's names.
        optimi_negated: Our names of fields that optimi keeps with the opposite sign.
        bitsandbytes: Our names of the fields state1 and state2 of bitsandbytes' class.
        unused: Fields that torch's entries lack where ours have no elements.
    """

    in_torch: type[torch.optim.Optimizer] | None = None
    torch_counts_steps: bool = True
    torch_names: Mapping[str, str] = field(default_factory=dict[str, str])
    torch_options: Callable[[Group], Group] = lambda group: {}
    our_options: Callable[[Group], Group] = lambda group: {}
    optimi_names: Mapping[str, str] = field(default_factory=dict[str, str])
    optimi_negated: tuple[str, ...] = ()
    bitsandbytes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


class Match(NamedTuple):
    """A saved state in the order of the optimizer's groups and parameters."""

    groups: list[Group]  # saved options, one dict a group
    entries: list[list[Entry | None]]  # saved entries, one list a group
    others: dict[object, object]  # state that belongs to no parameter
    report: LoadReport


def with_names(state_dict: StateDict, groups: list[Group]) -> StateDict:
    """Return a state of torch.distributed.checkpoint with the names of its entries.

    They are its "params", in the order of our `groups`. Its "param_names" and options are
    those of one of the saved groups that a group's parameters come from.
    """
    saved: list[Group] = state_dict["param_groups"]
    keys = [key for group in saved for key in group["params"]]
    if not keys or not all(isinstance(key, str) for key in keys):
        return state_dict
    ours = [name for group in groups for name in group.get("param_names", ())]
    known = same_names(ours, keys)  # none if we have other names than the model
    made: list[Group] = []
    for i, group in enumerate(saved):
        names: list[str] = list(group["params"])
        if names and len(group) == 1:
            # torch gives the options of a group that was divided to one of its parts.
            whole = [x for x in saved if same_names(names[:1], x.get("param_names", []))]
            if not whole:
                raise ValueError(
                    f"the state has no hyperparameters for {names}: it has if it is made "
                    "with flatten_optimizer_state_dict=True"
                )
            group = {**whole[0], "params": names}
        if 0 < len(same_names(names, group.get("param_names", []))) < len(names):
            warn_user(
                f"param_groups[{i}] joins groups of the state and takes, as in torch, the "
                f"hyperparameters of one, as lr={group.get('lr')}"
            )
        made.append({**group, "param_names": names})
        if not known:
            del made[i]["param_names"]
    return {**state_dict, "param_groups": made}


def find_entries(
    state_dict: StateDict,
    groups: list[Group],
    strict: bool,
    match: str,
    keywords: tuple[str, ...],
    counterparts: Counterparts,
) -> Match:
    """Find the saved entry of each parameter, by name if both sides have names.

    `keywords` name the hyperparameters; for the others see `Checkpoints.load_state_dict`.
    """
    if match not in ("names", "order"):
        raise ValueError(f"match={match!r}: allowed are 'names' and 'order'")
    fits = isinstance(state_dict.get("state"), dict)
    fits = fits and isinstance(state_dict.get("param_groups"), list | tuple)
    read: Any = state_dict["param_groups"] if fits else ()
    if not fits or not all(isinstance(x, dict) and "params" in x for x in read):
        raise ValueError(
            f"state_dict holds {sorted(map(str, state_dict))}: an optimizer's holds "
            "'state' and 'param_groups', each of which lists its 'params'"
        )
    _check_lists(read)
    state_dict = under_our_names(with_names(state_dict, groups), counterparts)
    saved, state = state_dict["param_groups"], state_dict["state"]
    named = all("param_names" in group for group in [*saved, *groups])
    # Equal names are found by order, because a name may be there twice.
    by_name = named and match == "names"
    if by_name and [g["param_names"] for g in saved] != [g["param_names"] for g in groups]:
        found = _by_name(saved, state, groups, strict, keywords)
    else:
        found = _by_order(saved, state, groups)
    # Last, because it warns, and what does not fit raises alone.
    known = {i for group in saved for i in group["params"]}
    return found._replace(others=_others(state, known))


def _by_order(saved: list[Group], state: Mapping[Any, Any], groups: list[Group]) -> Match:
    """Find the entries of groups that are as many and as long as the saved ones."""
    if len(saved) != len(groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: it has "
            f"{len(saved)}, the optimizer {len(groups)}"
        )
    options: list[dict[str, object]] = []
    for i, (mine, theirs) in enumerate(zip(groups, saved)):
        if len(mine["params"]) != len(theirs["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size "
                f"of optimizer's group: param_groups[{i}] has {len(theirs['params'])} "
                f"parameters, the optimizer's {len(mine['params'])}"
            )
        options.append(_options(theirs))
        if "param_names" in theirs and "param_names" not in mine:
            options[-1]["param_names"] = list(theirs["param_names"])
    entries = [[state.get(i) for i in theirs["params"]] for theirs in saved]
    return Match(options, entries, {}, LoadReport([], []))


def _check_lists(saved: list[Group]) -> None:
    """Raise unless each saved group lists its parameters, and its names if it has any."""
    for i, group in enumerate(saved):
        for key, kinds in ("params", int | str), ("param_names", str):
            x = group.get(key, [])
            if isinstance(x, list | tuple) and all(isinstance(y, kinds) for y in x):
                continue
            what = "numbers" if key == "params" else "strings"
            raise TypeError(
                f"the state's param_groups[{i}][{key!r}] is {x!r:.80}: allowed is a list "
                f"of {what}, as state_dict() writes it"
            )


def _others(state: Mapping[Any, Any], known: set[object]) -> dict[object, object]:
    """Return state that belongs to no parameter; `known` are the keys of parameters.

    torch would take an entry of another number for that of the parameter at this place.
    """
    others = {k: v for k, v in state.items() if k not in known}
    if lost := [k for k in others if str(k).isdigit()]:
        warn_user(
            f"{len(lost)} entries of the state are not loaded, because no group lists them "
            f"in its 'params': {lost[:3]}. Allowed are the numbers in 'params'"
        )
    return {k: v for k, v in others.items() if k not in lost}


def _by_name(
    saved: list[Group],
    state: dict[int, Entry],
    groups: list[Group],
    strict: bool,
    keywords: tuple[str, ...],
) -> Match:
    """Find the entries of the parameters by their names."""
    home = {name: i for i, group in enumerate(saved) for name in group["param_names"]}
    index = {n: i for group in saved for n, i in zip(group["param_names"], group["params"])}
    ours = [name for group in groups for name in group["param_names"]]
    known = [name for group in saved for name in group["param_names"]]
    for side, names in (("optimizer", ours), ("state", known)):
        if len(names) > len({*names}):
            twice = max(names, key=names.count)
            raise ValueError(f"the {side} has {twice!r} twice: allowed is match='order'")
    theirs = same_names(ours, list(index))
    used = set(theirs.values())
    report = LoadReport(
        [name for name in ours if name not in theirs],
        [name for name in index if name not in used],
    )
    if ours and index and not theirs:
        raise ValueError(
            f"nothing would be loaded: the state has the names {report.unexpected}, the "
            f"optimizer {report.missing}. match='order' loads by order, as torch does"
        )
    # Names without an entry, as those of frozen parameters, lose nothing.
    lost = [name for name in report.unexpected if state.get(index[name])]
    pairs = [pair for g in groups for pair in zip(g["param_names"], g["params"])]
    frozen = {name for name, p in pairs if not p.requires_grad}  # these need no state
    gaps = {"the state has nothing for": [x for x in report.missing if x not in frozen]}
    gaps["the optimizer has no parameters"] = lost
    if strict and any(gaps.values()):
        sides = ", and ".join(f"{text} {names}" for text, names in gaps.items() if names)
        raise ValueError(
            f"{sides}: strict=False loads what both have, and starts the optimizer's other "
            "parameters with fresh state"
        )
    homes: list[list[int]] = []
    entries: list[list[Entry | None]] = []
    for place, group in enumerate(groups):
        names = [theirs.get(name) for name in group["param_names"]]
        homes.append(list(dict.fromkeys(home[n] for n in names if n is not None)))
        if not names and len(saved) == len(groups):
            homes[-1] = [place]  # an empty group
        entries.append([None if n is None else state.get(index[n]) for n in names])
    _check_regrouped(saved, groups, homes, ("initial_lr", *keywords))
    # A group takes the saved options of the first of its parameters.
    options = [_options(saved[sources[0]]) if sources else {} for sources in homes]
    return Match(options, entries, {}, report)


def _check_regrouped(
    saved: list[Group],
    groups: list[Group],
    homes: list[list[int]],
    keywords: tuple[str, ...],
) -> None:
    """Raise if groups that were joined or divided differ in a hyperparameter.

    `homes` lists, for each group, the saved groups that its parameters come from.
    """
    parts = [[i for i, some in enumerate(homes) if j in some] for j in range(len(saved))]
    sides = ("the state's", saved, homes), ("the optimizer's", groups, parts)
    for name, (whose, owners, shared) in product(keywords, sides):
        for some in shared if any(name in group for group in saved) else ():
            values = {i: owners[i].get(name) for i in some}
            if any(x != values[some[0]] for x in values.values()):
                raise ValueError(
                    f"{whose} param_groups {some} share a group of the other side and "
                    f"differ in {name}: {values}. Make groups as the state's, or keep the "
                    f"optimizer's values by deleting {name!r} from the state's param_groups"
                )


def same_names(ours: list[str], saved: list[str]) -> dict[str, str]:
    """Map our names to the saved ones, which may differ by torch's wrappers."""
    matches = {name: name for name in set(ours).intersection(saved)}
    bare = dict(zip(_bare(saved), saved))
    for name, short in zip(ours, _bare(ours)):
        if name not in matches and short in bare and bare[short] not in matches:
            matches[name] = bare[short]
    return matches


def without_wrappers(name: str) -> str:
    """Return a parameter's name without what torch.compile, checkpointing and FSDP add."""
    return ".".join([x for x in name.split(".") if x not in _WRAPPERS])


def _bare(names: list[str]) -> list[str]:
    """Return the names that the parameters have in the unwrapped module."""
    parts = [without_wrappers(name).split(".") for name in names]
    # DistributedDataParallel adds "module" to all names. Otherwise it is the model's own.
    while parts and all(len(x) > 1 and x[0] == "module" for x in parts):
        parts = [x[1:] for x in parts]
    bare = [".".join(x) for x in parts]
    return bare if len(set(bare)) == len(bare) else names


def _options(group: Group) -> dict[str, object]:
    """Return a saved group's options that are to be loaded."""
    left_out = ("params", "param_names", *POLICY)
    return {k: v for k, v in group.items() if k not in left_out}


def renamed(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return options under other names; those that `names` lacks keep theirs."""
    return {names.get(name, name): x for name, x in options.items()}


def torchs_options(counterparts: Counterparts) -> set[str]:
    """Return the arguments of torch.optim's class, or nothing if it has none."""
    cls = counterparts.in_torch
    # Of its bases too, because one sets an option of its base that it does not take.
    bases = () if cls is None else cls.__mro__[:-2]
    return {k for base in bases for k in inspect.signature(base).parameters}


def under_our_names(state_dict: StateDict, counterparts: Counterparts) -> StateDict:
    """Convert groups and entries of other libraries to our names and values."""
    state, theirs = dict(state_dict["state"]), torchs_options(counterparts)
    groups: list[Group] = []
    for group in state_dict["param_groups"]:
        group = {**group, **counterparts.our_options(group)}
        # torch.distributed.checkpoint's {} stands for an option that is at its default.
        empty = {k for k, x in group.items() if isinstance(x, dict) and not x}
        left_out = {k for k in empty if k in POLICY or (theirs and k not in theirs)}
        group = {k: x for k, x in group.items() if k not in left_out}
        group = renamed(group, counterparts.torch_names)
        if DECAY in group or ("decouple_lr" in group and "decouple_wd" not in empty):
            # Ours and optimi's groups without either name always decouple decay.
            group.setdefault("decouple_wd", group.pop(DECAY, True))
        for i in group["params"]:
            if not isinstance(state.get(i), dict):
                continue
            flat = {**state[i], **state[i].get("__bnb_optimizer_quant_state__", {})}
            if "state1" in flat:
                state[i] = _from_bitsandbytes(flat, group, counterparts.bitsandbytes)
            elif "setup" in group:  # optimi's
                state[i] = _from_optimi(state[i], group, counterparts)
            elif not counterparts.torch_counts_steps:
                # A step was taken if the entry holds anything.
                begun = any(x is not None for x in state[i].values())
                state[i] = {"step": _ONE.clone(), **state[i]} if begun else state[i]
            elif state[i]:
                empty = {name: _ONE.new_empty(0) for name in counterparts.unused}
                state[i] = {**empty, **state[i]}
        if "setup" in group:
            betas = [group.pop(b) for b in ("beta1", "beta2", "beta3") if b in group]
            if betas:
                group["betas"] = tuple(betas)
            group = {k: x for k, x in group.items() if k not in ("setup", "step")}
        groups.append(group)
    return {"state": state, "param_groups": groups}


def _from_optimi(saved: Entry, group: Group, counterparts: Counterparts) -> Entry:
    """Convert optimi's entry. Its Adam family keeps moments with bias correction."""
    no_moments = ("group", "step", "eps_sq", "mean_square")
    entry = {
        counterparts.optimi_names.get(name, name): x
        for name, x in saved.items()
        if name not in no_moments and x is not None
    }
    first = next((x for x in entry.values() if isinstance(x, Tensor)), _ONE)
    comp, shape = entry.get("kahan_comp"), first.shape
    if comp is not None and (not comp.is_floating_point() or comp.shape != shape):
        del entry["kahan_comp"]  # optimi's placeholder for a kernel argument
    # If optimi counts no steps, no bias correction needs them, and 1 will do.
    step = saved.get("step", group.get("step", 1))
    if entry:
        home = step.device if isinstance(step, Tensor) else "cpu"
        step = torch.as_tensor(step, dtype=torch.float32, device=home)
        entry["step"] = step.reshape(())
    if "eps" in group:
        last = "beta3" if "beta3" in group else "beta2"
        pairs = (("exp_avg", "beta1"), ("exp_avg_diff", "beta2"), ("exp_avg_sq", last))
        for name, beta in pairs:
            if name in entry:
                whole = 1.0 - group[beta] ** float(step)
                wide = torch.promote_types(entry[name].dtype, torch.float64)
                entry[name] = entry[name].to(wide).mul(whole).to(entry[name].dtype)
    for name in counterparts.optimi_negated:
        if name in entry:
            entry[name] = -entry[name]
    return entry


def _from_bitsandbytes(saved: Entry, group: Group, names: tuple[str, ...]) -> Entry:
    """Convert bitsandbytes' entry, and its group's options in place.

    Its 8 bits are indices of a table, with a scale for each 256.
    """
    two, buffer = "state2" in saved, names == ("momentum_buffer",)
    # RMSprop and Adagrad have an eps, and LAMB and LARS a unorm_vec.
    one = group["eps"] == 0 and buffer == (group["betas"][1] == 0)
    whole = ("qmap1" in saved) == ("absmax1" in saved) and "unorm_vec" not in saved
    if len(names) != 1 + two or not (two or one) or not whole:
        raise ValueError(
            f"bitsandbytes' {sorted(saved)} with betas={group['betas']} and "
            f"eps={group['eps']} are not of this rule, or not in blocks of 256"
        )
    group["decouple_wd"] = not buffer  # its Adam decouples decay as its AdamW
    if buffer:
        group |= {"momentum": group["betas"][0], "dampening": 0, "nesterov": False}
    entry: Entry = {"step": saved["step"]}
    for k, name in enumerate(names, 1):
        entry[name] = x = saved[f"state{k}"]
        if x.dtype == torch.uint8:
            scale = saved[f"absmax{k}"].repeat_interleave(256)[: x.numel()]
            entry[name] = saved[f"qmap{k}"][x.long()] * scale.view(x.shape)
    return entry


def check_kind(options: Group, decay: str) -> None:
    """Warn if the kind of weight decay changes."""
    before = bool(options.get("decouple_lr")), any(map(options.get, _OUR_DECAYS))
    now = "fully" in decay, decay != "l2"
    if "decouple_wd" in options and options.get("weight_decay") and before != now:
        warn_user(
            f"weight_decay={options['weight_decay']} of the state is for (decouple_lr, "
            f"decouple_wd)={before}, and this optimizer has {now}: decay changes its kind"
        )


def as_torchs(
    name: str, keywords: tuple[str, ...], counterparts: Counterparts, state_dict: StateDict
) -> StateDict:
    """Convert our state dict for torch.optim's class of the same name, or raise."""
    cls = counterparts.in_torch
    if cls is None:
        raise ValueError(f"torch.optim has no {name} that could load this state")
    takes, names = inspect.signature(cls).parameters, counterparts.torch_names
    theirs = {ours: key for key, ours in names.items()}
    keywords = tuple([names.get(key, key) for key in keywords])
    ours_alone = {*keywords, *POLICY} - {*takes, *theirs, "max_lr"}
    groups: list[Group] = []
    for group in state_dict["param_groups"]:
        group = renamed(group, names)
        options = {k: v for k, v in group.items() if k not in ours_alone}
        options = renamed(options, theirs)
        if not options["max_lr"]:
            del options["max_lr"]  # some schedules add an option of the same name
        lost = [f"a schedule for {k}" for k in keywords if k not in group]
        lost += [f"{k}={group[k]}" for k in ("cautious", "hooks") if group.get(k)]
        kinds = [k for k in _OUR_DECAYS if k in keywords and k not in theirs and group[k]]
        if kinds and (decay := group.get("weight_decay", 0)) != 0:
            lost.append(f"{kinds[0]}=True and weight_decay={decay}")
        if lost:
            raise ValueError(f"torch.optim.{cls.__name__} cannot go on with {lost[0]}")
        options |= {"foreach": None, "differentiable": False}
        if "fused" in takes:
            options["fused"] = None
        groups.append(options | counterparts.torch_options(group))
    dropped = ("kahan_comp",) if counterparts.torch_counts_steps else ("kahan_comp", "step")
    unused = counterparts.unused
    indices = {i for group in groups for i in group["params"]}
    state = dict(state_dict["state"])
    for i in indices & {*state}:
        entry = {k: x for k, x in state[i].items() if k not in dropped}
        entry = {k: x for k, x in entry.items() if k not in unused or x.numel()}
        # torch loads without copying, and both optimizers would write to the tensors.
        state[i] = pytree.tree_map_only(Tensor, torch.clone, entry)
    return {**state_dict, "state": state, "param_groups": groups}


_ONE = torch.ones((), dtype=torch.float32, device="cpu")  # a step count


@cache
def _fields() -> set[str]:
    """Return the fields of the package's rules: in another's entry no wrapper's."""
    values = FunctionalOptimizer.__subclasses__()
    own = [x.entry_fields for x in values if x.__module__.startswith("optimi_func.")]
    return {*chain(*own)} - {"z"}  # which the wrapper of Schedule-Free's authors adds


def checked(
    bound: FunctionalOptimizer, root: str, name: object, p: Tensor, saved: Entry
) -> Entry:
    """Return a saved entry with numbers as tensors and no None. Others' values stay.

    Raises if the rule cannot use it. In errors it is `root[name]`.
    """
    rule, path = bound.rule, f"[{name!r}]"
    if not isinstance(saved, dict):
        raise ValueError(f"{root}{path} is {saved!r}: allowed is a dict")
    names = storage.own_names(rule)
    entry = {k: v for k, v in saved.items() if k in names and v is not None}
    for key in rule.counted:
        if isinstance(entry.get(key), (int, float)):
            dtype = torch.float32 if key == "step" else torch.float64
            entry[key] = torch.tensor(float(entry[key]), dtype=dtype, device="cpu")
    before = saved.get(TRAIN_PARAM) if rule.eval_point is not None else None
    entry.update(storage.as_counts(root, path, rule.counted, entry))
    every = entry if before is None else {**entry, TRAIN_PARAM: before}
    numbers = bound.shape_numbers
    storage.check_entry(rule, numbers, root, path, p, every, any_device=True)
    for key, x in every.items():
        number = x.is_floating_point() or (x.is_complex() and p.is_complex())
        odd = x.is_meta or x.layout != torch.strided
        if odd or (key == TRAIN_PARAM and not number):
            raise ValueError(
                f"{root}{path}[{key!r}] is {x.layout} of {x.dtype} on {x.device}, allowed "
                "are floating dtypes, torch.strided and memory"
            )
    expected = {*names, _TURNED_OFF.get(rule.state._fields)}
    if rule.state._fields and not storage.missing_fields(rule, entry):
        expected.add("momentum_buffer")  # pytorch_optimizer's Lookahead puts it beside them
    others = map(str, saved.keys() - expected)
    strange = sorted(_fields().intersection(map(storage.field_of, others)) - expected)
    if strange or (
        entry and (storage.missing_fields(rule, entry) or not {*rule.counted} <= {*entry})
    ):
        raise ValueError(
            f"{root}{path} holds {sorted([k for k in saved if saved[k] is not None])}: the "
            f"optimizer needs {sorted({*rule.state._fields, *rule.counted})}"
            + (f", and {strange} are another rule's" if strange else ", or nothing")
        )
    return {**{k: v for k, v in saved.items() if k not in names}, **entry}


def as_tree(rule: Rule, entries: dict[str, Entry], like: Tensor) -> TreeState:
    """Copy complete entries, by name, to a pure state, with its count where `like` is."""
    steps = {name: float(entry["step"]) for name, entry in entries.items()}
    if len(set(steps.values())) > 1:
        raise ValueError(
            f"a tree has one step count, and these parameters have taken {steps} steps"
        )
    leaves: dict[str, LeafState] = {}
    for name, entry in entries.items():
        state, comp = pytree.tree_map_only(
            Tensor, torch.clone, storage.state_in(rule, entry)
        )
        running = rule.running(*[entry[key] for key in rule.running._fields])
        leaves[name] = LeafState(state, comp, running_tensors(running, like.device))
    count = max(steps.values(), default=0.0)
    step = torch.tensor(count, dtype=torch.float32, device=like.device)
    return TreeState(step, leaves)


def from_tree(state: TreeState) -> dict[str, Entry]:
    """Return the entries of a tree whose parameters are a dict, by name."""
    entries: dict[str, Entry] = {}
    for name, leaf in state.leaves.items():
        comp = None if storage.seed_in(leaf.kahan_comp) is not None else leaf.kahan_comp
        entry = storage.entry_of(leaf.rule_state, comp)
        entries[name] = {**entry, **leaf.running._asdict(), "step": state.step}
    return entries


def common(
    bounds: list[FunctionalOptimizer], names: list[list[str]]
) -> FunctionalOptimizer:
    """Merge the groups' pure optimizers into one, if they differ in lr or weight_decay.

    Either becomes a dict by parameter name then.
    """
    changed: dict[str, object] = {}
    for name in bounds[0].keywords:
        values = [getattr(bound, name) for bound in bounds]
        if all(x == values[0] for x in values):
            continue
        if name not in ("lr", "weight_decay"):
            raise ValueError(
                f"the groups differ in hyperparameter {name}: {values}; a pure optimizer "
                "has one, and by name only lr and weight_decay"
            )
        changed[name] = {n: x for x, part in zip(values, names) for n in part}
    return replace(bounds[0], **changed)
