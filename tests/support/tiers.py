"""Which of the three targets run a test: `make test`, `make test-full` or `make soak`.

A test or a row without a mark is in `make test`. `full` are those that take seconds: a
kernel of their own, processes, wide tables. `soak` are those that take minutes; of its
largest tables it runs a sample, another one at each commit.
"""

import hashlib
import re
import subprocess
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LATER = ("full", "soak")
ALL_ROWS = "all"
# The expression given to -m, and the option --rows: what chooses the sample, or "all". Both
# are set by conftest.py before any test file is imported.
selected = ""
seed = ALL_ROWS


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


def few(values: Iterable[Any], chosen: Collection[str], name: Any = str) -> list[Any]:
    """Return a table of which `make test` runs the rows that are chosen by name."""
    return built(
        [row(x, id=name(x), tier="" if name(x) in chosen else "full") for x in values]
    )


def built(rows: list[Any]) -> list[Any]:
    """Return the rows that can be selected; thousands of others need not be collected."""
    left_out = {name for name in LATER if re.search(rf"\bnot {name}\b", selected)}
    if not selected:
        return rows
    return [r for r in rows if left_out.isdisjoint(mark.name for mark in r.marks)]


def sampled(rows: list[Any], number: int) -> list[Any]:
    """Return the rows, of which as many soak as are given here: those that `seed` picks."""
    soak = {r.id: _place(r.id) for r in rows if any(m.name == "soak" for m in r.marks)}
    if seed == ALL_ROWS or len(soak) <= number:
        return rows
    left_out = {*sorted(soak, key=soak.__getitem__)[number:]}
    return [r for r in rows if r.id not in left_out]


def _place(name: str) -> str:
    """Return where a row stands in the order of a seed."""
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()


def random_seed() -> int:
    """Return the number with which soak's random programs begin."""
    return int(_place("random"), 16)


def seed_of(root: Path) -> str:
    """Return the commit, or what stands for it where there is no git: the code's hash."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.check_output(
            command, cwd=root, text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        code = b"".join(x.read_bytes() for x in sorted(root.glob("optimi_func/**/*.py")))
        return hashlib.sha256(code).hexdigest()[:12]
