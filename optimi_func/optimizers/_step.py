"""The step of a class: its groups' updates, each by a plan that is found or made.

Everything is checked and compiled before anything is written.
"""

import gc
from collections.abc import Callable, Generator, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from optimi_func.core.checks import check_grad, warn_user
from optimi_func.core.distributed import any_distributed, redistribute_like, to_local
from optimi_func.core.rule import Microbatch
from optimi_func.core.storage import group_storage
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.launches import StepInputs
from optimi_func.execution.plans import Plan, PlanCache, Spec
from optimi_func.execution.scalars import pack
from optimi_func.execution.tensors import has_memory, is_capturing
from optimi_func.optimizers._groups import (
    Group,
    GroupNumbers,
    Path,
    executor_of,
    scalars_after,
)
from optimi_func.optimizers._memoryless import step_without_memory
from optimi_func.state.convert import Entry
from optimi_func.state.entry import ensure_state, insert_made

State: TypeAlias = MutableMapping[Any, Entry]


class Work(NamedTuple):
    """Parameters of one group to update."""

    group: Group
    params: list[Tensor]
    grads: list[Any]  # a tensor for each
    microbatches: list[Microbatch] | None  # what each is to its step; None: the whole of it


class Stepper:
    """Runs an optimizer's steps. It keeps plans, but no parameter and no state.

    Args:
        numbers: The groups' hyperparameters.
    """

    def __init__(self, numbers: GroupNumbers) -> None:
        self.plans = PlanCache()
        self._numbers = numbers
        self.has_stepped = False

    def run(
        self,
        groups: list[Group],
        states: State,
        works: list[Work],
        write: bool,
        count: bool,
    ) -> None:
        """Check everything, compile everything, and then write.

        Args:
            groups: All groups of the optimizer.
            states: The optimizer's state. Missing entries are added.
            works: The updates.
            write: False moves the state alone.
            count: False: the step goes on, so the step counts stay.

        Raises:
            ValueError, TypeError: A gradient or a state that does not fit; before any
                write.
            RuntimeError: A step that a CUDA graph being captured could not repeat.
        """
        # First gradients make state, which joins the optimizer once nothing can fail.
        made: dict[Tensor, Entry] = {}
        runs: list[Callable[[], None]] = []
        on_host = True
        for work in works:
            run, host = self._prepare(groups, states, work, write, count, made)
            runs.append(run)
            on_host &= host
        self.has_stepped = True
        with nullcontext() if on_host else kernel_context(works[0].params[0].device):
            if made:
                insert_made(states, made)
            for run in runs:
                run()

    def _prepare(
        self,
        groups: list[Group],
        states: State,
        work: Work,
        write: bool,
        count: bool,
        made: dict[Tensor, Entry],
    ) -> tuple[Callable[[], None], bool]:
        """Check and compile a group's update.

        Returns:
            The function that runs it, and True if that calls no operation of torch, so
            that modes such as autocast do not matter.
        """
        group, params, grads, microbatches = work
        if _is_cuda(params[0]) and is_capturing(params[0].device):
            _check_capture(states, work, self._numbers.tensors(group))
        # A step that the device may skip is counted there.
        capturable, apart = group["capturable"], False
        if microbatches is not None:
            flags = [m.finite for m in microbatches]
            capturable = capturable or any([flag is not None for flag in flags])
            apart = capturable and len(set(map(id, flags))) > 1
        bound = self._numbers.bind(group, params, capturable)
        key = (*_asked(group), capturable, apart, *map(id, params))
        plan, flat = self.plans.find(key, bound.rule), None
        if plan is not None:
            flat = plan.current(params, list(map(states.get, params)))
        if plan is None or flat is None:
            if not all(map(has_memory, params)):
                numbers = self._numbers
                run = partial(step_without_memory, numbers, states, *work, write, count)
                return run, False
            with _uncollected(), kernel_context(params[0].device):
                how = bound.rule, group_storage(group), capturable
                entries = [
                    ensure_state(states, made, Path(group, p), p, *how) for p in params
                ]
                plan = Plan(Spec(*how), apart, params, entries)
                flat, plan.made = plan.made, []
                others = sum([len(group["params"]) for group in groups])
                self.plans.keep(key, plan, others)
        if plan.distributed:
            grads = to_local(_aligned(group, params, grads))
        counts = plan.counts.now(flat)
        scalars, after = scalars_after(bound, counts, plan.coded)
        packed, at = pack(bound.rule, scalars, plan.counts.at, microbatches, write)
        roles, executor = plan.roles(flat), executor_of(group)
        inputs = StepInputs(roles, roles, grads, packed, at)
        found = plan.launches(executor, inputs, write, new=False)
        if found is None:
            if any_distributed(grads):
                _aligned(group, params, grads)  # raises, because their parameters are none
            for p, part, g in zip(params, roles[0], grads):
                check_grad(Path(group, p), part, g)
            with kernel_context(params[0].device):
                found = plan.launches(executor, inputs, write, new=True)
            assert found is not None
        launches, host = found
        host = host and plan.counts.native is not None and all(map(_on_host, packed))
        # Autograd has not seen that the local shards of these were written.
        moved = params if write and plan.distributed else []
        return partial(plan.run, launches, flat, inputs, after, moved, write, count), host


# The options of a group that a plan depends on.
_asked = itemgetter("storage", "kahan_sum", "state_dtype")
_on_host, _is_cuda = attrgetter("on_host"), attrgetter("is_cuda")


def _check_capture(states: State, work: Work, tensors: list[tuple[str, Tensor]]) -> None:
    """Raise if the replays of a CUDA graph would differ from steps.

    Args:
        states: The optimizer's state.
        work: The update.
        tensors: Hyperparameters of the group that are tensors, by name.
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
    """Switch the garbage collector off, which many new objects would start often."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _aligned(group: Group, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return gradients with the placements of their parameters."""
    for p, g in zip(params, grads):
        check_grad(Path(group, p), p, g)
    return [redistribute_like(Path(group, p), p, g) for p, g in zip(params, grads)]
