"""`Mixed`: one optimizer with several rules, chosen by the names of parameters."""

from typing import Any, NamedTuple, Protocol, Unpack

from torch import Tensor
from torch.optim.optimizer import StateDict

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.evaluation import Evaluated
from optimi_func.classes.fields import Params
from optimi_func.classes.groups import Group
from optimi_func.classes.options import with_options
from optimi_func.core.rule import Options
from optimi_func.core.tree import TreeState
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state import convert
from optimi_func.state.checkpoints import counterparts_of
from optimi_func.state.convert import Entry, LoadReport, Match
from optimi_func.state.describe import listed
from optimi_func.transforms.partition import (
    Elsewhere,
    Partition,
    PartitionState,
    Places,
    Select,
    check_each,
    check_parts,
    partition,
    place,
)


def rule_name(value: FunctionalOptimizer) -> str:
    """Return a rule's name in param groups, which is the name of the rule's factory."""
    return type(value).__name__


class Named:
    """A predicate that selects the parameters whose names are in a set."""

    def __init__(self, names: list[str]) -> None:
        self.names = frozenset(names)
        self.__name__ = f"a group of {len(names)} names"

    def __call__(self, path: str, p: Tensor) -> bool:
        return path in self.names


class Part(NamedTuple):
    """Parameters of an added group, with the optimizer and the options that they share."""

    value: FunctionalOptimizer
    options: Group
    pairs: list[tuple[str, Tensor]]


class Chooser(Protocol):
    """Chooses the parts for groups that are added after construction."""

    def names(self, params: list[Tensor]) -> list[str | None]:
        """Return the name of each parameter, or None for a parameter without a name."""
        ...

    def parts(self, pairs: list[tuple[str, Tensor]], rule: str | None) -> list[Part]:
        """Return the parts for named parameters. `rule` is the group's rule or None."""
        ...


