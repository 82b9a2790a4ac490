"""Plans: the launches of a list of parameters, kept for the steps that are alike.

A plan is a cache: `state[p]` is the truth. Whoever loads, copies, casts, moves or edits it
is noticed at the next step, which then plans anew. Plans keep no tensor alive.
"""

import threading
from array import array
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func._distributed import any_distributed, shards_of, to_local
from optimi_func._rule import Rule, Scalar, Storage
from optimi_func._storage import names_in
from optimi_func.execution.executors import Executor, plan_launches
from optimi_func.execution.guards import Guard
from optimi_func.execution.launches import (
    Launch,
    ListLaunch,
    StepInputs,
    Update,
)
from optimi_func.execution.list_kernel import Native, address, loaded
from optimi_func.execution.running import RunningNumbers
from optimi_func.execution.scalars import Numbers, PackedScalars
from optimi_func.execution.slots import Roles, Slot, make_slots
from optimi_func.execution.tensors import foreach_add_

# Kinds of gradients and numbers for which a plan keeps launches: Ranger has two.
_KINDS = 8
# Lists that are kept beside one for each parameter: where they never come again, as with
# experts, the oldest go.
_LISTS = 32

_version = attrgetter("_version")
_lock = threading.Lock()


class Plan:
    """The launches of a list of parameters, by the kind of their gradients and numbers."""

    def __init__(
        self, rule: Rule[Any, Any], slots: list[Slot], targets: list[Slot]
    ) -> None:
        self.rule = rule
        self._slots, self._targets = slots, targets
        self.inference = any([slot.inference for slot in targets])
        self.coded = any([slot.coded for slot in slots])
        self._known: dict[Any, tuple[Guard, list[Launch]]] = {}

    def _kind(self, executor: Executor, numbers: Numbers, write: bool) -> Any:
        scalars, at, finite = numbers
        if len(scalars) == 1:
            statics, guarded, places = scalars[0].statics, finite[0] is not None, None
        else:
            statics = tuple([x.statics for x in scalars])
            guarded, places = tuple([x is not None for x in finite]), tuple(at)
        # What watches single operations is to see them.
        watched = any_torch_dispatch_mode_on_stack()
        return executor, write, statics, guarded, places, watched

    def find(
        self, executor: Executor, grads: list[Tensor], numbers: Numbers, write: bool
    ) -> list[Launch] | None:
        """The launches of an earlier step that was like this one."""
        guard, launches = self._known.get(
            self._kind(executor, numbers, write), (None, None)
        )
        return launches if guard is not None and guard.holds(grads) else None

    def make(
        self,
        executor: Executor,
        params: list[Tensor],
        grads: list[Tensor],
        numbers: Numbers,
        write: bool,
    ) -> list[Launch]:
        """New launches, to be found by steps like this one.

        Args:
            executor: What runs them.
            params: What lies here of each parameter.
            grads: Likewise of its gradient.
            numbers: Of the step.
            write: False moves the state alone.
        """
        scalars, at, finite = numbers
        parts = zip(self._slots, self._targets, params, grads, at)
        updates = [
            Update(i, slot, target, p, g, j, scalars[j], finite[j] is not None)
            for i, (slot, target, p, g, j) in enumerate(parts)
        ]
        launches = plan_launches(executor, self.rule, updates, write)
        if len(self._known) >= _KINDS:
            self._known.clear()
        kind = self._kind(executor, numbers, write)
        self._known[kind] = Guard(grads, addresses=False), launches
        return launches

    def run(self, launches: list[Launch], inputs: StepInputs, write: bool) -> None:
        """Write every result."""
        for launch in launches:
            launch.run(inputs)
        # Tell autograd of what kernels wrote: a backward that saved it must raise.
        p, *fields, comps = inputs.targets
        written: list[Tensor] = []
        for role in (p, *fields, comps) if write else fields:
            for launch in launches:
                if launch.raw:
                    written += [x for x in launch.pick(role) if x is not None]
        if self.inference:
            written = [x for x in written if not x.is_inference()]  # these have no version
        torch.autograd.graph.increment_version(written)


class Spec(NamedTuple):
    """What a group asks of its parameters' state."""

    rule: Rule[Any, Any]
    storage: Storage
    capturable: bool  # counts lie on the parameters' device
    apart: bool = False  # each count goes its own way: flags there say which step counts


