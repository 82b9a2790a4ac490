"""What was found out about parameters, and about those that step together.

A cache: `state[p]` is the truth, and whoever loads, copies, casts, moves or edits it is
noticed at the next step.
"""

from collections.abc import Callable
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func._distributed import leaf_to_local, shards_of
from optimi_func._rule import Leaf, Rule
from optimi_func.execution.batching import SMALL
from optimi_func.execution.buckets import (
    CHUNK,
    Bucket,
    Entries,
    Launch,
    Scratch,
    may_share,
)
from optimi_func.execution.facts import Facts
from optimi_func.execution.jobs import (
    Bundle,
    Job,
    chunks,
    fits,
    is_plain,
    lie_plainly,
)
from optimi_func.execution.kernel import Numbers, sweeps
from optimi_func.execution.lists import LeafList, ListLaunch, Roles

# A cohort that was lost so often, to another list or to somebody's edits, stays lost.
_PATIENCE = 3
# Launches that a row remembers, of different kinds: Ranger has two.
_KINDS = 8
# Lists that are remembered: where they never come again, as with experts, the oldest go.
_MEMORY = 32

_step_of = itemgetter("step")
_version = attrgetter("_version")
_numel = attrgetter("numel")
_place = attrgetter("at")
T = TypeVar("T")


class Asked(NamedTuple):
    """What a group asks of its parameters' state."""

    rule: Rule[Any, Any]
    kahan_sum: bool | None
    capturable: bool  # counts lie on the parameters' device
    foreach: bool  # which has small leaves in buckets everywhere


class Known:
    """What was found out about a parameter, and whether it still is so."""

    __slots__ = ("asked", "bundle", "step")

    def __init__(self, asked: Asked, p: Tensor, state: dict[str, Any]) -> None:
        self.asked = asked
        self.step: Tensor = state["step"]
        fields = asked.rule.state(*[state[name] for name in asked.rule.state._fields])
        leaf = leaf_to_local(Leaf(p, fields, state.get("kahan_comp")))
        self.bundle = Bundle(leaf, shards_of(p))

    def holds(self, state: dict[str, Any] | None, asked: Asked, p: Tensor) -> bool:
        """Whether it still is so, of this state of the parameter."""
        if state is None or asked != self.asked or state.get("step") is not self.step:
            return False
        fields = [state.get(name) for name in asked.rule.state._fields]
        comp = state.get("kahan_comp")
        tensors = [x for x in [p, *fields] if x is not None]
        if len(tensors) <= len(fields) or (comp is not None) != self.bundle.compensated:
            return False
        return self.bundle.holds(tensors if comp is None else [*tensors, comp])


class Row:
    """Leaves of as many tensors each, handed to an executor one by one.

    Where that makes lists of all of them, these are launched again at the next step, as
    long as the gradients are of the same kind.
    """

    def __init__(
        self, at: list[int], bundles: list[Bundle], names: list[str], ages: list[int]
    ) -> None:
        self.at = at  # the places of its parameters among those that step together
        self.bundles = bundles
        self._ages = ages  # of each the place among the numbers
        self._names = names
        # Of each role one comparison for all leaves.
        roles = zip(*[bundle.tensors for bundle in bundles])
        self._facts = [Facts(list(role)) for role in roles]
        self._pointers = list(map(list, zip(*[bundle.pointers for bundle in bundles])))
        self._known: dict[tuple[Any, ...], _Launched] = {}
        self._filled = False

    def pick(self, each: list[T]) -> list[T]:
        """Of a list with something for each of those that step together the row's part."""
        if len(each) == len(self.at):
            return each  # all of them, in their order
        return [each[i] for i in self.at]

    @property
    def held(self) -> list[Bundle]:
        """Those that hold tensors since the last launches."""
        return self.bundles if self._filled else []

    def found(self, params: list[Tensor], entries: Entries) -> Roles | None:
        """The tensors, if all is as it was of them."""
        roles = [params]
        roles += [list(map(itemgetter(name), entries)) for name in self._names]
        for role, facts, pointers in zip(roles, self._facts, self._pointers):
            if list(map(Tensor.data_ptr, role)) != pointers or not facts.hold(role):
                return None
        return roles

    def launches(
        self,
        kind: tuple[Any, ...],
        roles: Roles,
        grads: list[Tensor],
        numbers: list[Numbers],
        ok: Tensor | None,
        plan: Callable[[list[Job]], list[Launch]],
    ) -> list[Launch] | None:
        """What updates them; None where a gradient is unlike its parameter.

        Args:
            kind: What decides on the executor, beside the jobs.
            roles: The tensors that were found.
            grads: A gradient for each.
            numbers: Those of each age.
            ok: 0-d bool; where it is false nothing changes.
            plan: Makes launches of jobs.
        """
        kind = (*kind, ok is None, *[x.statics for x in numbers])
        self._filled = False
        known = self._known.get(kind)
        # What watches single operations is to see them.
        if (
            known is not None
            and known.facts.hold(grads)
            and not any_torch_dispatch_mode_on_stack()
        ):
            launches: list[Launch] = []
            for leaves, at in known.lists:
                own = numbers[self._ages[at[0]]]
                if len(at) < len(grads):
                    some = [[role[i] for i in at] for role in (grads, *roles)]
                    launches.append(leaves.launch(some[1:], some[0], own, ok, None))
                else:
                    launches.append(leaves.launch(roles, grads, own, ok, None))
            return launches
        self._filled = True
        for bundle, tensors in zip(self.bundles, zip(*roles)):
            bundle.tensors = list(tensors)
        if not all(fits(bundle.p, g) for bundle, g in zip(self.bundles, grads)):
            return None
        rows = zip(self.bundles, grads, [numbers[age] for age in self._ages])
        launches = plan([Job(b, g, its, b, ok, None, None) for b, g, its in rows])
        lists = [x.leaves for x in launches if isinstance(x, ListLaunch)]
        if len(self._known) >= _KINDS:
            self._known.clear()
        self._known.pop(kind, None)
        if len(lists) == len(launches) and lie_plainly(grads):
            places = {id(bundle): i for i, bundle in enumerate(self.bundles)}
            found = [(x, [places[id(source)] for source in x.sources]) for x in lists]
            self._known[kind] = _Launched(Facts(grads), found)
        return launches


