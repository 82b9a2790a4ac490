"""What was found out about parameters, and about those that step together.

A cache: `state[p]` is the truth, and whoever loads, copies, casts, moves or edits it is
noticed at the next step.
"""

from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from optimi_func._shards import leaf_here, shards_of
from optimi_func._types import Leaf
from optimi_func.compiled.batching import SMALL
from optimi_func.compiled.buckets import CHUNK, Bucket, Entries, Scratch, may_share
from optimi_func.compiled.jobs import Bundle, chunks, facts, is_plain

# A cohort that was lost so often, to another list or to somebody's edits, stays lost.
_PATIENCE = 3
# Lists that are remembered: where they never come again, as with experts, the oldest go.
_MEMORY = 32

_step_of = itemgetter("step")
_version = attrgetter("_version")
_numel = attrgetter("numel")


class Known:
    """What was found out about a parameter, and whether it still is so."""

    __slots__ = ("asked", "bundle", "step")

    def __init__(self, asked: tuple[Any, ...], p: Tensor, state: dict[str, Any]) -> None:
        rule, _, _ = self.asked = asked
        self.step: Tensor = state["step"]
        fields = rule.state(*[state[name] for name in rule.state._fields])
        leaf = leaf_here(Leaf(p, fields, state.get("kahan_comp")))
        self.bundle = Bundle(leaf, shards_of(p))

    def holds(
        self, state: dict[str, Any] | None, asked: tuple[Any, ...], p: Tensor
    ) -> bool:
        """Whether it still is so, of this state of the parameter."""
        if state is None or asked != self.asked or state.get("step") is not self.step:
            return False
        fields = [state.get(name) for name in asked[0].state._fields]
        comp = state.get("kahan_comp")
        tensors = [x for x in [p, *fields] if x is not None]
        if len(tensors) <= len(fields) or (comp is not None) != self.bundle.compensated:
            return False
        return self.bundle.holds(tensors if comp is None else [*tensors, comp])


class Row:
    """Leaves of as many tensors each, handed to an executor one by one."""

    def __init__(self, at: list[int], bundles: list[Bundle], names: list[str]) -> None:
        self.at = at  # the places of its parameters among those that step together
        self.bundles = bundles
        self._names = names
        # Of each role and kind of fact one list, and one comparison, for all leaves.
        roles = range(len(bundles[0].dtypes))
        kinds = range(len(bundles[0].facts))
        self._facts = [[[b.facts[k][r] for b in bundles] for k in kinds] for r in roles]

    def holds(self, params: list[Tensor], entries: Entries) -> bool:
        """Whether all is as it was of these; their tensors then are the bundles'."""
        roles = [params]
        roles += [list(map(itemgetter(name), entries)) for name in self._names]
        if list(map(facts, roles)) != self._facts:
            return False
        for bundle, tensors in zip(self.bundles, zip(*roles)):
            bundle.tensors = list(tensors)
        return True


class Cohort:
    """Parameters of one group that step together, time and again in one order.

    Their step counts lie side by side in one tensor, the state of the small ones in
    buckets; the tensors in `state[p]` stay the objects they are. Those of one age stay
    so, unless somebody writes to a count.
    """

    def __init__(self, asked: tuple[Any, ...], members: list[Known]) -> None:
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
        self.age_of = [places[age] for age in ages]
        self.ages = [self.counts[ages.index(age)] for age in places]
        self._names = [*asked[0].state._fields, "kahan_comp"]
        self.buckets: list[Bucket] = []
        self.rows: list[Row] = []
        self._share(members)

    def _share(self, members: list[Known]) -> None:
        rest: dict[int, list[_Member]] = {}
        kinds: dict[Any, list[_Member]] = {}
        for i, known in enumerate(members):
            bundle = known.bundle
            member = _Member(bundle.numel, i, bundle)
            if bundle.numel < SMALL and may_share(bundle):
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
        self.rows = [Row(*self._described(row)) for row in rest.values()]

    def _described(self, row: list["_Member"]) -> tuple[list[int], list[Bundle], list[str]]:
        bundles = [member.bundle for member in row]
        names = self._names[: len(bundles[0].dtypes) - 1]
        return [member.at for member in row], bundles, names

    def holds(self, params: list[Tensor], entries: list[dict[str, Any] | None]) -> bool:
        """Whether all of it still is so, of the same parameters and their states."""
        states = cast(Entries, entries)
        try:
            return (
                list(map(len, states)) == self._lengths
                and all(map(is_, map(_step_of, states), self._steps))
                and list(map(Tensor.data_ptr, self._steps)) == self._pointers
                and list(map(_version, self._steps)) == self._versions
                and all(
                    x.holds([params[i] for i in x.at], [states[i] for i in x.at])
                    for x in (*self.buckets, *self.rows)
                )
            )
        except (KeyError, TypeError):
            return False  # a field has gone, or a whole state


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
        asked: tuple[Any, ...],
        params: list[Tensor],
        parts: list[Tensor],
        entries: list[dict[str, Any] | None],
    ) -> Cohort | None:
        """The cohort of a list, if there is one that still holds.

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
        if seen.cohort.asked == asked and seen.cohort.holds(parts, entries):
            return seen.cohort
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
