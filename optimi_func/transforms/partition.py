"""`partition` and `masked`: different optimizers for different leaves, in one state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias, Unpack

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.codes import PARAMS
from optimi_func.core.rule import InitOptions, PureOptimizer, PyTree, check_pure
from optimi_func.core.storage import keeps_codes, storage_of
from optimi_func.core.torch_private import serializable
from optimi_func.core.tree import flatten_params, match_tree, step_of, without_none
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.transforms._trees import (
    Transform,
    Trees,
    check_state,
    dotted_paths,
    extras_of,
    inner_eval_params,
)

# A pattern for a leaf's path, or a predicate of path and parameter.
Select: TypeAlias = str | Callable[[str, Tensor], bool]


@serializable
class Elsewhere(NamedTuple):
    """Placeholder in a part's trees for another part's leaf: a node without children."""


@dataclass(slots=True)
class Places:
    """The part that each leaf belongs to, -1 for none; a pytree node without children.

    `init` decides it once, and torch.compile treats it as a constant.
    """

    tree: PyTree  # the parameters' structure, with an index for each leaf

    def __hash__(self) -> int:
        return hash(frozenset(pytree.tree_leaves(self.tree)))


pytree.register_pytree_node(
    Places,
    lambda places: ([], places),
    lambda _, places: places,  # pyright: ignore[reportArgumentType]
    serialized_type_name="optimi_func.transforms.Places",
    to_dumpable_context=lambda x: (
        pytree.treespec_dumps(pytree.tree_structure(x.tree)),
        pytree.tree_leaves(x.tree),
    ),
    from_dumpable_context=lambda x: Places(
        pytree.tree_unflatten(x[1], pytree.treespec_loads(x[0]))
    ),
    flatten_with_keys_fn=lambda places: ([], places),
)


@serializable
class PartitionState(NamedTuple):
    """The state of `partition` and `masked`."""

    places: Places
    # Each part's own state, over the parameter tree with `Elsewhere()` for others' leaves.
    parts: tuple[PyTree, ...]


@dataclass(frozen=True, eq=False)
class Partition(Transform):
    """An optimizer for each part of the tree: see `partition` and `masked`."""

    selects: tuple[Select, ...]
    optimizers: tuple[PureOptimizer, ...]  # one for each select, then that of the rest
    freeze: bool  # leaves that nothing selects stay as they are

    @property
    def _name(self) -> str:
        return "masked" if self.freeze else "partition"

    def init(self, params: PyTree, **options: Unpack[InitOptions]) -> PartitionState:
        """Return the initial state, which also stores the part of each leaf.

        The options are those of `FunctionalOptimizer.init`.

        Raises:
            ValueError: No leaf is left for a pattern or predicate, or a leaf is not
                selected.
        """
        tensors, spec = flatten_params(params)
        places = self._place(params, tensors)
        storage = storage_of(**options)
        changes = PARAMS[storage.param or "kahan"].changes
        low = {i for i, p in zip(places, tensors) if p.dtype in changes}
        moments = list(map(_may_keep_moments, self.optimizers))
        parts: list[PyTree] = []
        for i, optimizer in enumerate(self.optimizers):
            # A part must not raise for an option that only other parts can use.
            part_options, part_storage = options.copy(), storage
            if low and i not in low:
                part_options.pop("kahan_sum", None)
                part_storage = part_storage._replace(param=None)
            if storage.coded and any(moments) and not moments[i]:
                part_storage = part_storage._replace(moments=None)
            if options.get("storage") is not None:
                part_options["storage"] = part_storage
            parts.append(optimizer.init(_part(i, places, tensors, spec), **part_options))
        return PartitionState(Places(pytree.tree_unflatten(places, spec)), tuple(parts))

    def step(
        self, params: PyTree, grads: PyTree, state: PartitionState, **extras: PyTree
    ) -> tuple[PyTree, PartitionState]:
        """Return the result of one update of each part.

        An extra is a 0-d tensor for all parts, or a tree like params, of which each part
        receives its own leaves. Extras go only to the parts that accept them.
        """
        state = self._checked(state)
        taken = list(map(extras_of, self.optimizers))
        for name in extras:
            if not any([own is None or name in own for own in taken]):
                raise TypeError(f"{self._name} got the extra {name!r}: no part takes it")
        trees = Trees.check(params, grads)
        places = match_tree("state", state.places.tree, trees.spec, params)
        moved: list[PyTree] = []
        states: list[PyTree] = []
        flat = {
            name: x if isinstance(x, Tensor) else match_tree(name, x, trees.spec, params)
            for name, x in extras.items()
        }
        for i, optimizer in enumerate(self.optimizers):
            p, g = (_part(i, places, x, trees.spec) for x in (trees.params, trees.grads))
            more: dict[str, PyTree] = {}
            for name, x in flat.items():
                if (names := taken[i]) is None or name in names:
                    split = isinstance(x, list)
                    more[name] = _part(i, places, x, trees.spec) if split else x
            p, own = step_of(self._name, optimizer, p, g, state.parts[i], **more)
            moved.append(p)
            states.append(own)
        new = pytree.tree_unflatten(_merged(places, trees.params, moved), trees.spec)
        return new, PartitionState(state.places, tuple(states))

    def eval_params(self, params: PyTree, state: PartitionState) -> PyTree:
        """Return the parts' parameters: see `FunctionalOptimizer.eval_params`."""
        state = self._checked(state)
        tensors, spec = flatten_params(params)
        places = match_tree("state", state.places.tree, spec, params)
        points = [
            inner_eval_params(optimizer, _part(i, places, tensors, spec), inner)
            for i, (optimizer, inner) in enumerate(zip(self.optimizers, state.parts))
        ]
        results = _merged(places, tensors, points)
        if all(a is b for a, b in zip(results, tensors)):
            return params
        return pytree.tree_unflatten(results, spec)

    def _checked(self, state: PyTree) -> PartitionState:
        state = check_state(state, PartitionState, self._name)
        if len(state.parts) != len(self.optimizers):
            raise ValueError(
                f"state has {len(state.parts)} parts, {self._name} has "
                f"{len(self.optimizers)}: make it with this optimizer's init"
            )
        return state

    def _place(self, params: PyTree, tensors: list[Tensor]) -> list[int]:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "a graph cannot keep the parts of its parameters: call init of "
                "partition and masked outside of the compiled function"
            )
        paths = dotted_paths(params)
        has_rest = self.freeze or len(self.optimizers) > len(self.selects)
        places = place(self._name, self.selects, has_rest, paths, tensors)
        check_each(self._name, self.selects, has_rest and not self.freeze, paths, places)
        if self.freeze:
            return [-1 if i == len(self.selects) else i for i in places]
        return places


