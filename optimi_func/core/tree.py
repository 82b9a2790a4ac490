"""Flatten and check parameter trees, their gradients and their state.

A parameter tree is a pytree of tensors. Its gradients and its state have the same
structure, and lr and weight_decay may be prefixes of it.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from optimi_func.core.checks import TAKEN, check_grad, check_param, check_taken, shown, warn
from optimi_func.core.leaf import init_leaf
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import (
    BoundRule,
    Named,
    NoRunning,
    NoState,
    Numbers,
    PyTree,
    Rule,
    Scalar,
    Storage,
)
from optimi_func.core.storage import (
    check_entry,
    check_stored,
    entry_of,
    own_shapes,
    seed_of,
)
from optimi_func.core.torch_private import is_unwatched, serializable, transform_level

NO_RUNNING = NoRunning()
_Kinds: TypeAlias = tuple[type[Named], type[Named], bool]
N = TypeVar("N", bound=Named)


class LeafState:
    """The state of one parameter.

    A `LeafState` has one attribute for each tensor that the rule stores, such as
    `state.leaves["w"].exp_avg`. A moment that is stored in 8 bits is an object with a
    method `decode(dtype)`, which returns a tensor. If a rule stores numbers for all
    parameters together, these numbers are attributes too, as 0-d tensors.

    `kahan_comp` is the tensor of rounding errors that Kahan summation stores, or None. If
    the parameter is rounded at random (`Storage("stochastic")`), `kahan_comp` is the seed,
    as a 0-d int64 tensor.

    The class is a registered pytree node, so the functions of `torch.utils._pytree` can map
    over its tensors.
    """

    __slots__ = ("kahan_comp", "rule_state", "running")

    def __init__(
        self, rule_state: Named, kahan_comp: Tensor | None, running: Named = NO_RUNNING
    ) -> None:
        self.rule_state = rule_state
        self.kahan_comp = kahan_comp
        self.running = running

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in LeafState.__slots__:
            raise AttributeError(name)
        home = self.running if name in self.running._fields else self.rule_state
        return getattr(home, name)

    def __reduce__(self) -> tuple[object, ...]:
        return LeafState, (self.rule_state, self.kahan_comp, self.running)

    def __repr__(self) -> str:
        running = f", {self.running!r}" if self.running else ""
        return f"LeafState({self.rule_state!r}, kahan_comp={self.kahan_comp!r}{running})"


def _flatten_leaf(leaf: LeafState) -> tuple[list[Tensor], _Kinds]:
    tensors = [*leaf.rule_state, *leaf.running]
    if leaf.kahan_comp is not None:
        tensors.append(leaf.kahan_comp)
    # None is left out, because vmap, grad and jvp refuse it.
    kinds = type(leaf.rule_state), type(leaf.running)
    return tensors, (*kinds, leaf.kahan_comp is not None)


def _flatten_leaf_with_keys(leaf: LeafState) -> tuple[list[Any], _Kinds]:
    tensors, context = _flatten_leaf(leaf)
    names = [*leaf.rule_state._fields, *leaf.running._fields, "kahan_comp"]
    keyed = [(pytree.GetAttrKey(n), t) for n, t in zip(names, tensors)]
    return keyed, context


def _unflatten_leaf(tensors: Iterable[Tensor], context: _Kinds) -> LeafState:
    kind, running, compensated = context
    tensors = list(tensors)
    comp = tensors.pop() if compensated else None
    count = len(kind._fields)
    return LeafState(kind(*tensors[:count]), comp, running(*tensors[count:]))


def _names_of_kinds(context: _Kinds) -> list[object]:
    """Return what torch.export writes: the names of the classes."""
    names = [(kind.__module__, kind.__qualname__) for kind in context[:2]]
    return [*names, context[2]]


def _kinds_of_names(dumped: list[Any]) -> tuple[Any, ...]:
    kinds = [attrgetter(name)(sys.modules[module]) for module, name in dumped[:2]]
    return *kinds, dumped[2]


torch.serialization.add_safe_globals([LeafState, NoRunning, NoState])
pytree.register_pytree_node(
    LeafState,
    _flatten_leaf,
    _unflatten_leaf,
    serialized_type_name="optimi_func.functional.LeafState",
    to_dumpable_context=_names_of_kinds,
    from_dumpable_context=_kinds_of_names,
    flatten_with_keys_fn=_flatten_leaf_with_keys,
)


@serializable
class TreeState(NamedTuple):
    """The state of a parameter tree.

    Attributes:
        step: The number of steps taken so far, as a 0-d float32 tensor on the device of the
            parameters.
        leaves: A tree with the same structure as the parameters, which contains a
            `LeafState` for each parameter.
    """

    step: Tensor  # 0-d float32 on the parameters' device: steps taken so far
    leaves: PyTree  # the parameters' structure with a LeafState for each


class FlatTree(NamedTuple):
    """(params, grads, state) as flat lists, whose structures are equal."""

    params: PyTree
    spec: object  # see `unflatten`
    leaves: list[Tensor]
    grads: list[Tensor | None]
    states: list[LeafState]
    state: TreeState
    alike: bool = False  # see `_are_alike`

    @staticmethod
    def of(params: PyTree, grads: PyTree, state: TreeState) -> "FlatTree":
        """Flatten the three trees. Raise if they differ in structure."""
        if not torch.compiler.is_compiling():
            tensors, flat_grads, states = flat = [list[Any](), list[Any](), list[Any]()]
            trees = params, grads, getattr(state, "leaves", None)
            spec, *others = map(flatten, trees, flat)
            usual = others == [spec, spec] and set(map(type, states)) == {LeafState}
            usual = usual and type(state) is TreeState and isinstance(state.step, Tensor)
            if usual and state.step.dim() == 0 and _NONE not in set(map(type, tensors)):
                return FlatTree(params, spec, tensors, flat_grads, states, state)
        tensors, spec = flatten_params(params)
        if not isinstance(state, TreeState):
            raise TypeError(
                f"state={type(state).__name__} is not a TreeState: make one with the "
                "optimizer's init"
            )
        if not isinstance(state.step, Tensor) or state.step.dim() != 0:
            raise TypeError(
                f"state.step is {shown(state.step)}: allowed is a 0-d tensor. Under vmap, "
                "give the axis of its members in in_dims"
            )
        flat_grads = match_tree("grads", grads, spec, params)
        states = match_tree("state", state.leaves, spec, params)
        return FlatTree(params, spec, tensors, flat_grads, states, state)

    def check(self, optimizer: BoundRule) -> "FlatTree":
        """Return the tree. Raise if a step of the optimizer could not use its tensors."""
        rule, numbers = optimizer.rule, optimizer.shape_numbers
        # Dynamo cannot trace it.
        if not torch.compiler.is_compiling() and self._are_alike(rule, numbers):
            return self._replace(alike=True)
        for i, (p, g, s) in enumerate(zip(self.leaves, self.grads, self.states)):
            path = path_of(self.params, i)
            check_param(path, p)
            check_grad(path, p, g)
            _check_state(rule, numbers, path, p, s)
        return self

    def _are_alike(self, rule: Rule, numbers: Numbers) -> bool:
        """Return True if each gradient and state is stored as its parameter is."""
        states, count = self.states, len(rule.fields)
        if set(map(type, states)) != {LeafState}:
            return False
        rows, comps = [s.rule_state for s in states], [s.kahan_comp for s in states]
        running = [s.running for s in states]
        if not (_are_like(rows, rule.state) and _are_like(running, rule.running)):
            return False
        grads = [p if g is None else g for p, g in zip(self.leaves, self.grads)]
        try:
            kinds = [*map(_kind, self.leaves)]
            fits = TAKEN.issuperset([kind[2:] for kind in kinds])
            for column in grads, *[*zip(*rows)][:count]:
                fits = fits and [*map(_kind, column)] == kinds
            for p, kind, row in zip(self.leaves, kinds, rows) if rule.whole_fields else ():
                own = own_shapes(rule, numbers, p).values()
                fits = fits and [*map(_kind, row[count:])] == [(x, *kind[1:]) for x in own]
            counts = [x.dim() for x in chain.from_iterable(running)]
        except AttributeError:  # of what is no tensor
            return False
        return fits and {*comps} == {None} and not any(counts)

    def rebuild(
        self, leaves: Sequence[object], states: Sequence[object]
    ) -> tuple[PyTree, TreeState]:
        """Return trees of other leaves, and count a step."""
        params, state = unflatten(self.spec, leaves), unflatten(self.spec, states)
        return params, TreeState(self.state.step + 1.0, state)

    def moment_dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the moments that are not in codes."""
        fields = chain.from_iterable([s.rule_state for s in self.states])
        return {x.dtype for x in fields if isinstance(x, Tensor)}

    def runs_at_once(self) -> bool:
        """Return True if a step runs now, on CPU, and nothing records or rewrites it."""
        if not is_unwatched() or transform_level():
            return False
        rows = [(*s.rule_state, s.kahan_comp) for s in self.states]
        entries = self.state.step, *self.leaves, *self.grads, *chain.from_iterable(rows)
        tensors = [x for x in entries if x is not None]
        if not _TENSORS.issuperset(map(type, tensors)) or not all(map(_is_cpu, tensors)):
            return False
        return not (torch.is_grad_enabled() and any(map(_requires_grad, tensors)))


