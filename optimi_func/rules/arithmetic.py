"""Arithmetic of rules, which means the same for numbers, 0-d tensors and tensors.

The first half is what a trace writes into generated functions in place of functions of
torch that refuse numbers, or whose derivatives are infinite. The second half is for the
methods of a rule.
"""

import operator
from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from optimi_func.core import math
from optimi_func.core.rule import Scalar

_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64}


def is_scalar(x: object) -> bool:
    """Return True for a number and for a 0-d tensor."""
    return x.dim() == 0 if isinstance(x, Tensor) else isinstance(x, Real)


def as_scalar(x: Scalar) -> Scalar:
    """Return a number or a 0-d tensor in double precision, and a float for a bool.

    A bool among the coefficients would be a constant of the kernel.
    """
    if not isinstance(x, Tensor):
        return float(x)
    return x if x.dtype == torch.float64 else x.to(math.scalar_dtype(x.device))


def as_choice(x: Scalar) -> Scalar:
    """Return a bool, for which a kernel of its own is compiled, or a 0-d tensor."""
    return as_scalar(x) if isinstance(x, Tensor) else bool(x)


def as_tensor(x: Scalar, like: Tensor) -> Tensor:
    """Return a number as a 0-d tensor, in the dtype of `like` if it is a float."""
    if isinstance(x, Tensor):
        return x.to(like.dtype) if x.is_floating_point() else x
    dtype = _DTYPES.get(type(x), like.dtype)
    return torch.full((), x, dtype=dtype, device=like.device)


def restored(x: Scalar, kind: type) -> Scalar:
    """Return the bool or the integer that a coefficient, which is a float, stands for."""
    if kind is bool:
        return x != 0.0
    return x.to(torch.int64) if isinstance(x, Tensor) else int(x)


@cache
def in_double(fn: Callable[..., Any]) -> Callable[..., Scalar]:
    """Return a function of tensors for numbers too, in double precision."""

    def scalar(*args: object, **kwargs: object) -> Scalar:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        wide = math.scalar_dtype(device)
        arguments = [
            x
            if not isinstance(x, int | float)
            else torch.tensor(x, dtype=_DTYPES.get(type(x), wide), device=device)
            for x in args
        ]
        result = fn(*arguments, **kwargs)
        if result.is_floating_point() and result.dtype != wide:
            arguments = [x.to(wide) if isinstance(x, Tensor) else x for x in arguments]
            result = fn(*arguments, **kwargs).to(wide)
        return result if tensors else result.item()

    scalar.__name__ = scalar.__qualname__ = f"scalar_{fn.__name__}"
    return scalar


def _of_numbers(
    fn: Callable[[float, float], complex], of_tensors: Callable[..., Scalar]
) -> Callable[[Scalar, Scalar], Scalar]:
    """Return a function that calls fn for two numbers, and of_tensors otherwise.

    If fn raises an error, the result is that of of_tensors in double precision.
    """
    double = in_double(of_tensors)

    def both(x: Scalar, y: Scalar) -> Scalar:
        if not (isinstance(x, float | int) and isinstance(y, float | int)):
            return of_tensors(x, y)
        try:
            result = fn(x, y)
        except (OverflowError, ZeroDivisionError):
            result = 0j
        return double(x, y) if isinstance(result, complex) else result

    both.__name__ = both.__qualname__ = of_tensors.__name__
    return both


def floor_quotient(x: Scalar, y: Scalar) -> Tensor:
    """Return x // y, which has a derivative, unlike the operator of torch."""
    return torch.div(x, y, rounding_mode="floor")  # pyright: ignore[reportArgumentType]


def remainder(x: Scalar, y: Scalar) -> Scalar:
    """Return x % y, which has a derivative if x is a number, too."""
    if isinstance(x, int | float) and isinstance(y, Tensor):
        x = torch.full_like(y, x, dtype=torch.result_type(x, y))
    return x % y


def square_root(x: Scalar) -> Scalar:
    """Return sqrt(x), with the derivative 0 at 0."""
    if isinstance(x, int | float):
        return math.sqrt(x) if x >= 0 else float("nan")
    if not math.may_be_differentiated(x):
        return x.sqrt()
    zero = x == 0
    return torch.where(zero, x.detach(), torch.where(zero, 1, x).sqrt())


quotient_of_scalars = _of_numbers(operator.truediv, operator.truediv)
power_of_scalars = _of_numbers(operator.pow, math.power)
remainder_of_scalars = _of_numbers(operator.mod, remainder)
floor_quotient_of_scalars = _of_numbers(operator.floordiv, floor_quotient)


@overload
def where(condition: bool | Tensor, yes: Tensor, no: Tensor) -> Tensor: ...
@overload
def where(condition: Tensor, yes: Scalar, no: Scalar) -> Tensor: ...
@overload
def where(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar: ...
def where(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar:
    """Return `torch.where(condition, yes, no)`; the condition may also be a Python bool."""
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


@overload
def maximum(x: Tensor, y: Scalar) -> Tensor: ...
@overload
def maximum(x: Scalar, y: Tensor) -> Tensor: ...
@overload
def maximum(x: float, y: float) -> float: ...
def maximum(x: Scalar, y: Scalar) -> Scalar:
    """Return the larger of two scalars, or the elementwise maximum of tensors."""
    return _either(max, torch.maximum, "clamp_min", x, y)


@overload
def minimum(x: Tensor, y: Scalar) -> Tensor: ...
@overload
def minimum(x: Scalar, y: Tensor) -> Tensor: ...
@overload
def minimum(x: float, y: float) -> float: ...
def minimum(x: Scalar, y: Scalar) -> Scalar:
    """Return the smaller of two scalars, or the elementwise minimum of tensors."""
    return _either(min, torch.minimum, "clamp_max", x, y)


def _either(of_numbers: Any, of_tensors: Any, clamp: str, x: Any, y: Any) -> Any:
    if isinstance(x, int | float):
        x, y = y, x
    if isinstance(x, int | float):
        return of_numbers(x, y)
    # torch's function takes no number.
    return getattr(x, clamp)(y) if isinstance(y, int | float) else of_tensors(x, y)


def rounded(x: Scalar, like: Tensor | None = None) -> Scalar:
    """Return a scalar, rounded to the dtype of the tensors in the step.

    Expressions that contain only scalars are computed in double precision before the step.
    Operations on the result of `rounded` are computed together with the tensors instead,
    and rounded to their dtype. In `whole`, pass a tensor as `like`, if you combine the
    scalar with a scalar that is computed from tensors, such as a norm.
    """
    if like is not None:
        return x.to(like.dtype) if isinstance(x, Tensor) else x
    return _traced(math.rounded, x) if not isinstance(x, int | float) else x


@overload
def root(v: Tensor) -> Tensor: ...
@overload
def root(v: Scalar) -> Scalar: ...
def root(v: Scalar) -> Scalar:
    """Return the elementwise square root of v, with a finite derivative at 0."""
    return math.sqrt(v) if isinstance(v, int | float) else _traced(math.root, v)


def is_zero(v: Tensor) -> Tensor:
    """Return, for each element of v, whether `root` treats the element as 0."""
    return _traced(math.is_zero, v)


def _traced(fn: Callable[..., Any], x: Any) -> Any:
    """Return fn(x), which is one call in a trace, and not the calls that fn makes."""
    return handle_torch_function(fn, (x,), x) if has_torch_function_unary(x) else fn(x)
