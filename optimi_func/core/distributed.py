"""DTensors: local shards, placements, and collectives over shards.

Executors get local shards, which are plain tensors. Only means, norms and decisions about a
global tensor need collectives, and all processes issue these in the same order.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from re import search, sub
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from optimi_func.core.lists import grouped
from optimi_func.core.pairs import as_real
from optimi_func.core.rule import Leaf
from optimi_func.core.torch_private import norms_of

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup
    from torch.distributed.tensor import DTensor, Placement


class ShardSpec(NamedTuple):
    """The processes that share a global tensor, as dimensions of a mesh."""

    mesh: "DeviceMesh"
    dims: tuple[int, ...]
    placements: "tuple[Placement, ...]"
    shape: tuple[int, ...]  # global, of real numbers
    stride: tuple[int, ...]  # global

    @property
    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def group(self) -> "tuple[DeviceMesh, tuple[int, ...]]":
        """Return the key of tensors that one collective can reduce together."""
        return self.mesh, self.dims


def is_distributed(x: object) -> "TypeGuard[DTensor]":
    """Return True if x is a DTensor."""
    if type(x) in _PLAIN:
        return False
    # A program with DTensors has imported them. For others the import takes a second.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(x, kind)


def any_distributed(tensors: list[Tensor]) -> bool:
    """Return True if any tensor is a DTensor."""
    kinds = set(map(type, tensors)).difference(_PLAIN)
    return bool(kinds) and any(map(is_distributed, tensors))


_PLAIN = (Tensor, torch.nn.Parameter)


def to_local(tensors: list[Tensor]) -> list[Tensor]:
    """Return the local shard of each DTensor, and complex tensors as real pairs, uncopied.

    Other tensors, and None, are returned as they are.
    """
    if not (any_distributed(tensors) or any_complex(tensors)):
        return tensors
    with torch.no_grad():
        return [_part(x) if is_distributed(x) else _pairs(x) for x in tensors]


def any_complex(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if any tensor is complex."""
    return any([x is not None and x.is_complex() for x in tensors])


def _pairs(x: Tensor) -> Tensor:
    return as_real(x.detach()) if isinstance(x, Tensor) and x.is_complex() else x


def _part(x: "DTensor") -> Tensor:
    part = x.to_local()
    # The shard may be the result of an asynchronous collective.
    wait: Callable[[], Tensor] | None = getattr(part, "wait", None)
    return _pairs(part if wait is None else wait())


def whole(x: Tensor) -> Tensor:
    """Gather a DTensor on every process. Return other tensors as they are."""
    return x.full_tensor() if is_distributed(x) else x


