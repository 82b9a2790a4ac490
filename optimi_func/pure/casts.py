"""The scalars of a pure step, cast for the arithmetic of its leaves."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.rule import Rates, Rule, Scalars
from optimi_func.core.torch_private import is_constant, is_unwatched


class Casts:
    """Scalars as the arithmetic of leaves takes them: in its dtype, on its device.

    Each is converted once for a dtype and device, unless a derivative may pass through it,
    which would then be summed in another order. If the step runs at once, Python numbers
    become 0-d tensors, because torch would make one of each in every operation.
    """

    def __init__(self, rule: Rule[Any, Any], at_once: bool) -> None:
        self._rule, self._at_once = rule, at_once
        self._made: dict[Any, Scalars] | None = {} if is_unwatched() else None

    def __call__(
        self, scalars: Scalars, dtype: torch.dtype, device: torch.device
    ) -> Scalars:
        """Return the scalars of a leaf."""
        made = self._made
        if made is None:
            return pytree.tree_map_only(Tensor, lambda x: _cast(x, dtype, device), scalars)
        key = id(scalars), dtype, device
        if key in made:
            return made[key]
        passed: list[Tensor] = []

        def convert(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if not is_constant(x):
                passed.append(x)
            return _cast(x, dtype, device)

        found = _each(convert, scalars)
        if not passed:
            found = made[key] = self._as_tensors(found, dtype) if self._at_once else found
        return found

    def _as_tensors(self, scalars: Scalars, dtype: torch.dtype) -> Scalars:
        r: Any = scalars.rates
        # The mean of a rule, and cautious decay, compute with these as Python numbers.
        kept = 2 if self._rule.means is not None or r.undecayed_lr else 0
        usual = zip(r[kept:4], (math.nan, 0.0, 0.0, 1.0)[kept:])
        rest = [None if type(x) is float and x == none else x for x, none in usual]

        def convert(x: Any) -> Any:
            return _number(x, dtype) if type(x) in (float, int) else x

        coeffs, rest = _each(convert, (scalars.coeffs, (*rest, *r[4:])))
        return scalars._replace(coeffs=coeffs, rates=Rates(*r[:kept], *rest))


@lru_cache(256)
def _number(x: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(x, dtype=dtype, device="cpu")


def _each(fn: Callable[[Any], Any], x: tuple[Any, ...]) -> Any:
    """Return nested tuples with fn of each item."""
    items = [_each(fn, y) if isinstance(y, tuple) else fn(y) for y in x]
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


def _cast(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert a tensor among the scalars to a leaf's device and dtype of arithmetic."""
    x = x.to(device, dtype)
    # The strided view makes Inductor store the scalar; without it, it would compute the
    # powers of betas again for every few elements of a parameter.
    return x.as_strided((), ()) if torch.compiler.is_compiling() else x
