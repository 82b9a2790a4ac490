"""Plans: the launches of a list of parameters, kept for later steps.

A plan is a cache, and `state[p]` is the truth. If state is loaded, copied, cast, moved or
edited, the next step notices and makes a new plan. Plans keep no tensor alive.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func.core.distributed import any_complex, any_distributed, to_local
from optimi_func.core.owners import Holders
from optimi_func.core.rule import Rule
from optimi_func.core.storage import PARAM, names_in
from optimi_func.execution.counts import Counts
from optimi_func.execution.executors import Executor, plan_launches
from optimi_func.execution.guards import Guard
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.launches import Launch, run_launches
from optimi_func.execution.slots import Columns, Slot, Step, Update, make_slots
from optimi_func.execution.sums import Part

# Kinds of gradients and scalars for which a plan keeps launches. Ranger has two.
_KINDS = 8

_raw = attrgetter("raw")


def raise_versions(written: list[Tensor]) -> None:
    """Tell autograd that tensors were written, because kernels write past it.

    Otherwise a backward that saved one of them would not notice.
    """
    try:
        torch.autograd.graph.increment_version(written)
    except RuntimeError:  # an inference tensor has no version
        torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


class Plan:
    """The launches of a list of parameters, for each kind of gradients and scalars."""

    def __init__(self, rule: Rule, slots: list[Slot], places: Sequence[int]) -> None:
        if rule.draws:  # places of the parameters in their optimizer or tree
            slots = [x._replace(place=i) for x, i in zip(slots, places)]
        self.rule, self.slots = rule, slots
        self.coded = any([slot.coded for slot in slots])
        self.rounds = False  # True if parameters are rounded at random
        # For one layout of gradients each. `backward` gives them that of their parameters.
        self._known: dict[object, tuple[Guard, tuple[list[Launch], bool]]] = {}

    def launches(
        self, executor: Executor, step: Step, check: Callable[[], None]
    ) -> tuple[list[Launch], bool]:
        """Return the launches of a step, and True if all are `Launch.host`.

        They are those of an earlier step with gradients and scalars of the same kind, or
        they are planned, compiled and kept. `check` raises if these gradients do not fit.
        """
        # A dispatch mode that watches single operations has to see them.
        watched = any_torch_dispatch_mode_on_stack()
        (grads, own, _, given), packed, at, write, *_ = step
        kind = executor, write, watched, packed[0].statics
        if len(packed) > 1:
            kind = *kind, tuple([x.statics for x in packed]), tuple(at)
        inputs = grads
        if given:
            every = chain(grads, *given.values())
            inputs = [x for x in every if isinstance(x, Tensor)]
        if (known := self._known.get(kind)) and known[0].holds(inputs):
            return known[1]
        check()
        rows = enumerate(zip(self.slots, own[PARAM], grads, at))
        updates = [Update(i, slot, p, g, k, packed[k]) for i, (slot, p, g, k) in rows]
        for name, column in given.items():
            pairs = zip(updates, column)
            updates = [
                u if x is None else u._replace(given={**u.given, name: x}) for u, x in pairs
            ]
        with kernel_context(grads[0].device if grads else torch.device("cpu")):
            launches = plan_launches(executor, self.rule, updates, write)
        if len(self._known) >= _KINDS:
            self._known.clear()
        result = launches, all([launch.host for launch in launches])
        self._known[kind] = Guard(inputs, addresses=False), result
        return result


class ClassPlan(Plan):
    """The plan of a class's parameters, which stay where they are.

    Call `current` first: it returns the local tensors, or None if the plan is stale.
    `columns` arranges them for launches, and `run` writes the step.
    """

    def __init__(
        self,
        rule: Rule,
        counting: tuple[bool, bool],
        rows: list[tuple[Tensor, dict[str, object], Holders | None]],
        places: Sequence[int],
    ) -> None:
        """Plan for parameters with their entries, and the processes that divide their maps.

        `counting` is True for step counts on the device, and True if each parameter has its
        own, because a flag on the device may skip its step.
        """
        params, entries, holders = map(list, zip(*rows))
        capturable, flagged = counting
        fields = rule.state._fields
        field_names = [names_in(fields, entry) for entry in entries]
        self._all = all([present == field_names[0] for present in field_names])
        every = names_in(fields, dict.fromkeys(chain.from_iterable(field_names)))
        # Joined ones are the same for all parameters, and written at the end of a step.
        counted = rule.counted if rule.join is None else ("step",)
        self._names = [*counted, *every]
        # With one name itemgetter would return no tuple.
        alike = self._all and len(self._names) > 1
        self._getter = itemgetter(*self._names) if alike else self._get
        self._lengths = list(map(len, entries))
        # True if local tensors are others than the parameters.
        self.viewed = any_distributed(params) or any_complex(params)
        # Read once, because another thread may replace them meanwhile.
        full = [*params, *chain.from_iterable(map(self._getter, entries))]
        tensors = self.made = to_local(full) if self.viewed else full
        self._guard = Guard(self._present(tensors), addresses=True)
        # Where the list of all tensors has those of a name: one of each parameter's.
        rows_of = [
            slice(len(params) + i, None, len(self._names)) for i in range(len(self._names))
        ]
        self._slices = {PARAM: slice(len(params)), **dict(zip(self._names, rows_of))}
        counted_slices = [self._slices.pop(name) for name in counted]
        self._counting = counted_slices, not capturable, flagged
        self.counts = Counts(tensors, *self._counting)
        local, whole = (self.columns(x, []) for x in (tensors, full))
        self.holders = [x for x in holders if x is not None]
        super().__init__(rule, make_slots(rule, local, whole.own, holders), places)

    def moved(
        self, params: list[Tensor], entries: list[dict[str, object]]
    ) -> "ClassPlan | None":
        """Return the plan of states that differ in their addresses alone, or None.

        It saves 30 to 60 % of a step after `state.clear()`, and 50 to 90 % after a load.
        """
        names = {*self._names}
        if self.viewed or self.holders or not all([names == x.keys() for x in entries]):
            return None
        tensors = [*params, *chain.from_iterable(map(self._getter, entries))]
        try:
            guard = self._guard.moved(tensors, len(params))
        except TypeError:
            guard = None  # a field is no tensor
        if guard is None:
            return None
        plan = copy(self)
        plan.made, plan._guard, plan._known = tensors, guard, {}
        plan._lengths = list(map(len, entries))
        plan.counts = Counts(tensors, *self._counting)
        columns = plan.columns(tensors, [])
        places, own = enumerate(plan.slots), columns.own
        rows = [tuple([own[k][i].data_ptr() for k in x.dtypes]) for i, x in places]
        plan.slots = [x._replace(addresses=row) for x, row in zip(self.slots, rows)]
        for kind, (grads, (launches, host)) in self._known.items():
            if all([x.movable for x in launches]):
                moved_launches = [x.moved(columns) for x in launches]
                plan._known[kind] = grads, (moved_launches, host)
        return plan

    def _get(self, entry: dict[str, object]) -> tuple[Any, ...]:
        return tuple(map(entry.get, self._names))

    def _present(self, tensors: list[Any]) -> list[Tensor]:
        return tensors if self._all else [x for x in tensors if x is not None]

    def current(
        self, params: list[Tensor], entries: list[Mapping[str, object] | None]
    ) -> list[Any] | None:
        """Return the local tensors, or None if the plan is stale.

        They are the parameters, then for each its counts, state and compensation. Counts
        are read again if something else has written to them.
        """
        try:
            whole: Any = entries
            if list(map(len, whole)) != self._lengths:
                return None
            tensors = [*params, *chain.from_iterable(map(self._getter, whole))]
            if self.viewed:
                tensors = to_local(tensors)
            same = self._guard.holds(tensors if self._all else self._present(tensors))
            if same and not self.counts.hold(tensors):
                self.counts.read(tensors)  # of another plan's steps, or as written
            return tensors if same and self.counts.valid else None
        except (KeyError, TypeError):
            return None  # a field or a whole entry is missing, or is no tensor

    def columns(self, tensors: list[Any], grads: list[Any]) -> Columns:
        """Return the columns that launches take, which are in place."""
        own = dict(zip(self._slices, map(tensors.__getitem__, self._slices.values())))
        return Columns(grads, own, own)

    def run(
        self,
        launches: list[Launch],
        tensors: list[Any],
        step: Step,
        after: Sequence[object],
        also_written: list[Tensor],
        count: bool,
    ) -> dict[int, Part]:
        """Write every result, and if `count` is true, count the step; return the sums.

        `after` are the running scalars after the step, and `also_written` are more tensors
        that share memory with what is written.
        """
        joins = step.write and self.rule.join is not None
        if not any(map(_raw, launches)):
            written = also_written
        elif step.write and count:
            written = tensors if self._all else self._present(tensors)
            written = written + also_written
        else:
            counts = self.counts.tensors(tensors) if count else []
            outputs = step.columns.written(step.write)
            written = [x for x in chain(*outputs, counts, also_written) if x is not None]
        # Before the kernels, whose data put these tensors out of the caches.
        raise_versions(written)
        parts = run_launches(launches, step, joins)
        if count:
            self.counts.advance(tensors, [] if joins else after, step.packed, step.at)
        return parts
