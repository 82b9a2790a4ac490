"""Steps of rules that map whole tensors, such as Muon's orthogonalization.

A step is two elementwise passes with the map between them. The first pass moves the state
and stores the direction as one more field of it. The second moves the parameters along
the mapped direction, like SGD along a gradient. Both are planned like any rule's step.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from optimi_func.core.codes import same_order, to, widen
from optimi_func.core.distributed import on_whole, shard_of, to_local
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.lists import chunks
from optimi_func.core.owners import Holders, Owned, map_owned
from optimi_func.core.packed import Packed
from optimi_func.core.program import Room
from optimi_func.core.rule import (
    Direction,
    Named,
    NoState,
    Rule,
    Scalars,
    along_gradient,
    gradient_rule,
)
from optimi_func.core.torch_private import share
from optimi_func.execution.cpp import address
from optimi_func.execution.kernels import (
    CaptureError,
    DispatchModeError,
    KernelKey,
    SwitchedOffError,
    has_list_kernels,
    kernel,
)
from optimi_func.execution.launches import Launch, addresses
from optimi_func.execution.shaped import EXAMPLES, ShapedKernel, example_of
from optimi_func.execution.slots import Columns, Slot, Step, Update, split_twins

_Planner: TypeAlias = Callable[[Rule, list[Update], bool], list[Launch]]

# Elements of the directions that are in memory together, or one larger tensor: if they are
# mapped one by one, and in batches.
ELEMENTS = 1 << 22
BATCHED = 1 << 26

_unshaped: set[str] = set()  # digests of maps that could not be compiled


def elementwise(rule: Rule, directs: bool) -> Rule:
    """Return a rule without its map, one for all that differ in it alone.

    If `directs`, its State ends with the direction, for a map that reads it there.
    """
    if rule.direction is along_gradient and not rule.fields:
        rule = gradient_rule  # whatever the scalars of the map
    parts = rule.name, rule.state, rule.init, rule.coeffs, rule.direction
    how = rule.reads_param, rule.given, rule.digest
    return _elementwise(*parts, rule.fields, *how, directs)


# Bounded, because a notebook may define a rule again and again.
@lru_cache(64)
def _elementwise(
    name: str,
    state: type[Named],
    init: Callable[..., Named],
    coeffs: Callable[..., Named],
    direct: Callable[..., Direction],
    fields: tuple[str, ...],
    reads: bool,
    given: tuple[str, ...],
    digest: str,
    directs: bool,
) -> Rule:
    annotations = [(field, Tensor) for field in (*fields, *["direction"] * directs)]
    kind = NamedTuple("State", annotations)
    count = len(fields)
    mapped = (None,) * (len(state._fields) - count)

    def direction(g: Tensor, s: Named, c: Named, *x: Tensor) -> Direction:
        d, new, _ = direct(g, state(*s[:count], *mapped), c, *x)
        return Direction(d, kind(*new[:count], *[d] * directs))

    suffix = "_direction" if directs else "_moments"
    digest = digest and digest + suffix
    parts = name + suffix, kind, init, coeffs, direction
    return Rule(*parts, reads_param=reads, given=given, digest=digest)


class WholeLaunch(Launch):
    """Parameters whose rule maps whole tensors: first pass, map, second pass.

    The updates are in the same order on all processes, and `plan` plans the two passes.
    """

    raw, movable = True, False

    def __init__(self, rule: Rule, updates: list[Update], plan: _Planner) -> None:
        super().__init__(rule, updates, True)
        self._first = elementwise(rule, True)
        # Without their tensors, which a launch must not keep alive.
        self._facts = [
            (u.slot, u.at, compute_dtype(u.g.dtype, *u.slot.dtypes)) for u in updates
        ]
        params = [u.p for u in updates]
        directions = self._empty(params)
        first: list[Update] = []
        second: list[Update] = []
        for i, (u, d) in enumerate(zip(updates, directions)):
            own = self._of_directions(u.scalars), _of_moves(u.scalars)
            slot = _with_direction(u.slot, u.p, d)
            first.append(Update(i, slot, u.p, u.g, u.at, own[0], u.given))
            second.append(Update(i, _without_state(u.slot), u.p, d, u.at, own[1]))
        self._before = plan(self._first, first, False)  # compiles the kernels
        self._after = plan(gradient_rule, second, True)
        self._addresses = list(map(Tensor.data_ptr, directions))

    def pick(self, items: Sequence[object]) -> list[Any]:
        """Pick this launch's part, whose order may be another one."""
        return [items[i] for i in self.places]

    def _empty(self, params: list[Tensor]) -> list[Tensor]:
        return [
            torch.empty_like(p, dtype=dtype, requires_grad=False)
            for p, (_, _, dtype) in zip(params, self._facts)
        ]

    def run(self, step: Step, known: Tensor | None) -> None:
        """Update the parameters."""
        del known
        columns, packed = step.columns, step.packed
        own = into = list(map(self.pick, columns.own))
        directions = self._empty(own[0])
        pointers = list(map(Tensor.data_ptr, directions))
        moved, self._addresses = pointers != self._addresses and self._in_place, pointers
        # Those of the map, which are the last before the compensations.
        mapped = slice(-1 - len(self._rule.whole_fields), -1)
        if not self._in_place:
            into = list(map(self.pick, columns.into))
            for new, old in zip(into[mapped], own[mapped]):
                torch._foreach_copy_(new, old)
        rows = map(list, zip(directions, *into[mapped]))
        # Directions come before the state, among the results too.
        own_lists, into_lists = ([x[0], directions, *x[1:]] for x in (own, into))
        grads, given = self.pick(columns.grads), list(map(self.pick, columns.given))
        lists = Columns(grads, own_lists, into_lists, given)
        first = list(map(self._of_directions, packed))
        before = step._replace(columns=lists, packed=first, room=Room())
        for launch in self._before:
            if moved:
                launch.readdress(lists)
            launch.run(before, None)
        del before  # with its buffers
        self._map(list(rows), own[0], own[-1], [x.scalars.coeffs for x in packed])
        lists, moves = lists._replace(grads=directions), list(map(_of_moves, packed))
        second = step._replace(columns=lists, packed=moves, room=Room())
        for launch in self._after:
            launch.run(second, None)

    def _of_directions(self, packed: Packed) -> Packed:
        """Return the scalars of the first pass."""
        if self._first.coeffs is self._rule.coeffs:
            return packed
        return Packed(packed.scalars._replace(coeffs=NoState()))

    def _map(
        self,
        rows: list[list[Tensor]],
        params: list[Tensor],
        comps: list[Tensor | None],
        coeffs: Sequence[Named],
    ) -> None:
        """Map each direction and its fields, in place."""
        assert self._rule.whole is not None
        whole = self._rule.whole.map
        here: list[Owned] = []
        owned: dict[tuple[object, ...], list[Owned]] = {}

        def read(i: int, x: Tensor | None = None) -> Any:
            if x is None and self._rule.reads_param:
                _, x, _ = widen(params[i], comps[i], rows[i][0].dtype)
            return x

        for i, (row, (slot, at, _)) in enumerate(zip(rows, self._facts)):
            d, *fields = row
            if slot.holders is not None:
                key = slot.holders.group, slot.holders.dim, d.dtype
                x = None if slot.holders.dim is None else read(i)
                owned.setdefault(key, []).append(Owned(i, row, _holders(slot, fields), x))
            elif slot.shard is not None:
                every = slot.shard, *slot.fields
                d, *fields = [
                    x if s is None else shard_of(x, s) for x, s in zip(row, every)
                ]
                if (x := read(i)) is not None:
                    x = shard_of(x, slot.shard)
                mapped, new = on_whole(whole, d, x, tuple(fields), coeffs[at])
                _write(rows[i], to_local([mapped, *new]))
            elif d.numel():
                here.append(Owned(i, row, []))

        def in_place(items: list[Owned]) -> None:
            batches: dict[tuple[int, object], list[Owned]] = {}
            for item in items:
                i, (d, *_), *_ = item
                kind = (d.shape, d.dtype, d.device) if _batches(d) else i
                batches.setdefault((self._facts[i][1], kind), []).append(item)
            for (at, _), batch in batches.items():
                if len(batch) == 1:
                    ((i, (d, *fields), _, x),) = batch
                    wide_fields = tuple([to(f, d.dtype) for f in fields])
                    result, new = whole(d, read(i, x), wide_fields, coeffs[at])
                    _write(batch[0].tensors, [result, *new])
                    del result, new  # before there are the next ones
                    continue
                xs = [read(i, x) for i, _, _, x in batch]
                d, *fields = map(torch.stack, zip(*[item.tensors for item in batch]))
                axis, x = (None, None) if xs[0] is None else (0, torch.stack(xs))
                ways = vmap(whole, (0, axis, 0, None))
                result, new = ways(d, x, tuple(fields), coeffs[at])
                for item, *every in zip(batch, result, *new):
                    _write(item.tensors, every)

        in_place(here)
        for items in owned.values():
            map_owned(in_place, items)


