"""Launches: calls that update some parameters of a plan, and that later steps repeat."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate, chain, islice
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
from optimi_func.core.leaf import compute_dtype, count_beforehand, count_means, count_tops
from optimi_func.core.math import scalar_dtype
from optimi_func.core.packed import ALIGNMENT
from optimi_func.core.philox import drawn
from optimi_func.core.program import Room
from optimi_func.core.rule import Rule
from optimi_func.execution.cpp import PIECE, loaded
from optimi_func.execution.inductor import Kernel
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.slots import Columns, Step, Update
from optimi_func.execution.sums import Part
from optimi_func.execution.triton_list import DeviceTable, TritonListKernel

T = TypeVar("T")
_on_host, _raw = attrgetter("on_host"), attrgetter("raw")


class Launch:
    """A call that updates some of a plan's parameters; nothing happens before `run`.

    It is made of updates of one kind (see `alike`) in ascending order. The base class is
    that of empty tensors.
    """

    host = False  # with scalars on the host, `run` calls no operation of torch
    raw = False  # `run` may write past autograd, whose versions then count nothing
    movable = True  # `readdress` is all that other addresses take

    def __init__(self, rule: Rule, updates: Sequence[Update], write: bool) -> None:
        first = updates[0]
        self.places = [u.place for u in updates]
        self.lengths = array("q", [u.slot.numel for u in updates])
        self._rule, self._write, self._at = rule, write, first.at
        self.dtype = compute_dtype(first.g.dtype, *first.slot.dtypes)
        self._columns, self._codes = first.slot.columns, first.slot.codes
        self._in_place = first.slot.in_place
        # The addresses of the parameters, and those of all columns after the gradients.
        p, *rest = zip(*[u.slot.addresses for u in updates]) if self._in_place else [()]
        self._fixed = array("q", p), array("q", chain.from_iterable(rest))
        self._aligned = all([u.aligned for u in updates])
        self._given = bool(first.given)
        # The number of means in each round that is measured before `run`, and the number
        # of elements of each tensor, which a rule with `measure` knows before that.
        rates = first.scalars.scalars.rates
        self.rounds = count_means(rule, rates, write)
        self.tops = count_tops(rule, rates, write)
        self.sizes: Tensor | None = None
        # The columns of what a rule with `measure` keeps, before the compensations.
        self.count_beforehand = count_beforehand(rule, rates)
        self.kept = range(-1 - max(0, self.count_beforehand - 1), -1)
        # Sums of a rule that joins them are reduced at the end of the step.
        held = bool(self.rounds) and rule.join is None
        self.shards = [u.slot.shard for u in updates if held and u.slot.shard is not None]
        if self.count_beforehand:
            device = first.g.device
            sizes = [x.numel for x in self.shards] or self.lengths.tolist()
            wide = torch.tensor(sizes, dtype=torch.float64, device="cpu")
            self.sizes = wide.to(device, scalar_dtype(device))[:, None]

    def pick(self, items: list[T]) -> list[T]:
        """Pick this launch's part from a list with an item for each parameter."""
        if len(items) == len(self.places):
            return items
        return [items[i] for i in self.places]

    def read(self, lists: list[list[Any]]) -> list[list[Any]]:
        """Pick the tensors of this launch, out of those that it reads or writes."""
        return [self.pick(lists[i]) for i in self._columns]

    def addresses(self, columns: Columns) -> "tuple[array[int], array[int]]":
        """Return the addresses before those of the gradients, and those after them.

        They are `_fixed` if the step is in place.
        """
        p, *rest = self.read(columns.own) + self.read(columns.into)
        return addresses(p), addresses(chain.from_iterable(rest))

    def readdress(self, columns: Columns) -> None:
        """Update these tensors from now on, which differ in their addresses alone."""
        p, *rest = self.read(columns.own)
        self._fixed = addresses(p), addresses(chain.from_iterable(rest))

    def moved(self, columns: Columns) -> Self:
        """Return a launch of tensors that differ in their addresses alone."""
        launch = copy(self)
        launch.readdress(columns)
        return launch

    def _round(self, known: Tensor | None) -> int:
        """Return the index of the round after those known."""
        width = self.count_beforehand if known is None else known.shape[1]
        before = accumulate(self.rounds, initial=self.count_beforehand)
        return [*before].index(width)

    def beforehand(self, step: Step) -> Tensor | None:
        """Return what is known before any round, a row for each tensor."""
        if not self.kept or self.sizes is None:
            return self.sizes
        columns = [self.pick(step.columns.own[i]) for i in self.kept]
        rows = [torch.stack(x).to(self.sizes) for x in columns]
        return torch.stack([self.sizes[:, 0], *rows], 1)

    def keep(self, step: Step, known: Tensor | None) -> None:
        """Write the numbers of tensors that a rule with `measure` keeps."""
        assert known is not None and self._rule.measure is not None
        count = self.count_beforehand + self._rule.measure.number
        own = known[:, :count].to(self.dtype).unbind(1)
        _, new = self._rule.measure.settle(own, step.packed[self._at].scalars.coeffs)
        for i, x in zip(self.kept, new):
            torch._foreach_copy_(self.pick(step.columns.into[i]), x.unbind())

    def aligned(self, columns: Columns) -> list[Tensor]:
        """Pick the gradients, copied if a kernel would misread their memory."""
        grads = self.pick(columns.grads)
        if self._aligned:
            return grads
        return list(map(_align, self.pick(columns.own[0]), grads))

    def given(self, columns: Columns) -> list[list[Tensor]]:
        """Pick what is given besides, in the parameters' memory order."""
        lists: list[list[Tensor]] = []
        if not self._given:
            return lists
        params = self.pick(columns.own[0])
        for column in map(self.pick, columns.given):
            if column[0] is not None:
                tensors = _drawn_bits(column) or drawn(column, self.dtype)
                tensors = to_local(tensors)
                lists.append(list(map(_align, params, tensors)))
        return lists

    def measure(self, step: Step, known: Tensor | None) -> Tensor:
        """Return the means of the next round over the local tensors, a row for each.

        `known` has a row of those before it.
        """
        i = self._round(known)
        count, device = self.rounds[i], step.columns.grads[self.places[0]].device
        shape = len(self.places), count
        found = torch.zeros(shape, dtype=torch.float64, device=device)
        found[:, count - self.tops[i] :] = -math.inf
        return found

    def run(self, step: Step, known: Tensor | None) -> Tensor | None:
        """Update the parameters, and return the means that it has taken itself, if any.

        `known` are those of all `rounds`.
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
    if not all(map(_raw, launches)):
        step = step._replace(room=Room())
    try:
        for launch, known in measured(launches, step):
            backups: list[tuple[Tensor, Tensor, Tensor]] = []
            for column in step.columns.written(step.write) if flagged else ():
                for i, x in zip(launch.places, launch.pick(column)):
                    flag = step.packed[step.at[i]].finite
                    if x is not None and flag is not None:
                        backups.append((x, flag, x.clone()))
            taken = launch.run(step, known)
            if launch.kept and step.write:
                launch.keep(step, known)
            if joins and (taken := known if taken is None else taken) is not None:
                rows = taken.to(scalar_dtype(taken.device)).unbind()
                rows = torch._foreach_mul(rows, launch.lengths.tolist())
                sums.update(zip(launch.places, rows))
            for x, flag, old in backups:
                x.copy_(torch.where(flag, x, old))
            done += len(launch.places)
    except BaseException as error:
        if step.columns.in_place:
            error.add_note(
                f"The step is half done: {done} of {len(step.at)} parameters that go "
                "together were updated, others perhaps in part, and none was counted. Load "
                "a checkpoint, do not repeat the step"
            )
        raise
    if not joins:
        return {}
    return {i: (sums.get(i), step.packed[k].finite) for i, k in enumerate(step.at)}


def measured(launches: list[Launch], step: Step) -> Iterator[tuple[Launch, Tensor | None]]:
    """Yield launches with the means of all their rounds, a row for each tensor.

    Each is measured when it is to run, while its tensors are in a cache. Shards are
    measured together, because processes send one message for each round.
    """
    together: list[Launch] = []
    for launch in launches:
        if launch.shards:
            together.append(launch)
            continue
        # Without a call where there is nothing, as for most rules.
        known = None if launch.sizes is None else launch.beforehand(step)
        for _ in launch.rounds:
            known = _behind(known, launch.measure(step, known))
        yield launch, known
    every = [launch.beforehand(step) for launch in together] if together else []
    for i, _ in enumerate(together[0].rounds if together else ()):
        found = [x.measure(step, known) for x, known in zip(together, every)]
        whole = _over_shards(together, found, together[0].tops[i])
        every = list(map(_behind, every, whole))
    yield from zip(together, every)


def _behind(known: Tensor | None, found: Tensor) -> Tensor:
    return found if known is None else torch.cat([known, found], 1)


def _over_shards(batch: list[Launch], found: list[Tensor], tops: int) -> list[Tensor]:
    """Return means over whole tensors, of those over their local shards.

    So many of the last are maxima.
    """
    width = found[0].shape[1]
    rows: dict[int, tuple[Tensor, ShardSpec]] = {}
    for launch, means in zip(batch, found):
        lengths = torch.ones_like(means, dtype=torch.float64)
        column = torch.tensor(launch.lengths.tolist(), dtype=torch.int64, device="cpu")
        column = column.to(lengths)
        lengths[:, : width - tops] = column[:, None]
        own = zip(launch.places, means * lengths, launch.shards)
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
    return [torch.stack([whole[i] for i in launch.places]) for launch in batch]


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

    raw = True

    def run(self, step: Step, known: Tensor | None) -> None:
        """Make the arguments of the kernels, which are all that is allocated."""
        grads = self.aligned(step.columns)
        given = self.given(step.columns)
        del known, grads, given


class KernelLaunch(Launch):
    """Parameters that share their kernels, which are called for each of them.

    A TritonListKernel is called once for all. The last of `kernels` updates a parameter.
    Those before it measure one round each, and write its means behind the scalars and the
    means known, where the last reads them.
    """

    raw = True

    def __init__(
        self, rule: Rule, updates: list[Update], write: bool, kernels: list[Kernel]
    ) -> None:
        super().__init__(rule, updates, write)
        self._kernels = kernels
        self._table: DeviceTable | None = None

    def readdress(self, columns: Columns) -> None:
        """Update these tensors from now on, which differ in their addresses alone."""
        super().readdress(columns)
        self._table = None

    def _call(
        self, kernel: Kernel, columns: Columns, grads: list[Tensor], values: Tensor
    ) -> None:
        p, *state = self.read(columns.own)
        arguments = [p, grads, *state]
        if not self._in_place:
            arguments += self.read(columns.into)
        arguments += self.given(columns)
        for row, *tensors in zip(values, *arguments):
            kernel(row, *tensors)

    def measure(self, step: Step, known: Tensor | None) -> Tensor:
        """Return the means, which the kernel writes after each row of scalars."""
        i = self._round(known)
        grads = self.aligned(step.columns)
        values = step.packed[self._at].tensor(self.dtype, grads[0].device)
        values = rows(values, len(grads), known, self.rounds[i])
        self._call(self._kernels[i], step.columns, grads, values)
        return values[:, -self.rounds[i] :]

    def run(self, step: Step, known: Tensor | None) -> Tensor | None:
        """Update the parameters."""
        columns, kernel = step.columns, self._kernels[-1]
        grads = self.aligned(columns)
        values = step.packed[self._at].tensor(self.dtype, grads[0].device)
        if known is None:
            values = values.expand(len(grads), -1)
        else:
            values = rows(values, len(grads), known)
        if not isinstance(kernel, TritonListKernel):
            self._call(kernel, columns, grads, values)
            return
        given = self.given(columns)
        if self._table is None or not self._in_place or given:
            before, after = self._fixed if self._in_place else self.addresses(columns)
            table = before + after + addresses(chain.from_iterable(given))
            self._table = DeviceTable(grads[0].device, self.lengths, table)
        kernel.run(values, self._table, addresses(grads))


class ListLaunch(Launch):
    """Parameters that share list kernels, which are called once for all.

    Its arguments are those of KernelLaunch, but the first kernels measure pieces.
    """

    raw = True

    def __init__(
        self, rule: Rule, updates: list[Update], write: bool, kernels: list[ListKernel]
    ) -> None:
        super().__init__(rule, updates, write)
        self.kernels = kernels
        self._each = [u.at for u in updates]
        self._dithers, self._several = any(self._codes), {*self._each}
        self.host = self._aligned and not self.rounds and not self._given
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
        self, columns: Columns, grads: list[Tensor], given: list[list[Tensor]]
    ) -> "array[int]":
        before, after = self._fixed if self._in_place else self.addresses(columns)
        table = before + addresses(grads) + after
        return table + addresses(chain.from_iterable(given)) if given else table

    def measure(self, step: Step, known: Tensor | None) -> Tensor:
        """Return the means, which depend on neither threads nor the rest of the list."""
        i, count = self._round(known), len(self.places)
        grads = self.aligned(step.columns)
        values = step.packed[self._at].tensor(self.dtype, grads[0].device)
        if known is not None and self._pieces > count:
            known = known[self._rows]
        buffer = rows(values, self._pieces, known, self.rounds[i])
        each = buffer.stride(0) * buffer.element_size()
        # These may be copies, which have to be alive until the kernel has run.
        given = self.given(step.columns)
        table = self._table(step.columns, grads, given)
        self.kernels[i].run(buffer.data_ptr(), table, self.lengths, per_piece=each)
        means = buffer[:, -self.rounds[i] :]
        if self._pieces == count:
            return means
        whole = torch.zeros((count, self.rounds[i]), dtype=torch.float64, device="cpu")
        end = self.rounds[i] - self.tops[i]
        whole[:, :end].index_add_(0, self._rows, means[:, :end] * self._shares[:, None])
        tops = means[:, end:].double()
        places = self._rows[:, None].expand_as(tops)
        whole[:, end:].scatter_reduce_(0, places, tops, "amax", include_self=False)
        return whole

    def run(self, step: Step, known: Tensor | None) -> Tensor | None:
        """Update the parameters."""
        packed, per_row = step.packed, 0
        own, grads = packed[self._at], self.aligned(step.columns)
        given = self.given(step.columns) if self._given else []
        table = self._table(step.columns, grads, given)
        if known is None and all(map(_on_host, packed)):
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
            if known is not None or len(self._several) > 1:
                values = rows(values, len(grads), known)
                per_row = values.stride(0) * values.element_size()
            at = values.data_ptr()
        # Only codes are rounded by it. Reading it from a GPU would synchronize.
        dither = float(own.scalars.dither) if self._dithers else 0.0
        self.kernels[-1].run(at, table, self.lengths, per_row=per_row, dither=dither)


def rows(values: Tensor, count: int, known: Tensor | None, room: int = 0) -> Tensor:
    """Return rows of values, means known, and room; each begins where kernels expect it."""
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
