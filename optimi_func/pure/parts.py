"""Values whose numbers are trees: parts of the parameters have plain values."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.rule import Named, Scalar, Scalars
from optimi_func.pure.tree import NO_RUNNING, FlatTree, broadcast, paths_in

if TYPE_CHECKING:
    from optimi_func.pure.functional import FunctionalOptimizer

F = TypeVar("F", bound="FunctionalOptimizer")
_RATES = "lr", "weight_decay"


def is_number(x: object) -> bool:
    """Return True for a leaf of a tree, which is a dict: tuples are numbers too."""
    return not isinstance(x, dict)


def trees_of(value: "FunctionalOptimizer") -> dict[str, list[Any]]:
    """Return the leaves of numbers that are trees, but lr and weight_decay, by name."""
    values, static = value.__dict__, (*_RATES, "max_lr", *value.choices)
    trees = [x for x in value.__dataclass_fields__ if isinstance(values.get(x), dict)]
    leaves = {x: pytree.tree_leaves(values[x], is_number) for x in trees if x not in static}
    return {name: xs or [None] for name, xs in leaves.items()}


def _part(value: F, numbers: dict[str, Any]) -> F:
    """Return a value with plain numbers. Raise if its rule is another."""
    values = {f.name: getattr(value, f.name) for f in fields(value)} | numbers
    part = (type(value) if torch.compiler.is_compiling() else type(value).kept)(**values)
    if part.rule is not value.rule or value.rule.join is not None:
        raise ValueError(
            f"a tree of {', '.join(trees_of(value))}, but {type(value).__name__} has "
            "another rule for some of its numbers, or sums over all parameters: "
            "transforms.partition has an optimizer for each part"
        )
    return part


def samples(value: F) -> list[F]:
    """Return checked values of one number of each tree, or the value without trees."""
    trees, results = trees_of(value), []
    first = {name: leaves[0] for name, leaves in trees.items()}
    for name, leaves in trees.items():
        for x, path in zip(leaves, paths_in(getattr(value, name), is_number)):
            try:
                results += [_part(value, first | {name: x})]
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error} (in {name}{path})") from error
    return results or [value]


def parts_of(value: F, tree: FlatTree) -> tuple[list[F], list[int]]:
    """Return the values of parts of the parameters, and the index of each parameter's."""
    flat = {x: broadcast(x, getattr(value, x), tree) for x in _RATES}
    trees = trees_of(value)
    flat |= {x: broadcast(x, getattr(value, x), tree, is_number) for x in trees}
    alike = [*zip(*[at for _, at in flat.values()])]
    rows = [*dict.fromkeys(alike)]
    numbers = [{x: xs[i] for (x, (xs, _)), i in zip(flat.items(), row)} for row in rows]
    return [_part(value, x) for x in numbers], [rows.index(row) for row in alike]


def scalars_of(
    value: "FunctionalOptimizer", tree: FlatTree, step: Tensor, t: Scalar, at_once: bool
) -> tuple[list[Scalars], list[int], list[Named]]:
    """Return what `FunctionalOptimizer.scalars` does, of each part's numbers."""
    parts, at = parts_of(value, tree)
    results: list[Scalars] = []
    places = [0] * len(at)
    running: list[Named] = [NO_RUNNING] * len(at)
    for k, part in enumerate(parts):
        rows = [i for i, j in enumerate(at) if j == k]
        leaves, states = [tree.leaves[i] for i in rows], [tree.states[i] for i in rows]
        subtree = tree._replace(leaves=leaves, states=states, spec=(list, len(rows)))
        scalars, index, after = part.scalars(subtree, step, t, at_once)
        for i, j, x in zip(rows, index, after):
            places[i], running[i] = len(results) + j, x
        results += scalars
    return results, places, running
