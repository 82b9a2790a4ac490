"""Which tensors share a launch, and how each reaches a kernel: as itself or gathered.

A large dense tensor is handed to the kernel as it is and written in place. Small ones,
and those whose memory order is not shared by gradient and state, are concatenated, updated
by one call of the same kernel and copied back.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from optimi_func._leaf import compute_dtype, leaf_step
from optimi_func._types import Rule
from optimi_func.compiled.direct import Flat
from optimi_func.compiled.foreach import plan_measures, plan_moves
from optimi_func.compiled.jobs import (
    Job,
    chunks,
    flatten,
    foreach_copy_,
    unflatten,
)
from optimi_func.compiled.kernel import (
    DispatchModeError,
    TwoPasses,
    ambient,
    job_key,
    keep_unless,
    kernel,
    write_back,
)
from optimi_func.compiled.means import plan_over_shards

# Below this many elements a kernel call costs more than copying there and back.
SMALL = 1 << 13
# Elements gathered at once, which bounds the scratch memory.
CHUNK = 1 << 20


# One call that updates some jobs, with everything it needs; nothing happens before it.
Launch: TypeAlias = Callable[[], None]


def plan_eager(rule: Rule[Any, Any, Any], jobs: list[Job], write: bool) -> list[Launch]:
    """The pipeline op by op, a leaf at a time."""
    measure = partial(plan_measures, rule)
    return plan_over_shards(rule, jobs, write, measure, partial(_move_eagerly, rule, write))


def _move_eagerly(rule: Rule[Any, Any, Any], write: bool, jobs: list[Job]) -> list[Launch]:
    return [partial(_run_eager, rule, job, write) for job in jobs]


def plan_if_possible(
    rule: Rule[Any, Any, Any], jobs: list[Job], write: bool, uncompilable: set[str]
) -> list[Launch]:
    """Launches through kernels where they can be had, else eager ones.

    Args:
        rule: The mathematics.
        jobs: What to update.
        write: False moves the state alone.
        uncompilable: Types of devices for which the compiler has failed: it is not asked
            again, nor is there a second warning. Added to.
    """
    odd = [job for job in jobs if not job.is_plain()]
    if odd:
        # DTensor and its kin: their own dispatch knows what an operation means.
        jobs = [job for job in jobs if job.is_plain()]
        rest = plan_if_possible(rule, jobs, write, uncompilable) if jobs else []
        return rest + plan_eager(rule, odd, write)
    device = jobs[0].g.device.type
    if device not in uncompilable:
        try:
            return plan_compiled(rule, jobs, write)
        except DispatchModeError:
            pass  # What watches single operations gets single operations.
        except Exception as error:
            uncompilable.add(device)
            # torch's first line may only say that there is a second.
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[: 1 + (lines[:1] or [""])[0].endswith(":")])
            warnings.warn(
                f"the optimizer step could not be compiled for {device} and runs "
                f"eagerly, several times slower ({type(error).__name__}: {reason}). "
                "Install a C++ compiler (g++ or clang++, on PATH or named by CXX) "
                "for CPU, Triton for CUDA; or choose compile=False or foreach=True.",
                UserWarning,
                stacklevel=6,
            )
    return plan_eager(rule, jobs, write)


def plan_compiled(rule: Rule[Any, Any, Any], jobs: list[Job], write: bool) -> list[Launch]:
    """Launches through kernels, all of them compiled by the time this returns.

    Args:
        rule: The mathematics.
        jobs: What to update.
        write: False moves the state alone.

    Raises:
        Exception: Whatever the compiler raised. Nothing has been written.
    """
    measure, move = partial(_measure_compiled, rule), partial(_move_compiled, rule, write)
    return plan_over_shards(rule, jobs, write, measure, move)


def _measure_compiled(rule: Rule[Any, Any, Any], jobs: list[Job]) -> list[Launch]:
    launches: list[Launch] = []
    rest: list[Job] = []
    for job in jobs:
        if _is_gathered(rule, job):
            rest.append(job)
            continue
        if job.g.is_neg():
            job = job._replace(g=job.g.resolve_neg())
        in_place, guarded = job.into is job.source, job.ok is not None
        run, values = _kernel(rule, job, True, in_place, guarded)
        launches.append(partial(_run_measure, run, _completed(rule, values, job), job))
    return launches + plan_measures(rule, rest)


def _is_gathered(rule: Rule[Any, Any, Any], job: Job) -> bool:
    """Whether a kernel cannot be handed the job's tensors as they are."""
    small = job.source.numel < SMALL and job.segments is None
    return small or not job.agrees() or (rule.per_tensor and job.segments is not None)


