"""Slots and updates: the facts about a parameter that launches are planned by."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.core.codes import COMP_CODES, is_dense, same_order
from optimi_func.core.distributed import ShardSpec, shards_of
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.lists import grouped
from optimi_func.core.owners import Holders
from optimi_func.core.packed import Packed
from optimi_func.core.philox import Noise
from optimi_func.core.program import Room
from optimi_func.core.rule import Rule
from optimi_func.core.storage import COMP, PARAM, coded_in
from optimi_func.core.torch_private import is_plain
from optimi_func.execution.tensors import is_plainly_strided


class Columns(NamedTuple):
    """The tensors of a step by name: lists with an item for each parameter.

    `own` has the parameters (PARAM), and the state and compensations under their names in
    an entry, of which some may be None. Results go `into` lists with these names, which is
    `own` itself if the step is in place. `given` has a list for each name in `Rule.given`
    and for BITS: tensors, Noise, and None for a number.
    """

    grads: list[Any]
    own: dict[str, list[Any]]
    into: dict[str, list[Any]]
    given: Mapping[str, list[Any]] = {}

    @property
    def in_place(self) -> bool:
        """Return True if the results replace what they are computed from."""
        return self.into is self.own

    def written(self, write: bool) -> list[list[Any]]:
        """Return what a step writes, or (write=False) one that moves the state alone."""
        apart = () if write else (PARAM, COMP)
        return [column for name, column in self.into.items() if name not in apart]

    def with_field(self, name: str, tensors: list[Tensor]) -> "Columns":
        """Return columns with one more field of the state, which the step also writes."""
        own = {**self.own, name: tensors}
        into = own if self.in_place else {**self.into, name: tensors}
        return self._replace(own=own, into=into)

    def map(self, change: Callable[[list[Any]], list[Any]]) -> "Columns":
        """Return columns with `change` of each list."""
        own, into = (
            {name: change(column) for name, column in lists.items()}
            for lists in (self.own, {} if self.in_place else self.into)
        )
        given = {name: change(column) for name, column in self.given.items()}
        return Columns(change(self.grads), own, own if self.in_place else into, given)


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

    dtypes: dict[str, torch.dtype]  # of parameter, state and compensation, by name
    # Of the same tensors, in order. Empty: results go to new tensors at each step.
    addresses: tuple[int, ...]
    numel: int  # of the local shard
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
    def compensation(self) -> torch.dtype | None:
        """Return the dtype of the compensation, or None if there is none."""
        return self.dtypes.get(COMP)

    @property
    def coded(self) -> bool:
        """Return True if a tensor has to be decoded for the rule."""
        return self.compensation in COMP_CODES or bool(coded_in(self.dtypes))

    @property
    def decoded(self) -> dict[str, torch.dtype]:
        """Return the dtypes of what the rule computes with, by name."""
        merged, found = self.compensation in COMP_CODES, dict[str, torch.dtype]()
        pairs = coded_in(self.dtypes)
        fields = {codes: field for field, (codes, _) in pairs.items()}
        apart = {scale for _, scale in pairs.values()}
        for name, dtype in self.dtypes.items():
            if name in fields:
                found[fields[name]] = torch.float32
            elif name == PARAM and merged:
                found[PARAM] = torch.float32
            elif name not in apart and not (name == COMP and merged):
                found[name] = dtype
        return found


def make_slots(
    rule: Rule,
    columns: Columns,
    given: Mapping[str, list[Any]],
    holders: list[Holders | None] | None = None,
) -> list[Slot]:
    """Make the slots of parameters, of which `columns` has the local tensors of `given`."""
    count, mapped = len(columns.own[PARAM]), rule.whole_fields
    names = [name for name in columns.own if name not in mapped]
    whole = [given[name] for name in (PARAM, *mapped)]
    lists = [[columns.own[name] for name in names]]
    lists += [] if columns.in_place else [[columns.into[name] for name in names]]
    rows = zip(*[zip(*some) for some in lists])
    facts = zip(rows, zip(*whole), holders or [None] * count)
    return [_make_slot(names, *row) for row in facts]


def _make_slot(
    names: list[str],
    rows: tuple[tuple[Any, ...], ...],
    whole: tuple[Tensor, ...],
    holders: Holders | None,
) -> Slot:
    own, *into = rows
    present = {name: x for name, x in zip(names, own) if x is not None}
    tensors: list[Tensor] = [*present.values()]
    p, every = tensors[0], [x for row in rows for x in row if x is not None]
    # Scales have another shape than the parameter, and one order.
    ordered = [
        same_order(p, x) if x.shape == p.shape else x.is_contiguous() for x in every[1:]
    ]
    fixed = all([is_plainly_strided(x) and x.is_contiguous() for x in whole[1:]])
    return Slot(  # By keywords it would take 2 us more, 4 % of a step that is planned.
        {name: x.dtype for name, x in present.items()},
        () if into else tuple(map(Tensor.data_ptr, tensors)),
        p.numel(),
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

    position: int  # among the parameters of the plan
    slot: Slot
    p: Tensor
    g: Tensor
    at: int  # index of its scalars
    scalars: Packed
    given: Mapping[str, Tensor | Noise] = {}  # what is given besides, but numbers

    @property
    def inputs(self) -> list[Tensor]:
        """Return the gradient and the tensors that are given besides."""
        return [self.g, *[x for x in self.given.values() if isinstance(x, Tensor)]]

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of the arithmetic."""
        return compute_dtype(self.g.dtype, *self.slot.dtypes.values())

    @property
    def given_dtypes(self) -> tuple[tuple[str, torch.dtype], ...]:
        """Return the names and dtypes of what is given besides."""
        if not self.given:
            return ()
        wide = self.wide
        return tuple([(name, x.dtype or wide) for name, x in self.given.items()])

    @property
    def draws(self) -> bool:
        """Return True if random numbers are drawn for it."""
        return any([isinstance(x, Noise) for x in self.given.values()])

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
        tensors = (*u.slot.dtypes.items(),), u.slot.dense, u.given_dtypes
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
