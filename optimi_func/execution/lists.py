"""Launches of one kernel over a list of leaves, which a later step can repeat."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func._leaf import compute_dtype
from optimi_func.execution.jobs import Bundle, Job, bump_versions
from optimi_func.execution.kernel import Numbers, TwoPasses
from optimi_func.execution.loop import PIECE, Sweep

Table: TypeAlias = "array[int]"
# Of each role, p first, a tensor for each leaf.
Roles: TypeAlias = list[list[Tensor]]


class LeafList:
    """Leaves that share a kernel, and all that is the same at each of its launches.

    Addresses and lengths, but no tensor: those come with each launch.
    """

    def __init__(self, run: Sweep | TwoPasses, jobs: list[Job], write: bool) -> None:
        first = jobs[0]
        self.sources = [job.source for job in jobs]
        in_place = first.into is first.source
        p, *rest = _columns(self.sources)
        self._p, self._rest = p, _joined(rest)
        if not in_place:
            self._rest += _joined(_columns([job.into for job in jobs]))
        self._lengths = array("q", [job.numel for job in jobs])
        self._dtype = compute_dtype(first.g.dtype, *first.source.dtypes)
        # The roles that the kernel writes.
        self._written = slice(0, None) if write else slice(1, 1 + first.source.fields)
        moved = chain.from_iterable(job.into.tensors for job in jobs)
        self._inference = any(map(Tensor.is_inference, moved))
        self._means: _Means | None = None
        if isinstance(run, TwoPasses):
            assert isinstance(run.measure, Sweep) and isinstance(run.move, Sweep)
            self._means, run = _Means(run.measure, self._lengths), run.move
            # Parameter and compensation are of the gradient's dtype: see `means`.
            ends = first.source.dtypes[0], first.source.dtypes[-first.source.compensated]
            self._alike = set(ends) == {first.g.dtype}
        self._run = run

    def launch(
        self,
        targets: Roles,
        grads: list[Tensor],
        numbers: Numbers,
        ok: Tensor | None,
        given: Sequence[Tensor] | None,
    ) -> "ListLaunch":
        """An update of all of them.

        Args:
            targets: What is written, of each role a tensor for each leaf.
            grads: Of each the gradient.
            numbers: Of this step.
            ok: 0-d bool; where it is false nothing changes.
            given: Of each the mean that the rule takes, where that is known by then.
        """
        values = with_ok(numbers.packed(self._dtype, grads[0].device), ok)
        l2 = numbers.scalars.rates.l2
        decays = isinstance(l2, Tensor) or l2 != 0
        return ListLaunch(self, targets[self._written], grads, values, decays, given)

    def move(self, launch: "ListLaunch") -> None:
        """Run a launch."""
        g = array("q", map(Tensor.data_ptr, launch.grads))
        table = self._p + g + self._rest
        if self._means is None:
            self._run.run(launch.values, table, self._lengths)
        else:
            given = launch.given
            means = torch.stack([*given]) if given else self.means(g, launch)
            self._run.run(_rows(launch.values, means), table, self._lengths, "row")
        for moved in launch.written:
            bump_versions(moved, self._inference)

    def means(self, g: Table, launch: "ListLaunch") -> Tensor:
        """Of each leaf the mean that the rule takes, measured."""
        assert self._means is not None
        p, rest = self._p, self._rest
        if self._alike and not launch.decays:
            # Without decay in the gradient parameters count for nothing (0 * x): reading
            # gradients in their place costs no memory's time.
            p = g
            fields = self.sources[0].fields * len(g)
            rest = rest[:fields] + g + rest[fields + len(g) :]
        return self._means.measure(launch.values, p + g + rest)


class _Means:
    """Means of tensors, each the same wherever it stands and by however many threads."""

    def __init__(self, sweep: Sweep, lengths: Table) -> None:
        self._sweep, self._lengths = sweep, lengths
        # Of each piece the row, and its share of that.
        starts = [(i, start) for i, n in enumerate(lengths) for start in range(0, n, PIECE)]
        microbatches = [min(PIECE, lengths[i] - start) / lengths[i] for i, start in starts]
        self._pieces = len(starts)
        if self._pieces > len(lengths):
            # Whatever device the user's own tensors are made on by default.
            self._rows = torch.tensor([i for i, _ in starts], device="cpu")
            self._shares = torch.tensor(microbatches, dtype=torch.float64, device="cpu")

    def measure(self, values: Tensor, table: Table) -> Tensor:
        """The mean of each row."""
        own = _rows(values, values.new_zeros(self._pieces))
        self._sweep.run(own, table, self._lengths, "piece")
        found = own[:, -1]
        if self._pieces == len(self._lengths):
            return found
        sums = torch.zeros(len(self._lengths), dtype=torch.float64, device="cpu")
        return sums.index_add_(0, self._rows, found * self._shares)


class ListLaunch(NamedTuple):
    """One update of a list."""

    leaves: LeafList
    written: Roles
    grads: list[Tensor]
    values: Tensor  # the numbers
    decays: bool  # whether any decay may be in the gradient
    given: Sequence[Tensor] | None

    def __call__(self) -> None:
        """Run it."""
        self.leaves.move(self)

    def measure(self) -> None:
        """Write the mean of what lies here of each leaf into `given`."""
        g = array("q", map(Tensor.data_ptr, self.grads))
        for target, mean in zip(self.given or (), self.leaves.means(g, self)):
            target.copy_(mean)


def list_launch(run: Sweep | TwoPasses, jobs: list[Job], write: bool) -> ListLaunch:
    """The update of jobs that share kernel, numbers and ok."""
    given = [job.given for job in jobs if job.given is not None]
    grads, first = [job.g for job in jobs], jobs[0]
    targets = list(map(list, zip(*[job.into.tensors for job in jobs])))
    return LeafList(run, jobs, write).launch(targets, grads, first.numbers, first.ok, given)


def split_aliasing(jobs: list[Job]) -> Iterator[list[Job]]:
    """Runs of jobs that write to different memory: tied weights take turns."""
    ranges = sorted(chain.from_iterable(map(_written, jobs)))
    if all(end <= start for (_, end), (start, _) in pairwise(ranges)):
        yield jobs
        return
    run: list[Job] = []
    taken: list[tuple[int, int]] = []
    for job in jobs:
        if any(_meets(taken, start, end) for start, end in _written(job)):
            yield run
            run, taken = [], []
        run.append(job)
        for one in _written(job):
            insort(taken, one)
    yield run


def _written(job: Job) -> list[tuple[int, int]]:
    """Where each tensor that may be written begins and ends."""
    places = zip(job.into.pointers, job.into.dtypes)
    return [(start, start + job.numel * dtype.itemsize) for start, dtype in places]


def _meets(taken: list[tuple[int, int]], start: int, end: int) -> bool:
    i = bisect_left(taken, (start, end))
    after = i < len(taken) and taken[i][0] < end
    return after or (i > 0 and taken[i - 1][1] > start)


def with_ok(values: Tensor, ok: Tensor | None) -> Tensor:
    """The numbers, and whether anything is to be written."""
    if ok is None:
        return values
    return torch.cat([values, ok.reshape(1).to(values.dtype)])


def _columns(bundles: list[Bundle]) -> list[Table]:
    """Of each role the addresses."""
    return [array("q", role) for role in zip(*[bundle.pointers for bundle in bundles])]


def _joined(columns: list[Table]) -> Table:
    return sum(columns, array("q"))


def _rows(values: Tensor, last: Tensor) -> Tensor:
    """For each of `last` the values, and it."""
    own = values.new_empty(len(last), len(values) + 1)
    own[:, :-1] = values
    own[:, -1] = last
    return own
