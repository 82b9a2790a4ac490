"""Which tensors share a launch, and how each reaches a kernel: as itself or gathered.

A large dense tensor is handed to the kernel as a flat alias of its own storage and written
in place. Small ones, and those whose memory order is not shared by gradient and state, are
concatenated, updated by one call of the same kernel and copied back.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func._leaf import compute_dtype, leaf_step, whole_mean
from optimi_func._types import Leaf, Rule
from optimi_func.compiled.kernel import (
    Key,
    Kernel,
    Numbers,
    ambient,
    flat_leaf,
    job_key,
    kernel,
)

# Below this many elements a kernel call costs more than copying there and back.
SMALL = 1 << 13
# Elements gathered at once, which bounds the scratch memory.
CHUNK = 1 << 20


class Job(NamedTuple):
    """One leaf to update: read from `leaf`, write to `into` (itself, if in place)."""

    leaf: Leaf
    g: Tensor
    numbers: Numbers
    into: Leaf


class Launch(NamedTuple):
    """Jobs that share one call, and the call."""

    run: Kernel | None  # None: the pipeline as it is, op by op
    values: Tensor | None
    jobs: list[Job]
    gathered: bool


def plan_eager(jobs: Iterable[Job]) -> list[Launch]:
    """The pipeline op by op, a leaf at a time."""
    return [Launch(None, None, [job], False) for job in jobs]


def plan_compiled(
    rule: Rule[Any, Any, Any], jobs: Iterable[Job], write: bool
) -> list[Launch]:
    """Launches through kernels, all of them compiled by the time this returns.

    Args:
        rule: The mathematics.
        jobs: What to update.
        write: False moves the state alone.

    Raises:
        Exception: Whatever the compiler raised. Nothing has been written.
    """
    launches: list[Launch] = []
    gathered: dict[tuple[Key, int, bool], list[Job]] = {}
    for job in jobs:
        count = job.leaf.p.numel()
        if count == 0:
            continue
        in_place = job.into is job.leaf
        if (count >= SMALL or (rule.per_tensor and count > 1)) and _agree(job):
            launches.append(_launch(job_key(rule, job.leaf, job.g, job.numbers, write, in_place), [job], False))
            continue
        alone = count >= CHUNK or rule.per_tensor
        key = job_key(rule, job.leaf, job.g, job.numbers, write, True)
        place = (key, id(job) if alone else id(job.numbers), in_place)
        gathered.setdefault(place, []).append(job)
    for (key, _, _), bucket in gathered.items():
        launches.extend(_launch(key, chunk, True) for chunk in chunks(bucket, CHUNK))
    return launches


def run_launches(
    rule: Rule[Any, Any, Any], launches: Iterable[Launch], write: bool
) -> None:
    """Write every job's result."""
    for launch in launches:
        with ambient(launch.jobs[0].leaf.p.device):
            _run(rule, launch, write)


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


def _launch(key: Key, jobs: list[Job], gathered: bool) -> Launch:
    if sum(job.leaf.p.numel() for job in jobs) < 2:
        # Length 1 would specialise the graph.
        return Launch(None, None, jobs, False)
    numbers = jobs[0].numbers
    values = numbers.packed(compute_dtype(*key.dtypes), key.device)
    return Launch(kernel(key, numbers.spec), values, jobs, gathered)


def _run(rule: Rule[Any, Any, Any], launch: Launch, write: bool) -> None:
    if launch.run is None or launch.values is None:
        for job in launch.jobs:
            scalars = job.numbers.scalars
            new = leaf_step(rule, job.leaf, job.g, scalars, write, whole_mean)
            for target, result in zip(flat_leaf(job.into), flat_leaf(new)):
                if result is not target:
                    target.copy_(result)
    elif launch.gathered:
        _run_gathered(launch.run, launch.values, launch.jobs, write)
    else:
        (job,) = launch.jobs
        _run_direct(launch.run, launch.values, job)


def _run_direct(run: Kernel, values: Tensor, job: Job) -> None:
    p, *state = flat_leaf(job.leaf)
    targets = [] if job.into is job.leaf else flat_leaf(job.into)
    run(values, *(_alias(x) for x in (p, job.g, *state, *targets)))
    # The kernel wrote through aliases, which autograd does not see: a backward that
    # saved one of these must still raise.
    written = targets or [p, *state]
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


def _run_gathered(run: Kernel, values: Tensor, jobs: list[Job], write: bool) -> None:
    leaves = [flat_leaf(job.leaf) for job in jobs]
    p, *state = ([x.reshape(-1) for x in role] for role in zip(*leaves))
    g = [job.g.reshape(-1) for job in jobs]
    scratch = [torch.cat(role) for role in (p, g, *state)]
    run(values, *scratch)
    sizes = [job.leaf.p.numel() for job in jobs]
    fields = len(jobs[0].leaf.state)
    targets = zip(*(flat_leaf(job.into) for job in jobs))
    for i, (role, flat) in enumerate(zip(targets, [scratch[0], *scratch[2:]])):
        if write or 0 < i <= fields:
            pieces = [x.view(t.shape) for x, t in zip(flat.split(sizes), role)]
            foreach_copy_(list(role), pieces)


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source onto its target."""
    torch._foreach_copy_(targets, sources)


def _alias(x: Tensor) -> Tensor:
    # Not a view: guards look at a view's base, and would make a graph for each rank.
    if x.dim() == 1 and x.is_contiguous() and x._base is None and not x.requires_grad:
        return x
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset(), (x.numel(),), (1,))


def _agree(job: Job) -> bool:
    """Whether all tensors of the job fill their memory in one and the same order."""
    p = job.leaf.p
    others = [job.g, *flat_leaf(job.leaf)[1:]]
    if job.into is not job.leaf:
        others += flat_leaf(job.into)
    if p.is_contiguous():
        return all(x.is_contiguous() for x in others)
    return is_dense(p) and all(x.stride() == p.stride() for x in others)


def is_dense(x: Tensor) -> bool:
    """Whether x covers a range of memory without gaps or overlap, in any order."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
