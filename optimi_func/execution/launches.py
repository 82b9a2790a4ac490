"""Launches: calls that update some parameters of a plan, and that later steps repeat."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Self, TypeVar

import torch
from torch import Tensor

from optimi_func.core.codes import GROUP, same_order
from optimi_func.core.leaf import (
    compute_dtype,
    count_means,
    leaf_move,
    leaf_step,
    whole_means,
)
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import Leaf, Rule, Scalars
from optimi_func.execution.cpp import PIECE
from optimi_func.execution.inductor import Kernel
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.scalars import ALIGNMENT, Packed
from optimi_func.execution.slots import Columns, Update, scale_places
from optimi_func.execution.sums import Part
from optimi_func.execution.tensors import leaf_of, write_back
from optimi_func.execution.triton_list import DeviceTable, TritonListKernel

T = TypeVar("T")
# Temporaries that are alive at once, at most: those of Adan with Kahan summation.
TEMPORARIES = 18
# Single operations update parameters of at least so many elements in slices, whose
# temporaries have at most so many bytes for each element of the parameter. Slices have at
# least so many elements, on other devices than the CPU more: a call costs as much as they.
SLICED, ROOM, LEAST, AT_ONCE = 1_000_000, 2, 1 << 12, 1 << 18


class Launch:
    """A call that updates some of a plan's parameters; nothing happens before `run`.

    It is made of updates of one kind (see `alike`) in ascending order.
    """

    host = False  # with scalars on the host, `run` calls no operation of torch
    raw = True  # `run` may write past autograd, whose versions then count nothing
    movable = False  # `readdress` is all that other addresses take
    taken: Tensor | None = None  # the means that the last `run` took, a row for each

    def __init__(self, updates: Sequence[Update]) -> None:
        first = updates[0]
        self.places = [u.place for u in updates]
        self._at = first.at
        self.dtype = compute_dtype(first.g.dtype, *first.slot.dtypes)
        self._columns, self._codes = first.slot.columns, first.slot.codes
        self._in_place = first.slot.in_place
        self._lengths = array("q", [u.slot.numel for u in updates])
        # The addresses of the parameters, and those of all columns after the gradients.
        p, *rest = zip(*[u.slot.addresses for u in updates]) if self._in_place else [()]
        self._fixed = array("q", p), array("q", chain.from_iterable(rest))
        self._aligned = all([u.aligned for u in updates])

    def pick(self, items: list[T]) -> list[T]:
        """Pick this launch's part from a list with an item for each parameter."""
        if len(items) == len(self.places):
            return items
        return [items[i] for i in self.places]

    def read(self, columns: Columns) -> Columns:
        """Pick the tensors that this launch reads, column by column."""
        return [self.pick(columns[i]) for i in self._columns]

    def written(self, columns: Columns) -> Columns:
        """Pick those that it writes."""
        return self.read(columns if self._in_place else columns[len(columns) // 2 :])

    def addresses(self, columns: Columns) -> "tuple[array[int], array[int]]":
        """Return the addresses before those of the gradients, and those after them."""
        if self._in_place:
            return self._fixed
        p, *rest = self.read(columns) + self.written(columns)
        return addresses(p), addresses(chain.from_iterable(rest))

    def readdress(self, columns: Columns) -> None:
        """Update these tensors from now on, which differ in their addresses alone."""
        p, *rest = self.read(columns)
        self._fixed = addresses(p), addresses(chain.from_iterable(rest))

    def moved(self, columns: Columns) -> Self:
        """Return a launch of tensors that differ in their addresses alone."""
        launch = copy(self)
        launch.readdress(columns)
        return launch

    def aligned(self, columns: Columns) -> list[Tensor]:
        """Pick the gradients, copied if a kernel would misread their memory."""
        grads = self.pick(columns[1])
        if self._aligned:
            return grads
        return list(map(_align, self.pick(columns[0]), grads))

    def measure(self, columns: Columns, packed: list[Packed]) -> Tensor:
        """Return the means that the rule takes over the local shards, a row for each."""
        raise NotImplementedError

    def again(self, columns: Columns, packed: list[Packed], means: Tensor) -> Tensor:
        """Return the local means of the direction, given those before it."""
        raise NotImplementedError

    def sums(self) -> dict[int, Tensor]:
        """Return the sums that the means of the last `run` were made of, by place."""
        assert self.taken is not None
        rows = self.taken.to(scalar_dtype(self.taken.device)).unbind()
        return dict(zip(self.places, torch._foreach_mul(rows, list(self._lengths))))

    def run(self, columns: Columns, packed: list[Packed], means: Tensor | None) -> None:
        """Update the parameters; `means` are those over all shards, if they are known."""
        raise NotImplementedError


def run_launches(
    launches: list[Launch],
    columns: Columns,
    packed: list[Packed],
    at: list[int],
    written: Columns,
    joins: bool = False,
) -> dict[int, Part]:
    """Run launches, and undo what they wrote where a `finite` flag is false.

    `at` is, for each parameter, the index of its scalars in `packed`. Returns the sums of
    each parameter, by its place, if the rule joins them. What is raised meanwhile has a
    note about what was written.
    """
    flagged, sums, ran = False, dict[int, Tensor](), 0
    for x in packed:
        flagged |= x.finite is not None
    try:
        for launch in launches:
            backups: list[tuple[Tensor, Tensor, Tensor]] = []
            for column in written if flagged else ():
                for i, x in zip(launch.places, launch.pick(column)):
                    if x is not None and (flag := packed[at[i]].finite) is not None:
                        backups.append((x, flag, x.clone()))
            launch.run(columns, packed, None)
            sums.update(launch.sums() if joins else ())
            for x, flag, old in backups:
                x.copy_(torch.where(flag, x, old))
            ran += 1
    except BaseException as error:
        if launches[ran]._in_place:
            done = sum([len(launch.places) for launch in launches[:ran]])
            error.add_note(
                f"The step is half done: {done} of {len(at)} parameters that go together "
                "were updated, others perhaps in part, and none was counted. Load a "
                "checkpoint, do not repeat the step"
            )
        raise
    if not joins:
        return {}
    return {i: (sums.get(i), packed[k].finite) for i, k in enumerate(at)}


def _align(p: Tensor, g: Tensor) -> Tensor:
    if same_order(p, g):
        return g.resolve_neg()
    return torch.empty_like(p, dtype=g.dtype).copy_(g)


def plan_eager(
    rule: Rule, updates: list[Update], write: bool, size: int = 0
) -> list[Launch]:
    """Plan updates one by one, in slices of a size, or the large ones in their own."""

    def size_of(u: Update) -> int:
        if size or u.slot.numel < SLICED or rule.eager or not u.can_be_cut:
            return size
        wide = compute_dtype(u.g.dtype, *u.slot.dtypes)
        least = LEAST if u.p.device.type in ("cpu", "meta") else AT_ONCE
        return max(least, ROOM * u.slot.numel // (TEMPORARIES * wide.itemsize))

    return [EagerLaunch(rule, u, write, size_of(u)) for u in updates]


class EagerLaunch(Launch):
    """One parameter, operation by operation, in slices if there is a size of them."""

    raw, movable = False, True

    def __init__(self, rule: Rule, update: Update, write: bool, size: int) -> None:
        super().__init__([update])
        self._rule, self._write = rule, write
        rates = update.scalars.scalars.rates
        self._size = size // GROUP * GROUP
        self._measures = size > 0 and write and count_means(rule, rates) > 0
        twice = rule.measure is not None and rule.means is not None
        self._first = count_means(rule, rates) if twice else 0

    def _slices(self, columns: Columns) -> Iterator[Columns]:
        """Yield columns of the parameter alone, or of its elements from one to another."""
        tensors = [x[self.places[0]] for x in columns]
        if not self._size:
            yield [[x] for x in tensors]
            return
        rows = dict.fromkeys((1, *self._columns), 1)
        rows |= {self._columns[k]: GROUP for k in scale_places(self._codes, 1)}
        if not self._in_place:
            rows |= {k + len(columns) // 2: row for k, row in rows.items()}
        flat = {k: tensors[k].as_strided((tensors[k].numel(),), (1,)) for k in rows}
        for start in range(0, self._lengths[0], self._size):
            end = start + self._size
            parts = {k: x[start // rows[k] : -(-end // rows[k])] for k, x in flat.items()}
            yield [[parts.get(k)] for k in range(len(columns))]

    def _given(
        self, columns: Columns, packed: list[Packed]
    ) -> tuple[Leaf, Tensor, Scalars]:
        tensors = [x for (x,) in self.read(columns)]
        leaf = leaf_of(self._rule, self._codes, tensors)
        return leaf, columns[1][0], packed[self._at].scalars

    def measure(self, columns: Columns, packed: list[Packed]) -> Tensor:
        """Return the means as one row."""
        wholes: list[Tensor] = []
        offset = 0

        def take(measured: list[Tensor]) -> list[Tensor]:
            if not self._size:
                wholes[:] = wholes or measured  # those before the direction
                return whole_means(measured)
            wholes[:] = wholes or [x.new_empty(self._lengths[0]) for x in measured]
            for whole, x in zip(wholes, measured):
                whole[offset : offset + len(x)] = x
            return whole_means(measured)

        for part in self._slices(columns):
            leaf_move(self._rule, *self._given(part, packed), True, take)
            offset += self._size
        # The bits of a mean depend on how its elements are added up.
        return torch.stack(whole_means(wholes))[None]

    def again(self, columns: Columns, packed: list[Packed], means: Tensor) -> Tensor:
        """Return the means of the direction as one row."""
        rounds: list[list[Tensor]] = []

        def take(measured: list[Tensor]) -> list[Tensor]:
            rounds.append(whole_means(measured))
            last = rounds[-1] if rounds[1:] else means[0].to(measured[0].dtype).unbind()
            return list(last)

        (part,) = self._slices(columns)
        leaf_move(self._rule, *self._given(part, packed), True, take)
        return torch.stack(rounds[1])[None]

    def run(self, columns: Columns, packed: list[Packed], means: Tensor | None) -> None:
        """Update the parameter."""
        if means is None and self._measures:
            means = self.measure(columns, packed)
        used_means: list[Tensor] = []

        def take(measured: list[Tensor]) -> list[Tensor]:
            row = None if means is None else means[0].to(measured[0].dtype)
            if row is not None and self._first:
                row = row[self._first :] if used_means else row[: self._first]
            used_means[:] = whole_means(measured) if row is None else row.unbind()
            return used_means

        for part in self._slices(columns):
            self._move(part, packed, take)
        joins = self._rule.join is not None and used_means
        self.taken = torch.stack(used_means)[None] if joins else None

    def _move(
        self,
        part: Columns,
        packed: list[Packed],
        take: Callable[[list[Tensor]], list[Tensor]],
    ) -> None:
        # Its temporaries are freed before those of the next slice are made.
        new = leaf_step(self._rule, *self._given(part, packed), self._write, take)
        write_back([x for (x,) in self.written(part)], new)


class KernelLaunch(Launch):
    """Parameters that share their kernels, which are called for each of them.

    A TritonListKernel is called once for all. `mean` measures a parameter and writes so
    many means (`count`) after the scalars, where `kernel` reads them; None if there are
    none.
    """

    movable = True

    def __init__(
        self, kernel: Kernel, mean: Kernel | None, count: int, updates: list[Update]
    ) -> None:
        super().__init__(updates)
        self._kernel, self._mean, self._count = kernel, mean, count
        self._table: DeviceTable | None = None

    def readdress(self, columns: Columns) -> None:
        """Update these tensors from now on, which differ in their addresses alone."""
        super().readdress(columns)
        self._table = None

    def _values(
        self, grads: list[Tensor], packed: list[Packed], means: Tensor | None
    ) -> Tensor:
        device, count = grads[0].device, len(self.places)
        values = packed[self._at].tensor(self.dtype, device)
        if self._mean is None:
            return values.expand(count, -1)
        return rows(
            values, values.new_zeros(count, self._count) if means is None else means
        )

    def _call(
        self, columns: Columns, grads: list[Tensor], values: Tensor, *kernels: Kernel
    ) -> None:
        p, *state = self.read(columns)
        arguments = [p, grads, *state]
        if not self._in_place:
            arguments += self.written(columns)
        for row, *tensors in zip(values, *arguments):
            for kernel in kernels:
                kernel(row, *tensors)

    def measure(self, columns: Columns, packed: list[Packed]) -> Tensor:
        """Return the means, which the kernel writes after each row of scalars."""
        assert self._mean is not None
        grads = self.aligned(columns)
        values = self._values(grads, packed, None)
        self._call(columns, grads, values, self._mean)
        return values[:, -self._count :]

    def run(self, columns: Columns, packed: list[Packed], means: Tensor | None) -> None:
        """Update the parameters."""
        grads = self.aligned(columns)
        values = self._values(grads, packed, means)
        self.taken = values[:, -self._count :] if self._mean is not None else None
        measures = [self._mean] if self._mean is not None and means is None else []
        if not isinstance(self._kernel, TritonListKernel):
            self._call(columns, grads, values, *measures, self._kernel)
            return
        if measures:
            self._call(columns, grads, values, *measures)
        if self._table is None or not self._in_place:
            before, after = self.addresses(columns)
            self._table = DeviceTable(grads[0].device, self._lengths, before + after)
        self._kernel.run(values, self._table, addresses(grads))


class ListLaunch(Launch):
    """Parameters that share a list kernel, which is called once for all.

    Its arguments are those of KernelLaunch, but `mean` measures pieces of parameters.
    """

    movable = True

    def __init__(
        self, kernel: ListKernel, mean: ListKernel | None, count: int, updates: list[Update]
    ) -> None:
        super().__init__(updates)
        self.kernel, self._mean, self._count = kernel, mean, count
        self._each = [u.at for u in updates]
        self._dithers, self._several = any(self._codes), {*self._each}
        self.host = self._aligned and mean is None
        lengths = self._lengths
        # For each piece that is measured, its row and its share of that.
        measured = enumerate(lengths if mean is not None else ())
        starts = [(i, start) for i, n in measured for start in range(0, n, PIECE)]
        shares = [min(PIECE, lengths[i] - start) / lengths[i] for i, start in starts]
        self._pieces = len(starts)
        if self._pieces > len(lengths):
            # The user may have set another default device.
            self._rows = torch.tensor([i for i, _ in starts], device="cpu")
            self._shares = torch.tensor(shares, dtype=torch.float64, device="cpu")

    def _table(self, columns: Columns, grads: list[Tensor]) -> "array[int]":
        before, after = self.addresses(columns)
        return before + addresses(grads) + after

    def measure(self, columns: Columns, packed: list[Packed]) -> Tensor:
        """Return the means, which depend on neither threads nor the rest of the list."""
        assert self._mean is not None
        values = packed[self._at].tensor(self.dtype, columns[1][0].device)
        buffer = rows(values, values.new_zeros(self._pieces, self._count))
        step = buffer.stride(0) * buffer.element_size()
        # They may be copies, so they have to be alive until the kernel has run.
        grads = self.aligned(columns)
        table = self._table(columns, grads)
        self._mean.run(buffer.data_ptr(), table, self._lengths, per_piece=step)
        means = buffer[:, -self._count :]
        if self._pieces == len(self.places):
            return means
        shape = (len(self.places), self._count)
        sums = torch.zeros(shape, dtype=torch.float64, device="cpu")
        return sums.index_add_(0, self._rows, means * self._shares[:, None])

    def run(self, columns: Columns, packed: list[Packed], means: Tensor | None) -> None:
        """Update the parameters."""
        own, per_row = packed[self._at], 0
        grads = self.aligned(columns)
        table = self._table(columns, grads)
        if self._mean is not None and means is None:
            means = self.taken = self.measure(columns, packed)
        if means is None and all([packed[i].on_host for i in self._several]):
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
            if means is None and len(self._several) > 1:
                every = [packed[i].tensor(self.dtype, values.device) for i in self._each]
                values, means = torch.stack(every), values.new_empty(len(grads), 0)
            if means is not None:
                values = rows(values, means)
                per_row = values.stride(0) * values.element_size()
            at = values.data_ptr()
        # Only codes are rounded by it. Reading it from a GPU would synchronize.
        dither = float(own.scalars.dither) if self._dithers else 0.0
        self.kernel.run(at, table, self._lengths, per_row=per_row, dither=dither)


def rows(values: Tensor, last: Tensor) -> Tensor:
    """Append `values` and each row of `last`; every row begins where kernels expect it."""
    width, unit = values.shape[-1], ALIGNMENT // values.element_size()
    count = width + last.shape[1]
    padded = values.new_empty(len(last), -(-count // unit) * unit)[:, :count]
    padded[:, :width] = values
    padded[:, width:] = last
    return padded


def addresses(tensors: Iterable[Tensor]) -> "array[int]":
    """Return the tensors' addresses."""
    return array("q", map(Tensor.data_ptr, tensors))
