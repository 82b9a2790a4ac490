"""Which tensors share a launch, and how each reaches a kernel: as itself or gathered.

Where kernels sweep over lists, on CPU, dense tensors are handed over as they are, all in
one launch. Elsewhere a large one is a launch by itself; small ones, and everywhere those
whose memory order is not shared by gradient and state, are concatenated, updated by one
call of the same kernel and copied back.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from optimi_func._leaf import compute_dtype, leaf_step
from optimi_func._rule import Rule
from optimi_func.execution.foreach import plan_measures, plan_moves
from optimi_func.execution.jobs import (
    Job,
    bump_versions,
    chunks,
    flatten,
    foreach_copy_,
    unflatten,
)
from optimi_func.execution.kernel import (
    DispatchModeError,
    Kernel,
    TwoPasses,
    job_key,
    keep_unless,
    kernel,
    kernel_context,
    sweeps,
    write_back,
)
from optimi_func.execution.lists import list_launch, split_aliasing, with_ok
from optimi_func.execution.loop import Sweep
from optimi_func.execution.means import plan_over_shards

# Below this many elements a kernel call costs more than copying there and back.
SMALL = 1 << 13
# Elements gathered at once, which bounds the scratch memory.
CHUNK = 1 << 20
# Elements measured before they are moved: they are still in a cache then.
MEASURED = 1 << 20


# One call that updates some jobs, with everything it needs; nothing happens before it.
Launch: TypeAlias = Callable[[], None]


def plan_eager(rule: Rule[Any, Any], jobs: list[Job], write: bool) -> list[Launch]:
    """The pipeline op by op, a leaf at a time."""
    measure = partial(plan_measures, rule)
    return plan_over_shards(rule, jobs, write, measure, partial(_move_eagerly, rule, write))


def _move_eagerly(rule: Rule[Any, Any], write: bool, jobs: list[Job]) -> list[Launch]:
    return [partial(_run_eager, rule, job, write) for job in jobs]


def plan_if_possible(
    rule: Rule[Any, Any], jobs: list[Job], write: bool, uncompilable: set[str]
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


def plan_compiled(rule: Rule[Any, Any], jobs: list[Job], write: bool) -> list[Launch]:
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


def _measure_compiled(rule: Rule[Any, Any], jobs: list[Job]) -> list[Launch]:
    launches: list[Launch] = []
    alone, gathered = _sorted(rule, jobs)
    for some in alone:
        run = cast(TwoPasses, _kernel(rule, some[0], True))
        if isinstance(run.measure, Sweep):
            launches += [list_launch(run, c, True).measure for c in chunks(some, MEASURED)]
        else:
            launches += [partial(_run_measure, run, _values(run, j), j) for j in some]
    return launches + plan_measures(rule, gathered)


def _move_compiled(rule: Rule[Any, Any], write: bool, jobs: list[Job]) -> list[Launch]:
    launches: list[Launch] = []
    alone, gathered = _sorted(rule, jobs)
    for some in alone:
        run = _kernel(rule, some[0], write)
        if isinstance(run, Sweep):
            launches += [list_launch(run, part, write) for part in split_aliasing(some)]
        elif isinstance(run, TwoPasses) and isinstance(run.move, Sweep):
            for part in split_aliasing(some):
                launches += [list_launch(run, c, write) for c in chunks(part, MEASURED)]
        else:
            launches += [partial(_run_direct, run, _values(run, j), j, write) for j in some]
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


def _sorted(rule: Rule[Any, Any], jobs: list[Job]) -> tuple[list[list[Job]], list[Job]]:
    """Those that a kernel can be handed as they are, by kernel and numbers; the others."""
    alone: dict[Any, list[Job]] = {}
    gathered: list[Job] = []
    for job in jobs:
        source, g, numbers, into, ok, segments, given = job
        if not source.numel:
            continue
        if not job.is_plain():
            raise TypeError(
                "compiled steps take plain tensors, not "
                f"{type(source.p).__name__} with a gradient of "
                f"{type(g).__name__}: pass compile=False"
            )
        if g.is_neg():
            job = job._replace(g=g.resolve_neg())  # kernels see memory, not signs
        small = source.numel < SMALL and segments is None and not sweeps(g.device)
        if small or not job.agrees() or (rule.per_tensor and segments is not None):
            gathered.append(job)
            continue
        in_place = into is source
        kind = (source.dtypes, g.dtype, g.device, id(numbers), in_place, id(ok))
        alone.setdefault((*kind, given is None), []).append(job)
    return list(alone.values()), gathered


def _plan_gathered(rule: Rule[Any, Any], jobs: list[Job], write: bool) -> list[Launch]:
    if sum(job.numel for job in jobs) < 2:
        # Length 1 would specialise the graph.
        return _move_eagerly(rule, write, jobs)
    # What is gathered is the kernel's to write, and ok decides on the way back.
    flat = jobs[0]._replace(into=jobs[0].source, ok=None)
    run = _kernel(rule, flat, write)
    return [partial(_run_gathered, run, _values(run, flat), jobs, write)]


def _kernel(rule: Rule[Any, Any], job: Job, write: bool) -> Kernel:
    in_place, guarded = job.into is job.source, job.ok is not None
    key = job_key(rule, job.source.leaf, job.g, job.numbers, write, in_place, guarded)
    return kernel(key, job.numbers.scalars)


def _values(run: Kernel, job: Job) -> Tensor:
    """All of a kernel's numbers, with a place for the mean where it takes one."""
    dtype = compute_dtype(job.g.dtype, *job.source.dtypes)
    values = with_ok(job.numbers.packed(dtype, job.g.device), job.ok)
    if isinstance(run, TwoPasses):
        values = torch.cat([values, values.new_zeros(1)])
    return values


def run_launches(launches: Iterable[Launch], device: torch.device) -> None:
    """Write every job's result."""
    with kernel_context(device):
        for launch in launches:
            launch()


def _run_eager(rule: Rule[Any, Any], job: Job, write: bool) -> None:
    leaf, scalars = job.source.leaf, job.numbers.scalars
    new = leaf_step(rule, leaf, job.g, scalars, write, job.mean)
    if job.ok is not None:
        new = keep_unless(job.ok, leaf, new)
    write_back(job.into.tensors, new)


def _run_measure(run: TwoPasses, values: Tensor, job: Job) -> None:
    assert job.given is not None
    run.measure(values, job.source.p, job.g, *job.source.tensors[1:])
    job.given.copy_(values[-1])


def _run_direct(run: Kernel, values: Tensor, job: Job, write: bool) -> None:
    p, *state = job.source.tensors
    if job.given is not None:
        values[-1].copy_(job.given)
        run = cast(TwoPasses, run).move
    if job.into is job.source:
        written = job.source.tensors if write else state[: job.source.fields]
        run(values, p, job.g, *state)
    else:
        written = job.into.tensors
        run(values, p, job.g, *state, *written)
    bump_versions(written, p.is_inference())


def _run_gathered(run: Kernel, values: Tensor, jobs: list[Job], write: bool) -> None:
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
