"""Tables in which every two values of different options meet in some row."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def pairwise(
    options: Mapping[str, Sequence[Any]], fits: Callable[[Row], bool]
) -> list[Row]:
    """Return rows that hold every pair of values that some row may hold.

    Args:
        options: The values of each option, the usual one first.
        fits: Returns whether the options of a row, which may be some of them, go together.
    """
    open_pairs = [
        {a: x, b: y}
        for a, b in combinations(options, 2)
        for x, y in product(options[a], options[b])
        if completed({a: x, b: y}, options, fits, [])
    ]
    rows: list[Row] = []
    while open_pairs:
        row = completed(open_pairs[0], options, fits, open_pairs)
        assert row is not None
        rows.append(row)
        open_pairs = [x for x in open_pairs if not holds(row, x)]
    return rows


def holds(row: Row, pair: Row) -> bool:
    return all(name in row and row[name] == x for name, x in pair.items())


def completed(
    row: Row,
    options: Mapping[str, Sequence[Any]],
    fits: Callable[[Row], bool],
    open_pairs: list[Row],
) -> Row | None:
    """Return a whole row with these values that holds many of the pairs, or None."""
    if not fits(row):
        return None
    name = next((x for x in options if x not in row), None)
    if name is None:
        return row

    def pairs_held(x: Any) -> int:
        more = {**row, name: x}
        return sum([name in pair and holds(more, pair) for pair in open_pairs])

    for x in sorted(options[name], key=pairs_held, reverse=True):
        if found := completed({**row, name: x}, options, fits, open_pairs):
            return found
    return None
