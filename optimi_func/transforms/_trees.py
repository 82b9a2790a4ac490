"""Helpers of the transforms: base classes, checked trees, checks of states."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_grad
from optimi_func.core.leaf import held_dtype
from optimi_func.core.rule import InitOptions, PureOptimizer, PyTree, Scalar
from optimi_func.core.tree import flatten_params, match_tree, path_of, step_of, without_none
from optimi_func.execution.kernels import with_own_code_object
from optimi_func.pure.functional import FunctionalOptimizer

S = TypeVar("S")


class Transform:
    """Base class of all transforms, which are dataclasses with `init` and `step`.

    torch.compile stops after 8 recompilations of one code object. So the `step` of every
    instance has a code object of its own, and a process can compile any number of them.
    """

    keeps_structure: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Give this instance its own `step`, unless it is made within a graph."""
        if torch.compiler.is_compiling():
            return
        step = with_own_code_object(getattr(type(self), "step"), "step")  # noqa: B009
        self.__dict__["step"] = MethodType(step, self)

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without `step`, which pickle and deepcopy make again."""
        return {k: v for k, v in self.__dict__.items() if k != "step"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore the fields."""
        self.__dict__.update(state)
        Transform.__post_init__(self)


@dataclass(frozen=True, eq=False)
class Around(Transform, Generic[S]):
    """Base class of transforms of one `optimizer`, whose state is `inner` in their own.

    A subclass names its state, a NamedTuple with the field `inner`, and the function that
    users call.
    """

    state: ClassVar[type[Any]]
    name: ClassVar[str]

    optimizer: Any  # a PureOptimizer

    def __init_subclass__(cls, state: type[S], name: str) -> None:
        """Take both."""
        super().__init_subclass__()
        cls.state, cls.name = state, name

    def init(self, params: PyTree, **options: Unpack[InitOptions]) -> S:
        """Return fresh state: see `FunctionalOptimizer.init`."""
        return self._around(params, self.optimizer.init(params, **options))

    def _around(self, params: PyTree, inner: PyTree) -> S:
        """Return fresh state, given the optimizer's."""
        raise NotImplementedError

    def eval_params(self, params: PyTree, state: S) -> PyTree:
        """Return the optimizer's parameters: see `FunctionalOptimizer.eval_params`."""
        return inner_eval_params(self.optimizer, params, self.checked(state).inner)

    def _step(self, *given: PyTree, **extras: PyTree) -> tuple[PyTree, PyTree]:
        """Return the optimizer's step, and raise if it changes a structure."""
        return step_of(self.name, self.optimizer, *given, **extras)

    def checked(self, state: PyTree) -> Any:
        """Raise if a state is another optimizer's, else return it."""
        return check_state(state, self.state, self.name)


def extras_of(optimizer: object) -> set[str] | None:
    """Return the names of the extras that a step takes, or None if nobody knows."""
    if isinstance(optimizer, FunctionalOptimizer):
        return {*optimizer.rule.extras}
    parts = getattr(optimizer, "optimizers", None) or (getattr(optimizer, "optimizer", ()),)
    if not isinstance(optimizer, Transform) or () in parts:
        return None
    names = {x for part in getattr(optimizer, "transforms", ()) for x in part.takes}
    for extras in map(extras_of, parts):
        if extras is None:
            return None
        names |= extras
    return names


class Trees(NamedTuple):
    """Checked params and grads, flat."""

    spec: pytree.TreeSpec
    params: list[Tensor]
    grads: list[Tensor | None]

    @staticmethod
    def check(params: PyTree, grads: PyTree) -> "Trees":
        """Flatten both; raise if a gradient does not fit its parameter."""
        tensors, spec = flatten_params(params)
        flat_grads = match_tree("grads", grads, spec, params)
        for i, (p, g) in enumerate(zip(tensors, flat_grads)):
            check_grad(path_of(params, i), p, g)
        return Trees(spec, tensors, flat_grads)

    def wide_grads(self) -> list[Tensor | None]:
        """Return the gradients in the dtype of the arithmetic of their steps."""
        return [
            None if g is None else g.to(held_dtype(p.dtype, g.dtype)).resolve_conj()
            for p, g in zip(self.params, self.grads)
        ]


def dotted_paths(params: PyTree) -> list[str]:
    """Return the keys of each leaf, joined by dots."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace torch's key paths
        return [".".join(path) for path in _traced_paths(params)]
    keyed, _ = pytree.tree_flatten_with_path(without_none(params))
    return [".".join(keys_of(path)) for path, _ in keyed]


def keys_of(path: Iterable[object]) -> list[str]:
    """Return the keys of a leaf, given its path in a tree."""
    names = ("key", "idx", "name")
    return [str(next((getattr(x, k) for k in names if hasattr(x, k)), x)) for x in path]


_NODES = (dict, list, tuple)


def _traced_paths(tree: PyTree) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, Tensor):
        yield ()
    elif tree is not None:
        if not isinstance(tree, _NODES):
            raise RuntimeError(f"a graph cannot see paths in a {type(tree).__name__}")
        # Dynamo cannot ask an OrderedDict for an attribute that it may not have.
        keys = () if isinstance(tree, dict) else getattr(tree, "_fields", range(len(tree)))
        for key, x in tree.items() if isinstance(tree, dict) else zip(keys, tree):
            for path in _traced_paths(x):
                yield (str(key), *path)


def check_state(state: PyTree, kind: type[S], name: str) -> S:
    """Raise if a state is not of this kind, else return it."""
    if not isinstance(state, kind):
        raise TypeError(
            f"state={type(state).__name__} is not the {kind.__name__} that {name} needs: "
            "make it with this optimizer's init"
        )
    return state


def inner_eval_params(optimizer: PureOptimizer, params: PyTree, state: PyTree) -> PyTree:
    """Return `optimizer.eval_params(params, state)`; raise if it has no such method."""
    method = getattr(optimizer, "eval_params", None)
    if not callable(method):
        raise TypeError(
            f"{optimizer!r} has no eval_params(params, state): evaluate at its params, or "
            "give it this method, which optimizers of optimi_func and transforms have"
        )
    return method(params, state)


def like(number: Scalar, x: Tensor) -> Scalar:
    """Convert to x's device and dtype, because a wider 0-d tensor would widen a 0-d x."""
    return number.to(x.device, x.dtype) if isinstance(number, Tensor) else number


def count_from(params: PyTree) -> Tensor:
    """Return a count of 0 with the device and dtype of the `step` of a `TreeState`."""
    tensors, _ = flatten_params(params)
    return torch.zeros((), dtype=torch.float32, device=tensors[0].device)
