"""What a release knows of a backward while it runs, and of those since the last step."""

from typing import Any

import torch
from torch import Tensor

from optimi_func._rule import WHOLE_BATCH, Scalar
from optimi_func.gradient_release.norms import Norm, at


class Backward:
    """One running backward.

    The autograd engine alone keeps it alive: a backward that fails drops it, and with it
    the gradients that still waited.
    """

    def __init__(self, last: bool) -> None:
        self.last = last  # whether parameters move in it
        self.ids: set[int] = set()  # its own, and those of backwards started inside it
        self.fired: set[Tensor] = set()
        # Parameters, gradients, and the CUDA streams that these are complete on.
        self.pending: dict[torch.device, list[tuple[Tensor, Tensor, Any]]] = {}
        self.waiting: dict[torch.device, int] = {}  # bytes of what is pending
        self.staging_buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.norms: list[Norm] = []
        self.grad_scale: Tensor | None = None  # of every gradient; None leaves them be
        self._grad_scales: dict[torch.device | None, Scalar] = {}

    def grad_scale_for(self, p: Tensor, on_host: bool) -> Scalar:
        """The common scale, on the host or p's device; the same object for all there."""
        if self.grad_scale is None:
            return WHOLE_BATCH.grad_scale
        place = None if on_host else p.device
        if place not in self._grad_scales:
            self._grad_scales[place] = at(self.grad_scale, p, on_host)
        return self._grad_scales[place]


class SinceStep:
    """The backwards since the last step(), for its warnings.

    Attributes:
        backwards: How many there were.
        moves: How many of them moved parameters, of which the first alone may have been
            the first to do so: backwards that move different parameters count as one.
        repeats: Whether any parameter got a gradient in more than one.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self.moves = 0
        self.repeats = False
        self._fired: set[Tensor] = set()

    def add(self, fired: set[Tensor], moved: bool) -> None:
        """Note a backward, and which parameters got gradients in it."""
        again = not self._fired.isdisjoint(fired)
        self.backwards += 1
        self.repeats |= again
        self.moves += moved and (again or not self.moves)
        self._fired |= fired
