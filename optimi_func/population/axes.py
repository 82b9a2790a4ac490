"""Axes of members in the arguments of a function, and its vmapped call."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from optimi_func.core.rule import PyTree
from optimi_func.core.tree import paths_in, spread, without_none

Randomness: TypeAlias = Literal["error", "same", "different"]


class Placed(NamedTuple):
    """The flat arguments of a vmapped function, with the members' axis of each leaf."""

    leaves: list[PyTree]
    spec: pytree.TreeSpec
    axes: list[int | None]
    n: int  # members

    def run(self, fn: Callable[..., PyTree], randomness: Randomness) -> PyTree:
        """Call fn for each member; results have the members along their first axis."""
        moving = [i for i, axis in enumerate(self.axes) if axis is not None]

        # Leaves without members bypass vmap, which refuses floats, None and schedules.
        def member(*tensors: Tensor) -> PyTree:
            leaves = list(self.leaves)
            for i, x in zip(moving, tensors):
                leaves[i] = x
            return without_none(fn(*pytree.tree_unflatten(leaves, self.spec)))

        in_dims = tuple(self.axes[i] for i in moving)
        tensors = [self.leaves[i] for i in moving]
        return vmap(member, in_dims=in_dims, randomness=randomness)(*tensors)


def place(
    args: Mapping[str, PyTree], in_axes: Sequence[PyTree], scalars: Collection[str] = ()
) -> Placed:
    """Find the members' axis of every leaf, or raise if leaves have unequal members.

    A 0-d tensor of the arguments in `scalars` is the same for all members.
    """
    places: list[int | None] = []
    n, first = 0, ""
    for (name, tree), prefix in zip(args.items(), in_axes):
        for i, (x, axis) in enumerate(zip(*_with_axes(name, tree, prefix))):
            shared = name in scalars and isinstance(x, Tensor) and x.dim() == 0
            if axis is None or shared or not isinstance(x, Tensor):
                places.append(None)
                continue
            if not -x.dim() <= axis < x.dim():
                raise ValueError(
                    f"{path(name, tree, i)} has shape {tuple(x.shape)}: no axis {axis} "
                    "for its members"
                )
            if not first:
                n, first = x.shape[axis], path(name, tree, i)
            if n == 0:
                raise ValueError(
                    f"{first} has no members along axis {axis} of {tuple(x.shape)}: "
                    "allowed is one or more"
                )
            if x.shape[axis] != n:
                raise ValueError(
                    f"{path(name, tree, i)} has {x.shape[axis]} members along axis {axis} "
                    f"of {tuple(x.shape)}, {first} has {n}"
                )
            places.append(axis)
    if not first:
        raise ValueError(f"no leaf of {', '.join(args)} has members: in_axes={in_axes!r}")
    return Placed(*pytree.tree_flatten(tuple(args.values())), places, n)


def _with_axes(
    name: str, tree: PyTree, prefix: PyTree
) -> tuple[list[PyTree], list[int | None]]:
    """Return the leaves of a tree, and for each the axis in a prefix of the tree."""
    leaves, spec = pytree.tree_flatten(tree)
    places, count = pytree.tree_unflatten(range(len(leaves)), spec), len(leaves)
    try:
        axes, at = spread(prefix, places, count)
    except ValueError as error:
        raise ValueError(f"in_axes: {prefix!r} is no prefix of {name}: {error}") from error
    for axis in axes:
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise TypeError(f"in_axes has {axis!r} for {name}: allowed are axes and None")
    return leaves, [axes[i] for i in at]


def path(name: str, tree: PyTree, i: int) -> str:
    """Return the name of leaf i of a tree."""
    return name + paths_in(tree)[i]
