"""Launches: calls that update some parameters, and that later steps can repeat."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from optimi_func._distributed import ShardSpec, all_reduce_sum
from optimi_func._leaf import compute_dtype, leaf_step, whole_mean
from optimi_func._rule import Leaf, Rule
from optimi_func.execution.inductor import Flat
from optimi_func.execution.list_kernel import PIECE, ListKernel, address
from optimi_func.execution.scalars import (
    ALIGNMENT,
    Numbers,
    PackedScalars,
    with_finite,
)
from optimi_func.execution.tensors import (
    flat_leaf,
    flatten,
    foreach_copy_,
    is_dense,
    is_plain,
    is_plainly_strided,
    same_order,
    select,
    unflatten,
    write_back,
)

T = TypeVar("T")
# Of each role (p, the state's fields, the compensation) a tensor for each parameter; None
# where a parameter has no compensation.
Roles: TypeAlias = list[list[Any]]
Table: TypeAlias = "array[int]"


class Slot(NamedTuple):
    """One parameter with its state: what executors need to know of the local tensors.

    Facts alone: whoever takes a tensor out of `optimizer.state` frees its memory.
    """

    dtypes: tuple[torch.dtype, ...]  # of parameter, state and compensation
    addresses: tuple[int, ...]
    numel: int  # of the parameter, as far as it lies here
    fields: int  # how many of the tensors are the rule's state
    plain: bool  # whether all are memory that holds their very elements
    dense: bool  # whether all fill their memory in one and the same order
    inference: bool  # whether any was made under inference_mode
    shard: ShardSpec | None  # where more of the parameter lies elsewhere


def make_slot(leaf: Leaf, shard: ShardSpec | None) -> Slot:
    """The slot of a leaf's local tensors."""
    p = leaf.p
    tensors = flat_leaf(leaf)
    return Slot(
        tuple([x.dtype for x in tensors]),
        tuple(map(Tensor.data_ptr, tensors)),
        p.numel(),
        len(leaf.state),
        all(map(is_plainly_strided, tensors)),
        is_dense(p) and all([same_order(p, x) for x in tensors]),
        any(map(Tensor.is_inference, tensors)),
        shard,
    )


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
    mean: Tensor | None  # 0-d: holds the mean over all shards when it is moved

    @property
    def agrees(self) -> bool:
        """Whether all its tensors fill their memory in one and the same order."""
        return self.slot.dense and self.target.dense and same_order(self.p, self.g)

    @property
    def plain(self) -> bool:
        """Whether all that a kernel would read is memory."""
        return self.slot.plain and is_plain(self.g)


class StepInputs(NamedTuple):
    """What the launches of a plan are run on, at one step."""

    roles: Roles
    targets: Roles  # the same in place
    grads: list[Tensor]  # of each parameter
    numbers: Numbers


class Launch:
    """A call that updates some of a plan's parameters; nothing happens before `run`."""

    on_host = False  # whether `run` runs no operation of torch's
    raw = False  # whether it writes past torch, so that no version counts it

    def __init__(self, updates: Sequence[Update]) -> None:
        self._places = [u.place for u in updates]  # ascending
        self._at = updates[0].at

    def pick(self, items: list[T]) -> list[T]:
        """Of a list with something for each parameter this launch's part."""
        if len(items) == len(self._places):
            return items
        return [items[i] for i in self._places]

    def scalars(self, inputs: StepInputs) -> PackedScalars:
        """The numbers of this launch's parameters."""
        return inputs.numbers.scalars[self._at]

    def finite(self, inputs: StepInputs) -> Tensor | None:
        """Their flag: where it is false nothing is written."""
        return inputs.numbers.finite[self._at]

    def run(self, inputs: StepInputs) -> None:
        """Update the parameters."""
        raise NotImplementedError


