"""The step without a compiler: operations on one tensor, its slices, or several joined.

Slices keep the temporaries of a large tensor small, and in a cache. Small tensors are
joined, because a call costs as much as some thousand elements.
"""

from collections.abc import Iterator, Sequence
from itertools import compress

import torch
from torch import Tensor

from optimi_func.core.leaf import (
    count_means,
    leaf_round,
    leaf_step,
    taking,
    whole_means,
    with_given,
)
from optimi_func.core.lists import chunks, grouped
from optimi_func.core.packed import Packed
from optimi_func.core.program import (
    JOINED,
    TOGETHER,
    Kind,
    Program,
    Room,
    flat,
    joined,
    program,
    slice_size,
    slices,
)
from optimi_func.core.rule import Rule
from optimi_func.core.storage import leaf_of
from optimi_func.execution.launches import Launch
from optimi_func.execution.slots import Columns, Step, Update, scale_places, split_twins
from optimi_func.execution.tensors import write_back

# A tensor of so many elements is updated in slices although its step is no program, or
# measures. `leaf_step` has at most so many temporaries: Adan's with Kahan summation.
SLICED, TEMPORARIES = 1_000_000, 18


def plan_eager(rule: Rule, updates: list[Update], write: bool) -> list[Launch]:
    """Plan updates of one kind: small ones joined, the others one by one."""
    if not updates:
        return []
    single = count_means(rule, updates[0].scalars.scalars.rates, write)
    joins = [not single and u.slot.numel <= JOINED and _is_flat(u) for u in updates]
    launches: list[Launch] = []
    # A kernel takes parameters with several scalars, and leaves some to this.
    for small in grouped(compress(updates, joins), lambda u: u.at).values():
        for batch in split_twins(small):
            parts = chunks(batch, TOGETHER, lambda u: u.slot.numel)
            launches += [EagerLaunch(rule, part, write) for part in parts]
    rest = compress(updates, [not x for x in joins])
    return launches + [EagerLaunch(rule, [u], write) for u in rest]


def _is_flat(u: Update) -> bool:
    return u.can_be_cut and not u.slot.coded


