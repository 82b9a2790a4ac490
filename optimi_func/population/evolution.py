"""Selection, copies and perturbation of members, for population-based training."""

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import tell_removed
from optimi_func.core.math import scalar_dtype
from optimi_func.population.axes import place
from optimi_func.population.members import Population, check_members, first_tensor

T = TypeVar("T")


def select(tree: T, index: Sequence[int] | Tensor) -> T:
    """Return the members at `index`, in its order and as often as they are listed.

    Parameters, optimizer state, hyperparameters and buffers of a member stay together.

    Args:
        tree: A Population or any tree with the members along every first axis.
        index: Indices of members from 0, or a bool for each member.

    Raises:
        IndexError: An index is out of range, or there is not one bool for each member.

    >>> select({"w": torch.tensor([1.0, 2.0, 3.0])}, [2, 0, 0])["w"]
    tensor([3., 1., 1.])
    """
    at = _index("index", index, tree)
    return pytree.tree_map_only(Tensor, lambda x: x[at.to(x.device)], tree)


def clone(tree: T, source: Sequence[int] | Tensor, into: Sequence[int] | Tensor) -> T:
    """Replace the members `into` by copies of the members `source`.

    Population-based training calls this exploitation (Jaderberg et al., "Population Based
    Training of Neural Networks", arXiv:1711.09846).

    Args:
        tree: A Population or any tree with the members along every first axis.
        source: Indices of the members to copy.
        into: As many indices of the members to replace.

    Raises:
        IndexError: An index is out of range.
        ValueError: The lists differ in length, or `into` has an index twice.

    >>> clone({"w": torch.tensor([1.0, 2.0, 3.0])}, [2], [0])["w"]
    tensor([3., 2., 3.])
    """
    origin, target = _index("source", source, tree), _index("into", into, tree, once=True)
    if len(origin) != len(target):
        raise ValueError(f"source has {len(origin)} members, into {len(target)}")
    places = torch.arange(place({"tree": tree}, (0,)).n, device=target.device)
    return select(tree, places.index_copy(0, target, origin))


def put(tree: T, some: T, index: Sequence[int] | Tensor) -> T:
    """Return a tree with its members at `index`, each named once, from another tree."""
    at = _index("index", index, tree, once=True)
    return pytree.tree_map(lambda x, y: x.index_copy(0, at.to(x.device), y), tree, some)


@tell_removed
def perturb(
    members: Population,
    *,
    factors: Mapping[str, Sequence[float]],
    at: Sequence[int] | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Population:
    """Multiply hyperparameters by random factors.

    Population-based training calls this exploration (arXiv:1711.09846). If a name contains
    "beta" or "momentum", the factor multiplies the distance from 1, so that they stay below
    1. The number of steps over which they average is multiplied by 1 / f. Others have no
    bounds here.

    Args:
        members: The population.
        factors: For each hyperparameter, factors to draw from with equal probability.
        at: Indices of the members to perturb; None for all.
        generator: Source of randomness, on the population's device.

    Raises:
        ValueError: The population lacks a hyperparameter, factors are missing or not
            positive and finite, or `at` has an index twice.
        IndexError: An index is out of range.

    >>> from optimi_func import sgd
    >>> from optimi_func.population import init
    >>> members = init(sgd, torch.zeros(3), {"lr": 0.1}, n=2)
    >>> perturb(members, factors={"lr": [2.0]}, at=[1]).hyper["lr"]
    tensor([0.1000, 0.2000], dtype=torch.float64)
    """
    check_members(members)
    at = _index("at", range(len(members)) if at is None else at, members, once=True)
    device = at.device
    for name, some in factors.items():
        if name not in members.hyper:
            raise ValueError(f"no hyperparameter {name!r}: allowed are {[*members.hyper]}")
        if not isinstance(some, Sequence) or not some or not all(map(_is_factor, some)):
            raise ValueError(
                f"Invalid factors: factors[{name!r}]={some!r}: allowed are lists of "
                "positive numbers, at least one"
            )

    def scale(name: str, x: Tensor) -> Tensor:
        # A factor would be rounded in integers.
        x = x if x.is_floating_point() else x.to(scalar_dtype(x.device))
        choices, old = factors[name], x[at]
        picks = torch.randint(len(choices), (len(at),), generator=generator, device=device)
        f = torch.tensor(choices, dtype=x.dtype, device=device)[picks]
        new = old * f
        if "beta" in name or "momentum" in name:  # a negative one stands for another
            new = torch.where(old < 0.0, new, (1.0 - (1.0 - old) * f).clamp_min(0.0))
        return x.index_copy(0, at, new)

    moved = {k: pytree.tree_map(partial(scale, k), members.hyper[k]) for k in factors}
    return replace(members, hyper={**members.hyper, **moved})


def _is_factor(f: object) -> bool:
    return isinstance(f, numbers.Real) and 0.0 < float(f) < math.inf


def _index(
    name: str, index: Sequence[int] | Tensor, tree: object, once: bool = False
) -> Tensor:
    """Convert indices or bools of a tree's members to a checked 1-D tensor of indices."""
    n, device = place({"tree": tree}, (0,)).n, first_tensor(tree).device
    if isinstance(index, str) or not isinstance(index, Iterable):
        raise TypeError(f"{name}={index!r}: allowed are lists of indices of members")
    at = torch.as_tensor(index if isinstance(index, Tensor) else list(index), device=device)
    if at.dtype == torch.bool:
        if at.shape != (n,):
            raise IndexError(
                f"{name} has {tuple(at.shape)} bools, the population {n} members"
            )
        return at.nonzero()[:, 0]
    if at.numel() == 0:
        at = at.long()
    if at.dim() != 1 or at.is_floating_point() or at.is_complex():
        raise IndexError(f"{name}={index!r}: allowed are lists of indices of members")
    if torch.compiler.is_compiling():
        return at  # its values are unknown while a graph is traced
    wrong = [i for i in at.tolist() if not 0 <= i < n]
    if wrong:
        raise IndexError(f"{name} has {wrong[0]}: allowed are members 0 to {n - 1}")
    if once and len(at.unique()) != len(at):
        raise ValueError(f"{name}={at.tolist()} names a member twice")
    return at.long()
