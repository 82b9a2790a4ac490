"""The gate draws nothing at random, skips nothing unseen, and says what it took."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import refusals
import seeds
import skips
import tiers
import torch

ROOT = Path(__file__).parents[2]
TESTS = sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/_tests/*.py")])
# What would draw other numbers in each run, or the same ones in each night.
UNSEEDED = (
    r"\bderandomize=",
    r"\bdefault_rng\(\)",
    r"\bRandomState\(\)",
    r"\bRandom\(\)",
    r"\bSystemRandom\b",
    r"\burandom\b",
    r"\bsecrets\.",
    r"\buuid\.",
    r"(?<!plant)\bseed\(\)",
    r"seed\(.*\btime\b",
    r"^from hypothesis import .*\bseed\b",
)
HERE = {Path(__file__), ROOT / "tests/support/seeds.py"}


def test_no_test_draws_beside_the_seed() -> None:
    found = []
    for path in {*TESTS} - HERE:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(re.search(pattern, line) for pattern in UNSEEDED):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_every_test_begins_with_the_same_draws() -> None:
    seed = seeds.number()
    assert random.random() == random.Random(seed).random()
    assert np.random.random() == np.random.RandomState(seed).random()
    own = torch.Generator().manual_seed(seed)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=own))


DRAWN = torch.rand(3)  # while the module is imported


@pytest.fixture(scope="module")
def drawn() -> torch.Tensor:
    return torch.rand(3)


def test_modules_and_their_fixtures_begin_with_them_as_well(drawn: torch.Tensor) -> None:
    own = torch.Generator().manual_seed(seeds.number())
    want = torch.rand(3, generator=own)
    assert torch.equal(DRAWN, want) and torch.equal(drawn, want)


def test_hypothesis_depends_on_the_seed_alone() -> None:
    default = hypothesis.settings()
    assert hypothesis.settings.get_current_profile_name() == seeds.PROFILE
    assert default.derandomize == (seeds.text == seeds.GATE)
    assert default.database is None and default.deadline is None
    if seeds.text != seeds.GATE:
        assert hypothesis.core.global_force_seed == seeds.number()


def test_a_night_has_another_seed_and_other_rows(monkeypatch) -> None:
    names = [f"row {i}" for i in range(100)]
    monkeypatch.setattr(tiers, "rows", 5)
    drawn, numbers = [], []
    for text in (seeds.GATE, "2026-01-01", "2026-01-02", seeds.GATE):
        monkeypatch.setattr(seeds, "text", text)
        drawn.append(tiers.sample(names))
        numbers.append(seeds.number())
    assert drawn[0] == drawn[3] and len({*map(tuple, drawn)}) == 3
    assert numbers[0] == numbers[3] == 0 and len({*numbers}) == 3
    assert tiers.sample(names[::-1]) == drawn[0]


def test_of_a_table_soak_has_a_few_rows(monkeypatch) -> None:
    table = [tiers.row(i, id=str(i), tier="soak" if i % 2 else "") for i in range(20)]
    monkeypatch.setattr(tiers, "selected", "soak and not night")
    monkeypatch.setattr(tiers, "rows", 3)
    built = tiers.built(table)
    assert len([r for r in built if r.marks]) == 3
    assert len(built) == 13
    monkeypatch.setattr(tiers, "rows", None)
    assert tiers.built(table) == table
    monkeypatch.setattr(tiers, "selected", "not full and not soak and not night")
    assert [r.id for r in tiers.built(table)] == [str(i) for i in range(0, 20, 2)]


@pytest.mark.parametrize(
    ("marks", "selected", "has_cuda", "collected"),
    [
        ("pytest.mark.gpu", "", False, False),
        ("pytest.mark.gpu", "", True, True),
        ("[\n    pytest.mark.soak,\n]", "not full and not soak", True, False),
        ("[pytest.mark.full]", "full and not soak", True, True),
        ("pytest.mark.kernels", "not full", False, True),
    ],
)
def test_files_without_a_test_to_run_are_not_imported(
    marks: str, selected: str, has_cuda: bool, collected: bool, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(f"import pytest\n\npytestmark = {marks}\n")
    monkeypatch.setattr(tiers, "selected", selected)
    assert tiers.is_collected(path, has_cuda) == collected


SKIPPING = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason={reason!r})
def test_skips():
    pass
"""


