"""Launches: calls that update some parameters, and that later steps can repeat."""

from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from optimi_func._distributed import ShardSpec, all_reduce_sum
from optimi_func._leaf import compute_dtype, count_means, leaf_means, leaf_step, whole_means
from optimi_func._rule import Leaf, Rule, Scalar
from optimi_func._storage import state_of
from optimi_func.execution.cpp import PIECE, address
from optimi_func.execution.inductor import Flat
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.scalars import (
    ALIGNMENT,
    Numbers,
    PackedScalars,
    with_finite,
)
from optimi_func.execution.slots import Roles, Slot
from optimi_func.execution.tensors import (
    flatten,
    foreach_copy_,
    is_plain,
    same_order,
    select,
    unflatten,
    write_back,
)
from optimi_func.execution.triton_list import DeviceTable, TritonListKernel

T = TypeVar("T")
Table: TypeAlias = "array[int]"


class Update(NamedTuple):
    """One parameter to update, while its launch is planned."""

    place: int  # among the parameters of the plan
    slot: Slot  # read
    target: Slot  # written: the same in place
    p: Tensor
    g: Tensor
    at: int  # which of the step's scalars are its
    scalars: PackedScalars
    guarded: bool  # whether a flag says if anything is to be written

    @property
    def dense(self) -> bool:
        """Whether all that the step reads and writes but g fills memory in one order."""
        return self.slot.dense and self.target.dense

    @property
    def aligned(self) -> bool:
        """Whether the gradient's memory holds its elements as the parameter's does."""
        return same_order(self.p, self.g) and not self.g.is_neg()

    @property
    def plain(self) -> bool:
        """Whether all that a kernel would read is memory."""
        return self.slot.plain and is_plain(self.g)


def alike(updates: list[Update]) -> list[list[Update]]:
    """Those with elements, grouped by what one launch has in common."""
    groups: dict[Any, list[Update]] = {}
    for u in updates:
        slot = u.slot
        if slot.numel:
            tensors = (slot.dtypes, slot.roles, u.target is slot)
            kind = (*tensors, u.g.dtype, u.g.device, u.at, u.guarded)
            groups.setdefault(kind, []).append(u)
    return list(groups.values())


class StepInputs(NamedTuple):
    """What the launches of a plan are run on, at one step."""

    roles: Roles
    targets: Roles  # the same in place
    grads: list[Tensor]  # of each parameter
    numbers: Numbers


