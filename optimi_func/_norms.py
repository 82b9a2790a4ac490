"""The norm of all gradients, and what clips it, as torch.nn.utils has them."""

from functools import reduce

import torch
from torch import Tensor

from optimi_func import _torch
from optimi_func._rule import Scalar


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