def _write(old: list[Tensor], new: list[Tensor]) -> None:
    """Copy the results of a map to its arguments, of which some may be views."""
    pairs = [(x, y) for x, y in zip(old, new) if x is not y]
    apart = [y.clone() if any([share(x, y) for x in old]) else y for _, y in pairs]
    for (x, _), y in zip(pairs, apart):
        x.copy_(y)


def _holders(slot: Slot, fields: list[Tensor]) -> list[Holders]:
    """Return the holders of a direction, and of the fields of its map."""
    holders = slot.holders
    assert holders is not None
    dim = None if holders.dim is None else 0
    shapes = [f.shape if s is None else s.shape for f, s in zip(fields, slot.fields)]
    return [holders, *[holders._replace(shape=tuple(shape), dim=dim) for shape in shapes]]


class ShapedLaunch(Launch):
    """Parameters that share a shaped kernel, the largest first."""

    raw, movable = True, False

    def __init__(self, rule: Rule, updates: list[Update], kernel: ShapedKernel) -> None:
        updates = sorted(updates, key=lambda u: -u.slot.numel)
        super().__init__(rule, updates, True)
        self._kernel, self._compensated = kernel, updates[0].slot.compensated
        self._prepared = kernel.prepared([u.p.shape for u in updates])
        self.host = self._in_place

    def run(self, step: Step, known: Tensor | None) -> None:
        """Update the parameters."""
        del known
        columns = step.columns
        picked = [[x[i] for i in self.places] for x in (columns.grads, *columns.into)]
        grads, p, *rest = picked if self._compensated else picked[:-1]
        if not self._in_place:
            # The results, which are moved from where the parameters are.
            for new, old in zip((p, *rest), columns.own):
                torch._foreach_copy_(new, [old[i] for i in self.places])
        own, wide, device = step.packed[self._at], torch.float64, p[0].device
        # One of these keeps the scalars alive.
        values: Any = own.array(wide) if own.on_host else own.tensor(wide, device)
        at = address(values) if own.on_host else values.data_ptr()
        table = [[at] * len(self.places), *map(addresses, (p, grads, *rest))]
        self._kernel.run(table, *self._prepared)


