"""Random trees of scalars and tensors, which a rule and plain float64 torch both evaluate.

A tree is a tuple of an operation's name and its arguments. Comparisons and roundings take
exact trees alone: those whose operations IEEE rounds in one way, so that all executors
are on the same side of a jump.
"""

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

Tree = tuple[Any, ...] | Callable[[Any], Any]


def long(x: Any) -> Any:
    """Cast to integers in a range where all casts agree."""
    return torch.nan_to_num(x, nan=0.0).clamp(-50, max=50).long()


# Operations by name: of floats that are exact, of others, on bools, on integers.
OPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "pos": operator.pos,
    "div": operator.truediv,
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "floor_divide": torch.floor_divide,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "abs": abs,
    "floor": torch.floor,
    "sign": torch.sign,
    "where": torch.where,
    "method_where": lambda c, x, y: x.where(c, y),
    "clamp": lambda x, y: x.clamp(min=y),
    "clamp_max": lambda x, y: torch.clamp(x, max=y),
    "between": lambda x, y: x.clamp(0.0, y),
    "pow": operator.pow,
    "torch_pow": torch.pow,
    "sqrt": torch.sqrt,
    "method_sqrt": lambda x: x.sqrt(),
    "root": lambda x: x**0.5,
    "small": lambda x: abs(x) ** 0.01,
    "inverse_root": lambda x: x**-0.5,
    "square": lambda x: x**2,
    "exp": lambda x: torch.exp(x.clamp_max(20.0)),
    "log": torch.log,
    "tanh": torch.tanh,
    "plus": lambda x, y, z: torch.add(x, y, alpha=z),
    "minus": lambda x, y, z: x.sub(y, alpha=z),
    "addcmul": lambda x, y, z: torch.addcmul(x, x, y, value=z),
    "addcdiv": lambda x, y, z: x.addcdiv(x, y, value=z),
    "lerp": torch.lerp,
    "gt": operator.gt,
    "le": operator.le,
    "eq": operator.eq,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "long": long,
    "to_long": lambda x: x.to(torch.int64),
}
# Plain torch takes no number that has a derivative there, or gives none.
DIFFERENTIATED: dict[str, Callable[..., Any]] = {
    "between": lambda x, y: x.clamp(min=0.0).clamp(max=y),
    "mod": lambda x, y: x - y * torch.div(x, y, rounding_mode="floor"),
    "plus": lambda x, y, z: x + z * y,
    "minus": lambda x, y, z: x - z * y,
    "addcmul": lambda x, y, z: x + z * x * y,
    "addcdiv": lambda x, y, z: x + z * x / y,
} | {
    name: lambda x, y: torch.div(x, y, rounding_mode="floor")
    for name in ("floordiv", "floor_divide")
}
_FLOAT2 = ["add", "sub", "mul", "mod", "floordiv", "floor_divide"]
_EXACT1 = ["neg", "pos", "abs", "floor", "sign"]
_CURVED1 = "sqrt method_sqrt root small inverse_root square exp log tanh".split()
_CURVED2 = ["div", "pow", "torch_pow"]
_NUMBERS = [0.0, 1.0, 2.0, 3.0, 0.5, -1.0, 0.75, 1, 2, 3, 0.1, 0.9999]


def _op(names: Sequence[str], *arguments: Any) -> Any:
    return st.tuples(st.sampled_from(names), *arguments)


def constants() -> Any:
    """Python numbers."""
    return st.tuples(st.just("c"), st.sampled_from(_NUMBERS))


def named(*names: str) -> Any:
    """Inputs by name."""
    return st.sampled_from([(x,) for x in names])


class Kind(NamedTuple):
    """Strategies for trees of scalars or of tensors, of one depth."""

    exact: Any
    curved: Any
    bools: Any
    ints: Any


