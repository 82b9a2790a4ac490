"""What the transforms share: checked trees, states told apart, one tree or the other."""

from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func._checks import check_grad, check_number
from optimi_func._functional import Number
from optimi_func._leaf import compute_dtype
from optimi_func._rule import PureOptimizer, PyTree, Scalar
from optimi_func._tree import flatten_params, match_tree
from optimi_func.execution.kernels import with_own_code_object

S = TypeVar("S")


class Transform:
    """What every transform of an optimizer is made from: a dataclass with init and step.

    torch.compile counts recompilations by code object, and stops at 8. Every transform's
    `step` has one of its own, in place of one for all of its class, so that any number of
    different ones can be compiled in a process.
    """

    def __post_init__(self) -> None:
        """Give this object a step of its own; one made within a graph is traced into it."""
        if torch.compiler.is_compiling():
            return
        step = with_own_code_object(getattr(type(self), "step"), "step")  # noqa: B009
        self.__dict__["step"] = MethodType(step, self)

    def __getstate__(self) -> dict[str, Any]:
        """The fields: pickle and deepcopy make the step anew."""
        return {k: v for k, v in self.__dict__.items() if k != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields."""
        self.__dict__.update(state)
        Transform.__post_init__(self)


class Trees(NamedTuple):
    """Checked params and grads, flat."""

    spec: pytree.TreeSpec
    params: list[Tensor]
    grads: list[Tensor | None]

    @staticmethod
    def check(params: PyTree, grads: PyTree) -> "Trees":
        """Flatten both, refusing gradients that no step could use."""
        paths, tensors, spec = flatten_params(params)
        flat_grads = match_tree("grads", grads, spec, params)
        for path, p, g in zip(paths, tensors, flat_grads):
            check_grad(path, p, g)
        return Trees(spec, tensors, flat_grads)

    def wide_grads(self) -> list[Tensor | None]:
        """The gradients in the dtype of the arithmetic, where their steps take them too."""
        return [
            None if g is None else g.to(compute_dtype(p.dtype, g.dtype))
            for p, g in zip(self.params, self.grads)
        ]


def check_state(state: Any, kind: type[S], name: str) -> S:
    """Refuse another optimizer's state."""
    if not isinstance(state, kind):
        raise TypeError(
            f"state={type(state).__name__} is not the {kind.__name__} that {name} needs: "
            "make it with this optimizer's init"
        )
    return state


def inner_eval_params(optimizer: PureOptimizer, params: PyTree, state: Any) -> PyTree:
    """The parameters to evaluate at, by the optimizer that a transform is around.

    Raises:
        TypeError: It does not say.
    """
    found = getattr(optimizer, "eval_params", None)
    if not callable(found):
        raise TypeError(
            f"{optimizer!r} has no eval_params(params, state): allowed are optimizers of "
            "optimi_func, and transforms of them"
        )
    return found(params, state)


def check_positive(label: str, name: str, value: Number) -> None:
    """Refuse a host number that is not above 0."""
    check_number(label, name, value)
    if not isinstance(value, Tensor) and not callable(value) and not value > 0:
        raise ValueError(f"Invalid {label}: {name}={value}: allowed are numbers above 0")


def like(number: Scalar, x: Tensor) -> Scalar:
    """A number where x is, in its dtype: a wider 0-d tensor would widen a 0-d x."""
    return number.to(x.device, x.dtype) if isinstance(number, Tensor) else number


def tensor_of(number: Scalar, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-d tensor of its own."""
    if isinstance(number, Tensor):
        return number.to(device, dtype, copy=True)
    return torch.full((), number, dtype=dtype, device=device)


def count_from(params: PyTree) -> Tensor:
    """A count of 0, where and what the step of a `TreeState` is."""
    _, tensors, _ = flatten_params(params)
    return torch.zeros((), dtype=torch.float32, device=tensors[0].device)


def choose_tree(ok: Tensor, yes: PyTree, no: PyTree) -> PyTree:
    """`yes` where ok, a 0-d bool, is true, else `no`; what is in both stays itself."""

    def pick(y: Tensor, n: Tensor) -> Tensor:
        return n if y is n else torch.where(ok.to(y.device), y, n)

    return pytree.tree_map(pick, yes, no)