class _Launched(NamedTuple):
    """What a row launched, to be launched again."""

    facts: Facts  # of the gradients
    # With the places of their leaves in the row; all of them only in the row's order.
    lists: list[tuple[LeafList, list[int]]]


class Cohort:
    """Parameters of one group that step together, time and again in one order.

    Their step counts lie side by side in one tensor, the state of the small ones in
    buckets; the tensors in `state[p]` stay the objects they are. Those of one age stay
    so, unless somebody writes to a count.
    """

    def __init__(self, asked: Asked, members: list[Known]) -> None:
        self.asked = asked
        self._steps = [known.step for known in members]
        # A state that has other tensors than these has lost one, or been given one.
        self._lengths = [len(known.bundle.dtypes) for known in members]
        self.counts = torch.stack(self._steps)
        for step, count in zip(self._steps, self.counts.unbind()):
            step.data = count
        self._pointers = list(map(Tensor.data_ptr, self._steps))
        self._versions = list(map(_version, self._steps))
        # Parameters of one age share their numbers: the place of each one's, and of each
        # age a count.
        ages = self.counts.tolist()
        places = {age: i for i, age in enumerate(dict.fromkeys(ages))}
        firsts = [ages.index(age) for age in places]
        self.age_of = [places[age] for age in ages]
        self.ages = [self.counts[i] for i in firsts]
        like = [firsts[place] for place in self.age_of]
        self._like = torch.tensor(like, device=self.counts.device)
        self._names = [*asked.rule.state._fields, "kahan_comp"]
        self.buckets: list[Bucket] = []
        self.rows: list[Row] = []
        self._share(members, asked.foreach)

    def _share(self, members: list[Known], foreach: bool) -> None:
        def in_buckets(bundle: Bundle) -> bool:
            # A kernel that sweeps over lists has small leaves for nothing.
            return foreach or not sweeps(bundle.p.device)

        rest: dict[int, list[_Member]] = {}
        kinds: dict[Any, list[_Member]] = {}
        for i, known in enumerate(members):
            bundle = known.bundle
            member = _Member(bundle.numel, i, bundle)
            if bundle.numel < SMALL and in_buckets(bundle) and may_share(bundle):
                kind = (bundle.dtypes, bundle.p.device, self.age_of[i])
                kinds.setdefault(kind, []).append(member)
            else:
                rest.setdefault(len(bundle.dtypes), []).append(member)
        chunked: list[list[_Member]] = []
        for small in kinds.values():
            # Equal ones side by side: means are taken of rows.
            small.sort(key=_numel)
            for chunk in chunks(small, CHUNK):
                if _total(chunk) < 2:
                    rest.setdefault(len(chunk[0].bundle.dtypes), []).extend(chunk)
                else:
                    chunked.append(chunk)
        scratches: dict[torch.device, Scratch] = {}
        for chunk in sorted(chunked, key=_total, reverse=True):
            device = chunk[0].bundle.p.device
            if device not in scratches:
                scratches[device] = Scratch(_total(chunk), device)
            self.buckets.append(Bucket(*self._described(chunk), scratches[device]))
        for row in rest.values():
            row.sort(key=_place)
            ages = [self.age_of[member.at] for member in row]
            self.rows.append(Row(*self._described(row), ages))

    def _described(self, row: list["_Member"]) -> tuple[list[int], list[Bundle], list[str]]:
        bundles = [member.bundle for member in row]
        names = self._names[: len(bundles[0].dtypes) - 1]
        return [member.at for member in row], bundles, names

    def found(
        self, params: list[Tensor], entries: list[dict[str, Any] | None]
    ) -> list[Roles] | None:
        """Of each row the tensors, if all is as it was of the same parameters."""
        states = cast(Entries, entries)
        try:
            if not (
                list(map(len, states)) == self._lengths
                and all(map(is_, map(_step_of, states), self._steps))
                and list(map(Tensor.data_ptr, self._steps)) == self._pointers
                and list(map(_version, self._steps)) == self._versions
                and self._ages_hold()
                and all(
                    bucket.holds(
                        [params[i] for i in bucket.at], [states[i] for i in bucket.at]
                    )
                    for bucket in self.buckets
                )
            ):
                return None
            rows = [row.found(row.pick(params), row.pick(states)) for row in self.rows]
        except (KeyError, TypeError):
            return None  # a field has gone, or a whole state
        found = [roles for roles in rows if roles is not None]
        return found if len(found) == len(rows) else None

    def _ages_hold(self) -> bool:
        """Whether those of one age still are, though `.data` and numpy tell no version.

        Asked where nobody waits for the answer.
        """
        counts = self.counts
        return counts.device.type != "cpu" or counts.equal(counts[self._like])


