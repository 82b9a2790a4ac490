"""What the executors are handed: leaves to update, and where the results go."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, _utils

from optimi_func._types import Leaf
from optimi_func.compiled.kernel import Numbers, flat_leaf


class Bundle:
    """A leaf, and what executors ask of it at every step, answered once."""

    __slots__ = ("dense", "dtypes", "facts", "leaf", "numel", "plain", "tensors")

    def __init__(self, leaf: Leaf) -> None:
        p = leaf.p
        self.leaf = leaf
        self.tensors = flat_leaf(leaf)
        self.facts = [_fact(x) for x in self.tensors]
        self.dtypes = tuple(x.dtype for x in self.tensors)
        self.numel = p.numel()
        self.plain = all(is_plain(x) and not x.is_neg() for x in self.tensors)
        # Whether all fill their memory in one and the same order, as it stands there.
        self.dense = is_dense(p) and all(same_order(p, x) for x in self.tensors)

    def holds(self, leaf: Leaf) -> bool:
        """Whether what was found out is true of this leaf, which then takes its place."""
        tensors = flat_leaf(leaf)
        if len(tensors) != len(self.facts) or not all(map(_is_still, tensors, self.facts)):
            return False
        self.leaf, self.tensors = leaf, tensors
        return True

    def let_go(self) -> None:
        """Keep the facts and not the tensors: `holds` brings them back."""
        del self.leaf, self.tensors


def _fact(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride(), x.device, x.is_neg()


def _is_still(x: Tensor, fact: tuple[Any, ...]) -> bool:
    # One by one: tuples made for a thousand tensors would call the garbage collector.
    pointer, dtype, shape, stride, device, neg = fact
    return (
        x.data_ptr() == pointer
        and x.dtype == dtype
        and x.shape == shape
        and x.stride() == stride
        and x.device == device
        and x.is_neg() == neg
    )


def is_plain(x: Tensor) -> bool:
    """Whether x is memory, and not a wrapper with a dispatch of its own or a mere zero."""
    kind: Any = type(x)
    return kind.__torch_dispatch__ is _NO_DISPATCH and not x._is_zerotensor()


_NO_DISPATCH = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009


def check_writable(path: object, p: Tensor) -> None:
    """Refuse a parameter several of whose elements are one place in memory."""
    if any(size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride())):
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


class Job(NamedTuple):
    """One leaf to update: read from `source`, write to `into` (itself, if in place)."""

    source: Bundle
    g: Tensor
    numbers: Numbers
    into: Bundle
    ok: Tensor | None  # 0-d bool on the device; where it is false nothing is written

    def agrees(self) -> bool:
        """Whether all tensors of the job fill their memory in one and the same order."""
        source, g, into = self.source, self.g, self.into
        return source.dense and into.dense and same_order(source.leaf.p, g)

    def is_plain(self) -> bool:
        """Whether all that a kernel would read is memory."""
        return self.source.plain and is_plain(self.g)

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
    if len(tensors) == 1:
        return torch.cat([tensors[0].reshape(-1)])  # of one, the other makes an alias
    return _utils._flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of `flat`, one of the shape of each."""
    return list(_utils._unflatten_dense_tensors(flat, like))
