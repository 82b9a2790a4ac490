"""DTensors: their local parts, their placements, and sums over their shards.

Executors are handed local parts, which are plain tensors; only what concerns a whole
tensor, a mean, a norm or a decision, is a message between processes. Messages are sent in
an order that depends on nothing that one process alone knows.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from optimi_func._rule import Leaf


class ShardSpec(NamedTuple):
    """The processes that hold a tensor together: some dimensions of a mesh."""

    mesh: Any  # a DeviceMesh
    dims: tuple[int, ...]
    placements: tuple[Any, ...]
    # Of the whole tensor.
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def group(self) -> tuple[Any, tuple[int, ...]]:
        """What tensors share that are summed by one message."""
        return self.mesh, self.dims


def _dtensor() -> Any:
    # Whoever has one has imported it; for the others that would take a second.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_distributed(x: Tensor) -> bool:
    """Whether x is a DTensor."""
    kind = _dtensor()
    return kind is not None and isinstance(x, kind)


def any_distributed(tensors: list[Tensor]) -> bool:
    """Whether any of these is a DTensor."""
    kind = _dtensor()
    return kind is not None and any(issubclass(k, kind) for k in set(map(type, tensors)))


def to_local(tensors: list[Tensor]) -> list[Tensor]:
    """The local part of each DTensor, sharing its memory; other tensors as they are."""
    if not any_distributed(tensors):
        return tensors
    kind = _dtensor()
    with torch.no_grad():
        return [_part(x) if isinstance(x, kind) else x for x in tensors]


def _part(x: Any) -> Tensor:
    part = x.to_local()
    # An asynchronous collective's result, which may not have arrived.
    return part.wait() if hasattr(part, "wait") else part


def whole(x: Any) -> Tensor:
    """All of a DTensor; a message between its processes."""
    return x.full_tensor() if is_distributed(x) else x


def from_local(part: Tensor, like: Any) -> Tensor:
    """A tensor of which each process has a part, divided as another of its shape is."""
    if not is_distributed(like):
        return part
    mesh, places = like.device_mesh, like.placements
    shape = {"shape": like.shape, "stride": like.stride()}
    return _dtensor().from_local(part, mesh, places, run_check=False, **shape)


def on_whole(fn: Callable[..., Tensor], x: Any, *more: Any) -> Tensor:
    """What fn makes of a whole tensor, divided as x is: every process gathers and calls it.

    Args:
        fn: Of a plain tensor, with a result of its shape; the same in all processes.
        x: A plain tensor, or a DTensor.
        *more: Further arguments of fn.
    """
    if not is_distributed(x):
        return fn(x, *more)
    result = fn(x.full_tensor(), *more)
    everywhere = _dtensor().from_local(result, x.device_mesh, run_check=False)
    return everywhere.redistribute(placements=x.placements)


def part_on_whole(
    fn: Callable[..., Tensor], part: Tensor, shard: ShardSpec, *more: Any
) -> Tensor:
    """Likewise of the part that lies here: a message that every process has to send."""
    mesh, places = shard.mesh, shard.placements
    shape = {"shape": torch.Size(shard.shape), "stride": shard.stride}
    # What is offloaded has to return to the mesh's device.
    own = part.to(mesh.device_type)
    x = _dtensor().from_local(own, mesh, places, run_check=False, **shape)
    return _part(on_whole(fn, x, *more)).to(part.device)


def leaf_to_local(leaf: Leaf) -> Leaf:
    """A leaf with the local parts of its tensors."""
    tensors, spec = pytree.tree_flatten(leaf)
    return pytree.tree_unflatten(to_local(tensors), spec)


def shards_of(x: Any) -> ShardSpec | None:
    """Who holds other elements of x; None where all of it lies here."""
    if not is_distributed(x):
        return None
    places = enumerate(x.placements)
    return _spec(x, [i for i, place in places if not place.is_replicate()])


def holders(x: Any) -> ShardSpec | None:
    """Who holds any of x, its copies too; None where only this process does."""
    return _spec(x, list(range(x.device_mesh.ndim))) if is_distributed(x) else None


def _spec(x: Any, dims: list[int]) -> ShardSpec | None:
    mesh = x.device_mesh
    if mesh.get_coordinate() is None:
        return None  # this process is not part of it
    several = tuple(i for i in dims if mesh.size(i) > 1)
    where = mesh, several, x.placements
    return ShardSpec(*where, tuple(x.shape), x.stride()) if several else None


def same_placements(p: Any, x: Any) -> bool:
    """Whether the local parts of p and x are of the same elements."""
    if not is_distributed(p) and not is_distributed(x):
        return True
    return (
        is_distributed(p)
        and is_distributed(x)
        and p.device_mesh == x.device_mesh
        and p.placements == x.placements
    )


def check_placed(path: object, p: Any) -> None:
    """Refuse a parameter with Partial placements: its elements are sums not yet taken."""
    if is_distributed(p) and any(place.is_partial() for place in p.placements):
        raise ValueError(
            f"params{path} has placements {p.placements}: allowed are Shard and Replicate"
        )


def redistribute_like(path: object, p: Any, g: Any) -> Tensor:
    """The gradient g as p lies: parts of a sum added up, a copy cut, shards moved.

    Raises:
        TypeError: One of the two alone is a DTensor.
        ValueError: They lie on different meshes.
    """
    if same_placements(p, g):
        return g
    if not (is_distributed(p) and is_distributed(g)):
        raise TypeError(
            f"grads{path} is a {type(g).__name__}, its parameter a {type(p).__name__}: "
            "allowed are two DTensors, or none"
        )
    if p.device_mesh != g.device_mesh:
        raise ValueError(
            f"grads{path} lies on {g.device_mesh}, its parameter on {p.device_mesh}"
        )
    with torch.no_grad():
        return g.redistribute(placements=p.placements)


def cuts_evenly(p: Any, dims: int, group: int) -> bool:
    """Whether every part of a tensor is whole groups of what lies side by side.

    Args:
        p: The tensor.
        dims: Along so many of its dimensions, the first ones, it may be cut; along the
            last of them in multiples of `group`, unless it is the first of several.
        group: Elements.
    """
    if not is_distributed(p):
        return True
    parts = group
    for i, place in enumerate(p.placements):
        if not place.is_shard():
            continue
        if place.dim >= dims:
            return False
        if place.dim == dims - 1 and (place.dim > 0 or p.dim() == 1):
            parts *= p.device_mesh.size(i)
    return parts == group or p.shape[dims - 1] % parts == 0


def zeros_divided_like(p: Any, shape: list[int]) -> Tensor:
    """Zeros of another shape in float32, divided among processes as p is."""
    if not is_distributed(p):
        return p.new_zeros(shape, dtype=torch.float32)
    tensor: Any = sys.modules["torch.distributed.tensor"]
    places = {"device_mesh": p.device_mesh, "placements": p.placements}
    return tensor.zeros(shape, dtype=torch.float32, **places)


def distribute_like(p: Any, x: Tensor) -> Tensor:
    """A whole tensor, equal on all processes, divided as p is; a DTensor as it is."""
    if not is_distributed(p) or is_distributed(x):
        return x
    tensor: Any = sys.modules["torch.distributed.tensor"]
    x = x.to(p.device)
    return tensor.distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)


def all_reduce_sum(numbers: list[Tensor], shards: list[ShardSpec | None]) -> list[Tensor]:
    """Each 0-d number summed over its processes: one message for all of the same ones.

    Summed in float64 and given back in their dtype and on their device.
    """
    places: dict[Any, list[int]] = {}
    for i, spec in enumerate(shards):
        if spec is not None:
            places.setdefault(spec.group, []).append(i)
    sums = list(numbers)
    for (mesh, dims), some in places.items():
        # The mesh's, to which what is offloaded has to return.
        device = numbers[some[0]].to(mesh.device_type).device
        flat = torch.stack([numbers[i].to(device, torch.float64) for i in some])
        for dim in dims:
            distributed.all_reduce(flat, group=mesh.get_group(dim))
        for i, total in zip(some, flat.unbind()):
            sums[i] = total.to(numbers[i].device, numbers[i].dtype)
    return sums


def all_reduce_all(flags: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Of 0-d bools about tensors, whether each is true wherever any of its tensor lies."""
    shards = [holders(x) for x in tensors]
    if not any(shards):
        return flags
    denials = all_reduce_sum([(~flag).double() for flag in flags], shards)
    return [denied == 0 for denied in denials]