class _Member(NamedTuple):
    """A small leaf, and its place in the cohort."""

    numel: int
    at: int
    bundle: Bundle


class _Seen:
    """A list of parameters that has come before."""

    __slots__ = ("cohort", "ids", "lost")

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.cohort: Cohort | None = None
        self.lost = 0


class Cohorts:
    """The lists of parameters that came twice, and their cohorts."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], _Seen] = {}

    def find(
        self,
        group: dict[str, Any],
        asked: Asked,
        params: list[Tensor],
        parts: list[Tensor],
        entries: list[dict[str, Any] | None],
    ) -> tuple[Cohort, list[Roles]] | None:
        """The cohort of a list, if it still is one, and its rows' tensors.

        Args:
            group: The param group.
            asked: What its state has to be.
            params: The list.
            parts: What lies here of each.
            entries: What lies here of the state of each.
        """
        seen = self._seen.get(_key(group, params))
        if seen is None or seen.cohort is None or seen.ids != list(map(id, params)):
            return None
        if seen.cohort.asked == asked:
            rows = seen.cohort.found(parts, entries)
            if rows is not None:
                return seen.cohort, rows
        seen.cohort = None
        seen.lost += 1
        return None

    def settle(
        self, group: dict[str, Any], params: list[Tensor], members: list[Known]
    ) -> None:
        """A list has stepped without a cohort: the second time it becomes one."""
        ids = list(map(id, params))
        seen = self._seen.get(_key(group, params))
        if seen is None or seen.ids != ids:
            if len(self._seen) >= _MEMORY:
                del self._seen[next(iter(self._seen))]
            self._seen[_key(group, params)] = _Seen(ids)
        elif seen.lost <= _PATIENCE and _may_be_counted(members):
            seen.cohort = Cohort(members[0].asked, members)


def _key(group: dict[str, Any], params: list[Tensor]) -> tuple[int, ...]:
    return id(group), id(params[0]), len(params)


def _may_be_counted(members: list[Known]) -> bool:
    """Whether the step counts can lie in one tensor, and the host may read them."""
    steps = [known.step for known in members]
    if len(set(map(id, steps))) < len(steps):
        return False  # a parameter that is there twice steps twice
    device = steps[0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return all(
        step.dtype == torch.float32
        and step.dim() == 0
        and step.device == device
        and is_plain(step)
        and not step.is_inference()
        and not step.requires_grad
        for step in steps
    )


def _total(chunk: list[_Member]) -> int:
    return sum(map(_numel, chunk))
