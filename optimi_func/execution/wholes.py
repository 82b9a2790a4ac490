"""Steps of rules that map whole tensors, such as Muon's orthogonalization.

A step is two elementwise passes with the map between them. The first pass moves the state
and stores the direction as one more field of it. The second moves the parameters along
the mapped direction, like SGD along a gradient. Both are planned like any rule's step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from optimi_func.core.codes import same_order, to, widen
from optimi_func.core.distributed import on_whole, shard_of, to_local
from optimi_func.core.lists import chunks, grouped
from optimi_func.core.owners import Holders, Owned, map_owned
from optimi_func.core.packed import Packed
from optimi_func.core.program import Room
from optimi_func.core.rehearsal import device_type, is_rehearsed
from optimi_func.core.rule import (
    Direction,
    Named,
    NoState,
    Rule,
    Scalars,
    along_gradient,
    gradient_rule,
)
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import BITS, COMP, GRAD, PARAM, decode, state_in
from optimi_func.core.torch_private import share
from optimi_func.execution.cpp import address
from optimi_func.execution.kernels import (
    CaptureError,
    DispatchModeError,
    KernelKey,
    NoListKernelError,
    SwitchedOffError,
    kernel,
    updates_lists,
)
from optimi_func.execution.launches import Launch, RehearsedLaunch, addresses, measured
from optimi_func.execution.shaped import EXAMPLES, ShapedKernel, example_of
from optimi_func.execution.slots import Columns, Slot, Step, Update, split_twins

_Planner: TypeAlias = Callable[[Rule, list[Update], bool], list[Launch]]

# Elements of the directions that are in memory together, or one larger tensor: if they are
# mapped one by one, and in batches.
ELEMENTS = 1 << 22
BATCHED = 1 << 26

# The name of the field in which the first pass stores the direction.
DIRECTION = "direction_for_map"


def elementwise(rule: Rule, directs: bool) -> Rule:
    """Return a rule without its map, one for all that differ in it alone.

    If `directs`, its State ends with the direction, for a map that reads it there.
    """
    if rule.direction is along_gradient and not rule.fields:
        rule = gradient_rule  # whatever the scalars of the map
    parts = rule.name, rule.state, rule.init, rule.coeffs, rule.direction, rule.fields
    return _elementwise((*parts, rule.reads_param, rule.given, rule.digest), directs)


# Bounded, because a notebook may define a rule again and again.
@lru_cache(64)
def _elementwise(parts: tuple[Any, ...], directs: bool) -> Rule:
    name, state, init, coeffs, direct, fields, reads, given, digest = parts
    annotations = [(field, Tensor) for field in (*fields, *[DIRECTION] * directs)]
    kind = NamedTuple("State", annotations)
    count = len(fields)
    mapped = (None,) * (len(state._fields) - count)

    def direction(g: Tensor, s: Named, c: Named, *x: Tensor) -> Direction:
        d, new = direct(g, state(*s[:count], *mapped), c, *x)
        return Direction(d, kind(*new[:count], *[d] * directs))

    suffix = "_direction" if directs else "_moments"
    digest = digest and digest + suffix
    own = name + suffix, kind, init, coeffs, direction
    return Rule(*own, reads_param=reads, given=given, digest=digest)


@lru_cache(64)
def moving(rule: Rule) -> Rule:
    """Return the rule that moves parameters along mapped directions, to `Rule.after`."""
    if rule.after is None:
        return gradient_rule
    annotations = [(name, Tensor) for name in rule.fields]
    kind = NamedTuple("State", annotations)
    rest = (None,) * len(rule.whole_fields)
    act, told = rule.after, rule.after_means

    def after(x: Tensor, u: Tensor, s: Named, c: Any, *means: Tensor) -> Any:
        u, new = act(x, u, rule.state(*s, *rest), c, *means)
        return u, kind(*new[: len(rule.fields)])

    def measure(x: Tensor, u: Tensor, s: Named, c: Any) -> list[Tensor]:
        assert told is not None
        return told.measure(x, u, rule.state(*s, *rest), c)

    return replace(
        rule,
        name=f"{rule.name}_after",
        state=kind,
        direction=along_gradient,
        after=after,
        after_means=told and told._replace(measure=measure),
        accumulate=None,
        whole=None,
        reads_param=False,
        digest=rule.digest and f"{rule.digest}_after",
    )


class WholeLaunch(Launch):
    """Parameters whose rule maps whole tensors: first pass, map, second pass.

    The updates are in the same order on all processes, and `plan` plans the two passes.
    """

    bypasses_autograd, movable, in_order = True, False, False

    def __init__(self, rule: Rule, updates: list[Update], plan: _Planner) -> None:
        super().__init__(rule, updates, True)
        self._first = elementwise(rule, True)
        # Without their tensors, which a launch must not keep alive.
        self._facts = [(u.slot, u.at, u.wide) for u in updates]
        params = [u.p for u in updates]
        directions = self._empty(params)
        first: list[Update] = []
        second: list[Update] = []
        self._second = moving(rule)
        for i, (u, d) in enumerate(zip(updates, directions)):
            own = self._of_directions(u.scalars), self._of_moves(u.scalars)
            slot = _with_direction(u.slot, u.p, d)
            before = dict(filter(self._takes(0), u.given.items()))
            after = dict(filter(self._takes(1), u.given.items()))
            first.append(Update(i, slot, u.p, u.g, u.at, own[0], before))
            slot = _moved_slot(u.slot, self._second)
            second.append(Update(i, slot, u.p, d, u.at, own[1], after))
        self._before = plan(self._first, first, False)  # compiles the kernels
        self._after = plan(self._second, second, True)
        self._addresses = list(map(Tensor.data_ptr, directions))

    def _empty(self, params: list[Tensor]) -> list[Tensor]:
        return [
            torch.empty_like(p, dtype=dtype, requires_grad=False)
            for p, (_, _, dtype) in zip(params, self._facts)
        ]

    def run(self, step: Step, known: Mapping[str, Tensor]) -> None:
        """Update the parameters."""
        columns, packed = step.columns.map(self.pick), step.packed
        directions = self._empty(columns.own[PARAM])
        pointers = list(map(Tensor.data_ptr, directions))
        moved, self._addresses = pointers != self._addresses and self._in_place, pointers
        mapped = self._rule.whole_fields
        for name in mapped if not self._in_place else ():
            torch._foreach_copy_(columns.into[name], columns.own[name])
        rows = map(list, zip(directions, *[columns.into[name] for name in mapped]))
        given = columns.given
        columns = columns._replace(given=dict(filter(self._takes(0), given.items())))
        columns = columns.with_field(DIRECTION, directions)
        first = list(map(self._of_directions, packed))
        before = step._replace(columns=columns, packed=first, room=Room())
        for launch in self._before:
            if moved:
                launch.readdress(columns)
            launch.run(before, {})
        del before  # with its buffers
        self._map(list(rows), columns, [x.scalars for x in packed])
        rest = dict(filter(self._takes(1), given.items()))
        columns = columns._replace(grads=directions, given=rest)
        moves = list(map(self._of_moves, packed))
        if self._second is not gradient_rule and not self._in_place:
            # The first pass has moved the state.
            apart = {
                name: columns.own[name] for name in (PARAM, COMP) if name in columns.own
            }
            columns = columns._replace(own={**columns.into, **apart})
        second = step._replace(columns=columns, packed=moves, room=Room())
        for launch, known in measured(self._after, second):
            launch.run(second, known)

    def _takes(self, which: int) -> Callable[[tuple[str, object]], bool]:
        """Return whether a pass (0 or 1) takes one of `Update.given`.

        The parameter is rounded, and so takes its bits, in the second.
        """
        along = which and self._second is gradient_rule
        return lambda item: bool(which) if item[0] == BITS else not along

    def _of_directions(self, packed: Packed) -> Packed:
        """Return the scalars of the first pass."""
        coeffs, rates, dither = packed.scalars
        same = self._first.coeffs is self._rule.coeffs
        if same and not rates.hooks:
            return packed
        rates = rates._replace(hooks=())  # so that all hooks share a kernel
        return Packed(Scalars(coeffs if same else NoState(), rates, dither))

    def _of_moves(self, packed: Packed) -> Packed:
        """Return those of the second: the direction has grad_scale and l2 in it."""
        coeffs, rates, dither = packed.scalars
        coeffs = NoState() if self._second is gradient_rule else coeffs
        hooks = rates.hooks[self._rule.mapped_hooks :]  # the map has applied the others
        rates = rates._replace(l2=0.0, grad_scale=1.0, hooks=hooks)
        return Packed(Scalars(coeffs, rates, dither))

    def _map(
        self,
        rows: list[list[Tensor]],
        columns: Columns,
        scalars: Sequence[Scalars],
    ) -> None:
        """Map each direction and its fields, in place."""
        assert self._rule.whole is not None
        rule, how = self._rule, self._rule.whole
        here: list[Owned] = []
        owned: dict[tuple[object, ...], list[Owned]] = {}

        def whole(d: Any, read: Any, fields: Any, at: int, place: Any) -> Any:
            coeffs, rates, _ = scalars[at]
            return how.map(d, read, fields, rule.at_place(coeffs, place), rates)

        def read(item: Owned) -> tuple[Tensor, ...]:
            return self._read(item, columns) if item.read is None else item.read

        for i, (row, (slot, at, _)) in enumerate(zip(rows, self._facts)):
            (d, *fields), item = row, Owned(i, row, [])
            if slot.holders is not None:
                key = slot.holders.group, slot.holders.dim, d.dtype
                given = None if slot.holders.dim is None else read(item)
                item = Owned(i, row, _holders(slot, fields), given)
                owned.setdefault(key, []).extend(item.divided())
            elif slot.shard is not None:
                pairs = zip(row, (slot.shard, *slot.fields))
                d, *fields = [x if s is None else shard_of(x, s) for x, s in pairs]
                local = tuple([shard_of(x, slot.shard) for x in read(item)])
                args = d, local, tuple(fields), at, slot.place
                mapped, new = on_whole(whole, *args, by_matrix=how.by_matrix)
                _write(rows[i], to_local([mapped, *new]))
            elif d.numel():
                here.append(item)

        def in_place(items: list[Owned]) -> None:
            def kind(item: Owned) -> tuple[int, object]:
                d, at = item.tensors[0], self._facts[item.place][1]
                return at, (d.shape, d.dtype, d.device) if _batches(d) else id(item)

            for (at, _), batch in grouped(items, kind).items():
                if len(batch) == 1:
                    i, (d, *fields), *_ = batch[0]
                    wide, given = tuple([to(f, d.dtype) for f in fields]), read(batch[0])
                    result, new = whole(d, given, wide, at, self._facts[i][0].place)
                    _write(batch[0].tensors, [result, *new])
                    del result, new, given  # before there are the next ones
                    continue
                each = list(map(read, batch))
                d, *fields = map(torch.stack, zip(*[item.tensors for item in batch]))
                along, places = self._places(batch, d.device)
                ways = vmap(whole, (0, 0, 0, None, along))
                stacked = tuple(map(torch.stack, zip(*each))), tuple(fields)
                result, new = ways(d, *stacked, at, places)
                for item, *every in zip(batch, result, *new):
                    _write(item.tensors, every)

        in_place(here)
        for items in owned.values():
            map_owned(in_place, items)

    def _read(self, item: Owned, columns: Columns) -> tuple[Tensor, ...]:
        """Return what the map reads of a parameter, which is local."""
        assert self._rule.whole is not None
        if not self._rule.whole.reads:
            return ()
        slot, _, wide = self._facts[i := item.place]
        # The first pass has moved the state, and not the parameter.
        tensors = {name: columns.into[name][i] for name in slot.dtypes}
        old = {name: columns.own[name][i] for name in slot.dtypes}
        state, _ = state_in(self._rule, tensors)
        found = [
            widen(old[PARAM], old.get(COMP), wide)[1]
            if name == "x"
            else decode(getattr(state, name), wide)
            for name in self._rule.whole.reads
        ]
        return tuple(found if item.stack is None else [x[item.stack] for x in found])

    def _places(
        self, batch: list[Owned], device: torch.device
    ) -> tuple[int, Tensor] | tuple[None, None]:
        """Return the axis of a batch and places to draw random numbers by, if it does."""
        if not self._rule.draws:
            return None, None
        places = [self._facts[item.place][0].place for item in batch]
        # Filled, because a CUDA graph takes no upload.
        return 0, torch.stack(
            [torch.full((), x, dtype=torch.int64, device=device) for x in places]
        )


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

    bypasses_autograd, movable, in_order = True, False, False

    def __init__(self, rule: Rule, updates: list[Update], kernel: ShapedKernel) -> None:
        updates = sorted(updates, key=lambda u: -u.slot.numel)
        super().__init__(rule, updates, True)
        self._kernel = kernel
        # Of the kernel's arguments: the parameter, the state with that of the map, and the
        # compensation.
        own = [name for name in self._names if name not in (PARAM, COMP)]
        comp = [COMP] if COMP in self._names else []
        self._names = [PARAM, *own, *rule.whole_fields, *comp]
        self._prepared = kernel.prepared([u.p.shape for u in updates])
        self.without_torch = self._in_place

    def run(self, step: Step, known: Mapping[str, Tensor]) -> None:
        """Update the parameters."""
        columns = step.columns.map(self.pick)
        p, *rest = into = [columns.into[name] for name in self._names]
        if not self._in_place:
            # The results, which are moved from where the parameters are.
            for name, new in zip(self._names, into):
                torch._foreach_copy_(new, columns.own[name])
        own, wide, device = step.packed[self._at], torch.float64, p[0].device
        # One of these keeps the scalars alive.
        values: Any = own.array(wide) if own.on_host else own.tensor(wide, device)
        at = address(values) if own.on_host else values.data_ptr()
        table = [[at] * len(self.positions), *map(addresses, (p, columns.grads, *rest))]
        self._kernel.run(table, *self._prepared)


def plan_shaped(
    rule: Rule, updates: list[Update], lenient: bool
) -> tuple[list[Launch], list[Update], Exception | None]:
    """Plan updates through shaped kernels, and return the rest, which these do not take.

    If `lenient`, they take none of a map that cannot be compiled, and the error is returned
    the first time.
    """
    groups: dict[tuple[int, KernelKey], list[Update]] = {}
    assert rule.whole is not None
    if rule.whole.digest not in ("", *runtime.unshaped):
        for u in filter(partial(_fits, rule), updates):
            groups.setdefault((u.at, _shaped_key(rule, u)), []).append(u)
    launches: list[Launch] = []
    for (_, key), batch in groups.items():
        if is_rehearsed(key.device):
            launches.append(RehearsedLaunch(rule, batch, True))
            continue
        try:
            run = kernel(key, batch[0].scalars.scalars)
        except Exception as error:
            # About these errors the planner of the other passes says something.
            if isinstance(error, NoListKernelError) or (
                lenient
                and isinstance(error, CaptureError | DispatchModeError | SwitchedOffError)
            ):
                return [], updates, None
            if not lenient:
                raise
            runtime.unshaped.add(rule.whole.digest)
            return [], updates, error
        if not isinstance(run, ShapedKernel):
            continue
        first = 3 + len(rule.fields)  # after the scalars, the parameter and the gradient
        sizes = [[n for _, n in u.slot.mapped or ()] for u in batch]
        fitting = [u for u, own in zip(batch, sizes) if run.fits(u.p.shape, own, first)]
        launches += [ShapedLaunch(rule, own, run) for own in split_twins(fitting) if own]
    planned = {i for launch in launches for i in launch.positions}
    return launches, [u for u in updates if u.position not in planned], None


def _shaped_key(rule: Rule, u: Update) -> KernelKey:
    """Return the key of the kernel for a parameter, with all its state."""
    own, mapped = u.slot.dtypes, [dtype for dtype, _ in u.slot.mapped or ()]
    tensors = {PARAM: own[PARAM], GRAD: u.g.dtype, **own}
    comp = {COMP: tensors.pop(COMP)} if COMP in own else {}
    tensors |= {**dict(zip(rule.whole_fields, mapped)), **comp}
    choices = rule, u.scalars.statics, True, True, tuple(tensors.items()), u.g.device
    return KernelKey(*choices, shape=example_of(u.p.shape))


def _fits(rule: Rule, u: Update) -> bool:
    """Return True if a shaped kernel may update this parameter."""
    slot, p, wide = u.slot, u.p, u.wide
    whole = slot.shard is None and slot.holders is None and not slot.paired
    plain = u.can_be_cut and not slot.coded and p.is_contiguous() and p.numel() > 0
    plain = plain and not u.given and rule.after is None
    plain = plain and not u.scalars.scalars.rates.hooks
    kept = slot.mapped is not None and all([dtype == wide for dtype, _ in slot.mapped])
    return updates_lists(p.device) and p.dim() in EXAMPLES and whole and plain and kept


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
    return device_type(x.device) != "cpu"


def _shape(u: Update) -> tuple[int, ...]:
    return tuple(u.p.shape) if u.slot.shard is None else u.slot.shard.shape


def _with_direction(slot: Slot, p: Tensor, d: Tensor) -> Slot:
    """Return the slot with the direction as one more field of its state."""
    return slot._replace(
        dtypes={**slot.dtypes, DIRECTION: d.dtype},
        addresses=(*slot.addresses, d.data_ptr()) if slot.in_place else (),
        dense=slot.dense and same_order(p, d),
    )


def _moved_slot(slot: Slot, rule: Rule) -> Slot:
    """Return the slot of the parameter and its compensation, with what `after` reads."""
    if rule is not gradient_rule:
        return slot
    names = [name for name in slot.dtypes if name in (PARAM, COMP)]
    addresses = dict(zip(slot.dtypes, slot.addresses))
    return slot._replace(
        dtypes={name: slot.dtypes[name] for name in names},
        addresses=tuple([addresses[name] for name in names if slot.in_place]),
    )
