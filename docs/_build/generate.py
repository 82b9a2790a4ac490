"""Write all generated text of the documentation; `make docs` runs this program first.

docs/optimizers/ contains a page for each optimizer. These pages are committed, and are
removed if their optimizer is removed. docs/reference/ contains three pages whose names are
those of the optimizers. README.md and many other pages contain tables and example code
between comments, which this program replaces. Tests compare the committed files with the
text that this program would write.
"""

from pathlib import Path

import benchmark_tables
import cookbook_page
import included
import optimizer_pages
import reference_pages

DOCS = Path(__file__).parents[1]
# Under docs/: the pages with tables of optimizers.
LISTS = ("../README.md", "choose.md")


def files() -> dict[Path, str]:
    """Return the path of every generated file, relative to docs/, and its text."""
    made = {Path("optimizers/index.md"): optimizer_pages.index()}
    for name in optimizer_pages.names():
        made[Path(f"optimizers/{name}.md")] = optimizer_pages.page(name)
    for name, text in reference_pages.pages().items():
        made[Path("reference") / name] = text
    for name in benchmark_tables.PAGES:
        made[Path(name)] = benchmark_tables.filled((DOCS / name).read_text())
    made[Path("cookbook.md")] = cookbook_page.filled((DOCS / "cookbook.md").read_text())
    choose = (DOCS / "choose.md").read_text()
    for name in LISTS:
        text = made.get(Path(name)) or (DOCS / name).read_text()
        made[Path(name)] = optimizer_pages.filled(text, choose)
    for path in DOCS.glob("*.md"):
        name = path.relative_to(DOCS)
        made[name] = included.filled(made.get(name) or path.read_text())
    for path in (DOCS / "reference").glob("*.md"):
        name = path.relative_to(DOCS)
        made[name] = reference_pages.filled(made.get(name) or path.read_text())
    return made


def main() -> None:
    """Write the files whose text has changed."""
    made = files()
    (DOCS / "optimizers").mkdir(exist_ok=True)
    for path in (DOCS / "optimizers").glob("*.md"):
        if path.relative_to(DOCS) not in made:
            path.unlink()
    for path, text in made.items():
        target = DOCS / path
        if not target.exists() or target.read_text() != text:
            target.write_text(text)


if __name__ == "__main__":
    main()