_NONE = type(None)
_TENSORS = {Tensor, torch.nn.Parameter}
_LEAVES = {*_TENSORS, _NONE, LeafState}
_is_cpu, _requires_grad = attrgetter("is_cpu"), attrgetter("requires_grad")
_kind = attrgetter("shape", "device", "dtype", "layout")


def _is_leaf_state(x: PyTree) -> bool:
    return isinstance(x, LeafState)


def flatten(tree: PyTree, out: list[object]) -> object:
    """Append the leaves of a tree, and return its structure: see `unflatten`."""
    kind = type(tree)
    if kind in _LEAVES:
        out.append(tree)
        return None
    if kind is dict:
        label, children = tuple(tree), tree.values()
    elif kind is list or kind is tuple:
        label, children = len(tree), tree
    else:
        leaves, spec = pytree.tree_flatten(tree, _is_leaf_state)
        out += leaves
        return spec
    if _LEAVES.issuperset(map(type, children)):
        out += children
        return kind, label
    return kind, label, *[flatten(x, out) for x in children]


def unflatten(spec: Any, leaves: Iterable[object]) -> PyTree:
    """Return the tree of a structure: None for a leaf, kind and names, or torch's spec."""
    leaves = iter(leaves)
    if spec is None:
        return next(leaves)
    if isinstance(spec, pytree.TreeSpec):
        return pytree.tree_unflatten(islice(leaves, spec.num_leaves), spec)
    kind, label, *children = spec
    items: Iterable[PyTree] = [unflatten(x, leaves) for x in children]
    if not children:
        items = islice(leaves, len(label) if kind is dict else label)
    return dict(zip(label, items)) if kind is dict else kind(items)


