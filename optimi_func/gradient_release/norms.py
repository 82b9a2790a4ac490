"""Norms and finiteness of gradients, of which a process may hold a part (DTensor)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func._distributed import (
    ShardSpec,
    all_reduce_all,
    all_reduce_sum,
    shards_of,
    to_local,
)
from optimi_func._rule import Scalar
from optimi_func._torch import norms_of, total_norm


class Norm(NamedTuple):
    """The norm of the local part of a tensor."""

    value: Tensor  # 0-d, of at least float32
    shard: ShardSpec | None  # the processes that hold the rest of it


def measured(tensors: list[Tensor]) -> list[Norm]:
    """The norm of each tensor, as far as it lies here."""
    return list(map(Norm, norms_of(to_local(tensors)), map(shards_of, tensors)))


def whole(norms: list[Norm]) -> list[Norm]:
    """The norms of whole tensors: a message, where any lies in shards."""
    if all(norm.shard is None for norm in norms):
        return norms
    squares = [norm.value.double().square() for norm in norms]
    sums = all_reduce_sum(squares, [norm.shard for norm in norms])
    return [
        norm if norm.shard is None else Norm(total.sqrt().to(norm.value.dtype), None)
        for norm, total in zip(norms, sums)
    ]


def total(norms: list[Norm]) -> Tensor:
    """The norm of all: a message of one number a mesh, where any lies in shards."""
    parts: dict[Any, list[Norm]] = {}
    for norm in norms:
        parts.setdefault(norm.shard and norm.shard.group, []).append(norm)
    local = [norm.value for norm in parts.pop(None, [])]
    sums = [Norm(total_norm([n.value for n in x]), x[0].shard) for x in parts.values()]
    return total_norm([*local, *(norm.value for norm in whole(sums))])


def at(x: Tensor, p: Tensor, on_host: bool) -> Scalar:
    """A number for p's update: the host's own, or on p's device."""
    return x.item() if on_host else x.to(p.device)


def are_finite(grads: list[Tensor], norms: list[Norm], hosts: list[bool]) -> list[Tensor]:
    """Whether all of each gradient is finite, wherever any of it lies: 0-d bools.

    Args:
        grads: The gradients.
        norms: Of what lies here of them.
        hosts: Of which the device need not be spared the waiting.
    """
    flags = [
        _is_finite(g, norm.value) if host else _all_finite(g)
        for g, norm, host in zip(to_local(grads), norms, hosts)
    ]
    return all_reduce_all(flags, grads)


def _is_finite(g: Tensor, norm: Tensor) -> Tensor:
    # A finite norm needs no second look; large numbers can overflow it.
    finite = norm.isfinite()
    return finite if finite else g.isfinite().all()


def _all_finite(g: Tensor) -> Tensor:
    # Without a tensor of g's size.
    if g.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=g.device)
    low, high = g.aminmax()
    return low.isfinite() & high.isfinite()
