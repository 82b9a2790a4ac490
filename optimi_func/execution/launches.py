"""Launches: calls that update some parameters of a plan, and that later steps repeat."""

from array import array
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from optimi_func.core.distributed import ShardSpec, all_reduce_sum
from optimi_func.core.leaf import (
    compute_dtype,
    count_means,
    leaf_means,
    leaf_step,
    whole_means,
)
from optimi_func.core.rule import Leaf, Rule
from optimi_func.execution.cpp import PIECE
from optimi_func.execution.inductor import Flat
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.scalars import ALIGNMENT, Packed
from optimi_func.execution.slots import Roles, Slot
from optimi_func.execution.tensors import is_plain, leaf_of, same_order, write_back
from optimi_func.execution.triton_list import DeviceTable, TritonListKernel

T = TypeVar("T")


class Update(NamedTuple):
    """One parameter to update, while its launch is planned."""

    place: int  # index among the parameters of the plan
    slot: Slot
    p: Tensor
    g: Tensor
    at: int  # index of its scalars
    scalars: Packed

    @property
    def aligned(self) -> bool:
        """Return True if the gradient has the parameter's memory order."""
        return same_order(self.p, self.g) and not self.g.is_neg()

    @property
    def plain(self) -> bool:
        """Return True if a kernel can read everything from memory."""
        return self.slot.plain and is_plain(self.g)


def alike(updates: list[Update]) -> list[list[Update]]:
    """Group updates that one launch can take. Empty tensors are dropped."""
    groups: dict[Any, list[Update]] = {}
    for u in updates:
        slot = u.slot
        if slot.numel:
            tensors = slot.dtypes, slot.roles, slot.dense, bool(slot.into)
            kind = *tensors, u.plain, u.g.dtype, u.g.device, u.at
            groups.setdefault(kind, []).append(u)
    return list(groups.values())


class StepInputs(NamedTuple):
    """Everything that a plan's launches read and write in one step."""

    roles: Roles
    targets: Roles  # `roles` itself for a step in place
    grads: list[Tensor]
    packed: list[Packed]
    at: list[int]  # for each parameter the index of its scalars


class Launch:
    """A call that updates some of a plan's parameters; nothing happens before `run`.

    Args:
        updates: Updates of one kind (see `alike`) in ascending order.
    """

    host = False  # with scalars on the host, `run` calls no operation of torch
    raw = True  # `run` may write past autograd, whose versions then count nothing

    def __init__(self, updates: Sequence[Update]) -> None:
        first = updates[0]
        self.places = [u.place for u in updates]
        self._at = first.at
        self.dtype = compute_dtype(first.g.dtype, *first.slot.dtypes)
        self._roles, self._codes = first.slot.roles, first.slot.codes
        self._aligned = all([u.aligned for u in updates])

    def pick(self, items: list[T]) -> list[T]:
        """Pick this launch's part from a list with an item for each parameter."""
        if len(items) == len(self.places):
            return items
        return [items[i] for i in self.places]

    def columns(self, roles: Roles) -> list[list[Tensor]]:
        """Pick the tensors of this launch's parameters, role by role."""
        return [self.pick(roles[i]) for i in self._roles]

    def aligned(self, inputs: StepInputs) -> list[Tensor]:
        """Pick the gradients, copied if a kernel would misread their memory."""
        if self._aligned and len(inputs.grads) == len(self.places):
            return inputs.grads
        grads = self.pick(inputs.grads)
        if self._aligned:
            return grads
        return list(map(_align, self.pick(inputs.roles[0]), grads))

    def scalars(self, inputs: StepInputs) -> Packed:
        """Return the scalars of this launch."""
        return inputs.packed[self._at]

    def measure(self, inputs: StepInputs) -> Tensor:
        """Return the means that the rule takes over the local shards, a row for each."""
        raise NotImplementedError

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameters; `means` are those over all shards, if they are known."""
        raise NotImplementedError


def run_launches(launches: list[Launch], inputs: StepInputs, written: Roles) -> None:
    """Run launches, and undo what they wrote where a `finite` flag is false."""
    flagged = False
    for x in inputs.packed:
        flagged |= x.finite is not None
    for launch in launches:
        if not flagged:
            launch.run(inputs)
            continue
        flags = [inputs.packed[inputs.at[i]].finite for i in launch.places]
        tensors = chain.from_iterable(zip(launch.pick(role), flags) for role in written)
        kept = [
            (x, flag, x.clone())
            for x, flag in tensors
            if x is not None and flag is not None
        ]
        launch.run(inputs)
        for x, flag, old in kept:
            x.copy_(torch.where(flag, x, old))


def _align(p: Tensor, g: Tensor) -> Tensor:
    if same_order(p, g):
        return g.resolve_neg()
    return torch.empty_like(p, dtype=g.dtype).copy_(g)


class EagerLaunch(Launch):
    """One parameter, operation by operation."""

    raw = False

    def __init__(self, rule: Rule[Any, Any], update: Update, write: bool) -> None:
        super().__init__([update])
        self._rule, self._write = rule, write

    def _given(self, inputs: StepInputs) -> tuple[Leaf, Tensor]:
        (i,) = self.places
        tensors = [inputs.roles[role][i] for role in self._roles]
        return leaf_of(self._rule, self._codes, tensors), inputs.grads[i]

    def measure(self, inputs: StepInputs) -> Tensor:
        """Return the means as one row."""
        scalars = self.scalars(inputs).scalars
        return torch.stack(leaf_means(self._rule, *self._given(inputs), scalars))[None]

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameter."""
        scalars = self.scalars(inputs).scalars
        take = whole_means if means is None else _given_means(means[0])
        new = leaf_step(self._rule, *self._given(inputs), scalars, self._write, take)
        write_back([x for (x,) in self.columns(inputs.targets)], new)


