"""Copy example code into a page, so that you can read the page without a build.

The code is placed between `<!-- code: examples/own_rule.py:signsgd -->` and `<!-- / -->`.
It is the section of the file from `# [start:signsgd]` to `# [end:signsgd]`, or the whole
file if no section is named. A test fails if a page and its file differ.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"<!-- code: ([\w/.]+?)(?::(\w+))? -->\n.*?<!-- / -->", re.S)


def section(path: str, name: str | None) -> str:
    """Return the code of a file, or of the section of the file with this name.

    Raises:
        SystemExit: The file has no such section.
    """
    text = (ROOT / path).read_text()
    if name is None:
        return text.strip("\n")
    found = re.search(rf"# \[start:{name}\]\n(.*?)# \[end:{name}\]", text, re.S)
    if found is None:
        raise SystemExit(f"{path} has no lines `# [start:{name}]` and `# [end:{name}]`")
    return found[1].strip("\n")


def fenced(path: str, name: str | None = None) -> str:
    """Return the code in a fence that tests skip, because they run the file itself."""
    return f"```{{.python .notest}}\n{section(path, name)}\n```"


def filled(page: str) -> str:
    """Return the page with the code that its files contain now."""

    def place(found: re.Match[str]) -> str:
        head = found[0].partition("\n")[0]
        return f"{head}\n\n{fenced(found[1], found[2])}\n\n<!-- / -->"

    return PLACE.sub(place, page)
