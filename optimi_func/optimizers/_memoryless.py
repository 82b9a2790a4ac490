"""Steps of meta and fake tensors, which programs take to estimate memory."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from optimi_func.core.checks import check_grad
from optimi_func.core.leaf import leaf_step, microbatch_scalars, whole_means
from optimi_func.core.rule import WHOLE_BATCH, Leaf, Microbatch
from optimi_func.core.storage import group_storage, state_in
from optimi_func.core.torch_private import has_memory
from optimi_func.execution.scalars import scalars_after
from optimi_func.execution.tensors import flat_leaf, write_back
from optimi_func.optimizers._groups import Group, path_of
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry
from optimi_func.state.entry import ensure_state, insert_made


def step_without_memory(
    bound: FunctionalOptimizer,
    states: MutableMapping[Any, Entry],
    group: Group,
    params: list[Tensor],
    grads: list[Tensor],
    microbatches: list[Microbatch] | None,
    write: bool,
    count: bool,
) -> None:
    """Step a group's parameters one by one, with the group's value."""
    rule, running_names = bound.rule, bound.rule.running._fields
    how = rule, group_storage(group), group["capturable"]
    made: dict[Tensor, Entry] = {}
    with torch.no_grad():
        for p, g in zip(params, grads):
            check_grad(path := path_of(group, p), p, g)
            ensure_state(states, made, path, p, *how)
        insert_made(states, made)
        for p, g, batch in zip(params, grads, microbatches or [WHOLE_BATCH] * len(params)):
            entry = made[p]
            running = tuple([_number(entry[name]) for name in running_names])
            counts = [(_number(entry["step"]), running)]
            (scalars,), (after,) = scalars_after(bound, counts, coded=True)
            scalars = microbatch_scalars(rule, scalars, batch, write)
            leaf = Leaf(p, *state_in(rule, entry))
            new = leaf_step(rule, leaf, g, scalars, write, whole_means)
            write_back(flat_leaf(leaf), new)
            if count:
                entry["step"].add_(1.0)
                for name, x in zip(running_names, after):
                    entry[name].fill_(x)


def _number(x: Tensor) -> float:
    """Return a step count as a number; that of a tensor without memory is 0."""
    return x.item() if has_memory(x) else 0.0
