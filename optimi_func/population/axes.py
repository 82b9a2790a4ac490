"""Which axis of every argument has the members, and one call over all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from optimi_func._rule import PyTree

Randomness: TypeAlias = Literal["error", "same", "different"]


class Placed(NamedTuple):
    """Arguments of a vmapped function, flat, and where each leaf has the members."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    axes: list[int | None]
    n: int

    def run(self, fn: Callable[..., Any], randomness: Randomness) -> Any:
        """Call fn with each member's arguments; its results have the members first."""
        moving = [i for i, axis in enumerate(self.axes) if axis is not None]

        # What has no members may be a number, None or a schedule, which vmap refuses.
        def member(*tensors: Tensor) -> Any:
            leaves = list(self.leaves)
            for i, x in zip(moving, tensors):
                leaves[i] = x
            return fn(*pytree.tree_unflatten(leaves, self.spec))

        in_dims = tuple(self.axes[i] for i in moving)
        tensors = [self.leaves[i] for i in moving]
        return vmap(member, in_dims=in_dims, randomness=randomness)(*tensors)


def place(args: Mapping[str, PyTree], in_axes: Sequence[Any]) -> Placed:
    """Find the members of every leaf, refusing arguments with different numbers of them."""
    places: list[int | None] = []
    n, first = 0, ""
    for (name, tree), prefix in zip(args.items(), in_axes):
        for i, (x, axis) in enumerate(zip(*_with_axes(name, tree, prefix))):
            # One number is one for all.
            shared = name == "hyper" and isinstance(x, Tensor) and x.dim() == 0
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


def _with_axes(name: str, tree: PyTree, prefix: Any) -> tuple[list[Any], list[Any]]:
    """The leaves of a tree and the axis that a prefix of it has for each."""
    axes, spec = pytree.tree_flatten(prefix)
    try:
        subtrees = spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"in_axes: {prefix!r} is no prefix of {name}: {error}") from error
    for axis in axes:
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise TypeError(f"in_axes has {axis!r} for {name}: allowed are axes and None")
    counts = [len(pytree.tree_leaves(subtree)) for subtree in subtrees]
    return pytree.tree_leaves(tree), [a for a, k in zip(axes, counts) for _ in range(k)]


def path(name: str, tree: PyTree, i: int) -> str:
    """What leaf i of a tree is called."""
    if not torch.compiler.is_compiling():
        try:
            keyed, _ = pytree.tree_flatten_with_path(tree)
            return name + pytree.keystr(keyed[i][0])
        except ValueError:
            pass  # a node registered without names for its children
    return f"{name}<leaf {i}>"
