"""Plans: the launches of a list of parameters, kept for later steps.

A plan is a cache, and `state[p]` is the truth. If state is loaded, copied, cast, moved or
edited, the next step notices and makes a new plan. Plans keep no tensor alive.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

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
from optimi_func.execution.launches import Launch
from optimi_func.execution.slots import Columns, Slot, Step, Update, make_slots

# Kinds of gradients and scalars for which a plan keeps launches. Ranger has two.
_KINDS = 8


def raise_versions(written: list[Tensor]) -> None:
    """Tell autograd that tensors were written, because kernels write past it.

    Otherwise a backward that saved one of them would not notice.
    """
    try:
        torch.autograd.graph.increment_version(written)
    except RuntimeError:  # an inference tensor has no version
        torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


class _Launches(NamedTuple):
    """The calls that update the parameters of a plan."""

    calls: list[Launch]
    without_torch: bool  # True if none calls an operation of torch, see `Launch`


class Plan:
    """The launches of a list of parameters, for each kind of gradients and scalars."""

    def __init__(self, rule: Rule, slots: list[Slot], places: Sequence[int]) -> None:
        if rule.draws:  # places of the parameters in their optimizer or tree
            slots = [x._replace(place=i) for x, i in zip(slots, places)]
        self.rule, self.slots = rule, slots
        # Parameters without elements have no launch, though their state may have numbers.
        self.empty = [i for i, slot in enumerate(slots) if not slot.numel]
        self.coded = any([slot.coded for slot in slots])
        self.rounds_randomly = False  # True if parameters are rounded at random
        # For one layout of gradients each. `backward` gives them that of their parameters.
        self._cached: dict[object, tuple[Guard, _Launches]] = {}

    def cached_launches(self, executor: Executor, step: Step) -> _Launches | None:
        """Return those of an earlier step with gradients and scalars of the same kind."""
        found = self._cached.get(_kind(executor, step))
        inputs = _inputs(step) if step.columns.given else step.columns.grads
        return found[1] if found and found[0].holds(inputs) else None

    def new_launches(self, executor: Executor, step: Step) -> _Launches:
        """Plan, compile and cache the launches of a step, whose gradients fit."""
        (grads, own, _, given), packed, at, write, *_ = step
        rows = enumerate(zip(self.slots, own[PARAM], grads, at))
        updates = [Update(i, slot, p, g, k, packed[k]) for i, (slot, p, g, k) in rows]
        for name, column in given.items():
            pairs = zip(updates, column)
            updates = [
                u if x is None else u._replace(given={**u.given, name: x}) for u, x in pairs
            ]
        with kernel_context(grads[0].device if grads else torch.device("cpu")):
            calls = plan_launches(executor, self.rule, updates, write)
        if len(self._cached) >= _KINDS:
            self._cached.clear()
        launches = _Launches(calls, all([call.without_torch for call in calls]))
        guard = Guard(_inputs(step), addresses=False)
        self._cached[_kind(executor, step)] = guard, launches
        return launches


def _kind(executor: Executor, step: Step) -> object:
    """Return what launches depend on besides facts about the gradients."""
    packed = step.packed
    # A dispatch mode that watches single operations has to see them.
    watched = any_torch_dispatch_mode_on_stack()
    kind = executor, step.write, watched, packed[0].statics
    if len(packed) > 1:
        kind = *kind, tuple([x.statics for x in packed]), tuple(step.at)
    return kind


def _inputs(step: Step) -> list[Tensor]:
    """Return the gradients and the tensors that are given besides."""
    grads, _, _, given = step.columns
    return [x for x in chain(grads, *given.values()) if isinstance(x, Tensor)]


def _present(tensors: list[Any]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


class _EntryReader:
    """Reads parameters and their entries into one flat list, which a plan's guard checks.

    The list has the parameters, then for each its counts, its state and its compensation.
    A tensor that one entry has and another lacks is None there.
    """

    def __init__(self, rule: Rule, entries: Sequence[Mapping[str, object]]) -> None:
        fields, count = rule.state._fields, len(entries)
        present = [names_in(fields, entry) for entry in entries]
        # True if no entry lacks a tensor that another has.
        self.complete = all([names == present[0] for names in present])
        # Joined ones are the same for all parameters, and written at the end of a step.
        counted = rule.counted if rule.join is None else ("step",)
        stored = names_in(fields, dict.fromkeys(chain.from_iterable(present)))
        self.names = names = [*counted, *stored]
        # With one name itemgetter would return no tuple.
        alike = self.complete and len(names) > 1
        self._getter = itemgetter(*names) if alike else self._get
        slices = [slice(count + i, None, len(names)) for i in range(len(names))]
        self.counted = slices[: len(counted)]  # where the list has the counts
        self._slices = {PARAM: slice(count), **dict(zip(stored, slices[len(counted) :]))}

    def _get(self, entry: Mapping[str, object]) -> tuple[Any, ...]:
        return tuple(map(entry.get, self.names))

    def read(self, params: list[Tensor], entries: Sequence[Any]) -> list[Any]:
        """Return the list, or raise KeyError or TypeError if a tensor is missing."""
        return [*params, *chain.from_iterable(map(self._getter, entries))]

    def columns(self, tensors: list[Any], grads: list[Any]) -> Columns:
        """Return the columns of a list, which are in place, without the counts."""
        own = dict(zip(self._slices, map(tensors.__getitem__, self._slices.values())))
        return Columns(grads, own, own)


class ClassPlan(Plan):
    """The plan of a class's parameters, which stay where they are.

    Make it by `of`. Call `current` before each step: it returns the local tensors, or None
    if the plan is stale. `reader.columns` arranges them for launches.
    """

    def __init__(
        self,
        rule: Rule,
        slots: list[Slot],
        places: Sequence[int],
        reader: _EntryReader,
        guard: Guard,
        counts: Counts,
    ) -> None:
        super().__init__(rule, slots, places)
        self.reader, self._guard, self.counts = reader, guard, counts
        self.viewed = False  # True if local tensors are others than the parameters
        self.holders: list[Holders] = []  # the processes that divide its maps
        self._lengths: list[int] = []  # of the entries

    @staticmethod
    def of(
        rule: Rule,
        counting: tuple[bool, bool],
        rows: list[tuple[Tensor, dict[str, object], Holders | None]],
        places: Sequence[int],
    ) -> "tuple[ClassPlan, list[Any]]":
        """Plan for parameters with their entries, and the processes that divide their maps.

        `counting` is True for step counts on the device, and True if each parameter has its
        own, because a flag on the device may skip its step.
        """
        params, entries, holders = map(list, zip(*rows))
        capturable, flagged = counting
        reader = _EntryReader(rule, entries)
        viewed = any_distributed(params) or any_complex(params)
        # Read once, because another thread may replace them meanwhile.
        full = reader.read(params, entries)
        tensors = to_local(full) if viewed else full
        local, whole = reader.columns(tensors, []), reader.columns(full, [])
        plan = ClassPlan(
            rule,
            make_slots(rule, local, whole.own, holders),
            places,
            reader,
            Guard(_present(tensors), addresses=True),
            Counts(tensors, reader.counted, not capturable, flagged),
        )
        plan.viewed, plan._lengths = viewed, list(map(len, entries))
        plan.holders = [x for x in holders if x is not None]
        return plan, tensors

    def moved(
        self, params: list[Tensor], entries: list[dict[str, object]]
    ) -> "tuple[ClassPlan, list[Any]] | None":
        """Return the plan of states that differ in their addresses alone, or None.

        It saves 30 to 60 % of a step after `state.clear()`, and 50 to 90 % after a load.
        """
        names = {*self.reader.names}
        if self.viewed or self.holders or not all([names == x.keys() for x in entries]):
            return None
        tensors = self.reader.read(params, entries)
        try:
            guard = self._guard.moved(tensors, len(params))
        except TypeError:
            guard = None  # a field is no tensor
        if guard is None:
            return None
        plan = copy(self)
        plan._guard, plan._cached = guard, {}
        plan._lengths = list(map(len, entries))
        plan.counts = self.counts.of(tensors)
        columns = self.reader.columns(tensors, [])
        places, own = enumerate(plan.slots), columns.own
        rows = [tuple([own[k][i].data_ptr() for k in x.dtypes]) for i, x in places]
        plan.slots = [x._replace(addresses=row) for x, row in zip(self.slots, rows)]
        for kind, (grads, launches) in self._cached.items():
            if all([x.movable for x in launches.calls]):
                calls = [x.moved(columns) for x in launches.calls]
                plan._cached[kind] = grads, launches._replace(calls=calls)
        return plan, tensors

    def current(
        self, params: list[Tensor], entries: list[Mapping[str, object] | None]
    ) -> list[Any] | None:
        """Return the local tensors as the reader lists them, or None if the plan is stale.

        Counts are read again if something else has written to them.
        """
        try:
            rows: Any = entries
            if list(map(len, rows)) != self._lengths:
                return None
            tensors = self.reader.read(params, rows)
            if self.viewed:
                tensors = to_local(tensors)
            present = tensors if self.reader.complete else _present(tensors)
            same = self._guard.holds(present)
            if same and not self.counts.hold(tensors):
                self.counts.read(tensors)  # of another plan's steps, or as written
            return tensors if same and self.counts.valid else None
        except (KeyError, TypeError):
            return None  # a field or a whole entry is missing, or is no tensor
