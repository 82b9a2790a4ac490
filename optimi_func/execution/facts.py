"""What a launch depends on about tensors, remembered and compared at every step."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

# Guards that failed where nothing had changed are made again so often, and no more.
_PATIENCE = 3
# Where the guards below are what they were found to be.
_GUARDED = ((2, 11), (2, 14))

# Strides last, which not every layout has.
_KINDS: list[Callable[[Tensor], Any]] = [
    type,
    attrgetter("layout"),
    attrgetter("dtype"),
    attrgetter("shape"),
    attrgetter("device"),
    Tensor.is_neg,
    Tensor._is_zerotensor,
    Tensor.stride,
]


def facts(tensors: list[Tensor]) -> tuple[Any, ...]:
    """All facts about some dense tensors."""
    return tuple([kind(x) for kind in _KINDS for x in tensors])


class Facts:
    """What is known of a list of dense tensors, but for where they lie."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._found = [list(map(kind, tensors)) for kind in _KINDS]
        self._guards = guards(tensors)
        self._renewed = 0

    def hold(self, tensors: list[Tensor]) -> bool:
        """Whether it is true of these, as many as they were."""
        if self._guards is not None and self._guards(*tensors):
            return True
        if any(list(map(kind, tensors)) != x for kind, x in zip(_KINDS, self._found)):
            return False
        # Guards look at more, requires_grad and what a thread dispatches on.
        self._renewed += 1
        self._guards = guards(tensors) if self._renewed <= _PATIENCE else None
        return True


def guards(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """What tells, in one call, whether other tensors are like these; None: ask each.

    Dynamo's, which are private and take their arguments on trust: they are left alone in
    versions of torch that nobody has looked at.
    """
    least, beyond = _GUARDED
    if not least <= tuple(map(int, torch.__version__.split(".")[:2])) < beyond:
        return None
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    sizes, strides = ([list(f(x)) for x in tensors] for f in (Tensor.size, Tensor.stride))
    shape: dict[str, Any] = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    return TensorGuards(*tensors, **shape).check
