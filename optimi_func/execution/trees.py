"""The compiled step of a parameter tree, into new tensors or in place."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter, is_not
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_writable, stuck_moments
from optimi_func.core.distributed import (
    check_placed,
    is_distributed,
    redistribute_like,
    shards_of,
    to_local,
)
from optimi_func.core.rule import Microbatch, PyTree, Rule, Scalars
from optimi_func.core.storage import entry_of, names_in, state_of
from optimi_func.core.torch_private import transform_level
from optimi_func.execution.executors import Executor
from optimi_func.execution.guards import Guard
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.launches import Columns, run_launches
from optimi_func.execution.plans import Plan, make_launches, raise_versions
from optimi_func.execution.scalars import Packed, pack, scalars_after
from optimi_func.execution.slots import Slot, make_slots
from optimi_func.execution.tensors import is_capturing
from optimi_func.pure import tree as pure_tree
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import FlatTree, LeafState, TreeState

# Kinds of trees whose plans are kept, the last two plans of each.
_KINDS = 32
_plans: dict[Any, list["TreePlan"]] = {}

_NONE = type(None)
_NUMBERS = {float, int, bool, _NONE}
_TENSORS = {Tensor, torch.nn.Parameter, _NONE}
_LEAVES = {*_TENSORS, LeafState}
_rule_state, _running = attrgetter("rule_state"), attrgetter("running")
_comp, _is_given = attrgetter("kahan_comp"), partial(is_not, None)


class TreeStep:
    """One step of a tree's leaves, some at a time. The caller counts it.

    Args:
        optimizer: Its hyperparameters are read once.
        tree: The checked trees, at the step that `state` has taken last.
        executor: What runs the updates.
    """

    def __init__(
        self,
        optimizer: FunctionalOptimizer,
        tree: FlatTree,
        executor: Executor,
    ) -> None:
        self._rule, self._tree = optimizer.rule, tree
        self._executor: Executor = executor
        _check_capture(tree)
        self._scalars, self._at, self._after = _scalars(optimizer, tree)

    def update(
        self,
        places: Sequence[int],
        grads: Sequence[Tensor],
        microbatches: list[Microbatch] | None = None,
        write: bool = True,
    ) -> None:
        """Update leaves in place by these gradients.

        Args:
            places: Indices of the leaves.
            grads: The gradient of each.
            microbatches: What each is to its step; None: the whole of it.
            write: False moves the state alone.

        Raises:
            ValueError, TypeError: A gradient or leaf that does not fit; before any write.
        """
        tree, rule = self._tree, self._rule
        states = [tree.states[i] for i in places]
        params = [tree.leaves[i].p for i in places]
        names, columns = _columns(rule, params, list(grads), states)
        local = _local([tree.paths[i] for i in places], columns, True)
        shards = list(map(shards_of, params))
        slots = make_slots(names, rule.state._fields, local, [], shards, True)
        at = [self._at[i] for i in places]
        packed, at = pack(rule, self._scalars, at, microbatches, write)
        launches = make_launches(self._executor, rule, slots, local, packed, at, write)
        p, _, *rest = local
        written = [p, *rest] if write else rest[: len(names)]
        run_launches(launches, local, packed, at, written)
        if write:
            _advance(states, [self._after[i] for i in places], packed, at)
            # Autograd has not seen that their local shards were written.
            written += [list(filter(is_distributed, params))]
        raise_versions(_present(written))


class TreePlan(Plan):
    """The launches of a tree's step, kept for trees of its structure and kind of tensors.

    Their addresses may change from step to step.

    Args:
        rule: The rule of all leaves.
        slots: Of the leaves that move.
        spec: The tree's structure.
        tensors: All parameters and their state.
    """

    def __init__(
        self,
        rule: Rule[Any, Any],
        slots: list[Slot],
        spec: pytree.TreeSpec,
        tensors: list[Tensor],
    ) -> None:
        super().__init__(rule, slots)
        self.spec, self._guard = spec, Guard(tensors, addresses=False)
        self._dtypes = {x.dtype for x in tensors}
        self._last: tuple[FunctionalOptimizer | None, list[str]] = None, []

    def holds(self, tensors: list[Any]) -> bool:
        """Return True if these are like those that the plan was made for."""
        try:
            return self._guard.holds(tensors)
        except (TypeError, AttributeError):
            return False  # one of them is no tensor

    def warn(self, optimizer: FunctionalOptimizer) -> bool:
        """Warn of likely mistakes. Return True if all hyperparameters are numbers."""
        last, mistakes = self._last
        numbers = last is optimizer
        if not numbers:
            mistakes = optimizer.likely_mistakes()
            mistakes += stuck_moments(optimizer.narrow_betas, self._dtypes)
            own = [optimizer.lr, optimizer.weight_decay, optimizer.max_lr]
            for x in optimizer.numbers.values():
                own += x if isinstance(x, tuple) else (x,)
            numbers = _NUMBERS.issuperset(map(type, own))
            if numbers:  # else it may hold a tensor
                self._last = optimizer, mistakes
        pure_tree.warn(mistakes)
        return numbers


def step(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """Step through compiled kernels, into new tensors."""
    return _step(optimizer, params, grads, state, False)


def step_(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """Step through compiled kernels, writing into params and state."""
    return _step(optimizer, params, grads, state, True)


def _step(
    optimizer: FunctionalOptimizer,
    params: PyTree,
    grads: PyTree,
    state: TreeState,
    in_place: bool,
) -> tuple[PyTree, TreeState]:
    if not isinstance(optimizer, FunctionalOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not a FunctionalOptimizer: a "
            "transformed one is compiled by torch.compile(optimizer.step)"
        )
    rule, tree = optimizer.rule, None
    ps: list[Any] = []
    shape = _flatten(params, ps)
    gs, states = _matching(rule, shape, grads, state)
    if not states:
        tree = FlatTree.check(rule, params, grads, state)
        ps, gs, states = [leaf.p for leaf in tree.leaves], tree.grads, tree.states
    names, columns = _columns(rule, ps, gs, states)
    running = chain.from_iterable(map(_running, states))
    tensors = [state.step, *running, *_present([ps, *columns[2:]])]
    key: Any = shape, rule, in_place, len(columns), *names, *map(_missing, columns[1:])
    kinds = set(map(type, chain.from_iterable(columns)))
    # Transformed tensors, DTensors, and those on a GPU have a new plan at each step.
    kept = _TENSORS.issuperset(kinds) and ps[0].is_cpu and not transform_level()
    plan = _find(key, tensors) if kept else None
    if plan is None:
        tree = tree or FlatTree.check(rule, params, grads, state)
        _check_capture(tree)
    moving, places = states, range(len(ps))
    if _NONE in set(map(type, gs)):
        places = [i for i, g in enumerate(gs) if g is not None]
        columns = [[column[i] for i in places] for column in columns]
        moving = [states[i] for i in places]
    with kernel_context(state.step.device):
        p, g, *rest = local = columns
        results = [] if in_place else [_empty(p), g, *map(_empty, rest)]
        targets = results
        if tree is not None and plan is None:
            local = _local([tree.paths[i] for i in places], columns, in_place)
            targets = list(map(to_local, results))
            shards = list(map(shards_of, p))
            fields = rule.state._fields
            slots = make_slots(names, fields, local, targets, shards, fixed=not kept)
            plan = TreePlan(rule, slots, tree.spec, tensors)
            if kept:
                _keep(key, plan)
        assert plan is not None
        if plan.warn(optimizer) and not rule.running._fields:
            step = state.step.detach()
            count = step.item() if step.is_cpu else step
            scalars, after = scalars_after(optimizer, [(count, ())], plan.coded)
            at = [0] * len(p)
        else:
            whole = FlatTree([], plan.spec, cast(Any, ps), gs, state, states)
            scalars, at, after = _scalars(optimizer, whole)
            at, after = [at[i] for i in places], [after[i] for i in places]
        packed, at = pack(rule, scalars, at, None, True)
        inputs = local + targets, packed, at
        found = plan.launches("kernels", *inputs, True, new=False)
        if found is None:
            tree = tree or FlatTree.check(rule, params, grads, state)
            found = plan.launches("kernels", *inputs, True, new=True)
            assert found is not None
        p, _, *rest = targets or local
        run_launches(found[0], *inputs, [p, *rest])
        if in_place:
            if rule.running._fields:
                _advance(moving, after, packed, at)
            # Autograd has not seen that the local shards of DTensors were written.
            shared = [] if kept else list(filter(is_distributed, columns[0]))
            raise_versions(_present([p, *rest, shared]))
            state.step.add_(1.0)
            return params, state
        p, _, *rest = results
        made = _leaf_states(rule, plan.slots, names, rest, moving, after)
        for i, x, s in zip(places, p, made) if len(p) < len(ps) else ():
            ps[i], states[i] = x, s
        if len(p) == len(ps):
            ps, states = p, made
        leaves = _unflatten(shape, iter(states))
        return _unflatten(shape, iter(ps)), TreeState(state.step + 1.0, leaves)


def _flatten(tree: PyTree, found: list[Any]) -> Any:
    """Append the leaves of a tree, and return its structure: see `_unflatten`."""
    kind = type(tree)
    if kind in _LEAVES:
        found.append(tree)
        return None
    if kind is dict:
        label, children = tuple(tree), tree.values()
    elif kind is list or kind is tuple:
        label, children = len(tree), tree
    else:
        leaves, spec = pytree.tree_flatten(tree, lambda x: isinstance(x, LeafState))
        found += leaves
        return spec
    if _LEAVES.issuperset(map(type, children)):
        found += children
        return kind, label
    return kind, label, *[_flatten(x, found) for x in children]


def _unflatten(shape: Any, leaves: Iterator[Any]) -> PyTree:
    """Return the tree of a structure: None for a leaf, kind and names, or torch's spec."""
    if shape is None:
        return next(leaves)
    if isinstance(shape, pytree.TreeSpec):
        return pytree.tree_unflatten(islice(leaves, shape.num_leaves), shape)
    kind, label, *children = shape
    items: Any = [_unflatten(x, leaves) for x in children]
    if not children:
        items = islice(leaves, len(label) if kind is dict else label)
    return dict(zip(label, items)) if kind is dict else kind(items)


