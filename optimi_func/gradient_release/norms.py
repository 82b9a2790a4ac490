"""What release asks of gradients beside their norms."""

import torch
from torch import Tensor

from optimi_func._types import Scalar


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
