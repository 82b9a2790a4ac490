"""The base class of those of torch.optim's optimizers whose decay joins the gradient."""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

from torch import Tensor

from optimi_func.rules import Body


def is_on(number: Any) -> bool:
    """Return False if a number is 0 on the host, and True for tensors and schedules."""
    return isinstance(number, Tensor | Callable) or number != 0


class Coupled(Body):
    """Base class of optimizers whose decay joins the gradient, unless it is decoupled."""

    _: KW_ONLY
    decouple_wd: bool = False

    def usual_decay(self):
        return "decoupled" if self.decouple_wd else "l2"