class EagerLaunch(Launch):
    """The pipeline op by op, on one parameter."""

    def __init__(self, rule: Rule[Any, Any], update: Update, write: bool) -> None:
        super().__init__([update])
        self._rule, self._write, self._mean = rule, write, update.mean

    def run(self, inputs: StepInputs) -> None:
        """Update the parameter."""
        (i,) = self._places
        p, *rest = [role[i] for role in inputs.roles]
        comp = rest.pop()
        leaf = Leaf(p, self._rule.state(*rest), comp)
        scalars, finite = self.scalars(inputs).scalars, self.finite(inputs)
        mean = mean_of(self._mean)
        new = leaf_step(self._rule, leaf, inputs.grads[i], scalars, self._write, mean)
        if finite is not None:
            new = select(finite, leaf, new)
        write_back([role[i] for role in inputs.targets], new)


def mean_of(given: Tensor | None) -> Any:
    """How the pipeline takes its mean: of the tensor, or the one of all its shards."""
    return whole_mean if given is None else lambda x: given.to(x.dtype)


class KernelLaunch(Launch):
    """Kernels, called for one parameter after the other."""

    raw = True

    def __init__(self, kernels: list[Flat], updates: list[Update], write: bool) -> None:
        super().__init__(updates)
        first = updates[0]
        self._kernels, self._means = kernels, [u.mean for u in updates]
        self._measures = len(kernels) > 1
        self._in_place = first.target is first.slot
        self._dtype = compute_dtype(first.g.dtype, *first.slot.dtypes)
        self._roles = len(first.slot.dtypes)

    def run(self, inputs: StepInputs) -> None:
        """Update the parameters."""
        self.call(inputs)

    def call(self, inputs: StepInputs) -> list[Tensor]:
        """Call the kernels; the numbers that they were called with for each parameter."""
        p, *state = [self.pick(role) for role in inputs.roles[: self._roles]]
        grads = [g.resolve_neg() for g in self.pick(inputs.grads)]  # kernels see memory
        targets: Roles = []
        if not self._in_place:
            targets = [self.pick(role) for role in inputs.targets[: self._roles]]
        numbers = self._numbers(inputs, grads[0].device)
        for values, *tensors in zip(numbers, p, grads, *state, *targets):
            for kernel in self._kernels:
                kernel(values, *tensors)
        return numbers

    def _numbers(self, inputs: StepInputs, device: torch.device) -> list[Tensor]:
        values = self.scalars(inputs).packed(self._dtype, device)
        values = with_finite(values, self.finite(inputs))
        given = [mean for mean in self._means if mean is not None]
        if given:
            return aligned_rows(values, torch.stack(given))
        if self._measures:
            return aligned_rows(values, values.new_zeros(len(self._means)))
        return [values] * len(self._means)


class KernelMeasure(KernelLaunch):
    """The kernel that measures parameters' means, as far as these lie here."""

    raw = False

    def run(self, inputs: StepInputs) -> None:
        """Write the means."""
        found = [values[-1] for values in self.call(inputs)]
        foreach_copy_([mean for mean in self._means if mean is not None], found)


class FlattenedLaunch(Launch):
    """Several parameters copied into flat tensors, updated by one call, and copied back.

    For those whose gradient or state lies in memory in another order, and, where there are
    no list kernels, for small ones: a call takes as long as some thousand elements do.
    """

    def __init__(self, kernel: Flat, updates: list[Update], write: bool) -> None:
        super().__init__(updates)
        first = updates[0]
        self._kernel = kernel
        self._written = written_roles(first, write)
        self._dtype = compute_dtype(first.g.dtype, *first.slot.dtypes)
        self._roles = len(first.slot.dtypes)

    def run(self, inputs: StepInputs) -> None:
        """Update the parameters."""
        p, *state = [self.pick(role) for role in inputs.roles[: self._roles]]
        flat = [flatten(role) for role in (p, self.pick(inputs.grads), *state)]
        self._kernel(self.scalars(inputs).packed(self._dtype, flat[0].device), *flat)
        results = [flat[0], *flat[2:]]
        finite = self.finite(inputs)
        for role, result in list(zip(inputs.targets, results))[self._written]:
            targets = self.pick(role)
            if finite is not None:
                result = torch.where(finite, result, flatten(targets))
            foreach_copy_(targets, unflatten(result, p))


