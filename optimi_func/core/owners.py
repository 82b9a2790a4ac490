"""Owners: tensors that are mapped as a whole, each by one of the processes that hold it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, distributed

from optimi_func.core.distributed import is_distributed
from optimi_func.core.torch_private import assert_later


class Holders(NamedTuple):
    """The processes that hold shards or copies of a tensor."""

    name: str
    shape: tuple[int, ...]  # global
    group: Any
    dim: int | None  # along which the shards are cut, None for copies
    device: torch.device

    @property
    def parts(self) -> int:
        """Return the number of shards, 1 for copies."""
        return 1 if self.dim is None else self.group.size()

    @property
    def cost(self) -> int:
        """Return the multiplications of powers of a matrix's smaller Gram matrix."""
        rows, *rest = self.shape
        stack, rows = (rows, rest.pop(0)) if len(rest) == 2 else (1, rows)
        short, long = sorted((rows, math.prod(rest)))
        return stack * short * short * (2 * long + short)

    def lengths(self) -> list[int]:
        """Return the number of elements of each shard, cut as by torch.chunk."""
        size, row = self.shape[self.dim or 0], math.prod(self.shape)
        step, row = -(-size // self.parts), row // max(1, size)
        return [row * max(0, min(step, size - i * step)) for i in range(self.parts)]


def holders_of(p: Any, name: object, copies: Any = None) -> Holders | None:
    """Return the processes among which p's map is divided, or None if it is not.

    `copies` is the process group that holds copies of plain tensors. Of a mesh that shards
    and copies, the shards' processes divide it. Not divided is a DTensor that several
    dimensions cut (tensor parallelism and fully_shard), or that is offloaded.
    """
    group, dim = copies, None
    if is_distributed(p):
        mesh = p.device_mesh
        several = [(i, x) for i, x in enumerate(p.placements) if mesh.size(i) > 1]
        cut = [(i, x) for i, x in several if not x.is_replicate()]
        (at, place), *more = cut or several or [(0, None)]
        known = type(place).__name__ in ("Shard", "Replicate") and not (cut and more)
        inside = mesh.get_coordinate() is not None and p.device.type == mesh.device_type
        group = mesh.get_group(at) if known and inside else None
        dim = getattr(place, "dim", None)
    return (
        None if group is None else Holders(str(name), tuple(p.shape), group, dim, p.device)
    )


def agree(holders: list[Holders]) -> None:
    """Raise if other processes of these groups are about to step other parameters.

    One small message for each group. Without a name a holder has nothing to step.
    """
    groups: dict[Any, list[Holders]] = {}
    for x in holders:
        groups.setdefault(x.group, []).append(x)
    for group, some in groups.items():
        names = [x[:2] for x in some if x.name]
        mark = torch.full((1,), crc32(repr(names).encode()), device=some[0].device)
        text = (
            f"a process does not step the {len(names)} parameters that this one does, "
            f"{[name for name, _ in names[:3]]}...: each needs a gradient in all processes "
            "that hold it, or in none"
        )
        found = [torch.empty_like(mark) for _ in range(group.size())]
        try:
            distributed.all_gather(found, mark, group=group)
        except RuntimeError as error:
            raise RuntimeError(f"{text} ({error})") from error
        assert_later((torch.cat(found) == mark).all(), text)


class Owned(NamedTuple):
    """A tensor to map."""

    place: int
    x: Tensor  # the local shard or copy
    holders: Holders


def map_owned(fn: Callable[[list[Tensor], list[int]], None], items: list[Owned]) -> None:
    """Map tensors in place by fn(whole tensors, their places), each in one process.

    One message brings shards to their owners, and one brings the results back. For copies
    one message gathers the results. All items have one group, dim and dtype, and one order
    in all processes.
    """
    _, like, (*_, group, dim, _) = items[0]
    owned, rank = _divided(items, group.size()), distributed.get_rank(group)
    own, places = owned[rank], [item.place for item in owned[rank]]
    sizes = [sum([item.x.numel() for item in some]) for some in owned]

    def exchange(given: list[list[Tensor]], sizes: list[int]) -> Sequence[Tensor]:
        flat = torch.cat([like.new_empty(0), *[x for some in given for x in some]])
        found = like.new_empty(sum(sizes))
        counts = [sum(map(Tensor.numel, some)) for some in given]
        distributed.all_to_all_single(found, flat, sizes, counts, group=group)
        return found.split(sizes)

    found: Sequence[Tensor]
    if dim is None:
        fn([item.x for item in own], places)
        rest = like.new_zeros(max(sizes) - sizes[rank])
        flat = torch.cat([*[item.x.flatten() for item in own], rest])
        found = [torch.empty_like(flat) for _ in owned]
        distributed.all_gather(found, flat, group=group)
    else:
        # With the dimension that is cut in front, shards follow each other.
        lengths = [item.holders.lengths() for item in own]
        given = [[item.x.movedim(dim, 0).flatten() for item in some] for some in owned]
        found = exchange(given, [sum([x[i] for x in lengths]) for i in range(len(owned))])
        flats = [flat.split([x[i] for x in lengths]) for i, flat in enumerate(found)]
        wholes: list[Tensor] = []
        for item, *pieces in zip(own, *flats):
            x = like.new_empty(item.holders.shape)
            x.copy_(torch.cat(pieces).view_as(x.movedim(dim, 0)).movedim(0, dim))
            wholes.append(x)
        del given, found, flats
        fn(wholes, places)
        cuts = [x.movedim(dim, 0).flatten().split(some) for x, some in zip(wholes, lengths)]
        found = exchange([[x[i] for x in cuts] for i in range(len(owned))], sizes)
    for some, flat in zip(owned, found):
        for item in some:
            x = item.x.movedim(dim or 0, 0)
            part, flat = flat.tensor_split([x.numel()])
            x.copy_(part.view(x.shape))


def _divided(items: list[Owned], count: int) -> list[list[Owned]]:
    """Return each owner's items: the most costly first, to the owner with the least."""
    loads, owned = [0] * count, [list[Owned]() for _ in range(count)]
    for item in sorted(items, key=lambda item: -item.holders.cost):
        owner = loads.index(min(loads))
        loads[owner] += item.holders.cost
        owned[owner].append(item)
    return owned