def _are_like(rows: Iterable[object], kind: type[Named]) -> bool:
    """Return True for NamedTuples with these fields, whose class had another name once."""
    return {getattr(x, "_fields", None) for x in rows} == {kind._fields}


def _check_state(rule: Rule, numbers: Numbers, path: object, p: Tensor, s: object) -> None:
    if not isinstance(s, LeafState):
        raise TypeError(f"state.leaves{path} is {shown(s)}, which is not a LeafState")
    if not _are_like([s.rule_state], rule.state):
        raise ValueError(
            f"state.leaves{path} holds {type(s.rule_state)._fields}, but "
            f"the optimizer needs {rule.state._fields}: make it with its own init and the "
            "same options"
        )
    if not _are_like([s.running], rule.running):
        raise ValueError(
            f"state.leaves{path} has the running scalars {s.running._fields}, but the "
            f"optimizer needs {rule.running._fields}: make it with its own init"
        )
    entry = {**entry_of(s.rule_state, s.kahan_comp), **s.running._asdict()}
    check_entry(rule, numbers, "state.leaves", path, p, entry)


def init_tree(optimizer: BoundRule, params: PyTree, storage: Storage) -> TreeState:
    """Return fresh state for a parameter tree."""
    rule, numbers = optimizer.rule, optimizer.init_numbers
    tensors, spec = flatten_params(params)
    for i, p in enumerate(tensors):
        check_taken(rule, path_of(params, i), p)
    warn(check_stored([rule], storage, tensors))
    leaves = [init_leaf(rule, numbers, p, storage) for p in tensors]
    step = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    seeds = [seed_tensor(storage, p) for p in tensors]
    states = [
        LeafState(
            leaf.state,
            leaf.comp if seed is None else seed,
            running_tensors(rule.running(), step.device),
        )
        for leaf, seed in zip(leaves, seeds)
    ]
    return TreeState(step, pytree.tree_unflatten(states, spec))


