"""Joining: running scalars that follow from sums over all parameters of a step."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func.core.distributed import ShardSpec, all_reduce_sum, leaf_to_local, shards_of
from optimi_func.core.leaf import resting_sums
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import Leaf, Rule, Scalar

# The sums of a parameter that stepped, if its local tensor has elements, and its flag.
Part: TypeAlias = tuple[Tensor | None, Tensor | None]


class Unit(NamedTuple):
    """The parameters that have the same running scalars: a param group, or a tree."""

    rule: Rule[Any, Any]
    on_host: bool  # True if they are Python numbers
    before: Any  # their running scalars before the step
    coeffs: Any
    advanced: Any  # the running scalars that `coeffs` came with
    rows: list[Tensor]  # for each parameter, the sums of its local tensor
    shards: list[ShardSpec | None]
    flags: list[Tensor | None]  # of those that stepped

    def add(self, p: Tensor, leaf: Callable[[], Leaf], part: Part | None) -> None:
        """Add a parameter, and its part if it stepped. `leaf` returns it with its state."""
        row, flag = part or (None, None)
        if row is None or flag is not None:
            rest = resting_sums(self.rule, leaf_to_local(leaf()), self.coeffs)
            row = rest if row is None or flag is None else torch.where(flag, row, rest)
        self.rows.append(row)
        self.shards.append(shards_of(p))
        if part is not None:
            self.flags.append(flag)


def join(units: Sequence[Unit]) -> list[Any]:
    """Return the running scalars of each unit after the step.

    Shards are summed by one message for all units.
    """
    parts: list[Tensor] = []
    shards: list[ShardSpec | None] = []
    at: list[tuple[int, int]] = []
    for i, unit in enumerate(units):
        kinds: dict[Any, tuple[ShardSpec | None, list[Tensor]]] = {}
        # In the order of the parameters, so that the last bits do not depend on the order
        # of their updates.
        for row, shard in zip(unit.rows, unit.shards):
            key = row.device, None if shard is None else shard.group
            kinds.setdefault(key, (shard, []))[1].append(row)
        for shard, rows in kinds.values():
            some = torch.stack(rows).sum(0).unbind()
            parts += some
            shards += [shard] * len(some)
            at.append((i, len(some)))
    totals = iter(all_reduce_sum(parts, shards))
    found: list[list[Tensor]] = [[] for _ in units]
    for i, count in at:
        found[i].append(torch.stack(list(islice(totals, count))))
    return list(map(_joined, units, found))


def _joined(unit: Unit, parts: list[Tensor]) -> Any:
    total = torch.stack([x.to(parts[0].device) for x in parts]).sum(0)
    sums: list[Scalar] = total.tolist() if unit.on_host else list(total.unbind())
    assert unit.rule.join is not None
    new = unit.rule.join(unit.advanced, sums, unit.coeffs)
    flags = [flag for flag in unit.flags if flag is not None]
    if len(flags) < len(unit.flags):
        return new
    live = torch.stack(flags).any()
    return type(new)(*[torch.where(live, x, old) for x, old in zip(new, unit.before)])


def write_running(columns: Sequence[list[Tensor]], new: Any) -> None:
    """Write running scalars to their copies, of which `columns` are those of each."""
    for copies, x in zip(columns, new):
        if not isinstance(x, Tensor):
            x = torch.full((), x, dtype=scalar_dtype(copies[0].device))
        torch._foreach_copy_(copies, [x] * len(copies))
