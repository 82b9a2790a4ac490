"""A step of a class: the work of its groups, each by a plan that is found or made.

Everything is checked and compiled before anything is written. A step like the last one
reads groups and gradients, checks what the plan relies on, and runs its launches.
"""

import gc
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from optimi_func._checks import check_grad, warn_user
from optimi_func._distributed import any_distributed, redistribute_like, to_local
from optimi_func._rule import Microbatch
from optimi_func._saved import Entry
from optimi_func._storage import group_storage
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.plans import PlanCache, PreparedStep, Spec
from optimi_func.execution.scalars import Numbers, upload_together
from optimi_func.execution.tensors import has_memory, is_capturing
from optimi_func.optimizers._groups import (
    Group,
    GroupNumbers,
    Path,
    executor_of,
    scalars_after,
)
from optimi_func.optimizers._memoryless import step_without_memory
from optimi_func.optimizers._state import ensure_state, first_param, insert_made

State: TypeAlias = MutableMapping[Any, Entry]


class Work(NamedTuple):
    """Parameters of one group to update."""

    group: Group
    params: list[Tensor]
    grads: list[Any]  # a tensor for each
    microbatches: list[Microbatch] | None  # what each is to its step; None: the whole of it


class Stepper:
    """Carries out an optimizer's steps. It keeps plans, and neither parameters nor state.

    Args:
        numbers: The groups' numbers, bound.
    """

    def __init__(self, numbers: GroupNumbers) -> None:
        self.plans = PlanCache()
        self._numbers, self._bind = numbers, numbers.bind
        self._tensors = numbers.tensors

    def run(
        self,
        groups: list[Group],
        states: State,
        works: list[Work],
        write: bool,
        count: bool,
    ) -> None:
        """Check everything, compile everything, and only then write.

        Args:
            groups: All of the optimizer's.
            states: The optimizer's; what is made joins it.
            works: What is to be updated.
            write: False moves the state alone.
            count: Whether the step ends here, for the step counts.

        Raises:
            ValueError, TypeError: What does not fit; before any write.
            RuntimeError: What a CUDA graph that is being captured could not repeat.
        """
        for work in works:
            if is_capturing(work.params[0].device):
                _check_capture(states, work, self._tensors(work.group))
        steps = [self._prepare(groups, states, work, write, None) for work in works]
        if all([step is not None and step.on_host for step in steps]):
            for step in cast(list[PreparedStep], steps):
                step.run(count)
            return
        if not all(has_memory(p) for work in works for p in work.params):
            for work in works:
                step_without_memory(self._numbers, states, *work, write, count)
            return
        with kernel_context(first_param(groups).device):
            # What a first gradient makes joins the optimizer once nothing can fail.
            made: dict[Tensor, Entry] = {}
            found = [
                self._prepare(groups, states, work, write, made) if step is None else step
                for step, work in zip(steps, works)
            ]
            insert_made(states, made)
            upload_together([x for step in found if step for x in step.numbers.scalars])
            for step, work in zip(cast(list[PreparedStep], found), works):
                step.run(count)
                if write and step.plan.distributed:
                    # Autograd has not seen their local parts written.
                    torch.autograd.graph.increment_version(work.params)

    def _prepare(
        self,
        groups: list[Group],
        states: State,
        work: Work,
        write: bool,
        made: dict[Tensor, Entry] | None,
    ) -> PreparedStep | None:
        """Everything about a group's step but the writing.

        Args:
            groups: All of the optimizer's.
            states: The optimizer's.
            work: The group's parameters and gradients.
            write: False moves the state alone.
            made: Where to put state that is made. None: if anything has to be made, or
                computed on a device, there is no step.
        """
        group, params, grads, microbatches = work
        # A step that the device may skip is counted there.
        flags = [] if microbatches is None else [m.finite for m in microbatches]
        capturable = group["capturable"] or any([flag is not None for flag in flags])
        if capturable and made is None:
            return None
        bound = self._bind(group, params, capturable)
        apart = capturable and len(set(map(id, flags))) > 1
        key = (*_asked(group), capturable, apart, *map(id, params))
        plan, flat = self.plans.find(key, bound.rule), None
        if plan is not None:
            flat = plan.current(params, list(map(states.get, params)))
        if plan is None or flat is None:
            if made is None:
                return None
            with _uncollected():
                how = bound.rule, group_storage(group), capturable
                spec = Spec(*how, apart)
                entries = [
                    ensure_state(states, made, Path(group, p), p, *how) for p in params
                ]
                others = sum(len(group["params"]) for group in groups)
                plan, flat = self.plans.make(key, spec, params, entries, others)
        if plan.distributed or any_distributed(grads):
            if made is None:
                return None
            grads = to_local(_aligned(group, params, grads))
        on_host = not capturable
        steps = plan.counts.now([] if on_host else plan.counted(flat))
        scalars, after = scalars_after(bound, steps, plan.coded)
        numbers = Numbers.of(bound.rule, scalars, plan.counts.at, microbatches, write)
        executor = executor_of(group)
        launches = plan.find(executor, grads, numbers, write)
        if launches is None:
            if made is None:
                return None
            roles = plan.roles(flat)
            for p, part, g in zip(params, roles[0], grads):
                check_grad(Path(group, p), part, g)
            launches = plan.make(executor, roles[0], grads, numbers, write)
        return PreparedStep(plan, launches, flat, grads, numbers, after, write)


# What a group asks for beside its numbers, as far as it decides on a plan.
_asked = itemgetter("storage", "kahan_sum", "state_dtype")


def _check_capture(states: State, work: Work, tensors: list[tuple[str, Tensor]]) -> None:
    """Refuse what the replays of a CUDA graph would do otherwise than a step does.

    Args:
        states: The optimizer's.
        work: What is to be updated.
        tensors: Those of the group's numbers that are tensors, by name.
    """
    group, params, *_ = work
    if not group["capturable"]:
        raise RuntimeError(
            "a CUDA graph is being captured with capturable=False: all its replays would "
            "take the same step, with the numbers of now. Make the optimizer with "
            "capturable=True"
        )
    for p in params:
        if not states.get(p):
            raise RuntimeError(
                f"a CUDA graph is being captured before the first step of params"
                f"{Path(group, p)}: each of its replays would make its state anew. Take a "
                "step, or call init_state(), before the capture"
            )
    for name, x in tensors:
        if x.device != params[0].device:
            raise RuntimeError(
                f"a CUDA graph is being captured with {name} a tensor on {x.device}, which "
                f"its replays could not read: move it to {params[0].device}"
            )
    if not isinstance(group["lr"], Tensor):
        warn_user(
            f"a CUDA graph is being captured with lr={group['lr']}, which all its replays "
            "will take: for a schedule make lr a tensor on the parameters' device and "
            "write to it",
        )


@contextmanager
def _uncollected() -> Generator[None]:
    """Without Python's collector: for every hundred thousand objects it looks at all."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _aligned(group: Group, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Gradients that lie as their parameters do."""
    for p, g in zip(params, grads):
        check_grad(Path(group, p), p, g)
    return [redistribute_like(Path(group, p), p, g) for p, g in zip(params, grads)]
