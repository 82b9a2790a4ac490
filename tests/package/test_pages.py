"""Code and facts of README and docs/: what they show is what the package does."""

import re
import subprocess
import sys
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch
from cases import NAMES
from tiers import few

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Made by docs/_build: tested below, and perhaps not there.
MADE = {"optimizers", "_notes"}
MADE_PAGES = {f"reference/{n}.md" for n in ("compiled", "functional", "optimizers")}
PAGES = [ROOT / "README.md"] + [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if path.relative_to(DOCS).parts[0] not in MADE
    and path.relative_to(DOCS).as_posix() not in MADE_PAGES
]
# A fence that is not to run says {.python .notest}, as those do that show a test's lines.
# What it prints is in the fence of text that follows.
FENCE = re.compile(
    r"^( *)```python[^\n]*\n(.*?)^\1```\n(?:\n+\1```text\n(.*?)^\1```)?", re.M | re.S
)
BLOCKS = {
    f"{path.relative_to(ROOT)}-{i}": (dedent(source), dedent(output))
    for path in PAGES
    for i, (_, source, output) in enumerate(FENCE.findall(path.read_text()))
}

for folder in ("_build", "pictures"):
    sys.path.append(str(DOCS / folder))

import benchmark_tables  # noqa: E402
import cookbook_page  # noqa: E402
import house  # noqa: E402
import menu  # noqa: E402
import optimizer_pages  # noqa: E402

# What Inductor compiles for a page; the other blocks step through the table of kernels.
COMPILED = {"docs/compiled.md-2"}


def compare(said: str, printed: str) -> None:
    same = OutputChecker().check_output(said, printed, ELLIPSIS | NORMALIZE_WHITESPACE)
    assert same, f"the page says:\n{said}\nand it prints:\n{printed}"


