"""Steps of rules that map whole tensors: the map, between two elementwise passes.

The first pass is the step of a rule whose state has the direction as one field more, and
that moves no parameter; the second moves parameters along a gradient, which is the mapped
direction. Both are planned and run as any rule's step is. What is here beside them is the
order of the three, and the memory of the directions.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from optimi_func._distributed import part_on_whole
from optimi_func._leaf import compute_dtype
from optimi_func._rule import (
    Direction,
    NoState,
    Rule,
    Scalars,
    along_gradient,
    no_coeffs,
    no_init,
)
from optimi_func.execution.launches import Launch, StepInputs, Update
from optimi_func.execution.scalars import PackedScalars
from optimi_func.execution.slots import Slot
from optimi_func.execution.tensors import chunks, same_order

Planner: TypeAlias = Callable[[Rule[Any, Any], list[Update], bool], list[Launch]]

# Elements of the directions that are in memory together, or one larger tensor: of those
# that are mapped one by one, and of those that are mapped in batches.
ELEMENTS = 1 << 22
BATCHED = 1 << 26


moving = Rule("move", NoState, no_init, no_coeffs, along_gradient)


def directing(rule: Rule[Any, Any]) -> Rule[Any, Any]:
    """The rule that keeps its direction: one for all rules that differ in the map alone."""
    return _directing(rule.name, rule.state, rule.init, rule.coeffs, rule.direction)


@cache
def _directing(
    name: str, state: Any, init: Any, coeffs: Any, direct: Any
) -> Rule[Any, Any]:
    fields = [(field, Tensor) for field in (*state._fields, "direction")]
    kind: Any = NamedTuple("State", fields)

    def direction(g: Tensor, s: Any, c: Any) -> Direction:
        *own, _ = s
        d, new, _ = direct(g, state(*own), c)
        return Direction(d, kind(*new, d))

    return Rule(f"{name}_direction", kind, init, coeffs, direction)


class _Facts(NamedTuple):
    """An update without what holds memory."""

    slot: Slot
    target: Slot
    at: int
    guarded: bool
    dtype: torch.dtype  # of the direction


class WholeLaunch(Launch):
    """Parameters whose rule maps whole tensors: their directions, the map, the moves.

    Args:
        rule: The mathematics.
        updates: In an order that all processes share.
        plan: Plans the two passes.
    """

    raw = True

    def __init__(self, rule: Rule[Any, Any], updates: list[Update], plan: Planner) -> None:
        super().__init__(updates)
        self._rule, self._plan = rule, plan
        self._facts = [
            _Facts(u.slot, u.target, u.at, u.guarded, _dtype(u)) for u in updates
        ]
        params, grads = [u.p for u in updates], [u.g for u in updates]
        # Here whatever has to be compiled is.
        self._prepare(
            params, grads, self._empty(params), {u.at: u.scalars for u in updates}
        )

    def _empty(self, params: list[Tensor]) -> list[Tensor]:
        return [
            torch.empty_like(p, dtype=facts.dtype, requires_grad=False)
            for p, facts in zip(params, self._facts)
        ]

    def _prepare(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        directions: list[Tensor],
        scalars: dict[int, PackedScalars],
    ) -> None:
        """Plan the two passes for directions that lie here."""
        moves = {at: _of_moves(x) for at, x in scalars.items()}
        direct: list[Update] = []
        move: list[Update] = []
        for i, (x, p, g, d) in enumerate(zip(self._facts, params, grads, directions)):
            slot = target = _with_direction(x.slot, p, d)
            if x.target is not x.slot:
                target = _with_direction(x.target, p, d)
            direct.append(Update(i, slot, target, p, g, x.at, scalars[x.at], x.guarded))
            slot = target = _without_state(x.slot)
            if x.target is not x.slot:
                target = _without_state(x.target)
            move.append(Update(i, slot, target, p, d, x.at, moves[x.at], x.guarded))
        self._before = self._plan(directing(self._rule), direct, False)
        self._after = self._plan(moving, move, True)
        self._addresses = list(map(Tensor.data_ptr, directions))

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Update the parameters."""
        del means
        (p, *state), grads = self._picked(inputs.roles), self._own(inputs.grads)
        to, *new = self._picked(inputs.targets)
        numbers, directions = inputs.numbers, self._empty(p)
        if list(map(Tensor.data_ptr, directions)) != self._addresses:
            self._prepare(p, grads, directions, dict(enumerate(numbers.scalars)))
        roles, targets = [p, directions, *state], [to, directions, *new]
        for launch in self._before:
            launch.run(StepInputs(roles, targets, grads, numbers))
        self._map(directions, [x.scalars.coeffs for x in numbers.scalars])
        numbers = numbers._replace(scalars=list(map(_of_moves, numbers.scalars)))
        for launch in self._after:
            launch.run(StepInputs(roles, targets, directions, numbers))

    def _own(self, items: list[Any]) -> list[Any]:
        return [items[i] for i in self.places]

    def _picked(self, roles: list[list[Any]]) -> list[list[Any]]:
        return list(map(self._own, roles))

    def _map(self, directions: list[Tensor], coeffs: list[Any]) -> None:
        """Map each direction, in place."""
        whole = self._rule.whole
        assert whole is not None
        alike: dict[Any, list[Tensor]] = {}
        for i, (d, x) in enumerate(zip(directions, self._facts)):
            if x.slot.shard is not None:
                d.copy_(part_on_whole(whole, d, x.slot.shard, coeffs[x.at]))
            elif d.numel():
                kind = (d.shape, d.dtype, d.device) if _batches(d) else i
                alike.setdefault((x.at, kind), []).append(d)
        for (at, _), some in alike.items():
            if len(some) == 1:
                some[0].copy_(whole(some[0], coeffs[at]))
                continue
            found = vmap(whole, (0, None))(torch.stack(some), coeffs[at])
            for d, x in zip(some, found):
                d.copy_(x)


