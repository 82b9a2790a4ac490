"""Which tensors share a launch, and how each reaches a kernel: as itself or gathered.

A large dense tensor is handed to the kernel as a flat alias of its own storage and written
in place. Small ones, and those whose memory order is not shared by gradient and state, are
concatenated, updated by one call of the same kernel and copied back.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func._leaf import compute_dtype, leaf_step, whole_mean
from optimi_func._types import Leaf, Rule
from optimi_func.compiled.kernel import Key, Kernel, Numbers, ambient, flat_leaf, kernel

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


class _Launch(NamedTuple):
    run: Kernel | None  # None: too short for a kernel, run the pipeline as it is
    values: Tensor | None
    jobs: list[Job]
    gathered: bool


def update(
    rule: Rule[Any, Any, Any], jobs: Iterable[Job], write: bool, compile: bool
) -> None:
    """Run every job. Nothing is written before all kernels are there.

    Args:
        rule: The mathematics.
        jobs: What to update.
        write: False moves the state alone.
        compile: Through kernels, or the pipeline op by op.

    Raises:
        Exception: Whatever the compiler raised, before the first write.
    """
    jobs = [job for job in jobs if job.leaf.p.numel() > 0]
    if not jobs:
        return
    with ambient(jobs[0].leaf.p.device):
        launches = _plan(rule, jobs, write) if compile else [_eager(jobs)]
        for launch in launches:
            _run(rule, launch, write)


def _eager(jobs: list[Job]) -> _Launch:
    return _Launch(None, None, jobs, False)


def _plan(rule: Rule[Any, Any, Any], jobs: list[Job], write: bool) -> list[_Launch]:
    launches: list[_Launch] = []
    gathered: dict[tuple[Key, int, bool], list[Job]] = {}
    for job in jobs:
        count = job.leaf.p.numel()
        in_place = job.into is job.leaf
        if (count >= SMALL or (rule.per_tensor and count > 1)) and _agree(job):
            launches.append(_launch(_key(rule, job, write, in_place), [job], False))
            continue
        key = _key(rule, job, write, True)
        alone = count >= CHUNK or rule.per_tensor
        place = (key, id(job) if alone else id(job.numbers), in_place)
        gathered.setdefault(place, []).append(job)
    for (key, _, _), bucket in gathered.items():
        launches.extend(_launch(key, chunk, True) for chunk in _chunks(bucket))
    return launches


def _chunks(jobs: list[Job]) -> Iterable[list[Job]]:
    chunk: list[Job] = []
    total = 0
    for job in jobs:
        count = job.leaf.p.numel()
        if chunk and total + count > CHUNK:
            yield chunk
            chunk, total = [], 0
        chunk.append(job)
        total += count
    yield chunk


def _key(
    rule: Rule[Any, Any, Any], job: Job, write: bool, in_place: bool
) -> Key:
    leaf = job.leaf
    dtypes = [leaf.p.dtype, job.g.dtype, *(s.dtype for s in leaf.state)]
    if leaf.comp is not None:
        dtypes.append(leaf.comp.dtype)
    statics = job.numbers.statics
    return Key(rule, statics, write, in_place, tuple(dtypes), leaf.p.device)


def _launch(key: Key, jobs: list[Job], gathered: bool) -> _Launch:
    if sum(job.leaf.p.numel() for job in jobs) < 2:
        # Length 1 would specialise the graph.
        return _eager(jobs)
    numbers = jobs[0].numbers
    values = numbers.packed(compute_dtype(*key.dtypes), key.device)
    return _Launch(kernel(key, numbers.spec), values, jobs, gathered)


def _run(rule: Rule[Any, Any, Any], launch: _Launch, write: bool) -> None:
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
