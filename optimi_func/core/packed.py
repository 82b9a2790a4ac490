"""Packing: the scalars of a step as operations take them, in one tensor or array."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.hooks import Reduction
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import Scalars
from optimi_func.core.torch_private import foreach_add_

# Bytes: kernels expect their scalars to begin at a multiple of this.
ALIGNMENT = 16


class Packed:
    """Scalars of one step, packed once for each dtype and device.

    If `finite`, a 0-d bool, is false, the step changes nothing. None means true.
    """

    def __init__(self, scalars: Scalars, finite: Tensor | None = None) -> None:
        self.scalars, self.finite = scalars, finite
        self._folded: Packed | None = None
        self._made: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        coeffs, r, dither = scalars
        four = r.lr, r.decay, r.l2, r.grad_scale
        # pytree's order, without its cost at every step.
        leaves: list[Any] = [*coeffs, *four, *r.undecayed_lr, *r.hooks, dither]
        kinds = set(map(type, leaves))
        if kinds != _FLOAT:
            leaves = flatten(leaves)
            kinds = set(map(type, leaves))
        # A bool is a static choice and part of the kernel, and so is "None", a number that
        # a map lacks, and the key of a hook. The others are its argument.
        self.statics: tuple[bool | str | None, ...] = (None,) * len(leaves)
        self._values, self.on_host = leaves, True
        if kinds == _FLOAT:
            return
        if not kinds.isdisjoint((bool, type(None), str)):
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

    def values(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Return them as 0-d tensors, which operations take faster than numbers."""
        return self.tensor(dtype, device).unbind()

    def filled(self, dtype: torch.dtype, device: torch.device) -> Scalars:
        """Return the scalars with `values` for numbers."""
        spec = pytree.tree_structure(self.scalars)
        return fill(self.statics, spec, self.values(dtype, device))

    @property
    def mixes(self) -> bool:
        """True if a step computes with lr and decay alone, on the host."""
        return bool(self.scalars.rates.undecayed_lr)

    @property
    def constant(self) -> bool:
        """True if no derivative passes through a number."""
        tensors = [] if self.on_host else [x for x in self._values if isinstance(x, Tensor)]
        return not any([x.requires_grad for x in tensors])

    @property
    def folded(self) -> "Packed":
        """The numbers with None for a decay of 0 and a factor of 1, to save operations."""
        if self._folded is None:
            r = self.scalars.rates
            usual: dict[str, float] = {"l2": 0.0, "grad_scale": 1.0}
            usual |= {} if self.mixes else {"decay": 0.0}
            rest: Any = {
                name: None
                for name, x in usual.items()
                if type(getattr(r, name)) is float and getattr(r, name) == x
            }
            scalars = self.scalars._replace(rates=r._replace(**rest))
            self._folded = Packed(scalars, self.finite) if rest else self
        return self._folded

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


def fill(
    statics: tuple[bool | str | None, ...], spec: pytree.TreeSpec, values: Iterable[Tensor]
) -> Scalars:
    """Return scalars from their static choices and the next values for the others."""
    rest = iter(values)
    leaves = [next(rest) if s is None else None if s == "None" else s for s in statics]
    return pytree.tree_unflatten(leaves, spec)


def is_capturing(device: torch.device) -> bool:
    """Return True if launches of this thread are captured in a CUDA graph."""
    built = device.type == "cuda" and torch.backends.cuda.is_built()
    return built and torch.cuda.is_current_stream_capturing()


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


def flatten(x: Iterable[object]) -> list[object]:
    """Return the items of nested tuples, but not what a hook's means are taken over."""
    kept = [y for y in x if not isinstance(y, Reduction)]
    return [z for y in kept for z in (flatten(y) if isinstance(y, tuple) else (y,))]
