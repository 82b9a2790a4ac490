"""Small leaves that step together: their state side by side, one launch for all.

For foreach, and for kernels that do not sweep over lists: a call takes as long as a
thousand elements do. What the step owns, the state, can lie in one flat tensor for good;
parameters and gradients belong to others, and are copied into scratch and back. To an
executor a bucket is one flat leaf.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from optimi_func._rule import Leaf
from optimi_func.execution.jobs import (
    Bundle,
    Job,
    Segments,
    foreach_copy_,
    is_plain_type,
    unflatten,
)
from optimi_func.execution.kernel import Numbers

# Elements in one bucket: what is gathered is still in the cache when the kernel reads it.
CHUNK = 1 << 18

# `state[p]` of each parameter.
Entries: TypeAlias = list[dict[str, Any]]
Launch: TypeAlias = Callable[[], None]

_pointer = Tensor.data_ptr
_contiguous = Tensor.is_contiguous
_shape = attrgetter("shape")
_dtype = attrgetter("dtype")
_device = attrgetter("device")
_layout = attrgetter("layout")


class Scratch:
    """Memory of one device that buckets use one after the other."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.length, self.device = length, device
        self._flats: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, role: str, dtype: torch.dtype, count: int) -> Tensor:
        """The first `count` elements of what is set aside for a role."""
        key = (role, dtype)
        if key not in self._flats:
            self._flats[key] = torch.empty(self.length, dtype=dtype, device=self.device)
        return self._flats[key].narrow(0, 0, count)


def may_share(bundle: Bundle) -> bool:
    """Whether a leaf can live in a bucket."""
    state = bundle.tensors[1:]
    return (
        bundle.plain
        and all(map(_contiguous, bundle.tensors))
        and not any(x.is_inference() for x in bundle.tensors)
        and not any(x.requires_grad for x in state)
    )


class Bucket:
    """Contiguous leaves of the same dtypes and age, of two elements or more together.

    Made of them, it moves their state: the tensors in `state[p]` stay the objects they
    are, on memory that is one flat tensor. Whoever replaces one of them, or its memory,
    is noticed by `holds`.
    """

    def __init__(
        self, at: list[int], bundles: list[Bundle], names: list[str], scratch: Scratch
    ) -> None:
        self.at = at  # the places of its parameters among those that step together
        self._names, self._scratch = names, scratch
        roles = [list(role) for role in zip(*[b.tensors for b in bundles])]
        self._params, *self._state = roles
        self._shapes = list(map(_shape, self._params))
        sizes = [b.numel for b in bundles]
        self._segments = Segments(sizes)
        flats = [_moved_together(role) for role in self._state]
        self._pointers = [list(map(_pointer, role)) for role in roles]
        flat = scratch.take("p", self._params[0].dtype, sum(sizes))
        self._parts = list(flat.split(sizes))
        # What is 1-D can be gathered as it comes, wherever it lies.
        self._as_they_are = all(len(shape) == 1 for shape in self._shapes)
        # These share the parameters' version counters: autograd sees what is written.
        self._aliases = [p.detach().view(-1) for p in self._params]
        if self._as_they_are:
            self._aliases = self._params
        self._grads: dict[torch.dtype, tuple[Tensor, list[Tensor]]] = {}
        kind = bundles[0].leaf
        comp = None if kind.comp is None else flats.pop()
        self._bundle = Bundle(Leaf(flat, type(kind.state)(*flats), comp), None)

    def holds(self, params: list[Tensor], entries: Entries) -> bool:
        """Whether everything still lies where it was put."""
        pointers, *others = self._pointers
        if self._as_they_are:
            # The same ones, but for what lies here of a DTensor: another at every step.
            self._params = self._aliases = params
        return (
            list(map(_shape, params)) == self._shapes
            and set(map(_dtype, params)) == {self._bundle.p.dtype}
            and (self._as_they_are or list(map(_pointer, params)) == pointers)
            and (self._as_they_are or all(map(_contiguous, params)))
            and all(
                all(map(is_, map(itemgetter(name), entries), role))
                and list(map(_pointer, role)) == places
                for name, role, places in zip(self._names, self._state, others)
            )
        )

    def fits(self, grads: list[Tensor]) -> bool:
        """Whether these are gradients of one dtype, dense and plain."""
        dtypes = set(map(_dtype, grads))
        bits = torch.finfo(self._bundle.p.dtype).bits
        return (
            list(map(_shape, grads)) == self._shapes
            and len(dtypes) == 1
            and all(d.is_floating_point and torch.finfo(d).bits >= bits for d in dtypes)
            and set(map(_device, grads)) == {self._scratch.device}
            and set(map(_layout, grads)) == {torch.strided}
            and all(map(is_plain_type, set(map(type, grads))))
        )

    def job(self, grads: list[Tensor], numbers: Numbers, ok: Tensor | None) -> Job:
        """All leaves as one, its gradient to be gathered."""
        g, _ = self._gradient(grads[0].dtype)
        return Job(self._bundle, g, numbers, self._bundle, ok, self._segments, None)

    def launches(
        self, grads: list[Tensor], inner: list[Launch], write: bool
    ) -> list[Launch]:
        """What updates the job, between what brings it there and back."""
        last = [partial(self._scatter, write)]
        return [partial(self._gather, grads), *inner, *last]

    def _gradient(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        if dtype not in self._grads:
            flat = self._scratch.take("g", dtype, self._bundle.numel)
            self._grads[dtype] = flat, unflatten(flat, self._params)
        return self._grads[dtype]

    def _gather(self, grads: list[Tensor]) -> None:
        torch.cat(self._aliases, out=self._bundle.p)
        flat, parts = self._gradient(grads[0].dtype)
        if self._as_they_are:
            torch.cat(grads, out=flat)
        else:
            foreach_copy_(parts, grads)

    def _scatter(self, write: bool) -> None:
        moved = self._state
        if write:
            foreach_copy_(self._aliases, self._parts)
        else:
            moved = moved[: self._bundle.fields]
        for role in moved:
            torch.autograd.graph.increment_version(role)


def _moved_together(role: list[Tensor]) -> Tensor:
    """One flat tensor of all, which are views of it from now on."""
    flat = torch.cat([x.reshape(-1) for x in role]) if len(role) > 1 else role[0].clone()
    flat = flat.view(-1)
    for x, part in zip(role, unflatten(flat, role)):
        x.data = part
    return flat
