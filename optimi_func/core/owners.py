"""Owners: tensors that are mapped as a whole, each by one of the processes that hold it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, distributed

from optimi_func.core.distributed import (
    check_same,
    has_whole_matrices,
    is_distributed,
    lost,
)
from optimi_func.core.lists import grouped
from optimi_func.core.rule import Whole
from optimi_func.core.torch_private import assert_later

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Holders(NamedTuple):
    """The processes that hold shards or copies of a tensor."""

    name: str
    shape: tuple[int, ...]  # global
    device: torch.device
    group: "ProcessGroup"
    dim: int | None  # along which the shards are cut, None for copies
    parts: int  # the number of shards, 1 for copies
    matrices: int = 1  # of a stack, if several processes may map some each

    @property
    def cost(self) -> int:
        """Return the multiplications of powers of the smaller Gram matrix, for a map."""
        rows, *rest = self.shape or (1,)
        stack, rows = (rows, rest.pop(0)) if len(rest) == 2 else (1, rows)
        short, long = sorted((rows, math.prod(rest)))
        return stack * short * short * (2 * long + short)

    def lengths(self) -> list[int]:
        """Return the number of elements of each shard, cut as by torch.chunk."""
        if not self.shape:
            return [1] * self.parts  # copies of a number
        size, row = self.shape[self.dim or 0], math.prod(self.shape)
        step, row = -(-size // self.parts), row // max(1, size)
        return [row * max(0, min(step, size - i * step)) for i in range(self.parts)]


class Owned(NamedTuple):
    """A tensor to map: its local shards or copies, or in its owner's process the whole."""

    place: int  # a number of the caller's
    tensors: list[Tensor]  # the direction, and the fields of the map
    holders: list[Holders]  # of each
    read: tuple[Tensor, ...] | None = None  # what the map reads besides, of shards
    stack: slice | None = None  # the matrices of a stack, if these are some of it

    @property
    def mapped(self) -> list[tuple[Tensor, Holders]]:
        """Return the tensors with their holders."""
        return list(zip(self.tensors, self.holders))

    @property
    def given(self) -> list[tuple[Tensor, Holders]]:
        """Return these and what is only read."""
        return [*self.mapped, *[(x, self.holders[0]) for x in self.read or ()]]

    def divided(self) -> "list[Owned]":
        """Return as many parts of a stack of matrices as there are processes, or this."""
        first, end, found = self.holders[0], 0, list[Owned]()
        count = min(first.matrices, first.group.size())
        for i in range(count if count > 1 else 0):
            start, end = end, first.matrices * (i + 1) // count
            stack, n = slice(start, end), end - start
            holders = [h._replace(shape=(n, *h.shape[1:])) for h in self.holders]
            read = None if self.read is None else tuple([x[stack] for x in self.read])
            some = [y[stack] for y in self.tensors]
            found.append(Owned(self.place, some, holders, read, stack))
        return found or [self]


def holders_of(
    p: Tensor, name: object, whole: Whole, copies: "ProcessGroup | None" = None
) -> Holders | None:
    """Return the processes among which p's map is divided, or None if it is not.

    `copies` is the process group that holds copies of plain tensors. Of a mesh that shards
    and copies, the shards' processes divide it; of one that cuts between matrices and
    through them, the latter. Not divided is a DTensor whose shards are matrices that
    `whole` maps, that is offloaded, or that several dimensions cut, as tensor parallelism
    and fully_shard.
    """
    group, dim, shape = copies, None, tuple(p.shape)
    stack = whole.by_matrix and p.dim() == 3
    if is_distributed(p):
        mesh = p.device_mesh
        several = [(i, x) for i, x in enumerate(p.placements) if mesh.size(i) > 1]
        cut = [(i, x) for i, x in several if not x.is_replicate()]
        if stack and cut and has_whole_matrices(p):
            return None
        if stack and not whole.fields:
            shape = (len(p.to_local()), *shape[1:]) if cut else shape
            cut = [x for x in cut if getattr(x[1], "dim", 0)]
        (at, place), *more = cut or several or [(0, None)]
        known = type(place).__name__ in ("Shard", "Replicate") and not (cut and more)
        inside = mesh.get_coordinate() is not None and p.device.type == mesh.device_type
        group = mesh.get_group(at) if known and inside else None
        dim = getattr(place, "dim", None)
    if group is None:
        return None
    parts = 1 if dim is None else group.size()
    # Shards cut fields along the stack, and so elsewhere than the matrices.
    stack = stack and (dim is None or not whole.fields)
    matrices = shape[0] if stack else 1
    return Holders(str(name), shape, p.device, group, dim, parts, matrices)


