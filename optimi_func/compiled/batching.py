"""Which tensors share a launch, and how each reaches a kernel: as itself or gathered.

A large dense tensor is handed to the kernel as it is and written in place. Small ones,
and those whose memory order is not shared by gradient and state, are concatenated, updated
by one call of the same kernel and copied back.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from optimi_func._leaf import compute_dtype, leaf_step, whole_mean
from optimi_func._types import Rule
from optimi_func.compiled.direct import Flat
from optimi_func.compiled.foreach import plan_foreach
from optimi_func.compiled.jobs import (
    Job,
    chunks,
    flatten,
    foreach_copy_,
    unflatten,
)
from optimi_func.compiled.kernel import (
    ambient,
    job_key,
    kernel,
    write_back,
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
    gathered: list[Job] = []
    # Looked up once for all jobs that share their dtypes and numbers.
    found: dict[Any, tuple[Flat, Tensor]] = {}
    for job in jobs:
        if not job.is_plain():
            raise TypeError(
                "compiled steps take plain tensors, not "
                f"{type(job.source.leaf.p).__name__} with a gradient of "
                f"{type(job.g).__name__}: pass compile=False"
            )
        if job.g.is_neg():
            job = job._replace(g=job.g.resolve_neg())  # kernels see memory, not signs
        source, g, numbers, into = job
        if source.numel < SMALL or not job.agrees():
            gathered += [job] if source.numel else []
            continue
        in_place = into is source
        kind = (source.dtypes, g.dtype, g.device, id(numbers), in_place)
        if kind not in found:
            found[kind] = _kernel(rule, job, write, in_place)
        launches.append(partial(_run_direct, *found[kind], job, write))
    if rule.per_tensor:
        # Each needs a mean of its own, which a concatenation does not have.
        return launches + plan_foreach(rule, gathered, write)
    buckets: dict[Any, list[Job]] = {}
    for job in gathered:
        kind = (job.source.dtypes, job.g.dtype, job.g.device, id(job.numbers))
        buckets.setdefault(kind, []).append(job)
    for bucket in buckets.values():
        for chunk in chunks(bucket, CHUNK):
            launches += _plan_gathered(rule, chunk, write)
    return launches


def _plan_gathered(rule: Rule[Any, Any, Any], jobs: list[Job], write: bool) -> list[Launch]:
    if sum(job.numel for job in jobs) < 2:
        # Length 1 would specialise the graph.
        return plan_eager(rule, jobs, write)
    run, values = _kernel(rule, jobs[0], write, True)
    return [partial(_run_gathered, run, values, jobs, write)]


def _kernel(
    rule: Rule[Any, Any, Any], job: Job, write: bool, in_place: bool
) -> tuple[Flat, Tensor]:
    key = job_key(rule, job.source.leaf, job.g, job.numbers, write, in_place)
    values = job.numbers.packed(compute_dtype(*key.dtypes), key.device)
    return kernel(key, job.numbers.spec), values


def run_launches(launches: Iterable[Launch], device: torch.device) -> None:
    """Write every job's result."""
    with ambient(device):
        for launch in launches:
            launch()


def _run_eager(rule: Rule[Any, Any, Any], job: Job, write: bool) -> None:
    leaf, scalars = job.source.leaf, job.numbers.scalars
    new = leaf_step(rule, leaf, job.g, scalars, write, whole_mean)
    write_back(job.into.tensors, new)


def _run_direct(run: Flat, values: Tensor, job: Job, write: bool) -> None:
    p, *state = job.source.tensors
    if job.into is job.source:
        fields = len(job.source.leaf.state)
        written = job.source.tensors if write else state[:fields]
        run(values, p, job.g, *state)
    else:
        written = job.into.tensors
        run(values, p, job.g, *state, *written)
    if p.is_inference():
        written = [x for x in written if not x.is_inference()]
    # Autograd has not seen the kernel write: a backward that saved one of these must
    # still raise.
    torch.autograd.graph.increment_version(written)


def _run_gathered(run: Flat, values: Tensor, jobs: list[Job], write: bool) -> None:
    p, *state = (list(role) for role in zip(*[job.source.tensors for job in jobs]))
    scratch = [flatten(role) for role in (p, [job.g for job in jobs], *state)]
    run(values, *scratch)
    fields = len(jobs[0].source.leaf.state)
    targets = zip(*[job.into.tensors for job in jobs])
    for i, (role, flat) in enumerate(zip(targets, [scratch[0], *scratch[2:]])):
        if write or 0 < i <= fields:
            foreach_copy_(list(role), unflatten(flat, p))