def seed_tensor(storage: Storage, p: Tensor) -> Tensor | None:
    """Return the seed of a parameter that is rounded at random, or None for others."""
    seed = seed_of(storage, p)
    if seed is None:
        return None
    return torch.tensor(seed, dtype=torch.int64, device=p.device)


def running_tensors(running: N, device: torch.device) -> N:
    """Copy running scalars to new 0-d tensors on a device."""
    dtype = scalar_dtype(device)
    return type(running)(*[tensor_of(x, dtype, device) for x in running])


def tensor_of(number: Scalar, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a new 0-d tensor."""
    if isinstance(number, Tensor):
        return number.to(device, dtype, copy=True)
    return torch.full((), number, dtype=dtype, device=device)


def step_to_come(step: Tensor) -> Scalar:
    """Return the 1-based number of the next step.

    A count on the CPU becomes a float. One on another device stays there, because reading
    it would synchronize.
    """
    return step.item() + 1.0 if step.device.type == "cpu" else step.double() + 1.0


class _Frozen:
    """A node without children for a None in params, which it becomes if it is rebuilt."""


pytree.register_pytree_node(
    _Frozen,
    lambda frozen: ([], None),
    lambda children, context: None,  # pyright: ignore[reportArgumentType]
    serialized_type_name="optimi_func.functional.Frozen",
    flatten_with_keys_fn=lambda frozen: ([], None),
)


def without_none(tree: PyTree) -> PyTree:
    """Return a tree without leaves that are None; its structure rebuilds it with them."""
    return pytree.tree_map(lambda x: _Frozen() if x is None else x, tree)


def grads_and_value(
    loss: Callable[..., object], has_aux: bool, params: PyTree, *rest: object
) -> tuple[PyTree, PyTree]:
    """Return what torch.func.grad_and_value does, with params that may have None."""
    leaves, spec = pytree.tree_flatten(without_none(params))

    def of_leaves(leaves: list[Tensor], *rest: object) -> object:
        return loss(pytree.tree_unflatten(leaves, spec), *rest)

    grads, value = grad_and_value(of_leaves, has_aux=has_aux)(leaves, *rest)
    return pytree.tree_unflatten(grads, spec), value


class Path(NamedTuple):
    """The path of a tree's leaf, which is found when it is shown."""

    tree: PyTree
    i: int

    def __str__(self) -> str:
        return paths_in(without_none(self.tree))[self.i]


def path_of(tree: PyTree, i: int) -> object:
    """Return the path of a tree's leaf, as errors show it."""
    # Dynamo cannot trace key paths.
    return f"<leaf {i}>" if torch.compiler.is_compiling() else Path(tree, i)


def flatten_params(params: PyTree) -> tuple[list[Tensor], pytree.TreeSpec]:
    """Return leaves and structure of a parameter tree, with its leaves checked."""
    tensors, spec = pytree.tree_flatten(params)
    if all(x is None for x in tensors):
        raise ValueError(f"params={params!r} holds no tensor")
    if any(x is None for x in tensors):
        tensors, spec = pytree.tree_flatten(without_none(params))
    for i, p in enumerate(tensors):
        check_param(path_of(params, i), p)
    return tensors, spec


def match_tree(
    name: str, tree: PyTree, spec: pytree.TreeSpec, params: PyTree
) -> list[PyTree]:
    """Flatten `tree` as far as `spec` goes. Raise with the first leaf that differs.

    A None in params is skipped. If `tree` is grads, its None stands for any subtree.
    """
    try:
        return spec.flatten_up_to(tree)
    except ValueError as error:
        leaves, own = pytree.tree_flatten(tree, _is_leaf_state)
        parts: list[PyTree] = [None] * spec.num_leaves
        try:
            places = own.flatten_up_to(pytree.tree_unflatten(range(len(parts)), spec))
            for x, place in zip(leaves, places):
                if isinstance(place, int):
                    parts[place] = x
                elif x is not None or not (name == "grads" or place is None):
                    raise error
            return parts
        except ValueError:
            raise ValueError(
                f"{name} and params differ in structure{_difference(tree, params)}"
            ) from error


def broadcast(name: str, prefix: object, tree: FlatTree) -> tuple[list[Any], list[int]]:
    """Flatten a prefix of the parameter tree, and return the index in it for each leaf."""
    count = len(tree.leaves)
    # Dynamo cannot ask whether a dict is callable.
    if isinstance(prefix, float | Tensor) or (
        type(prefix) is not dict and callable(prefix)
    ):
        return [prefix], [0] * count
    places = unflatten(tree.spec, range(count))
    try:
        return spread(prefix, places, count)
    except ValueError as error:
        raise ValueError(
            f"{name} is no prefix of params{_difference(prefix, places)}"
            + " (values of a population's members are a tensor)" * isinstance(prefix, list)
        ) from error


def spread(prefix: PyTree, places: PyTree, count: int) -> tuple[list[Any], list[int]]:
    """Flatten a prefix of a tree of `count` indices, and return its index for each."""
    leaves, spec = pytree.tree_flatten(prefix)
    at = [0] * count
    for i, subtree in enumerate(spec.flatten_up_to(places)):
        for place in pytree.tree_leaves(subtree):
            if place is not None:  # a frozen parameter
                at[place] = i
    return leaves, at


def step_of(
    owner: str,
    optimizer: Any,
    params: PyTree,
    grads: PyTree,
    state: PyTree,
    **extras: PyTree,
) -> tuple[PyTree, PyTree]:
    """Return an optimizer's step; raise if one of a user's changes a structure."""
    result = optimizer.step(params, grads, state, **extras)
    if getattr(optimizer, "keeps_structure", False):
        return result
    step = f"the step of {owner}'s optimizer, {type(optimizer).__name__},"
    check_pair(step, "params", result, state)
    tensors, spec = flatten_params(params)
    new = match_tree(f"what {step} returned", result[0], spec, params)
    for i, (p, q) in enumerate(zip(tensors, new)):
        if not isinstance(q, Tensor) or (q.shape, q.dtype) != (p.shape, p.dtype):
            where = f"params{path_of(params, i)}, {shown(p)}"
            raise ValueError(f"{step} returned {shown(q)} for {where}")
    return result


def check_pair(owner: str, first: str, found: object, state: PyTree) -> None:
    """Raise unless `found` is a tuple of `first` and of a state like `state`."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(f"{owner} returned {shown(found)}: allowed is ({first}, state)")
    before, spec = pytree.tree_flatten(state)
    try:
        after = spec.flatten_up_to(found[1])
    except ValueError:
        after = []
    if [isinstance(x, Tensor) for x in after] != [isinstance(x, Tensor) for x in before]:
        raise ValueError(f"{owner} returned a state of another structure than that of init")


def _difference(tree: PyTree, params: PyTree) -> str:
    ours, theirs = paths_in(without_none(params)), paths_in(tree, _is_leaf_state)
    for path in ours:
        # A prefix covers all leaves below it.
        if not any(path.startswith(known) for known in theirs):
            return f": params{path} has no counterpart"
    for path in paths_in(without_none(tree), _is_leaf_state):
        if not any(known.startswith(path) for known in ours):
            return f": {path} is not in params"
    return ": the containers are of different types"


def paths_in(tree: PyTree, stop: Callable[[PyTree], bool] | None = None) -> list[str]:
    """Return the paths of a tree's leaves."""
    if not torch.compiler.is_compiling():
        try:
            keyed, _ = pytree.tree_flatten_with_path(tree, is_leaf=stop)
            return [pytree.keystr(path) for path, _ in keyed]
        except ValueError:
            pass  # a node registered without names for its children
    leaves = pytree.tree_leaves(tree, is_leaf=stop)
    return [f"<leaf {i}>" for i in range(len(leaves))]
