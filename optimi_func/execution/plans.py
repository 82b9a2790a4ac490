"""Plans: the launches of a list of parameters, kept for later steps.

A plan is a cache, and `state[p]` is the truth. If state is loaded, copied, cast, moved or
edited, the next step notices and makes a new plan. Plans keep no tensor alive.
"""

from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func.core.distributed import any_distributed, shards_of, to_local
from optimi_func.core.rule import Rule, Storage
from optimi_func.core.storage import names_in
from optimi_func.execution.counts import Counts
from optimi_func.execution.executors import Executor, plan_launches
from optimi_func.execution.guards import Guard
from optimi_func.execution.launches import Launch, StepInputs, Update, run_launches
from optimi_func.execution.slots import Roles, Slot, make_slots

# Kinds of gradients and scalars for which a plan keeps launches. Ranger has two.
_KINDS = 8
# Plans that are kept, besides one for each parameter. If lists of parameters never come
# again, as with experts, the oldest plans are dropped.
_LISTS = 32

_raw = attrgetter("raw")


class Spec(NamedTuple):
    """A param group's rule and options, which its parameters' state depends on."""

    rule: Rule[Any, Any]
    storage: Storage
    capturable: bool  # step counts are on the parameters' device


def make_launches(
    executor: Executor,
    rule: Rule[Any, Any],
    slots: list[Slot],
    inputs: StepInputs,
    write: bool,
) -> list[Launch]:
    """Plan the launches of a step, and compile their kernels."""
    params, grads, packed = inputs.roles[0], inputs.grads, inputs.packed
    updates = [
        Update(i, slot, p, g, at, packed[at])
        for i, (slot, p, g, at) in enumerate(zip(slots, params, grads, inputs.at))
    ]
    return plan_launches(executor, rule, updates, write)


def raise_versions(written: list[Tensor], inference: bool) -> None:
    """Tell autograd that tensors were written, because kernels write past it.

    Otherwise a backward that saved one of them would not notice.
    """
    if inference:
        written = [x for x in written if not x.is_inference()]  # which have no version
    torch.autograd.graph.increment_version(written)


