"""Write the pages that are made: `make docs` does, before the site is built.

docs/optimizers/ has a page per optimizer, docs/reference/ three pages of their names:
neither is committed, and what nothing makes any more is removed. README.md and some pages
are, with their tables: they are brought up to date.
"""

from pathlib import Path

import benchmark_tables
import cookbook_page
import optimizer_pages
import reference_pages

DOCS = Path(__file__).parents[1]
# Under docs/: the pages with tables of optimizers.
LISTS = ("../README.md", "choose.md")


def files() -> dict[Path, str]:
    """Every generated file's path, under docs/, and text."""
    made = {Path("optimizers/index.md"): optimizer_pages.index()}
    for name in optimizer_pages.names():
        made[Path(f"optimizers/{name}.md")] = optimizer_pages.page(name)
    made[Path("reference/optimizers.md")] = reference_pages.classes()
    made[Path("reference/functional.md")] = reference_pages.pure()
    made[Path("reference/compiled.md")] = reference_pages.compiled_steps()
    for name in benchmark_tables.PAGES:
        made[Path(name)] = benchmark_tables.filled((DOCS / name).read_text())
    made[Path("cookbook.md")] = cookbook_page.filled((DOCS / "cookbook.md").read_text())
    choose = (DOCS / "choose.md").read_text()
    for name in LISTS:
        text = made.get(Path(name)) or (DOCS / name).read_text()
        made[Path(name)] = optimizer_pages.filled(text, choose)
    return made


def main() -> None:
    """Write what changed."""
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
