"""Parts of lists: items of one kind, runs of items of a size, and columns of a table."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def grouped(items: Iterable[T], kind: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each kind, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return groups


def chunks(items: list[T], size: int, numel: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield runs of items with at most `size` elements in all, or of one larger item."""
    chunk: list[T] = []
    total = 0
    for item in items:
        if chunk and total + numel(item) > size:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += numel(item)
    yield chunk


def table(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> str:
    """Return rows of cells as lines; the columns in `left` are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines: list[str] = []
    for row in rows:
        cells = enumerate(zip(row, widths))
        padded = [x.ljust(n) if i in left else x.rjust(n) for i, (x, n) in cells]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
