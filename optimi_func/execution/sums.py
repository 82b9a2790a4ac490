"""Joining: running scalars that follow from sums over all parameters of a step."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func.core.distributed import ShardSpec, all_reduce_sum, leaf_to_local, shards_of
from optimi_func.core.leaf import leaf_sums
from optimi_func.core.lists import grouped
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import Leaf, Named, Rule
from optimi_func.core.tree import running_tensors

# The sums of a parameter over its local tensor, None if that is empty, and its flag.
Part: TypeAlias = tuple[Tensor | None, Tensor | None]


class Unit(NamedTuple):
    """The parameters of a param group, or of a tree, that have the same running scalars."""

    rule: Rule
    coeffs: Named
    running: Any  # those before the step, numbers or tensors on a device
    rows: list[tuple[Tensor, ShardSpec | None]]  # the sums of each local tensor
    flags: list[Tensor | None]  # of parameters that stepped

    def add(self, p: Tensor, leaf: Callable[[], Leaf], part: Part | None) -> None:
        """Add a parameter, and its part if it stepped. `leaf` returns it with its state."""
        row, flag = part or (None, None)
        if row is None or flag is not None:
            rest = leaf_sums(self.rule, leaf_to_local(leaf()), self.coeffs, None)
            row = rest if row is None or flag is None else torch.where(flag, row, rest)
        self.rows.append((row, shards_of(p)))
        self.flags.extend([] if part is None else [flag])


def join(units: Sequence[Unit]) -> list[Named]:
    """Return the running scalars of each unit after the step.

    Shards are summed by one message for all units.
    """
    parts: list[Tensor] = []
    shards: list[ShardSpec | None] = []
    at: list[tuple[int, int]] = []
    for i, unit in enumerate(units):
        # In the order of the parameters, so that the last bits do not depend on the order
        # of their updates.
        kinds = grouped(unit.rows, lambda x: (x[0].device, x[1] and x[1].group))
        for rows in kinds.values():
            total = torch.stack([row for row, _ in rows]).sum(0).unbind()
            parts += total
            shards += [rows[0][1]] * len(total)
            at.append((i, len(total)))
    totals = iter(all_reduce_sum(parts, shards))
    sums: list[list[Tensor]] = [[] for _ in units]
    for i, count in at:
        sums[i].append(torch.stack(list(islice(totals, count))))
    return list(map(_joined, units, sums))


def _joined(unit: Unit, parts: list[Tensor]) -> Named:
    total = torch.stack([x.to(parts[0].device) for x in parts]).sum(0)
    on_device = isinstance(unit.running[0], Tensor)
    assert unit.rule.join is not None
    new = unit.rule.join(
        unit.running, [*total.unbind()] if on_device else total.tolist(), unit.coeffs
    )
    flags = [flag for flag in unit.flags if flag is not None]
    if len(flags) < len(unit.flags):
        return new
    live = torch.stack(flags).any()
    # As tensors: torch.where of two numbers is in float32.
    both = [running_tensors(x, live.device) for x in (new, unit.running)]
    return type(new)(*[torch.where(live, *pair) for pair in zip(*both)])


def write_running(entries: Sequence[Mapping[str, Tensor]], new: Named) -> None:
    """Write running scalars to entries, which keep copies by name."""
    for name, x in new._asdict().items():
        copies = [entry[name] for entry in entries]
        if not isinstance(x, Tensor):
            x = torch.full((), x, dtype=scalar_dtype(copies[0].device), device="cpu")
        torch._foreach_copy_(copies, [x] * len(copies))
