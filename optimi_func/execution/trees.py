"""The compiled step of a parameter tree, into new tensors or in place."""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from operator import attrgetter, is_not
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import (
    check_apart,
    check_runs_kernels,
    check_writable,
    stuck_moments,
)
from optimi_func.core.distributed import (
    check_placed,
    is_distributed,
    redistribute_like,
    shards_of,
    to_local,
)
from optimi_func.core.rule import Microbatch, PyTree, Rule, Scalars
from optimi_func.core.storage import entry_of, names_in, state_of
from optimi_func.execution.executors import Executor
from optimi_func.execution.guards import Guard
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.launches import Columns, run_launches
from optimi_func.execution.plans import Plan, raise_versions
from optimi_func.execution.scalars import Packed, pack, scalars_after
from optimi_func.execution.slots import Slot, make_slots
from optimi_func.execution.tensors import is_capturing
from optimi_func.pure import tree as pure_tree
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import FlatTree, LeafState, TreeState, without_none

_NONE = type(None)
_NUMBERS = {float, int, bool, _NONE}
_TENSORS = {Tensor, torch.nn.Parameter, _NONE}
_LEAVES = {*_TENSORS, LeafState}
_rule_state, _running = attrgetter("rule_state"), attrgetter("running")
_comp, _is_given = attrgetter("kahan_comp"), partial(is_not, None)


class TreeStep:
    """One step of a tree's leaves, some at a time. The caller counts it.

    Hyperparameters are read once. The tree's state is that of the step before.
    """

    def __init__(
        self, optimizer: FunctionalOptimizer, tree: FlatTree, executor: Executor
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
        """Update leaves, of which `places` are the indices, in place by these gradients.

        Raises ValueError or TypeError before any write if one does not fit. `microbatches`
        are what each is to its step, and write=False moves the state alone.
        """
        tree, rule = self._tree, self._rule
        states = [tree.states[i] for i in places]
        params = [tree.leaves[i].p for i in places]
        names, columns = _columns(rule, params, list(grads), states)
        paths = [tree.paths[i] for i in places]
        columns = _local(paths, columns, True)
        if write:
            _check_apart(paths, columns)
        shards = list(map(shards_of, params))
        slots = make_slots(names, rule.state._fields, columns, [], shards)
        at = [self._at[i] for i in places]
        packed, at = pack(rule, self._scalars, at, microbatches, write)
        inputs = columns, packed, at
        found = Plan(rule, slots).launches(self._executor, *inputs, write, new=True)
        assert found is not None
        p, _, *rest = columns
        written = [p, *rest] if write else rest[: len(names)]
        run_launches(found[0], *inputs, written)
        if write:
            _advance(states, [self._after[i] for i in places], packed, at)
            # Autograd has not seen that their local shards were written.
            written.append(list(filter(is_distributed, params)))
        raise_versions(_present(written))


@lru_cache(32)
def _known(_: Any) -> list[tuple[Guard, set[torch.dtype], Plan]]:
    """Return the last four plans for trees of a kind: guard, dtypes of moments, plan."""
    return []


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
            f"optimizer={type(optimizer).__name__} is not a FunctionalOptimizer: "
            "compile a transform, or an optimizer of your own, by "
            "torch.compile(optimizer.step)"
        )
    kind = type(optimizer)
    instead = f"{kind.__module__.partition('.')[0]}.{kind.__name__}_step"
    check_runs_kernels(instead, ())
    rule, tree = optimizer.rule, None
    ps, gs, states = flat = [list[Any](), list[Any](), list[Any]()]
    given = params, grads, getattr(state, "leaves", None)
    shape, *others = map(_flatten, given, flat)
    if not _TENSORS.issuperset(map(type, ps)):
        check_runs_kernels(instead, [x for x in ps if isinstance(x, Tensor)])
    if others != [shape, shape] or not _are_of(rule, state, states):
        tree = FlatTree.check(rule, params, grads, state)
        ps, gs, states = [leaf.p for leaf in tree.leaves], tree.grads, tree.states
        shape = _flatten(without_none(params), [])
    names, columns = _columns(rule, ps, gs, states)
    running = chain.from_iterable(map(_running, states))
    own = [state.step, *running, *_present(columns[2:])]
    tensors = [*own, *ps]
    kinds = set(map(type, [*tensors, *gs]))
    if torch.is_grad_enabled():
        _check_undifferentiated(instead, optimizer, ps, gs, own)
    # Trees of transformed tensors, DTensors or a GPU's have a new plan at each step.
    kept = _TENSORS.issuperset(kinds) and ps[0].is_cpu
    # Kernels of one tensor are compiled for a number of threads.
    how = in_place, torch.get_num_threads(), len(columns), *names
    key = shape, rule, *how, *map(_missing, columns[1:])
    known = _known(key) if kept else []
    found = next((x for x in known if x[0].holds(tensors)), None)
    moving, places = states, range(len(ps))
    if _NONE in kinds:
        places = [i for i, g in enumerate(gs) if g is not None]
        columns = [[column[i] for i in places] for column in columns]
        moving = [states[i] for i in places]
    with kernel_context(state.step.device):
        p, g, *rest = columns
        targets = results = [] if in_place else [_empty(p), g, *map(_empty, rest)]
        if found is None:
            tree = tree or FlatTree.check(rule, params, grads, state)
            _check_capture(tree)
            paths = [tree.paths[i] for i in places]
            columns = _local(paths, columns, in_place)
            if in_place:
                _check_apart(paths, columns)
            targets = list(map(to_local, results))
            rows = columns, targets, list(map(shards_of, p))
            plan = Plan(rule, make_slots(names, rule.state._fields, *rows))
            moments = chain.from_iterable([leaf.state for leaf in tree.leaves])
            dtypes = {x.dtype for x in moments if isinstance(x, Tensor)}
            if kept and all([x.is_cpu for x in tensors]):
                guard = Guard(tensors, addresses=in_place)
                known[:] = [(guard, dtypes, plan), *known[:3]]
        else:
            _, dtypes, plan = found
        stuck = stuck_moments(optimizer.narrow_betas, dtypes)
        pure_tree.warn(optimizer.mistakes + stuck)
        if _is_number(optimizer) and not rule.running._fields:
            count = state.step.item() if state.step.is_cpu else state.step.detach()
            scalars, after = scalars_after(optimizer, [(count, ())], plan.coded)
            at = [0] * len(p)
        else:
            spec = pytree.tree_structure(params)
            whole = FlatTree([], spec, cast(Any, ps), gs, state, states)
            scalars, at, after = _scalars(optimizer, whole)
            at, after = [at[i] for i in places], [after[i] for i in places]
        packed, at = pack(rule, scalars, at, None, True)
        inputs = columns + targets, packed, at
        launches = plan.launches("kernels", *inputs, True, new=False)
        if launches is None:
            tree = tree or FlatTree.check(rule, params, grads, state)
            launches = plan.launches("kernels", *inputs, True, new=True)
            assert launches is not None
        x, _, *written = targets or columns
        written = [x, *written]
        run_launches(launches[0], *inputs, written)
        if in_place:
            if rule.running._fields:
                _advance(moving, after, packed, at)
            if not kept:  # Autograd has not seen that their local shards were written.
                written.append(list(filter(is_distributed, p)))
            raise_versions(_present(written))
            state.step.add_(1.0)
            return params, state
        x, _, *rest = results
        made = _leaf_states(rule, plan.slots, len(names), rest, moving, after)
        for i, new, s in zip(places, x, made):
            ps[i], states[i] = new, s
        after_it = TreeState(state.step + 1.0, _unflatten(shape, iter(states)))
        return _unflatten(shape, iter(ps)), after_it


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


