"""Write the sections and the table of cookbook.md from the files in examples/rules.

The docstring of each of these files has three paragraphs: the citation of the paper, the
formula of the update, and when to use the rule.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import included

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/rules"
# Rules whose files are shown on the page. own_rule.md links to some of these sections.
SHOWN = {"AdaBelief", "AdamAtan2", "AdamMini", "AdamP", "AdaNorm", "APOLLO", "CAME", "Dion"}
SHOWN |= {"DoG", "GaLore", "LaProp", "LARS", "MARS", "SGLD", "Sophia"}
# The methods that own_rule.md explains, in its order; `direction` is in all of them.
DOORS = ("coeffs", "init", "after", "due", "measure", "whole", "sums")
KINDS = ("Wide", "Number", "Shaped", "Running")
GIVEN = {"self", "g", "s", "t", "x", "z", "r", "c"}


class Rule(NamedTuple):
    """The text about one file that the page contains."""

    file: str
    name: str
    paper: str
    use: str
    lines: int  # nonempty lines of the class
    shows: str


def linked(citation: str) -> str:
    """Return a citation, "Title, Authors (Source).", with a link by its arXiv number."""
    title, authors, source = re.fullmatch(r"(.*), (.*) \((.*)\)\.", citation).groups()
    if not source.startswith("arXiv:"):
        return f"{title}, {authors} ({source})"
    return f"[{title}](https://arxiv.org/abs/{source[6:]}), {authors}"


def shown(cls: ast.ClassDef) -> str:
    """Return the sections of own_rule.md that a class illustrates."""
    methods = {x.name: x for x in cls.body if isinstance(x, ast.FunctionDef)}
    if "direction" not in methods:
        return f"`own_hooks` of {cls.bases[0].id}"
    names = {x.id for x in ast.walk(cls) if isinstance(x, ast.Name)}
    classes = {x.name for x in cls.body if isinstance(x, ast.ClassDef)}
    found = [f"`{x}`" for x in DOORS if x in methods]
    found += [f"`{x}`" for x in KINDS if x in names | classes]
    asked = {x.arg for x in methods["direction"].args.args[2:]}
    of_map = {x.arg for x in methods["whole"].args.args} if "whole" in methods else set()
    found += ["noise"] if "z" in asked or "normal" in of_map else []
    found += ["an extra tensor"] if asked - GIVEN and "measure" not in methods else []
    found += ["`State` that depends on an option"] if "State" in methods else []
    found += ["`t`"] if "t" in asked else []
    return ", ".join(found) or ("`State`" if classes else "`direction` only")


def rule_of(path: Path) -> Rule:
    """Read a file of examples/rules."""
    text = path.read_text()
    tree = ast.parse(text)
    cls = [x for x in tree.body if isinstance(x, ast.ClassDef)][-1]  # hooks come before
    body = text.splitlines()[cls.lineno - 1 : cls.end_lineno]
    citation, _, use = ast.get_docstring(tree).replace("\n", " ").split("  ")
    lines = len([line for line in body if line.strip()])
    return Rule(path.name, cls.name, linked(citation), use, lines, shown(cls))


def rules() -> list[Rule]:
    """Return all rules by name."""
    found = [rule_of(path) for path in FOLDER.glob("*.py")]
    return sorted(found, key=lambda rule: rule.name.lower())


def table() -> str:
    """Return the table of the rules that have no section."""
    rows = [f"| `{r.file}` | {r.paper} | {r.use} | {r.shows} |"
            for r in rules() if r.name not in SHOWN]  # fmt: skip
    head = ["| file | paper | when to use it | illustrates |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def sections() -> str:
    """Return a section with the file's code for each rule that the page shows."""
    parts = []
    for r in [r for r in rules() if r.name in SHOWN]:
        code = included.fenced(f"examples/rules/{r.file}")
        parts.append(f"### {r.name}\n\n{r.use} {r.paper}.\n\n{code}\n")
    return "\n".join(parts)


def filled(page: str) -> str:
    """Return the page with the present rules."""
    for name, made in (("others", table()), ("files", sections())):
        whole = f"<!-- {name} -->\n\n{made}\n<!-- / -->"
        page = re.sub(
            rf"<!-- {name} -->\n.*?<!-- / -->", lambda _, w=whole: w, page, flags=re.S
        )
    return page
