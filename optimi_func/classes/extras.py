"""Inputs of a rule besides the gradient: extras, noise and random bits to round by.

Extras are further arguments of the `direction` of a user's own rule. Users pass them to
`step`, or store them by `give`. Noise is drawn by a seed, the step number and the position
of the parameter in the optimizer, so that a resumed run draws the same numbers.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optimi_func.core import checks
from optimi_func.core.distributed import same_placements, to_local
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.pairs import as_real_for
from optimi_func.core.philox import Noise
from optimi_func.core.rule import Rule, Scalar, Scalars
from optimi_func.core.storage import BITS, group_storage, seed_of
from optimi_func.state.convert import Group

if TYPE_CHECKING:
    from optimi_func.classes.base import BaseOptimizer

Extras = Mapping[str, Mapping[Tensor, Tensor]]  # by name and parameter


def found_extras(
    optimizer: "BaseOptimizer", given: Mapping[str, object], every: bool = False
) -> dict[str, dict[Tensor, Tensor]]:
    """Return extras by name and parameter: those with a gradient, or all that take one."""
    groups: list[Group] = optimizer.param_groups
    rules: list[Rule] = list(map(optimizer.rule_of, groups))
    taken = {*chain.from_iterable([rule.extras for rule in rules])}
    usual = {*chain.from_iterable([rule.usual for rule in rules])}
    if not taken - usual <= {*given} <= taken:
        raise TypeError(
            f"step got the extras {sorted(given)}: this optimizer's direction takes "
            f"{sorted(taken)} (extras are its arguments but g, s, t, x, z, r and c)"
        )
    params = [p for group in groups for p in group["params"]]
    extras: dict[str, dict[Tensor, Tensor]] = {}
    for name, x in given.items():
        if isinstance(x, float):
            x = torch.tensor(x, dtype=torch.float64, device="cpu")
        rows = x
        if isinstance(x, Tensor) and x.dim() == 0:
            rows = dict.fromkeys(params, x)
        elif isinstance(x, Sequence) and len(x) == len(params):
            rows = dict(zip(params, x))
        if not isinstance(rows, Mapping):
            raise TypeError(
                f"{name}={checks.shown(x)}: allowed are a number for all, a dict by "
                f"parameter or by name, and a list of {len(params)}, one for each parameter"
            )
        extras[name] = {}
        for group in [g for g, rule in zip(groups, rules) if name in rule.extras]:
            for p in group["params"]:
                if p.grad is not None or (every and p.requires_grad):
                    value = rows.get(p, rows.get(optimizer.name_of(p)))
                    single = name in optimizer.rule_of(group).single
                    where = optimizer.path_of(group, p)
                    extras[name][p] = _checked(name, where, p, value, single)
    return extras


def _checked(name: str, path: object, p: Tensor, x: object, single: bool) -> Tensor:
    whole = isinstance(x, Tensor) and x.shape == p.shape and same_placements(p, x)
    if not ((isinstance(x, Tensor) and x.dim() == 0) or (whole and not single)):
        also = f"tensors of the shape {tuple(p.shape)}, with its placements, and "
        raise ValueError(
            f"{name} of {path}, which takes a gradient, is {checks.shown(x)}: allowed are "
            f"{'' if single else also}0-d ones"
        )
    assert isinstance(x, Tensor)
    x, part = to_local([as_real_for(p, x.detach()), p])
    # A number in float32 would not widen by what is multiplied with it.
    x = x.to(p.device, torch.promote_types(x.dtype, compute_dtype(p.dtype)))
    return x.expand(part.shape) if x.dim() else x


def loss_extra(optimizer: "BaseOptimizer", loss: object) -> dict[str, object]:
    """Return a closure's loss as an extra, if a rule takes one."""
    if loss is None or not any(["loss" in rule.extras for rule in optimizer.rules()]):
        return {}
    if not isinstance(loss, Tensor):
        loss = torch.tensor(loss, dtype=torch.float32, device="cpu")
    return {"loss": loss}


def with_extras(
    optimizer: "BaseOptimizer",
    extras: Extras,
    bound: Any,  # a pure optimizer, which has a seed if it draws noise
    params: list[Tensor],
    scalars: list[Scalars],
    counts: Sequence[tuple[Scalar, Sequence[Scalar]]],
    at: list[int],
) -> tuple[list[Scalars], list[int], dict[str, list[Any]]]:
    """Return scalars and their places with the numbers that a rule is given besides.

    The third result are the columns of tensors that it is given, by name.
    """
    rule, columns = bound.rule, dict[str, list[Any]]()
    for name in rule.extras:
        if name in rule.usual and name not in extras:
            usual = torch.tensor(rule.usual[name], dtype=torch.float64, device="cpu")
            columns[name] = [usual] * len(params)
            continue
        for p in params:
            if p not in extras.get(name, ()):
                where = optimizer.path_of(optimizer.group_of(p), p)
                raise ValueError(
                    f"nothing was given as {name} of {where}: allowed is to call "
                    f"optimizer.give({name}=...) before the backward"
                )
        columns[name] = [extras[name][p] for p in params]
    if "z" in rule.given:
        rows = zip(at, places_of(optimizer, params), params)
        noise = [Noise(bound.seed, counts[i][0], place, p) for i, place, p in rows]
        columns["z"] = noise
    indices, results = list[int](), list[Scalars]()
    known: dict[object, int] = {}
    for i, row in zip(at, zip(*columns.values())):
        # A number is one of the scalars, and each kind of them is there once.
        numbers = [x if _is_number(x) else None for x in row]
        key = i, *map(id, numbers)
        if key not in known:
            known[key] = len(results)
            coeffs = scalars[i].coeffs._replace(**dict(zip(columns, numbers)))
            results.append(scalars[i]._replace(coeffs=coeffs))
        indices.append(known[key])
    tensors = {
        name: [None if _is_number(x) else x for x in column]
        for name, column in columns.items()
    }
    return results, indices, tensors


def rounding_bits(
    optimizer: "BaseOptimizer",
    group: Group,
    params: list[Tensor],
    counts: Sequence[tuple[Scalar, Sequence[Scalar]]],
    at: list[int],
) -> dict[str, list[Noise | None]]:
    """Return the column of random bits to round parameters by, if there are any."""
    if not (storage := group_storage(group)).rounds:
        return {}
    seeds = [seed_of(storage, p) for p in params]
    rows = zip(at, places_of(optimizer, params), params, seeds)
    bits = [
        None if seed is None else Noise(seed, counts[i][0], place, p, torch.int32)
        for i, place, p, seed in rows
    ]
    return {BITS: bits} if any([x is not None for x in bits]) else {}


def places_of(optimizer: "BaseOptimizer", params: list[Tensor]) -> list[int]:
    """Return the places of parameters in the optimizer, by which noise is drawn."""
    every = chain.from_iterable([group["params"] for group in optimizer.param_groups])
    places = {id(p): i for i, p in reversed([*enumerate(every)])}
    return [places[id(p)] for p in params]


def _is_number(x: Tensor | Noise) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0
