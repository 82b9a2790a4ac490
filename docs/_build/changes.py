"""A hook of MkDocs, which shows CHANGELOG.md on the site's page of changes.

In a checkout, docs/changes.md only says where CHANGELOG.md is, because a copy would have to
be changed in two places.
"""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page; the text of changes.md is that of CHANGELOG.md."""
    if page.file.src_uri != "changes.md":
        return markdown
    return (ROOT / "CHANGELOG.md").read_text()