def place(
    name: str,
    selects: Sequence[Select],
    has_rest: bool,
    paths: Sequence[str],
    tensors: Sequence[Tensor],
) -> list[int]:
    """Return the part of each parameter, the first that selects it or len(selects)."""
    places: list[int] = []
    for path, p in zip(paths, tensors):
        hits = [i for i, s in enumerate(selects) if _selects(s, path, p)]
        places.append(hits[0] if hits else len(selects))
    at_rest = [path for path, i in zip(paths, places) if i == len(selects)]
    if at_rest and not has_rest:
        raise ValueError(
            f"{name}: nothing selects {_listed(at_rest)}: give them an optimizer, or pass "
            "rest= for all that are left"
        )
    return places


def check_each(
    name: str,
    selects: Sequence[Select],
    has_rest: bool,
    paths: Sequence[str],
    places: Sequence[int],
) -> None:
    """Raise if a select or, with has_rest, the rest has no parameter."""
    listing = f"the parameters are {_listed(paths)}"
    for i, select in enumerate(selects):
        if i not in places:
            left = " that the parts before it leave" if i else ""
            raise ValueError(
                f"{name}: {_called(select)} selects no parameter{left}: {listing}"
            )
    if has_rest and len(selects) not in places:
        raise ValueError(f"{name}: no parameter is left for rest=: {listing}")


def _may_keep_moments(optimizer: object) -> bool:
    """Return False if an optimizer is known to have no moments for 8 bits."""
    if isinstance(optimizer, FunctionalOptimizer):
        return keeps_codes(optimizer.rule)
    if isinstance(optimizer, Partition):
        return any([_may_keep_moments(part) for part in optimizer.optimizers])
    inner = getattr(optimizer, "optimizer", None)
    return inner is None or _may_keep_moments(inner)