def from_local(part: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor with this local shard, and the placements and shape of `like`."""
    if not is_distributed(like):
        return part
    return _of_shard(part, like.device_mesh, like.placements, like.shape, like.stride())


def on_whole(
    fn: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    d: Tensor,
    read: tuple[Tensor, ...],
    fields: tuple[Tensor, ...],
    *more: object,
    by_matrix: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return fn(d, read, fields, *more), which each process computes on gathered tensors.

    If fn maps by matrix, and none is cut, each process maps its own and gathers nothing.
    The results have the placements of d and the fields.
    """
    if not is_distributed(d):
        return fn(d, read, fields, *more)
    every = [y for y in (d, *read, *fields) if is_distributed(y) and same_placements(d, y)]
    count = 1 + len(read)
    if by_matrix and has_whole_matrices(d) and len(every) == count + len(fields):
        own = list(map(_part, every))
        result, new = fn(own[0], tuple(own[1:count]), tuple(own[count:]), *more)
        first, *rest = map(from_local, (result, *new), (d, *fields))
        return first, tuple(rest)
    gathered = tuple(map(whole, read)), tuple(map(whole, fields))
    result, new = fn(whole(d), *gathered, *more)
    first, *rest = map(_divided_like, (d, *fields), (result, *new))
    return first, tuple(rest)


def has_whole_matrices(x: "DTensor") -> bool:
    """Return True if x is a stack of matrices, and its shards are matrices of it."""
    return x.dim() == 3 and all(
        [p.is_replicate() or getattr(p, "dim", 1) == 0 for p in x.placements]
    )


def _divided_like(like: Tensor, x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not is_distributed(like):
        return x  # a number
    everywhere = DTensor.from_local(x, like.device_mesh, run_check=False)
    return everywhere.redistribute(placements=like.placements)


def shard_of(part: Tensor, spec: ShardSpec) -> "DTensor":
    """Return the DTensor of a local shard, which may be offloaded to another device."""
    shard = part.to(spec.mesh.device_type)
    return _of_shard(shard, spec.mesh, spec.placements, torch.Size(spec.shape), spec.stride)


def _of_shard(
    part: Tensor,
    mesh: "DeviceMesh",
    placements: "Sequence[Placement]",
    shape: torch.Size,
    stride: tuple[int, ...],
) -> "DTensor":
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shape, stride=stride
    )


def leaf_to_local(leaf: Leaf) -> Leaf:
    """Return a leaf with the local shards of its tensors, as real numbers."""
    tensors, spec = pytree.tree_flatten(leaf)
    return pytree.tree_unflatten(to_local(tensors), spec)


def shards_of(x: object) -> ShardSpec | None:
    """Return the processes that hold shards of x, or None if all of x is local."""
    if not is_distributed(x):
        return None
    places = enumerate(x.placements)
    return _spec(x, [i for i, place in places if not place.is_replicate()])


def _spec(x: "DTensor", dims: Iterable[int]) -> ShardSpec | None:
    """Return these dimensions of x's mesh that have several processes, or None."""
    mesh = x.device_mesh
    if mesh.get_coordinate() is None:
        return None  # this process is not in the mesh
    several = tuple(i for i in dims if mesh.size(i) > 1)
    x = as_real(x)
    where = mesh, several, x.placements
    return ShardSpec(*where, tuple(x.shape), x.stride()) if several else None


def same_placements(p: object, x: object, is_whole_field: bool = False) -> bool:
    """Return True if the local shards of p and x are the same elements.

    For one of `Rule.whole_fields`, return True if it is divided as `whole_field` does.
    """
    if not (is_distributed(p) and is_distributed(x)):
        return is_distributed(p) == is_distributed(x)
    places = _of_whole_field(p, x.shape) if is_whole_field else p.placements
    return p.device_mesh == x.device_mesh and x.placements == places


def check_placed(path: object, p: object) -> None:
    """Raise if a parameter has Partial placements, which are sums still to be computed."""
    if is_distributed(p) and any(place.is_partial() for place in p.placements):
        raise ValueError(
            f"params{path} has placements {p.placements}: allowed are Shard and Replicate"
        )


def redistribute_like(path: object, p: Tensor, g: Tensor) -> Tensor:
    """Return the gradient g with the placements of p. Raise if the meshes differ."""
    if same_placements(p, g):
        return g
    if not (is_distributed(p) and is_distributed(g)):
        raise TypeError(
            f"grads{path} is a {type(g).__name__}, its parameter a {type(p).__name__}: "
            "allowed are two DTensors, or none"
        )
    if p.device_mesh != g.device_mesh:
        raise ValueError(
            f"grads{path} is on {g.device_mesh}, its parameter on {p.device_mesh}"
        )
    with torch.no_grad():
        return g.redistribute(placements=p.placements)


def cuts_evenly(p: Tensor, dims: int, group: int) -> bool:
    """Return True if every shard of p consists of whole groups of adjacent elements.

    Only the first `dims` dimensions may be sharded, and the last of these only in multiples
    of `group` elements, unless it is the first of several.
    """
    if not is_distributed(p):
        return True
    parts = group
    for i, place in enumerate(p.placements):
        if not place.is_shard():
            continue
        dim: int = getattr(place, "dim", 0)
        if dim >= dims:
            return False
        if dim == dims - 1 and (dim > 0 or p.dim() == 1):
            parts *= p.device_mesh.size(i)
    return parts == group or p.shape[dims - 1] % parts == 0


def zeros_divided_like(p: Tensor, shape: list[int]) -> Tensor:
    """Return float32 zeros of another shape, with the placements of p."""
    if not is_distributed(p):
        return p.new_zeros(shape, dtype=torch.float32)
    return _zeros(p, shape, torch.float32, p.placements)


def whole_field(p: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros for one of `Rule.whole_fields`, of any shape and at least float32.

    Where shards cut p, they cut the field along its first dimension. A number is whole in
    every process.
    """
    dtype = torch.promote_types(p.dtype, torch.float32)
    if not is_distributed(p):
        return p.new_zeros(shape, dtype=dtype)
    return _zeros(p, shape, dtype, _of_whole_field(p, shape)).to(p.device)


def number_field(p: Tensor, kept: object) -> Tensor:
    """Return a 0 for one of `Rule.whole_fields` that is a number of the tensor."""
    return whole_field(p, ())


def _of_whole_field(p: "DTensor", shape: Sequence[int]) -> "tuple[Placement, ...]":
    from torch.distributed.tensor import Replicate, Shard

    cut = Shard(0) if len(shape) else Replicate()
    return tuple([x if x.is_replicate() else cut for x in p.placements])


def _zeros(
    p: "DTensor",
    shape: Sequence[int],
    dtype: torch.dtype,
    placements: "Sequence[Placement]",
) -> "DTensor":
    from torch.distributed.tensor import zeros

    return zeros(shape, dtype=dtype, device_mesh=p.device_mesh, placements=placements)


def distribute_like(p: object, x: Tensor) -> Tensor:
    """Shard x, which is equal on all processes, like p. A DTensor stays as it is."""
    if not is_distributed(p) or is_distributed(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    x = x.to(p.device)
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)


def comparable(x: object, of_device: Callable[[Tensor], object]) -> object:
    """Return hyperparameters as values; `of_device` reads a tensor on a device or not."""
    if isinstance(x, tuple | list):
        return tuple([comparable(y, of_device) for y in x])
    if isinstance(x, Tensor):
        return x.tolist() if x.device.type == "cpu" else of_device(x)
    plain = isinstance(x, str | Real | torch.dtype | None)
    return x if plain else sub(" at 0x[0-9a-f]+", "", repr(x))  # another in each process


def check_same(mine: Mapping[str, object], group: "ProcessGroup | None") -> None:
    """Raise, in all processes of a group, if one has another value of a key."""
    every: list[dict[str, object]] = [{}] * distributed.get_world_size(group)
    distributed.all_gather_object(every, mine, group=group)
    for rank, theirs in enumerate(every):
        for key in {**every[0], **theirs}:
            if (one := every[0].get(key)) != (other := theirs.get(key)):
                raise ValueError(
                    f"{key}: process {rank} of the group has {other!s:.200}, process 0 has "
                    f"{one!s:.200}: allowed are equal models, options and states, so load "
                    "a checkpoint and set hyperparameters in every process"
                )


def lost(error: RuntimeError) -> str:
    """Return words for the cause of a message's failure if a process has ended."""
    ended = search("Connection (reset|closed)|Broken pipe|process exited", str(error))
    return "a process of the group ended: " if ended else ""


def all_reduce_sum(
    numbers: list[Tensor], shards: list[ShardSpec | None], largest: bool = False
) -> list[Tensor]:
    """All-reduce 0-d tensors over their processes, those of one group by one collective.

    The sums, or if `largest` the maxima, are computed in float64 and returned in the
    tensor's dtype and on its device.
    """
    groups = {i: shard.group for i, shard in enumerate(shards) if shard is not None}
    if not groups:
        return list(numbers)
    op = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    sums = list(numbers)
    for (mesh, dims), indices in grouped(groups, groups.__getitem__).items():
        # The mesh's device, which is another one for an offloaded tensor.
        device = numbers[indices[0]].to(mesh.device_type).device
        flat = torch.stack([numbers[i].to(device, torch.float64) for i in indices])
        for dim in dims:
            distributed.all_reduce(flat, op, group=mesh.get_group(dim))
        for i, total in zip(indices, flat.unbind()):
            sums[i] = total.to(numbers[i].device, numbers[i].dtype)
    return sums


def all_reduce_all(flags: list[Tensor], tensors: Sequence[object]) -> list[Tensor]:
    """All-reduce flags: True if it is on every process with a shard or copy of a tensor."""
    shards = [
        _spec(x, range(x.device_mesh.ndim)) if is_distributed(x) else None for x in tensors
    ]
    if not any(shards):
        return flags
    denials = all_reduce_sum([(~flag).double() for flag in flags], shards)
    return [denied == 0 for denied in denials]


def all_finite(
    grads: list[Tensor], params: list[Tensor], copies: "ProcessGroup | None" = None
) -> Tensor:
    """Return a 0-d bool, True if gradients are finite in all processes with params."""
    parts = [g for g in to_local(grads) if g.numel() and g.layout == torch.strided]
    largest = norms_of(parts, math.inf)
    device = largest[0].device if largest else to_local(params)[0].device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    finite = torch.stack([*[x.to(zero) for x in largest], zero]).isfinite().all()
    return everywhere(finite, params, () if copies is None else [copies])


def everywhere(
    flag: Tensor, params: Sequence[object], groups: "Sequence[ProcessGroup]"
) -> Tensor:
    """All-reduce a flag: True if it is in all processes that hold params, and of groups.

    It is one message for each dimension of a mesh, and of several meshes first the largest.
    """
    specs = [_spec(p, range(p.device_mesh.ndim)) for p in params if is_distributed(p)]
    kinds = {spec.group: spec for spec in specs if spec is not None}
    denied = (~flag).double()
    for spec in sorted(kinds.values(), key=lambda spec: -spec.mesh.size()):
        (denied,) = all_reduce_sum([denied], [spec])
    for group in groups:
        distributed.all_reduce(denied, group=group)
    return denied == 0
