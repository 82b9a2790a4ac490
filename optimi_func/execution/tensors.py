"""What executors ask of tensors: whether they are plain memory, and in which order."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, _utils
from torch.utils import _pytree as pytree

from optimi_func._checks import check_writable as check_writable
from optimi_func._checks import is_expanded as is_expanded
from optimi_func._codes import is_dense as is_dense
from optimi_func._codes import same_order as same_order
from optimi_func._rule import Leaf
from optimi_func._storage import tensors_of
from optimi_func._torch import has_memory as has_memory
from optimi_func._torch import is_plain as is_plain

T = TypeVar("T")


def is_capturing(device: torch.device) -> bool:
    """Whether what this thread launches on a device is captured in a CUDA graph."""
    built = device.type == "cuda" and torch.backends.cuda.is_built()
    return built and torch.cuda.is_current_stream_capturing()


def is_plainly_strided(x: Tensor) -> bool:
    """Whether x is memory that holds its very elements, with strides."""
    return x.layout == torch.strided and is_plain(x) and not x.is_neg()


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
