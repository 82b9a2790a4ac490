"""The running numbers of a list of parameters: kept beside their step counts, and alike."""

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from optimi_func._rule import Scalar
from optimi_func.execution.list_kernel import Native, address
from optimi_func.execution.scalars import Numbers

_version = attrgetter("_version")


class RunningNumbers:
    """0-d tensors, of each name those of all parameters, and what the host knows of them.

    Args:
        tensors: Those of the first name, then of the next.
        count: How many parameters there are.
        on_host: Whether the host reads and computes them.
    """

    def __init__(self, tensors: list[Tensor], count: int, on_host: bool) -> None:
        self._count, self._on_host = count, on_host
        self._versions = list(map(_version, tensors))
        self._addresses = array("q", map(Tensor.data_ptr, tensors))
        self._expected = array("d", [x.item() for x in tensors] if on_host else ())
        once = len(set(self._addresses)) == len(tensors)
        # Whether C++ may read and write them.
        self.plain = on_host and once and {x.dtype for x in tensors} <= {torch.float64}

    def values(self, tensors: list[Tensor]) -> list[tuple[float, ...]]:
        """Of each parameter its numbers; of a device the host waits for them."""
        if self._on_host:
            found = list(self._expected)
        else:
            found = torch.stack(tensors).tolist() if tensors else []
        return self._rows(found)

    def _rows(self, x: Sequence[Any]) -> list[tuple[Any, ...]]:
        if not x:
            return [()] * self._count
        starts = range(0, len(x), self._count)
        return list(zip(*[x[i : i + self._count] for i in starts]))

    def now(self, tensors: list[Tensor], places: list[int]) -> list[tuple[Scalar, ...]]:
        """The numbers of the parameters at these places, on a device as tensors."""
        numbers = self._expected if self._on_host else tensors
        starts = range(0, len(numbers), self._count)
        return [tuple([numbers[i + place] for i in starts]) for place in places]

    def hold(self, tensors: list[Tensor], native: Native | None) -> bool:
        """Whether nobody else has written to them."""
        if native is not None:
            expected = address(self._expected)
            table = address(self._addresses)
            return bool(native.numbers_hold(table, expected, len(self._expected)))
        if self._on_host:
            return [x.item() for x in tensors] == list(self._expected)
        return list(map(_version, tensors)) == self._versions

    def set_all(self, native: Native, at: list[int], after: list[Any]) -> None:
        """Write what they are after a step, by one call.

        Args:
            native: The compiled functions.
            at: Of each parameter the place of its numbers.
            after: The numbers.
        """
        if self._expected:
            self._expected[:] = array("d", _columns(at, after))
            expected, table = address(self._expected), address(self._addresses)
            native.numbers_set(table, expected, len(self._expected))

    def set(
        self, tensors: list[Tensor], at: list[int], after: list[Any], numbers: Numbers
    ) -> None:
        """As `set_all`, by torch; where there is a flag, only if it is true."""
        if not tensors:
            return
        columns = _columns(at, after)
        if self._on_host:
            for x, new in zip(tensors, columns):
                x.fill_(new)
            self._expected[:] = array("d", [x.item() for x in tensors])
            return
        flags = [numbers.finite[i] for i in numbers.at] * (len(tensors) // self._count)
        news = [
            new if flag is None else torch.where(flag.to(old.device), new, old)
            for old, new, flag in zip(tensors, columns, flags)
        ]
        torch._foreach_copy_(tensors, news)
        self._versions = list(map(_version, tensors))


def _columns(at: list[int], after: list[Any]) -> list[Any]:
    """The numbers of all parameters: of the first name, then of the next."""
    return [x for column in zip(*after) for x in map(column.__getitem__, at)]
