"""Complex tensors as real pairs, which rules compute with: torch.view_as_real of them.

Executors get pairs as local tensors. In a state a field of float32 or float64 pairs is
stored as a complex tensor, as torch.optim's; other dtypes, and codes, as pairs.
"""

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


def as_real(x: T) -> T:
    """Return a complex tensor as real pairs in its memory. Other values stay."""
    return torch.view_as_real(x) if isinstance(x, Tensor) and x.is_complex() else x


def as_complex(x: Tensor, like: Tensor) -> Tensor:
    """Undo `as_real` of a tensor like this one."""
    if not like.is_complex():
        return x
    pairs = x.stride()[-1] == 1 and not any([stride % 2 for stride in x.stride()[:-1]])
    return torch.view_as_complex(x if pairs else x.contiguous())


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
