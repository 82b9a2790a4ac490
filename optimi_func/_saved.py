"""Saved states, from whichever library: whose entry is whose, and what is in it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func._functional import FunctionalOptimizer
from optimi_func._rule import Rule
from optimi_func._storage import (
    check_codes,
    entry_of,
    field_names,
    field_of,
    is_scale,
    names_in,
    state_in,
)
from optimi_func._tree import LeafState, TreeState, running_tensors

# How the step is carried out is the running optimizer's affair, not the file's.
POLICY = (
    *("storage", "kahan_sum", "state_dtype", "compile", "foreach", "triton"),
    *("capturable", "gradient_release"),
)
# Options that torch's classes do not have.
_OURS_ALONE = (
    *("decouple_wd", "decouple_lr", "kahan_sum", "state_dtype", "compile", "triton"),
    *("storage", "gradient_release", "torch_init", "ns_dtype", "split"),
    *("cautious_decay", "corrected_decay", "cautious"),
)
# Of these, the kinds of decay.
_OUR_DECAYS = ("decouple_lr", "decouple_wd", "cautious_decay", "corrected_decay")
# What optimi's states hold beside their moments.
_OPTIMIS_OWN = ("group", "step", "eps_sq", "mean_square")

# What the parameter was, in the state of a class that is in eval mode.
TRAIN_PARAM = "train_param"

# What torch.compile, activation checkpointing and FullyShardedDataParallel put into names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

Entry = dict[str, Any]
Group = dict[str, Any]


class LoadReport(NamedTuple):
    """Which parameters a loaded state did not fit, by name."""

    missing: list[str]  # the optimizer's, of which the state has nothing: begin anew
    unexpected: list[str]  # the state's, which the optimizer does not have


def _no_options(group: Group) -> Group:
    del group
    return {}


@dataclass(frozen=True, kw_only=True)
class Counterparts:
    """An optimizer of the same name in torch.optim and in optimi, as far as it differs.

    Attributes:
        in_torch: torch.optim's class, where it can go on from a state of ours.
        torch_counts_steps: Whether that class keeps a step count for each parameter.
        torch_options: A group's options for torch that are another value there.
        our_options: A group's options of torch's that are another value here.
        optimi_names: Our name of what optimi's state has under its own.
        optimi_negated: What optimi's state has with the opposite sign, by our name.
    """

    in_torch: type[torch.optim.Optimizer] | None = None
    torch_counts_steps: bool = True
    torch_options: Callable[[Group], Group] = _no_options
    our_options: Callable[[Group], Group] = _no_options
    optimi_names: Mapping[str, str] = field(default_factory=dict[str, str])
    optimi_negated: tuple[str, ...] = ()


class Match(NamedTuple):
    """A saved state, laid out as the optimizer is."""

    groups: list[dict[str, Any]]  # for each of the optimizer's, the saved options
    entries: list[list[Entry | None]]  # likewise, for each of its parameters
    others: dict[Any, Any]  # state that is no parameter's
    report: LoadReport


def find_entries(
    state_dict: dict[str, Any],
    groups: list[Group],
    strict: bool,
    match: str,
    counterparts: Counterparts,
) -> Match:
    """Find the saved entry of each parameter: by name where both sides have names.

    Args:
        state_dict: As `Optimizer.state_dict` makes it.
        groups: The optimizer's.
        strict: Refuse names that only one side has.
        match: "names", or "order" to look at no names.
        counterparts: What the optimizer is in other libraries.

    Raises:
        ValueError: Groups or names that do not fit, or none that does.
    """
    if match not in ("names", "order"):
        raise ValueError(f"match={match!r}: allowed are 'names' and 'order'")
    if not {"state", "param_groups"} <= set(state_dict) or not all(
        "params" in group for group in state_dict["param_groups"]
    ):
        raise ValueError(
            f"state_dict holds {sorted(map(str, state_dict))}: an optimizer's holds "
            "'state' and 'param_groups', each of which lists its 'params'"
        )
    state_dict = _under_our_names(state_dict, counterparts)
    saved, state = state_dict["param_groups"], state_dict["state"]
    known = {i for group in saved for i in group["params"]}
    others = {k: v for k, v in state.items() if k not in known}
    named = all("param_names" in group for group in [*saved, *groups])
    if named and match == "names":
        return _by_name(saved, state, groups, others, strict)
    if len(saved) != len(groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: it has "
            f"{len(saved)}, the optimizer {len(groups)}"
        )
    options: list[dict[str, Any]] = []
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
    return Match(options, entries, others, LoadReport([], []))


def _by_name(
    saved: list[dict[str, Any]],
    state: dict[Any, Any],
    groups: list[dict[str, Any]],
    others: dict[Any, Any],
    strict: bool,
) -> Match:
    home = {name: group for group in saved for name in group["param_names"]}
    index = {n: i for group in saved for n, i in zip(group["param_names"], group["params"])}
    ours = [name for group in groups for name in group["param_names"]]
    theirs = same_names(ours, list(index))
    found = set(theirs.values())
    report = LoadReport(
        [name for name in ours if name not in theirs],
        [name for name in index if name not in found],
    )
    if ours and index and not theirs:
        raise ValueError(
            f"nothing would be loaded: the state has the names {report.unexpected}, the "
            f"optimizer {report.missing}. match='order' loads by order, as torch does"
        )
    if strict and any(report):
        raise ValueError(
            f"the state has nothing for {report.missing}, and the optimizer has no "
            f"parameters {report.unexpected}: strict=False lets the former begin anew "
            "and leaves out the latter"
        )
    options: list[dict[str, Any]] = []
    entries: list[list[Entry | None]] = []
    for place, group in enumerate(groups):
        names = group["param_names"]
        homes = [home[theirs[name]] for name in names if name in theirs]
        if not homes and not names and len(saved) == len(groups):
            homes = [saved[place]]  # an empty group
        # A group goes on with the numbers that the first of its parameters had.
        options.append(_options(homes[0]) if homes else {})
        places = [index[theirs[name]] if name in theirs else None for name in names]
        entries.append([state.get(place) for place in places])
    return Match(options, entries, others, report)


def same_names(ours: list[str], saved: list[str]) -> dict[str, str]:
    """To names of ours the saved ones: the same, or the same without torch's wrappers."""
    found = {name: name for name in set(ours).intersection(saved)}
    bare = dict(zip(_bare(saved), saved))
    for name, short in zip(ours, _bare(ours)):
        if name not in found and short in bare and bare[short] not in found:
            found[name] = bare[short]
    return found