def plan_shaped(
    rule: Rule, updates: list[Update], lenient: bool
) -> tuple[list[Launch], list[Update]]:
    """Plan updates through shaped kernels, and return the rest, which these do not take.

    If `lenient`, they take none of a map that cannot be compiled.
    """
    groups: dict[tuple[int, KernelKey], list[Update]] = {}
    assert rule.whole is not None
    if rule.whole.digest not in ("", *_unshaped) and has_list_kernels(torch.device("cpu")):
        for u in filter(partial(_fits, rule), updates):
            groups.setdefault((u.at, _shaped_key(rule, u)), []).append(u)
    launches: list[Launch] = []
    for (_, key), batch in groups.items():
        try:
            run = kernel(key, batch[0].scalars.scalars)
        except Exception as error:
            if not lenient:
                raise
            if not isinstance(error, CaptureError | DispatchModeError | SwitchedOffError):
                _unshaped.add(rule.whole.digest)
            return [], updates  # whose planner says why
        if not isinstance(run, ShapedKernel):
            continue
        first = 3 + len(rule.fields)  # after the scalars, the parameter and the gradient
        sizes = [[n for _, n in u.slot.mapped or ()] for u in batch]
        fitting = [u for u, own in zip(batch, sizes) if run.fits(u.p.shape, own, first)]
        launches += [ShapedLaunch(rule, own, run) for own in split_twins(fitting) if own]
    places = {i for launch in launches for i in launch.places}
    return launches, [u for u in updates if u.place not in places]


