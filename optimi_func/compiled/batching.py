"""Which tensors share a launch, and how each reaches a kernel: as itself or gathered.

A large dense tensor is handed to the kernel as a flat alias of its own storage and written
in place. Small ones, and those whose memory order is not shared by gradient and state, are
concatenated, updated by one call of the same kernel and copied back.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from optimi_func._leaf import compute_dtype, leaf_step, whole_mean
from optimi_func._types import Rule
from optimi_func.compiled.foreach import plan_foreach
from optimi_func.compiled.jobs import Job, chunks, flatten, foreach_copy_, unflatten
from optimi_func.compiled.kernel import (
    Kernel,
    Key,
    ambient,
    flat_leaf,
    job_key,
    kernel,
)

# Below this many elements a kernel call costs more than copying there and back.
SMALL = 1 << 13
# Elements gathered at once, which bounds the scratch memory.
CHUNK = 1 << 20


# One call that updates some jobs, with everything it needs; nothing happens before it.
Launch: TypeAlias = Callable[[], None]


def plan_eager(rule: Rule[Any, Any, Any], jobs: Iterable[Job], write: bool) -> list[Launch]:
    """The pipeline op by op, a leaf at a time."""
    return [partial(_run_eager, rule, job, write) for job in jobs]


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
    small: list[Job] = []
    for job in jobs:
        count = job.leaf.p.numel()
        if count < SMALL:
            small += [job] if count else []
        elif _agree(job):
            key = _key(rule, job, write, job.into is job.leaf)
            values = job.numbers.packed(compute_dtype(*key.dtypes), key.device)
            run = kernel(key, job.numbers.spec)
            launches.append(partial(_run_direct, run, values, job))
        else:
            launches += _plan_gathered(rule, [job], write)
    if rule.per_tensor:
        # Each needs a mean of its own, which a concatenation does not have.
        return launches + plan_foreach(rule, small, write)
    return launches + _plan_gathered(rule, small, write)


def _plan_gathered(rule: Rule[Any, Any, Any], jobs: list[Job], write: bool) -> list[Launch]:
    launches: list[Launch] = []
    buckets: dict[tuple[Key, int], list[Job]] = {}
    for job in jobs:
        key = _key(rule, job, write, True)
        buckets.setdefault((key, id(job.numbers)), []).append(job)
    for (key, _), bucket in buckets.items():
        for chunk in chunks(bucket, CHUNK):
            if sum(job.leaf.p.numel() for job in chunk) < 2:
                # Length 1 would specialise the graph.
                launches += plan_eager(rule, chunk, write)
                continue
            numbers = chunk[0].numbers
            values = numbers.packed(compute_dtype(*key.dtypes), key.device)
            run = kernel(key, numbers.spec)
            launches.append(partial(_run_gathered, run, values, chunk, write))
    return launches


def run_launches(launches: Iterable[Launch], device: torch.device) -> None:
    """Write every job's result."""
    with ambient(device):
        for launch in launches:
            launch()


def _key(rule: Rule[Any, Any, Any], job: Job, write: bool, in_place: bool) -> Key:
    return job_key(rule, job.leaf, job.g, job.numbers, write, in_place)


def _run_eager(rule: Rule[Any, Any, Any], job: Job, write: bool) -> None:
    scalars = job.numbers.scalars
    new = leaf_step(rule, job.leaf, job.g, scalars, write, whole_mean)
    for target, result in zip(flat_leaf(job.into), flat_leaf(new)):
        if result is not target:
            target.copy_(result)


def _run_direct(run: Kernel, values: Tensor, job: Job) -> None:
    p, *state = flat_leaf(job.leaf)
    targets = [] if job.into is job.leaf else flat_leaf(job.into)
    run(values, *(_alias(x) for x in (p, job.g.resolve_neg(), *state, *targets)))
    # The kernel wrote through aliases, which autograd does not see: a backward that
    # saved one of these must still raise.
    written = targets or [p, *state]
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


def _run_gathered(run: Kernel, values: Tensor, jobs: list[Job], write: bool) -> None:
    p, *state = (list(role) for role in zip(*(flat_leaf(job.leaf) for job in jobs)))
    scratch = [flatten(role) for role in (p, [job.g for job in jobs], *state)]
    run(values, *scratch)
    fields = len(jobs[0].leaf.state)
    targets = zip(*(flat_leaf(job.into) for job in jobs))
    for i, (role, flat) in enumerate(zip(targets, [scratch[0], *scratch[2:]])):
        if write or 0 < i <= fields:
            foreach_copy_(list(role), unflatten(flat, p))


def _alias(x: Tensor) -> Tensor:
    # Not a view: guards look at a view's base, and would make a graph for each rank.
    # Always an object of its own: guards tell when two arguments are one.
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
