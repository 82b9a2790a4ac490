"""The numbers of a step as kernels take them."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func._leaf import microbatch_scalars
from optimi_func._math import scalar_dtype
from optimi_func._rule import WHOLE_BATCH, Microbatch, Rule, Scalar, Scalars
from optimi_func.execution.tensors import foreach_add_, is_capturing

# Bytes: where kernels expect their numbers to begin at a multiple of.
ALIGNMENT = 16


class PackedScalars:
    """The numbers of one step, packed once a dtype and device for every kernel call."""

    def __init__(self, scalars: Scalars) -> None:
        self.scalars = scalars
        self._packed: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._upload: tuple[_Upload, int] | None = None
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
        return _array(self._values, dtype)

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
            if self._upload is None or device.type == "cpu":
                return _uploaded(self._values, dtype, device)
            upload, place = self._upload
            return upload.part(place, dtype, device)
        # In float64, from which each is rounded once. Those of the host are one upload.
        wide = scalar_dtype(device)
        given = [x for x in self._values if not isinstance(x, Tensor)]
        host = iter(_uploaded(given, wide, device).split(1) if given else ())
        parts = [
            x.detach().to(device, wide).reshape(1) if isinstance(x, Tensor) else next(host)
            for x in self._values
        ]
        return torch.cat(parts).to(dtype)


class _Upload:
    """Host numbers of several PackedScalars, which go to a device in one copy."""

    def __init__(self, values: list[list[float]]) -> None:
        self._values = values
        self._made: dict[tuple[torch.dtype, torch.device], Sequence[Tensor]] = {}

    def part(self, place: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Those of one of them."""
        if (dtype, device) not in self._made:
            # Each begins where kernels expect it to.
            unit = ALIGNMENT // dtype.itemsize
            sizes = [-(-len(values) // unit) * unit for values in self._values]
            packed: list[float] = []
            for values, size in zip(self._values, sizes):
                packed += [*values, *[0.0] * (size - len(values))]
            self._made[dtype, device] = _uploaded(packed, dtype, device).split(sizes)
        return self._made[dtype, device][place][: len(self._values[place])]


def upload_together(scalars: list[PackedScalars]) -> None:
    """Let numbers that are on the host go to a device all at once, when any is needed."""
    some = [x for x in scalars if x.on_host and x._values]
    if len(some) > 1:
        upload = _Upload([x._values for x in some])
        for i, x in enumerate(some):
            x._upload = upload, i


def _uploaded(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host, each rounded once, on a device."""
    if is_capturing(device):
        # A graph would copy from memory that is gone by its replay. What a launch is given
        # by value it keeps.
        made = torch.zeros(len(values), dtype=dtype, device=device)
        foreach_add_(list(made.unbind()), list(values))
        return made
    # torch.tensor takes ten times as long to look at a list.
    return torch.frombuffer(_array(values, dtype), dtype=dtype).to(
        device, non_blocking=True
    )


def _array(values: Sequence[float], dtype: torch.dtype) -> "array[float]":
    return array("d" if dtype == torch.float64 else "f", values)


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
