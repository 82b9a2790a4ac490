"""The step of a parameter tree by a plan, into new tensors or in place."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core import checks
from optimi_func.core.distributed import (
    any_distributed,
    check_placed,
    redistribute_like,
    to_local,
)
from optimi_func.core.packed import is_capturing
from optimi_func.core.philox import Noise
from optimi_func.core.rule import BoundRule, Leaf, Microbatch, Named, PyTree, Rule, Scalars
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import (
    BITS,
    COMP,
    PARAM,
    coded_in,
    entry_of,
    names_in,
    seed_in,
    state_in,
)
from optimi_func.core.tree import (
    FlatTree,
    LeafState,
    TreeState,
    path_of,
    running_tensors,
    step_to_come,
)
from optimi_func.execution.counts import write_scalar
from optimi_func.execution.cpp import retry
from optimi_func.execution.executors import Executor
from optimi_func.execution.guards import Guard
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.launches import run_launches
from optimi_func.execution.plans import Plan, raise_versions
from optimi_func.execution.scalars import pack
from optimi_func.execution.slots import Columns, Step, make_slots
from optimi_func.execution.sums import Part, Unit, join, write_running

# Kinds of trees for which the last four plans are cached.
_KINDS = 32
_NONE = type(None)
_TENSORS = {Tensor, torch.nn.Parameter, _NONE}
_rule_state, _running = attrgetter("rule_state"), attrgetter("running")
_comp, _dtype = attrgetter("kahan_comp"), attrgetter("dtype")
_is_given = partial(is_not, None)


class TreeUpdate:
    """One step of a tree's leaves, some at a time. The caller counts it.

    The tree's state is that of the step before. `scalars` are those of the step, the index
    among them for each leaf, and the running scalars after the step.
    """

    def __init__(
        self,
        rule: Rule,
        tree: FlatTree,
        executor: Executor,
        scalars: tuple[list[Scalars], list[int], list[Named]],
    ) -> None:
        self._rule, self._tree = rule, tree
        self._executor: Executor = executor
        self._scalars, self._at, self.after = scalars

    @classmethod
    def of(cls, optimizer: BoundRule, tree: FlatTree, executor: Executor) -> "TreeUpdate":
        """Return the step of an optimizer, whose hyperparameters are read now."""
        step = tree.state.step.detach()
        scalars = optimizer.scalars(tree, step, step_to_come(step))
        return cls(optimizer.rule, tree, executor, scalars)

    def update(
        self,
        places: Sequence[int],
        grads: Sequence[Tensor],
        microbatches: list[Microbatch] | None = None,
        write: bool = True,
    ) -> dict[int, Part]:
        """Update leaves, of which `places` are the indices, in place by these gradients.

        Raises ValueError or TypeError before any write if one does not fit. `microbatches`
        are what each is to its step, and write=False moves the state alone. What it returns
        belongs to `end`.
        """
        states = [self._tree.states[i] for i in places]
        params = [self._tree.leaves[i] for i in places]
        columns = _columns(self._rule, params, list(grads), states)
        plan, columns = self.plan(places, columns, write)
        return self.run(plan, places, columns, microbatches, write)

    def plan(
        self,
        places: Sequence[int],
        columns: Columns,
        write: bool,
    ) -> tuple[Plan, Columns]:
        """Plan an update of leaves, and return its columns, which are local.

        Raises for leaves and gradients that do not fit.
        """
        grads: list[Tensor] = []
        paths = [path_of(self._tree.params, i) for i in places]
        step = self._tree.state.step
        for path, p, g in zip(paths, columns.own[PARAM], columns.grads):
            check_placed(path, p)
            if columns.in_place:
                checks.check_writable(path, *to_local([p]))
            checks.check_grad(path, p, g)
            if step.device != p.device and is_capturing(p.device):
                raise RuntimeError(
                    f"a CUDA graph would keep the numbers of this step for all its "
                    f"replays: state.step is on {step.device}, params{path} on "
                    f"{p.device}. Move it there before the capture"
                )
            grads.append(redistribute_like(path, p, g).resolve_conj())
        given = columns.given  # random seeds, which are no tensors of a parameter
        local = columns._replace(grads=grads, given={}).map(to_local)._replace(given=given)
        if write and columns.in_place:
            pairs = zip(paths, local.own[PARAM])
            checks.check_apart(pairs, "params{}".format, "call the pure step")
        slots = make_slots(self._rule, local, columns.own)
        return Plan(self._rule, slots, places), local

    def run(
        self,
        plan: Plan,
        places: Sequence[int],
        columns: Columns,
        microbatches: list[Microbatch] | None = None,
        write: bool = True,
    ) -> dict[int, Part]:
        """Update leaves by their plan."""
        at = [self._at[i] for i in places]
        packed, at = pack(self._rule, self._scalars, at, microbatches, write)
        if BITS in columns.given:
            bits = {BITS: self._bits(places, columns.given[BITS])}
            columns = columns._replace(given=bits if write else {})
        inputs = Step(columns, packed, at, write)

        launches = plan.cached_launches(self._executor, inputs)
        if launches is None:
            for i, p, g in zip(places, columns.own[PARAM], columns.grads):
                checks.check_grad(path_of(self._tree.params, i), p, g)
            launches = plan.new_launches(self._executor, inputs)
        for name, column in () if columns.in_place else columns.own.items():
            for i in plan.empty:
                if column[i] is not None:
                    columns.into[name][i].copy_(column[i])
        joins = write and self._rule.join is not None
        parts = run_launches(launches.calls, inputs, joins)
        sums = {places[i]: part for i, part in parts.items()}
        if not columns.in_place:
            return sums
        written = [*columns.written(write)]
        if write:
            counted = places if self._rule.running._fields and not joins else ()
            for i, k in zip(counted, at):
                for x, new in zip(self._tree.states[i].running, self.after[i]):
                    write_scalar(x, new, packed[k].finite)
            # Autograd has not seen that shards of these were written.
            if any_distributed(self._tree.leaves):
                written.append([self._tree.leaves[i] for i in places])
        raise_versions(_present(written))
        return sums

    def _bits(
        self, places: Sequence[int], seeds: list[Tensor | None]
    ) -> list[Noise | None]:
        """Return the random bits to round leaves by, which have these seeds or None."""
        step, ps = self._tree.state.step, self._tree.leaves
        rows = [
            (i, x if x is None or x.is_cuda else x.item()) for i, x in zip(places, seeds)
        ]
        return [
            None if x is None else Noise(x, step, i, ps[i], torch.int32) for i, x in rows
        ]

    def finish_step(self, parts: dict[int, Part], in_place: bool = True) -> None:
        """Join the running scalars, in `after` too, if these are the parts of a step."""
        if not parts:
            return
        states, coeffs = self._tree.states, self._scalars[self._at[0]].coeffs
        unit = Unit(self._rule, coeffs, self.after[0], [], [])
        for i, (p, s) in enumerate(zip(self._tree.leaves, states)):
            unit.add(p, partial(Leaf, p, s.rule_state, s.kahan_comp), parts.get(i))
        self.after = join([unit]) * len(states)
        if in_place:
            write_running([s.running._asdict() for s in states], self.after[0])

    def rebuild(
        self, places: Sequence[int], results: dict[str, list[Any]]
    ) -> tuple[PyTree, TreeState]:
        """Return the trees after a step whose results are these columns."""
        rule, tree, after = self._rule, self._tree, self.after
        x, comps = results[PARAM], results.get(COMP, [None] * len(places))
        kind: Any = type(tree.states[0].rule_state)  # it may have had another name once
        fields = [results[name] for name in kind._fields if name in results]
        rows: Any = zip(*fields) if fields else [()] * len(x)
        if not coded_in(results):
            rule_states = map(partial(tuple.__new__, kind), rows)
        else:
            every = (dict(zip(results, row)) for row in zip(*results.values()))
            rule_states = [kind(*state_in(rule, entry)[0]) for entry in every]
        if rule.running._fields:
            devices = [s.running[0].device for s in tree.states]
            after = list(map(running_tensors, after, devices))
        ps, states = list(tree.leaves), list(tree.states)
        for i, g in enumerate(tree.grads):
            if g is None:
                s = states[i]
                if self._executor != "eager":
                    # A later step in place would write to what it is given.
                    ps[i], s = pytree.tree_map(torch.clone, (ps[i], s))
                if rule.join is not None:
                    s = LeafState(s.rule_state, s.kahan_comp, after[i])
                states[i] = s
        for i, new, own, comp in zip(places, x, rule_states, comps):
            ps[i], states[i] = new, LeafState(own, comp, after[i])
        return tree.rebuild(ps, states)


def step(
    optimizer: BoundRule, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """Return new parameters and a new state after one compiled step of a pure optimizer.

    `optimizer` is a `FunctionalOptimizer`, such as `adamw(lr=1e-3)`.
    """
    return _step(optimizer, params, grads, state, False)


def step_(
    optimizer: BoundRule, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """Take one compiled step of a pure optimizer, writing into `params` and `state`.

    `optimizer` is a `FunctionalOptimizer`, such as `adamw(lr=1e-3)`.
    """
    return _step(optimizer, params, grads, state, True)


def _step(
    optimizer: BoundRule,
    params: PyTree,
    grads: PyTree,
    state: TreeState,
    in_place: bool,
) -> tuple[PyTree, TreeState]:
    tree = _checked(optimizer, params, grads, state)
    columns = _columns(optimizer.rule, tree.leaves, tree.grads, tree.states)
    if torch.is_grad_enabled():
        _check_undifferentiated(optimizer, tree, columns)

    def update(is_new: bool) -> TreeUpdate:
        if is_new:
            tree.check(optimizer)
        found = TreeUpdate.of(optimizer, tree, "kernels")
        optimizer.warn(tree)
        return found

    with kernel_context(state.step.device):
        new = planned_step(optimizer.rule, tree, columns, update, in_place)
    if new is None:
        state.step.add_(1.0)
        return params, state
    return new


def eager_step(
    rule: Rule,
    tree: FlatTree,
    scalars: tuple[list[Scalars], list[int], list[Named]],
) -> tuple[PyTree, TreeState]:
    """Return new trees after a step without a compiler, by the scalars of the step."""
    update = TreeUpdate(rule, tree, "eager", scalars)
    with kernel_context(tree.state.step.device):
        columns = _columns(rule, tree.leaves, tree.grads, tree.states)
        new = planned_step(rule, tree, columns, lambda _: update, in_place=False)
    assert new is not None
    return new


def planned_step(
    rule: Rule,
    tree: FlatTree,
    columns: Columns,
    update_of: Callable[[bool], TreeUpdate],
    in_place: bool,
) -> tuple[PyTree, TreeState] | None:
    """Take a step by a plan, which later steps find. Return new trees, or None in place.

    `update_of` returns the update; it is given True if there is no plan yet.
    """
    states, step = tree.states, tree.state.step
    counts = [step, *chain.from_iterable(map(_running, states))]
    own = counts + _present([x for name, x in columns.own.items() if name != PARAM])
    seeded = [tuple(map(type, x)) for x in columns.given.values()]
    how = rule, in_place, *columns.own, *seeded
    plans = _plans(tree, counts, columns, *how)
    tensors = own + tree.leaves
    plan = next((plan for guard, plan in plans or () if guard.holds(tensors)), None)
    places = [i for i, g in enumerate(tree.grads) if g is not None]
    if len(places) < len(states):
        columns = columns.map(lambda column: [column[i] for i in places])
    if not in_place:
        new = {name: _empty(column) for name, column in columns.own.items()}
        columns = columns._replace(into=new)
    results, update = columns.into, update_of(plan is None)
    if plan is None:
        if plans == []:
            retry()
        plan, columns = update.plan(places, columns, True)
        keeps = all([x.is_cpu and not x.is_complex() for x in tensors])
        if plans is not None and keeps:
            plans[:] = [(Guard(tensors, addresses=in_place), plan), *plans[:3]]
    update.finish_step(update.run(plan, places, columns), in_place)
    if in_place:
        return None
    if (seeds := columns.given.get(BITS)) is not None:
        comps = zip(seeds, results.get(COMP, seeds))
        results[COMP] = [comp if seed is None else seed.clone() for seed, comp in comps]
    return update.rebuild(places, results)


def _checked(
    optimizer: BoundRule, params: PyTree, grads: PyTree, state: TreeState
) -> FlatTree:
    """Flatten the arguments. Raise for what no kernel takes; the rest is checked later."""
    if not isinstance(getattr(optimizer, "rule", None), Rule):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not a FunctionalOptimizer: "
            "compile a transform, or an optimizer of your own, by "
            "torch.compile(optimizer.step)"
        )
    instead = _uncompiled(optimizer)
    checks.check_runs_kernels(instead, ())
    rule, tree = optimizer.rule, FlatTree.of(params, grads, state)
    if not _TENSORS.issuperset(map(type, tree.leaves)):
        checks.check_runs_kernels(
            instead, [x for x in tree.leaves if isinstance(x, Tensor)]
        )
    kinds = [set(map(type, map(f, tree.states))) for f in (_rule_state, _running)]
    if kinds != [{rule.state}, {rule.running}]:
        tree.check(optimizer)  # which raises, if they are not of subclasses
    return tree


def _uncompiled(optimizer: BoundRule) -> str:
    """Return the name of the step that errors recommend."""
    kind = type(optimizer)
    ours = kind.__module__.startswith("optimi_func.")
    return f"optimi_func.{kind.__name__}_step" if ours else "the optimizer's own step"


def _plans(
    tree: FlatTree, counts: list[Tensor], columns: Columns, *how: object
) -> list[tuple[Guard, Plan]] | None:
    """Return the plans of trees of a kind, or None: DTensors or a GPU's have none."""
    kinds = tuple(map(type, chain(counts, columns.grads, *columns.own.values())))
    if not (_TENSORS.issuperset(kinds) and tree.leaves[0].is_cpu):
        return None
    key, known = (tree.spec, kinds, *how), runtime.tree_plans
    while len(known) >= _KINDS and key not in known:
        known.pop(next(iter(known)), None)
    return known.setdefault(key, [])


