"""A hook of MkDocs: links from notebooks to pages, which mkdocs-jupyter does not convert.

Links in a notebook go to page.md, which works on GitHub and in Jupyter. On the site, this
hook changes them to page.html.
"""

import re
from typing import Any

PAGE = re.compile(r'href="(?!\w+:)([^"#]+)\.md(#[^"]*)?"')


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return the HTML of a page with converted links."""
    if not page.file.src_uri.endswith(".ipynb"):
        return output
    return PAGE.sub(r'href="\1.html\2"', output)
