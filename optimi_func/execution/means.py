"""Means over tensors that lie in shards: measured here, added up, and given to the step."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from optimi_func._distributed import Split, all_reduce_sum
from optimi_func._rule import Rule
from optimi_func.execution.jobs import Job

Launch: TypeAlias = Callable[[], None]
# Launches of some jobs; of measurements, which leave the mean over what lies here in
# `job.given`.
Plan: TypeAlias = Callable[[list[Job]], list[Launch]]


def plan_over_shards(
    rule: Rule[Any, Any], jobs: list[Job], write: bool, measure: Plan, move: Plan
) -> list[Launch]:
    """All that move some jobs; of a rule that takes means in three rounds.

    One message for all tensors of a mesh, and none that depends on how much of a tensor
    lies here: every process has to send it.

    Args:
        rule: The mathematics.
        jobs: What to update, in an order that all processes share.
        write: False moves the state alone, which needs no mean.
        measure: How the executor measures.
        move: How it moves, with `job.given` where there is one.
    """
    if not (rule.per_tensor and write):
        return move(jobs)
    jobs = list(map(_divided, jobs))
    divided = [job for job in jobs if job.given is not None]
    if not divided:
        return move(jobs)
    # What has no element here adds nothing.
    measured = measure([job for job in divided if job.numel])
    return [*measured, partial(_add_up, divided), *move(jobs)]


def _divided(job: Job) -> Job:
    if job.source.shards is None:
        return job
    return job._replace(given=torch.zeros((), dtype=torch.float64, device=job.g.device))


def _add_up(jobs: list[Job]) -> None:
    """From each mean over what lies here the mean over the whole tensor."""
    sums: list[Tensor] = []
    splits: list[Split | None] = []
    for job in jobs:
        assert job.given is not None and job.source.shards is not None
        sums.append(job.given * job.numel)
        splits.append(job.source.shards.split)
    for job, total in zip(jobs, all_reduce_sum(sums, splits)):
        assert job.given is not None and job.source.shards is not None
        job.given.copy_(total / job.source.shards.numel)
