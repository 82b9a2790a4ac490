"""Slots and updates: the facts about a parameter that launches are planned by."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.core.codes import is_dense, same_order
from optimi_func.core.distributed import ShardSpec, shards_of
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.lists import grouped
from optimi_func.core.owners import Holders
from optimi_func.core.packed import Packed
from optimi_func.core.philox import Noise
from optimi_func.core.program import Room
from optimi_func.core.rule import Rule
from optimi_func.core.torch_private import is_plain
from optimi_func.execution.tensors import is_plainly_strided


class Columns(NamedTuple):
    """The tensors of a step: lists with an item for each parameter.

    `own` are the parameters, the tensors of the state, and the compensations or None. The
    results go `into` as many lists, which are `own` itself if the step is in place. `given`
    has a list for each name in `Rule.given`: tensors, Noise, and None for a number.
    """

    grads: list[Any]
    own: list[list[Any]]
    into: list[list[Any]]
    given: Sequence[list[Any]] = ()

    @property
    def in_place(self) -> bool:
        """Return True if the results replace what they are computed from."""
        return self.into is self.own

    def written(self, write: bool) -> list[list[Any]]:
        """Return what a step writes, or (write=False) one that moves the state alone."""
        return self.into if write else self.into[1:-1]


class Step(NamedTuple):
    """One step of a plan's parameters.

    `at` is, for each parameter, the index of its scalars in `packed`. With write=False it
    moves the state alone. Launches of single operations share the buffers in `room`.
    """

    columns: Columns
    packed: list[Packed]
    at: list[int]
    write: bool
    room: Room | None = None


class Slot(NamedTuple):
    """Facts about the local tensors of one parameter and its state.

    Of `Rule.whole_fields`, which only maps of whole tensors read, it has shards alone. It
    holds no tensor, so a tensor that is taken out of `optimizer.state` is freed.
    """

    dtypes: tuple[torch.dtype, ...]  # of parameter, state and compensation
    addresses: tuple[int, ...]  # empty: results go to new tensors at each step
    numel: int  # of the local shard
    columns: tuple[int, ...]  # of each tensor its list in `Columns.own`
    codes: tuple[bool, ...]  # for each field of the state: stored as codes with scales
    plain: bool  # memory, strided, without pending negation
    dense: bool  # all fill their memory in one order
    shard: ShardSpec | None  # None if the whole parameter is local
    fields: tuple[ShardSpec | None, ...]  # the same of `Rule.whole_fields`
    holders: Holders | None  # the processes that divide a map of the whole
    paired: bool  # real pairs of complex numbers
    # The dtype and length of each of `Rule.whole_fields`, if all are contiguous.
    mapped: tuple[tuple[torch.dtype, int], ...] | None
    place: int = 0  # among the optimizer's parameters, if the rule's map draws

    @property
    def in_place(self) -> bool:
        """Return True if the results replace what they are computed from."""
        return bool(self.addresses)

    @property
    def compensated(self) -> bool:
        """Return True if the last tensor is the compensation."""
        return len(self.dtypes) > 1 + len(self.codes) + sum(self.codes)

    @property
    def coded(self) -> bool:
        """Return True if a tensor has to be decoded for the rule."""
        return any(self.codes) or not self.dtypes[-1].is_floating_point

    @property
    def decoded(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that the rule computes with."""
        p, *rest = self.dtypes
        comp = [rest.pop()] if self.compensated else []
        if comp and not comp[0].is_floating_point:
            p, comp = torch.float32, []
        left = iter(rest)
        fields: list[torch.dtype] = []
        for coded in self.codes:
            dtype = next(left)
            fields.append(next(left) if coded else dtype)  # the scale's: float32
        return (p, *fields, *comp)


def scale_places(codes: tuple[bool, ...], first: int) -> list[int]:
    """Return the indices of scales among tensors whose state begins at `first`."""
    places: list[int] = []
    place = first - 1
    for coded in codes:
        place += 1 + coded
        if coded:
            places.append(place)
    return places


def make_slots(
    names: list[str],
    rule: Rule,
    columns: Columns,
    given: list[list[Any]],
    holders: list[Holders | None] | None = None,
) -> list[Slot]:
    """Make the slots of parameters, of which `columns` has the local tensors of `given`.

    `names` are those of the state's lists, two for a field in codes.
    """
    end, count = 1 + len(names), len(columns.own[0])
    mapped = range(end - len(rule.whole_fields), end)
    indices = [i for i in range(len(columns.own)) if i not in mapped]
    whole = [given[i] for i in (0, *mapped)]
    into = [()] * count if columns.in_place else zip(*columns.into)
    rows = zip(zip(*columns.own), into, zip(*whole), holders or [None] * count)
    return [_make_slot(names, rule.fields, indices, *row) for row in rows]