def _deeper(one: Kind, other: Kind) -> Kind:
    """Trees with at least one part of the kind `one`, the rest of any."""
    e, c, b, i = one
    mixed = Kind(*[st.one_of(x, y) for x, y in zip(one, other)])
    number = st.one_of(mixed.exact, constants())
    any_float = st.one_of(mixed.curved, constants())
    exact = st.one_of(
        e,
        _op(_FLOAT2, e, number),
        _op(_FLOAT2, number, e),
        _op(_EXACT1, e),
        _op(["minimum", "maximum"], e, e),
        _op(["where", "method_where"], mixed.bools, e, number),
        _op(["where"], b, number, number),
        _op(["clamp", "clamp_max", "between"], e, number),
        _op(["mul"], b, number),
        _op(["add", "mul"], i, mixed.exact),
    )
    curved = st.one_of(
        exact,
        c,
        _op(["add", "sub", "mul", *_CURVED2], c, any_float),
        _op(["add", "sub", "mul", *_CURVED2], any_float, c),
        _op(_CURVED1, c),
        _op(["where"], mixed.bools, c, any_float),
        _op(["plus", "minus", "addcmul", "addcdiv", "lerp"], c, c, other.curved),
        _op(["clamp", "clamp_max", "between"], c, other.curved),
        _op(["div"], number, i),
        _op(["sqrt", "tanh"], i),
    )
    bools = st.one_of(
        _op(["gt", "le", "eq"], e, number),
        _op(["gt", "le", "eq"], i, number),
        _op(["and", "or", "xor", "add", "mul"], b, mixed.bools),
        _op(["and", "or", "xor", "add", "mul"], mixed.bools, b),
        _op(["not"], b),
    )
    small = st.tuples(st.just("c"), st.sampled_from([1, 2, 3]))
    whole = st.one_of(mixed.ints, small)
    ints = st.one_of(
        _op(["long"], e),
        _op(["to_long"], b),
        _op(["add", "sub", "mul"], i, whole),
        _op(["mod", "floordiv"], i, small),
        _op(["where"], b, whole, whole),
        _op(["mul"], b, whole),
        _op(["pow"], i, st.just(("c", 2))),
    )
    return Kind(exact, curved, bools, ints)


def _kinds() -> tuple[Kind, Kind]:
    s, x = named("t", "a", "b"), named("g", "s", "x")
    scalars, tensors = (
        Kind(y, y, _op(["gt", "le", "eq"], y, constants()), _op(["long"], y))
        for y in (s, x)
    )
    for _ in range(3):
        tensors = _deeper(tensors, scalars)
        scalars = _deeper(scalars, scalars)
    return scalars, tensors


TREES = _op(["add", "mul"], _kinds()[1].curved, _kinds()[0].curved)
"""Trees of tensors with a part of scalars."""


def evaluate(
    tree: Tree,
    inputs: dict[str, Any],
    noise: Callable[[], float] | None = None,
    traced: bool = False,
) -> Any:
    """Return the value of a tree; `noise` disturbs what is not exact, relatively.

    With `traced`, the inputs are those of a trace, which knows no derivatives.
    """
    if callable(tree):
        return tree(SimpleNamespace(**inputs))
    name, *parts = tree
    if name == "c":
        return parts[0]
    if name in inputs:
        return inputs[name]
    values = [evaluate(x, inputs, noise, traced) for x in parts]
    tensors = [x for x in values if isinstance(x, Tensor) and not traced]
    differentiated = any([x.requires_grad for x in tensors])
    found = (OPS | DIFFERENTIATED if differentiated else OPS)[name](*values)
    if noise is None or name not in _NOISY or not found.is_floating_point():
        return found
    # A sum is as far off as the larger of its parts.
    return found * (1 + noise()) + (noise() * values[0] if name in _SUMS else 0.0)


_SUMS = {"plus", "minus", "addcmul", "addcdiv", "lerp"}
_NOISY = {*_CURVED1, *_CURVED2, *_SUMS}


def written(tree: Tree) -> str:
    """Return a tree as it is written with functions."""
    if callable(tree):
        return repr(tree)
    name, *parts = tree
    if name == "c":
        return repr(parts[0])
    return f"{name}({', '.join(map(written, parts))})" if parts else name


def is_defined(tree: Tree) -> bool:
    """Return True if torch computes the tree, at the steps that are tried."""
    for t in (1.0, 2.0, 3.0):
        given: dict[str, Any] = {x: torch.tensor(t) for x in "tab"}
        given |= {x: torch.tensor([t, 0.0]) for x in "gsx"}
        try:
            found = evaluate(tree, given)
        except (RuntimeError, TypeError, AttributeError, ZeroDivisionError):
            return False
        if not (isinstance(found, Tensor) and found.is_floating_point()):
            return False
    return True
