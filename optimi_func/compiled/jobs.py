"""What the executors are handed: leaves to update, and where the results go."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, _utils

from optimi_func._types import Leaf
from optimi_func.compiled.kernel import Numbers, flat_leaf


class Bundle:
    """A leaf, and what executors ask of it at every step, answered once."""

    __slots__ = ("dense", "dtypes", "layout", "leaf", "numel", "pointers", "tensors")

    def __init__(self, leaf: Leaf) -> None:
        p = leaf.p
        self.leaf = leaf
        self.tensors = flat_leaf(leaf)
        self.pointers = [x.data_ptr() for x in self.tensors]
        self.dtypes = tuple(x.dtype for x in self.tensors)
        self.numel = p.numel()
        self.layout = (p.shape, p.stride(), p.device)
        # Whether all fill their memory in one and the same order.
        self.dense = is_dense(p) and all(same_order(p, x) for x in self.tensors)

    def holds(self, p: Tensor, tensors: list[Tensor | None]) -> bool:
        """Whether p and its state are the tensors that this was made of, unmoved.

        Args:
            p: The parameter, whose `data` may have been replaced.
            tensors: The rule's fields and the compensation, where there is one.
        """
        return (
            p.dtype == self.dtypes[0]
            and (p.shape, p.stride(), p.device) == self.layout
            and len(tensors) == len(self.tensors) - 1
            and all([x is y for x, y in zip(tensors, self.tensors[1:])])
            and [x.data_ptr() for x in self.tensors] == self.pointers
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


class Job(NamedTuple):
    """One leaf to update: read from `source`, write to `into` (itself, if in place)."""

    source: Bundle
    g: Tensor
    numbers: Numbers
    into: Bundle

    def agrees(self) -> bool:
        """Whether all tensors of the job fill their memory in one and the same order."""
        source, g, _, into = self
        return source.dense and into.dense and same_order(source.leaf.p, g)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.source.numel


class Sized(Protocol):
    """Whatever has a number of elements."""

    @property
    def numel(self) -> int:
        """How many."""
        ...


T = TypeVar("T", bound=Sized)


def chunks(jobs: list[T], size: int) -> Iterator[list[T]]:
    """Runs of jobs of at most `size` elements together, or of one larger job."""
    chunk: list[T] = []
    total = 0
    for job in jobs:
        if chunk and total + job.numel > size:
            yield chunk
            chunk, total = [], 0
        chunk.append(job)
        total += job.numel
    yield chunk


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source onto its target."""
    torch._foreach_copy_(targets, sources)


def foreach_add_(tensors: list[Tensor], number: float) -> None:
    """Add a number to each tensor."""
    if tensors:
        torch._foreach_add_(tensors, number)


def flatten(tensors: list[Tensor]) -> Tensor:
    """One 1-D tensor with the elements of all, each in its logical order.

    As torch.cat of reshaped tensors, without Python's share of a call for each.
    """
    return _utils._flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of `flat`, one of the shape of each."""
    return list(_utils._unflatten_dense_tensors(flat, like))