def _are_of(rule: Rule[Any, Any], state: Any, states: list[Any]) -> bool:
    """Return True if these are states of a rule's leaves."""
    if type(state) is not TreeState or not isinstance(state.step, Tensor):
        return False
    if set(map(type, states)) != {LeafState}:
        return False
    own, running = (set(map(type, map(f, states))) for f in (_rule_state, _running))
    return own == {rule.state} and running == {rule.running}


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
    return [None if x is None else torch.empty_like(x) for x in column]


def _is_number(optimizer: FunctionalOptimizer) -> bool:
    """Return True if no hyperparameter is a tensor, a schedule or a tree."""
    own = [optimizer.lr, optimizer.weight_decay, optimizer.max_lr]
    for x in optimizer.numbers.values():
        own += x if isinstance(x, tuple) else (x,)
    return _NUMBERS.issuperset(map(type, own))


def _check_undifferentiated(
    instead: str,
    optimizer: FunctionalOptimizer,
    params: list[Any],
    grads: list[Any],
    own: list[Tensor],
) -> None:
    """Raise if an argument requires grad, other than parameters that are leaves."""
    names = "lr", "weight_decay", "max_lr", *optimizer.numbers
    given = {name: pytree.tree_leaves(getattr(optimizer, name)) for name in names}
    given["params"] = [p for p in params if not p.is_leaf]
    given |= {"grads": grads, "state.leaves": own}
    for name, values in given.items():
        if any([getattr(x, "requires_grad", False) for x in values]):
            raise TypeError(
                f"{name} requires grad, but a compiled step drops the derivative: call "
                f"{instead}, or this under torch.no_grad()"
            )


def _check_apart(paths: Sequence[object], columns: Columns) -> None:
    check_apart(zip(paths, columns[0]), "params{}".format, "call the pure step")


def _local(paths: Sequence[object], columns: Columns, in_place: bool) -> Columns:
    """Return the local shards. Raise for leaves and gradients that do not fit."""
    grads: list[Tensor] = []
    for path, p, g in zip(paths, *columns[:2]):
        check_placed(path, p)
        if in_place:
            check_writable(path, *to_local([p]))
        pure_tree.check_grad(path, p, g)
        grads.append(redistribute_like(path, p, g))
    return list(map(to_local, [columns[0], grads, *columns[2:]]))


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
    count: int,
    rest: Columns,
    states: list[LeafState],
    after: list[Any],
) -> list[LeafState]:
    """Return states of `count` columns of new tensors and of compensations, if any."""
    comps = rest[count] if len(rest) > count else [None] * len(slots)
    rows = zip(*rest[:count]) if count else [()] * len(slots)
    if any([any(slot.codes) for slot in slots]):
        codes = [slot.codes for slot in slots]
        own = [state_of(rule.state, filter(_is_given, x), c) for x, c in zip(rows, codes)]
    else:
        own = map(rule.state._make, rows)
    running = map(_running, states)
    if rule.running._fields:
        devices = [s.running[0].device for s in states]
        running = map(pure_tree.running_tensors, after, devices)
    return list(map(LeafState, own, comps, running))