def without_wrappers(name: str) -> str:
    """A parameter's name without what torch.compile, checkpointing and FSDP put into it."""
    return ".".join([x for x in name.split(".") if x not in _WRAPPERS])


def _bare(names: list[str]) -> list[str]:
    """The names that a module's parameters have where nothing of torch's is around it."""
    parts = [without_wrappers(name).split(".") for name in names]
    # DistributedDataParallel's: of all of them, or it is an attribute of the model's own.
    while parts and all(len(x) > 1 and x[0] == "module" for x in parts):
        parts = [x[1:] for x in parts]
    bare = [".".join(x) for x in parts]
    return bare if len(set(bare)) == len(bare) else names


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A saved group's options, without those of the running optimizer."""
    left_out = ("params", "param_names", *POLICY)
    return {k: v for k, v in group.items() if k not in left_out}


def _under_our_names(
    state_dict: dict[str, Any], counterparts: Counterparts
) -> dict[str, Any]:
    """Torch's and optimi's groups and entries as ours would be."""
    state = dict(state_dict["state"])
    groups: list[Group] = []
    for group in state_dict["param_groups"]:
        group = dict(group)
        group |= counterparts.our_options(group)
        if "decoupled_weight_decay" in group:  # torch's
            group.setdefault("decouple_wd", group["decoupled_weight_decay"])
        for i in group["params"]:
            if isinstance(state.get(i), dict):
                if "setup" in group:  # optimi's
                    state[i] = _from_optimi(state[i], group, counterparts)
                elif not counterparts.torch_counts_steps:
                    state[i] = _begun(state[i])
        if "setup" in group:
            betas = [group.pop(b) for b in ("beta1", "beta2", "beta3") if b in group]
            if betas:
                group["betas"] = tuple(betas)
            for key in ("setup", "step"):
                group.pop(key, None)
        groups.append(group)
    return {"state": state, "param_groups": groups}


def _begun(saved: Entry) -> Entry:
    """An entry without a step count, which holds something: some step was taken."""
    begun = any(x is not None for x in saved.values())
    return {"step": torch.ones(()), **saved} if begun else saved


