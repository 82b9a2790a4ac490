"""What the executors are handed: leaves to update, and where the results go."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, _utils

from optimi_func._types import Leaf
from optimi_func.compiled.kernel import Numbers


class Job(NamedTuple):
    """One leaf to update: read from `leaf`, write to `into` (itself, if in place)."""

    leaf: Leaf
    g: Tensor
    numbers: Numbers
    into: Leaf


def chunks(jobs: list[Job], size: int) -> Iterator[list[Job]]:
    """Runs of jobs of at most `size` elements together, or of one larger job."""
    chunk: list[Job] = []
    total = 0
    for job in jobs:
        count = job.leaf.p.numel()
        if chunk and total + count > size:
            yield chunk
            chunk, total = [], 0
        chunk.append(job)
        total += count
    yield chunk


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source onto its target."""
    torch._foreach_copy_(targets, sources)


def flatten(tensors: list[Tensor]) -> Tensor:
    """One 1-D tensor with the elements of all, each in its logical order.

    As torch.cat of reshaped tensors, without Python's share of a call for each.
    """
    return _utils._flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of `flat`, one of the shape of each."""
    return list(_utils._unflatten_dense_tensors(flat, like))
