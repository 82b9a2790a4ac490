"""Which target runs a test: `make test`, `make test-full`, `make soak` or `make nightly`.

A test or a row without a mark is in `make test`. `full` are those that take seconds: a
kernel of their own, processes, wide tables. `soak` are rows of wide tables, of which the
gate runs a few, always the same ones, and each night many, always others. `night` are
those that take minutes, or ask what few changes can break: only the night runs them.
"""

import ast
import re
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import seeds

LATER = ("full", "soak", "night")
# The expression given to -m, and the option --rows: how many rows of soak each test has, or
# None for all. Both are set by conftest.py before any test file is imported.
selected = ""
rows: int | None = None


def is_later(item: Any) -> bool:
    """Return whether a test is left out of `make test`."""
    return any(item.get_closest_marker(name) for name in LATER)


# What is costly to make and is made once a worker, by what a file that uses it says.
SHARED = {"kernels": r"mark\.kernels|\"kernels\"", "worlds": r"^@world\(\d"}


@cache
def shared_by(path: Path) -> str:
    """Return what tests of a file share with those of other files in `make test`, or ""."""
    if "not full" not in selected:
        return ""
    text = path.read_text()
    return next((name for name, x in SHARED.items() if re.search(x, text, re.M)), "")


def row(*values: Any, id: str, tier: str = "") -> Any:
    """Return a row of a table, for the tier that is named; "" is `make test`."""
    return pytest.param(*values, id=id, marks=getattr(pytest.mark, tier) if tier else ())


def few(
    values: Iterable[Any], chosen: Collection[str], name: Any = str, later: str = "full"
) -> list[Any]:
    """Return a table of which `make test` runs the rows that are chosen by name.

    Args:
        values: The table's values, one a row.
        chosen: The names of the rows that `make test` runs.
        name: Returns the name of a value.
        later: The tier of the other rows.
    """
    return built(
        [row(x, id=name(x), tier="" if name(x) in chosen else later) for x in values]
    )


def left_out() -> set[str]:
    """Return the tiers that are not run."""
    return {name for name in LATER if re.search(rf"\bnot {name}\b", selected)}


def built(table: list[Any]) -> list[Any]:
    """Return the rows that can be selected; thousands of others need not be collected."""
    out = left_out()
    found = [r for r in table if out.isdisjoint(mark.name for mark in r.marks)]
    soak = [r.id for r in found if any(mark.name == "soak" for mark in r.marks)]
    surplus = {*soak} - {*sample(soak)}
    return [r for r in found if r.id not in surplus]


def sample(names: Collection[str]) -> list[str]:
    """Return as many as `--rows` says, drawn by the seed."""
    return sorted(names, key=seeds.place)[:rows]


def surplus(items: Iterable[Any]) -> set[str]:
    """Return the ids of soak's tests that no function's sample includes."""
    tests: dict[str, dict[str, Any]] = {}
    for item in items:
        if item.get_closest_marker("soak"):
            function = item.nodeid.partition("[")[0]
            tests.setdefault(function, {})[item.nodeid] = item
    return {x for ids in tests.values() for x in {*ids} - {*sample(ids)}}


def is_collected(path: Path, has_cuda: bool) -> bool:
    """Return whether a file has tests to run, as far as the marks of the whole file say."""
    text = path.read_text()
    for node in ast.parse(text).body if "pytestmark" in text else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = {*re.findall(r"\bmark\.(\w+)", ast.unparse(node.value))}
            return left_out().isdisjoint(marks) and (has_cuda or "gpu" not in marks)
    return True
