"""A step of all param groups: each is checked and compiled, and then all are written.

`step_groups` takes the step. It makes a `GroupUpdate` for each param group, which finds the
plan of the group's parameters in the optimizer's cache, or makes one. Nothing is written
before all of them are made, so an error there changes neither the parameters nor the state.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from optimi_func.classes.copies import facts_of
from optimi_func.classes.extras import places_of, rounding_bits, with_extras
from optimi_func.classes.groups import aligned, check_capture, check_modes
from optimi_func.classes.joined import running_scalars
from optimi_func.classes.without_memory import prepare_without_memory
from optimi_func.classes.work import Request, Work
from optimi_func.core import checks
from optimi_func.core.distributed import any_distributed, to_local
from optimi_func.core.owners import Holders, agree
from optimi_func.core.packed import is_capturing
from optimi_func.core.rule import Microbatch, Named
from optimi_func.core.storage import PARAM, group_storage
from optimi_func.core.torch_private import has_memory
from optimi_func.execution.executors import Executor
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.launches import run_launches
from optimi_func.execution.plans import ClassPlan, raise_versions
from optimi_func.execution.scalars import pack, scalars_after
from optimi_func.execution.slots import Step
from optimi_func.execution.sums import Part
from optimi_func.execution.tensors import uncollected
from optimi_func.state.convert import Group
from optimi_func.state.entry import ensure_state, insert_made

if TYPE_CHECKING:
    from optimi_func.classes.base import BaseOptimizer

# The cache of plans holds at most this many plans, and one more for each parameter. If the
# same lists of parameters never come again, as with experts, the oldest plans are dropped.
_LISTS = 32
_is_cuda, _on_host = attrgetter("is_cuda"), attrgetter("on_host")
_bypasses_autograd = attrgetter("bypasses_autograd")


def step_groups(
    optimizer: "BaseOptimizer", works: list[Work], request: Request, whole: bool = False
) -> dict[Tensor, Part]:
    """Check all groups and compile their kernels, and then write.

    Args:
        optimizer: The optimizer of the groups.
        works: The parameters to update and their gradients, by group.
        request: What is the same for all of them.
        whole: True for a step of all groups.

    Returns:
        The parts of sums over parameters, for `finish_step`.
    """
    updates: list[GroupUpdate] = []
    divided: dict[int, Sequence[Holders]] = {}
    lists: list[object] = []
    for work in works:
        prepared = GroupUpdate(optimizer, work, request)
        updates.append(prepared)
        # Only for steps of all groups: gradient release calls this function for each
        # parameter, and the list of a group is as long as the group.
        if whole:
            every: list[Tensor] = work.group["params"]
            # The plan has only the parameters with gradients. To notice that another one
            # has been replaced, the ids of all parameters are compared.
            rest = len(every) > len(work.params)
            lists += prepared.plan, tuple(map(id, every)) if rest else len(every)
        if prepared.holders:
            divided[id(work.group)] = prepared.holders
    # A plan belongs to one list of parameters, so equal plans mean equal lists.
    if whole and lists != optimizer._stepped:
        optimizer.check_lists()
        if any([len(work.params) > len({*map(id, work.params)}) for work in works]):
            works = [work.once() for work in works]
            return step_groups(optimizer, works, request._replace(new_entries={}), whole)
        optimizer._stepped = lists
    if request.write and divided:
        holders = list(chain.from_iterable(divided.values()))
        agree(holders, facts_of(optimizer, divided, works))
    optimizer._has_stepped = True
    if request.write and request.ends:
        optimizer.step_calls += 1
        if "step" in optimizer.__dict__:
            # A scheduler wraps `step`, and warns if nothing has called it. Gradient release
            # calls `BaseOptimizer.update` instead.
            optimizer.__dict__["_opt_called"] = True
    if request.begin is not None:
        request.begin()
    if request.new_entries:
        insert_made(optimizer.state, request.new_entries)
    parts: dict[Tensor, Part] = {}
    for x in updates:
        torch_context = kernel_context(x.work.params[0].device) if x.calls_torch else None
        with torch_context or nullcontext():
            sums = x.write()
        if sums:
            parts.update({x.work.params[i]: part for i, part in sums.items()})
    return parts


class GroupUpdate:
    """The update of some parameters of one param group, checked, compiled and not written.

    Args:
        optimizer: The optimizer of the group.
        work: The parameters and their gradients.
        request: What is the same for all groups. The entries of parameters without state
            are collected in it.
    """

    # Processes that divide maps of the group's matrices. They agree before any one writes.
    holders: Sequence[Holders] = ()
    plan: ClassPlan | None = None
    # False if `write` calls no operation of torch, so that autocast and other modes need
    # not be switched off.
    calls_torch = False
    _write_without_memory: Callable[[], None] | None = None

    def __init__(self, optimizer: "BaseOptimizer", work: Work, request: Request) -> None:
        self._optimizer, self.work, self._request = optimizer, work, request
        group, params = work.group, work.params
        if not params:
            # Other processes may have gradients, and wait for these to agree.
            idle = [optimizer.holders_of(group, p) for p in group["params"]]
            self.holders = [x for x in idle if x is not None]
            return
        if _is_cuda(params[0]) and is_capturing(params[0].device):
            keywords = optimizer._factory_of(group)[1]
            check_capture(group, optimizer.path_of, params, optimizer.state, keywords)
        self._counting = group["capturable"], False
        if work.batches is not None:
            self._counting = _counting(group["capturable"], work.batches)
        self._bound = optimizer.bound_of(group, params, self._counting[0])
        if group.get("differentiable"):
            check_modes(group)  # raises
        if not request.write:
            checks.check_moves_state(self._bound.rule)
        planned = self._planned()
        if planned is None:
            self._write_without_memory = prepare_without_memory(optimizer, work, request)
            self.calls_torch = True
            return
        self.plan, self._tensors = plan, tensors = planned
        self.holders = plan.holders
        self._step, self._after = step, _ = self._inputs(plan, tensors)
        launches = plan.cached_launches(executor := executor_of(group), step)
        if launches is None:
            self._check_grads(step)
            launches = plan.new_launches(executor, step)
        self._launches = launches.calls
        on_host = launches.without_torch and plan.counts.native is not None
        self.calls_torch = not (on_host and all(map(_on_host, step.packed)))

    def _planned(self) -> tuple[ClassPlan, list[Any]] | None:
        """Return the plan of the parameters with their tensors, or None without memory."""
        optimizer, params, rule = self._optimizer, self.work.params, self._bound.rule
        group, plans, ids = self.work.group, optimizer._plans, tuple(map(id, params))
        key = group["storage"], group["kahan_sum"], group["state_dtype"]
        key = *key, *self._counting, *ids
        if rule.draws:  # by the positions of the parameters, which may change
            key = *key, *places_of(optimizer, params)
        old = plans.get(key)
        if old is not None and old.rule is not rule:
            old = None
        if old is not None:
            # Looking up each parameter would call Tensor.__hash__, which is Python.
            state = optimizer.state
            alone = len(state) == len(ids) and tuple(map(id, state)) == ids
            entries = state.values() if alone else map(state.get, params)
            tensors = old.current(params, list(entries))
            if tensors is not None:
                return old, tensors
        if not all(map(has_memory, params)):
            return None
        with uncollected(), kernel_context(params[0].device):
            plan, tensors = self._new_plan(old)
        most = _LISTS + sum([len(group["params"]) for group in optimizer.param_groups])
        while len(plans) >= most:
            plans.pop(next(iter(plans)), None)
        plans[key] = plan
        return plan, tensors

    def _new_plan(self, old: ClassPlan | None) -> tuple[ClassPlan, list[Any]]:
        """Return a new plan, which is made from a stale one if only addresses changed."""
        optimizer, made = self._optimizer, self._request.new_entries
        group, params, state = self.work.group, self.work.params, self._optimizer.state
        if old is not None and state and not (made or self._counting[0]):
            # The old plan's entries were checked. If only addresses differ from them, only
            # the counts need another check.
            found = old.moved(params, [state.get(p, {}) for p in params])
            if found is not None and found[0].counts.valid:
                return found
        how = self._bound, group_storage(group), self._counting[0]
        named = [(optimizer.path_of(group, p), p) for p in params]
        entries = [ensure_state(state, made, *pair, *how) for pair in named]
        if old is not None and (found := old.moved(params, entries)) is not None:
            return found
        holders = [optimizer.holders_of(group, p, path) for path, p in named]
        rule, rows = self._bound.rule, list(zip(params, entries, holders))
        places = places_of(optimizer, params) if rule.draws else ()
        plan, tensors = ClassPlan.of(rule, self._counting, rows, places)
        plan.rounds_randomly = group_storage(group).rounds
        return plan, tensors

    def _inputs(self, plan: ClassPlan, tensors: list[Any]) -> tuple[Step, Sequence[Named]]:
        """Return the tensors and numbers of the step, and the running scalars after it."""
        optimizer, bound, request = self._optimizer, self._bound, self._request
        group, params, grads, batches = self.work
        if plan.viewed:
            grads = self._local_grads()
        columns = plan.reader.columns(tensors, grads)
        counts, at = plan.counts.now(tensors), plan.counts.at
        if bound.rule.join is not None:
            made, known = request.new_entries, optimizer.state
            new = [made[p] for p in params if p in made and "step" not in known.get(p, {})]
            # None: they are computed on the host.
            device = params[0].device if self._counting[0] else None
            running = running_scalars(optimizer, bound, group, new, device)
            counts = [(step, running) for step, _ in counts]
        scalars, after = scalars_after(bound, counts, plan.coded)
        inputs: dict[str, list[Any]] = {}
        if plan.rounds_randomly and request.write:
            inputs = rounding_bits(optimizer, group, params, counts, at)
        if bound.rule.given:
            rows = bound, params, scalars, counts, at
            scalars, at, extras = with_extras(optimizer, request.extras, *rows)
            inputs = extras | inputs
        if inputs:
            columns = columns._replace(given=inputs)
        packed, at = pack(bound.rule, scalars, at, batches, request.write)
        return Step(columns, packed, at, request.write), after

    def _local_grads(self) -> list[Tensor]:
        """Return the local gradients of viewed parameters, of which some may be copies."""
        group, params, grads, _ = self.work
        path_of = partial(self._optimizer.path_of, group)
        return to_local(aligned(path_of, params, grads))

    def _check_grads(self, step: Step) -> None:
        """Raise if a gradient does not fit its parameter."""
        path_of = partial(self._optimizer.path_of, self.work.group)
        params, (grads, own, *_) = self.work.params, step.columns
        if any_distributed(grads):
            aligned(path_of, params, grads)  # raises, because their parameters are none
        for p, part, g in zip(params, own[PARAM], grads):
            checks.check_grad(path_of(p), part, g)

    def write(self) -> dict[int, Part]:
        """Write the update. Return the parts of sums over parameters, by their index."""
        if (plan := self.plan) is None:
            if self._write_without_memory is not None:
                self._write_without_memory()
            return {}
        step, tensors, ends = self._step, self._tensors, self._request.ends
        if plan.viewed and self._request.begin is not None:
            # `begin` has divided gradients in place, of which the step may have copies.
            grads = self._local_grads()
            step = step._replace(columns=step.columns._replace(grads=grads))
        joins = step.write and plan.rule.join is not None
        # Autograd has not seen that the local shards of these are written.
        written = self.work.params if step.write and plan.viewed else []
        if any(map(_bypasses_autograd, self._launches)):
            every = tensors
            if not (step.write and ends):
                every = plan.counts.tensors(tensors) if ends else []
                every = [*every, *chain(*step.columns.written(step.write))]
            if not (every is tensors and plan.reader.complete):
                every = [x for x in every if x is not None]
            written = every + written
        # Before the kernels, whose data put these tensors out of the caches.
        raise_versions(written)
        parts = run_launches(self._launches, step, joins)
        if ends:
            after = [] if joins else self._after
            plan.counts.advance(tensors, after, step.packed, step.at)
        return parts


def _counting(capturable: bool, microbatches: list[Microbatch] | None) -> tuple[bool, bool]:
    """Return whether steps are counted on the device, and if so for each parameter."""
    if microbatches is None:
        return capturable, False
    flags = [m.finite for m in microbatches]
    on_device = capturable or any([flag is not None for flag in flags])
    return on_device, on_device and len(set(map(id, flags))) > 1


def executor_of(group: Group) -> Executor:
    """Return the executor that a group's options ask for."""
    if group["foreach"] or group["compile"] is False:
        return "eager"
    asked = group["compile"] or group["triton"] or group.get("fused")
    return "kernels" if asked else "auto"
