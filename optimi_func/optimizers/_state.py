"""The state of a class's parameters: made, checked, completed, saved and loaded.

`state[p]` is a flat dict: `step`, the rule's tensors and, where kept, `kahan_comp`, beside
whatever others put there, which is theirs: it is neither read nor dropped. What other
libraries and files keep instead is in `_saved`.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor

from optimi_func._checks import check_param, check_taken
from optimi_func._codes import alike, recast_remainder, remainder_dtype
from optimi_func._distributed import (
    all_reduce_all,
    check_placed,
    same_placements,
    to_local,
)
from optimi_func._leaf import init_leaf
from optimi_func._rule import Rule
from optimi_func._saved import Entry, Match, checked, from_tree, own_names
from optimi_func._storage import check_codes, entry_of, field_of, has_field, is_scale
from optimi_func._stored import has_codes, owned, restored
from optimi_func._tree import TreeState, running_tensors
from optimi_func.execution.plans import Spec
from optimi_func.execution.tensors import check_writable, has_memory, is_expanded, is_plain
from optimi_func.optimizers._groups import Group, Path, group_storage, named_params


def ensure_state(
    states: Mapping[Any, Entry],
    group: Group,
    spec: Spec,
    p: Tensor,
    made: dict[Tensor, Entry],
) -> Entry:
    """A parameter's state as its group asks for it now, checked and completed.

    Args:
        states: The optimizer's.
        group: The parameter's.
        spec: The group's rule and where it counts steps.
        p: The parameter.
        made: Where the state is put; what is there already is the answer.

    Raises:
        ValueError, TypeError: A parameter or a state that no step could use.
    """
    if p in made:
        return made[p]
    rule, capturable = spec.rule, spec.capturable
    state = states.get(p, {})
    path = Path(group, p)
    check_param(path, p)
    check_taken(rule, path, p)
    check_placed(path, p)
    check_writable(path, *to_local([p]))
    _check_state(rule, path, p, {k: state[k] for k in own_names(rule) if k in state})
    names = rule.state._fields
    missing = [name for name in names if not has_field(state, name)]
    otherwise = _kept_otherwise(spec, p, state)
    kept = remainder_dtype(p, spec.storage.param)
    comp = state.get("kahan_comp")
    # A compensation of any floating dtype is one.
    recast = comp is not None and kept is not None and not alike(comp.dtype, kept)
    device = p.device if capturable else torch.device("cpu")
    counted = ("step", *rule.running._fields)
    astray = [k for k in counted if k in state and state[k].device != device]
    compensated = comp is None if kept is None else comp is not None and not recast
    uncounted = [k for k in counted if k not in state]
    if uncounted or missing or astray or otherwise or not compensated:
        state = dict(state)
        state.update((name, state[name].to(device)) for name in astray)
        leaf = init_leaf(rule, p, spec.storage)
        fresh = entry_of(leaf.state, leaf.comp)
        if "step" not in state or (missing and len(missing) == len(names)):
            # Also where momentum appears in mid-run: its buffer has a first step.
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        running = running_tensors(rule.running(), device)
        state.update((k, x) for k, x in running._asdict().items() if k not in state)
        state.update({k: x for k, x in fresh.items() if field_of(k) in missing})
        for name in otherwise:
            state = restored(rule, p, state, name, getattr(leaf.state, name))
        if kept is None:
            state.pop("kahan_comp", None)
        elif comp is None:
            state["kahan_comp"] = fresh["kahan_comp"]
        elif recast:
            state["kahan_comp"] = recast_remainder(p, comp, kept)
    made[p] = state
    return state


def _kept_otherwise(spec: Spec, p: Tensor, state: Entry) -> list[str]:
    """The fields that are in codes where the storage of now asks for others, or not."""
    names = [name for name in spec.rule.state._fields if has_field(state, name)]
    coded = [name for name in names if state.get(name) is None]
    if not names or (spec.storage.moments != "8bit" and not coded):
        return []
    fresh = init_leaf(spec.rule, torch.empty_like(p, device="meta"), spec.storage).state
    wanted = [name for name in names if not isinstance(getattr(fresh, name), Tensor)]
    return [name for name in names if (name in coded) != (name in wanted)]


def _check_state(
    rule: Rule[Any, Any], path: object, p: Tensor, state: dict[str, Any]
) -> None:
    """Refuse a state that no longer fits its parameter."""
    counted = ("step", *rule.running._fields)
    for name, x in state.items():
        if x is None:
            continue  # as if it were not there
        if not isinstance(x, Tensor):
            raise TypeError(f"state{path}[{name!r}]={x!r}: allowed is a tensor")
        if x.is_inference() and not p.is_inference():
            raise ValueError(
                f"state{path}[{name!r}] was made under inference_mode and cannot be "
                "written to: clone it outside"
            )
        check_codes(f"state{path}[{name!r}]", name, x, p)
        if is_scale(name):
            continue
        if name not in counted and (x.shape != p.shape or x.device != p.device):
            raise ValueError(
                f"state{path}[{name!r}] has shape {tuple(x.shape)} on {x.device}, its "
                f"parameter {tuple(p.shape)} on {p.device}"
            )
        if is_expanded(x):
            raise ValueError(
                f"state{path}[{name!r}] is expanded (strides {x.stride()}): it cannot be "
                "written to; clone it"
            )
        if name not in counted and not same_placements(p, x):
            raise ValueError(
                f"state{path}[{name!r}] is not divided among processes as its parameter "
                "is: load it anew, after fully_shard or distribute_tensor"
            )


def insert_made(states: MutableMapping[Any, Entry], made: dict[Tensor, Entry]) -> None:
    """Let the state of parameters be what was made of it.

    A dict that is there already stays the one that others may hold.
    """
    for p, entry in made.items():
        known = states.get(p)
        if known is None:
            states[p] = entry
        elif known is not entry:
            for name in known.keys() - entry.keys():
                del known[name]
            known.update(entry)


def beside(rule: Rule[Any, Any], state: Entry) -> Entry:
    """What others keep in a parameter's state."""
    names = own_names(rule)
    return {name: x for name, x in state.items() if name not in names}


