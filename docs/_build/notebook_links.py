"""A hook of MkDocs: links of notebooks to pages, which mkdocs-jupyter leaves as they are.

In a notebook a link goes to page.md, as GitHub and Jupyter have it, and on the site to
page.html.
"""

import re
from typing import Any

PAGE = re.compile(r'href="(?!\w+:)([^"#]+)\.md(#[^"]*)?"')


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The HTML of a page as it is written."""
    if not page.file.src_uri.endswith(".ipynb"):
        return output
    return PAGE.sub(r'href="\1.html\2"', output)
