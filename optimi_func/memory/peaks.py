"""The peak of a recipe: the events of a forward and backward, with its gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from optimi_func.gradient_release.backward import PENDING_BYTES, aligned, staging_size
from optimi_func.memory.activations import Trace
from optimi_func.memory.counting import Event, rounded


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


def peak_of(traced: Trace | None, params: Sequence[Sizes], how: Handling) -> Peak:
    """Return the peak of a step that begins with optimizer state."""
    events = traced.events if traced else without_activations(params, how.device)
    begin = traced.backward if traced else 0
    owners = {e.block for e in events if e.param >= 0}
    waiting, flushes = _waiting(params, how) if how.release else (0, False)
    gradients, other = how.sums(params) + waiting, 0
    peak = Peak(gradients, other, 0, "forward")
    for i, e in enumerate(events):
        scratch = 0
        if e.param >= 0 and how.release:
            p = params[e.param]
            wide, casts = how.added(p)
            update = how.scratch * flushes if p.scratch is None else p.scratch
            scratch = wide + max(casts, update)
        elif e.block not in owners:
            other += e.bytes
        elif e.bytes > 0 or how.release or how.backwards > 1:
            gradients += e.bytes
        now = Peak(gradients, other, scratch, "forward" if i < begin else "backward")
        peak = max(peak, now, key=lambda x: x.total)
        if e.param >= 0 and how.release:  # its sum is freed
            gradients -= how.sums([params[e.param]])
    end = Peak(gradients, other, how.scratch, "backward" if how.release else "step")
    peak = max(peak, end, key=lambda x: x.total)
    if traced is None:  # all blocks belong to gradients
        peak = peak._replace(gradients=peak.gradients + (peak.activations or 0))
        peak = peak._replace(activations=None)
    return peak


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


def without_activations(params: Sequence[Sizes], device: str) -> list[Event]:
    """Return the events of a backward that are certain without a trace.

    A parameter with several names has a gradient from its first use to its last, where a
    second one is added into new memory. Other gradients exist one at a time.
    """
    sizes = [rounded(p.bytes, device) for p in params]
    shared = [i for i, p in enumerate(params) if p.uses > 1]
    events = [Event(sizes[i], -i - 1) for i in shared]
    for i in reversed([i for i, p in enumerate(params) if p.uses == 1]):
        events += [Event(sizes[i], i), Event(0, i, i), Event(-sizes[i], i)]
    for i in shared:
        last = len(params) + i
        events += [Event(sizes[i], last), Event(sizes[i], i)]
        events += [Event(-sizes[i], -i - 1), Event(-sizes[i], last)]
        events += [Event(0, i, i), Event(-sizes[i], i)]
    return events