def session(
    folder: Path, text: str, workers: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest over one file, with the plugin that looks at skips."""
    (folder / "test_x.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-n", workers, "-p", "no:hypothesispytest"]
    command += ["-c", "/dev/null", "--rootdir", str(folder), "-q", "test_x.py"]
    (folder / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests/support')!r})\n"
        "from skips import Skips\n"
        "def pytest_configure(config): config.pluginmanager.register(Skips())\n"
    )
    own = {"PATH": "", **variables}
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "workers", "variables", "status"),
    [
        (SKIPPING.format(reason="needs CUDA"), "1", {"CI": "true"}, 0),
        (SKIPPING.format(reason="triton is 3.10, not 3.9"), "0", {}, 0),
        (SKIPPING.format(reason="triton is 3.10, not 3.9"), "1", {"CI": "true"}, 1),
        ("import pytest\npytest.importorskip('no_such_module')\n", "1", {"CI": "true"}, 1),
    ],
    ids=["allowed", "at home", "another", "a file"],
)
def test_a_skip_needs_a_reason_that_is_allowed(
    text: str, workers: str, variables: dict[str, str], status: int, tmp_path: Path
) -> None:
    done = session(tmp_path, text, workers, **variables)
    said = "skipped for reasons that tests/support/skips.py does not allow" in done.stdout
    assert done.returncode == status, done.stdout
    assert said == ("needs CUDA" not in text)


def test_every_reason_that_is_allowed_is_used() -> None:
    text = "".join(path.read_text() for path in {*TESTS} - HERE - {Path(skips.__file__)})
    assert [x for x in skips.ALLOWED if f'reason="{x}"' not in text] == []


STUB = """#!/bin/sh
echo "$@"
case " $* " in *" $BROKEN "*) exit 2 ;; esac
"""


def checked(script: str, folder: Path, **variables: str) -> tuple[int, list[str]]:
    """Run a script of .ci with a `make` that says its arguments, and fails at $BROKEN.

    In a copy: a night begins with the removal of an environment beside it.
    """
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    (folder / "make").write_text(STUB)
    (folder / "make").chmod(0o755)
    # Stands for the browser that is looked for.
    (folder / "chromium").symlink_to(folder / "make")
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "BROKEN": "none", **variables}
    command = ["bash", str(folder / ".ci" / script)]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines() + done.stderr.splitlines()


PARTS = "install lint test test-full cuda-offline soak docs".split()


def test_the_gate_says_what_its_parts_took(tmp_path: Path) -> None:
    status, lines = checked("run", tmp_path)
    assert status == 0
    assert [line.split()[2:] for line in lines[-8:-1]] == [["passed", x] for x in PARTS]


def test_a_gate_that_fails_says_so_too(tmp_path: Path) -> None:
    status, lines = checked("run", tmp_path, BROKEN="test")
    assert status == 1 and "test-full" not in lines
    verdicts = [line.split()[2:] for line in lines[-4:-1]]
    assert verdicts == [["passed", "install"], ["passed", "lint"], ["FAILED", "test"]]


def test_a_night_goes_on_and_says_how_to_repeat_what_failed(tmp_path: Path) -> None:
    status, lines = checked("night", tmp_path, SEED="2026-01-02", BROKEN="test")
    assert status == 1
    assert 'To repeat what failed: make nightly SEED=2026-01-02 PARTS="test"' in lines
    parts = "test test-full cuda-offline soak docs-test newest-torch".split()
    assert [line.split()[3] for line in lines[-7:-1]] == parts
    assert sum("FAILED" in line for line in lines) == 1
    assert all("SEED=2026-01-02" in x for x in lines if x.startswith(("test", "soak")))


def test_a_part_of_a_night_is_repeated_alone(tmp_path: Path) -> None:
    status, lines = checked("night", tmp_path, SEED="7", PARTS="test-full")
    assert status == 0 and "test-full SEED=7" in lines
    assert not any(line.startswith(("soak", "cuda-offline")) for line in lines)


def test_a_part_that_no_night_has_is_refused(tmp_path: Path) -> None:
    status, lines = checked("night", tmp_path, PARTS="test soaks")
    assert status == 2 and "PARTS has soaks" in lines[-1]


TWO_OF_THREE = """
set -euo pipefail
source .ci/parts
part first true
part second false
part third true
finish
"""


def test_parts_go_on_after_a_failure_and_say_what_they_took() -> None:
    done = subprocess.run(
        ["bash", "-c", TWO_OF_THREE], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    *_, first, second, third, total = done.stdout.splitlines()
    assert re.fullmatch(r" +\d+ s  passed  first", first)
    assert re.fullmatch(r" +\d+ s  FAILED  second", second)
    assert re.fullmatch(r" +\d+ s  passed  third", third)
    assert re.fullmatch(r" +\d+ s  in all", total)


REFUSALS = {
    "raise ValueError('x=1')": None,
    "1 + 1": "DID NOT RAISE",
    "{}['x=1']": "KeyError",
    "raise ValueError('y=1')": "did not match",
    "p.add_(1); raise_after(net.weight)": "has written something",
    "raise_after(p)": "has written something",
}


@pytest.mark.parametrize("call", REFUSALS)
def test_the_runner_of_refusals_notices_what_is_wrong(call: str) -> None:
    def raise_after(x: torch.Tensor) -> None:
        x.data.add_(1.0)
        raise ValueError("x=1")

    (row,) = refusals.rows({call: "x=1"})
    scene = {"p": torch.ones(2), "net": torch.nn.Linear(2, 1), "raise_after": raise_after}
    if REFUSALS[call] is None:
        row.run(scene)
        return
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)) as found:
        row.run(scene)
    assert REFUSALS[call] in f"{found.type.__name__}: {found.value}"
