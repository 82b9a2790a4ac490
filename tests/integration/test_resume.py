"""20 steps are 10 steps, a checkpoint, a new process and 10 more: bit for bit."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    CASES,
    DEFAULTS,
    NO_CODES,
    REFUSE_STATES,
    TOLERANCE,
    Case,
    assert_moved_alike,
)
from forked import run_script
from resumed import FORMATS, MODES, STEPS, Job, Run, Sizes
from tiers import built, row
from torch import Tensor

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings(
    "ignore:eps=", "ignore:weight_decay=", "ignore:max_lr="
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
MOMENTUM = Case("sgd", {"momentum": 0.9})
STORED = {"compact", "exact 8bit", "release compact"}


RULES = [*DEFAULTS, MOMENTUM]
# Without what only some shapes have.
CASES = [case for case in CASES if "split" not in case.options]
ALL = [*CASES, MOMENTUM]
# A kernel costs seconds, twice: in the process that is saved and in the one that resumes.
QUICK = {
    "adamw": (torch.float64, torch.bfloat16),
    "stableadamw": (torch.float32,),
    "ranger": (torch.float32,),
}


def can_run(job: Job) -> bool:
    if STORED.intersection((job.before, job.after)):
        coded = [case for case in DEFAULTS if case.name not in NO_CODES]
        return job.dtype == torch.bfloat16 and job.case in (*coded, MOMENTUM)
    refuses = job.case.id in REFUSE_STATES  # their state is no sum over gradients
    return not (refuses and "release states" in (job.before, job.after))


def is_quick(job: Job) -> bool:
    """Of the eager modes one dtype a rule and option, and some kernels."""
    ways = [job.before, job.after]
    if "compiled" in ways or "release compiled" in ways:
        return job.dtype in QUICK.get(job.case.id, ())
    if job.case in RULES and (ways == ["eager", "eager"] or STORED.intersection(ways)):
        return True
    turn = ALL.index(job.case) + sum(map(list(MODES).index, ways)) // 2
    return DTYPES[turn % 3] == job.dtype


def forms(job: Job) -> list[str]:
    """How a job is saved: `eager` in every way, the others by turns."""
    if job.before == job.after == "eager" and job.case in RULES:
        return list(FORMATS)
    if job.before != job.after:  # a pickled optimizer stays what it was
        return [FORMATS[DTYPES.index(job.dtype) % 2]]
    return [FORMATS[(DTYPES.index(job.dtype) + list(MODES).index(job.before)) % 3]]


def is_short(job: Job) -> bool:
    """Every rule in every format once, and every mode and change of it by two rules."""
    ways = [job.before, job.after]
    if "compiled" in ways or "release compiled" in ways or not is_quick(job):
        return False
    if ways == ["eager", "eager"] and job.case in RULES:
        return job.dtype == torch.bfloat16
    return job.case.id in ("adamw", "schedule_free_adamw")


def has_turn(job: Job) -> bool:
    """A quarter of the rules by each mode, and a quarter of the modes by each rule."""
    ways = {job.before, job.after}
    return (ALL.index(job.case) + sum(map(list(MODES).index, ways))) % 4 == 0


def tier_of(job: Job) -> str:
    if is_short(job):
        return ""
    if not is_quick(job):
        return "soak"
    compiled = "compiled" in job.before or "compiled" in job.after
    return "full" if compiled or has_turn(job) else "soak"


def rows(jobs: list[Job]) -> list[Any]:
    jobs = list({job.id: job for job in jobs if can_run(job)}.values())
    return built([row(job, id=job.id, tier=tier_of(job)) for job in jobs])


SAME = [Job(case, d, mode, mode) for case in RULES for d in DTYPES for mode in MODES]
# Every choice that a rule offers, by itself.
SAME += [Job(case, d, "eager", "eager") for case in CASES for d in DTYPES]
# A run is saved where it was begun and goes on elsewhere.
CROSS = [
    Job(case, dtype, *way)
    for case in RULES
    for dtype in DTYPES
    for mode in ("foreach", "compiled", "release", "release compiled", "capturable")
    for way in (("eager", mode), (mode, "eager"))
]


def half_of(mode: str) -> int:
    """Backwards before the checkpoint; of an accumulation it is in mid-cycle."""
    release = MODES[mode].release or {}
    return STEPS // 2 + ("accumulation" in release)


class Ends:
    """How every job of this session has ended, in one process that ran them all."""

    def __init__(self, jobs: list[Job], folder: Path) -> None:
        self._straight: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        folders: dict[tuple[Any, ...], Path] = {}
        orders = []
        for job in jobs:
            key = (job.case.id, job.dtype, job.before)
            half = half_of(job.before)
            if key not in folders:
                folders[key] = folder / str(len(folders))
                folders[key].mkdir()
                run = Run(job.case, job.dtype, MODES[job.before])
                run.train(0, half)
                run.save(folders[key])
            for form in forms(job):
                orders.append((job, folders[key], form, half, STEPS))
        (folder / "orders.pickle").write_bytes(pickle.dumps(orders))
        script = ROOT / "tests" / "support" / "resumed.py"
        done = run_script(script, str(folder), strict=False)
        assert done.returncode == 0, done.stderr
        ends = torch.load(folder / "ends.pt", weights_only=True)
        self._resumed = {(o[0].id, o[2]): end for o, end in zip(orders, ends)}

    def straight(self, case: Case, dtype: torch.dtype, mode: str) -> dict[str, Tensor]:
        key = (case.id, dtype, mode)
        if key not in self._straight:
            run = Run(case, dtype, MODES[mode])
            run.train(0, STEPS)
            self._straight[key] = run.end()
        return self._straight[key]

    def resumed(self, job: Job, form: str) -> dict[str, Tensor]:
        end = self._resumed[job.id, form]
        assert not isinstance(end, str), end
        return end


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory) -> Ends:
    here = [item for item in request.session.items if item.fspath == request.fspath]
    jobs = [item.callspec.params["job"] for item in here if hasattr(item, "callspec")]
    return Ends(jobs, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("job", rows(SAME))
def test_a_resumed_run_is_the_run(job: Job, ends: Ends) -> None:
    want = ends.straight(job.case, job.dtype, job.after)
    for form in forms(job):
        got = ends.resumed(job, form)
        assert got.keys() == want.keys()
        for name, x in want.items():
            assert got[name].dtype == x.dtype, (form, name)
            assert got[name].stride() == x.stride(), (form, name)
            assert torch.equal(got[name], x), (form, name)
        if job.before in STORED:
            assert any(name.startswith("p8.") and name.endswith("_q") for name in got)


@pytest.mark.parametrize("job", rows(CROSS))
def test_another_executor_goes_on_alike(job: Job, ends: Ends) -> None:
    starts = Sizes(job.dtype, small=False)
    want = ends.straight(job.case, job.dtype, "eager")
    for form in forms(job):
        got = ends.resumed(job, form)
        for name, p in starts.named_parameters():
            pair = [whole(end, name) for end in (got, want)]
            assert_moved_alike(p.detach(), *pair, TOLERANCE[job.dtype])


def whole(end: dict[str, Tensor], name: str) -> Tensor:
    comp = end.get(f"{name}.kahan_comp")
    return end[name].double() + (0 if comp is None else comp.double())