def _from_optimi(saved: Entry, group: Group, counterparts: Counterparts) -> Entry:
    """Optimi's state as ours; its Adam and kin keep their moments corrected for bias."""
    entry = {
        counterparts.optimi_names.get(name, name): x
        for name, x in saved.items()
        if name not in _OPTIMIS_OWN and x is not None
    }
    first = next((x for x in entry.values() if isinstance(x, Tensor)), torch.empty(0))
    comp, shape = entry.get("kahan_comp"), first.shape
    if comp is not None and (not comp.is_floating_point() or comp.shape != shape):
        del entry["kahan_comp"]  # something to point a kernel at
    # Where it counts no steps, it corrects nothing by them.
    step: Any = saved.get("step", group.get("step", 1))
    if entry:
        entry["step"] = torch.as_tensor(step, dtype=torch.float32).reshape(())
    if "eps" in group:
        last = "beta3" if "beta3" in group else "beta2"
        pairs = (("exp_avg", "beta1"), ("exp_avg_diff", "beta2"), ("exp_avg_sq", last))
        for name, beta in pairs:
            if name in entry:
                whole = 1.0 - group[beta] ** float(step)
                entry[name] = entry[name].double().mul(whole).to(entry[name].dtype)
    for name in counterparts.optimi_negated:
        if name in entry:
            entry[name] = -entry[name]
    return entry


def as_torchs(
    name: str,
    keywords: tuple[str, ...],
    counterparts: Counterparts,
    state_dict: dict[str, Any],
) -> dict[str, Any]:
    """Our state as torch.optim's class of the same name has it.

    Args:
        name: Of the class.
        keywords: The numbers and choices that it takes.
        counterparts: Names torch's.
        state_dict: Ours.

    Raises:
        ValueError: A class or an option that torch does not have.
    """
    cls = counterparts.in_torch
    if cls is None:
        raise ValueError(f"torch.optim has no {name} that could load this state")
    takes = inspect.signature(cls).parameters
    groups: list[Group] = []
    for group in state_dict["param_groups"]:
        made = {k: v for k, v in group.items() if k not in _OURS_ALONE}
        if made["max_lr"] is None:
            del made["max_lr"]  # some schedules have one of the same name
        if group["cautious"]:
            raise ValueError(f"torch.optim.{cls.__name__} cannot go on with cautious=True")
        kinds = [k for k in _OUR_DECAYS if k in keywords and group[k]]
        if "decoupled_weight_decay" in takes:
            made["decoupled_weight_decay"] = "decouple_wd" in kinds
            kinds = [k for k in kinds if k != "decouple_wd"]
        if kinds and group["weight_decay"] != 0:
            raise ValueError(
                f"torch.optim.{cls.__name__} cannot go on with {kinds[0]}=True and "
                f"weight_decay={group['weight_decay']}"
            )
        made |= {"foreach": None, "differentiable": False}
        if "fused" in takes:
            made["fused"] = None
        groups.append(made | counterparts.torch_options(group))
    dropped = ("kahan_comp",) if counterparts.torch_counts_steps else ("kahan_comp", "step")
    indices = {i for group in groups for i in group["params"]}
    state = {
        # torch loads tensors as they are: two optimizers would go on with one memory.
        i: {
            k: x.clone() if isinstance(x, Tensor) else x
            for k, x in entry.items()
            if k not in dropped
        }
        for i, entry in state_dict["state"].items()
        if i in indices
    }
    state.update((k, x) for k, x in state_dict["state"].items() if k not in indices)
    return {**state_dict, "state": state, "param_groups": groups}


def own_names(rule: Rule[Any, Any]) -> tuple[str, ...]:
    """What of a parameter's state is the optimizer's: all else there is others'."""
    counted = ("step", *rule.running._fields)
    return (*counted, *field_names(rule.state._fields), "kahan_comp")


