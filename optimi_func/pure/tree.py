"""Flatten and check parameter trees, their gradients and their state.

A parameter tree is a pytree of tensors. Its gradients and its state have the same
structure, and lr and weight_decay may be prefixes of it.
"""

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from optimi_func.core.checks import (
    check_grad,
    check_param,
    check_taken,
    shown,
    stuck_moments,
    warn,
)
from optimi_func.core.leaf import init_leaf, leaf_dtype, leaf_move, leaf_step, whole_means
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import Leaf, NoRunning, PyTree, Rule, Scalar, Scalars, Storage
from optimi_func.core.storage import check_entry, check_stored, entry_of
from optimi_func.core.torch_private import is_unwatched, serializable, transform_level
from optimi_func.pure.casts import Casts

NO_RUNNING = NoRunning()
# From the updates of all leaves and their parameters to the updates that are added.
Rewrite: TypeAlias = Callable[[list[Any], list[Tensor]], list[Any]]


class LeafState:
    """The state of one parameter: the rule's fields and, if there is one, `kahan_comp`.

    A registered pytree node. Fields are attributes: `state.leaves["w"].exp_avg` is a
    tensor, or codes whose `decode(dtype)` returns one. The rule's running scalars are
    attributes too, as 0-d tensors on the step count's device.
    """

    __slots__ = ("kahan_comp", "rule_state", "running")

    def __init__(
        self, rule_state: Any, kahan_comp: Tensor | None, running: Any = NO_RUNNING
    ) -> None:
        self.rule_state = rule_state
        self.kahan_comp = kahan_comp
        self.running = running

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in LeafState.__slots__:
            raise AttributeError(name)
        home = self.running if name in self.running._fields else self.rule_state
        return getattr(home, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LeafState, (self.rule_state, self.kahan_comp, self.running)

    def __repr__(self) -> str:
        running = f", {self.running!r}" if self.running else ""
        return f"LeafState({self.rule_state!r}, kahan_comp={self.kahan_comp!r}{running})"


def _flatten_leaf(leaf: LeafState) -> tuple[list[Tensor], Any]:
    tensors = [*leaf.rule_state, *leaf.running]
    if leaf.kahan_comp is not None:
        tensors.append(leaf.kahan_comp)
    # None is left out, because vmap, grad and jvp refuse it.
    kinds = type(leaf.rule_state), type(leaf.running)
    return tensors, (*kinds, leaf.kahan_comp is not None)


def _flatten_leaf_with_keys(leaf: LeafState) -> tuple[list[Any], Any]:
    tensors, context = _flatten_leaf(leaf)
    names = [*leaf.rule_state._fields, *leaf.running._fields, "kahan_comp"]
    keyed = [(pytree.GetAttrKey(n), t) for n, t in zip(names, tensors)]
    return keyed, context


def _unflatten_leaf(tensors: Any, context: Any) -> LeafState:
    kind, running, compensated = context
    tensors = list(tensors)
    comp = tensors.pop() if compensated else None
    count = len(kind._fields)
    return LeafState(kind(*tensors[:count]), comp, running(*tensors[count:]))


pytree.register_pytree_node(
    LeafState,
    _flatten_leaf,
    _unflatten_leaf,
    serialized_type_name="optimi_func.functional.LeafState",
    # torch.export writes the names of the classes.
    to_dumpable_context=lambda c: [*((x.__module__, x.__qualname__) for x in c[:2]), c[2]],
    from_dumpable_context=lambda d: (
        *(attrgetter(n)(sys.modules[m]) for m, n in d[:2]),
        d[2],
    ),
    flatten_with_keys_fn=_flatten_leaf_with_keys,
)


@serializable
class TreeState(NamedTuple):
    """The state of a parameter tree."""

    step: Tensor  # 0-d float32 on the parameters' device: steps taken so far
    leaves: PyTree  # the parameters' structure with a LeafState for each


class FlatTree(NamedTuple):
    """Checked (params, grads, state) as flat lists."""

    paths: Sequence[object]
    spec: pytree.TreeSpec
    leaves: list[Leaf]
    grads: list[Tensor | None]
    state: TreeState
    states: list[LeafState]

    @staticmethod
    def check(
        rule: Rule[Any, Any], params: PyTree, grads: PyTree, state: TreeState
    ) -> "FlatTree":
        """Flatten the three trees. Raise if a step could not use them."""
        paths, tensors, spec = flatten_params(params)
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
        for path, p, g, s in zip(paths, tensors, flat_grads, states):
            if not _fits(rule, p, g, s):
                check_grad(path, p, g)
                _check_state(rule, path, p, s)
        leaves = [Leaf(p, s.rule_state, s.kahan_comp) for p, s in zip(tensors, states)]
        return FlatTree(paths, spec, leaves, flat_grads, state, states)

    def rebuild(
        self, stepped: dict[int, Leaf], running: Sequence[Any]
    ) -> tuple[PyTree, TreeState]:
        """Return trees with the leaves that moved, and each leaf's new running scalars."""
        params = [leaf.p for leaf in self.leaves]
        states = list(self.states)
        for i, (p, rule_state, comp) in stepped.items():
            params[i], states[i] = p, LeafState(rule_state, comp, running[i])
        step = self.state.step + 1.0
        return (
            pytree.tree_unflatten(params, self.spec),
            TreeState(step, pytree.tree_unflatten(states, self.spec)),
        )

    def stepped(
        self,
        rule: Rule[Any, Any],
        scalars: Sequence[Scalars],
        cast: Casts,
        rewrite: Rewrite | None,
        extras: Sequence[dict[str, Any]] | None,
    ) -> dict[int, Leaf]:
        """Return the leaves that have gradients after one step, by their index."""
        found: dict[int, Any] = {}
        half = leaf_step if rewrite is None else leaf_move
        for i, (leaf, g) in enumerate(zip(self.leaves, self.grads)):
            if g is not None:
                wide = leaf_dtype(leaf, g)
                now = cast(scalars[i], wide, leaf.p.device)
                if extras is not None:
                    now = now._replace(coeffs=now.coeffs._replace(**extras[i]))
                found[i] = half(rule, leaf, g, now, True, whole_means, wide)
        if rewrite is None:
            return found
        us, xs, adds = zip(
            *[found.get(i, (None, x.p, 0)) for i, x in enumerate(self.leaves)]
        )
        new = rewrite([*us], [*xs])
        return {i: adds[i](new[i]) for i in found}

    def stuck_moments(self, optimizer: object) -> list[str]:
        """Return warnings for moments whose dtype is too coarse for their beta."""
        fields = [field for leaf in self.leaves for field in leaf.state]
        dtypes = {x.dtype for x in fields if isinstance(x, Tensor)}
        return stuck_moments(getattr(optimizer, "narrow_betas", ()), dtypes)

    def runs_at_once(self) -> bool:
        """Return True if a step runs now, on CPU, and nothing records or rewrites it."""
        if not is_unwatched() or transform_level():
            return False
        pairs = zip(self.leaves, self.grads)
        tensors = [x for leaf, g in pairs for x in (g, leaf.p, *leaf.state, leaf.comp)]
        recorded = torch.is_grad_enabled()
        return all(
            [
                type(x) in _USUAL and x.is_cpu and not (recorded and x.requires_grad)
                for x in (self.state.step, *tensors)
                if x is not None
            ]
        )


_USUAL = (Tensor, torch.nn.Parameter)


def _fits(rule: Rule[Any, Any], p: Tensor, g: Any, s: Any) -> bool:
    """Return True if g and s fit p at first sight: p's dtype, no codes, no compensation."""
    if g is p or not isinstance(s, LeafState) or s.kahan_comp is not None:
        return False
    if not (isinstance(s.rule_state, rule.state) and isinstance(s.running, rule.running)):
        return False
    if any([not isinstance(x, Tensor) or x.dim() for x in s.running]):
        return False
    shape, dtype, device = p.shape, p.dtype, p.device
    for x in s.rule_state if g is None else (g, *s.rule_state):
        if not isinstance(x, Tensor) or x.dtype is not dtype or x.device != device:
            return False
        if x.shape != shape or x.layout is not torch.strided:
            return False
    return True


def _check_state(rule: Rule[Any, Any], path: object, p: Tensor, s: Any) -> None:
    if not isinstance(s, LeafState):
        raise TypeError(f"state.leaves{path} is {shown(s)}, which is not a LeafState")
    if not isinstance(s.rule_state, rule.state):
        raise ValueError(
            f"state.leaves{path} holds {type(s.rule_state)._fields}, but "
            f"the optimizer needs {rule.state._fields}: make it with its own init and the "
            "same options"
        )
    if not isinstance(s.running, rule.running):
        raise ValueError(
            f"state.leaves{path} has the running scalars {s.running._fields}, but the "
            f"optimizer needs {rule.running._fields}: make it with its own init"
        )
    entry = {**entry_of(s.rule_state, s.kahan_comp), **s.running._asdict()}
    check_entry(rule, "state.leaves", path, p, entry)


def init_tree(rule: Rule[Any, Any], params: PyTree, storage: Storage) -> TreeState:
    """Return fresh state for a parameter tree."""
    paths, tensors, spec = flatten_params(params)
    for path, p in zip(paths, tensors):
        check_taken(rule, path, p)
    warn(check_stored([rule], storage, tensors))
    leaves = [init_leaf(rule, p, storage) for p in tensors]
    step = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    states = [
        LeafState(leaf.state, leaf.comp, running_tensors(rule.running(), step.device))
        for leaf in leaves
    ]
    return TreeState(step, pytree.tree_unflatten(states, spec))


def running_tensors(running: Any, device: torch.device) -> Any:
    """Copy running scalars to new 0-d tensors on a device."""
    dtype = scalar_dtype(device)
    return type(running)(
        *[
            x.to(device, dtype, copy=True)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=dtype, device=device)
            for x in running
        ]
    )


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
    loss: Callable[..., Any], has_aux: bool, params: PyTree, *rest: Any
) -> tuple[PyTree, Any]:
    """Return what torch.func.grad_and_value does, with params that may have None."""
    leaves, spec = pytree.tree_flatten(without_none(params))

    def of_leaves(leaves: list[Tensor], *rest: Any) -> Any:
        return loss(pytree.tree_unflatten(leaves, spec), *rest)

    grads, found = grad_and_value(of_leaves, has_aux=has_aux)(leaves, *rest)
    return pytree.tree_unflatten(grads, spec), found