class ListLaunch(Launch):
    """Parameters that share a list kernel: one call, whatever their number and sizes."""

    raw = True

    def __init__(
        self,
        kernel: ListKernel,
        mean_kernel: ListKernel | None,
        updates: list[Update],
        write: bool,
    ) -> None:
        super().__init__(updates)
        first = updates[0]
        self._kernel = kernel
        p, *rest = _columns([u.slot for u in updates])
        self._p, self._rest = p, _joined(rest)
        if first.target is not first.slot:
            self._rest += _joined(_columns([u.target for u in updates]))
        self._lengths = array("q", [u.slot.numel for u in updates])
        self._dtype = compute_dtype(first.g.dtype, *first.slot.dtypes)
        self._negated = any(u.g.is_neg() for u in updates)
        self._means: ListMeans | None = None
        self._given = [u.mean for u in updates if u.mean is not None]
        if mean_kernel is not None and not self._given:
            self._means = ListMeans(mean_kernel, updates)
        plain = self._means is None and not self._given and not self._negated
        self.on_host = plain and not first.guarded

    def run(self, inputs: StepInputs) -> None:
        """Update the parameters."""
        scalars, grads = self.scalars(inputs), self.pick(inputs.grads)
        if self.on_host and scalars.on_host:
            self.call(grads, scalars)
            return
        if self._negated:
            grads = [g.resolve_neg() for g in grads]  # kernels see memory, not signs
        g = array("q", map(Tensor.data_ptr, grads))
        table = self._p + g + self._rest
        values = scalars.packed(self._dtype, grads[0].device)
        values, step = with_finite(values, self.finite(inputs)), 0
        if self._means is not None:
            values = rows(values, self._means.measure(values, g, scalars))
        elif self._given:
            values = rows(values, torch.stack(self._given))
        if values.dim() == 2:
            step = values.stride(0) * values.element_size()
        self._kernel.run(values.data_ptr(), table, self._lengths, per_row=step)

    def call(self, grads: list[Tensor], scalars: PackedScalars) -> None:
        """Update the parameters, where `on_host`, by numbers on the host."""
        table = self._p + array("q", map(Tensor.data_ptr, grads)) + self._rest
        numbers = scalars.host_array(self._dtype)
        self._kernel.run(address(numbers), table, self._lengths)


class ListMeasure(Launch):
    """The means of several parameters, as far as these lie here."""

    def __init__(self, mean_kernel: ListKernel, updates: list[Update]) -> None:
        super().__init__(updates)
        self._given = [u.mean for u in updates]
        self._negated = any(u.g.is_neg() for u in updates)
        self._means = ListMeans(mean_kernel, updates)

    def run(self, inputs: StepInputs) -> None:
        """Write the means."""
        grads = self.pick(inputs.grads)
        if self._negated:
            grads = [g.resolve_neg() for g in grads]
        g = array("q", map(Tensor.data_ptr, grads))
        scalars = self.scalars(inputs)
        values = scalars.packed(self._means.dtype, grads[0].device)
        values = with_finite(values, self.finite(inputs))
        for target, mean in zip(self._given, self._means.measure(values, g, scalars)):
            assert target is not None
            target.copy_(mean)