def _matching(
    rule: Rule[Any, Any], shape: Any, grads: PyTree, state: TreeState
) -> tuple[list[Any], list[Any]]:
    """Return the leaves of gradients and state. There are none if they do not fit."""
    gs: list[Any] = []
    states: list[Any] = []
    fit = type(state) is TreeState and _flatten(grads, gs) == shape
    if fit and _flatten(state.leaves, states) == shape:
        kinds = rule.state, rule.running
        if set(map(type, states)) == {LeafState}:
            found = [set(map(type, map(f, states))) for f in (_rule_state, _running)]
            if found == [{kind} for kind in kinds]:
                return gs, states
    return [], []


def _columns(
    rule: Rule[Any, Any], ps: list[Any], gs: list[Any], states: list[Any]
) -> tuple[list[str], Columns]:
    """Return the names of the state's columns, and all columns."""
    rows = list(map(_rule_state, states))
    names: list[str] = list(rule.state._fields)
    fields = list(map(list, zip(*rows)))
    if not all([_TENSORS.issuperset(map(type, field)) for field in fields]):
        entries = [entry_of(row, None) for row in rows]
        names = names_in(rule.state._fields, dict.fromkeys(chain.from_iterable(entries)))
        fields = [[entry.get(name) for entry in entries] for name in names]
    comps = list(map(_comp, states))
    return names, [ps, gs, *fields, *([comps] if any(map(_is_given, comps)) else [])]


