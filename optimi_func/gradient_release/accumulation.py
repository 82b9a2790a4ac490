"""An accumulation cycle: the backwards that make one step, and what they leave behind."""

import torch
from torch import Tensor

from optimi_func._distributed import is_distributed
from optimi_func.gradient_release import streams


class Accumulation:
    """Where an accumulation stands; it outlives the single backward.

    Attributes:
        position: Backwards that the open cycle has seen; 0 between cycles.
        partially_updated: accumulation="states": whose state has taken a part of the
            gradient.
        buffer: accumulation="buffer": the sum of a parameter's gradients.
    """

    def __init__(self) -> None:
        self.position = 0
        self.partially_updated: set[Tensor] = set()
        self.buffer: dict[Tensor, Tensor] = {}

    @property
    def is_open(self) -> bool:
        """Whether gradients have come that have not moved their parameter yet."""
        return bool(self.position or self.partially_updated or self.buffer)

    def keep(self, p: Tensor, g: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Add p's gradient to its sum, which is returned; g itself may become it."""
        held = self.buffer.get(p)
        if held is None:
            dtype = dtype or torch.promote_types(g.dtype, torch.float32)
            # What fully_shard hands out lies in a buffer of its own, with all the others.
            held = self.buffer[p] = g.to(dtype, copy=is_distributed(g))
            return held
        return held.add_(g)

    def whole(self, p: Tensor, g: Tensor) -> Tensor:
        """The sum with its last term, which may be used up; the buffer stays as it is."""
        held = self.buffer.get(p)
        if held is None:
            return g
        streams.record([held])
        wide = torch.promote_types(held.dtype, g.dtype)
        return g.add_(held) if g.dtype == wide else held + g
