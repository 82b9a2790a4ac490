"""What all tests share."""

import gc
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Threads of several processes share a few cores here: one that waits by spinning takes
# the time of one that has work. OpenMP reads this when torch is loaded, also in processes
# that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import forked
import pytest
import seeds
import tiers
import torch
import torch.distributed as dist
import worlds
from kernel_table import guarded
from skips import Skips
from xdist.scheduler import LoadScopeScheduling

from optimi_func.core import math
from optimi_func.core.rule import Scalars
from optimi_func.core.runtime import runtime
from optimi_func.execution import inductor, kernels, store

# Hundreds of kernels are compiled here, where a program has one or two.
inductor.PRECOMPILE_HEADERS = True
# So that Muon's steps are the same on all CPUs: test_gram.py asks for bfloat16.
math.multiplies_bfloat16 = lambda: False
# Tensors are small here: two threads, and two workers on two cores, would wait for each
# other most of the time. Tests of what threads share take the fixture `threads`.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        default=seeds.GATE,
        help="what decides all random draws, as a date does at night",
    )
    parser.addoption(
        "--rows",
        type=int,
        metavar="N",
        help="run N rows of soak of each test, drawn by the seed (default: all)",
    )


def pytest_report_header() -> list[str]:
    rows = "all rows" if tiers.rows is None else f"{tiers.rows} rows of each test"
    header = [f"--seed {seeds.text}: random draws; of soak {rows}"]
    if not torch.cuda.is_available():
        header.append("no CUDA: files that need it are not collected")
    return header


@pytest.hookimpl(tryfirst=True)  # before hypothesis, which gets its seed here
def pytest_configure(config: pytest.Config) -> None:
    """Set seeds, note which rows to build, and let GCC link with gold where there is one.

    The usual linker reads all symbols of libtorch for each kernel, for half as long as the
    kernel takes to compile. Processes that tests start find it, too.
    """
    tiers.selected, tiers.rows = config.option.markexpr, config.option.rows
    seeds.text = config.option.seed
    seeds.load_profile()
    if seeds.text != seeds.GATE:
        config.option.hypothesis_seed = str(seeds.number())
    config.pluginmanager.register(Skips())
    gold = shutil.which("ld.gold")
    if gold and "COMPILER_PATH" not in os.environ:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        (Path(folder.name) / "ld").symlink_to(gold)
        os.environ["COMPILER_PATH"] = folder.name
    # Compiled steps are kept for all workers, and away from the user's.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        kept = tempfile.TemporaryDirectory()
        config.add_cleanup(kept.cleanup)
        os.environ[store.VARIABLE] = kept.name


class ByFile(LoadScopeScheduling):
    """Gives each file to one worker, and to one all files that share something costly.

    What a worker compiles, starts or sets up for a file, it does once.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return tiers.shared_by(self.config.rootpath / path) or path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave alone files of which no test would run; importing some takes seconds."""
    if collection_path.is_dir() or not collection_path.name.startswith("test_"):
        return None
    return None if tiers.is_collected(collection_path, torch.cuda.is_available()) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seeds.load_profile()
    out = tiers.surplus(items)
    config.hook.pytest_deselected(items=[x for x in items if x.nodeid in out])
    items[:] = [x for x in items if x.nodeid not in out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to repeat a failure of a night: its draws are nobody else's."""
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if not failed or seeds.text == seeds.GATE:
        return
    terminalreporter.section("to repeat a failure")
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    hashes = os.environ.get("PYTHONHASHSEED", "random")
    command = f"PYTHONHASHSEED={hashes} {python} -m pytest -m '' --seed {seeds.text}"
    for test in dict.fromkeys(report.nodeid for report in failed):
        terminalreporter.write_line(f"{command} {shlex.quote(test)}")


def pytest_collectstart() -> None:
    """Imports of test files may draw tensors, and decorators read hypothesis's profile."""
    seeds.plant()
    seeds.load_profile()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Fixtures of a whole module may draw too, and are set up before `_seed`."""
    seeds.plant()


@pytest.fixture(autouse=True)
def _seed() -> None:
    seeds.plant()


@pytest.fixture(autouse=True)
def _compiles_what_is_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    if tiers.is_later(request.node):
        yield
        return
    with guarded(request.node.get_closest_marker("kernels") is not None):
        yield


@pytest.fixture(autouse=True, scope="module")
def _older_objects_rest() -> None:
    """The collector leaves alone what stood before a file's tests began.

    A full collection looks at the half million objects that torch and pytest have, which
    takes longer than most tests.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    worlds.stop()
    forked.stop()
    # Objects that rest are never freed: triton 3.9 reports its own as leaked at exit.
    gc.unfreeze()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch has, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def unkept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles what other tests have kept."""
    monkeypatch.setenv(store.VARIABLE, "0")


@pytest.fixture
def graphs(unkept: None):
    """Counts the graphs that Dynamo made since the test began."""
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that a process without any would compile. They run eagerly."""
    names: list[str] = []

    def made(key: kernels.KernelKey, scalars: Scalars):
        names.append(key.name)
        spec = torch.utils._pytree.tree_structure(scalars)
        body = kernels._body(key, spec, kernels.answers_before(key, scalars))
        return lambda *tensors: torch.no_grad()(body)(*tensors)

    monkeypatch.setattr(kernels, "_compile", made)
    monkeypatch.setattr(runtime, "kernels", {})
    return names