def _missing(column: list[Any]) -> tuple[int, ...]:
    """Return the places of None."""
    if _NONE not in set(map(type, column)):
        return ()
    return tuple([i for i, x in enumerate(column) if x is None])


def _present(columns: Columns) -> list[Tensor]:
    return list(filter(_is_given, chain.from_iterable(columns)))


def _empty(column: list[Any]) -> list[Any]:
    if _NONE not in set(map(type, column)):
        return list(map(torch.empty_like, column))
    return [None if x is None else torch.empty_like(x) for x in column]


def _find(key: Any, tensors: list[Any]) -> TreePlan | None:
    """Return the plan of such tensors; `key` is what they cannot tell."""
    try:
        return next((plan for plan in _plans.get(key, ()) if plan.holds(tensors)), None)
    except TypeError:
        return None  # the structure has no hash


def _keep(key: Any, plan: TreePlan) -> None:
    """Keep a plan, in the place of the oldest if there are too many."""
    try:
        _plans[key] = [plan, *_plans.get(key, ())[:1]]
    except TypeError:
        return
    while len(_plans) > _KINDS:
        _plans.pop(next(iter(_plans)), None)


def _local(paths: Sequence[str], columns: Columns, in_place: bool) -> Columns:
    """Return the local shards. Raise for leaves and gradients that do not fit."""
    p, grads, *_ = columns = list(columns)
    placed: list[Tensor] = []
    for path, x, g in zip(paths, p, grads):
        check_placed(path, x)
        if in_place:
            check_writable(path, *to_local([x]))
        pure_tree.check_grad(path, x, g)
        placed.append(redistribute_like(path, x, g))
    columns[1] = placed
    return list(map(to_local, columns))