def _shaped_key(rule: Rule, u: Update) -> KernelKey:
    """Return the key of the kernel for a parameter, with all its state."""
    end = len(u.slot.dtypes) - u.slot.compensated
    (p, *own), comp = u.slot.dtypes[:end], u.slot.dtypes[end:]
    dtypes = (p, u.g.dtype, *own, *[dtype for dtype, _ in u.slot.mapped or ()], *comp)
    own = rule, u.scalars.statics, True, True, dtypes, u.g.device
    return KernelKey(*own, shape=example_of(u.p.shape))


def _fits(rule: Rule, u: Update) -> bool:
    """Return True if a shaped kernel may update this parameter."""
    slot, p, wide = u.slot, u.p, compute_dtype(u.g.dtype, *u.slot.dtypes)
    whole = slot.shard is None and slot.holders is None and not slot.paired
    plain = u.can_be_cut and not slot.coded and p.is_contiguous() and p.numel() > 0
    plain = plain and not u.given
    kept = slot.mapped is not None and all([dtype == wide for dtype, _ in slot.mapped])
    return p.device.type == "cpu" and p.dim() in EXAMPLES and whole and plain and kept


def plan_wholes(rule: Rule, updates: list[Update], plan: _Planner) -> list[Launch]:
    """Plan launches of few enough parameters to bound the memory of their directions.

    The updates are in the same order on all processes, and `plan` plans elementwise rules.
    """
    if not updates:
        return []
    together = ELEMENTS
    if all([_batches(u.p) for u in updates]):
        together, updates = BATCHED, sorted(updates, key=_shape)

    def elements(u: Update) -> int:
        holders = u.slot.holders
        count, parts = (holders.group.size(), holders.parts) if holders else (1, 1)
        # So that as many as there are processes go together, and each has one to map.
        return min(together // count, math.prod(_shape(u)) // parts)

    return [WholeLaunch(rule, batch, plan) for batch in chunks(updates, together, elements)]


def _batches(x: Tensor) -> bool:
    """Return True if tensors of one shape are mapped together.

    Not on CPU, because results would depend on what else there is to map.
    """
    return x.device.type != "cpu"


def _shape(u: Update) -> tuple[int, ...]:
    return tuple(u.p.shape) if u.slot.shard is None else u.slot.shard.shape


def _of_moves(packed: Packed) -> Packed:
    """Return the scalars of the second pass: the direction has grad_scale and l2 in it."""
    _, rates, dither = packed.scalars
    rates = rates._replace(l2=0.0, grad_scale=1.0)
    return Packed(Scalars(NoState(), rates, dither))


def _with_direction(slot: Slot, p: Tensor, d: Tensor) -> Slot:
    """Return the slot with the direction as the last field of its state."""
    end = len(slot.dtypes) - slot.compensated
    columns = [i + (i > 0) for i in slot.columns]
    before, after = slot.addresses[:end], slot.addresses[end:]
    return slot._replace(
        dtypes=(*slot.dtypes[:end], d.dtype, *slot.dtypes[end:]),
        addresses=(*before, d.data_ptr(), *after) if slot.in_place else (),
        columns=(*columns[:end], 1, *columns[end:]),
        codes=(*slot.codes, False),
        dense=slot.dense and same_order(p, d),
    )


def _without_state(slot: Slot) -> Slot:
    """Return the slot of the parameter and its compensation."""
    end = len(slot.dtypes) - slot.compensated
    columns = [i + (i > 0) for i in slot.columns]
    return slot._replace(
        dtypes=(slot.dtypes[0], *slot.dtypes[end:]),
        addresses=(*slot.addresses[:1], *slot.addresses[end:]),
        columns=(0, *columns[end:]),
        codes=(),
    )
