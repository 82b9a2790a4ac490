"""Complex tensors as real pairs, which rules compute with: torch.view_as_real of them.

Executors get pairs as local tensors. In a state a field of float32 or float64 pairs is
stored as a complex tensor, as torch.optim's; other dtypes, and codes, as pairs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


def as_real(x: T) -> T:
    """Return a complex tensor as real pairs in its memory. Other values stay."""
    if not (isinstance(x, Tensor) and x.is_complex()):
        return x
    strides = *[2 * stride for stride in x.stride()], 1
    return _of_local(torch.view_as_real, x, (*x.shape, 2), strides)


def as_complex(x: Tensor, like: Tensor) -> Tensor:
    """Undo `as_real` of a tensor like this one."""
    if not like.is_complex():
        return x
    pairs = x.stride()[-1] == 1 and not any([stride % 2 for stride in x.stride()[:-1]])
    x = x if pairs else x.contiguous()
    strides = [stride // 2 for stride in x.stride()[:-1]]
    return _of_local(torch.view_as_complex, x, x.shape[:-1], strides)


def _of_local(view: Any, x: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return a view of a tensor, which if it is a DTensor is one of its local shard.

    torch's own view of a DTensor gathers a vector that is sharded unevenly.
    """
    if not hasattr(x, "device_mesh"):
        return view(x)
    from torch.distributed.tensor import DTensor

    part, mesh, placements = view(x.to_local()), x.device_mesh, x.placements
    shapes: Any = {"shape": torch.Size(shape), "stride": tuple(strides)}
    return DTensor.from_local(part, mesh, placements, run_check=False, **shapes)


def as_real_for(p: Tensor, x: Tensor) -> Tensor:
    """Return x, whose shape may be that of p, for computing with real pairs of p."""
    single = p.is_complex() and not x.is_complex() and x.dim() and x.dim() == p.dim()
    return x.unsqueeze(-1) if single else as_real(x)


def stored(p: Tensor, fields: T) -> T:
    """Return fields of the state of p, a tree, of which pairs may be complex tensors."""
    return pytree.tree_map(partial(_stored, p), fields) if p.is_complex() else fields


def _stored(p: Tensor, x: Tensor) -> Tensor:
    wide = x.dtype in (torch.float32, torch.float64)
    return as_complex(x, p) if wide and x.shape == (*p.shape, 2) else x
