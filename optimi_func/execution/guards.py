"""Guards: a check that tensors are still what a plan was made for."""

import functools
from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from optimi_func.core.torch_private import TENSOR_FACTS
from optimi_func.execution.tensors import uncollected


class Guard:
    """The facts about a list of tensors. It keeps no tensor alive."""

    def __init__(self, tensors: Sequence[Tensor], addresses: bool) -> None:
        self._addresses = list(map(Tensor.data_ptr, tensors)) if addresses else None
        self._facts = [tuple(map(fact, tensors)) for fact in TENSOR_FACTS]
        self._check: Callable[..., bool] | None = None  # made when it is first asked

    def moved(self, tensors: Sequence[Tensor], fixed: int) -> "Guard | None":
        """Return a guard of tensors with these facts, each at an address of its own.

        The first `fixed` are where they were. Returns None for other tensors.
        """
        guard, was = copy(self), self._addresses or []
        guard._addresses = now = list(map(Tensor.data_ptr, tensors))
        fit = now[:fixed] == was[:fixed] and len(now) == len({*now}) == len(was)
        return guard if fit and guard.holds(tensors) else None

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if these tensors have the same facts and, if kept, addresses."""
        if self._addresses is not None:
            if list(map(Tensor.data_ptr, tensors)) != self._addresses:
                return False
        elif len(tensors) != len(self._facts[0]):
            return False
        if self._check is not None and self._check(*tensors):
            return True
        with uncollected():
            facts = zip(TENSOR_FACTS, self._facts)
            if any(tuple(map(fact, tensors)) != was for fact, was in facts):
                return False
            # torch's guards look at more, such as requires_grad and the thread's modes.
            self._check = tensor_guards(tensors)
        return True


def tensor_guards(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return Dynamo's check of tensors, one call in C++; None if it is not usable."""
    # Within an operation of torch tensors hide facts. Private, in torch 2.13 to 2.15.
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    within = excluded(torch._C.DispatchKey.Negative)
    return _make_guards(tensors) if tensors and _guards_work(within) else None


def _make_guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    # Private, in torch 2.13 to 2.15 as used here.
    from torch._C._dynamo.guards import TensorGuards

    sizes, strides = ([list(f(x)) for x in tensors] for f in (Tensor.size, Tensor.stride))
    shape = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    return TensorGuards(*tensors, **shape).check


@functools.cache
def _guards_work(within_operation: bool) -> bool:
    """Return True if torch's private guards notice every change that plans rely on.

    Within an operation, such as a compiled training step, they do not. Both cases are
    tried out.
    """

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device="cpu")

    def notices(change: Callable[[Tensor], Tensor]) -> bool:
        check = _make_guards([zeros(2, 3), zeros()])
        same = zeros(2, 3), zeros()
        return check(*same) is True and check(change(same[0]), same[1]) is False

    try:
        return (
            notices(lambda x: x[:1])
            and notices(lambda x: x.view(3, 2))
            and notices(lambda x: zeros(3, 2).t())
            and notices(Tensor.double)
            and notices(lambda x: x.to("meta"))
            and notices(torch._neg_view)
            and notices(lambda x: torch._efficientzerotensor(x.shape, device="cpu"))
            and notices(torch.nn.Parameter)
        )
    except Exception:
        return False