class StatePlan(Plan):
    """A plan for parameters whose state lies in `optimizer.state[p]`."""

    def __init__(
        self, spec: Spec, params: list[Tensor], entries: list[dict[str, Any]]
    ) -> None:
        fields = spec.rule.state._fields
        found = [names_in(fields, entry) for entry in entries]
        self._all = all([some == found[0] for some in found])
        every = names_in(fields, dict.fromkeys(chain.from_iterable(found)))
        running = list(spec.rule.running._fields)
        self._first_field = 1 + len(running)
        self._names = ["step", *running, *every]
        # Of one name itemgetter would give no tuple.
        alike = self._all and len(self._names) > 1
        self._getter = itemgetter(*self._names) if alike else self._get
        self._lengths = list(map(len, entries))
        self.distributed = any_distributed(params)
        # Read once: another thread may put other tensors there meanwhile.
        flat = self.made = self.flat(params, entries)
        self._guard = Guard(self._present(flat), addresses=True)
        names = [name for name in every if name != "kahan_comp"]
        slots = make_slots(names, fields, self.roles(flat), list(map(shards_of, params)))
        super().__init__(spec.rule, slots, slots)
        self.counts = StepCounts(
            self.steps(flat), self.running(flat), not spec.capturable, spec.apart
        )

    def _get(self, entry: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(map(entry.get, self._names))

    def _present(self, flat: list[Any]) -> list[Tensor]:
        return flat if self._all else [x for x in flat if x is not None]

    def flat(self, params: list[Tensor], entries: list[dict[str, Any]]) -> list[Any]:
        """What lies here of the parameters, then of each its count, state, compensation."""
        flat = [*params, *chain.from_iterable(map(self._getter, entries))]
        return to_local(flat) if self.distributed else flat

    def current(
        self, params: list[Tensor], entries: list[dict[str, Any] | None]
    ) -> list[Any] | None:
        """The tensors as they are now, if all is as it was when the plan was made."""
        whole = cast(list[dict[str, Any]], entries)
        try:
            if list(map(len, whole)) != self._lengths:
                return None
            flat = self.flat(params, whole)
            same = self._guard.holds(self._present(flat))
            same = same and self.counts.hold(self.steps(flat), self.running(flat))
        except (KeyError, TypeError):
            return None  # a field has gone, or a whole state, or is no tensor
        return flat if same else None

    def steps(self, flat: list[Any]) -> list[Tensor]:
        """The step counts."""
        return flat[len(self._lengths) :: len(self._names)]

    def running(self, flat: list[Any]) -> list[Tensor]:
        """The running numbers: the first of all parameters, then the next."""
        found: list[Tensor] = []
        for i in range(1, self._first_field):
            found += flat[len(self._lengths) + i :: len(self._names)]
        return found

    def roles(self, flat: list[Any]) -> Roles:
        """The parameters, each field of their state, and their compensations."""
        count, width = len(self._lengths), len(self._names)
        fields = range(self._first_field, width)
        roles = [flat[:count], *(flat[count + i :: width] for i in fields)]
        if self._names[-1] != "kahan_comp":
            roles.append([None] * count)
        return roles


class StepCounts:
    """The step counts of a list of parameters, and the running numbers after those steps.

    Parameters in which both are equal share their numbers.
    """

    def __init__(
        self, steps: list[Tensor], running: list[Tensor], on_host: bool, apart: bool
    ) -> None:
        self._on_host, self._apart = on_host, apart
        self._running = RunningNumbers(running, len(steps), on_host)
        counts: Sequence[Any] = range(len(steps))
        if on_host:
            counts = [step.item() for step in steps]
        elif not (apart or _is_capturing(steps)):
            # The host waits for the device once, here.
            counts = torch.stack(steps).tolist()
        keys: Sequence[Any] = counts
        if running and not isinstance(counts, range):
            keys = list(zip(counts, self._running.values(running)))
        # Of each parameter the place of its numbers among those that differ.
        places = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        self.at = [places[key] for key in keys]
        self._firsts = [self.at.index(i) for i in range(len(places))]
        self.expected = array("f", counts) if on_host else array("f")
        self._versions = list(map(_version, steps))
        self._addresses = array("q", map(Tensor.data_ptr, steps))
        self._native: Native | None = None  # reads and writes all of them in one call
        self._tables = 0, 0, 0  # what it is called with
        once = len(set(self._addresses)) == len(steps)
        self._countable = on_host and once and {s.dtype for s in steps} == {torch.float32}
        self._countable = self._countable and self._running.plain

    @property
    def native(self) -> bool:
        """Whether no operation of torch's reads or writes them."""
        return self._native is not None

    def hold(self, steps: list[Tensor], running: list[Tensor]) -> bool:
        """Whether nobody else has written to these counts, or to the running numbers."""
        if running and not (self._apart or self._running.hold(running, self._native)):
            return False
        if self._native is not None:
            return bool(self._native.counts_hold(*self._tables))
        if self._on_host:
            return [step.item() for step in steps] == list(self.expected)
        return self._apart or list(map(_version, steps)) == self._versions

    def now(
        self, steps: list[Tensor], running: list[Tensor]
    ) -> list[tuple[Scalar, tuple[Scalar, ...]]]:
        """The counts that differ, with the running numbers: on the host, else tensors."""
        numbers = self._running.now(running, self._firsts)
        counts = self.expected if self._on_host else steps
        return [(counts[i], some) for i, some in zip(self._firsts, numbers)]

    def advance_all(self, after: list[Any]) -> None:
        """Count one step more, where that is one call.

        Args:
            after: Of those that differ the running numbers after it.
        """
        assert self._native is not None
        self._native.counts_advance(*self._tables)
        self._running.set_all(self._native, self.at, after)

    def advance(
        self,
        steps: list[Tensor],
        running: list[Tensor],
        after: list[Any],
        numbers: Numbers,
    ) -> None:
        """Count one step more; where there is a flag, only if it is true."""
        if self._native is not None:
            self.advance_all(after)
            torch.autograd.graph.increment_version([*steps, *running])
            return
        self._running.set(running, self.at, after, numbers)
        flags = [numbers.finite[i] for i in numbers.at]
        foreach_add_([step for step, flag in zip(steps, flags) if flag is None], 1.0)
        for step, flag in zip(steps, flags):
            if flag is not None:
                step.add_(flag)
        if self._on_host:
            expected = array("f", [step.item() for step in steps])
            with _lock:
                if self._native is not None:  # another thread's, which holds addresses
                    self.expected[:] = expected
                    return
                self.expected = expected
                if self._countable:
                    # All by one call of C++, where kernels have been compiled by now.
                    tables = address(self._addresses), address(self.expected)
                    self._tables = (*tables, len(steps))
                    self._native = loaded()
        self._versions = list(map(_version, steps))


def _is_capturing(steps: list[Tensor]) -> bool:
    return steps[0].is_cuda and torch.cuda.is_current_stream_capturing()


class Repeat(NamedTuple):
    """A whole step by one list launch, to be run again while only its numbers change.

    With a few small tensors, what is planned and looked up is what a step costs.
    """

    asked: Any  # what the group asked for beside its numbers
    plan: StatePlan
    launch: ListLaunch
    statics: Any
    grads: Guard

    def takes(self, rule: Rule[Any, Any], scalars: PackedScalars) -> bool:
        """Whether numbers are those of the launch, but for their values."""
        same = rule is self.plan.rule and scalars.statics == self.statics
        return same and scalars.on_host

    def run(
        self,
        flat: list[Tensor],
        grads: list[Tensor],
        scalars: PackedScalars,
        after: list[Any],
    ) -> None:
        """Write every result and count the step."""
        self.launch.call(self.launch.pick(grads), scalars)
        torch.autograd.graph.increment_version(flat)
        self.plan.counts.advance_all(after)


class PlanCache:
    """The plans of an optimizer's lists of parameters."""

    def __init__(self) -> None:
        self._plans: dict[Any, StatePlan] = {}
        self._repeats: dict[Any, Repeat] = {}

    def repeat(self, params: list[Tensor]) -> Repeat | None:
        """The last step of a list, if it is of a kind to be repeated."""
        return self._repeats.get(tuple(map(id, params)))

    def remember(self, asked: Any, params: list[Tensor], step: "PreparedStep") -> None:
        """A step that has just been run may be repeated, where it is of that kind."""
        key, numbers = tuple(map(id, params)), step.inputs.numbers
        # None where there is no element to update.
        launch = next(iter(step.launches), None)
        one = len(step.launches) == 1 and len(numbers.scalars) == 1
        one = one and not step.plan.inference  # such tensors have no version
        if isinstance(launch, ListLaunch) and one and step.on_host:
            statics = numbers.scalars[0].statics
            guard = Guard(step.inputs.grads, addresses=False)
            self._repeats[key] = Repeat(asked, step.plan, launch, statics, guard)
        else:
            self._repeats.pop(key, None)

    def find(self, spec: Spec, params: list[Tensor]) -> StatePlan | None:
        """The plan of a list, which may no longer be true."""
        return self._plans.get((spec, *map(id, params)))

    def make(
        self,
        spec: Spec,
        params: list[Tensor],
        entries: list[dict[str, Any]],
        others: int,
    ) -> tuple[StatePlan, list[Any]]:
        """A new plan, to be found by later steps, and the tensors that it is of.

        Args:
            spec: What the group asks for.
            params: The list.
            entries: The state of each, complete.
            others: For so many lists there is room, beside some more.
        """
        while len(self._plans) >= _LISTS + others:
            oldest = next(iter(self._plans))
            self._repeats.pop(oldest[1:], None)
            self._plans.pop(oldest, None)
        plan = StatePlan(spec, params, entries)
        flat, plan.made = plan.made, []
        self._plans[(spec, *map(id, params))] = plan
        return plan, flat


class PreparedStep(NamedTuple):
    """A step of several parameters, checked and compiled: what is left is to run it."""

    plan: StatePlan
    launches: list[Launch]
    inputs: StepInputs
    steps: list[Tensor]
    running: list[Tensor]
    after: list[Any]  # the running numbers after the step, of those that differ
    write: bool

    @property
    def on_host(self) -> bool:
        """Whether it runs no operation of torch, which modes of a thread change."""
        on_host = [x.on_host for x in (*self.launches, *self.inputs.numbers.scalars)]
        return self.plan.counts.native and all(on_host)

    def run(self, count: bool) -> None:
        """Write every result, and if asked to, count the step."""
        self.plan.run(self.launches, self.inputs, self.write)
        if count:
            counts, numbers = self.plan.counts, self.inputs.numbers
            counts.advance(self.steps, self.running, self.after, numbers)
