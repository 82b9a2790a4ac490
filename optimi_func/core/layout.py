"""`Layout`: which matrices a parameter consists of, and how it stores them."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

# The number of equal parts of a matrix, or how many rows or columns each part has.
Parts: TypeAlias = int | tuple[int, ...]
GivenParts: TypeAlias = int | tuple[int, ...] | list[int]
# {"rows": 3, "repeats": 12} is written as a dict, which JSON and state dicts keep.
GivenSplit: TypeAlias = GivenParts | Mapping[str, GivenParts] | None


class Layout(NamedTuple):
    """The matrices that a tensor consists of: see the options split and transposed."""

    parts: Parts = 1
    columns: bool = False
    repeats: int = 1
    transposed: bool = False

    def matrices(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the matrices, or stacks of matrices, of a tensor.

        Equal parts are one stack, so that they are mapped in one call.
        """
        if self.transposed:
            x = x.transpose(0, 1) if x.dim() > 3 else x.mT
        x = x.flatten(1) if x.dim() > 3 else x
        if self.columns:
            return tuple([y.mT for y in self._parted(x.mT)])
        return self._parted(x)

    def joined(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """Return the tensor, shaped as `like`, that consists of these matrices."""
        x = self._whole([y.mT for y in parts] if self.columns else parts)
        x = x.mT if self.columns else x
        if not self.transposed:
            return x.reshape(like.shape)
        if like.dim() > 3:
            return x.reshape(like.transpose(0, 1).shape).transpose(0, 1)
        return x.mT.reshape(like.shape)

    def _parted(self, x: Tensor) -> tuple[Tensor, ...]:
        """Cut between rows. A part has rows of each of the repeats."""
        if self == Layout(columns=self.columns, transposed=self.transposed):
            return (x,)
        y = x if self.repeats == 1 else x.unflatten(-2, (self.repeats, -1))
        if isinstance(self.parts, tuple):
            parts = y.split(self.parts, -2)
        else:
            y = y.unflatten(-2, (self.parts, -1))
            parts = (y if self.repeats == 1 else y.transpose(-4, -3),)
        return parts if self.repeats == 1 else tuple([z.flatten(-3, -2) for z in parts])

    def _whole(self, parts: list[Tensor]) -> Tensor:
        """Join what `_parted` cuts."""
        if self == Layout(columns=self.columns, transposed=self.transposed):
            return parts[0]
        if self.repeats > 1:
            parts = [z.unflatten(-2, (self.repeats, -1)) for z in parts]
        if isinstance(self.parts, tuple):
            y = torch.cat(parts, -2)
        else:
            y = parts[0] if self.repeats == 1 else parts[0].transpose(-4, -3)
            y = y.flatten(-3, -2)
        return y if self.repeats == 1 else y.flatten(-3, -2)

    def refuses(self, rows: int, columns: int) -> str | None:
        """Return why a matrix cannot be cut so, or None if it can."""
        found, name = (columns, "columns") if self.columns else (rows, "rows")
        split: object = self.parts
        if self.columns or self.repeats > 1:
            split = {name: self.parts} | (
                {"repeats": self.repeats} if self.repeats > 1 else {}
            )
        if isinstance(self.parts, tuple):
            if (total := sum(self.parts) * self.repeats) != found:
                return f"split={split} adds up to {total}, not to its {found} {name}"
        elif found % (self.parts * self.repeats):
            return f"split={split} does not divide its {found} {name}"
        return None


def as_layout(split: GivenSplit, transposed: bool) -> Layout:
    """Return the layout that the checked options split and transposed describe."""
    if split is None:
        return Layout(transposed=transposed)
    given = dict(split) if isinstance(split, Mapping) else {"rows": split}
    repeats = given.pop("repeats", 1)
    (side, parts), *more = [*given.items()] or [("", 0)]
    sizes = parts if isinstance(parts, tuple | list) else (parts,)
    fits = side in ("rows", "columns") and not more and bool(sizes)
    if not fits or not all(type(y) is int and y > 0 for y in (repeats, *sizes)):
        raise ValueError(
            f"Invalid split: split={split!r}: allowed are a number of equal parts, a list "
            'of the rows of each, {"rows": either}, {"columns": either}, each with a '
            'number of "repeats" if the parts alternate, and None'
        )
    parts = parts if isinstance(parts, int) else tuple(parts)
    return Layout(parts, side == "columns", cast(int, repeats), transposed)


def sides(shape: torch.Size, transposed: bool) -> tuple[int, int]:
    """Return the rows and columns of the matrix, or of each, that a parameter is."""
    if len(shape) < 4:
        rows, columns = shape[-2:]
        return (columns, rows) if transposed else (rows, columns)
    rows = shape[1 if transposed else 0]
    return rows, shape.numel() // rows if rows else 0
