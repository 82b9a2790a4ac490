"""From what a forward and backward take to the most that is alive at once, by recipe.

The same events serve every recipe of a dtype: how long gradients stay, what waits, what
sums are kept and what an update needs beside its tensors are added here.
"""

from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import NamedTuple

from optimi_func.execution.executors import SMALL
from optimi_func.gradient_release import PENDING_BYTES
from optimi_func.gradient_release.backward import ALIGNMENT
from optimi_func.memory.trace import Event


class Param(NamedTuple):
    """What counts of a trained parameter."""

    numel: int
    bytes: int  # of it and of its gradient, here
    scratch: int  # temporaries of its update, beside its gradient
    uses: int = 1  # by how many names the model has it


class How(NamedTuple):
    """What becomes of gradients."""

    release: bool
    backwards: int = 1  # that make a step
    sum_bytes: int = 0  # an element of the sum that a release keeps, if any
    wide_bytes: int = 0  # an element of what the last gradient and its sum become, if new
    # On CPU an operation on two dtypes casts in memory of its own: an element of these.
    adding_bytes: int = 0  # while a gradient joins the sum
    joining_bytes: int = 0  # while the sum joins the last gradient
    cuda: bool = False


class Peak(NamedTuple):
    """What is alive beside parameters and state where the most is."""

    gradients: int
    activations: int
    scratch: int
    phase: str

    @property
    def total(self) -> int:
        """All together."""
        return self.gradients + self.activations + self.scratch


def peak_of(events: Sequence[Event], params: Sequence[Param], how: How) -> Peak:
    """The most that a training step with state has at once, beside parameters and state."""
    runs: list[_Run] = []
    everything = sum(p.bytes for p in params)
    if not how.release:
        # Where backwards accumulate, the gradients are there when the last one begins.
        run = _Run(params, how, everything if how.backwards > 1 else 0)
        run.play(events, keep=how.backwards == 1, update=False)
        run.look("step", max((p.scratch for p in params), default=0))
        runs.append(run)
    elif how.backwards == 1:
        run = _Run(params, how, _staged(events, params, how))
        run.play(events, keep=False, update=True)
        runs.append(run)
    else:
        sums = sum(p.numel for p in params) * how.sum_bytes
        staged = _staged(events, params, how)
        # The last backward, and one between, if there is: the first begins without sums.
        for update in (True,) if how.backwards == 2 else (True, False):
            run = _Run(params, how, staged + sums)
            run.play(events, keep=False, update=update)
            runs.append(run)
    return max([run.peak for run in runs], key=lambda peak: peak.total)


class _Run:
    """What is alive in the course of one backward."""

    def __init__(self, params: Sequence[Param], how: How, gradients: int) -> None:
        self._params, self._how = params, how
        self._gradients, self._activations = gradients, 0
        self._phase = "forward"
        self._waiting: list[int] = []  # small parameters
        self._waiting_bytes = 0
        self._held: dict[int, int] = {}  # blocks of gradients that wait where they are
        self.peak = Peak(gradients, 0, 0, "forward")

    def look(self, phase: str, scratch: int = 0) -> None:
        """Remember this moment if no other had as much."""
        total = self._gradients + self._activations + scratch
        if total > self.peak.total:
            self.peak = Peak(self._gradients, self._activations, scratch, phase)

    def play(self, events: Sequence[Event], keep: bool, update: bool) -> None:
        """Follow a forward and backward.

        Args:
            events: What they do.
            keep: Whether gradients stay.
            update: Whether parameters are updated as soon as their gradients are complete.
        """
        owners = {e.block: e.param for e in events if e.kind == "done"}
        for e in events:
            if e.kind == "backward":
                self._phase = "backward"
            elif e.kind == "done":
                if update:
                    self._arrive(e)
                else:
                    adding = self._params[e.param].numel * self._how.adding_bytes
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
        """A gradient is complete: its parameter is updated, or waits with small ones."""
        p, how = self._params[e.param], self._how
        wide = p.numel * how.wide_bytes  # the sum, where it cannot be made in the gradient
        self.look("backward", wide + p.numel * how.joining_bytes)
        if p.numel >= SMALL:
            self.look("backward", wide + p.scratch)
            self._gradients -= p.numel * how.sum_bytes
            return
        self._waiting.append(e.param)
        if how.cuda and wide:
            self._gradients += wide
            self._held[-2 - e.param] = wide
        elif how.cuda:
            self._held[e.block] = 0
        self._waiting_bytes += _aligned(wide or p.bytes)
        if self._waiting_bytes > PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Update what waits."""
        params = [self._params[i] for i in self._waiting]
        self.look("backward", max((p.scratch for p in params), default=0))
        self._gradients -= sum(p.numel for p in params) * self._how.sum_bytes
        self._gradients -= sum(self._held.values())
        self._held.clear()
        self._waiting.clear()
        self._waiting_bytes = 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _staged(events: Sequence[Event], params: Sequence[Param], how: How) -> int:
    """Bytes that a release on CPU sets aside for small gradients that wait."""
    if how.cuda:
        return 0
    small = sum(p.bytes for p in params if p.numel < SMALL)
    room = waiting = 0
    for e in events:
        p = params[e.param]
        if e.kind != "done" or p.numel >= SMALL:
            continue
        size = p.numel * how.wide_bytes or p.bytes
        if waiting + size > room:
            room = max(min(PENDING_BYTES, small), 2 * room, waiting + size)
        waiting += _aligned(size)
        waiting = 0 if waiting > PENDING_BYTES else waiting
    return room


def without_activations(params: Sequence[Param]) -> list[Event]:
    """A backward of which nothing is known but the parameters.

    The gradient of one that the model has by several names is there from the first use to
    the last, and joins that in new memory; the others come one after the other, the last
    parameter's first.
    """
    events = [Event("backward")]
    blocks = count(len(params))
    shared = [i for i, p in enumerate(params) if p.uses > 1]
    events += [Event("taken", i, params[i].bytes) for i in shared]
    for i in reversed(range(len(params))):
        size = params[i].bytes
        if params[i].uses == 1:
            events += [Event("taken", i, size), Event("done", i, size, i)]
            events.append(Event("freed", i, size))
    for i in shared:
        size, (last, both) = params[i].bytes, islice(blocks, 2)
        events += [Event("taken", block, size) for block in (last, both)]
        events += [Event("freed", block, size) for block in (i, last)]
        events += [Event("done", both, size, i), Event("freed", both, size)]
    return events


def rounded_events(events: Sequence[Event], round_up: Callable[[int], int]) -> list[Event]:
    """The same with sizes as a device's allocator has them."""
    return [e._replace(bytes=round_up(e.bytes)) for e in events]
