"""Facts about tensors: memory, layout and order of elements."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from optimi_func._rule import Leaf, Rule
from optimi_func._storage import state_of, tensors_of

T = TypeVar("T")


def is_plain(x: Tensor) -> bool:
    """Return True if x is memory: no subclass with its own dispatch, no zero tensor."""
    kind: Any = type(x)
    return kind.__torch_dispatch__ is _NO_DISPATCH and not x._is_zerotensor()


_NO_DISPATCH = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009


def has_memory(x: Tensor) -> bool:
    """Return False for meta and fake tensors."""
    # A fake tensor exists only if its module is imported; torch has no public test.
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return not (x.is_meta or (fakes is not None and isinstance(x, fakes.FakeTensor)))


def is_capturing(device: torch.device) -> bool:
    """Return True if launches of this thread are captured in a CUDA graph."""
    built = device.type == "cuda" and torch.backends.cuda.is_built()
    return built and torch.cuda.is_current_stream_capturing()


def is_plainly_strided(x: Tensor) -> bool:
    """Return True if x is strided memory without a pending negation."""
    return x.layout == torch.strided and is_plain(x) and not x.is_neg()


def is_expanded(x: Tensor) -> bool:
    """Return True if several elements of x share one place in memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride()))


def check_writable(path: object, p: Tensor) -> None:
    """Raise ValueError if a parameter is expanded, because it cannot be written to."""
    if is_expanded(p):
        raise ValueError(
            f"params{path} is expanded (strides {p.stride()}): it cannot be written to; "
            "clone it"
        )


def same_order(p: Tensor, x: Tensor) -> bool:
    """Return True if x has the memory order of p, which is dense."""
    # Strides of dimensions of size 1 may differ and mean nothing.
    return x.stride() == p.stride() or (x.is_contiguous() and p.is_contiguous())


def is_dense(x: Tensor) -> bool:
    """Return True if x covers a range of memory without gaps or overlap, in any order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def chunks(items: list[T], size: int, numel: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield runs of items with at most `size` elements in all, or of one larger item."""
    chunk: list[T] = []
    total = 0
    for item in items:
        if chunk and total + numel(item) > size:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += numel(item)
    yield chunk


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source onto its target."""
    torch._foreach_copy_(targets, sources)


def foreach_add_(tensors: list[Tensor], number: float | list[float]) -> None:
    """Add one number to all tensors, or a list's numbers to one tensor each."""
    if tensors:
        torch._foreach_add_(tensors, number)


def flat_leaf(leaf: Leaf) -> list[Tensor]:
    """Return the tensors that a step writes: parameter, state, compensation."""
    tensors = [leaf.p]
    for field in leaf.state:
        tensors += tensors_of(field)
    if leaf.comp is not None:
        tensors.append(leaf.comp)
    return tensors


def write_back(targets: Sequence[Tensor], new: Leaf) -> None:
    """Copy a step's results onto their targets, without those that are the target."""
    for target, result in zip(targets, flat_leaf(new)):
        if result is not target:
            target.copy_(result)


def leaf_of(
    rule: Rule[Any, Any], codes: tuple[bool, ...], tensors: Sequence[Tensor]
) -> Leaf:
    """Make a leaf of a parameter, its state's tensors and, if it has one, compensation."""
    p, *rest = tensors
    left = iter(rest)
    state = state_of(rule.state, left, codes or (False,) * len(rule.state._fields))
    return Leaf(p, state, next(left, None))
