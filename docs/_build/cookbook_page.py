"""The table and the sections of cookbook.md, from the files of examples/rules.

A file's docstring is its citation, its update, and when people take it.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import included

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/rules"
# What own_rule.md tells of, in its order; `direction` is in all of them.
DOORS = ("coeffs", "init", "after", "due", "measure", "divisor", "whole", "sums")
KINDS = ("Wide", "Number", "Shaped", "Running")
GIVEN = {"self", "g", "s", "t", "x", "z", "r", "c"}


class Rule(NamedTuple):
    """What the page tells of a file."""

    file: str
    name: str
    paper: str
    use: str
    lines: int  # of the class, without empty ones
    shows: str


def linked(citation: str) -> str:
    """Return a citation, as "Title, Authors (Source).", linked by its arXiv number."""
    title, authors, source = re.fullmatch(r"(.*), (.*) \((.*)\)\.", citation).groups()
    if not source.startswith("arXiv:"):
        return f"{title}, {authors} ({source})"
    return f"[{title}](https://arxiv.org/abs/{source[6:]}), {authors}"


def shown(cls: ast.ClassDef) -> str:
    """Return what of own_rule.md a class shows."""
    methods = {x.name: x for x in cls.body if isinstance(x, ast.FunctionDef)}
    names = {x.id for x in ast.walk(cls) if isinstance(x, ast.Name)}
    classes = {x.name for x in cls.body if isinstance(x, ast.ClassDef)}
    found = [f"`{x}`" for x in DOORS if x in methods]
    found += [f"`{x}`" for x in KINDS if x in names | classes]
    asked = {x.arg for x in methods["direction"].args.args[2:]}
    of_map = {x.arg for x in methods["whole"].args.args} if "whole" in methods else set()
    found += ["noise"] if "z" in asked or "normal" in of_map else []
    found += ["an extra"] if asked - GIVEN and "measure" not in methods else []
    found += ["`State` by an option"] if "State" in methods else []
    found += ["`t`"] if "t" in asked else []
    return ", ".join(found) or ("`State`" if classes else "a direction alone")


def rule_of(path: Path) -> Rule:
    """Read a file."""
    text = path.read_text()
    tree = ast.parse(text)
    (cls,) = [x for x in tree.body if isinstance(x, ast.ClassDef)]
    body = text.splitlines()[cls.lineno - 1 : cls.end_lineno]
    citation, _, use = ast.get_docstring(tree).replace("\n", " ").split("  ")
    lines = len([line for line in body if line.strip()])
    return Rule(path.name, cls.name, linked(citation), use, lines, shown(cls))


def rules() -> list[Rule]:
    """Return the rules by name."""
    found = [rule_of(path) for path in FOLDER.glob("*.py")]
    return sorted(found, key=lambda rule: rule.name.lower())


def table() -> str:
    """Return the table."""
    rows = [f"| [{r.name}](#{r.name.lower()}) | {r.paper} | {r.lines} | {r.shows} |"
            for r in rules()]  # fmt: skip
    head = ["| rule | paper | lines | shows |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def sections() -> str:
    """Return a section with the file of each rule."""
    parts = []
    for r in rules():
        code = included.fenced(f"examples/rules/{r.file}")
        parts.append(f"### {r.name}\n\n{r.use}\n\n{code}\n")
    return "\n".join(parts)


def filled(page: str) -> str:
    """Return the page with the rules as they are now."""
    for name, made in (("rules", table()), ("files", sections())):
        whole = f"<!-- {name} -->\n\n{made}\n<!-- / -->"
        page = re.sub(
            rf"<!-- {name} -->\n.*?<!-- / -->", lambda _, w=whole: w, page, flags=re.S
        )
    return page