def _given_means(row: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda measured: list(row.to(measured[0].dtype).unbind())


class KernelLaunch(Launch):
    """Parameters that share their kernels, which are called for each of them.

    A TritonListKernel is called once for all.

    Args:
        kernel: Updates a parameter; with means, it reads them after the scalars.
        mean: Measures a parameter, and writes means there; None if there are none.
        count: Number of means.
        updates: Updates of one kind.
    """

    def __init__(
        self, kernel: Flat, mean: Flat | None, count: int, updates: list[Update]
    ) -> None:
        super().__init__(updates)
        self._kernel, self._mean, self._count = kernel, mean, count
        self._into = bool(updates[0].slot.into)
        if isinstance(kernel, TritonListKernel):
            table = Table(updates)
            rest = table.before + table.after
            self._table = DeviceTable(updates[0].g.device, table.lengths, rest)

    def _numbers(self, inputs: StepInputs, means: Tensor | None) -> Tensor:
        device, count = inputs.grads[self.places[0]].device, len(self.places)
        values = self.scalars(inputs).tensor(self.dtype, device)
        if self._mean is None:
            return values.expand(count, -1)
        return rows(
            values, values.new_zeros(count, self._count) if means is None else means
        )

    def _call(
        self, inputs: StepInputs, grads: list[Tensor], values: Tensor, *kernels: Flat
    ) -> None:
        p, *state = self.columns(inputs.roles)
        columns = [p, grads, *state]
        if self._into:
            columns += self.columns(inputs.targets)
        for row, *tensors in zip(values, *columns):
            for kernel in kernels:
                kernel(row, *tensors)

    def measure(self, inputs: StepInputs) -> Tensor:
        """Return the means, which the kernel writes after each row of scalars."""
        assert self._mean is not None
        values = self._numbers(inputs, None)
        self._call(inputs, self.aligned(inputs), values, self._mean)
        return values[:, -self._count :]

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameters."""
        grads, values = self.aligned(inputs), self._numbers(inputs, means)
        measures = [self._mean] if self._mean is not None and means is None else []
        if not isinstance(self._kernel, TritonListKernel):
            self._call(inputs, grads, values, *measures, self._kernel)
            return
        if measures:
            self._call(inputs, grads, values, *measures)
        self._kernel.run(values, self._table, addresses(grads))


class Table:
    """Addresses and lengths of a launch's tensors, as lists of kernels read them.

    The columns are those of the parameters, the gradients, the state and, for a step
    into new tensors, the results. The gradients' are looked up at each step.
    """

    def __init__(self, updates: list[Update]) -> None:
        columns = [*zip(*[u.slot.addresses for u in updates])]
        columns += zip(*[u.slot.into for u in updates])
        self.before = array("q", columns[0])
        self.after = array("q", chain.from_iterable(columns[1:]))
        self.lengths = array("q", [u.slot.numel for u in updates])

    def joined(self, grads: list[Tensor]) -> "array[int]":
        """Return all columns."""
        return self.before + addresses(grads) + self.after


class ListLaunch(Launch):
    """Parameters that share a list kernel, which is called once for all.

    Args:
        kernel: Updates a parameter; with means, it reads them after the scalars.
        mean: Measures pieces of parameters; None if there are no means.
        count: Number of means.
        updates: Updates of one kind.
    """

    def __init__(
        self, kernel: ListKernel, mean: ListKernel | None, count: int, updates: list[Update]
    ) -> None:
        super().__init__(updates)
        self._kernel, self._mean, self._count = kernel, mean, count
        self._table = Table(updates)
        self._dithers = any(self._codes)
        self.host = self._aligned and mean is None
        lengths = self._table.lengths
        # For each piece that is measured, its row and its share of that.
        measured = enumerate(lengths if mean is not None else ())
        starts = [(i, start) for i, n in measured for start in range(0, n, PIECE)]
        shares = [min(PIECE, lengths[i] - start) / lengths[i] for i, start in starts]
        self._pieces = len(starts)
        if self._pieces > len(lengths):
            # The user may have set another default device.
            self._rows = torch.tensor([i for i, _ in starts], device="cpu")
            self._shares = torch.tensor(shares, dtype=torch.float64, device="cpu")

    def measure(self, inputs: StepInputs) -> Tensor:
        """Return the means, which depend on neither threads nor the rest of the list."""
        assert self._mean is not None
        values = self.scalars(inputs).tensor(self.dtype, inputs.grads[0].device)
        own = rows(values, values.new_zeros(self._pieces, self._count))
        step = own.stride(0) * own.element_size()
        grads = self.aligned(inputs)  # which may be copies, alive until the kernel has run
        table = self._table.joined(grads)
        self._mean.run(own.data_ptr(), table, self._table.lengths, per_piece=step)
        found = own[:, -self._count :]
        if self._pieces == len(self.places):
            return found
        shape = (len(self.places), self._count)
        sums = torch.zeros(shape, dtype=torch.float64, device="cpu")
        return sums.index_add_(0, self._rows, found * self._shares[:, None])

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameters."""
        packed, grads, per_row = inputs.packed[self._at], self.aligned(inputs), 0
        if self._mean is None and packed.on_host:
            values = packed.array(self.dtype)
            at, _ = values.buffer_info()
        else:
            values = packed.tensor(self.dtype, grads[0].device)
            if self._mean is not None:
                values = rows(values, self.measure(inputs) if means is None else means)
                per_row = values.stride(0) * values.element_size()
            at = values.data_ptr()
        # Only codes are rounded by it. Reading it from a GPU would synchronize.
        dither = float(packed.scalars.dither) if self._dithers else 0.0
        table = self._table.joined(grads)
        self._kernel.run(at, table, self._table.lengths, per_row=per_row, dither=dither)


class ShardedLaunch(Launch):
    """Launches of shards whose rule takes means over whole tensors.

    The means of all tensors of a mesh are one message, which every process has to send
    even if its shards are empty.
    """

    def __init__(
        self, rule: Rule[Any, Any], launches: list[Launch], updates: list[Update]
    ) -> None:
        super().__init__(updates)
        self._launches = launches
        self._slots = [u.slot for u in updates]
        self._counts = [count_means(rule, u.scalars.scalars.rates) for u in updates]

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Measure, all-reduce, and update the parameters."""
        del means
        found = {
            place: means.double()
            for launch in self._launches
            for place, means in zip(launch.places, launch.measure(inputs))
        }
        sums: list[Tensor] = []
        shards: list[ShardSpec | None] = []
        for i, slot, count in zip(self.places, self._slots, self._counts):
            device = inputs.grads[i].device
            none_here = torch.zeros(count, dtype=torch.float64, device=device)
            sums += (found.get(i, none_here) * slot.numel).unbind()
            shards += [slot.shard] * count
        totals = iter(all_reduce_sum(sums, shards))
        for i, slot, count in zip(self.places, self._slots, self._counts):
            assert slot.shard is not None
            found[i] = torch.stack(list(islice(totals, count))) / slot.shard.numel
        for launch in self._launches:
            launch.run(inputs, torch.stack([found[i] for i in launch.places]))


def rows(values: Tensor, last: Tensor) -> Tensor:
    """Append `values` and each row of `last`; every row begins where kernels expect it."""
    own, unit = len(values), ALIGNMENT // values.element_size()
    count = own + last.shape[1]
    made = values.new_empty(len(last), -(-count // unit) * unit)[:, :count]
    made[:, :own] = values
    made[:, own:] = last
    return made


def addresses(tensors: list[Tensor]) -> "array[int]":
    """Return the tensors' addresses."""
    return array("q", map(Tensor.data_ptr, tensors))
