"""Functions that the methods of a rule take scalars and tensors to alike."""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from optimi_func.core import math
from optimi_func.core.rule import Scalar
from optimi_func.rules.lifting import Traced


@overload
def where(condition: bool | Tensor, yes: Tensor, no: Tensor) -> Tensor: ...
@overload
def where(condition: Tensor, yes: Scalar, no: Scalar) -> Tensor: ...
@overload
def where(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar: ...
def where(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar:
    """Return torch.where, also for a condition that is a bool."""
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


def rounded(x: Scalar, like: Tensor | None = None) -> Scalar:
    """Return a scalar as tensors take it, rounded to their dtype.

    Scalar work is done in double precision, before the step. What is done with the result
    of `rounded` is done with the tensors, and rounded as they are. `whole` gives it a
    tensor, where a scalar meets another that is computed of tensors, as a norm.
    """
    if like is not None:
        return x.to(like.dtype) if isinstance(x, Tensor) else x
    return _traced(math.rounded, x) if isinstance(x, Traced) else x


@overload
def root(v: Tensor) -> Tensor: ...
@overload
def root(v: Scalar) -> Scalar: ...
def root(v: Scalar) -> Scalar:
    """Return sqrt(v), elementwise, with a finite derivative at 0."""
    if isinstance(v, Traced):
        return _traced(math.root, v)
    return math.root(v) if isinstance(v, Tensor) else math.sqrt(v)


def is_zero(v: Tensor) -> Tensor:
    """Return True where a square or a mean of squares is 0 to `root`, elementwise."""
    return _traced(math.is_zero, v) if isinstance(v, Traced) else math.is_zero(v)


def _traced(fn: Callable[..., object], x: Any) -> Any:
    """Return the stand-in of fn's result, given that of its argument."""
    return x.tracer.create_proxy("call_function", fn, (x,), {})
