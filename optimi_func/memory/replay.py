"""The peak memory of a recipe, from the events of one forward and backward.

All recipes of a dtype share the events. A replay adds what differs between recipes: the
lifetime of gradients, gradients that wait for an update, sums, and temporaries of updates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from optimi_func.core.lists import chunks
from optimi_func.core.program import TOGETHER
from optimi_func.execution.executors import SMALL
from optimi_func.execution.wholes import BATCHED, ELEMENTS
from optimi_func.gradient_release.backward import PENDING_BYTES, aligned, staging_size
from optimi_func.memory.kept import rounded
from optimi_func.memory.trace import Event, Trace, most_alive


class Param(NamedTuple):
    """The sizes of a parameter that requires a gradient."""

    numel: int
    bytes: int  # in this process; its gradient has as many
    scratch: int  # temporaries of its update
    uses: int  # number of names that the model has for it
    # Those of its temporaries that are held together with others', as the direction that a
    # map takes. If they are more than its own, it is joined with others.
    direction: int


class Handling:
    """The treatment of gradients in a recipe."""

    def __init__(
        self,
        release: bool,
        backwards: int,  # that make a step
        device: str,
        dtype: torch.dtype,  # of gradients
        buffer: torch.dtype | None,  # the dtype of sums that a release keeps, if any
    ) -> None:
        self.release, self.backwards, self.device = release, backwards, device
        wide = dtype if buffer is None else torch.promote_types(dtype, buffer)
        # On CPU, each operand of another dtype is cast in memory of its own.
        casts = 0 if device == "cuda" or buffer in (None, dtype) else wide.itemsize
        # Bytes per element:
        self.sum_bytes = 0 if buffer is None else buffer.itemsize
        # in last gradient + sum, if that needs memory of its own
        self.wide_bytes = 0 if wide == dtype else wide.itemsize
        # in temporaries while a gradient is added to the sum, and the sum to the last one
        self.adding_bytes = casts if buffer == wide else 2 * casts
        self.joining_bytes = casts


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


def peak_of(traced: Trace | None, params: Sequence[Param], handling: Handling) -> Peak:
    """Return the peak of a step that begins with optimizer state."""
    events = _without_activations(params) if traced is None else traced.events
    events = [e._replace(bytes=rounded(e.bytes, handling.device)) for e in events]
    sums = sum(p.numel for p in params) * handling.sum_bytes
    if handling.release:
        last = _Run(params, handling, sums)
        last.play(events, keep=False, update=True)
    else:
        # If several backwards accumulate, all gradients exist when the last one begins.
        keep = handling.backwards == 1
        last = _Run(params, handling, 0 if keep else sum(p.bytes for p in params))
        last.play(events, keep, update=False)
        last.look("step", _temporaries(params, handling.device))
    peaks = [last.peak]
    if handling.release and handling.backwards > 2:
        # The first backward has no sums yet, so the second one counts.
        between = _Run(params, handling, sums)
        between.play(events, keep=False, update=False)
        peaks.append(between.peak)
    peak = max(peaks, key=lambda peak: peak.total)
    # The staging buffer stays from step to step, once it has its size.
    gradients, activations = peak.gradients + last.staging, peak.activations
    if traced is None:  # all blocks belong to gradients
        gradients, activations = gradients + (activations or 0), None
    return peak._replace(gradients=gradients, activations=activations)


class _Run:
    """The bytes that are alive in the course of one backward."""

    def __init__(self, params: Sequence[Param], handling: Handling, gradients: int) -> None:
        self._params, self._handling = params, handling
        self._gradients, self._activations = gradients, 0
        self._phase = "forward"
        self._waiting: list[Param] = []  # small ones, whose gradients are complete
        self._waiting_bytes = 0
        self._held: dict[int, int] = {}  # blocks that waiting gradients keep alive
        small = sum(p.bytes for p in params if p.numel < SMALL)
        self._least = min(PENDING_BYTES, small)
        self.staging = 0  # bytes of the buffer in which small gradients wait on CPU
        self.peak = Peak(gradients, 0, 0, "forward")

    def look(self, phase: str, scratch: int = 0) -> None:
        """Make this moment the peak if no earlier one had as much."""
        total = self._gradients + self._activations + scratch
        if total > self.peak.total:
            self.peak = Peak(self._gradients, self._activations, scratch, phase)

    def play(self, events: Sequence[Event], keep: bool, update: bool) -> None:
        """Replay a forward and backward that keeps gradients, or updates with them."""
        owners = {e.block for e in events if e.kind == "done"}
        for e in events:
            if e.kind == "backward":
                self._phase = "backward"
            elif e.kind == "done" and update:
                self._arrive(e)
            elif e.kind == "done":
                adding = self._params[e.param].numel * self._handling.adding_bytes
                self.look("backward", adding)
            elif e.block not in owners:
                self._activations += e.bytes if e.kind == "taken" else -e.bytes
            elif e.kind == "taken":
                self._gradients += e.bytes
            elif e.block in self._held:
                self._held[e.block] = e.bytes
            elif not keep:
                self._gradients -= e.bytes
            self.look(self._phase)
        if update:
            self._flush()

    def _arrive(self, e: Event) -> None:
        """Update the parameter of a complete gradient, or let a small one wait."""
        p, handling = self._params[e.param], self._handling
        wide = p.numel * handling.wide_bytes
        self.look("backward", wide + p.numel * handling.joining_bytes)
        if p.numel >= SMALL:
            self.look("backward", wide + p.scratch)
            self._gradients -= p.numel * handling.sum_bytes
            return
        size = wide or p.bytes
        if handling.device == "cuda":
            # Gradients wait in their own blocks.
            self._gradients += wide
            self._held[-2 - e.param if wide else e.block] = wide
        else:
            needed = self._waiting_bytes + size
            self.staging = staging_size(self.staging, needed, self._least)
        self._waiting.append(p)
        self._waiting_bytes += aligned(size)
        if self._waiting_bytes > PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        self.look("backward", _temporaries(self._waiting, self._handling.device))
        self._gradients -= sum(p.numel for p in self._waiting) * self._handling.sum_bytes
        self._gradients -= sum(self._held.values())
        self._held.clear()
        self._waiting.clear()
        self._waiting_bytes = 0


def _temporaries(params: Sequence[Param], device: str) -> int:
    """Return the most bytes of temporaries while these parameters are updated together."""
    most = max([p.scratch for p in params], default=0)
    joined = [p for p in params if p.direction > p.scratch]
    for batch in chunks(joined, TOGETHER, lambda p: p.numel) if len(joined) > 1 else ():
        most = max(most, sum([p.direction for p in batch]))
    whole = [p for p in params if 0 < p.direction <= p.scratch]
    # CUDA maps those of one shape at once: they count as if all had one.
    size, join = (BATCHED, sum) if device == "cuda" else (ELEMENTS, max)
    for batch in chunks(whole, size, lambda p: p.numel) if whole else ():
        mapped = join([p.scratch - p.direction for p in batch])
        most = max(most, mapped + sum([p.direction for p in batch]))
    return most


def _without_activations(params: Sequence[Param]) -> list[Event]:
    """Return the events of a backward that are certain without a trace.

    A parameter with several names has a gradient from its first use to its last, where a
    second one is added into new memory. Other gradients exist one at a time.
    """
    events = [Event("backward")]
    shared = [i for i, p in enumerate(params) if p.uses > 1]
    events += [Event("taken", i, params[i].bytes) for i in shared]
    for i, p in reversed(list(enumerate(params))):
        if p.uses == 1:
            kinds = Event("taken", i, p.bytes), Event("done", i, p.bytes, i)
            events += [*kinds, Event("freed", i, p.bytes)]
    for i in shared:
        size, last, total = params[i].bytes, len(params) + 2 * i, len(params) + 2 * i + 1
        events += [Event("taken", block, size) for block in (last, total)]
        events += [Event("freed", block, size) for block in (i, last)]
        events += [Event("done", total, size, i), Event("freed", total, size)]
    return events


# One process, if fully_shard divides the model. The bytes that it gathers are a guess.


def largest_unit(model: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the largest block, and of all parameters in no block.

    Blocks are the members of lists and sequences. fully_shard is usually applied to each of
    them, and last to the model.
    """
    units = [*_blocks(model), model]
    *blocks, whole = [sum(p.numel() for p in unit.parameters()) for unit in units]
    rest = max(0, whole - sum(blocks))
    return max(blocks, default=0) * dtype.itemsize, rest * dtype.itemsize


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return list(module.children())
    return [block for child in module.children() for block in _blocks(child)]


def sharded_peak(
    traced: Trace | None,
    params: Sequence[Param],
    handling: Handling,
    unit: tuple[int, int],
    ranks: int,
) -> Peak:
    """Return the peak in one of `ranks` processes; `unit` is from `largest_unit`."""
    block, rest = unit
    # Two blocks with their gradients are whole, the running and the prefetched one.
    # Parameters in no block are whole from forward to the end of backward.
    gathered = 2 * (2 * block + rest)
    gradients = sum(p.bytes for p in params)
    if handling.release:
        # Gradients are reduced and released block by block.
        sums = sum(p.numel for p in params) * handling.sum_bytes
        gradients = sums + max(block, rest) // ranks
    scratch = gathered + max((p.scratch for p in params), default=0)
    activations = None
    if traced is not None:
        owners = {e.block for e in traced.events if e.kind == "done"}
        activations = most_alive(e for e in traced.events if e.block not in owners)
    return Peak(gradients, activations, scratch, "backward")
