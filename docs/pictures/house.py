"""The house: every module of the package on the floor that its imports allow.

A floor is one more than the highest that a module imports from, so that nothing in the
picture is anybody's opinion. `python docs/pictures/house.py` draws house.svg; a test tells
when a module is missing in it.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

from draw import BLUE, FAINT, GREY, HERE, ORANGE, Picture, heading

PACKAGE = Path(__file__).parents[2] / "optimi_func"
WIDTH, MARGIN, GAP, LINE = 1000, 24, 12, 18
# What a module is to its reader.
PUBLIC = "public: a name to import from"
INSIDE = "inside"
ENGINE = "the engine, where tensors are written"


def modules() -> dict[str, list[str]]:
    """Each module or folder of the package, and the files of a folder."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        room, *rest = path.relative_to(PACKAGE).with_suffix("").parts
        found[room] += [name for name in rest if name != "__init__"]
    return dict(found)


def imports() -> dict[str, set[str]]:
    """Which of them each one imports from."""
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
    """The rooms of each floor, the lowest first."""
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
    """Names in lines of so many pixels."""
    lines: list[str] = []
    for name in names:
        if lines and len(lines[-1] + "  " + name) * 7.3 < width - 16:
            lines[-1] += "  " + name
        else:
            lines.append(name)
    return lines


def phrase(room: str, width: float) -> list[str]:
    """What a module without files says of itself: as much of its first line as fits."""
    path = PACKAGE / f"{room}.py"
    if not path.exists():
        path = PACKAGE / room / "__init__.py"
    said = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    for end in (r"[.:]( |$)", r"[.:,]( |$)"):
        words = re.split(end, said)[0]
        if " " in words and len(words) * 6.4 < width - 16:
            return [words[:1].lower() + words[1:]]
    return []


def color(room: str) -> str:
    """By who uses it."""
    if room in ("execution", "compiled"):
        return ORANGE
    return GREY if room.startswith("_") and room != "__init__" else BLUE


def draw(folder: Path = HERE) -> None:
    """Floor by floor, from the roof."""
    inside = modules()
    rows = []
    for rooms in reversed(floors()):
        weight = {r: 1.0 + min(len(inside[r]), 12) * 0.35 for r in rooms}
        usable = WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)
        widths = {r: usable * weight[r] / sum(weight.values()) for r in rooms}
        lines = {r: wrapped(inside[r], widths[r]) for r in rooms}
        said = {r: phrase(r, widths[r]) for r in rooms if not inside[r]}
        lines.update(said)
        rows.append((rooms, widths, lines, 32 + LINE * max(map(len, lines.values()))))
    top = 110
    height = top + sum(h + GAP for *_, h in rows) + 12
    picture = Picture(WIDTH, height, "Imports point down: a floor knows only those beneath")
    heading(picture, "Every module of optimi_func, on the floor that its imports give it.")
    legend = [(BLUE, PUBLIC, 24), (ORANGE, ENGINE, 300), (GREY, INSIDE, 640)]
    for paint, words, x in legend:
        picture.box(x, 76, 18, 14, paint)
        picture.text(x + 26, 88, words, 13, FAINT, anchor="start")
    y = float(top)
    for rooms, widths, lines, tall in rows:
        x = float(MARGIN)
        for room in rooms:
            picture.box(x, y, widths[room], tall, color(room))
            shown = "optimi_func" if room == "__init__" else room
            name = f"{shown}/" if inside[room] else shown
            middle = x + widths[room] / 2
            picture.text(middle, y + 21, name, 15, mono=True, bold=True)
            for i, line in enumerate(lines[room]):
                mono = bool(inside[room])
                picture.text(middle, y + 40 + LINE * i, line, 12, FAINT, mono=mono)
            x += widths[room] + GAP
        y += tall + GAP
    picture.save("house.svg", folder)


if __name__ == "__main__":
    draw()
