"""What the files around the package say of versions and tools: the same everywhere."""

import re
import tomllib
from pathlib import Path

import optimi_func

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(text: str) -> dict[str, set[str]]:
    """The versions that a file asks for, by package."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"\b([\w.-]+)==([\d.]+)", text):
        found.setdefault(name, set()).add(version)
    return found


def test_every_file_has_the_same_version() -> None:
    version = PROJECT["version"]
    assert optimi_func.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.M) == [version]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == version
    assert f"version {version}" in (ROOT / "docs/index.md").read_text()


def test_pre_commit_has_the_versions_of_make_lint() -> None:
    asked = pins((ROOT / ".pre-commit-config.yaml").read_text())
    pinned = pins((ROOT / "constraints.txt").read_text())
    assert set(asked) == {"ruff", "basedpyright", "clang-format"}
    for name, versions in asked.items():
        assert versions == pinned[name]


def test_the_workflow_tests_every_python_that_is_promised() -> None:
    promised = set(
        re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]), re.M)
    )
    assert f">={min(promised, key=lambda x: int(x[2:]))}" == PROJECT["requires-python"]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    run = re.findall(r'^ +- python: "(.+)"$', workflow, re.M)
    assert set(run) == promised
    assert "PYTHON: python${{ matrix.python }}" in workflow
    assert ".ci/run" in workflow