class EagerLaunch(Launch):
    """One parameter, whole or in slices, or several that are joined in one tensor."""

    def __init__(self, rule: Rule, updates: list[Update], write: bool) -> None:
        super().__init__(rule, updates, write)
        first, (slot, g) = updates[0], (updates[0].slot, updates[0].g)
        self._dtypes, self._device = (g.dtype, *slot.dtypes, *first.given_dtypes), g.device
        self._sizes, self._joined = self.lengths.tolist(), len(updates) > 1
        self._recorded = first.plain and not slot.coded
        least = 0 if self._recorded and not self.rounds else SLICED
        large = slot.numel >= least and first.can_be_cut
        self._cut = large and not self._joined
        self._programs: dict[object, Program | None] = {}
        if not (self._cut or self.shards or self.kept):
            self.rounds = ()  # `run` takes them

    def _program(self, packed: Packed, known: int, measures: bool) -> Program | None:
        """Return the program for these numbers and so many means, or None."""
        if not self._recorded or packed.mixes:
            return None
        key = packed.statics, known, measures
        if key not in self._programs:
            in_place = self._joined or (self._in_place and not measures)
            own = self._rule, packed.statics, self._dtypes, self._device
            given = len(self._columns) + 1 if self._given else None
            kind = Kind(*own, self._write, in_place, known, measures, given)
            self._programs[key] = program(kind, packed.scalars)
        return self._programs[key]

    def _lists(self, columns: Columns) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return lists of g, p, the state, the compensation, and what is given besides.

        The second lists are of what is written.
        """
        own = self.read(columns.own)
        into = own if self._in_place else self.read(columns.into)
        return [self.pick(columns.grads), *own, *self.given(columns)], into

    def _size(self, p: Tensor, made: Program | None) -> int:
        """Return the elements of a slice, or 0."""
        temporaries = TEMPORARIES
        if made is not None:
            temporaries = len(made.buffers) + len(made.outputs) * bool(self.rounds)
        cut = self._cut and (made is None or not made.reduces)
        return slice_size(p, self.dtype, temporaries) if cut else 0

    def _slices(
        self, columns: Columns, made: Program | None
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield what `_lists` returns, one tensor or slice after another."""
        scales = [1 + i for i in scale_places(self._codes, 1)]
        for tensors, targets in zip(*[zip(*lists) for lists in self._lists(columns)]):
            size = self._size(tensors[1], made)
            yield from slices([*tensors], [*targets], size, scales)

    def measure(self, step: Step, known: Tensor | None) -> Tensor:
        """Return the means as one row."""
        packed, row = step.packed[self._at].folded, self._row(known)
        made = self._program(packed, len(row), True)
        wholes, offset = list[Tensor](), 0
        for (g, *own), into in self._slices(step.columns, made):
            if made is None:
                leaf = leaf_of(self._rule, self._codes, own[: len(into)])
                given = own[len(into) :]
                leaf, now = with_given(self._rule, leaf, packed.scalars, given)
                found = leaf_round(self._rule, leaf, g, now, row)
            else:
                found = [torch.empty_like(g, dtype=x) for x in made.outputs]
                values = packed.values(self.dtype, self._device)
                made([g, *own], found, values, _room(step), row)
            if g.numel() == self._sizes[0]:
                wholes = found
                continue
            wholes = wholes or [x.new_empty(self._sizes[0]) for x in found]
            torch._foreach_copy_([x[offset : offset + len(g)] for x in wholes], found)
            offset, found = offset + len(g), []  # freed before there are the next ones
        # The bits of a mean depend on how its elements are added up.
        return torch.stack(whole_means(wholes, self.tops[self._round(known)]))[None]

    def _row(self, known: Tensor | None) -> Sequence[Tensor]:
        return () if known is None else known[0].to(self.dtype).unbind()

    def run(self, step: Step, known: Tensor | None) -> Tensor | None:
        """Update the parameters."""
        packed, row = step.packed[self._at].folded, self._row(known)
        made = self._program(packed, len(row), False)
        if made is None or (self._joined and made.reduces):
            taken = self._run_leaf(step.columns, packed, row)
        elif self._joined:
            taken = self._run_joined(step, packed, made)
        else:
            tensors, targets = ([x for (x,) in y] for y in self._lists(step.columns))
            values = packed.values(self.dtype, self._device)
            size = self._size(targets[0], made)
            taken = made(tensors, targets, values, _room(step), row, size)
        return torch.stack(taken)[None] if self._rule.join is not None and taken else None

    def _run_joined(self, step: Step, packed: Packed, made: Program) -> list[Tensor]:
        lists, into = self._lists(step.columns)
        new = joined(made, lists, packed.values(self.dtype, self._device), _room(step))
        # New tensors have no values yet, so they also need the results that did not change.
        for i in made.written if self._in_place else range(len(new)):
            torch._foreach_copy_(list(map(flat, into[i])), new[i].split(self._sizes))
        return []

    def _run_leaf(
        self, columns: Columns, packed: Packed, row: Sequence[Tensor]
    ) -> list[Tensor]:
        taken: list[Tensor] = []

        def mean(tensors: list[Tensor], tops: int) -> list[Tensor]:
            taken[:] = whole_means(tensors, tops)
            return taken

        for (g, *own), targets in self._slices(columns, None):
            leaf = leaf_of(self._rule, self._codes, own[: len(targets)])
            take = taking(self._rule, packed.scalars.rates, row, mean)
            given = own[len(targets) :]
            leaf, scalars = with_given(self._rule, leaf, packed.scalars, given)
            now = self._rule, leaf, g, scalars, self._write, take
            # Its temporaries are freed before those of the next slice are made.
            write_back(targets, leaf_step(*now))
        return taken


def _room(step: Step) -> Room:
    return Room() if step.room is None else step.room
