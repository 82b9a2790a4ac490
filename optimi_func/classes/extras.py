"""Tensors that a direction takes besides gradient and state: extras, and noise."""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from optimi_func.classes.groups import EXECUTORS, Group, path_of
from optimi_func.core.checks import shown
from optimi_func.core.distributed import same_placements, to_local
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.rule import Rule, Scalar, Scalars


def check_runs(group: Group, rule: Rule) -> None:
    """Raise for options that a rule cannot honour whose steps are eager."""
    for name in EXECUTORS if rule.eager else ():
        if group.get(name):
            raise TypeError(
                f"{name}={group[name]} with {rule.name}, whose {rule.eager}: it runs "
                f"eagerly. Allowed is {name}=False"
            )


class Given:
    """The extras of an optimizer's steps."""

    # Of a step; None if no rule takes any.
    extras: dict[str, dict[Tensor, Tensor]] | None = None
    given: Mapping[str, dict[Tensor, Tensor]] = MappingProxyType({})  # by `give`

    def give(self, **extras: object) -> None:
        """Give extras to the steps to come, until others take their place.

        Gradient release takes no others. `step` takes its own before these. They are not
        saved: after loading a checkpoint give them again.

        Args:
            **extras: As those of `step`, for each trainable parameter.

        Raises:
            TypeError, ValueError: Extras that do not fit; the former ones stay then.
        """
        self.given = found_extras(self, extras, every=True)


def found_extras(
    optimizer: Any, given: Mapping[str, object], every: bool = False
) -> dict[str, dict[Tensor, Tensor]]:
    """Return extras by name and parameter: those with a gradient, or all that take one."""
    groups: list[Group] = optimizer.param_groups
    rules: list[Rule] = list(map(optimizer.rule_of, groups))
    taken = {*chain.from_iterable([rule.extras for rule in rules])}
    if taken != {*given}:
        raise TypeError(
            f"step got the extras {sorted(given)}: this optimizer's direction takes "
            f"{sorted(taken)} (extras are its arguments but g, s, t, x, z, r and c)"
        )
    params = [p for group in groups for p in group["params"]]
    extras: dict[str, dict[Tensor, Tensor]] = {}
    for name, x in given.items():
        rows = x
        if isinstance(x, Tensor) and x.dim() == 0:
            rows = dict.fromkeys(params, x)
        elif isinstance(x, Sequence) and len(x) == len(params):
            rows = dict(zip(params, x))
        if not isinstance(rows, Mapping):
            raise TypeError(
                f"{name}={shown(x)}: allowed are a 0-d tensor for all, a dict by parameter "
                f"or by name, and a list of {len(params)}, one for each parameter"
            )
        extras[name] = {}
        for group in [g for g, rule in zip(groups, rules) if name in rule.extras]:
            names = group.get("param_names", group["params"])
            for p, key in zip(group["params"], names):
                if p.grad is not None or (every and p.requires_grad):
                    value = rows.get(p, rows.get(key))
                    extras[name][p] = _checked(name, path_of(group, p), p, value)
    return extras


def _checked(name: str, path: object, p: Tensor, x: object) -> Tensor:
    if not (
        isinstance(x, Tensor)
        and x.shape in (p.shape, ())
        and (x.dim() == 0 or same_placements(p, x))
    ):
        raise ValueError(
            f"{name} of {path}, which takes a gradient, is {shown(x)}: allowed are tensors "
            f"of the shape {tuple(p.shape)}, with its placements, and 0-d ones"
        )
    # A number in float32 would not widen by what is multiplied with it.
    wide = torch.promote_types(x.dtype, compute_dtype(p.dtype))
    dtype = wide if x.is_floating_point() else x.dtype
    return to_local([x.detach()])[0].to(p.device, dtype)


def with_given(
    optimizer: Any,
    bound: Any,
    params: list[Tensor],
    scalars: list[Scalars],
    counts: Sequence[tuple[Scalar, Sequence[Scalar]]],
    at: list[int],
) -> tuple[list[Scalars], list[int]]:
    """Return scalars of each parameter's own, with what its direction takes besides."""
    results: list[Scalars] = []
    places: dict[Tensor, int] = {}
    if "z" in bound.rule.given:
        every = chain.from_iterable([group["params"] for group in optimizer.param_groups])
        places = {p: i for i, p in enumerate(every)}
    extras = optimizer.extras or optimizer.given  # extras are {} outside of a step
    for p, i in zip(params, at):
        for name in bound.rule.extras:
            if p not in extras.get(name, ()):
                where = path_of(optimizer.group_of(p), p)
                raise ValueError(
                    f"nothing was given as {name} of {where}: allowed is to call "
                    f"optimizer.give({name}=...) before the backward"
                )
        values: dict[str, object] = {name: extras[name][p] for name in bound.rule.extras}
        if "z" in bound.rule.given:
            values["z"] = bound.seed, counts[i][0], places[p], p
        results.append(scalars[i]._replace(coeffs=scalars[i].coeffs._replace(**values)))
    return results, [*range(len(params))]