def _make_slot(
    names: list[str],
    fields: tuple[str, ...],
    indices: list[int],
    row: tuple[Any, ...],
    into: tuple[Any, ...],
    whole: tuple[Tensor, ...],
    holders: Holders | None,
) -> Slot:
    present = tuple([i for i in indices if row[i] is not None])
    tensors: list[Tensor] = [row[i] for i in present]
    stored = {names[i - 1] for i in present[1:] if i - 1 < len(names)}
    targets = [into[i] for i in present] if into else []
    p, every = tensors[0], [*tensors, *targets]
    # Scales have another shape than the parameter, and one order.
    ordered = [
        same_order(p, x) if x.shape == p.shape else x.is_contiguous() for x in every[1:]
    ]
    fixed = all([is_plainly_strided(x) and x.is_contiguous() for x in whole[1:]])
    return Slot(  # By keywords it would take 2 us more, 4 % of a step that is planned.
        tuple([x.dtype for x in tensors]),
        () if targets else tuple(map(Tensor.data_ptr, tensors)),
        p.numel(),
        present,
        tuple([field not in stored for field in fields]),
        all(map(is_plainly_strided, tensors)),
        is_dense(p) and all(ordered),
        shards_of(whole[0]),
        tuple(map(shards_of, whole[1:])),
        holders,
        whole[0].is_complex(),
        tuple([(x.dtype, x.numel()) for x in whole[1:]]) if fixed else None,
    )


class Update(NamedTuple):
    """One parameter to update, while its launch is planned."""

    place: int  # index among the parameters of the plan
    slot: Slot
    p: Tensor
    g: Tensor
    at: int  # index of its scalars
    scalars: Packed
    given: tuple[Tensor | Noise, ...] = ()  # what is given besides, but numbers

    @property
    def inputs(self) -> list[Tensor]:
        """Return the gradient and the tensors that are given besides."""
        return [self.g, *[x for x in self.given if isinstance(x, Tensor)]]

    @property
    def given_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of what is given besides."""
        wide = compute_dtype(self.g.dtype, *self.slot.dtypes)
        return tuple([x.dtype or wide for x in self.given])

    @property
    def draws(self) -> bool:
        """Return True if random numbers are drawn for it."""
        return any([isinstance(x, Noise) for x in self.given])

    @property
    def aligned(self) -> bool:
        """Return True if what a step reads has the parameter's memory order."""
        return all([same_order(self.p, x) and not x.is_neg() for x in self.inputs])

    @property
    def can_be_cut(self) -> bool:
        """Return True if a part of memory is the same part of every tensor."""
        return self.slot.dense and self.aligned and self.plain

    @property
    def plain(self) -> bool:
        """Return True if a kernel can read everything from memory."""
        return self.slot.plain and all(map(is_plain, self.inputs))


def alike(updates: list[Update], counted: bool, reduced: bool) -> list[list[Update]]:
    """Group updates of one kind, if `counted` of one step count. Empty ones are dropped.

    Shards are apart from others if means of them are reduced.
    """

    def kind(u: Update) -> tuple[object, ...]:
        tensors = u.slot.dtypes, u.slot.columns, u.slot.dense, u.given_dtypes
        scalars = u.at if counted or u.slot.coded else u.scalars.statics
        where = u.g.dtype, u.g.device, reduced and u.slot.shard is not None
        return *tensors, u.plain, *where, scalars

    return [*grouped([u for u in updates if u.slot.numel], kind).values()]


def split_twins(updates: list[Update]) -> Iterator[list[Update]]:
    """Yield updates that share no memory, then the others one by one: they take turns."""
    counts = Counter(chain.from_iterable([u.slot.addresses for u in updates]))
    twice = {x for x, n in counts.items() if n > 1 and x}  # meta tensors are at 0
    rows = enumerate(updates if twice else ())
    shared = {i for i, u in rows if not twice.isdisjoint(u.slot.addresses)}
    last, end = 0, 0
    for start, stop, i in sorted([(*_span(u), i) for i, u in enumerate(updates)]):
        shared |= {i, last} if start < end else set()
        last, end = (i, stop) if stop > end else (last, end)
    if len(shared) < len(updates):
        yield [u for i, u in enumerate(updates) if i not in shared]
    for i in sorted(shared):
        yield [updates[i]]


def _span(u: Update) -> tuple[int, int]:
    """Return the first address of a parameter's memory, and the one after the last."""
    x, count = u.p, u.slot.numel
    if not u.slot.dense:
        count = 1 + sum([(n - 1) * stride for n, stride in zip(x.shape, x.stride())])
    start = x.data_ptr()
    return start, start + count * x.itemsize if start else 0
