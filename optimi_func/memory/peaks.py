"""The peak of a recipe: activations and gradients, where backward has the most of both."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from optimi_func.gradient_release.backward import PENDING_BYTES, aligned, staging_size
from optimi_func.memory.activations import Activations, Moment, gradients_of


class Sizes(NamedTuple):
    """The sizes of a parameter that requires a gradient, in one process."""

    numel: int
    bytes: int  # its gradient has as many
    uses: int  # number of names that the model has for it
    scratch: int | None  # temporaries of its update under release; None: it waits


class Handling(NamedTuple):
    """The treatment of gradients in a recipe."""

    release: bool
    backwards: int  # that make a step
    device: str
    dtype: torch.dtype  # of gradients
    buffer: torch.dtype | None  # the dtype of sums that a release keeps, if any
    scratch: int  # temporaries of all parameters' update, or (release) of those that wait

    def sums(self, params: Sequence[Sizes]) -> int:
        """Return the bytes of sums before the last backward."""
        if self.backwards == 1:
            return 0
        if not self.release:
            return sum(p.bytes for p in params)
        return sum(p.numel for p in params) * (self.buffer or self.dtype).itemsize

    def updated(self, p: Sizes, flushes: bool) -> int:
        """Return the bytes that p's complete gradient takes until p is updated."""
        if not self.release:
            return 0
        wide, casts = self.added(p)
        return wide + max(casts, self.scratch * flushes if p.scratch is None else p.scratch)

    def added(self, p: Sizes) -> tuple[int, int]:
        """Return the bytes of p's sum with its last gradient, and of temporaries for it.

        On CPU, an operand of another dtype is copied.
        """
        if self.buffer is None:
            return 0, 0
        wide = torch.promote_types(self.dtype, self.buffer)
        casts = int(self.device != "cuda" and self.buffer != self.dtype)
        if self.backwards > 2 and self.buffer != wide:
            casts *= 2  # as the sum itself, when a gradient is added to it
        own = 0 if wide == self.dtype else wide.itemsize
        return p.numel * own, p.numel * casts * wide.itemsize


class Peak(NamedTuple):
    """Bytes at the worst moment of a step, without parameters and state."""

    gradients: int
    activations: int | None  # None: unknown
    scratch: int
    phase: str

    @property
    def total(self) -> int:
        """The sum of all parts in bytes."""
        return self.gradients + (self.activations or 0) + self.scratch


def peak_of(found: Activations | None, params: Sequence[Sizes], how: Handling) -> Peak:
    """Return the peak of a step that begins with optimizer state."""
    moments = found.moments if found else unordered(params)
    batch = found.batch if found else 0
    used = {i for m in moments for i in m.params}
    if unused := [i for i in range(len(params)) if i not in used]:  # at any time
        moments = [Moment(params=unused), *moments, Moment(params=unused)]
    first = {i: k for k, m in reversed([*enumerate(moments)]) for i in m.params}
    waiting, flushes = _waiting(params, how) if how.release else (0, False)
    gradients = how.sums(params) + waiting
    sizes = [m.saved for m in moments if m.saved]
    saved, left, again = sum(sizes), len(sizes), 0
    alive: set[int] = set()
    peak = Peak(gradients, batch + saved, 0, "backward")
    for k, m in reversed([*enumerate(moments)]):
        again += m.again
        gradients += sum(params[i].bytes for i in m.params if i not in alive)
        alive |= {*m.params}
        complete = [params[i] for i in m.params if first[i] == k]
        # Two gradients of a tied weight are added into a third tensor.
        shares = sum(2 * p.bytes for p in complete if p.uses > 1)
        other = batch + saved + max(again, gradients_of(sizes, max(left - 1, 0)))
        scratch = max([how.updated(p, flushes) for p in complete], default=0)
        now = Peak(gradients + shares, other, scratch, "backward")
        peak = max(peak, now, key=lambda x: x.total)
        if how.release or how.backwards > 1:
            gradients -= sum(p.bytes for p in complete)
        if how.release:
            gradients -= how.sums(complete)
        if m.saved is not None:  # outside of checkpoints
            saved, left, again = saved - m.saved, left - bool(m.saved), 0
    end = Peak(gradients, batch, how.scratch, "backward" if how.release else "step")
    peak = max(peak, end, key=lambda x: x.total)
    return peak if found else peak._replace(activations=None)


def _waiting(params: Sequence[Sizes], how: Handling) -> tuple[int, bool]:
    """Return the memory of small gradients that wait, and True if they fill it."""
    small = [p for p in reversed(params) if p.scratch is None]
    least = min(PENDING_BYTES, sum(p.bytes for p in small))
    size = waits = 0
    flushes = False
    for p in small:
        wide, _ = how.added(p)
        size = staging_size(size, waits + (wide or p.bytes), least)
        waits += aligned(wide or p.bytes)
        if waits > PENDING_BYTES:
            waits, flushes = 0, True
    if how.device == "cuda":  # they wait in memory of their own
        size = min(size, PENDING_BYTES + max([p.bytes for p in small], default=0))
    return size, flushes


def unordered(params: Sequence[Sizes]) -> list[Moment]:
    """Return the moments of a model whose forward is unknown.

    A parameter with several names has a gradient throughout, others one after the other.
    """
    shared = Moment(params=[i for i, p in enumerate(params) if p.uses > 1])
    alone = [Moment(params=[i]) for i, p in enumerate(params) if p.uses == 1]
    return [shared, *alone, shared]