def checked(rule: Rule[Any, Any], name: str, p: Tensor, saved: Entry) -> Entry:
    """A saved entry, if it is one that the rule can go on from; others' part is not read.

    Args:
        rule: The mathematics.
        name: How errors call the entry.
        p: Its parameter.
        saved: The entry, under our names.

    Raises:
        ValueError: Fields, shapes or values that do not fit.
    """
    if not isinstance(saved, dict):
        raise ValueError(f"{name} is {saved!r}: allowed is a dict")
    names = own_names(rule)
    entry = {k: v for k, v in saved.items() if k in names and v is not None}
    counted = ("step", *rule.running._fields)
    for key in counted:
        if isinstance(entry.get(key), int | float):
            dtype = torch.float32 if key == "step" else torch.float64
            entry[key] = torch.tensor(float(entry[key]), dtype=dtype)
    for key, x in entry.items():
        if isinstance(x, Tensor):
            check_codes(f"{name}[{key!r}]", key, x, p)
        shape = () if key in counted else p.shape
        if not isinstance(x, Tensor) or (x.shape != shape and not is_scale(key)):
            found = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
            raise ValueError(
                f"{name}[{key!r}] is {found}, allowed is a tensor of shape {tuple(shape)}"
            )
        integral = key in ("step", "kahan_comp") or key not in rule.state._fields
        if x.is_meta or not (x.is_floating_point() or integral):
            raise ValueError(
                f"{name}[{key!r}] has dtype {x.dtype} on {x.device}, allowed are floating "
                "dtypes and memory"
            )
    before = saved.get(TRAIN_PARAM) if rule.eval_point is not None else None
    if before is not None:
        is_like_p = isinstance(before, Tensor) and before.shape == p.shape
        if not is_like_p or before.is_meta or not before.is_floating_point():
            found = tuple(before.shape) if isinstance(before, Tensor) else repr(before)
            raise ValueError(
                f"{name}[{TRAIN_PARAM!r}] is {found}, allowed is a floating tensor of "
                f"shape {tuple(p.shape)}"
            )
    needed = {*rule.state._fields, *counted}
    if entry and not needed <= set(map(field_of, entry)):
        raise ValueError(
            f"{name} holds {sorted(saved)}: the optimizer needs {sorted(needed)}, or "
            "nothing"
        )
    return {**{k: v for k, v in saved.items() if k not in names}, **entry}


def as_tree(rule: Rule[Any, Any], entries: dict[str, Entry], like: Tensor) -> TreeState:
    """The entries of named parameters as a pure optimizer's state, in memory of its own.

    Args:
        rule: The mathematics.
        entries: By name; each complete.
        like: A parameter, for the device.

    Raises:
        ValueError: Parameters that have taken different numbers of steps.
    """
    steps = {name: float(entry["step"]) for name, entry in entries.items()}
    if len(set(steps.values())) > 1:
        raise ValueError(
            f"a tree has one step count, and these parameters have taken {steps} steps"
        )
    leaves: dict[str, LeafState] = {}
    for name, entry in entries.items():
        mine = {key: entry[key].clone() for key in names_in(rule.state._fields, entry)}
        running = rule.running(*[entry[key] for key in rule.running._fields])
        running = running_tensors(running, like.device)
        leaves[name] = LeafState(*state_in(rule, mine), running)
    count = max(steps.values(), default=0.0)
    return TreeState(torch.tensor(count, device=like.device), leaves)


def from_tree(state: TreeState) -> dict[str, Entry]:
    """The entries of a tree whose parameters are a dict by name."""
    entries: dict[str, Entry] = {}
    for name, leaf in state.leaves.items():
        entries[name] = {
            **entry_of(leaf.rule_state, leaf.kahan_comp),
            **leaf.running._asdict(),
            "step": state.step,
        }
    return entries


def common(
    bounds: list[FunctionalOptimizer], names: list[list[str]]
) -> FunctionalOptimizer:
    """One optimizer for all groups: lr and weight_decay by name where they differ.

    Args:
        bounds: Each group's.
        names: Its parameters'.

    Raises:
        ValueError: Groups that differ in anything else.
    """
    numbers: dict[str, Any] = {}
    for number in fields(bounds[0]):
        found = [getattr(bound, number.name) for bound in bounds]
        if all(x == found[0] for x in found):
            continue
        if number.name not in ("lr", "weight_decay"):
            raise ValueError(
                f"the groups differ in hyperparameter {number.name}: {found}; a pure "
                "optimizer has one, and by name only lr and weight_decay"
            )
        numbers[number.name] = {n: x for x, some in zip(found, names) for n in some}
    return replace(bounds[0], **numbers)
