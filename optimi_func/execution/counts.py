"""Counts: the step counts of a plan's parameters, with the rule's running scalars.

Both are 0-d tensors in the state. Parameters for which all of them are equal share the
scalars of a step.
"""

import math
from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from optimi_func.core.packed import Packed, is_capturing
from optimi_func.core.rule import Scalar
from optimi_func.core.torch_private import foreach_add_
from optimi_func.execution.cpp import Native, address, loaded

_version = attrgetter("_version")


class Counts:
    """The values of the counts, and a check that nothing else has written to them.

    `given` are the tensors of a plan (see `ClassPlan.current`), in which the step counts
    are the first of the slices, and those of each running scalar another. If `on_host`, the
    host reads them. If `flagged`, a flag on the device may skip the step of a parameter.
    """

    def __init__(
        self, given: list[Tensor], slices: list[slice], on_host: bool, flagged: bool
    ) -> None:
        self._slices, self._on_host, self._flagged = slices, on_host, flagged
        self._rows = rows = len(given[slices[0]])
        tensors = self.tensors(given)
        self._expected = array("d", [0.0] * len(tensors) if on_host else ())
        self._addresses = array("q", map(Tensor.data_ptr, tensors))
        wide = [torch.float32] * rows + [torch.float64] * (len(tensors) - rows)
        plain = on_host and len(set(self._addresses)) == len(tensors)
        # C++ may read and write them, once it is compiled.
        self._plain = plain and [x.dtype for x in tensors] == wide
        self.native: Native | None = loaded() if self._plain else None
        self._tables = address(self._addresses), address(self._expected), rows, len(tensors)
        self.read(given)

    def of(self, given: list[Tensor]) -> "Counts":
        """Return the counts of another plan, whose list of tensors has the same order."""
        return Counts(given, self._slices, self._on_host, self._flagged)

    def read(self, given: list[Tensor]) -> None:
        """Read the counts, also again after something else has written to them."""
        rows, tensors = self._rows, self.tensors(given)
        values: list[float] = []
        if self._on_host:
            values = [x.item() for x in tensors]
            self._expected[:] = array("d", values)
        elif not (self._flagged or is_capturing(tensors[0].device)):
            # The host waits for the device once, here. Their dtypes differ.
            parts = [x for x in (tensors[:rows], tensors[rows:]) if x]
            values = [value for part in parts for value in torch.stack(part).tolist()]
        self.valid = all([0.0 <= x < math.inf for x in values[:rows]])
        keys: Sequence[object] = range(rows)
        if values:
            keys = list(zip(*[values[i : i + rows] for i in range(0, len(values), rows)]))
        # For each parameter, the index of its counts among the different ones.
        first = dict(reversed(list(zip(keys, range(rows)))))
        self._firsts = sorted(first.values())
        places = {keys[row]: i for i, row in enumerate(self._firsts)}
        self.at = [places[key] for key in keys]
        self._versions = [] if self._on_host else list(map(_version, tensors))

    def tensors(self, given: list[Tensor]) -> list[Tensor]:
        """Return the step counts, then the first running scalar of each, and so on."""
        return [x for column in self._slices for x in given[column]]

    def hold(self, given: list[Tensor]) -> bool:
        """Return True if nothing else has written to them."""
        if self.native is not None:
            return bool(self.native.counts_hold(*self._tables))
        if self._on_host:
            return [x.item() for x in self.tensors(given)] == list(self._expected)
        return self._flagged or list(map(_version, self.tensors(given))) == self._versions

    def now(self, given: list[Tensor]) -> list[tuple[Scalar, tuple[Scalar, ...]]]:
        """Return the different counts with their running scalars, numbers or tensors."""
        values: Sequence[Scalar] = self._expected if self._on_host else self.tensors(given)
        rows, end = self._rows, len(values)
        found: list[tuple[Scalar, tuple[Scalar, ...]]] = []
        for i in self._firsts:  # a comprehension would be one more call in each step
            found.append((values[i], tuple(values[i + rows : end : rows])))
        return found

    def advance(
        self,
        given: list[Tensor],
        after: Sequence[object],
        packed: list[Packed],
        at: list[int],
    ) -> None:
        """Count a step; parameters whose `finite` flag is false do not count it.

        Past autograd, if `hold` reads them in C++. `after` are the running scalars after
        the step, for the different ones.
        """
        news: list[Any] = []
        for column in zip(*after):
            news += map(column.__getitem__, self.at)
        if self.native is not None:
            if news:
                self._expected[self._rows :] = array("d", news)
            self.native.counts_advance(*self._tables)
            return
        tensors = self.tensors(given)
        steps, running = tensors[: self._rows], tensors[self._rows :]
        flags = [packed[i].finite for i in at]
        for i, (x, new) in enumerate(zip(running, news)):
            write_scalar(x, new, flags[i % self._rows])
        foreach_add_([step for step, flag in zip(steps, flags) if flag is None], 1.0)
        for step, flag in zip(steps, flags):
            if flag is not None:
                step.add_(flag)
        self._versions = list(map(_version, tensors))
        if self._on_host:
            self._expected[:] = array("d", [x.item() for x in tensors])
            self.native = loaded() if self._plain else None


def write_scalar(x: Tensor, new: Scalar, finite: Tensor | None) -> None:
    """Write a running scalar, unless the flag `finite` is false."""
    if finite is not None:
        new = torch.where(finite.to(x.device), new, x)
    x.copy_(new) if isinstance(new, Tensor) else x.fill_(new)
