"""Steps of rules that map whole tensors, such as Muon's orthogonalization.

A step is two elementwise passes with the map between them. The first pass moves the state
and stores the direction as one more field of it. The second moves the parameters along
the mapped direction, like SGD along a gradient. Both are planned like any rule's step.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from optimi_func.core.codes import same_order
from optimi_func.core.distributed import part_on_whole
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.owners import Owned, map_owned
from optimi_func.core.rule import Direction, NoState, Rule, Scalars, gradient_rule
from optimi_func.execution.launches import Columns, Launch, Update
from optimi_func.execution.scalars import Packed
from optimi_func.execution.slots import Slot
from optimi_func.execution.tensors import chunks

_Planner: TypeAlias = Callable[[Rule[Any, Any], list[Update], bool], list[Launch]]

# Elements of the directions that are in memory together, or one larger tensor: if they are
# mapped one by one, and in batches.
ELEMENTS = 1 << 22
BATCHED = 1 << 26


def directing(rule: Rule[Any, Any]) -> Rule[Any, Any]:
    """Return the rule that stores its direction, one for all that differ in the map."""
    own = rule.name, rule.state, rule.init, rule.coeffs, rule.direction
    return _directing(*own, rule.reads_param, rule.digest)


# Bounded, because a notebook may define a rule again and again.
@lru_cache(64)
def _directing(
    name: str, state: Any, init: Any, coeffs: Any, direct: Any, reads: bool, digest: str
) -> Rule[Any, Any]:
    fields = [(field, Tensor) for field in (*state._fields, "direction")]
    kind: Any = NamedTuple("State", fields)

    def direction(g: Tensor, s: Any, c: Any, *x: Tensor) -> Direction:
        *own, _ = s
        d, new, _ = direct(g, state(*own), c, *x)
        return Direction(d, kind(*new, d))

    own = f"{name}_direction", kind, init, coeffs, direction
    return Rule(*own, reads_param=reads, digest=digest and f"{digest}_direction")


class WholeLaunch(Launch):
    """Parameters whose rule maps whole tensors: first pass, map, second pass.

    The updates are in the same order on all processes, and `plan` plans the two passes.
    """

    def __init__(self, rule: Rule[Any, Any], updates: list[Update], plan: _Planner) -> None:
        super().__init__(updates)
        self._rule, self._plan = rule, plan
        # Without their tensors, which a launch must not keep alive.
        self._facts = [
            (u.slot, u.at, compute_dtype(u.g.dtype, *u.slot.dtypes)) for u in updates
        ]
        params, grads = [u.p for u in updates], [u.g for u in updates]
        packed = {u.at: u.scalars for u in updates}
        self._prepare(params, grads, self._empty(params), packed)  # compiles the kernels

    def pick(self, items: list[Any]) -> list[Any]:
        """Pick this launch's part, whose order may be another one."""
        return [items[i] for i in self.places]

    def _empty(self, params: list[Tensor]) -> list[Tensor]:
        return [
            torch.empty_like(p, dtype=dtype, requires_grad=False)
            for p, (_, _, dtype) in zip(params, self._facts)
        ]

    def _prepare(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        directions: list[Tensor],
        packed: dict[int, Packed],
    ) -> None:
        """Plan the two passes for directions at these addresses."""
        moves = {at: _of_moves(x) for at, x in packed.items()}
        direct: list[Update] = []
        move: list[Update] = []
        rows = zip(self._facts, params, grads, directions)
        for i, ((slot, at, _), p, g, d) in enumerate(rows):
            direct.append(Update(i, _with_direction(slot, p, d), p, g, at, packed[at]))
            move.append(Update(i, _without_state(slot), p, d, at, moves[at]))
        self._before = self._plan(directing(self._rule), direct, False)
        self._after = self._plan(gradient_rule, move, True)
        self._addresses = list(map(Tensor.data_ptr, directions))

    def run(self, columns: Columns, packed: list[Packed], means: Tensor | None) -> None:
        """Update the parameters."""
        del means
        own = list(map(self.pick, columns))
        p, grads, *_ = own
        directions = self._empty(p)
        moved = list(map(Tensor.data_ptr, directions)) != self._addresses
        if moved and self._in_place:
            self._prepare(p, grads, directions, dict(enumerate(packed)))
        # Directions come before the state, among the results too.
        for i in (len(own) // 2 + 2, 2) if not self._in_place else (2,):
            own.insert(i, directions)
        for launch in self._before:
            launch.run(own, packed, None)
        self._map(directions, [x.scalars.coeffs for x in packed])
        moves = list(map(_of_moves, packed))
        for launch in self._after:
            launch.run([p, directions, *own[2:]], moves, None)

    def _map(self, directions: list[Tensor], coeffs: list[Any]) -> None:
        """Map each direction, in place."""
        whole = self._rule.whole
        assert whole is not None
        here: list[Any] = []
        owned: dict[Any, list[Owned]] = {}
        for i, (d, (slot, at, _)) in enumerate(zip(directions, self._facts)):
            if slot.holders is not None:
                key = slot.holders.group, slot.holders.dim, d.dtype
                owned.setdefault(key, []).append((i, d, slot.holders))
            elif slot.shard is not None:
                d.copy_(part_on_whole(whole, d, slot.shard, coeffs[at]))
            elif d.numel():
                here.append((i, d, None))

        def in_place(items: list[Any]) -> None:
            batches: dict[Any, list[Tensor]] = {}
            for i, x, _ in items:
                kind = (x.shape, x.dtype, x.device) if _batches(x) else i
                batches.setdefault((self._facts[i][1], kind), []).append(x)
            for (at, _), some in batches.items():
                if len(some) == 1:
                    some[0].copy_(whole(some[0], coeffs[at]))
                    continue
                found = vmap(whole, (0, None))(torch.stack(some), coeffs[at])
                for d, x in zip(some, found):
                    d.copy_(x)

        in_place(here)
        for items in owned.values():
            map_owned(in_place, items)


def plan_wholes(
    rule: Rule[Any, Any], updates: list[Update], plan: _Planner
) -> list[Launch]:
    """Plan launches of few enough parameters to bound the memory of their directions.

    The updates are in the same order on all processes, and `plan` plans elementwise rules.
    """
    together = ELEMENTS
    if all([_batches(u.p) for u in updates]):
        together, updates = BATCHED, sorted(updates, key=_shape)

    def elements(u: Update) -> int:
        holders = u.slot.holders
        count, parts = (holders.group.size(), holders.parts) if holders else (1, 1)
        # So that as many as there are processes go together, and each has one to map.
        return min(together // count, math.prod(_shape(u)) // parts)

    return [WholeLaunch(rule, some, plan) for some in chunks(updates, together, elements)]


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
        columns=(*columns[:end], 2, *columns[end:]),
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
