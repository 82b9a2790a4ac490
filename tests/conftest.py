"""What all tests share."""

import gc
import os
import shutil
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
import tiers
import torch
import torch.distributed as dist
import worlds
from kernel_table import guarded
from xdist.scheduler import LoadScopeScheduling

from optimi_func.core import math
from optimi_func.execution import inductor, store

# Hundreds of kernels are compiled here, where a program has one or two.
inductor.PRECOMPILE_HEADERS = True
# So that Muon's steps are the same on all CPUs: test_gram.py asks for bfloat16.
math.multiplies_bfloat16 = lambda: False
# Tensors are small here: two threads, and two workers on two cores, would wait for each
# other most of the time. Tests of what threads share take the fixture `threads`.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rows",
        metavar="SEED",
        default="",
        help="of soak's largest tables, the sample of another commit; all: every row",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    if tiers.seed == tiers.ALL_ROWS:
        return []
    return [f"soak's largest tables: --rows {tiers.seed} repeats this choice of rows"]


def pytest_configure(config: pytest.Config) -> None:
    """Note which rows to build, and let GCC link with gold where there is one.

    The usual linker reads all symbols of libtorch for each kernel, for half as long as the
    kernel takes to compile. Processes that tests start find it, too.
    """
    tiers.selected = config.option.markexpr
    if tiers.selected == "soak" and not config.option.rows:
        config.option.rows = tiers.seed_of(config.rootpath)  # which xdist's workers get
    tiers.seed = config.option.rows or tiers.ALL_ROWS
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


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
