"""The step without a compiler: operations on one tensor, its slices, or several joined.

Slices keep the temporaries of a large tensor small, and in a cache. Small tensors are
joined, because a call costs as much as some thousand elements.
"""

from collections.abc import Iterator, Mapping
from itertools import chain, compress
from typing import TypeAlias

import torch
from torch import Tensor

from optimi_func.core.leaf import (
    Known,
    Size,
    answering,
    leaf_round,
    leaf_step,
    noting_sums,
    requests,
    rounds_in,
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
from optimi_func.core.rule import Leaf, Rule, Scalars
from optimi_func.core.storage import GRAD, PARAM, leaf_in
from optimi_func.execution.launches import Launch
from optimi_func.execution.slots import Columns, Step, Update, split_twins
from optimi_func.execution.tensors import write_back

# A tensor of so many elements is updated in slices although its step is no program, or
# measures. `leaf_step` has at most so many temporaries: Adan's with Kahan summation.
SLICED, TEMPORARIES = 1_000_000, 18
# One tensor, or a slice of it, with its state and what is given besides, by name.
_Tensors: TypeAlias = dict[str, Tensor]


def plan_eager(rule: Rule, updates: list[Update], write: bool) -> list[Launch]:
    """Plan updates of one kind: small ones joined, the others one by one."""
    if not updates:
        return []
    asked = requests(rule, updates[0].scalars.scalars, write)
    single = bool(rounds_in(asked))
    joins = [not single and u.slot.numel <= JOINED and _is_flat(u) for u in updates]
    launches: list[Launch] = []
    # A kernel takes parameters with several scalars, and leaves some to this.
    for small in grouped(compress(updates, joins), lambda u: u.at).values():
        for batch in split_twins(small):
            parts = chunks(batch, TOGETHER, lambda u: u.slot.numel)
            launches += [EagerLaunch(rule, part, write, asked) for part in parts]
    rest = compress(updates, [not x for x in joins])
    return launches + [EagerLaunch(rule, [u], write, asked) for u in rest]


def _is_flat(u: Update) -> bool:
    return u.can_be_cut and not u.slot.coded


class EagerLaunch(Launch):
    """One parameter, whole or in slices, or several that are joined in one tensor."""

    def __init__(
        self, rule: Rule, updates: list[Update], write: bool, asked: Mapping[str, Size]
    ) -> None:
        super().__init__(rule, updates, write, asked)
        first, (slot, g) = updates[0], (updates[0].slot, updates[0].g)
        own = *slot.dtypes.items(), *first.given_dtypes
        self._tensors, self._device = ((GRAD, g.dtype), *own), g.device
        self._sizes, self._joined = self.lengths.tolist(), len(updates) > 1
        self._recorded = first.plain and not slot.coded
        least = 0 if self._recorded and not self.rounds else SLICED
        large = slot.numel >= least and first.can_be_cut
        self._cut = large and not self._joined
        self._programs: dict[object, Program | None] = {}
        if not (self._cut or self.shards or self.keeps):
            self.rounds = {}  # `run` takes them

    def _program(self, packed: Packed, known: Known, round: str | None) -> Program | None:
        """Return the program for these numbers and answers, or None.

        It updates a tensor, or returns what a round is about.
        """
        if not self._recorded or packed.mixes:
            return None
        answers = tuple([(name, len(numbers)) for name, numbers in known.items()])
        key = packed.statics, answers, round
        if key not in self._programs:
            in_place = self._joined or (self._in_place and round is None)
            own = self._rule, packed.statics, self._tensors, self._device
            kind = Kind(*own, self._write, in_place, answers, round)
            self._programs[key] = program(kind, packed.scalars)
        return self._programs[key]

    def _lists(
        self, columns: Columns
    ) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
        """Return lists of what a step reads, and of what it writes."""
        own = self.read(columns.own)
        into = own if self._in_place else self.read(columns.into)
        return {GRAD: self.pick(columns.grads), **own, **self.given(columns)}, into

    def _each(self, columns: Columns) -> Iterator[tuple[_Tensors, _Tensors]]:
        """Yield what `_lists` returns, one parameter after another."""
        lists, into = self._lists(columns)
        for own, targets in zip(zip(*lists.values()), zip(*into.values())):
            yield dict(zip(lists, own)), dict(zip(into, targets))

    def _size(self, p: Tensor, made: Program | None) -> int:
        """Return the elements of a slice, or 0."""
        temporaries = TEMPORARIES
        if made is not None:
            temporaries = len(made.buffers) + len(made.outputs) * bool(self.rounds)
        cut = self._cut and (made is None or not made.reduces)
        return slice_size(p, self.dtype, temporaries) if cut else 0

    def _slices(
        self, columns: Columns, made: Program | None
    ) -> Iterator[tuple[_Tensors, _Tensors]]:
        """Yield what `_each` yields, in slices."""
        for tensors, targets in self._each(columns):
            yield from slices(tensors, targets, self._size(tensors[PARAM], made))

    def measure(self, step: Step, name: str, known: Mapping[str, Tensor]) -> Tensor:
        """Return the means as one row."""
        packed, answers = step.packed[self._at].folded, self._answers(known)
        made = self._program(packed, answers, name)
        values = () if made is None else packed.values(self.dtype, self._device)
        row, room = [*chain.from_iterable(answers.values())], _room(step)
        wholes, offset = list[Tensor](), 0
        for tensors, _ in self._slices(step.columns, made):
            g = tensors[GRAD]
            if made is None:
                leaf, now = self._leaf(tensors, packed)
                found = leaf_round(self._rule, leaf, g, now, answers, self._write).tensors
            else:
                buffers = room.buffers(made.buffers, tensors[PARAM])
                found = [torch.empty_like(g, dtype=x) for x in made.outputs.values()]
                made.run([*tensors.values()], found, buffers, values, row)
            if g.numel() == self._sizes[0]:
                wholes = found
                continue
            wholes = wholes or [x.new_empty(self._sizes[0]) for x in found]
            torch._foreach_copy_([x[offset : offset + len(g)] for x in wholes], found)
            offset, found = offset + len(g), []  # freed before there are the next ones
        # The bits of a mean depend on how its elements are added up.
        return torch.stack(whole_means(wholes, self.rounds[name].tops))[None]

    def _answers(self, known: Mapping[str, Tensor]) -> Known:
        """Return the answers for the only tensor of this launch."""
        return {name: x[0].to(self.dtype).unbind() for name, x in known.items()}

    def _leaf(self, tensors: _Tensors, packed: Packed) -> tuple[Leaf, Scalars]:
        """Return the leaf of a parameter's tensors, and its scalars."""
        given = {x: tensors[x] for x in tensors if x not in (GRAD, *self._names)}
        return with_given(leaf_in(self._rule, tensors), packed.scalars, given)

    def run(self, step: Step, known: Mapping[str, Tensor]) -> Tensor | None:
        """Update the parameters."""
        packed, answers = step.packed[self._at].folded, self._answers(known)
        made = self._program(packed, answers, None)
        if made is None or (self._joined and made.reduces):
            sums = self._run_leaf(step.columns, packed, answers)
        elif self._joined:
            sums = self._run_joined(step, packed, made)
        else:
            values = packed.values(self.dtype, self._device)
            row = [*chain.from_iterable(answers.values())]
            ((tensors, targets),) = self._each(step.columns)
            size = self._size(tensors[PARAM], made)
            sums = made(tensors, targets, values, _room(step), row, size)
        return torch.stack(sums)[None] if sums else None

    def _run_joined(self, step: Step, packed: Packed, made: Program) -> list[Tensor]:
        lists, into = self._lists(step.columns)
        new = joined(made, lists, packed.values(self.dtype, self._device), _room(step))
        # New tensors have no values yet, so they also need the results that did not change.
        for name in made.written if self._in_place else into:
            torch._foreach_copy_(list(map(flat, into[name])), new[name].split(self._sizes))
        return []

    def _run_leaf(self, columns: Columns, packed: Packed, answers: Known) -> list[Tensor]:
        sums: list[Tensor] = []

        for tensors, targets in self._slices(columns, None):
            leaf, scalars = self._leaf(tensors, packed)
            how = scalars, self._write, answering(answers, noting_sums(sums))
            # Its temporaries are freed before those of the next slice are made.
            write_back(targets, leaf_step(self._rule, leaf, tensors[GRAD], *how))
        return sums


def _room(step: Step) -> Room:
    return Room() if step.room is None else step.room