def _columns(
    rule: Rule, ps: list[Tensor], gs: list[Tensor | None], states: list[LeafState]
) -> Columns:
    """Return the columns of a tree's leaves. Those that are given are random seeds."""
    rows = list(map(_rule_state, states))
    names: list[str] = list(rule.state._fields)
    fields = list(map(list, zip(*rows)))
    if not all([_TENSORS.issuperset(map(type, field)) for field in fields]):
        entries = [entry_of(row, None) for row in rows]
        names = names_in(rule.state._fields, dict.fromkeys(chain.from_iterable(entries)))
        fields = [[entry.get(name) for entry in entries] for name in names]
    comps, given = list(map(_comp, states)), dict[str, list[Any]]()
    if torch.int64 in map(_dtype, filter(_is_given, comps)):
        given[BITS] = seeds = list(map(seed_in, comps))
        comps = [x if seed is None else None for x, seed in zip(comps, seeds)]
    own = {PARAM: ps, **dict(zip(names, fields))}
    if any(map(_is_given, comps)):
        own[COMP] = comps
    return Columns(gs, own, own, given)


def _present(lists: list[list[Any]]) -> list[Tensor]:
    return list(filter(_is_given, chain.from_iterable(lists)))


def _empty(column: list[Any]) -> list[Any]:
    return [None if x is None else torch.empty_like(x) for x in column]


def _check_undifferentiated(optimizer: BoundRule, tree: FlatTree, columns: Columns) -> None:
    """Raise if an argument requires grad, other than parameters that are leaves."""
    names = "lr", "weight_decay", "max_lr", *optimizer.numbers
    names = () if optimizer.has_numbers else names
    arguments = {name: pytree.tree_leaves(getattr(optimizer, name)) for name in names}
    arguments["params"] = [p for p in tree.leaves if not p.is_leaf]
    own = [x for name, x in columns.own.items() if name != PARAM]
    counts = [tree.state.step, *chain.from_iterable(map(_running, tree.states))]
    arguments |= {"grads": tree.grads, "state.leaves": counts + _present(own)}
    for name, values in arguments.items():
        if any([getattr(x, "requires_grad", False) for x in values]):
            raise TypeError(
                f"{name} requires grad, but a compiled step drops the derivative: call "
                f"{_uncompiled(optimizer)}, or this under torch.no_grad()"
            )
