"""A training run that is killed at random moments ends as if nobody had touched it."""

import contextlib
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from tiers import row
from torch.utils import _pytree as pytree

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import resume


def run(arguments: list[str], log: Path) -> None:
    """The example, saying what it says in a file: who forks may have another stdout."""
    torch.set_num_threads(1)
    with log.open("a", buffering=1) as file, contextlib.redirect_stdout(file):
        resume.main(arguments)


@pytest.fixture
def start(tmp_path):
    """Runs the example in a process of its own, forked from one that has torch loaded."""

    def started(checkpoint: Path, epochs: int) -> Any:
        options = ["--no-compile", "--every=3", f"--epochs={epochs}"]
        arguments = [f"--checkpoint={checkpoint}", *options]
        return forked.start(run, arguments, tmp_path / "log")

    return started


def written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def assert_same(one: Any, other: Any) -> None:
    (flat, spec), (others, its) = map(pytree.tree_flatten, (one, other))
    assert spec == its
    for x, y in zip(flat, others):
        assert type(x) is type(y)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y)
        else:
            assert x == y


@pytest.mark.parametrize(
    ("kills", "epochs"),
    [row(5, 20, id="5", tier="full"), row(50, 100, id="50", tier="night")],
)
def test_whoever_is_killed_ends_as_the_uninterrupted(
    start, tmp_path, kills: int, epochs: int
) -> None:
    straight, checkpoint = tmp_path / "straight" / "run.pt", tmp_path / "killed" / "run.pt"
    begun = time.monotonic()
    process = start(straight, epochs)
    process.join()
    assert process.exitcode == 0
    usual = time.monotonic() - begun
    assert (tmp_path / "log").read_text().startswith("begun\n")

    killed, steps, halves = 0, 0, 0
    while killed < kills:
        before = written(checkpoint)
        process = start(checkpoint, epochs)
        if killed % 2 == 0:  # the others may be killed before they have done anything
            while process.is_alive() and written(checkpoint) == before:
                time.sleep(0.001)
        process.join(random.uniform(0.0, usual / kills))
        if process.exitcode == 0:
            checkpoint.unlink()  # too late: a new run
            steps = 0
            continue
        process.kill()
        process.join()
        assert process.exitcode == -9
        killed += 1
        halves += checkpoint.with_suffix(".tmp").exists()
        if checkpoint.exists():
            where = torch.load(checkpoint, weights_only=True)["batches"]
            now = where["epoch"] * (1024 // 64) + where["position"]
            assert now >= steps and (now % 3 == 0 or now == epochs * (1024 // 64))
            steps = now
    process = start(checkpoint, epochs)
    process.join()
    assert process.exitcode == 0

    out = (tmp_path / "log").read_text()
    resumed = list(map(int, re.findall(r"resumed after step (\d+)", out)))
    assert any(0 < step < epochs * (1024 // 64) for step in resumed)
    print(f"{kills} kills, {halves} within a save; resumed after steps {resumed}")
    assert_same(*[torch.load(p, weights_only=True) for p in (straight, checkpoint)])