def _move_compiled(rule: Rule[Any, Any, Any], write: bool, jobs: list[Job]) -> list[Launch]:
    launches: list[Launch] = []
    gathered: list[Job] = []
    # Looked up once for all jobs that share their dtypes and numbers.
    found: dict[Any, tuple[Flat, Tensor]] = {}
    for job in jobs:
        if not job.is_plain():
            raise TypeError(
                "compiled steps take plain tensors, not "
                f"{type(job.source.p).__name__} with a gradient of "
                f"{type(job.g).__name__}: pass compile=False"
            )
        if job.g.is_neg():
            job = job._replace(g=job.g.resolve_neg())  # kernels see memory, not signs
        source, g, numbers, into, ok, _, given = job
        if _is_gathered(rule, job):
            gathered += [job] if source.numel else []
            continue
        in_place = into is source
        kind = (source.dtypes, g.dtype, g.device, id(numbers), in_place, ok is None)
        if kind not in found:
            found[kind] = _kernel(rule, job, write, in_place, ok is not None)
        run, values = found[kind]
        if given is not None:
            run = cast(TwoPasses, run).move
        values = _completed(rule, values, job) if write else _guarded(values, job)
        launches.append(partial(_run_direct, run, values, job, write))
    if rule.per_tensor:
        # Each needs a mean of its own, which a concatenation does not have.
        return launches + plan_moves(rule, write, gathered)
    buckets: dict[Any, list[Job]] = {}
    for job in gathered:
        dtypes, g = job.source.dtypes, job.g
        kind = (dtypes, g.dtype, g.device, id(job.numbers), job.ok is None)
        buckets.setdefault(kind, []).append(job)
    for bucket in buckets.values():
        for chunk in chunks(bucket, CHUNK):
            launches += _plan_gathered(rule, chunk, write)
    return launches


def _plan_gathered(rule: Rule[Any, Any, Any], jobs: list[Job], write: bool) -> list[Launch]:
    if sum(job.numel for job in jobs) < 2:
        # Length 1 would specialise the graph.
        return _move_eagerly(rule, write, jobs)
    run, values = _kernel(rule, jobs[0], write, True, False)
    return [partial(_run_gathered, run, values, jobs, write)]


def _kernel(
    rule: Rule[Any, Any, Any], job: Job, write: bool, in_place: bool, guarded: bool
) -> tuple[Flat, Tensor]:
    key = job_key(rule, job.source.leaf, job.g, job.numbers, write, in_place, guarded)
    values = job.numbers.packed(compute_dtype(*key.dtypes), key.device)
    return kernel(key, job.numbers.scalars), values


def _guarded(values: Tensor, job: Job) -> Tensor:
    """The numbers, and whether anything is to be written."""
    if job.ok is None:
        return values
    return torch.cat([values, job.ok.reshape(1).to(values.dtype)])


def _completed(rule: Rule[Any, Any, Any], values: Tensor, job: Job) -> Tensor:
    """All of a kernel's numbers, with the place of the mean where it takes one."""
    values = _guarded(values, job)
    return torch.cat([values, values.new_zeros(1)]) if rule.per_tensor else values


def run_launches(launches: Iterable[Launch], device: torch.device) -> None:
    """Write every job's result."""
    with ambient(device):
        for launch in launches:
            launch()


def _run_eager(rule: Rule[Any, Any, Any], job: Job, write: bool) -> None:
    leaf, scalars = job.source.leaf, job.numbers.scalars
    new = leaf_step(rule, leaf, job.g, scalars, write, job.mean)
    if job.ok is not None:
        new = keep_unless(job.ok, leaf, new)
    write_back(job.into.tensors, new)


def _run_measure(run: Flat, values: Tensor, job: Job) -> None:
    assert job.given is not None
    cast(TwoPasses, run).measure(values, job.source.p, job.g, *job.source.tensors[1:])
    job.given.copy_(values[-1])


def _run_direct(run: Flat, values: Tensor, job: Job, write: bool) -> None:
    p, *state = job.source.tensors
    if job.given is not None:
        values[-1].copy_(job.given)
    if job.into is job.source:
        written = job.source.tensors if write else state[: job.source.fields]
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
    fields = jobs[0].source.fields
    targets = zip(*[job.into.tensors for job in jobs])
    oks = [job.ok for job in jobs if job.ok is not None]
    ok = flatten([x.expand_as(y) for x, y in zip(oks, p)]) if oks else None
    for i, (role, flat) in enumerate(zip(targets, [scratch[0], *scratch[2:]])):
        if write or 0 < i <= fields:
            if ok is not None:
                flat = torch.where(ok, flat, flatten(list(role)))
            foreach_copy_(list(role), unflatten(flat, p))
