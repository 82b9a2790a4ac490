"""Norms of gradients and checks for inf and NaN, over all shards of a DTensor."""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.core.distributed import (
    ShardSpec,
    all_reduce_all,
    all_reduce_sum,
    shards_of,
    to_local,
)
from optimi_func.core.lists import grouped
from optimi_func.core.math import total_norm
from optimi_func.core.rule import Scalar
from optimi_func.core.torch_private import norms_of


class Norm(NamedTuple):
    """The norm of a tensor's local shard."""

    value: Tensor  # 0-d, of at least float32
    shard: ShardSpec | None  # the processes that hold the other shards


def local_norms(tensors: list[Tensor]) -> list[Norm]:
    """Return the norms of the local shards."""
    return list(map(Norm, norms_of(to_local(tensors)), map(shards_of, tensors)))


def whole_norms(norms: list[Norm]) -> list[Norm]:
    """Combine the norms of local shards into those of whole tensors by one all-reduce."""
    if all(norm.shard is None for norm in norms):
        return norms
    squares = [norm.value.double().square() for norm in norms]
    sums = all_reduce_sum(squares, [norm.shard for norm in norms])
    return [
        norm if norm.shard is None else Norm(total.sqrt().to(norm.value.dtype), None)
        for norm, total in zip(norms, sums)
    ]


def global_norm(norms: list[Norm]) -> Tensor:
    """Return the norm of all tensors together, by one number per mesh and process."""
    parts = grouped(norms, lambda norm: norm.shard and norm.shard.group)
    local = [norm.value for norm in parts.pop(None, [])]
    sums = [Norm(total_norm([n.value for n in x]), x[0].shard) for x in parts.values()]
    return total_norm([*local, *(norm.value for norm in whole_norms(sums))])


def as_scalar(x: Tensor, p: Tensor, on_host: bool) -> Scalar:
    """Convert x to a Python number, or move it to p's device if reading it would wait."""
    return x.item() if on_host else x.to(p.device)


def are_finite(grads: list[Tensor], norms: list[Norm], hosts: list[bool]) -> list[Tensor]:
    """Return a 0-d bool for each gradient, True if all its shards are finite.

    hosts[i] is True if norms[i] may be read without waiting for a device.
    """
    flags = list(map(is_finite, to_local(grads), norms, hosts))
    return all_reduce_all(flags, grads)


def is_finite(g: Tensor, norm: Norm, host: bool) -> Tensor:
    """Return a 0-d bool, True if a local shard is finite."""
    if host:
        # The norm of large finite elements can overflow, so an infinite one proves nothing.
        finite = norm.value.isfinite()
        return finite if finite else g.isfinite().all()
    if g.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=g.device)
    # g.isfinite() would allocate a tensor of g's shape.
    low, high = g.aminmax()
    return low.isfinite() & high.isfinite()
