"""Steps of tensors without memory: on the meta device, or in FakeTensorMode.

Programs that estimate memory train there, and step the optimizer to see what it keeps.
There is nothing to plan for: each operation says what its result would be.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from optimi_func._checks import check_grad
from optimi_func._leaf import leaf_step, microbatch_scalars, whole_means
from optimi_func._rule import WHOLE_BATCH, Leaf, Microbatch
from optimi_func._saved import Entry
from optimi_func._storage import state_in
from optimi_func.execution.plans import Spec
from optimi_func.execution.tensors import flat_leaf, has_memory, write_back
from optimi_func.optimizers._groups import (
    Group,
    GroupNumbers,
    Path,
    group_storage,
    on_host,
    scalars_after,
)
from optimi_func.optimizers._state import ensure_state, insert_made


def step_without_memory(
    numbers: GroupNumbers,
    states: MutableMapping[Any, Entry],
    group: Group,
    params: list[Tensor],
    grads: list[Tensor],
    microbatches: list[Microbatch] | None,
    write: bool,
    count: bool,
) -> None:
    """Step a group's parameters one by one.

    Args:
        numbers: The groups' numbers.
        states: The optimizer's; what is made joins it.
        group: The group.
        params: Its parameters.
        grads: The gradient of each.
        microbatches: What each is to its step; None: the whole of it.
        write: False moves the state alone.
        count: Whether the step ends here.

    Raises:
        ValueError, TypeError: What does not fit; before any write.
    """
    bound = numbers.bind(group, on_host)
    spec = Spec(bound.rule, group_storage(group), group["capturable"])
    made: dict[Tensor, Entry] = {}
    with torch.no_grad():
        for p, g in zip(params, grads):
            check_grad(Path(group, p), p, g)
            ensure_state(states, group, spec, p, made)
        insert_made(states, made)
        for i, (p, g) in enumerate(zip(params, grads)):
            entry = made[p]
            # A count that is not there is the first step's.
            steps = _number(entry["step"])
            running = tuple([_number(entry[name]) for name in bound.rule.running._fields])
            (scalars,), (after,) = scalars_after(bound, [(steps, running)], coded=True)
            microbatch = WHOLE_BATCH if microbatches is None else microbatches[i]
            scalars = microbatch_scalars(bound.rule, scalars, microbatch, write)
            leaf = Leaf(p, *state_in(bound.rule, entry))
            new = leaf_step(bound.rule, leaf, g, scalars, write, whole_means)
            write_back(flat_leaf(leaf), new)
            if count:
                entry["step"].add_(1.0)
                for name, x in after._asdict().items():
                    entry[name].fill_(x)


def _number(x: Tensor) -> float:
    return x.item() if has_memory(x) else 0.0
