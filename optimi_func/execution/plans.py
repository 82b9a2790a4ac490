"""Plans: the launches of a list of parameters, kept for the steps that are alike.

A plan is a cache: `state[p]` is the truth. Whoever loads, copies, casts, moves or edits it
is noticed at the next step, which then plans anew. Plans keep no tensor alive.
"""

from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func._distributed import any_distributed, shards_of, to_local
from optimi_func._rule import Rule, Storage
from optimi_func._storage import names_in
from optimi_func.execution.counts import Counts
from optimi_func.execution.executors import Executor, plan_launches
from optimi_func.execution.guards import Guard
from optimi_func.execution.launches import Launch, StepInputs, Update
from optimi_func.execution.scalars import Numbers
from optimi_func.execution.slots import Roles, Slot, make_slots

# Kinds of gradients and numbers for which a plan keeps launches: Ranger has two.
_KINDS = 8
# Lists that are kept beside one for each parameter: where they never come again, as with
# experts, the oldest go.
_LISTS = 32


class Launches(NamedTuple):
    """The launches of one kind of step, and what its gradients were."""

    grads: Guard
    launches: list[Launch]
    on_host: bool  # whether they run no operation of torch, which modes of a thread change


class Plan:
    """The launches of a list of parameters, by the kind of their gradients and numbers."""

    def __init__(
        self, rule: Rule[Any, Any], slots: list[Slot], targets: list[Slot]
    ) -> None:
        self.rule = rule
        self._slots, self._targets = slots, targets
        self.inference = any([slot.inference for slot in targets])
        self.coded = any([slot.coded for slot in slots])
        self._known: dict[Any, Launches] = {}

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
    ) -> Launches | None:
        """The launches of an earlier step that was like this one."""
        known = self._known.get(self._kind(executor, numbers, write))
        return known if known is not None and known.grads.holds(grads) else None

    def make(
        self,
        executor: Executor,
        params: list[Tensor],
        grads: list[Tensor],
        numbers: Numbers,
        write: bool,
    ) -> Launches:
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
        on_host = all([x.on_host for x in launches])
        made = Launches(Guard(grads, addresses=False), launches, on_host)
        self._known[self._kind(executor, numbers, write)] = made
        return made

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
        counted = ["step", *spec.rule.running._fields]
        self._names, self._counted = [*counted, *every], len(counted)
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
        counts = self.counted(flat)
        self.counts = Counts(counts, len(params), not spec.capturable, spec.apart)

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
            same = same and self.counts.hold(self.counted(flat))
        except (KeyError, TypeError):
            return None  # a field has gone, or a whole state, or is no tensor
        return flat if same else None

    def counted(self, flat: list[Any]) -> list[Tensor]:
        """The step counts, then the first running number of all parameters, and so on."""
        first, width = len(self._lengths), len(self._names)
        found = flat[first::width]
        for i in range(1, self._counted):
            found += flat[first + i :: width]
        return found

    def roles(self, flat: list[Any]) -> Roles:
        """The parameters, each field of their state, and their compensations."""
        count, width = len(self._lengths), len(self._names)
        fields = range(self._counted, width)
        roles = [flat[:count], *(flat[count + i :: width] for i in fields)]
        if self._names[-1] != "kahan_comp":
            roles.append([None] * count)
        return roles


class PlanCache:
    """The plans of an optimizer's lists of parameters."""

    def __init__(self) -> None:
        self._plans: dict[Any, StatePlan] = {}

    def find(self, key: Any, rule: Rule[Any, Any]) -> StatePlan | None:
        """The plan of a list, which may no longer be true."""
        plan = self._plans.get(key)
        return plan if plan is not None and plan.rule is rule else None

    def make(
        self,
        key: Any,
        spec: Spec,
        params: list[Tensor],
        entries: list[dict[str, Any]],
        others: int,
    ) -> tuple[StatePlan, list[Any]]:
        """A new plan, to be found by later steps, and the tensors that it is of.

        Args:
            key: By which to find it.
            spec: What the group asks for.
            params: The list.
            entries: The state of each, complete.
            others: For so many lists there is room, beside some more.
        """
        while len(self._plans) >= _LISTS + others:
            self._plans.pop(next(iter(self._plans)), None)
        plan = StatePlan(spec, params, entries)
        flat, plan.made = plan.made, []
        self._plans[key] = plan
        return plan, flat


class PreparedStep(NamedTuple):
    """A step of several parameters, checked and compiled: what is left is to run it."""

    plan: StatePlan
    found: Launches
    flat: list[Any]
    grads: list[Tensor]
    numbers: Numbers
    after: list[Any]  # the running numbers after the step, of those that differ
    write: bool

    @property
    def on_host(self) -> bool:
        """Whether it runs no operation of torch, which modes of a thread change."""
        host = self.found.on_host and self.plan.counts.native
        return host and all([x.on_host for x in self.numbers.scalars])

    def run(self, count: bool) -> None:
        """Write every result, and if asked to, count the step."""
        plan, numbers, flat = self.plan, self.numbers, self.flat
        launches = self.found.launches
        if (
            len(launches) == 1
            and self.write
            and count
            and self.on_host
            and (not plan.inference)
        ):
            # With a few small tensors, lists of them are what a step costs.
            launches[0].run(StepInputs([], [], self.grads, numbers))
            torch.autograd.graph.increment_version(flat)
            plan.counts.advance([], self.after, numbers)
            return
        roles, counted = plan.roles(flat), plan.counted(flat)
        plan.run(launches, StepInputs(roles, roles, self.grads, numbers), self.write)
        if count:
            native = plan.counts.native
            plan.counts.advance(counted, self.after, numbers)
            if native:
                torch.autograd.graph.increment_version(counted)
