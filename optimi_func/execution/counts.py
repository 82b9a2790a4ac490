"""Step counts and running numbers of a list of parameters: 0-d tensors in their state.

Parameters in which all of these are equal share the numbers of a step.
"""

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from optimi_func._rule import Scalar
from optimi_func.execution.cpp import Native, address, loaded
from optimi_func.execution.scalars import Numbers
from optimi_func.execution.tensors import foreach_add_, is_capturing

_version = attrgetter("_version")


class Counts:
    """What they are, as far as the host knows, and whether anybody else has written to them.

    Args:
        tensors: The step counts, then the first running number of all parameters, and so on.
        rows: How many parameters there are.
        on_host: Whether the host reads and computes them.
        apart: Each parameter's go their own way, because flags on a device decide it.
    """

    def __init__(
        self, tensors: list[Tensor], rows: int, on_host: bool, apart: bool
    ) -> None:
        self._rows, self._on_host, self._apart = rows, on_host, apart
        found: list[float] = []
        if on_host:
            found = [x.item() for x in tensors]
        elif not (apart or is_capturing(tensors[0].device)):
            # The host waits for the device once, here.
            found = torch.stack([x.double() for x in tensors]).tolist()
        keys: Sequence[Any] = range(rows)
        if found:
            keys = list(zip(*[found[i : i + rows] for i in range(0, len(found), rows)]))
        # Of each parameter the place of its numbers among those that differ.
        places = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        self.at = [places[key] for key in keys]
        self._firsts = [self.at.index(i) for i in range(len(places))]
        self._expected = array("d", found if on_host else ())
        self._versions = list(map(_version, tensors))
        self._addresses = array("q", map(Tensor.data_ptr, tensors))
        wide = [torch.float32] * rows + [torch.float64] * (len(tensors) - rows)
        plain = on_host and len(set(self._addresses)) == len(tensors)
        # Whether C++ may read and write them, all in one call, once it is compiled.
        self._plain = plain and [x.dtype for x in tensors] == wide
        self._native: Native | None = None
        self._tables = address(self._addresses), address(self._expected), rows, len(tensors)

    @property
    def native(self) -> bool:
        """Whether no operation of torch's reads or writes them."""
        return self._native is not None

    def hold(self, tensors: list[Tensor]) -> bool:
        """Whether nobody else has written to them."""
        if self._native is not None:
            return bool(self._native.counts_hold(*self._tables))
        if self._on_host:
            return [x.item() for x in tensors] == list(self._expected)
        return self._apart or list(map(_version, tensors)) == self._versions

    def now(self, tensors: list[Tensor]) -> list[tuple[Scalar, tuple[Scalar, ...]]]:
        """Those that differ, count and running numbers: on the host, else tensors."""
        numbers: Sequence[Any] = self._expected if self._on_host else tensors
        rows, end = self._rows, len(numbers)
        return [(numbers[i], tuple(numbers[i + rows : end : rows])) for i in self._firsts]

    def advance(self, tensors: list[Tensor], after: list[Any], numbers: Numbers) -> None:
        """Count one step more; where there is a flag, only if it is true.

        Args:
            tensors: As the constructor's.
            after: Of those that differ the running numbers after the step.
            numbers: Of the step.
        """
        news = [x for column in zip(*after) for x in map(column.__getitem__, self.at)]
        if self._native is not None:
            if news:
                self._expected[self._rows :] = array("d", news)
            self._native.counts_advance(*self._tables)
            return
        steps, running = tensors[: self._rows], tensors[self._rows :]
        flags = [numbers.finite[i] for i in numbers.at]
        for i, (x, new) in enumerate(zip(running, news)):
            flag = flags[i % self._rows]
            if flag is not None:
                new = torch.where(flag.to(x.device), new, x)
            x.copy_(new) if isinstance(new, Tensor) else x.fill_(new)
        foreach_add_([step for step, flag in zip(steps, flags) if flag is None], 1.0)
        for step, flag in zip(steps, flags):
            if flag is not None:
                step.add_(flag)
        self._versions = list(map(_version, tensors))
        if self._on_host:
            self._expected[:] = array("d", [x.item() for x in tensors])
            self._native = loaded() if self._plain else None
