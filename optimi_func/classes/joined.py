"""Running scalars that follow from sums over all parameters, as Prodigy's d.

Each step adds up a part for every parameter (`Rule.sums`). The last thing in a step is to
join the parts (`Rule.join`), to write the new running scalars into the state of every
parameter, and to show the first of them in the param group.
"""

from functools import partial
from itertools import chain, product
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optimi_func.classes.extras import Extras
from optimi_func.core.leaf import init_leaf
from optimi_func.core.rule import Leaf, Scalar
from optimi_func.core.storage import group_storage, state_in
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.sums import Part, Unit, join, write_running
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry, Group
from optimi_func.state.names import without_repeats

if TYPE_CHECKING:
    from optimi_func.classes.base import BaseOptimizer

_is_cuda = attrgetter("is_cuda")


def lead_of(optimizer: "BaseOptimizer", group: Group) -> Entry | None:
    """Return the entry whose running scalars are those of a group, if one has any."""
    params = chain.from_iterable([x["params"] for x in optimizer.unit_of(group)])
    entries = (x for x in map(optimizer.state.get, params) if x and "step" in x)
    first, rule = next(entries, None), optimizer.rule_of(group)
    if first is None or rule.join is None:
        return first
    # A parameter that came from another group has that group's scalars until it steps.
    name = rule.running._fields[0]
    value = group.get(name)
    same = (x for x in chain([first], entries) if _shows(x.get(name), value))
    return next(same, first)


def running_scalars(
    optimizer: "BaseOptimizer",
    bound: FunctionalOptimizer,
    group: Group,
    fresh: list[Entry],
    device: torch.device | None,
) -> tuple[Scalar, ...]:
    """Return a group's running scalars (None: as numbers), which `fresh` take over."""
    names = bound.rule.running._fields
    lead, host = lead_of(optimizer, group) or fresh[0], device is None
    for name, entry in product(names, fresh):
        entry[name].copy_(lead[name])
    values = tuple([lead[x].item() if host else lead[x].to(device) for x in names])
    value = group.get(names[0], shown := lead[names[0]])
    # The host would wait for a tensor on a device.
    if value is not shown and (host or not isinstance(value, Tensor)):
        _, start = bound.advance(1.0, bound.rule.running())
        if value != (kept := shown.item() or float(start[0])):
            raise ValueError(
                f"a group's {names[0]}={value!r} is computed by each step, which would "
                f"go on from {kept}: allowed is to read it. reset() begins anew, also "
                "after state.clear(). If all parameters with state came from another "
                f"group, set the group's {names[0]} to {kept}, or drop their state by "
                "optimizer.state.pop(p) and call reset()"
            )
    return values


def finish(optimizer: "BaseOptimizer", parts: dict[Tensor, Part], extras: Extras) -> None:
    """Join the parts of a step, and write what follows from them."""
    homes = {id(optimizer.group_of(p)) for p in parts}
    # In the order of the groups, because all processes send the same message.
    every = [optimizer.unit_of(x) for x in optimizer.param_groups if id(x) in homes]
    units = {id(groups[0]): groups for groups in every}.values()
    with kernel_context(next(iter(parts)).device):
        pairs = [_unit(optimizer, groups, parts, extras) for groups in units]
        for (_, entries), new in zip(pairs, join([unit for unit, _ in pairs])):
            write_running(entries, new)
        for group in chain.from_iterable(units):
            publish_running(optimizer, group)


def _unit(
    optimizer: "BaseOptimizer",
    groups: list[Group],
    parts: dict[Tensor, Part],
    extras: Extras,
) -> tuple[Unit, list[Entry]]:
    """Return the sums of groups, and the entries to keep what is made of them."""
    first, lead, entries = groups[0], lead_of(optimizer, groups[0]) or {}, list[Entry]()
    bound = optimizer.bound_of(first, first["params"], first["capturable"])
    rule, values = bound.rule, [lead[name] for name in bound.rule.running._fields]
    if not (first["capturable"] or any(map(_is_cuda, values))):
        values = [x.item() for x in values]
    coeffs, running = bound.advance(1.0, rule.running(*values))
    for name in rule.single:
        given = [*extras.get(name, {}).values()]
        coeffs = coeffs._replace(**{name: given[0] if given else rule.usual[name]})
    unit = Unit(rule, coeffs, running, [], [])
    every = list(chain.from_iterable([group["params"] for group in groups]))
    for p in [every[i] for i in without_repeats(every)]:
        if "step" in (entry := optimizer.state.get(p, {})):
            entries.append(entry)
            leaf = partial(lambda p, entry: Leaf(p, *state_in(rule, entry)), p, entry)
        elif p.requires_grad:  # it has had no gradient yet
            leaf = partial(init_leaf, rule, bound.init_numbers, p, group_storage(first))
        else:
            continue
        unit.add(p, leaf, parts.get(p))
    return unit, entries


def publish_running(optimizer: "BaseOptimizer", group: Group) -> None:
    """Put the first of the joined running scalars into a group, under its name."""
    bound = optimizer.bound_of(group, group["params"], group["capturable"])
    if bound.rule.join is not None:
        name, lead = bound.rule.running._fields[0], lead_of(optimizer, group)
        _, first = bound.advance(1.0, bound.rule.running())
        group[name] = float(first[0])
        if lead is not None and (group["capturable"] or lead[name].is_cuda):
            group[name] = lead[name]
        elif lead is not None:
            group[name] = lead[name].item() or group[name]


def _shows(x: Tensor | None, value: object) -> bool:
    """Return True if a group shows x, as itself or as a number; no device is waited for."""
    if x is value or x is None or x.is_cuda or isinstance(value, Tensor):
        return x is value
    return x.item() == value