class Path(NamedTuple):
    """The path of a tree's leaf, which is found when it is shown."""

    tree: PyTree
    i: int

    def __str__(self) -> str:
        return _paths(self.tree, self.i + 1)[self.i]


def flatten_params(
    params: PyTree,
) -> tuple[Sequence[object], list[Tensor], pytree.TreeSpec]:
    """Return paths, leaves and structure of a parameter tree, with its leaves checked."""
    tensors, spec = pytree.tree_flatten(params)
    if all(x is None for x in tensors):
        raise ValueError(f"params={params!r} holds no tensor")
    if any(x is None for x in tensors):
        params = without_none(params)
        tensors, spec = pytree.tree_flatten(params)
    count = len(tensors)
    traced = torch.compiler.is_compiling()
    paths = _paths(params, count) if traced else [Path(params, i) for i in range(count)]
    for path, p in zip(paths, tensors):
        check_param(path, p)
    return paths, tensors, spec


def match_tree(name: str, tree: PyTree, spec: pytree.TreeSpec, params: PyTree) -> list[Any]:
    """Flatten `tree` as far as `spec` goes. Raise with the first leaf that differs.

    A None in params is skipped. If `tree` is grads, its None stands for any subtree.
    """
    try:
        return spec.flatten_up_to(tree)
    except ValueError as error:
        leaves, own = pytree.tree_flatten(tree, is_leaf=lambda x: isinstance(x, LeafState))
        found: list[Any] = [None] * spec.num_leaves
        try:
            places = own.flatten_up_to(pytree.tree_unflatten(range(len(found)), spec))
            for x, place in zip(leaves, places):
                if isinstance(place, int):
                    found[place] = x
                elif x is not None or not (name == "grads" or place is None):
                    raise error
            return found
        except ValueError:
            raise ValueError(
                f"{name} and params differ in structure{_difference(tree, params)}"
            ) from error


