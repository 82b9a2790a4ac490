"""Launches of rules that take means before their direction, or over shards."""

from itertools import islice

import torch
from torch import Tensor

from optimi_func.core.distributed import ShardSpec, all_reduce_sum
from optimi_func.core.leaf import count_means
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import Rule
from optimi_func.execution.launches import Launch
from optimi_func.execution.scalars import Packed
from optimi_func.execution.slots import Columns, Update


class MeasuredLaunch(Launch):
    """A launch whose rule's direction reads means, and the number of elements."""

    def __init__(self, number: int, launch: Launch, updates: list[Update]) -> None:
        super().__init__(updates)
        self._launch, self._number = launch, number
        sizes = torch.tensor(self._lengths.tolist(), dtype=torch.float64, device="cpu")
        self._sizes = sizes.to(updates[0].g.device, scalar_dtype(updates[0].g.device))

    def run(self, columns: Columns, packed: list[Packed], means: Tensor | None) -> None:
        """Measure, and update the parameters."""
        del means
        measured = self._launch.measure(columns, packed)[:, -self._number :]
        sizes = self._sizes.to(measured.dtype)[:, None]
        self._launch.run(columns, packed, torch.cat([sizes, measured], 1))


class ShardedLaunch(Launch):
    """Launches of shards whose rule takes means over whole tensors.

    The means of all tensors of a mesh are one message, which every process has to send
    even if its shards are empty. Those of a rule with `measure` and `means` are two.
    """

    def __init__(
        self, rule: Rule, launches: list[Launch], updates: list[Update], write: bool
    ) -> None:
        super().__init__(updates)
        self._launches = launches
        self._slots = [u.slot for u in updates]
        both = write and rule.measure is not None and rule.means is not None
        self._again = rule.means.number if both and rule.means is not None else 0
        self._sized = int(rule.measure is not None)
        rates = [u.scalars.scalars.rates for u in updates]
        self._counts = [count_means(rule, x) - self._sized for x in rates]

    def run(self, columns: Columns, packed: list[Packed], means: Tensor | None) -> None:
        """Measure, all-reduce, and update the parameters."""
        del means
        local = [x.measure(columns, packed) for x in self._launches]
        found = self._reduced(columns, local, self._counts)
        for i, slot in zip(self.places, self._slots) if self._sized else ():
            assert slot.shard is not None
            found[i] = torch.cat([found[i].new_full((1,), slot.shard.numel), found[i]])
        known = [torch.stack([found[i] for i in x.places]) for x in self._launches]
        if self._again:
            own = zip(self._launches, known)
            local = [launch.again(columns, packed, x) for launch, x in own]
            more = self._reduced(columns, local, [self._again] * len(self.places))
            last = [torch.stack([more[i] for i in x.places]) for x in self._launches]
            known = [torch.cat(both, 1) for both in zip(known, last)]
        for launch, own in zip(self._launches, known):
            launch.run(columns, packed, own)

    def _reduced(
        self, columns: Columns, local: list[Tensor], counts: list[int]
    ) -> dict[int, Tensor]:
        """Return means over all shards, by place, of those that launches took."""
        by_place = {
            place: means.double()
            for launch, rows in zip(self._launches, local)
            for place, means in zip(launch.places, rows)
        }
        sums: list[Tensor] = []
        shards: list[ShardSpec | None] = []
        for i, slot, count in zip(self.places, self._slots, counts):
            device = columns[1][i].device
            none_here = torch.zeros(count, dtype=torch.float64, device=device)
            row = by_place.get(i, none_here)[-count:]
            sums += (row * slot.numel).unbind()
            shards += [slot.shard] * count
        totals = iter(all_reduce_sum(sums, shards))
        for i, slot, count in zip(self.places, self._slots, counts):
            assert slot.shard is not None
            by_place[i] = torch.stack(list(islice(totals, count))) / slot.shard.numel
        return by_place
