"""Norms and finiteness of gradients, of which a process may hold a part (DTensor)."""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func._distributed import (
    Split,
    all_reduce_all,
    all_reduce_sum,
    shards_of,
    to_local,
)
from optimi_func._norms import norms_of, total_norm
from optimi_func._rule import Scalar


class Norm(NamedTuple):
    """The norm of the local part of a tensor."""

    value: Tensor  # 0-d, of at least float32
    split: Split | None  # the processes that hold the rest of it


def measured(tensors: list[Tensor]) -> list[Norm]:
    """The norm of each tensor's local part."""
    shards = map(shards_of, tensors)
    splits = [None if s is None else s.split for s in shards]
    return list(map(Norm, norms_of(to_local(tensors)), splits))


def whole(norms: list[Norm]) -> list[Norm]:
    """The norms of whole tensors: an all-reduce where any is sharded."""
    if all(norm.split is None for norm in norms):
        return norms
    squares = [norm.value.double().square() for norm in norms]
    sums = all_reduce_sum(squares, [norm.split for norm in norms])
    return [
        norm if norm.split is None else Norm(total.sqrt().to(norm.value.dtype), None)
        for norm, total in zip(norms, sums)
    ]


def total(norms: list[Norm]) -> Tensor:
    """The norm of all together: an all-reduce of one number a mesh where any is sharded."""
    parts: dict[Split | None, list[Tensor]] = {}
    for norm in norms:
        parts.setdefault(norm.split, []).append(norm.value)
    here_alone = parts.pop(None, [])
    others = whole([Norm(total_norm(values), s) for s, values in parts.items()])
    return total_norm([*here_alone, *(norm.value for norm in others)])


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
