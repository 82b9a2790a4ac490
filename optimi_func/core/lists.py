"""Parts of lists: items of one kind, and runs of items of a size."""

from collections.abc import Callable, Iterable, Iterator
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