class ListMeans:
    """Means of tensors, each the same wherever it stands and by however many threads."""

    def __init__(self, kernel: ListKernel, updates: list[Update]) -> None:
        self._kernel = kernel
        slot, g = updates[0].slot, updates[0].g
        self.dtype = compute_dtype(g.dtype, *slot.dtypes)
        columns = _columns([u.slot for u in updates])
        self._p, self._state = columns[0], _joined(columns[1 : 1 + slot.fields])
        self._comp = _joined(columns[1 + slot.fields :])
        # Whether gradients can be read in place of parameters and compensations.
        ends = {slot.dtypes[0], *slot.dtypes[1 + slot.fields :]}
        self._alike = ends == {g.dtype}
        lengths = self._lengths = array("q", [u.slot.numel for u in updates])
        # Of each piece the row, and its share of that.
        starts = [(i, start) for i, n in enumerate(lengths) for start in range(0, n, PIECE)]
        shares = [min(PIECE, lengths[i] - start) / lengths[i] for i, start in starts]
        self._pieces = len(starts)
        if self._pieces > len(lengths):
            # Whatever device the user's own tensors are made on by default.
            self._rows = torch.tensor([i for i, _ in starts], device="cpu")
            self._shares = torch.tensor(shares, dtype=torch.float64, device="cpu")

    def measure(self, values: Tensor, g: Table, scalars: PackedScalars) -> Tensor:
        """The mean of each row."""
        p, comp = self._p, self._comp
        l2 = scalars.scalars.rates.l2
        if self._alike and not isinstance(l2, Tensor) and l2 == 0:
            # l2 is 0, so p and its compensation are multiplied by 0: pass the gradients'
            # addresses for them, which saves reading them.
            p, comp = g, g if comp else comp
        own = rows(values, values.new_zeros(self._pieces))
        step = own.stride(0) * own.element_size()
        table = p + g + self._state + comp
        self._kernel.run(own.data_ptr(), table, self._lengths, per_piece=step)
        found = own[:, -1]
        if self._pieces == len(self._lengths):
            return found
        sums = torch.zeros(len(self._lengths), dtype=torch.float64, device="cpu")
        return sums.index_add_(0, self._rows, found * self._shares)


class AllReduceMeans(Launch):
    """From each mean over what lies here the mean over the whole tensor: one message."""

    def __init__(self, updates: list[Update]) -> None:
        super().__init__(updates)
        self._means = [(u.mean, u.slot) for u in updates]

    def run(self, inputs: StepInputs) -> None:
        """Send and receive."""
        del inputs
        sums: list[Tensor] = []
        shards: list[ShardSpec | None] = []
        for mean, slot in self._means:
            assert mean is not None
            sums.append(mean * slot.numel)
            shards.append(slot.shard)
        for (mean, slot), total in zip(self._means, all_reduce_sum(sums, shards)):
            assert mean is not None and slot.shard is not None
            mean.copy_(total / slot.shard.numel)


def written_roles(update: Update, write: bool) -> slice:
    """The roles that a launch writes."""
    slot = update.slot
    return slice(0, len(slot.dtypes)) if write else slice(1, 1 + slot.fields)


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
    places = zip(update.target.addresses, update.target.dtypes)
    numel = update.slot.numel
    return [(start, start + numel * dtype.itemsize) for start, dtype in places]


def _overlaps(taken: list[tuple[int, int]], start: int, end: int) -> bool:
    i = bisect_left(taken, (start, end))
    after = i < len(taken) and taken[i][0] < end
    return after or (i > 0 and taken[i - 1][1] > start)


def rows(values: Tensor, last: Tensor) -> Tensor:
    """For each of `last` the values, and it."""
    own = values.new_empty(len(last), len(values) + 1)
    own[:, :-1] = values
    own[:, -1] = last
    return own


def aligned_rows(values: Tensor, last: Tensor) -> list[Tensor]:
    """As `rows`, each of which begins where kernels expect numbers to."""
    width, unit = len(values) + 1, ALIGNMENT // values.element_size()
    own = values.new_empty(len(last), -(-width // unit) * unit)
    own[:, : width - 1] = values
    own[:, width - 1] = last
    return list(own[:, :width].unbind())


def _columns(slots: list[Slot]) -> list[Table]:
    """Of each role the addresses."""
    return [array("q", role) for role in zip(*[slot.addresses for slot in slots])]


def _joined(columns: list[Table]) -> Table:
    return sum(columns, array("q"))