def plan_wholes(rule: Rule[Any, Any], updates: list[Update], plan: Planner) -> list[Launch]:
    """Launches of so many parameters that their directions take bounded memory.

    Args:
        rule: The mathematics.
        updates: What to update, in an order that all processes share.
        plan: Plans elementwise rules.
    """
    together = ELEMENTS
    if all([_batches(u.p) for u in updates]):
        together, updates = BATCHED, sorted(updates, key=_shape)
    launches = chunks(updates, together, lambda u: u.slot.numel)
    return [WholeLaunch(rule, some, plan) for some in launches]


def _batches(x: Tensor) -> bool:
    """Whether tensors of one shape are mapped together.

    Not on a CPU: the results would depend on what else there is to map.
    """
    return x.device.type != "cpu"


def _shape(u: Update) -> tuple[int, ...]:
    return tuple(u.p.shape) if u.slot.shard is None else u.slot.shard.shape


def _dtype(u: Update) -> torch.dtype:
    return compute_dtype(u.g.dtype, *u.slot.dtypes)


def _of_moves(scalars: PackedScalars) -> PackedScalars:
    """The numbers of a move: the gradient's factor and L2 decay are in the direction."""
    _, rates, dither = scalars.scalars
    rates = rates._replace(l2=0.0, grad_scale=1.0)
    return PackedScalars(Scalars(NoState(), rates, dither))


def _with_direction(slot: Slot, p: Tensor, d: Tensor) -> Slot:
    """The slot with the direction as the last field of its state, and second role."""
    end = len(slot.dtypes) - slot.compensated
    roles = [role + (role > 0) for role in slot.roles]
    return slot._replace(
        dtypes=(*slot.dtypes[:end], d.dtype, *slot.dtypes[end:]),
        addresses=(*slot.addresses[:end], d.data_ptr(), *slot.addresses[end:]),
        roles=(*roles[:end], 1, *roles[end:]),
        codes=(*slot.codes, False),
        dense=slot.dense and same_order(p, d),
    )


def _without_state(slot: Slot) -> Slot:
    """The slot of the parameter and its compensation alone."""
    end = len(slot.dtypes) - slot.compensated
    roles = [role + (role > 0) for role in slot.roles]
    return slot._replace(
        dtypes=(slot.dtypes[0], *slot.dtypes[end:]),
        addresses=(slot.addresses[0], *slot.addresses[end:]),
        roles=(0, *roles[end:]),
        codes=(),
    )