class Launch:
    """A call that updates some of a plan's parameters; nothing happens before `run`.

    Args:
        updates: Of parameters that share dtypes and numbers; in ascending order.
    """

    on_host = False  # whether `run` runs no operation of torch's
    raw = False  # whether it writes past torch, so that no version counts it
    skips = False  # whether it looks at the flag itself, so that its kernel need not

    def __init__(self, updates: Sequence[Update]) -> None:
        first = updates[0]
        self.places = [u.place for u in updates]
        self._at = first.at
        self.dtype = compute_dtype(first.g.dtype, *first.slot.dtypes)
        self._roles, self._codes = first.slot.roles, first.slot.codes
        self._aligned = all([u.aligned for u in updates])

    def pick(self, items: list[T]) -> list[T]:
        """Of a list with something for each parameter this launch's part."""
        if len(items) == len(self.places):
            return items
        return [items[i] for i in self.places]

    def columns(self, roles: Roles) -> list[list[Tensor]]:
        """Of each tensor that these parameters have, those of all of them."""
        return [self.pick(roles[i]) for i in self._roles]

    def take(self, roles: Roles, place: int) -> list[Tensor]:
        """The tensors of one parameter."""
        return [roles[i][place] for i in self._roles]

    def aligned(self, inputs: StepInputs) -> list[Tensor]:
        """The gradients, copied where kernels, which see memory, would misread one."""
        grads = self.pick(inputs.grads)
        if self._aligned:
            return grads
        return list(map(_align, self.pick(inputs.roles[0]), grads))

    def scalars(self, inputs: StepInputs) -> PackedScalars:
        """The numbers of this launch's parameters."""
        return inputs.numbers.scalars[self._at]

    def finite(self, inputs: StepInputs) -> Tensor | None:
        """Their flag: where it is false nothing is written."""
        return inputs.numbers.finite[self._at]

    def values(self, inputs: StepInputs, device: torch.device) -> Tensor:
        """The numbers as kernels take them: with the flag behind them."""
        values = self.scalars(inputs).packed(self.dtype, device)
        return with_finite(values, None if self.skips else self.finite(inputs))

    def measure(self, inputs: StepInputs) -> Tensor:
        """Of a step that takes means, a row for each parameter, over what lies here."""
        raise NotImplementedError

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameters.

        Args:
            inputs: Of this step.
            means: Where the parameters are shards, the means over all of each.
        """
        raise NotImplementedError


def _align(p: Tensor, g: Tensor) -> Tensor:
    if same_order(p, g):
        return g.resolve_neg()
    return torch.empty_like(p, dtype=g.dtype).copy_(g)


class EagerLaunch(Launch):
    """The pipeline op by op, on one parameter."""

    def __init__(self, rule: Rule[Any, Any], update: Update, write: bool) -> None:
        super().__init__([update])
        self._rule, self._write = rule, write

    def _leaf(self, inputs: StepInputs) -> Leaf:
        (i,) = self.places
        return leaf_of(self._rule, self._codes, self.take(inputs.roles, i))

    def measure(self, inputs: StepInputs) -> Tensor:
        """The means, as one row."""
        g, scalars = inputs.grads[self.places[0]], self.scalars(inputs).scalars
        return torch.stack(leaf_means(self._rule, self._leaf(inputs), g, scalars))[None]

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameter."""
        (i,) = self.places
        leaf, g = self._leaf(inputs), inputs.grads[i]
        scalars, finite = self.scalars(inputs).scalars, self.finite(inputs)
        take = whole_means if means is None else given_means(means[0])
        new = leaf_step(self._rule, leaf, g, scalars, self._write, take)
        if finite is not None:
            new = select(finite, leaf, new)
        write_back(self.take(inputs.targets, i), new)


def leaf_of(
    rule: Rule[Any, Any], codes: tuple[bool, ...], tensors: Sequence[Tensor]
) -> Leaf:
    """The leaf of a parameter, the tensors of its state and, last, its compensation."""
    p, *rest = tensors
    left = iter(rest)
    state = state_of(rule.state, left, codes)
    return Leaf(p, state, next(left, None))


