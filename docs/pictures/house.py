"""Draw the house, which shows every room of the package on its floor.

A room is a folder or a module of the package. The floor of a room is one above the highest
floor from which the room imports. `python docs/pictures/house.py` draws house.svg, and a
test fails if a module is missing in this picture. The optimizers, which have one file each,
are not named.
"""

import ast
import re
import textwrap
from collections import defaultdict
from pathlib import Path

from draw import BLUE, FAINT, GREY, HERE, INK, ORANGE, Picture, heading

PACKAGE = Path(__file__).parents[2] / "optimi_func"
WIDTH, MARGIN, GAP, LINE = 1000, 24, 12, 20
# The colors of the rooms.
PUBLIC = "public: a name to import from"
INSIDE = "internal"
ENGINE = "the engine: kernels, launches, plans"
INTERNAL = ("classes", "core", "pure", "state")


def modules() -> dict[str, list[str]]:
    """Return the files of each room, without optimizers; C++ files have a suffix."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cpp")]):
        room, *rest = path.relative_to(PACKAGE).with_suffix("").parts
        name = path.stem if path.suffix == ".py" else path.name
        found[room] += [name] if rest and name != "__init__" else []
    return {**found, "optimizers": []}  # a new one changes no picture


def imports() -> dict[str, set[str]]:
    """Return the rooms from which each room imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "optimi_func"
            ):
                names = node.module.split(".")[1:2] or [a.name for a in node.names]
                found[room] |= set(names) - {room}
    return found


def floors() -> list[list[str]]:
    """Return the rooms of each floor, beginning with the lowest floor."""
    below = imports()
    height: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in height:
            height[room] = 1 + max(map(floor, below[room]), default=-1)
        return height[room]

    rooms = sorted(modules())
    top = max(map(floor, rooms))
    return [[r for r in rooms if floor(r) == i] for i in range(top + 1)]


def wrapped(names: list[str], width: float) -> list[str]:
    """Break names into lines with a width of at most `width` pixels."""
    lines: list[str] = []
    for name in names:
        if lines and len(f"{lines[-1]} · {name}") * 8.6 < width - 12:
            lines[-1] += f" · {name}"
        else:
            lines.append(name)
    return lines


def phrase(room: str, width: float) -> list[str]:
    """Return the first sentence of a room's docstring, in lines of `width` pixels."""
    path = PACKAGE / f"{room}.py"
    if not path.exists():
        path = PACKAGE / room / "__init__.py"
    said = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    said = said.replace("`", "").removeprefix(f"{room}: ".capitalize())
    words = re.split(r"\.(?: |$)", " ".join(said.split()))[0]
    return textwrap.wrap(words[:1].lower() + words[1:], int((width - 12) / 7.4))


def color(room: str) -> str:
    """Return the color of a room, which shows who uses the room."""
    if room == "execution":
        return ORANGE
    return GREY if room in INTERNAL else BLUE


def draw(folder: Path = HERE) -> None:
    """Draw all floors, beginning with the roof."""
    inside = modules()
    rows = []
    for rooms in reversed(floors()):
        weight = {r: max(2.2, 1.0 + min(len(inside[r]), 12) * 0.35) for r in rooms}
        usable = WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)
        widths = {r: usable * weight[r] / sum(weight.values()) for r in rooms}
        lines = {r: wrapped(inside[r], widths[r]) for r in rooms}
        said = {r: phrase(r, widths[r]) for r in rooms}
        most = max(len(lines[r]) + len(said[r]) for r in rooms)
        rows.append((rooms, widths, said, lines, 32 + LINE * most))
    top = 120
    height = top + sum(tall + GAP for *_, tall in rows) + 12
    picture = Picture(WIDTH, height, "Imports point down: a floor knows only those below")
    heading(
        picture, "The files of optimi_func. The floor of a room follows from its imports."
    )
    legend = [(BLUE, PUBLIC, 24), (ORANGE, ENGINE, 320), (GREY, INSIDE, 690)]
    for paint, words, x in legend:
        picture.box(x, 84, 18, 14, paint)
        picture.text(x + 26, 96, words, 16, FAINT, anchor="start")
    y = float(top)
    for rooms, widths, said, lines, tall in rows:
        x = float(MARGIN)
        for room in rooms:
            picture.box(x, y, widths[room], tall, color(room))
            shown = "optimi_func" if room == "__init__" else room
            name = f"{shown}/" if (PACKAGE / room).is_dir() else shown
            middle = x + widths[room] / 2
            picture.text(middle, y + 21, name, 17, mono=True, bold=True)
            for i, line in enumerate(said[room] + lines[room]):
                mono = i >= len(said[room])
                picture.text(
                    *(middle, y + 40 + LINE * i, line, 14, INK if not mono else FAINT),
                    mono=mono,
                )
            x += widths[room] + GAP
        y += tall + GAP
    picture.save("house.svg", folder)


if __name__ == "__main__":
    draw()
