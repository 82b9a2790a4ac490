"""Entries of `optimizer.state`: made, checked, completed and loaded.

`state[p]` is a flat dict with `step`, the tensors of the rule's state and, if there is one,
`kahan_comp`. Other code may add values under other names, which are kept but never read.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor

from optimi_func.core.checks import check_param, check_taken, check_writable, is_expanded
from optimi_func.core.codes import alike, recast_remainder, remainder_dtype
from optimi_func.core.distributed import (
    all_reduce_all,
    check_placed,
    same_placements,
    to_local,
)
from optimi_func.core.leaf import init_leaf
from optimi_func.core.rule import Rule, Storage
from optimi_func.core.storage import (
    check_entry,
    entry_of,
    field_of,
    group_storage,
    missing_fields,
    own_names,
)
from optimi_func.core.torch_private import has_memory
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import TreeState, running_tensors
from optimi_func.state.convert import (
    Entry,
    Group,
    Match,
    check_kind,
    check_options,
    checked,
    from_tree,
)
from optimi_func.state.stored import has_codes, owned, restored


def ensure_state(
    states: Mapping[Any, Entry],
    made: dict[Tensor, Entry],
    path: object,
    p: Tensor,
    rule: Rule[Any, Any],
    storage: Storage,
    capturable: bool,
) -> Entry:
    """Return a parameter's entry, checked, completed and converted to a storage.

    Raises ValueError or TypeError if no step could use the parameter or its entry. The
    result is put into `made`, for `insert_made`, because `states` is not written to.
    capturable puts the step count and running scalars on p's device.
    """
    if p in made:
        return made[p]
    check_param(path, p)
    check_taken(rule, path, p)
    check_placed(path, p)
    check_writable(path, *to_local([p]))
    state = states.get(p, {})
    own = {k: state[k] for k in own_names(rule) if state.get(k) is not None}
    check_entry(rule, "state", path, p, own)
    _check_in_place(rule, path, p, own)
    fields = rule.state._fields
    missing = missing_fields(rule, state)
    converted = _fields_to_convert(rule, storage, p, state, missing)
    dtype = remainder_dtype(p, storage.param)
    comp = state.get("kahan_comp")
    # A compensation of any floating dtype can be used as it is.
    recast = comp is not None and dtype is not None and not alike(comp.dtype, dtype)
    device = p.device if capturable else torch.device("cpu")
    counted = ("step", *rule.running._fields)
    moved = [k for k in counted if k in state and state[k].device != device]
    compensated = comp is None if dtype is None else comp is not None and not recast
    uncounted = [k for k in counted if k not in state]
    if uncounted or missing or moved or converted or not compensated:
        state = dict(state)
        state.update((name, state[name].to(device)) for name in moved)
        leaf = init_leaf(rule, p, storage)
        fresh = entry_of(leaf.state, leaf.comp)
        if "step" not in state or (missing and len(missing) == len(fields)):
            # Restart if momentum is turned on later: its first step initializes the buffer.
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        running = running_tensors(rule.running(), device)
        state.update((k, x) for k, x in running._asdict().items() if k not in state)
        state.update({k: x for k, x in fresh.items() if field_of(k) in missing})
        for name in converted:
            state = restored(rule, p, state, name, getattr(leaf.state, name))
        if dtype is None:
            state.pop("kahan_comp", None)
        elif comp is None:
            state["kahan_comp"] = fresh["kahan_comp"]
        elif recast:
            state["kahan_comp"] = recast_remainder(p, comp, dtype)
    made[p] = state
    return state


def _fields_to_convert(
    rule: Rule[Any, Any], storage: Storage, p: Tensor, state: Entry, missing: list[str]
) -> list[str]:
    """Return the fields that are in codes and should not be, or the other way round."""
    names = [name for name in rule.state._fields if name not in missing]
    coded = [name for name in names if state.get(name) is None]
    if not names or (storage.moments != "8bit" and not coded):
        return []
    fresh = init_leaf(rule, torch.empty_like(p, device="meta"), storage).state
    return [
        name
        for name in names
        if (name in coded) == isinstance(getattr(fresh, name), Tensor)
    ]


def _check_in_place(rule: Rule[Any, Any], path: object, p: Tensor, entry: Entry) -> None:
    """Raise if a step could not write to a tensor of an entry."""
    counted = ("step", *rule.running._fields)
    for name, x in entry.items():
        if x.is_inference() and not p.is_inference():
            raise ValueError(
                f"state{path}[{name!r}] was made under inference_mode and cannot be "
                "written to: clone it outside"
            )
        if is_expanded(x):
            raise ValueError(
                f"state{path}[{name!r}] is expanded (strides {x.stride()}): it cannot be "
                "written to; clone it"
            )
        whole = name in rule.whole_fields
        if name not in counted and not same_placements(p, x, whole):
            raise ValueError(
                f"state{path}[{name!r}] is not divided among processes as its parameter "
                "is: load it again, after fully_shard or distribute_tensor"
            )


def insert_made(states: MutableMapping[Any, Entry], made: dict[Tensor, Entry]) -> None:
    """Put entries into the optimizer's state. Dicts that are there are updated in place."""
    for p, entry in made.items():
        known = states.get(p)
        if known is None:
            states[p] = entry
        elif known is not entry:
            for name in known.keys() - entry.keys():
                del known[name]
            known.update(entry)