def wants_state_alone(states: Mapping[Any, Entry], groups: list[Group]) -> bool:
    """Whether this is the step by which torch.distributed.checkpoint makes state.

    There is no state, every lr is 0, on the host, and so is every gradient, in every
    process. It would move no parameter, but count as a step, and let L2 decay join
    the moments.
    """
    try:
        if any(isinstance(key, Tensor) for key in states):
            return False
    except RuntimeError:
        return False  # another thread's step puts state there now
    if not all(_is_zero(group["lr"]) for group in groups):
        return False
    params = [p for group in groups for p in group["params"]]
    params = [p for p in params if p.grad is not None]
    if not all(map(has_memory, params)):
        return False
    with torch.no_grad():
        grads = to_local([cast(Tensor, p.grad) for p in params])
        flags = [torch.count_nonzero(g) == 0 for g in grads]
        return bool(params) and all(map(bool, all_reduce_all(flags, params)))


def _is_zero(lr: Any) -> bool:
    """Whether lr is 0, as far as that is known without asking a device."""
    return not (isinstance(lr, Tensor) and lr.device.type != "cpu") and bool(lr == 0)


def without_shared_memory(packed: dict[str, Any], names: set[str]) -> None:
    """Make a packed state_dict one to save: no memory of others, plain types alone.

    Args:
        packed: As torch made it.
        names: Of what is ours in a parameter's state; the rest is saved as it is.
    """
    indices = {i for group in packed["param_groups"] for i in group["params"]}
    packed["state"] = {
        i: {k: _unshared(v) if k in names else v for k, v in x.items()}
        if i in indices
        else x
        for i, x in packed["state"].items()
    }
    for group in packed["param_groups"]:
        # Of a dtype torch.distributed.checkpoint makes no whole state_dict, and a class
        # is not loaded with weights_only=True.
        for name in ("state_dtype", "storage"):
            if group[name] is not None:
                group[name] = str(group[name])