def _check_capture(tree: FlatTree) -> None:
    """Raise if a CUDA graph would keep the scalars of this step."""
    step = tree.state.step
    for path, leaf in zip(tree.paths, tree.leaves):
        if step.device != leaf.p.device and is_capturing(leaf.p.device):
            raise RuntimeError(
                f"a CUDA graph would keep the numbers of this step for all its "
                f"replays: state.step is on {step.device}, params{path} on "
                f"{leaf.p.device}. Move it there before the capture"
            )


def _scalars(
    optimizer: FunctionalOptimizer, tree: FlatTree
) -> tuple[list[Scalars], list[int], list[Any]]:
    """Return the scalars, the index of each leaf's, and its running scalars after."""
    step = tree.state.step.detach()
    each, after = optimizer.scalars(tree, step, pure_tree.step_to_come(step))
    scalars = {id(s): s for s in each}
    places = {key: i for i, key in enumerate(scalars)}
    return list(scalars.values()), [places[id(s)] for s in each], after


def _advance(
    states: list[LeafState], after: list[Any], packed: list[Packed], at: list[int]
) -> None:
    """Write the running scalars of leaves whose `finite` flag is not false."""
    for s, news, k in zip(states, after, at):
        flag = packed[k].finite
        for old, new in zip(s.running, news):
            if flag is not None:
                new = torch.where(flag.to(old.device), new, old)
            old.copy_(new) if isinstance(new, Tensor) else old.fill_(new)


def _leaf_states(
    rule: Rule[Any, Any],
    slots: list[Slot],
    names: list[str],
    rest: Columns,
    states: list[LeafState],
    after: list[Any],
) -> list[LeafState]:
    """Return the states of leaves that moved, of the columns of new tensors."""
    count = len(names)
    comps = rest[count] if len(rest) > count else [None] * len(slots)
    rows = zip(*rest[:count]) if count else [()] * len(slots)
    if any([any(slot.codes) for slot in slots]):
        given = [filter(_is_given, row) for row in rows]
        own = [state_of(rule.state, x, s.codes) for x, s in zip(given, slots)]
    else:
        own = map(rule.state._make, rows)
    running = map(_running, states)
    if rule.running._fields:
        places = [s.running[0].device for s in states]
        running = map(pure_tree.running_tensors, after, places)
    return list(map(LeafState, own, comps, running))
