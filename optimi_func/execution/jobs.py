"""What the executors are handed: leaves to update, and where the results go."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, _utils

from optimi_func._distributed import Shards
from optimi_func._leaf import whole_mean
from optimi_func._rule import Leaf
from optimi_func.execution.facts import facts
from optimi_func.execution.kernel import Numbers, flat_leaf


class Kind(NamedTuple):
    """What follows from the facts about a leaf's tensors."""

    facts: tuple[Any, ...]
    dtypes: tuple[torch.dtype, ...]
    numel: int
    plain: bool  # all are memory, and nothing else
    dense: bool  # all fill their memory in one and the same order


def kind_of(tensors: list[Tensor]) -> Kind:
    """The kind of p and its state, found out once for all that are alike."""
    found = facts(tensors)
    kind = _kinds.get(found)
    if kind is None:
        if len(_kinds) > _DIFFERENT:
            _kinds.clear()
        p, dtypes = tensors[0], tuple(x.dtype for x in tensors)
        dense = is_dense(p) and all(same_order(p, x) for x in tensors)
        kind = Kind(found, dtypes, p.numel(), lie_plainly(tensors), dense)
        _kinds[found] = kind
    return kind


_kinds: dict[tuple[Any, ...], Kind] = {}
# Of which so many are remembered.
_DIFFERENT = 1 << 12


class Bundle:
    """A leaf, and what executors ask of it at every step, answered once."""

    __slots__ = ("_kind", "_state", "compensated", "pointers", "shards", "tensors")

    def __init__(self, leaf: Leaf, shards: Shards | None) -> None:
        self.shards = shards  # of the parameter, where more of it lies elsewhere
        self._state = type(leaf.state)
        self.compensated = leaf.comp is not None
        self.tensors = flat_leaf(leaf)
        self.pointers = tuple(map(Tensor.data_ptr, self.tensors))
        self._kind = kind_of(self.tensors)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of parameter, state and compensation."""
        return self._kind.dtypes

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self._kind.numel

    @property
    def plain(self) -> bool:
        """Whether all tensors are memory, and nothing else."""
        return self._kind.plain

    @property
    def dense(self) -> bool:
        """Whether all fill their memory in one and the same order, as it stands there."""
        return self._kind.dense

    @property
    def p(self) -> Tensor:
        """The parameter."""
        return self.tensors[0]

    @property
    def fields(self) -> int:
        """How many tensors the rule's state has."""
        return len(self.dtypes) - 1 - self.compensated

    @property
    def leaf(self) -> Leaf:
        """The tensors as the pipeline takes them."""
        p, *state = self.tensors
        comp = state.pop() if self.compensated else None
        return Leaf(p, self._state(*state), comp)

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether what was found out is true of these, which then take their place."""
        if tuple(map(Tensor.data_ptr, tensors)) != self.pointers:
            return False
        if facts(tensors) != self._kind.facts:
            return False
        self.tensors = tensors
        return True

    def let_go(self) -> None:
        """Keep the facts and not the tensors: `holds` brings them back."""
        self.tensors = []


def fits(p: Tensor, g: Tensor) -> bool:
    """The usual case, told cheaply; anything else is looked at closely."""
    return (
        g.dtype == p.dtype
        and g.shape == p.shape
        and g.device == p.device
        and g.layout == torch.strided
    )


def lie_plainly(xs: list[Tensor]) -> bool:
    """Whether these are memory, all of them, and nothing else."""
    return all(x.layout == torch.strided and is_plain(x) and not x.is_neg() for x in xs)


def is_plain(x: Tensor) -> bool:
    """Whether x is memory, and not a wrapper with a dispatch of its own or a mere zero."""
    return is_plain_type(type(x)) and not x._is_zerotensor()


def is_plain_type(kind: Any) -> bool:
    """Whether tensors of a type have no dispatch of their own."""
    return kind.__torch_dispatch__ is _NO_DISPATCH


_NO_DISPATCH = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009


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


class Segments:
    """Where each of several tensors lies in a flat one, for means of their own."""

    def __init__(self, sizes: list[int]) -> None:
        # Runs of one size are rows of a matrix: (how many, elements of each).
        self._runs = [(len(list(run)), size) for size, run in groupby(sizes)]

    def mean(self, x: Tensor) -> Tensor:
        """Of each element the mean over its tensor, summed as if that were alone."""
        means: list[Tensor] = []
        for (count, size), run in zip(self._runs, x.split([n * s for n, s in self._runs])):
            rows = run.view(count, size)
            means.append(rows.mean(1, keepdim=True).expand_as(rows).reshape(-1))
        return torch.cat(means)


class Job(NamedTuple):
    """One leaf to update: read from `source`, write to `into` (itself, if in place)."""

    source: Bundle
    g: Tensor
    numbers: Numbers
    into: Bundle
    ok: Tensor | None  # 0-d bool on the device; where it is false nothing is written
    segments: Segments | None  # of a bucket: where its tensors lie
    given: Tensor | None  # 0-d: the mean over all shards, there when the launch comes

    def mean(self, x: Tensor) -> Tensor:
        """The mean of an elementwise quantity, over each tensor by itself."""
        if self.given is not None:
            return self.given.to(x.dtype)
        return whole_mean(x) if self.segments is None else self.segments.mean(x)

    def agrees(self) -> bool:
        """Whether all tensors of the job fill their memory in one and the same order."""
        source, g, into = self.source, self.g, self.into
        return source.dense and into.dense and same_order(source.p, g)

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


def bump_versions(written: list[Tensor], inference: bool) -> None:
    """Count the writes of a kernel, which autograd has not seen.

    A backward that saved one of these must still raise.

    Args:
        written: What was written.
        inference: Whether any was made under inference_mode: such have no count.
    """
    if inference:
        written = [x for x in written if not x.is_inference()]
    torch.autograd.graph.increment_version(written)


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
