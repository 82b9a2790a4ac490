"""Launches: calls that update some parameters of a plan, and that later steps repeat."""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from optimi_func.core.codes import same_order
from optimi_func.core.distributed import (
    ShardSpec,
    all_reduce_sum,
    distribute_like,
    to_local,
)
from optimi_func.core.leaf import FACTS, Size, rounds_in
from optimi_func.core.math import scalar_dtype
from optimi_func.core.packed import ALIGNMENT
from optimi_func.core.philox import drawn
from optimi_func.core.program import Room
from optimi_func.core.rule import Rule
from optimi_func.core.storage import PARAM, scales_in
from optimi_func.execution.cpp import PIECE, loaded
from optimi_func.execution.inductor import Kernel
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.slots import Columns, Step, Update
from optimi_func.execution.sums import Part
from optimi_func.execution.triton_list import DeviceTable, TritonListKernel

T = TypeVar("T")
_on_host = attrgetter("on_host")
_bypasses_autograd = attrgetter("bypasses_autograd")


class Launch:
    """A call that updates some of a plan's parameters; nothing happens before `run`.

    It is made of updates of one kind (see `alike`). The base class is that of empty
    tensors.

    Args:
        rule: The mathematics.
        updates: The parameters.
        write: False moves the state alone.
        asked: What the step of each parameter asks for: see `core.leaf.requests`.
    """

    # True if `run` calls no operation of torch, given scalars that are Python numbers.
    without_torch = False
    # True if `run` may write past autograd, whose versions of tensors then count nothing.
    bypasses_autograd = False
    movable = True  # `readdress` is all that other addresses take
    in_order = True  # its parameters are in the order of the plan

    def __init__(
        self,
        rule: Rule,
        updates: Sequence[Update],
        write: bool,
        asked: Mapping[str, Size] | None = None,
    ) -> None:
        first = updates[0]
        self.positions = [u.position for u in updates]
        self.lengths = array("q", [u.slot.numel for u in updates])
        self._rule, self._write, self._at = rule, write, first.at
        self.dtype = first.wide
        self._names = [*first.slot.dtypes]  # of the tensors that it reads or writes
        self._in_place = first.slot.in_place
        # The addresses of the parameters, and those of all columns after the gradients.
        p, *rest = zip(*[u.slot.addresses for u in updates]) if self._in_place else [()]
        self._fixed = array("q", p), array("q", chain.from_iterable(rest))
        self._aligned = all([u.aligned for u in updates])
        self._given = bool(first.given)
        self.asked = asked = asked or {}
        # What is measured before `run`.
        self.rounds = rounds_in(asked)
        # Sums of a rule that joins them are reduced at the end of the step.
        held = bool(self.rounds) and rule.join is None
        self.shards = [u.slot.shard for u in updates if held and u.slot.shard is not None]
        self.keeps = rule.whole_fields if rule.measure is not None else ()
        self._numels: Tensor | None = None
        if FACTS in asked:
            sizes = [x.numel for x in self.shards] or self.lengths.tolist()
            wide = torch.tensor(sizes, dtype=torch.float64, device="cpu")
            self._numels = wide.to(first.g.device, self.dtype)[:, None]

    def pick(self, items: list[T]) -> list[T]:
        """Pick this launch's part from a list with an item for each parameter."""
        if self.in_order and len(items) == len(self.positions):
            return items
        return [items[i] for i in self.positions]

    def read(self, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Pick the tensors of this launch, out of those that it reads or writes."""
        return {name: self.pick(lists[name]) for name in self._names}

    def addresses(self, columns: Columns) -> "tuple[array[int], array[int]]":
        """Return the addresses before those of the gradients, and those after them.

        They are `_fixed` if the step is in place.
        """
        p, *rest = self.read(columns.own).values()
        into = () if columns.in_place else self.read(columns.into).values()
        return addresses(p), addresses(chain.from_iterable([*rest, *into]))

    def readdress(self, columns: Columns) -> None:
        """Update these tensors from now on, which differ in their addresses alone."""
        self._fixed = self.addresses(columns)

    def moved(self, columns: Columns) -> Self:
        """Return a launch of tensors that differ in their addresses alone."""
        launch = copy(self)
        launch.readdress(columns)
        return launch

    def facts(self, step: Step) -> dict[str, Tensor]:
        """Return the answers that need no computation: see `core.leaf.Facts`.

        An answer has a row for each tensor.
        """
        if self._numels is None:
            return {}
        lists = [self.pick(step.columns.own[name]) for name in self.keeps]
        kept = [torch.stack(x).to(self._numels)[:, None] for x in lists]
        return {FACTS: torch.cat([self._numels, *kept], 1) if kept else self._numels}

    def keep(self, step: Step, known: Mapping[str, Tensor]) -> None:
        """Write the numbers of tensors that a rule with `measure` keeps."""
        assert self._rule.measure is not None
        own = torch.cat([known[FACTS], known["measure"]], 1).to(self.dtype).unbind(1)
        _, new = self._rule.measure.settle(own, step.packed[self._at].scalars.coeffs)
        for name, x in zip(self.keeps, new):
            torch._foreach_copy_(self.pick(step.columns.into[name]), x.unbind())

    def aligned(self, columns: Columns) -> list[Tensor]:
        """Pick the gradients, copied if a kernel would misread their memory."""
        grads = self.pick(columns.grads)
        if self._aligned:
            return grads
        return list(map(_align, self.pick(columns.own[PARAM]), grads))

    def given(self, columns: Columns) -> dict[str, list[Tensor]]:
        """Pick what is given besides, in the parameters' memory order."""
        lists: dict[str, list[Tensor]] = {}
        if not self._given:
            return lists
        params = self.pick(columns.own[PARAM])
        for name, column in columns.given.items():
            if (picked := self.pick(column))[0] is not None:
                tensors = _drawn_bits(picked) or drawn(picked, self.dtype)
                lists[name] = list(map(_align, params, to_local(tensors)))
        return lists

    def measure(self, step: Step, name: str, known: Mapping[str, Tensor]) -> Tensor:
        """Return the means of a round over the local tensors, a row for each.

        `known` has the answers of the requests before it.
        """
        del known
        count, tops = self.rounds[name]
        device = step.columns.grads[self.positions[0]].device
        shape = len(self.positions), count
        found = torch.zeros(shape, dtype=torch.float64, device=device)
        found[:, count - tops :] = -math.inf
        return found

    def run(self, step: Step, known: Mapping[str, Tensor]) -> Tensor | None:
        """Update the parameters, and return the sums that it has taken itself, if any.

        `known` are the answers of all `rounds`.
        """


def run_launches(launches: list[Launch], step: Step, joins: bool) -> dict[int, Part]:
    """Run launches, and undo what they wrote where a `finite` flag is false.

    Returns the sums of each parameter, by its place, if the rule joins them. What is raised
    meanwhile has a note about what was written.
    """
    flagged, done = False, 0
    sums: dict[int, Tensor] = {}
    for x in step.packed:
        flagged |= x.finite is not None
    if not all(map(_bypasses_autograd, launches)):
        step = step._replace(room=Room())
    try:
        for launch, known in measured(launches, step):
            backups: list[tuple[Tensor, Tensor, Tensor]] = []
            for column in step.columns.written(step.write) if flagged else ():
                for i, x in zip(launch.positions, launch.pick(column)):
                    flag = step.packed[step.at[i]].finite
                    if x is not None and flag is not None:
                        backups.append((x, flag, x.clone()))
            taken = launch.run(step, known)
            if launch.keeps and step.write:
                launch.keep(step, known)
            taken = known.get("sums") if taken is None else taken
            if joins and taken is not None:
                rows = taken.to(scalar_dtype(taken.device)).unbind()
                rows = torch._foreach_mul(rows, launch.lengths.tolist())
                sums.update(zip(launch.positions, rows))
            for x, flag, old in backups:
                x.copy_(torch.where(flag, x, old))
            done += len(launch.positions)
    except BaseException as error:
        if step.columns.in_place:
            error.add_note(
                f"The step is half done: {done} of {len(step.at)} parameters that go "
                "together were updated, others perhaps in part, and none was counted. "
                "Param groups before theirs have stepped. Load a checkpoint, do not repeat "
                "the step"
            )
        raise
    if not joins:
        return {}
    return {i: (sums.get(i), step.packed[k].finite) for i, k in enumerate(step.at)}


def measured(
    launches: list[Launch], step: Step
) -> Iterator[tuple[Launch, dict[str, Tensor]]]:
    """Yield launches with the answers of all their requests, a row for each tensor.

    Each is measured when it is to run, while its tensors are in a cache. Shards are
    measured together, because processes send one message for each round.
    """
    together: list[Launch] = []
    for launch in launches:
        if launch.shards:
            together.append(launch)
            continue
        known = launch.facts(step) if launch.asked else {}
        for name in launch.rounds:
            known[name] = launch.measure(step, name, known)
        yield launch, known
    if not together:
        return
    every = [launch.facts(step) for launch in together]
    for name, size in together[0].rounds.items():
        found = [x.measure(step, name, known) for x, known in zip(together, every)]
        whole = _over_shards(together, found, size.tops)
        for known, x in zip(every, whole):
            known[name] = x
    yield from zip(together, every)


def _over_shards(batch: list[Launch], found: list[Tensor], tops: int) -> list[Tensor]:
    """Return means over whole tensors, of those over their local shards.

    The last `tops` of each row are maxima.
    """
    width = found[0].shape[1]
    rows: dict[int, tuple[Tensor, ShardSpec]] = {}
    for launch, means in zip(batch, found):
        lengths = torch.ones_like(means, dtype=torch.float64)
        column = torch.tensor(launch.lengths.tolist(), dtype=torch.int64, device="cpu")
        column = column.to(lengths)
        lengths[:, : width - tops] = column[:, None]
        own = zip(launch.positions, means * lengths, launch.shards)
        rows |= {i: (row, shard) for i, row, shard in own}
    # All processes have the same order.
    order = sorted(rows)
    numbers = [x for i in order for x in rows[i][0].unbind()]
    shards: list[ShardSpec | None] = [rows[i][1] for i in order for _ in rows[i][0]]
    totals = iter(all_reduce_sum(numbers, shards))
    whole = {i: torch.stack(list(islice(totals, width))) / rows[i][1].numel for i in order}
    largest = iter(all_reduce_sum(numbers, shards, largest=True) if tops else ())
    for i in order if tops else ():
        whole[i][width - tops :] = torch.stack(list(islice(largest, width)))[width - tops :]
    return [torch.stack([whole[i] for i in launch.positions]) for launch in batch]


def _drawn_bits(column: list[Any]) -> list[Tensor]:
    """Return what `drawn` does, made by C++, or [] if that does not make it."""
    bits = [x for x in column if x.dtype == torch.int32 and x.p.is_cpu]
    if (functions := loaded()) is None or len(bits) < len(column):
        return []
    wholes: list[Tensor] = []
    for seed, step, place, p, dtype in bits:
        whole = torch.empty(p.shape, dtype=dtype, device="cpu")
        at, threads = (whole.data_ptr(), whole.numel()), torch.get_num_threads()
        functions.draw_bits(*at, int(seed), int(step), place, threads)
        wholes.append(distribute_like(p, whole))
    return wholes


def _align(p: Tensor, g: Tensor) -> Tensor:
    if same_order(p, g):
        return g.resolve_neg()
    return torch.empty_like(p, dtype=g.dtype, requires_grad=False).copy_(g)


class RehearsedLaunch(Launch):
    """Parameters that kernels would update; a rehearsal makes what these are given."""

    bypasses_autograd = True

    def run(self, step: Step, known: Mapping[str, Tensor]) -> None:
        """Make the arguments of the kernels, which are all that is allocated."""
        grads = self.aligned(step.columns)
        given = self.given(step.columns)
        del known, grads, given


class KernelLaunch(Launch):
    """Parameters that share their kernels, which are called for each of them.

    A TritonListKernel is called once for all. The kernel under None updates a parameter.
    The others measure the round of their name, and write its means behind the scalars and
    the answers before it.
    """

    bypasses_autograd = True

    def __init__(
        self,
        rule: Rule,
        updates: list[Update],
        write: bool,
        asked: Mapping[str, Size],
        kernels: Mapping[str | None, Kernel],
    ) -> None:
        super().__init__(rule, updates, write, asked)
        self._kernels = kernels
        self._table: DeviceTable | None = None

    def readdress(self, columns: Columns) -> None:
        """Update these tensors from now on, which differ in their addresses alone."""
        super().readdress(columns)
        self._table = None

    def _call(
        self, kernel: Kernel, columns: Columns, grads: list[Tensor], values: Tensor
    ) -> None:
        p, *state = self.read(columns.own).values()
        arguments = [p, grads, *state]
        if not self._in_place:
            arguments += self.read(columns.into).values()
        arguments += self.given(columns).values()
        for row, *tensors in zip(values, *arguments):
            kernel(row, *tensors)

    def measure(self, step: Step, name: str, known: Mapping[str, Tensor]) -> Tensor:
        """Return the means, which the kernel writes after each row of scalars."""
        grads, count = self.aligned(step.columns), self.rounds[name].number
        values = step.packed[self._at].tensor(self.dtype, grads[0].device)
        values = rows(values, len(grads), together(known), count)
        self._call(self._kernels[name], step.columns, grads, values)
        return values[:, -count:]

    def run(self, step: Step, known: Mapping[str, Tensor]) -> Tensor | None:
        """Update the parameters."""
        columns, kernel = step.columns, self._kernels[None]
        grads = self.aligned(columns)
        values = step.packed[self._at].tensor(self.dtype, grads[0].device)
        if known:
            values = rows(values, len(grads), together(known))
        else:
            values = values.expand(len(grads), -1)
        if not isinstance(kernel, TritonListKernel):
            self._call(kernel, columns, grads, values)
            return
        given = self.given(columns)
        if self._table is None or not self._in_place or given:
            before, after = self._fixed if self._in_place else self.addresses(columns)
            table = before + after + addresses(chain.from_iterable(given.values()))
            self._table = DeviceTable(grads[0].device, self.lengths, table)
        kernel.run(values, self._table, addresses(grads))


class ListLaunch(Launch):
    """Parameters that share list kernels, which are called once for all.

    It takes what KernelLaunch takes. A kernel that measures a round is called for pieces of
    the tensors, whose means are averaged here.
    """

    bypasses_autograd = True

    def __init__(
        self,
        rule: Rule,
        updates: list[Update],
        write: bool,
        asked: Mapping[str, Size],
        kernels: Mapping[str | None, ListKernel],
    ) -> None:
        super().__init__(rule, updates, write, asked)
        self.kernels = kernels
        self._each = [u.at for u in updates]
        self._dithers, self._several = bool(scales_in(self._names)), {*self._each}
        self.without_torch = self._aligned and not self.rounds and not self._given
        # For each piece that is measured, its row and its share of that.
        lengths = self.lengths
        measured = enumerate(lengths if self.rounds else ())
        starts = [(i, start) for i, n in measured for start in range(0, n, PIECE)]
        shares = [min(PIECE, lengths[i] - start) / lengths[i] for i, start in starts]
        self._pieces = len(starts)
        if self._pieces > len(lengths):
            # The user may have set another default device.
            which = [i for i, _ in starts]
            self._rows = torch.tensor(which, dtype=torch.int64, device="cpu")
            self._shares = torch.tensor(shares, dtype=torch.float64, device="cpu")

    def _table(
        self, columns: Columns, grads: list[Tensor], given: dict[str, list[Tensor]]
    ) -> "array[int]":
        before, after = self._fixed if self._in_place else self.addresses(columns)
        table = before + array("q", map(Tensor.data_ptr, grads)) + after
        return table + addresses(chain.from_iterable(given.values())) if given else table

    def measure(self, step: Step, name: str, known: Mapping[str, Tensor]) -> Tensor:
        """Return the means, which depend on neither threads nor the rest of the list."""
        (number, tops), count = self.rounds[name], len(self.positions)
        grads, answers = self.aligned(step.columns), together(known)
        values = step.packed[self._at].tensor(self.dtype, grads[0].device)
        if answers is not None and self._pieces > count:
            answers = answers[self._rows]
        buffer = rows(values, self._pieces, answers, number)
        each = buffer.stride(0) * buffer.element_size()
        # These may be copies, which have to be alive until the kernel has run.
        given = self.given(step.columns)
        table = self._table(step.columns, grads, given)
        self.kernels[name].run(buffer.data_ptr(), table, self.lengths, per_piece=each)
        means = buffer[:, -number:]
        if self._pieces == count:
            return means
        whole = torch.zeros((count, number), dtype=torch.float64, device="cpu")
        end = number - tops
        whole[:, :end].index_add_(0, self._rows, means[:, :end] * self._shares[:, None])
        largest = means[:, end:].double()
        places = self._rows[:, None].expand_as(largest)
        whole[:, end:].scatter_reduce_(0, places, largest, "amax", include_self=False)
        return whole

    def run(self, step: Step, known: Mapping[str, Tensor]) -> Tensor | None:
        """Update the parameters."""
        columns, packed, per_row = step.columns, step.packed, 0
        # As `aligned`, without the call: this runs in each step.
        grads = self.pick(columns.grads) if self._aligned else self.aligned(columns)
        own, given = packed[self._at], self.given(columns) if self._given else {}
        table = self._table(columns, grads, given)
        if not known and all(map(_on_host, packed)):
            if len(self._several) == 1:
                values = own.array(self.dtype)
            else:
                lines = {i: packed[i].array(self.dtype, ALIGNMENT) for i in self._several}
                line = lines[self._at]
                values = array(line.typecode, b"".join([lines[i] for i in self._each]))
                per_row = len(line) * line.itemsize
            at, _ = values.buffer_info()
        else:
            values = own.tensor(self.dtype, grads[0].device)
            if len(self._several) > 1:
                every = [packed[i].tensor(self.dtype, values.device) for i in self._each]
                values = torch.stack(every)
            if known or len(self._several) > 1:
                values = rows(values, len(grads), together(known))
                per_row = values.stride(0) * values.element_size()
            at = values.data_ptr()
        # Only codes are rounded by it. Reading it from a GPU would synchronize.
        dither = float(own.scalars.dither) if self._dithers else 0.0
        self.kernels[None].run(at, table, self.lengths, per_row=per_row, dither=dither)


def together(known: Mapping[str, Tensor]) -> Tensor | None:
    """Return the answers known as kernels take them, in one row for each tensor."""
    if len(known) < 2:
        return next(iter(known.values()), None)
    return torch.cat([*known.values()], 1)


def rows(values: Tensor, count: int, known: Tensor | None, room: int = 0) -> Tensor:
    """Return rows of values, answers, and room; each begins where kernels expect it."""
    width, unit = values.shape[-1], ALIGNMENT // values.element_size()
    end = width + (0 if known is None else known.shape[1])
    padded = values.new_empty(count, -(-(end + room) // unit) * unit)[:, : end + room]
    padded[:, :width] = values
    if known is not None:
        padded[:, width:end] = known
    return padded


def addresses(tensors: Iterable[Tensor]) -> "array[int]":
    """Return the tensors' addresses."""
    return array("q", map(Tensor.data_ptr, tensors))
