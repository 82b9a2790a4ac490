"""Norms of gradients, and what they are scaled by."""

from functools import reduce

import torch
from torch import Tensor

from optimi_func import _torch
from optimi_func._types import Scalar


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor."""
    return _torch.norms(tensors)


def total_norm(norms: list[Tensor]) -> Tensor:
    """The norm of all from the norms of each, as torch.nn.utils takes it."""
    if not norms:
        return torch.zeros(())
    first = norms[0].device
    wide = reduce(torch.promote_types, [x.dtype for x in norms])
    return torch.linalg.vector_norm(torch.stack([x.to(first, wide) for x in norms]))


def clip_factor(limit: Scalar | None, norm: Tensor) -> Tensor:
    """The factor that clips, as torch.nn.utils has it."""
    assert limit is not None
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def at(x: Tensor, p: Tensor, on_host: bool) -> Scalar:
    """A number for p's update: the host's own, or on p's device."""
    return x.item() if on_host else x.to(p.device)


def is_finite(g: Tensor, norm: Tensor) -> bool:
    """Whether all of g is finite, asked on the host."""
    # A finite norm needs no second look; large numbers can overflow it.
    return bool(norm.isfinite() or g.isfinite().all())


def all_finite(g: Tensor) -> Tensor:
    """A 0-d bool on g's device, found without a tensor of g's size."""
    if g.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=g.device)
    low, high = g.aminmax()
    return low.isfinite() & high.isfinite()
