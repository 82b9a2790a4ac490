"""A Griffe extension: doctests that stand in docstrings without a heading are code."""

import re
from typing import Any

import griffe

# From a prompt to the end of its paragraph; tests may follow each other.
EXAMPLES = re.compile(r"^>>> .*?(?=\n\n(?!>>> )|\Z)", re.M | re.S)


class Doctests(griffe.Extension):
    """Fences them before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Every module, class, function and attribute that the package has."""
        if obj.docstring and not obj.is_alias:
            text = obj.docstring.value
            obj.docstring.value = EXAMPLES.sub(r"```pycon\n\g<0>\n```", text)