def partition(
    *parts: tuple[Select, PureOptimizer], rest: PureOptimizer | None = None
) -> Partition:
    """Use a different optimizer for each part of the parameter tree, with one common state.

    Args:
        *parts: Pairs of a pattern or predicate and an optimizer. The optimizer updates the
            leaves that its pattern or predicate selects and that no earlier part has
            selected. A pattern (`fnmatch`) is compared with the path of a leaf, which is
            its keys joined by dots, such as "body.0.weight". A predicate is a function of
            this path and the parameter. Only `init` calls predicates.
        rest: The optimizer for all leaves that no part selects. None means that the parts
            have to select all leaves.

    Raises:
        TypeError: A part is not a pair of a pattern or predicate and an optimizer.
        ValueError: There are no parts. `init` raises the same error if no leaf is left for
            a part or for `rest`, or if a leaf is not selected and `rest` is None.

    >>> from optimi_func import adamw, lion
    >>> matrices = lambda path, p: p.dim() == 2
    >>> opt = partition((matrices, lion(lr=0.1)), rest=adamw(lr=0.2))
    >>> params = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    >>> state = opt.init(params)
    >>> state.parts[0].leaves
    {'weight': LeafState(Momentum(exp_avg=tensor([[0., 0.],
            [0., 0.]])), kahan_comp=None), 'bias': Elsewhere()}
    """
    selects, optimizers = check_parts("partition", parts, rest)
    return Partition(selects, optimizers, False)


def check_parts(
    name: str, parts: Sequence[Any], rest: object
) -> tuple[tuple[Select, ...], tuple[PureOptimizer, ...]]:
    """Return the checked selects of parts, and their optimizers with that of the rest."""
    if not parts:
        raise ValueError(f"{name} got no part: allowed is one or more")
    for i, part in enumerate(parts):
        if not isinstance(part, tuple) or len(part) != 2:
            raise TypeError(
                f"{name}'s part {i} is {part!r}: allowed are pairs (pattern or "
                "predicate, optimizer)"
            )
        _check_select(name, part[0])
    optimizers = [check_pure(name, optimizer, "") for _, optimizer in parts]
    if rest is not None:
        optimizers.append(check_pure(name, rest, ""))
    return tuple(s for s, _ in parts), tuple(optimizers)


def masked(optimizer: PureOptimizer, select: Select) -> Partition:
    """Update only the selected leaves; all other leaves are returned unchanged.

    Leaves that are not selected have no optimizer state.

    Args:
        optimizer: The optimizer for the selected leaves.
        select: A pattern or a predicate: see `partition`.

    Raises:
        TypeError: select is neither a pattern nor a predicate.
        ValueError: No leaf is selected. `init` raises this error.

    >>> from optimi_func import sgd
    >>> opt = masked(sgd(lr=1.0), "head.*")
    >>> params = {"body": torch.ones(1), "head": {"weight": torch.ones(1)}}
    >>> opt.step(params, params, opt.init(params))[0]
    {'body': tensor([1.]), 'head': {'weight': tensor([0.])}}
    """
    _check_select("masked", select)
    return Partition((select,), (check_pure("masked", optimizer, ""),), True)


def _check_select(name: str, select: object) -> None:
    if not isinstance(select, str) and not callable(select):
        raise TypeError(
            f"{name} got {select!r} to select by: allowed are a pattern for the path, and "
            "a predicate (path, parameter) -> bool"
        )


def _selects(select: Select, path: str, p: Tensor) -> bool:
    if isinstance(select, str):
        return fnmatchcase(path, select)
    answer = select(path, p)
    if not isinstance(answer, bool):
        raise TypeError(
            f"{_called(select)} said {answer!r} of {path!r}: allowed are True and False, "
            "from the path and the parameter's shape and dtype"
        )
    return answer


def _called(select: Select) -> str:
    return repr(select) if isinstance(select, str) else getattr(select, "__name__", "it")


def _listed(paths: Sequence[str]) -> str:
    text = ", ".join(repr(path) for path in paths[:20])
    return text if len(paths) <= 20 else f"{text} and {len(paths) - 20} more"


def _part(
    i: int, places: list[int], leaves: Sequence[Tensor | None], spec: pytree.TreeSpec
) -> PyTree:
    part = [x if k == i else Elsewhere() for x, k in zip(leaves, places)]
    return pytree.tree_unflatten(part, spec)


def _merged(places: list[int], leaves: list[Tensor], parts: list[PyTree]) -> list[Tensor]:
    """Return the leaves, each from the tree of its part, if it has one."""
    queues = [iter(pytree.tree_leaves(without_none(part))) for part in parts]
    return [x if i < 0 else next(queues[i]) for x, i in zip(leaves, places)]
