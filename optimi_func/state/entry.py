"""Entries of `optimizer.state`: made, checked and completed.

`state[p]` is a flat dict with `step`, the tensors of the rule's state and, if there is one,
`kahan_comp`. Other code may add values under other names, which are kept but never read.
"""

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from optimi_func.core import checks
from optimi_func.core.distributed import check_placed, same_placements, to_local
from optimi_func.core.rule import Rule, Storage
from optimi_func.core.storage import as_counts, check_entry, group_storage, own_names
from optimi_func.core.torch_private import in_distributed_checkpoint
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry, Group
from optimi_func.state.stored import fit


def ensure_state(
    states: Mapping[Tensor, Entry],
    made: dict[Tensor, Entry],
    path: object,
    p: Tensor,
    bound: FunctionalOptimizer,
    storage: Storage,
    capturable: bool,
) -> Entry:
    """Return a parameter's entry, checked, completed and converted to a storage.

    Raises if no step could use the parameter or its entry. The result is put into `made`,
    for `insert_made`. capturable puts the step count and running scalars on p's device.
    """
    if p in made:
        return made[p]
    rule = bound.rule
    checks.check_param(path, p)
    checks.check_taken(rule, path, p)
    check_placed(path, p)
    checks.check_writable(path, *to_local([p]))
    state, names, counted = states.get(p, {}), own_names(rule), rule.counted
    own = {k: state[k] for k in names if k in state}
    entry = {k: x for k, x in own.items() if k in counted or x is not None}
    if entry:
        entry.update(as_counts("state", path, counted, entry))
        check_entry(rule, bound.shape_numbers, "state", path, p, entry)
        _check_in_place(rule, path, p, entry)
    others = {k: x for k, x in state.items() if k not in own}
    # Moments and compensations of any floating dtype can be used as they are.
    fitted = fit(bound, p, entry, storage, capturable, keep_dtypes=True, copy=False)
    made[p] = {**fitted, **others}
    return made[p]


def _check_in_place(rule: Rule, path: object, p: Tensor, entry: Entry) -> None:
    """Raise if a step could not write to a tensor of an entry."""
    for name, x in entry.items():
        if x.is_inference() and not p.is_inference():
            raise ValueError(
                f"state{path}[{name!r}] was made under inference_mode and cannot be "
                "written to: clone it outside"
            )
        if checks.is_expanded(x):
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
    stuck, moments = checks.stuck_betas(bound.narrow_betas), group_storage(group).moments
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