def wants_state_alone(states: Mapping[Any, Entry], groups: list[Group]) -> bool:
    """Return True if this step only has to make state, for torch.distributed.checkpoint.

    Its trial step has no state, every lr 0 on the CPU, and every gradient 0 in all
    processes. It moves no parameter, but it would count as a step, and L2 decay would join
    the moments.
    """
    try:
        if any(isinstance(key, Tensor) for key in states):
            return False
    except RuntimeError:
        return False  # another thread's step adds state
    for lr in [group["lr"] for group in groups]:
        # Reading a tensor on a device would synchronize.
        if (isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0:
            return False
    params = [p for group in groups for p in group["params"] if p.grad is not None]
    if not all(map(has_memory, params)):
        return False
    with torch.no_grad():
        grads = to_local([cast(Tensor, p.grad) for p in params])
        flags = [torch.count_nonzero(g) == 0 for g in grads]
        return bool(params) and all(map(bool, all_reduce_all(flags, params)))


def named_params(group: Group) -> list[tuple[str, Tensor]]:
    """Return the group's parameters with their names. Raise if they have none."""
    if group["params"] and "param_names" not in group:
        raise ValueError(
            "this optimizer's parameters have no names: make it with "
            "model.named_parameters()"
        )
    return list(zip(group.get("param_names", ()), group["params"]))


def first_param(groups: list[Group]) -> Tensor:
    """Return the first parameter, or an empty tensor if there is none."""
    return next((p for group in groups for p in group["params"]), torch.empty(0))


def loaded_groups(
    found: Match,
    groups: list[Group],
    bound_of: Callable[[Group], FunctionalOptimizer],
    keep_dtypes: bool,
) -> tuple[list[Group], dict[Tensor, Entry]]:
    """Return the groups and entries that a saved state becomes, checked and copied.

    `bound_of` returns a group's pure optimizer and raises for hyperparameters out of range.
    """
    loaded: list[Group] = []
    made: dict[Tensor, Entry] = {}
    for mine, options, entries in zip(groups, found.groups, found.entries):
        first = sum(len(group["params"]) for group in loaded)
        places = list(range(first, first + len(entries)))
        group = {**mine, **options, "params": places}
        check_options(mine, options)
        bound = bound_of(group)
        check_kind(options, bound.decay)
        if "decouple_wd" not in mine:
            group.pop("decouple_wd", None)
        if "train_mode" in mine:
            group["train_mode"] = options.get("train_mode", True)
        loaded.append(group)
        rule, storage, capturable = bound.rule, group_storage(mine), mine["capturable"]
        names = group.get("param_names", places)
        for name, p, saved in zip(names, mine["params"], entries):
            if saved is not None:
                entry = checked(rule, "state", name, p, saved)
                made[p] = owned(rule, p, capturable, storage, entry, keep_dtypes)
    mode = all(group.get("train_mode", True) for group in loaded)
    loaded = [g | {"train_mode": mode} if "train_mode" in g else g for g in loaded]
    return loaded, made


def named_entries(
    states: Mapping[Any, Entry], group: Group, rule: Rule[Any, Any]
) -> dict[str, Entry]:
    """Return the complete entries, by name, of parameters that have or will have state."""
    how = rule, group_storage(group), group["capturable"]
    return {
        name: ensure_state(states, {}, f"[{name!r}]", p, *how)
        for name, p in named_params(group)
        if "step" in states.get(p, {}) or p.requires_grad
    }


def loaded_tree(
    state: TreeState,
    params: Mapping[str, Tensor],
    groups: list[Group],
    rule_of: Callable[[Group], Rule[Any, Any]],
) -> tuple[dict[Tensor, Entry], list[tuple[Tensor, Tensor]]]:
    """Check and copy a pure optimizer's state, whose `leaves` are a dict by name.

    Returns the entries, and for each of `params` the group's parameter and the new value.
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
        rule, storage = rule_of(group), group_storage(group)
        entry = checked(rule, "state.leaves", name, p, entry)
        plain = storage.moments != "8bit" and not has_codes(rule, entry)
        with torch.no_grad():
            made[p] = owned(rule, p, group["capturable"], storage, entry, plain)
    return made, [(home[name][1], x) for name, x in params.items()]
