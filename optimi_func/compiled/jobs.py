"""What the executors are handed: leaves to update, and where the results go."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, _utils

from optimi_func._types import Leaf
from optimi_func.compiled.kernel import Numbers, flat_leaf


class Bundle:
    """A leaf, and what executors ask of it at every step, answered once."""

    __slots__ = ("count", "dense", "dtypes", "layout", "leaf", "pointers", "tensors")

    def __init__(self, leaf: Leaf) -> None:
        p = leaf.p
        self.leaf = leaf
        self.tensors = flat_leaf(leaf)
        self.pointers = [x.data_ptr() for x in self.tensors]
        self.dtypes = tuple(x.dtype for x in self.tensors)
        self.count = p.numel()
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


def chunks(jobs: list[Job], size: int) -> Iterator[list[Job]]:
    """Runs of jobs of at most `size` elements together, or of one larger job."""
    chunk: list[Job] = []
    total = 0
    for job in jobs:
        count = job.source.count
        if chunk and total + count > size:
            yield chunk
            chunk, total = [], 0
        chunk.append(job)
        total += count
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
