"""Packing: the scalars of a step as kernels take them, in one tensor or array."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from optimi_func.core.checks import check_given
from optimi_func.core.codes import NEAREST, dither_at
from optimi_func.core.leaf import microbatch_scalars
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import WHOLE_BATCH, Microbatch, Named, Rule, Scalar, Scalars
from optimi_func.execution.tensors import foreach_add_, is_capturing
from optimi_func.pure.functional import FunctionalOptimizer

# Bytes: kernels expect their scalars to begin at a multiple of this.
ALIGNMENT = 16


class Packed:
    """Scalars of one step, packed once for each dtype and device.

    If `finite`, a 0-d bool, is false, the step changes nothing. None means true.
    """

    def __init__(self, scalars: Scalars, finite: Tensor | None = None) -> None:
        self.scalars, self.finite = scalars, finite
        self._made: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        coeffs, (*four, undecayed, cautious), dither = scalars
        # pytree's order, without its cost at every step.
        leaves: list[Any] = [*coeffs, *four, *undecayed, *cautious, dither]
        kinds = set(map(type, leaves))
        if kinds != _FLOAT:
            leaves = _flatten(leaves)
            kinds = set(map(type, leaves))
        # A bool is a static choice and part of the kernel, and so is "None", a number that
        # a map lacks. The others are its argument.
        self.statics: tuple[bool | str | None, ...] = (None,) * len(leaves)
        self._values, self.on_host = leaves, True
        if kinds == _FLOAT:
            return
        if not kinds.isdisjoint((bool, type(None))):
            values = [str(x) if x is None else x for x in leaves]
            self.statics = tuple([x if isinstance(x, bool | str) else None for x in values])
            self._values = [x for x in values if not isinstance(x, bool | str)]
        # True if all are Python numbers.
        self.on_host = not any([issubclass(kind, Tensor) for kind in kinds])

    def array(self, dtype: torch.dtype, unit: int = 1) -> "array[float]":
        """Return Python numbers in an array of whole units of bytes, each rounded once."""
        kind, size = ("d", 8) if dtype == torch.float64 else ("f", 4)
        numbers = array(kind, self._values)
        numbers.extend([0.0] * (-len(numbers) % (unit // size or 1)))
        return numbers

    def tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return them as a 1-D tensor, each rounded once."""
        key = (dtype, device)
        if key not in self._made:
            self._made[key] = self._pack(dtype, device)
        return self._made[key]

    def _pack(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.on_host:
            return _uploaded(self._values, dtype, device)
        # In float64, from which each is rounded once. Python numbers are one upload.
        wide = scalar_dtype(device)
        numbers = [x for x in self._values if not isinstance(x, Tensor)]
        host = iter(_uploaded(numbers, wide, device).split(1) if numbers else ())
        parts = [
            x.detach().to(device, wide).reshape(1) if isinstance(x, Tensor) else next(host)
            for x in self._values
        ]
        return torch.cat(parts).to(dtype)


_FLOAT = {float}


def pack(
    rule: Rule,
    scalars: list[Scalars],
    at: list[int],
    microbatches: list[Microbatch] | None,
    write: bool,
) -> tuple[list[Packed], list[int]]:
    """Pack the scalars of several parameters, equal ones once.

    `at` is the index in `scalars` for each parameter, and the second result the index among
    the packed ones. `microbatches` are what each gradient is to its step, or None if it is
    the whole of it. write=False moves the state alone.
    """
    if rule.given:
        check_given(rule, scalars[0].coeffs)
    if microbatches is None:
        if not write:
            scalars = [microbatch_scalars(rule, s, WHOLE_BATCH, write) for s in scalars]
        return list(map(Packed, scalars)), at
    places: dict[object, int] = {}
    packed: list[Packed] = []
    indices: list[int] = []
    for i, m in zip(at, microbatches):
        key = (i, m.grad_scale, m.accumulate, id(m.finite))
        if key not in places:
            places[key] = len(places)
            packed.append(Packed(microbatch_scalars(rule, scalars[i], m, write), m.finite))
        indices.append(places[key])
    return packed, indices


def scalars_after(
    bound: FunctionalOptimizer,
    counts: Sequence[tuple[Scalar, Sequence[Scalar]]],
    coded: bool,
) -> tuple[list[Scalars], list[Named]]:
    """Return the scalars of the next step, and the running scalars after it.

    There are as many as `counts`, which are pairs of steps taken and running scalars. coded
    is True if any state is in codes, so that the step needs a dither.
    """
    rule = bound.rule
    scalars: list[Scalars] = []
    after: list[Named] = []
    for count, running in counts:
        t = (count.double() if isinstance(count, Tensor) else count) + 1.0
        coeffs, new = bound.advance(t, rule.running(*running))
        scalars.append(Scalars(coeffs, bound.rates_now, dither_at(t) if coded else NEAREST))
        after.append(new)
    return scalars, after


def _uploaded(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy Python numbers to a device, each rounded once."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    if is_capturing(device):
        # A CUDA graph would copy from host memory that is gone when it is replayed. It
        # keeps what a launch is given by value.
        tensor = torch.zeros(len(values), dtype=dtype, device=device)
        foreach_add_(list(tensor.unbind()), list(values))
        return tensor
    # torch.tensor takes ten times as long to look at a list.
    packed = array("d" if dtype == torch.float64 else "f", values)
    host = torch.frombuffer(packed, dtype=dtype)
    return host.to(device, non_blocking=True)


def _flatten(x: Iterable[object]) -> list[object]:
    return [z for y in x for z in (_flatten(y) if isinstance(y, tuple) else (y,))]