def agree(holders: list[Holders], shared: Mapping[str, object], said: str = "") -> None:
    """Raise if other processes of a group are about to step others, by a small message.

    Those without a name are not stepped, and only name the group. `shared` are values that
    all processes have, and `said` is an error in the place of that of names.
    """
    for group, members in grouped(holders, attrgetter("group")).items():
        names = [x[:2] for x in members if x.name]
        digest, device = crc32(repr((names, shared)).encode()), members[0].device
        mark = torch.full((1,), digest, dtype=torch.int64, device=device)
        text = said or (
            f"other processes do not step the {len(names)} parameters that this one does, "
            f"{names[:3]}...: each needs a gradient in all that hold it, or in none"
        )
        marks = [torch.empty_like(mark) for _ in range(group.size())]
        try:
            distributed.all_gather(marks, mark, group=group)
        except RuntimeError as error:
            raise RuntimeError(f"{lost(error)}{text} ({error})") from error
        same = (torch.cat(marks) == mark).all()
        if device.type == "cpu" and not same:
            check_same(shared, group)
        assert_later(same, text)


def map_owned(fn: Callable[[list[Owned]], None], items: list[Owned]) -> None:
    """Map tensors in place by fn(those of one owner, whole), each in one process.

    One message brings shards to their owners, and one brings the results back. For copies
    one message gathers the results. The directions have one group, dim and dtype, and one
    order in all processes.
    """
    like, holders = items[0].tensors[0], items[0].holders[0]
    group = holders.group
    owned, rank = _divided(items, group.size()), distributed.get_rank(group)
    own = owned[rank]
    results = [[_front(*x) for item in some for x in item.mapped] for some in owned]
    sizes = _sizes(results)

    def exchange(xs: Iterable[Tensor], out: list[int], into: list[int]) -> list[Tensor]:
        data = like.new_empty(sum(into))
        distributed.all_to_all_single(data, _flat(like, xs), into, out, group=group)
        return list(data.split(into))

    if holders.dim is None:
        fn(own)
        flat = _flat(like, results[rank])
        flat = torch.cat([flat, like.new_zeros(max(sizes) - len(flat))])
        gathered = [torch.empty_like(flat) for _ in owned]
        distributed.all_gather(gathered, flat, group=group)
    else:
        lists = [[_front(*x) for item in some for x in item.given] for some in owned]
        lengths = [x.lengths() for item in own for _, x in item.given]
        parts = exchange(chain.from_iterable(lists), _sizes(lists), _counts(lengths, owned))
        pieces = zip(*map(Tensor.split, parts, map(list, zip(*lengths))))
        wholes: list[Owned] = []
        for item in own:
            every: list[Tensor] = []
            for _, x in item.given:
                every.append(like.new_empty(x.shape))
                front = _front(every[-1], x)
                front.copy_(torch.cat(next(pieces))[: front.numel()].view_as(front))
            count = len(item.tensors)
            wholes.append(item._replace(tensors=every[:count], read=tuple(every[count:])))
        fn(wholes)
        mapped = [x for item in wholes for x in item.mapped]
        lengths = [x.lengths() for _, x in mapped]
        rows = [_front(*x).flatten().expand(sum(n)) for x, n in zip(mapped, lengths)]
        pieces = map(Tensor.split, rows, lengths)
        counts = _counts(lengths, owned)
        gathered = exchange(chain.from_iterable(zip(*pieces)), counts, sizes)
    for some, flat in zip(results, gathered):
        for x in some:
            part, flat = flat.tensor_split([x.numel()])
            x.copy_(part.view(x.shape))


def _front(x: Tensor, holders: Holders) -> Tensor:
    """Return x with the dimension that is cut in front, so that its shards are in a row."""
    return x.movedim(holders.dim, 0) if holders.dim else x


def _flat(like: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([like.new_empty(0), *[x.flatten().to(like.dtype) for x in tensors]])


def _sizes(lists: list[list[Tensor]]) -> list[int]:
    return [sum(map(Tensor.numel, tensors)) for tensors in lists]


def _counts(lengths: list[list[int]], owned: Sequence[object]) -> list[int]:
    return list(map(sum, zip(*lengths))) or [0] * len(owned)


def _divided(items: list[Owned], count: int) -> list[list[Owned]]:
    """Return each owner's items: the costliest first, to the owner with the least."""
    owned, costs = [list[Owned]() for _ in range(count)], [0] * count
    for item in sorted(items, key=lambda item: -item.holders[0].cost):
        owner = costs.index(min(costs))
        owned[owner].append(item)
        costs[owner] += item.holders[0].cost
    return owned