def _unshared(x: Any) -> Any:
    """The tensor itself, or a copy where its memory holds more than it."""
    if not isinstance(x, Tensor):
        return x
    (part,) = to_local([x])
    if not is_plain(part) or part.is_meta:
        return x
    return x.clone() if part.untyped_storage().nbytes() > part.nbytes else x


def loaded_groups(
    found: Match,
    groups: list[Group],
    rule_of: Callable[[Group], Rule[Any, Any]],
    keep_dtypes: bool,
) -> tuple[list[Group], dict[Tensor, Entry]]:
    """What a matched state becomes, checked and copied: groups, and state of parameters.

    Args:
        found: The saved options and entries, laid out as the optimizer is.
        groups: The optimizer's, as they are.
        rule_of: A group's rule; refuses numbers out of range.
        keep_dtypes: Keep the file's, where else they are those of fresh state.

    Raises:
        ValueError: Numbers, fields or shapes that do not fit.
    """
    loaded: list[Group] = []
    made: dict[Tensor, Entry] = {}
    for mine, options, entries in zip(groups, found.groups, found.entries):
        first = sum(len(group["params"]) for group in loaded)
        places = list(range(first, first + len(entries)))
        group = {**mine, **options, "params": places}
        loaded.append(group)
        rule = rule_of(group)
        names = group.get("param_names", places)
        for name, p, saved in zip(names, mine["params"], entries):
            if saved is not None:
                entry = checked(rule, f"state[{name!r}]", p, saved)
                made[p] = owned(rule, p, group, group_storage(mine), entry, keep_dtypes)
    return loaded, made


def named_entries(
    states: Mapping[Any, Entry], group: Group, spec: Spec
) -> dict[str, Entry]:
    """By name, the completed state of the parameters that have one or will have.

    Raises:
        ValueError: Parameters without names.
    """
    return {
        name: ensure_state(states, group, spec, p, {})
        for name, p in named_params(group)
        if "step" in states.get(p, {}) or p.requires_grad
    }


def loaded_tree(
    state: TreeState,
    params: Mapping[str, Tensor],
    groups: list[Group],
    rule_of: Callable[[Group], Rule[Any, Any]],
) -> tuple[dict[Tensor, Entry], list[tuple[Tensor, Tensor]]]:
    """What a pure optimizer's state and parameters become, checked.

    Args:
        state: With `leaves` by name.
        params: Values for the parameters, by name.
        groups: The optimizer's.
        rule_of: A group's rule.

    Returns:
        The state of parameters, in memory of its own; and the parameters to write, each
        with its new value.

    Raises:
        ValueError: Names that no parameter has, shapes or fields that do not fit.
    """
    home = {name: (group, p) for group in groups for name, p in named_params(group)}
    entries = from_tree(state)
    for name, x in {**entries, **params}.items():
        if name not in home:
            raise ValueError(f"{name!r} is no parameter: allowed are {list(home)}")
        if isinstance(x, Tensor) and x.shape != home[name][1].shape:
            raise ValueError(
                f"params[{name!r}] has shape {tuple(x.shape)}, its parameter "
                f"{tuple(home[name][1].shape)}"
            )
    made: dict[Tensor, Entry] = {}
    for name, entry in entries.items():
        group, p = home[name]
        rule = rule_of(group)
        entry = checked(rule, f"state.leaves[{name!r}]", p, entry)
        with torch.no_grad():
            storage = group_storage(group)
            plain = storage.moments != "8bit" and not has_codes(rule, entry)
            made[p] = owned(rule, p, group, storage, entry, keep_dtypes=plain)
    return made, [(home[name][1], x) for name, x in params.items()]