def given_means(row: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
    """What the pipeline takes for its means where these are known."""
    return lambda measured: list(row.to(measured[0].dtype).unbind())


class MeanKernel(NamedTuple):
    """What measures tensors for the kernel that moves them."""

    kernel: Flat  # writes the means behind the numbers
    number: int  # of them
    reads_x: bool  # whether it needs the parameter, beside L2 decay


class KernelLaunch(Launch):
    """Parameters that share their kernels: these are called for one after the other."""

    raw = True

    def __init__(
        self, kernel: Flat, mean: MeanKernel | None, updates: list[Update]
    ) -> None:
        super().__init__(updates)
        self._kernel, self._mean = kernel, mean
        self._in_place = updates[0].target is updates[0].slot

    def _numbers(self, inputs: StepInputs, means: Tensor | None) -> Tensor:
        """A row for each of the parameters; with room for its means, or with these."""
        count = len(self.places)
        values = self.values(inputs, inputs.grads[self.places[0]].device)
        if self._mean is None:
            return values.expand(count, -1)
        if means is None:
            means = values.new_zeros(count, self._mean.number)
        return rows(values, means)

    def _call(
        self, inputs: StepInputs, grads: list[Tensor], values: Tensor, kernels: list[Flat]
    ) -> None:
        p, *state = self.columns(inputs.roles)
        columns = [p, grads, *state]
        if not self._in_place:
            columns += self.columns(inputs.targets)
        for row, *tensors in zip(values, *columns):
            for kernel in kernels:
                kernel(row, *tensors)

    def measure(self, inputs: StepInputs) -> Tensor:
        """The means, which the kernel writes behind each row of numbers."""
        assert self._mean is not None
        values = self._numbers(inputs, None)
        self._call(inputs, self.aligned(inputs), values, [self._mean.kernel])
        return values[:, -self._mean.number :]

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameters."""
        measures: list[Flat] = []
        if self._mean is not None and means is None:
            measures.append(self._mean.kernel)
        values = self._numbers(inputs, means)
        self._update(inputs, self.aligned(inputs), values, measures)

    def _update(
        self, inputs: StepInputs, grads: list[Tensor], values: Tensor, measures: list[Flat]
    ) -> None:
        self._call(inputs, grads, values, [*measures, self._kernel])


class TableLaunch(KernelLaunch):
    """Parameters on a GPU: one launch, whatever their number and sizes.

    Where there are means, a call for each parameter measures its own.
    """

    def __init__(
        self, kernel: TritonListKernel, mean: MeanKernel | None, updates: list[Update]
    ) -> None:
        super().__init__(kernel, mean, updates)
        self._list_kernel = kernel
        columns = _columns([u.slot for u in updates])
        if not self._in_place:
            columns += _columns([u.target for u in updates])
        lengths = array("q", [u.slot.numel for u in updates])
        self._table = DeviceTable(updates[0].g.device, lengths, _joined(columns))

    def _update(
        self, inputs: StepInputs, grads: list[Tensor], values: Tensor, measures: list[Flat]
    ) -> None:
        if measures:
            self._call(inputs, grads, values, measures)
        self._list_kernel.run(values, self._table, _addresses(grads))


class FlattenedLaunch(Launch):
    """Several parameters copied into flat tensors, updated by one call, and copied back.

    For those that do not fill their memory and, where there are no list kernels, for
    small ones: a call takes as long as some thousand elements do.
    """

    def __init__(self, kernel: Flat, updates: list[Update], write: bool) -> None:
        super().__init__(updates)
        self._kernel, self._written = kernel, written_roles(updates[0], write)

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameters."""
        del means
        p, *state = self.columns(inputs.roles)
        flat = [flatten(role) for role in (p, self.pick(inputs.grads), *state)]
        self._kernel(self.scalars(inputs).packed(self.dtype, flat[0].device), *flat)
        results = [flat[0], *flat[2:]]
        finite = self.finite(inputs)
        written = list(zip(self.columns(inputs.targets), results))[self._written]
        for targets, result in written:
            if finite is not None:
                result = torch.where(finite, result, flatten(targets))
            foreach_copy_(targets, unflatten(result, p))


class ListLaunch(Launch):
    """Parameters that share a list kernel: one call, whatever their number and sizes."""

    raw = True

    def __init__(
        self, kernel: ListKernel, mean: MeanKernel | None, updates: list[Update]
    ) -> None:
        super().__init__(updates)
        first = updates[0]
        self._kernel = kernel
        p, *rest = _columns([u.slot for u in updates])
        self._p, self._rest = p, _joined(rest)
        if first.target is not first.slot:
            self._rest += _joined(_columns([u.target for u in updates]))
        self._lengths = array("q", [u.slot.numel for u in updates])
        self._means = None if mean is None else ListMeans(mean, updates)
        # What is encoded anew is not left as it was.
        self.skips = first.slot.coded and first.guarded
        coded = first.slot.coded
        self.on_host = self._aligned and not (self._means or first.guarded or coded)

    def measure(self, inputs: StepInputs) -> Tensor:
        """The means."""
        assert self._means is not None
        g = _addresses(grads := self.aligned(inputs))
        l2 = self.scalars(inputs).scalars.rates.l2
        return self._means.measure(self.values(inputs, grads[0].device), g, l2)

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameters."""
        scalars = self.scalars(inputs)
        if self.on_host and scalars.on_host:
            self.call(self.pick(inputs.grads), scalars)
            return
        if self.skips and not self.finite(inputs):
            return
        grads = self.aligned(inputs)
        values, step = self.values(inputs, grads[0].device), 0
        if self._means is not None:
            found = self.measure(inputs) if means is None else means
            values = rows(values, found)
            step = values.stride(0) * values.element_size()
        table = self._p + _addresses(grads) + self._rest
        # Of codes alone: on a device it would be waited for.
        dither = float(scalars.scalars.dither) if any(self._codes) else 0.0
        at = values.data_ptr()
        self._kernel.run(at, table, self._lengths, per_row=step, dither=dither)

    def call(self, grads: list[Tensor], scalars: PackedScalars) -> None:
        """Update the parameters, where `on_host`, by numbers on the host."""
        table = self._p + _addresses(grads) + self._rest
        numbers = scalars.host_array(self.dtype)
        self._kernel.run(address(numbers), table, self._lengths)


class ListMeans:
    """Means of tensors, each the same wherever it stands and by however many threads."""

    def __init__(self, mean: MeanKernel, updates: list[Update]) -> None:
        assert isinstance(mean.kernel, ListKernel)
        self._kernel, self._count = mean.kernel, mean.number
        slot, g = updates[0].slot, updates[0].g
        columns = _columns([u.slot for u in updates])
        end = len(columns) - slot.compensated
        self._p, self._state = columns[0], _joined(columns[1:end])
        self._comp = _joined(columns[end:])
        # Whether gradients can be read in place of parameters and compensations.
        alike = {slot.dtypes[0], *slot.dtypes[end:]} == {g.dtype}
        self._alike = alike and not mean.reads_x
        lengths = self._lengths = array("q", [u.slot.numel for u in updates])
        # Of each piece the row, and its share of that.
        starts = [(i, start) for i, n in enumerate(lengths) for start in range(0, n, PIECE)]
        shares = [min(PIECE, lengths[i] - start) / lengths[i] for i, start in starts]
        self._pieces = len(starts)
        if self._pieces > len(lengths):
            # Whatever device the user's own tensors are made on by default.
            self._rows = torch.tensor([i for i, _ in starts], device="cpu")
            self._shares = torch.tensor(shares, dtype=torch.float64, device="cpu")

    def measure(self, values: Tensor, g: Table, l2: Scalar) -> Tensor:
        """The means of each row."""
        p, comp = self._p, self._comp
        if self._alike and not isinstance(l2, Tensor) and l2 == 0:
            # l2 is 0, so p and its compensation are multiplied by 0: pass the gradients'
            # addresses for them, which saves reading them.
            p, comp = g, g if comp else comp
        own = rows(values, values.new_zeros(self._pieces, self._count))
        step = own.stride(0) * own.element_size()
        table = p + g + self._state + comp
        self._kernel.run(own.data_ptr(), table, self._lengths, per_piece=step)
        found = own[:, -self._count :]
        if self._pieces == len(self._lengths):
            return found
        shape = (len(self._lengths), self._count)
        sums = torch.zeros(shape, dtype=torch.float64, device="cpu")
        return sums.index_add_(0, self._rows, found * self._shares[:, None])


class ShardedLaunch(Launch):
    """Launches of shards whose rule takes means over whole tensors.

    These are one message for all tensors of a mesh, which every process has to send,
    however much of a tensor lies there.
    """

    raw = True

    def __init__(
        self, rule: Rule[Any, Any], launches: list[Launch], updates: list[Update]
    ) -> None:
        super().__init__(updates)
        self._launches = launches
        self._slots = [u.slot for u in updates]
        self._counts = [count_means(rule, u.scalars.scalars.rates) for u in updates]

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Measure, send and receive, and update the parameters."""
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


def written_roles(update: Update, write: bool) -> slice:
    """The roles that a launch writes."""
    slot = update.slot
    end = len(slot.dtypes)
    return slice(0, end) if write else slice(1, end - slot.compensated)


def rows(values: Tensor, last: Tensor) -> Tensor:
    """For each row of `last` the values and it; each begins where kernels expect it to."""
    own, unit = len(values), ALIGNMENT // values.element_size()
    count = own + last.shape[1]
    made = values.new_empty(len(last), -(-count // unit) * unit)[:, :count]
    made[:, :own] = values
    made[:, own:] = last
    return made


def _addresses(tensors: list[Tensor]) -> Table:
    return array("q", map(Tensor.data_ptr, tensors))


def _columns(slots: list[Slot]) -> list[Table]:
    """Of each role the addresses."""
    return [array("q", role) for role in zip(*[slot.addresses for slot in slots])]


def _joined(columns: list[Table]) -> Table:
    return sum(columns, array("q"))