class Plan:
    """The launches of a list of parameters, for each kind of gradients and scalars.

    Args:
        spec: What the group asks for.
        apart: Each parameter has counts of its own (see `Counts`).
        params: The parameters.
        entries: Their state, complete.
    """

    def __init__(
        self,
        spec: Spec,
        apart: bool,
        params: list[Tensor],
        entries: list[dict[str, Any]],
    ) -> None:
        self.rule = spec.rule
        fields = spec.rule.state._fields
        found = [names_in(fields, entry) for entry in entries]
        self._all = all([some == found[0] for some in found])
        every = names_in(fields, dict.fromkeys(chain.from_iterable(found)))
        counted = ["step", *spec.rule.running._fields]
        self._names, self._counted = [*counted, *every], len(counted)
        # With one name itemgetter would return no tuple.
        alike = self._all and len(self._names) > 1
        self._getter = itemgetter(*self._names) if alike else self._get
        self._lengths = list(map(len, entries))
        self.distributed = any_distributed(params)
        # Read once, because another thread may replace them meanwhile.
        flat = [*params, *chain.from_iterable(map(self._getter, entries))]
        flat = self.made = to_local(flat) if self.distributed else flat
        self._guard = Guard(self._present(flat), addresses=True)
        shape = len(params), len(self._names), self._counted
        self.counts = Counts(flat, *shape, not spec.capturable, apart)
        names = [name for name in every if name != "kahan_comp"]
        roles = self.roles(flat)
        self._slots = make_slots(names, fields, roles, roles, list(map(shards_of, params)))
        self._inference = any(map(Tensor.is_inference, self._present(flat)))
        self.coded = any([slot.coded for slot in self._slots])
        # The last two layouts of gradients, because programs take turns between two.
        self._known: dict[Any, list[tuple[Guard, tuple[list[Launch], bool]]]] = {}

    def _get(self, entry: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(map(entry.get, self._names))

    def _present(self, flat: list[Any]) -> list[Tensor]:
        return flat if self._all else [x for x in flat if x is not None]

    def current(
        self, params: list[Tensor], entries: list[dict[str, Any] | None]
    ) -> list[Any] | None:
        """Return the local tensors, or None if the plan is no longer true.

        They are the parameters, then for each its counts, state and compensation.
        """
        try:
            whole: Any = entries
            if list(map(len, whole)) != self._lengths:
                return None
            flat = [*params, *chain.from_iterable(map(self._getter, whole))]
            if self.distributed:
                flat = to_local(flat)
            same = self._guard.holds(flat if self._all else self._present(flat))
            return flat if same and self.counts.hold(flat) else None
        except (KeyError, TypeError):
            return None  # a field or a whole entry is missing, or is no tensor

    def roles(self, flat: list[Any]) -> Roles:
        """Return the parameters, each field of their state, and their compensations."""
        count, width = len(self._lengths), len(self._names)
        roles = [flat[:count]]
        for i in range(self._counted, width):
            roles.append(flat[count + i :: width])
        if self._names[-1] != "kahan_comp":
            roles.append([None] * count)
        return roles

    def launches(
        self, executor: Executor, inputs: StepInputs, write: bool, new: bool
    ) -> tuple[list[Launch], bool] | None:
        """Return the launches of a step, and True if all are `Launch.host`.

        Args:
            executor: What runs them.
            inputs: What the step reads and writes.
            write: False moves the state alone.
            new: Plan and keep new ones. False: return those of an earlier step with
                gradients and scalars of the same kind, or None.
        """
        packed = inputs.packed
        # A dispatch mode that watches single operations has to see them.
        watched = any_torch_dispatch_mode_on_stack()
        kind: Any = executor, write, watched, packed[0].statics
        if len(packed) > 1:
            kind = *kind, tuple([x.statics for x in packed]), tuple(inputs.at)
        if not new:
            for guard, known in self._known.get(kind, ()):
                if guard.holds(inputs.grads):
                    return known
            return None
        made = make_launches(executor, self.rule, self._slots, inputs, write)
        if len(self._known) >= _KINDS:
            self._known.clear()
        found = made, all([launch.host for launch in made])
        last = self._known.get(kind, [])[:1]
        self._known[kind] = [(Guard(inputs.grads, addresses=False), found), *last]
        return found

    def run(
        self,
        launches: list[Launch],
        flat: list[Any],
        inputs: StepInputs,
        after: list[Any],
        moved: list[Tensor],
        write: bool,
        count: bool,
    ) -> None:
        """Write every result, and if `count` is true, count the step.

        Args:
            launches: From `launches`.
            flat: From `current`, or `made`.
            inputs: The same as roles.
            after: The running scalars after the step.
            moved: More tensors that share memory with what is written.
            write: False moves the state alone.
            count: False: the step goes on.
        """
        roles = inputs.roles if write else inputs.roles[1:-1]
        run_launches(launches, inputs, roles)
        if not any(map(_raw, launches)):
            written = moved
        elif write and count:
            written = flat + moved if self._all else self._present(flat) + moved
        else:
            counts = self.counts.tensors(flat) if count else []
            written = [x for x in chain(*roles, counts, moved) if x is not None]
        raise_versions(written, self._inference)
        if count:
            self.counts.advance(flat, after, inputs.packed, inputs.at)


class PlanCache:
    """The plans of an optimizer's lists of parameters."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def find(self, key: Any, rule: Rule[Any, Any]) -> Plan | None:
        """Return the plan of a list, which may no longer be true."""
        plan = self._plans.get(key)
        return plan if plan is not None and plan.rule is rule else None

    def keep(self, key: Any, plan: Plan, others: int) -> None:
        """Keep a plan, in the place of the oldest if there are `others` and some more."""
        while len(self._plans) >= _LISTS + others:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[key] = plan
