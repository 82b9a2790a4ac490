"""A hook of MkDocs: the site's page of changes shows CHANGELOG.md.

In a checkout docs/changes.md says where that file is, because a copy would be a second
place to change.
"""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page: of this one another file's."""
    if page.file.src_uri != "changes.md":
        return markdown
    return (ROOT / "CHANGELOG.md").read_text()
