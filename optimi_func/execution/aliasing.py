"""Updates that write to the same memory, which take turns: tied weights."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, pairwise

from optimi_func._codes import GROUP
from optimi_func.execution.launches import Update


def split_aliasing(updates: list[Update]) -> Iterator[list[Update]]:
    """Runs of updates that write to different memory: tied weights take turns."""
    ranges = sorted(chain.from_iterable(map(_written_memory, updates)))
    if all(end <= start for (_, end), (start, _) in pairwise(ranges)):
        yield updates
        return
    run: list[Update] = []
    taken: list[tuple[int, int]] = []
    for update in updates:
        if any(_overlaps(taken, start, end) for start, end in _written_memory(update)):
            yield run
            run, taken = [], []
        run.append(update)
        for one in _written_memory(update):
            insort(taken, one)
    yield run


def _written_memory(update: Update) -> list[tuple[int, int]]:
    """Where each tensor that may be written begins and ends."""
    slot = update.target
    lengths = [update.slot.numel] * len(slot.dtypes)
    for i in slot.scales:
        lengths[i] = -(-update.slot.numel // GROUP)
    places = zip(slot.addresses, slot.dtypes, lengths)
    return [(start, start + numel * dtype.itemsize) for start, dtype, numel in places]


def _overlaps(taken: list[tuple[int, int]], start: int, end: int) -> bool:
    i = bisect_left(taken, (start, end))
    after = i < len(taken) and taken[i][0] < end
    return after or (i > 0 and taken[i - 1][1] > start)