@pytest.mark.kernels
@pytest.mark.parametrize("name", few(BLOCKS, BLOCKS.keys() - COMPILED))
@pytest.mark.filterwarnings("default")
def test_block(name: str, monkeypatch, tmp_path, capsys) -> None:
    """It runs, and prints what the page says, wrapped, with ... where machines differ."""
    monkeypatch.chdir(tmp_path)
    source, output = BLOCKS[name]
    exec(compile(source, name, "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    compare(output, printed)


def test_blocks_are_found() -> None:
    for text in ("```python\n1\n```\n", "    ```python\n    1\n    ```\n"):
        for output in ("", "2\n"):
            text += output and indent(
                f"\n```text\n{output}```\n", text[: -len(text.lstrip())]
            )
            (found,) = FENCE.findall(text)
            assert [dedent(part) for part in found[1:]] == ["1\n", output]
    assert not FENCE.findall("```{.python .notest}\n1\n```\n")
    for page in ("README.md-0", "docs/start.md-0"):
        assert "adamw" in BLOCKS[page][0].lower()


def test_the_page_of_own_rules_shows_its_example() -> None:
    """All of the example is on the page, so that what readers copy is run."""
    page = (DOCS / "own_rule.md").read_text()
    example = (ROOT / "examples/own_rule.py").read_text()
    shown = re.findall(r'--8<-- "examples/own_rule.py:(\w+)"', page)
    assert shown == re.findall(r"--8<-- \[start:(\w+)\]", example) and len(shown) == 4


@pytest.mark.full
def test_the_example_of_own_rules_prints_what_its_page_says() -> None:
    """As much as the page shows: its first rule, in a process with its one thread."""
    (said,) = re.findall(
        r"```text\n(SignSGD, .*?)```", (DOCS / "own_rule.md").read_text(), re.S
    )
    code = (
        "import own_rule as r, torch; torch.set_num_threads(1);"
        "momenta = {'momentum': torch.tensor([0.0, 0.5, 0.9, 0.98])};"
        "r.report(r.SignSGD, r.signsgd_loop, 1e-3, momenta, 300)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        check=True,
    )
    compare(said, done.stdout)


def test_included_sections_are_there() -> None:
    shown = [
        found
        for page in DOCS.rglob("*.md")
        for found in re.findall(r'--8<-- "([\w/.]+):(\w+)"', page.read_text())
    ]
    assert ("examples/trainers/transformers_callbacks.py", "release") in shown
    for path, section in shown:
        source = (ROOT / path).read_text()
        assert f"--8<-- [start:{section}]" in source and f"[end:{section}]" in source


def test_every_optimizer_has_a_page() -> None:
    assert sorted(optimizer_pages.names()) == sorted(NAMES)
    pages = [page for row in menu.optimizers() for page in row.values()]
    assert sorted(pages) == sorted(f"optimizers/{name}.md" for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("default")
def test_optimizer_page(name: str, monkeypatch) -> None:
    """What it shows runs as printed, but for the compiler that it would take."""
    page = optimizer_pages.page(name)
    note = optimizer_pages.Note.of(name)
    for section in note.text.values():
        assert section in page
    papers = r"\]\(https://arxiv.org/abs/|ICML 2013|Coursera|JMLR|ICLR|SIAM|ICNN"
    assert re.search(papers, page)
    cls = optimizer_pages.class_of(name)
    constructor = cls.__init__

    def eager(self, *args, **kwargs) -> None:
        constructor(self, *args, **kwargs, compile=False)

    monkeypatch.setattr(cls, "__init__", eager)
    for write in (optimizer_pages.class_program, optimizer_pages.pure_program):
        program = write(name, note)
        assert all(line.strip() in page for line in program.splitlines())
        exec(compile(program, name, "exec"), {"__name__": "page"})


def test_bytes_are_counted() -> None:
    found = dict(optimizer_pages.kept("adamw", ""))
    totals = {k: sum(share for _, share in v.values()) for k, v in found.items()}
    assert list(totals.values()) == pytest.approx([12, 6.125, 8, 5.125, 12])
    assert found["float32"]["exp_avg"] == (str(torch.float32), 4)


def test_tables_of_optimizers_are_those_of_the_package() -> None:
    """Names, states, bytes and decay: of the classes and of their notes."""
    choose = (DOCS / "choose.md").read_text()
    for name in ("../README.md", "choose.md"):
        page = (DOCS / name).read_text()
        made = optimizer_pages.filled(page, choose)
        assert page == made, f"{name}: python docs/_build/generate.py"
        assert len(re.findall("<!-- (?:glance|listed) -->", page)) == 1
    assert "`max_exp_avg_sq`" in optimizer_pages.index()
    assert set(optimizer_pages.in_order(choose)) == set(NAMES)
    # One that the table lacks is its last.
    lacking = re.sub(r"^\| \[`AdamW`\].*\n", "", choose, flags=re.M)
    assert optimizer_pages.in_order(lacking)[-1] == "adamw"


def test_an_optimizer_without_a_note_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(optimizer_pages, "NOTES", tmp_path)
    with pytest.raises(SystemExit, match=r"lion has no note: write docs/_notes/lion\.md"):
        optimizer_pages.page("lion")
    (tmp_path / "lion.md").write_text("lr: 1\nfor: all\n\n## Usual ranges\n\nany\n")
    lacking = "has no When, and when not, Coming from elsewhere, line `state: ...`"
    with pytest.raises(SystemExit, match=lacking):
        optimizer_pages.page("lion")


def test_a_number_whose_text_does_not_say_its_measure_is_told() -> None:
    note = optimizer_pages.Note.of("lion")
    documented = optimizer_pages.Documented.of(optimizer_pages.class_of("lion"))
    documented.arguments["weight_decay"] = "Large."
    with pytest.raises(SystemExit, match="lion: in what is weight_decay measured"):
        optimizer_pages.arguments("lion", note, documented)


def test_tables_are_those_of_the_numbers() -> None:
    names: set[str] = set()
    for name in benchmark_tables.PAGES:
        page = (DOCS / name).read_text()
        assert page == benchmark_tables.filled(page), "python docs/_build/generate.py"
        names |= set(re.findall(r"<!-- (\w+) -->", page))
    assert names - {"listed"} == set(benchmark_tables.tables())


def test_every_rule_to_copy_is_on_its_page_and_short() -> None:
    page = (DOCS / "cookbook.md").read_text()
    assert page == cookbook_page.filled(page), "python docs/_build/generate.py"
    rules, files = cookbook_page.rules(), ROOT.glob("examples/rules/*.py")
    for name in [path.name for path in files]:
        assert f'--8<-- "examples/rules/{name}"' in page
    assert len(rules) > 40 and max([rule.lines for rule in rules]) <= 30


def test_the_house_has_every_module() -> None:
    drawn = (DOCS / "pictures/house.svg").read_text()
    for room, files in house.modules().items():
        for name in [room.replace("__init__", "optimi_func"), *files]:
            assert re.search(rf"[>\s]{name}/?[<\s]", drawn), (
                f"{name} is missing: python docs/pictures/house.py"
            )
    order = [room for floor in house.floors() for room in floor]
    for room, below in house.imports().items():
        assert all(order.index(x) < order.index(room) for x in below), room


PICTURES = (
    *("pipeline", "release", "house", "memory", "loss", "steps", "population"),
    *("replicas", "which"),
)


def test_pictures_are_drawn(tmp_path) -> None:
    """From the committed numbers, with text as text; in a process of their own."""
    draw = "; ".join(f"{n}.draw(Path({str(tmp_path)!r}))" for n in PICTURES)
    code = f"from pathlib import Path; import {', '.join(PICTURES)}; {draw}"
    subprocess.run([sys.executable, "-c", code], cwd=DOCS / "pictures", check=True)
    for name in PICTURES:
        texts = [
            re.findall(r"<text[^>]*>([^<]*)<", (folder / f"{name}.svg").read_text())
            for folder in (DOCS / "pictures", tmp_path)
        ]
        assert texts[0] == texts[1] and len(texts[0]) > 10, name
