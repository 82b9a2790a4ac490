"""What executors ask of tensors: whether they are plain memory, and in which order."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, _utils
from torch.utils import _pytree as pytree

from optimi_func._rule import Leaf
from optimi_func._storage import tensors_of

T = TypeVar("T")


def is_plain(x: Tensor) -> bool:
    """Whether x is memory, and not a wrapper with a dispatch of its own or a mere zero."""
    kind: Any = type(x)
    return kind.__torch_dispatch__ is _NO_DISPATCH and not x._is_zerotensor()


_NO_DISPATCH = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009


def has_memory(x: Tensor) -> bool:
    """Whether there is anything in x: not on the meta device, nor under FakeTensorMode."""
    # Whoever has a fake one has imported it; no public name tells one.
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return not (x.is_meta or (fakes is not None and isinstance(x, fakes.FakeTensor)))


def is_capturing(device: torch.device) -> bool:
    """Whether what this thread launches on a device is captured in a CUDA graph."""
    built = device.type == "cuda" and torch.backends.cuda.is_built()
    return built and torch.cuda.is_current_stream_capturing()


def is_plainly_strided(x: Tensor) -> bool:
    """Whether x is memory that holds its very elements, with strides."""
    return x.layout == torch.strided and is_plain(x) and not x.is_neg()


def is_expanded(x: Tensor) -> bool:
    """Whether several of x's elements are one place in memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride()))


def check_writable(path: object, p: Tensor) -> None:
    """Refuse a parameter that is expanded."""
    if is_expanded(p):
        raise ValueError(
            f"params{path} is expanded (strides {p.stride()}): it cannot be written to; "
            "clone it"
        )


def same_order(p: Tensor, x: Tensor) -> bool:
    """Whether x has p's elements in p's order in memory, p being dense."""
    # Strides of dimensions of size 1 may differ and mean nothing.
    return x.stride() == p.stride() or (x.is_contiguous() and p.is_contiguous())


def is_dense(x: Tensor) -> bool:
    """Whether x covers a range of memory without gaps or overlap, in any order."""
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
    """Runs of items of at most `size` elements together, or of one larger item."""
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
    """Add a number to each tensor: to all the same, or to each its own."""
    if tensors:
        torch._foreach_add_(tensors, number)


def flatten(tensors: list[Tensor]) -> Tensor:
    """One 1-D tensor with the elements of all, each in its logical order.

    As torch.cat of reshaped tensors, without Python's share of a call for each.
    """
    if len(tensors) == 1:
        return torch.cat([tensors[0].reshape(-1)])  # of one, the other makes an alias
    return _utils._flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of `flat`, one of the shape of each."""
    return list(_utils._unflatten_dense_tensors(flat, like))


def flat_leaf(leaf: Leaf) -> list[Tensor]:
    """P, state, comp: the tensors that a step writes."""
    tensors = [leaf.p]
    for field in leaf.state:
        tensors += tensors_of(field)
    if leaf.comp is not None:
        tensors.append(leaf.comp)
    return tensors


def write_back(targets: Sequence[Tensor], new: Leaf) -> None:
    """Copy a step's results onto their targets; what did not change is the target."""
    for target, result in zip(targets, flat_leaf(new)):
        if result is not target:
            target.copy_(result)


def select(finite: Tensor, old: Leaf, new: Leaf) -> Leaf:
    """The new leaf where finite, a 0-d bool, is true; without asking the device."""
    return pytree.tree_map(
        lambda n, o: n if n is o else torch.where(finite, n, o), new, old
    )
