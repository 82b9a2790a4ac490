"""Entries of `optimizer.state`: made, checked and completed.

`state[p]` is a flat dict with `step`, the tensors of the rule's state and, if there is one,
`kahan_comp`. Other code may add values under other names, which are kept but never read.
"""

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from optimi_func.core.checks import (
    check_param,
    check_taken,
    check_writable,
    is_expanded,
    stuck_betas,
)
from optimi_func.core.codes import alike, recast_remainder, remainder_dtype
from optimi_func.core.distributed import check_placed, same_placements, to_local
from optimi_func.core.leaf import init_leaf
from optimi_func.core.rule import Rule, Storage
from optimi_func.core.storage import (
    as_counts,
    check_entry,
    entry_of,
    field_of,
    group_storage,
    missing_fields,
    own_names,
)
from optimi_func.core.torch_private import in_distributed_checkpoint
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import running_tensors
from optimi_func.state.convert import Entry, Group
from optimi_func.state.stored import fresh_like, restored


def ensure_state(
    states: Mapping[Tensor, Entry],
    made: dict[Tensor, Entry],
    path: object,
    p: Tensor,
    rule: Rule,
    storage: Storage,
    capturable: bool,
) -> Entry:
    """Return a parameter's entry, checked, completed and converted to a storage.

    Raises if no step could use the parameter or its entry. The result is put into `made`,
    for `insert_made`. capturable puts the step count and running scalars on p's device.
    """
    if p in made:
        return made[p]
    check_param(path, p)
    check_taken(rule, path, p)
    check_placed(path, p)
    check_writable(path, *to_local([p]))
    device = p.device if capturable else torch.device("cpu")
    if not (state := states.get(p, {})):
        made[p] = _fresh(rule, p, storage, device)
        return made[p]
    counted = rule.counted
    names = [k for k in own_names(rule) if k in state]
    entry = {k: state[k] for k in names if k in counted or state[k] is not None}
    counts = as_counts("state", path, counted, entry)
    entry.update(counts)
    check_entry(rule, "state", path, p, entry)
    _check_in_place(rule, path, p, entry)
    fields = rule.state._fields
    missing = missing_fields(rule, state)
    converted = _fields_to_convert(rule, storage, p, state, missing)
    dtype = remainder_dtype(p, storage.param)
    comp = state.get("kahan_comp")
    # A compensation of any floating dtype can be used as it is.
    recast = comp is not None and dtype is not None and not alike(comp.dtype, dtype)
    moved = [k for k in counted if k in state and state[k].device != device]
    compensated = comp is None if dtype is None else comp is not None and not recast
    uncounted = [k for k in counted if k not in state]
    if counts or uncounted or missing or moved or converted or not compensated:
        state = {**state, **counts}
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


def _fresh(rule: Rule, p: Tensor, storage: Storage, device: torch.device) -> Entry:
    """Return the entry of a parameter that has not stepped."""
    leaf = init_leaf(rule, p, storage)
    running = running_tensors(rule.running(), device)._asdict()
    step = torch.zeros((), dtype=torch.float32, device=device)
    return {"step": step, **running, **entry_of(leaf.state, leaf.comp)}


def _fields_to_convert(
    rule: Rule, storage: Storage, p: Tensor, state: Entry, missing: list[str]
) -> list[str]:
    """Return the fields that are in codes and should not be, or the other way round."""
    names = [name for name in rule.state._fields if name not in missing]
    coded = [name for name in names if state.get(name) is None]
    if not names or not (storage.coded or coded):
        return []
    fresh = fresh_like(rule, p, storage).state
    return [
        name
        for name in names
        if (name in coded) == isinstance(getattr(fresh, name), Tensor)
    ]


def _check_in_place(rule: Rule, path: object, p: Tensor, entry: Entry) -> None:
    """Raise if a step could not write to a tensor of an entry."""
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
        if name not in rule.counted and not same_placements(p, x, whole):
            raise ValueError(
                f"state{path}[{name!r}] is not divided among processes as its parameter "
                "is: load it again, after fully_shard or distribute_tensor"
            )


def insert_made(states: MutableMapping[Tensor, Entry], made: dict[Tensor, Entry]) -> None:
    """Put entries into the optimizer's state. Dicts that are there are updated in place."""
    for p, entry in made.items():
        current = states.get(p)
        if current is None:
            states[p] = entry
        elif current is not entry:
            for name in current.keys() - entry.keys():
                del current[name]
            current.update(entry)


def wants_state_alone(states: Mapping[Tensor, Entry]) -> bool:
    """Return True in the trial step by which torch.distributed.checkpoint makes state.

    It sets every gradient and every lr to 0 and calls `step()`. The state has to be that of
    before the first step, but a step of zeros would count, and L2 decay would join the
    moments. A step of zeros in any other place is a step like any other.
    """
    try:
        if any(isinstance(key, Tensor) for key in states):
            return False
    except RuntimeError:
        return False  # another thread's step adds state
    return in_distributed_checkpoint()


def named_params(group: Group) -> list[tuple[str, Tensor]]:
    """Return the group's parameters with their names. Raise if they have none."""
    if group["params"] and "param_names" not in group:
        raise ValueError(
            "this optimizer's parameters have no names: make it with "
            "model.named_parameters()"
        )
    return list(zip(group.get("param_names", ()), group["params"]))


def stuck_moments(group: Group, bound: FunctionalOptimizer) -> list[str]:
    """Return warnings about betas that bfloat16 moments of a group do not follow."""
    stuck, moments = stuck_betas(bound.narrow_betas), group_storage(group).moments
    trained = [p for p in group["params"] if p.requires_grad] if stuck else []
    return stuck * (torch.bfloat16 in {moments or p.dtype for p in trained})


def check_options(mine: Group, options: Group) -> None:
    """Raise for options of another rule."""
    theirs = {"betas", "momentum", "clip_threshold", "beta2_decay"} & {*options}
    if theirs and not theirs & {*mine}:
        raise ValueError(
            f"the state's param_groups have {theirs}, which this optimizer does not take: "
            "it is another rule's"
        )