def broadcast(name: str, prefix: Any, leaves: FlatTree) -> tuple[list[Any], list[int]]:
    """Flatten a prefix of the parameter tree, and return the index in it for each leaf."""
    count = len(leaves.leaves)
    if isinstance(prefix, float | Tensor):
        return [prefix], [0] * count
    numbers, spec = pytree.tree_flatten(prefix)
    if callable(prefix) or spec.is_leaf():
        return [prefix], [0] * count
    places = pytree.tree_unflatten(range(count), leaves.spec)
    try:
        subtrees = spec.flatten_up_to(places)
    except ValueError as error:
        raise ValueError(
            f"{name} is no prefix of params{_difference(prefix, places)}"
        ) from error
    at = [0] * count
    for i, subtree in enumerate(subtrees):
        for place in pytree.tree_leaves(subtree):
            if place is not None:  # a frozen parameter
                at[place] = i
    return numbers, at


def _difference(tree: PyTree, params: PyTree) -> str:
    def stop(x: Any) -> bool:
        return isinstance(x, LeafState)

    params = without_none(params)
    ours = _paths(params, len(pytree.tree_leaves(params)))
    theirs = _paths(tree, len(pytree.tree_leaves(tree, is_leaf=stop)), stop)
    for path in ours:
        # A prefix covers all leaves below it.
        if not any(path.startswith(known) for known in theirs):
            return f": params{path} has no counterpart"
    tree = without_none(tree)
    for path in _paths(tree, len(pytree.tree_leaves(tree, is_leaf=stop)), stop):
        if not any(known.startswith(path) for known in ours):
            return f": {path} is not in params"
    return ": the containers are of different types"


def _paths(tree: PyTree, count: int, stop: Any = None) -> list[str]:
    if not torch.compiler.is_compiling():
        try:
            keyed, _ = pytree.tree_flatten_with_path(tree, is_leaf=stop)
            return [pytree.keystr(path) for path, _ in keyed]
        except ValueError:
            pass  # a node registered without names for its children
    # Dynamo cannot trace key paths, so errors count leaves.
    return [f"<leaf {i}>" for i in range(count)]
