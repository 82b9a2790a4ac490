"""A hook of MkDocs: the menu lists the optimizers in the table of docs/choose.md."""

import re
from pathlib import Path
from typing import Any

# The table is made by `optimizer_pages.glance`.
ROW = re.compile(r"^\| \[`(\w+)`\]\((optimizers/\w+\.md)\)", re.M)


def optimizers() -> list[dict[str, str]]:
    """Return the pages in the order of the table, with their classes as titles."""
    table = (Path(__file__).parents[1] / "choose.md").read_text()
    return [{name: page} for name, page in ROW.findall(table)]


def on_config(config: Any) -> Any:
    """Put the pages of the optimizers behind the other pages about optimizers."""
    (pages,) = [x["Optimizers"] for x in config.nav if "Optimizers" in x]
    pages += optimizers()
    return config
