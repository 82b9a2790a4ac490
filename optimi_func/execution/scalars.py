"""The numbers of a step as kernels take them."""

from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func._leaf import microbatch_scalars
from optimi_func._rule import WHOLE_BATCH, Microbatch, Rule, Scalar, Scalars


class PackedScalars:
    """The numbers of one step, packed once a dtype and device for every kernel call."""

    def __init__(self, scalars: Scalars) -> None:
        self.scalars = scalars
        self._packed: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        leaves = _flatten(scalars)
        # A bool is a static choice, part of the kernel; the rest is data.
        self.statics: tuple[bool | None, ...] = (None,) * len(leaves)
        self._values, self.on_host = leaves, True
        kinds = set(map(type, leaves))
        if len(kinds) == 1 and float in kinds:
            return
        if bool in kinds:
            self.statics = tuple([x if isinstance(x, bool) else None for x in leaves])
            self._values = [x for x in leaves if not isinstance(x, bool)]
        # Whether all of them are numbers, and no tensors.
        self.on_host = not any([issubclass(kind, Tensor) for kind in kinds])

    def values(self, dtype: torch.dtype, device: torch.device) -> list[Scalar]:
        """The values: host numbers where all of them are, else 0-d tensors."""
        if self.on_host:
            return list(self._values)
        return list(self.packed(dtype, device).unbind())

    def host_array(self, dtype: torch.dtype) -> "array[float]":
        """All values in memory of the host's, each rounded once, where they are there."""
        return array("d" if dtype == torch.float64 else "f", self._values)

    def packed(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """All values as one 1-D tensor, each rounded once."""
        key = (dtype, device)
        if key not in self._packed:
            self._packed[key] = self._pack(dtype, device)
        return self._packed[key]

    def _pack(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.on_host:
            if not self._values:
                return torch.empty(0, dtype=dtype, device=device)
            # torch.tensor takes ten times as long to look at a list.
            values = torch.frombuffer(self.host_array(dtype), dtype=dtype)
            return values.to(device, non_blocking=True)
        tensors = [
            x.detach().to(device, dtype)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=dtype, device=device)
            for x in self._values
        ]
        return torch.stack(tensors)


class Numbers(NamedTuple):
    """The numbers of a step of several parameters; those that are equal are there once."""

    scalars: list[PackedScalars]
    at: list[int]  # of each parameter the place of its numbers
    finite: list[Tensor | None]  # to each of the numbers a flag: where false, no write

    @staticmethod
    def of(
        rule: Rule[Any, Any],
        scalars: list[Scalars],
        at: list[int],
        microbatches: list[Microbatch] | None,
        write: bool,
    ) -> "Numbers":
        """The numbers with what each gradient is to its step in them.

        Args:
            rule: The mathematics.
            scalars: Those of the whole step.
            at: Of each parameter the place of its own.
            microbatches: What each gradient is to its step; None: the whole of it.
            write: False moves the state alone.
        """
        if microbatches is None:
            if not write:
                scalars = [microbatch_scalars(rule, s, WHOLE_BATCH, write) for s in scalars]
            return Numbers([PackedScalars(s) for s in scalars], at, [None] * len(scalars))
        places: dict[Any, int] = {}
        numbers = Numbers([], [], [])
        for i, m in zip(at, microbatches):
            key = (i, m.grad_scale, m.accumulate, id(m.finite))
            if key not in places:
                places[key] = len(places)
                now = microbatch_scalars(rule, scalars[i], m, write)
                numbers.scalars.append(PackedScalars(now))
                numbers.finite.append(m.finite)
            numbers.at.append(places[key])
        return numbers


def with_finite(values: Tensor, finite: Tensor | None) -> Tensor:
    """The numbers, and whether anything is to be written."""
    if finite is None:
        return values
    return torch.cat([values, finite.reshape(1).to(values.dtype)])


def _flatten(x: Any) -> list[Any]:
    """As pytree's, of tuples within tuples alone: a step has no time for more."""
    found: list[Any] = []
    for y in x:
        if isinstance(y, tuple):
            found += _flatten(y)
        else:
            found.append(y)
    return found
