"""Write the pages that are made: `make docs` does, before the site is built.

docs/optimizers/ has a page an optimizer, docs/reference/ three pages of their names,
docs/_generated/ the tables that other pages include. None of it is committed; what nothing
makes any more is removed.
"""

from pathlib import Path

import benchmark_tables
import optimizer_pages
import reference_pages

DOCS = Path(__file__).parents[1]


def files() -> dict[Path, str]:
    """Every generated file's path, under docs/, and text."""
    made = {Path("optimizers/index.md"): optimizer_pages.index()}
    for name in optimizer_pages.names():
        made[Path(f"optimizers/{name}.md")] = optimizer_pages.page(name)
    made[Path("reference/optimizers.md")] = reference_pages.classes()
    made[Path("reference/functional.md")] = reference_pages.pure()
    made[Path("reference/compiled.md")] = reference_pages.compiled_steps()
    for name, text in benchmark_tables.tables().items():
        made[Path(f"_generated/{name}.md")] = text
    return made


def main() -> None:
    """Write what changed."""
    made = files()
    for folder in ("optimizers", "_generated"):
        (DOCS / folder).mkdir(exist_ok=True)
        for path in (DOCS / folder).glob("*.md"):
            if path.relative_to(DOCS) not in made:
                path.unlink()
    for path, text in made.items():
        target = DOCS / path
        if not target.exists() or target.read_text() != text:
            target.write_text(text)


if __name__ == "__main__":
    main()