class Mixed(Evaluated):
    """Several rules in one optimizer: each parameter's name selects its rule.

    Each param group that you pass is divided into smaller groups: one for each part that
    selects at least one of the group's parameters. The smaller groups have the same order
    as the parts. Each smaller group stores the name of its rule under "rule", and the
    rule's hyperparameters under torch's names. Hyperparameters in the group that you pass
    override those of the part. Schedulers, trainers, checkpoints, gradient release and
    storage modes treat a Mixed as one optimizer. `train()` and `eval()` act on the parts
    that support these methods, such as schedule_free_adamw.

    The dict `defaults` contains neither momentum nor betas, because not all groups have
    these hyperparameters. Therefore pass cycle_momentum=False to OneCycleLR.

    Args:
        params: Named parameters, for example model.named_parameters(), or param groups of
            named parameters.
        *parts: Pairs of a selector and an optimizer, for example ("*.bias",
            adamw(lr=1e-3)). The selector is a pattern or a predicate. A pattern (`fnmatch`)
            is compared with the parameter's name. A predicate receives the name and the
            parameter. Each parameter is updated by the first part that selects it.
        rest: The optimizer for all parameters that no part selects. None means that every
            parameter has to be selected by a part.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    Raises:
        TypeError: A part is not a pair of a selector and an optimizer. The lr or
            weight_decay of a part is a schedule of the pure API. Use a torch scheduler
            instead of a schedule of the pure API.
        ValueError: Parameters have no names. A part selects no parameters, or only
            parameters that earlier parts select. No part selects a parameter, and `rest` is
            None.

    >>> from optimi_func import adamw, lion
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> parts = ("0.weight", lion(lr=1e-4)), ("0.bias", adamw(lr=1e-3))
    >>> optimizer = Mixed(model.named_parameters(), *parts, rest=adamw(lr=3e-3))
    >>> [(group["rule"], group["lr"]) for group in optimizer.param_groups]
    [('lion', 0.0001), ('adamw', 0.001), ('adamw', 0.003)]
    """

    @with_options
    def __init__(
        self,
        params: Params,
        *parts: tuple[Select, FunctionalOptimizer],
        rest: FunctionalOptimizer | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._selects, values = check_parts("Mixed", parts, rest)
        self._has_rest = rest is not None
        self.chooser: Chooser | None = None  # of parts for groups that are added later
        self._values = list(map(_checked_value, values))
        factories = {rule_name(value): type(value) for value in self._values}
        for value in self._values:
            if factories[rule_name(value)] is not type(value):
                raise ValueError(f"Mixed got two optimizers called {rule_name(value)!r}")
        self._placed: list[tuple[str, int]] = []
        BaseOptimizer.__init__(self, params, {**options})
        names, places = zip(*self._placed) if self._placed else ((), ())
        check_each("Mixed", self._selects, rest is not None, names, places)
        del self._placed

    def _factory_of(
        self, group: Group
    ) -> tuple[type[FunctionalOptimizer], tuple[str, ...]]:
        for value in self._values:
            if rule_name(value) == group.get("rule"):
                return type(value), value.keywords
        raise ValueError(
            f"a group has rule={group.get('rule')!r}: allowed are "
            f"{list(map(rule_name, self._values))}, and a parameter keeps its own"
        )

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group, and divide its parameters among the parts.

        A group can set its rule, as in {"params": ..., "rule": "adamw"}. The group then
        gets the hyperparameters of the first part with this rule. If you add a group with a
        rule to an existing optimizer, the group's parameters need no names.

        Raises:
            TypeError, ValueError: The same errors as in the constructor, except that a part
                may select nothing. If an error is raised, no group is added.
        """
        left_out = ("params", "param_names", "rule")
        given = {k: x for k, x in param_group.items() if k not in left_out}
        pairs = self._named(param_group)
        parts = self._parts(pairs, param_group.get("rule"))
        known = {k for value in self._values for k in _numbers_of(value)}
        used = {k for part in parts for k in _numbers_of(part.value)}
        if pairs and (lost := [k for k in given if k in known - used]):
            rules = sorted({rule_name(part.value) for part in parts})
            raise ValueError(
                f"{lost[0]}={given[lost[0]]!r} is of no rule that takes "
                f"{[name for name, _ in pairs][:5]}: these are {rules}"
            )
        count, values = len(self.param_groups), self._values
        rules = {*map(rule_name, values)}
        try:
            self._values = [
                *values,
                *[x.value for x in parts if rule_name(x.value) not in rules],
            ]
            for value, options, some in parts:
                numbers = _numbers_of(value)
                # Other rules' hyperparameters in a given group are not this group's.
                more = {k: x for k, x in given.items() if k in numbers or k not in known}
                own = {"rule": rule_name(value), "params": some}
                super().add_param_group({**numbers, **options, **more, **own})
        except Exception:
            self._values = values
            del self.param_groups[count:]
            raise

    def _named(self, group: Group) -> list[tuple[str, Tensor]]:
        """Return the parameters of an added group, with their names."""
        source = group["params"]
        params: list[Any] = [source] if isinstance(source, Tensor) else list(source)
        group["params"] = params  # an iterator gives them once
        if all(isinstance(x, tuple) and len(x) == 2 for x in params):
            return params
        names = list(group.get("param_names", map(self.name_of, params)))
        if None in names and self._constructed and ("rule" in group or self.chooser):
            places = [f"{len(self.param_groups)}.{k}" for k in range(len(params))]
            found = names if self.chooser is None else self.chooser.names(params)
            names = [y if x is None else x for x, y in zip(found, places)]
        if len(names) != len(params) or None in names:
            raise ValueError(
                "Mixed selects parameters by name, and got some without: pass "
                "model.named_parameters(), or groups of such pairs. A group that is added "
                "later needs no names if it has a 'rule'"
            )
        return list(zip(names, params))

    def _parts(self, pairs: list[tuple[str, Tensor]], rule: str | None) -> "list[Part]":
        """Return the parts that a group is divided into."""
        if self._constructed and self.chooser is not None:
            return self.chooser.parts(pairs, rule)
        names, tensors = [name for name, _ in pairs], [p for _, p in pairs]
        rules = list(map(rule_name, self._values))
        if rule is not None:
            if rule not in rules:
                raise ValueError(f"a group has rule={rule!r}: allowed are {rules}")
            return [Part(self._values[rules.index(rule)], {}, pairs)] if pairs else []
        try:
            places = place("Mixed", self._selects, self._has_rest, names, tensors)
        except ValueError as error:
            if not self._constructed:
                raise
            raise ValueError(
                f"{error}. A group that is added later may name one of the rules {rules}, "
                f"as {{'params': ..., 'rule': {rules[-1]!r}}}"
            ) from None
        if not self._constructed:
            self._placed += zip(names, places)
        every = enumerate(self._values)
        found = [(x, [y for y, k in zip(pairs, places) if k == i]) for i, x in every]
        return [Part(value, {}, some) for value, some in found if some]

    def describe(self) -> str:
        """Return `BaseOptimizer.describe()` with each parameter's rule and shape added."""
        return f"{super().describe()}\n\n{listed(self.named_groups())}"

    def torch_state_dict(self) -> StateDict:
        """Return a dict that maps the name of each rule to a torch.optim state dict.

        Raises:
            ValueError: A rule or an option does not exist in torch.optim.
        """
        whole = self.decoded_state_dict()
        dicts: dict[str, StateDict] = {}
        for value in self._values:
            rule = rule_name(value)
            part = _of_rule(whole, rule)
            keywords = tuple(_numbers_of(value))
            dicts[rule] = convert.as_torchs(rule, keywords, counterparts_of(value), part)
        return dicts

    def _find(self, state_dict: StateDict, strict: bool, match: str) -> Match:
        """Match a state dict to the parameters, rule by rule.

        The state dict was either saved by this class, or maps each rule to a torch state
        dict. If strict is False, a parameter whose rule has changed gets no entry.
        """
        rules = list(dict.fromkeys(map(rule_name, self._values)))
        named = self.named_groups()
        if state_dict and set(state_dict) <= {*rules}:
            parts = dict(state_dict)
        else:
            if "param_groups" in state_dict:
                state_dict = convert.with_names(state_dict, named)
            if not all("rule" in group for group in state_dict.get("param_groups", ())):
                raise ValueError(
                    "state_dict is no Mixed optimizer's: allowed are one, and a dict with "
                    f"a state_dict for each of {rules}. load_fitting(state_dict) takes "
                    "what fits from the state of another optimizer"
                )
            if strict:
                _check_rules(named, state_dict)
            parts = {rule: _of_rule(state_dict, rule) for rule in rules}
        groups: list[Group] = [{} for _ in named]
        entries: list[list[Entry | None]] = [[None] * len(g["params"]) for g in named]
        missing: list[str] = []
        unexpected: list[str] = []
        others: dict[object, object] = {}
        for rule in rules:
            places = [i for i, g in enumerate(named) if g["rule"] == rule]
            mine = [named[i] for i in places]
            saved = parts.get(rule, {"state": {}, "param_groups": []})
            ours = [name for group in mine for name in group["param_names"]]
            theirs = [n for g in saved["param_groups"] for n in g.get("param_names", ())]
            have = all("param_names" in group for group in saved["param_groups"])
            by_name = have and match == "names"
            if not strict and by_name and not (ours and convert.same_names(ours, theirs)):
                missing += ours
                unexpected += theirs
                continue
            value = next(x for x in self._values if rule_name(x) == rule)
            keywords, known = tuple(_numbers_of(value)), counterparts_of(value)
            matched = convert.find_entries(saved, mine, strict, match, keywords, known)
            for i, options, group_entries in zip(places, matched.groups, matched.entries):
                groups[i], entries[i] = options, group_entries
            missing += matched.report.missing
            unexpected += matched.report.unexpected
            others |= matched.others
        return Match(groups, entries, others, LoadReport(missing, unexpected))

    def functional(self) -> tuple[Partition, PartitionState]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a `partition` with one part per param group, and the partition's state.

        The state is for the tree {name: parameter}: see `BaseOptimizer.functional`.

        Raises:
            ValueError: The parameters of a group have taken different numbers of steps.
        """
        self.check_train_mode("functional()")
        pairs: list[tuple[Select, FunctionalOptimizer]] = []
        states: list[TreeState] = []
        for group, named in zip(self.param_groups, self.named_groups()):
            bound = self.bound_of(group)
            entries = self._named_entries(named, bound)
            if entries:
                pairs.append((Named(list(entries)), bound))
                states.append(convert.as_tree(bound.rule, entries, self._first_param()))
        names = [name for state in states for name in state.leaves]
        at = [i for i, state in enumerate(states) for _ in state.leaves]
        parts = tuple(
            state._replace(leaves={n: state.leaves.get(n, Elsewhere()) for n in names})
            for state in states
        )
        return partition(*pairs), PartitionState(Places(dict(zip(names, at))), parts)

    def load_functional(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state: PartitionState, params: dict[str, Tensor] | None = None
    ) -> None:
        """Continue from a state of the pure optimizer returned by `functional`.

        Args:
            state: The state of a `partition`, for the tree {name: parameter}.
            params: New values of the parameters, by name.

        Raises:
            ValueError: The state contains a name that no parameter has, or the state's
                shapes or fields do not match the optimizer's. If an error is raised,
                nothing is loaded.
        """
        self.check_train_mode("load_functional()")
        entries: dict[Tensor, Entry] = {}
        moved: list[tuple[Tensor, Tensor]] = []
        for i, part in enumerate(state.parts):
            leaves = {n: x for n, x in part.leaves.items() if not isinstance(x, Elsewhere)}
            tree = part._replace(leaves=leaves)
            values = params or {} if i == 0 else {}
            loaded, moves = self._loaded_tree(tree, values)
            entries |= loaded
            moved += moves
        self._take_over(entries, moved)


def _check_rules(groups: list[Group], state_dict: StateDict) -> None:
    """Raise an error if a parameter has a different rule in the state dict."""
    saved = {
        name: group["rule"]
        for group in state_dict["param_groups"]
        for name in group.get("param_names", ())
    }
    ours = {n: g["rule"] for g in groups for n in g["param_names"]}
    for name, theirs in convert.same_names([*ours], [*saved]).items():
        if saved[theirs] != ours[name]:
            raise ValueError(
                f"{name!r} follows {ours[name]} here and {saved[theirs]} in the state: "
                "with strict=False its state begins again"
            )


def _checked_value(value: object) -> FunctionalOptimizer:
    if not isinstance(value, FunctionalOptimizer):
        raise TypeError(
            f"Mixed got {value!r}: allowed are pure optimizers, as "
            "optimi_func.adamw(lr=1e-3), and no transforms of them"
        )
    return value


def _numbers_of(value: FunctionalOptimizer) -> Group:
    """Return the keyword arguments with which a pure optimizer was created."""
    return {name: getattr(value, name) for name in value.keywords}


def _of_rule(state_dict: StateDict, rule: str) -> StateDict:
    """Return the part of a state dict that belongs to the groups with this rule."""
    groups = [group for group in state_dict["param_groups"] if group["rule"] == rule]
    every = {i for group in state_dict["param_groups"] for i in group["params"]}
    ids = {i for group in groups for i in group["params"]}
    state = {k: x for k, x in state_dict["state"].items() if k in ids or k not in every}
    return {"state": state, "param_groups": groups}
