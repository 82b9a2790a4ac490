"""Tests that several processes run at once: `@world(2)` above a test.

The processes of a size are started once, and wait for what to run next. What fails in one
of them ends all; the next test has new ones.
"""

import contextlib
import importlib
import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import forked
import pytest
import seeds
import torch
import torch.distributed as dist
from tiers import row

from optimi_func.core import math
from optimi_func.execution import inductor

# Seconds after which a world is given up: long after messages are, whose errors say where.
PATIENCE = 600.0


class World:
    """Processes of one group."""

    def __init__(self, size: int) -> None:
        store, self.is_whole = Path(tempfile.mkdtemp()) / "store", True
        pipes = [forked.context().Pipe() for _ in range(size)]
        self._ours = [ours for ours, _ in pipes]
        self._processes = [
            forked.start(_serve, theirs, rank, size, store)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for _, theirs in pipes:
            theirs.close()

    def run(self, order: tuple[str, str, dict[str, Any], str]) -> str:
        """Return what was raised by a function of a module, or nothing."""
        for ours in self._ours:
            ours.send(order)
        end, waiting = time.monotonic() + PATIENCE, list(self._ours)
        found = dict.fromkeys(range(len(waiting)), "did not finish")
        while waiting and (ready := wait(waiting, max(0.0, end - time.monotonic()))):
            for ours in ready:
                rank = self._ours.index(ours)
                waiting.remove(ours)
                try:
                    found[rank] = ours.recv()
                except EOFError:
                    self._processes[rank].join()
                    # One that ends itself, as a test may want it, has failed at nothing.
                    code, self.is_whole = self._processes[rank].exitcode, False
                    found[rank] = f"ended with {code}" if code else ""
        self.is_whole &= not any(found.values())
        size = len(found)
        return "\n".join(f"process {r} of {size}: {x}" for r, x in found.items() if x)

    def stop(self) -> None:
        for ours, process in zip(self._ours, self._processes):
            with contextlib.suppress(OSError):
                ours.send(None)
            process.join(10.0 if self.is_whole else 0.1)
            process.kill()
            process.join()
            ours.close()


def _serve(orders: Connection, rank: int, size: int, store: Path) -> None:
    torch.set_num_threads(1)
    math.multiplies_bfloat16 = lambda: False  # as in conftest.py
    inductor.PRECOMPILE_HEADERS = True
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE / 3), **where)
    while (order := orders.recv()) is not None:
        module, name, given, seeds.text = order
        try:
            found = getattr(importlib.import_module(module), name)
            seeds.plant()
            getattr(found, "body", found)(**given)
        except BaseException:
            orders.send(traceback.format_exc())
            os._exit(1)  # which those notice that wait for it
        orders.send("")
    dist.destroy_process_group()


_worlds: dict[int, World] = {}


def run(body: Callable[..., None], size: int, **given: Any) -> None:
    """Run a module's function in `size` processes, and fail as they do."""
    world = _worlds.pop(size, None) or World(size)
    text = world.run((body.__module__, body.__name__, given, seeds.text))
    if world.is_whole:
        _worlds[size] = world
    else:
        world.stop()
    if text:
        pytest.fail(text, pytrace=False)


def hand_over(
    first: Callable[[Path], None],
    then: Callable[[Path], None],
    sizes: tuple[int, int],
    folder: Path,
) -> None:
    """What so many processes leave in a folder, others go on from; one is this process."""
    for body, size in zip((first, then), sizes):
        if size == 1:
            body(folder)
        else:
            run(body, size, folder=folder)


def stop() -> None:
    while _worlds:
        _worlds.popitem()[1].stop()


def world(*sizes: int, full: Iterable[int] = (), soak: Iterable[int] = ()) -> Any:
    """Run a test in `size` processes, each of which runs its body.

    Args:
        sizes: How many processes there are in `make test`.
        full: And in `make test-full`.
        soak: And in `make soak`.
    """
    tiers = {"": sizes, "full": full, "soak": soak}
    rows = [row(n, id=f"{n}", tier=tier) for tier, ns in tiers.items() for n in ns]

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        def test(processes: int, **given: Any) -> None:
            run(body, processes, **given)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(body, name))
        own = inspect.Parameter("processes", inspect.Parameter.KEYWORD_ONLY)
        wanted = [*inspect.signature(body).parameters.values(), own]
        test.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        test.pytestmark = list(getattr(body, "pytestmark", []))  # type: ignore
        return pytest.mark.parametrize("processes", rows)(test)

    return decorated


# What is used inside


@contextlib.contextmanager
def raises(kind: type[BaseException], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Process 0 first: what it compiles, the others find in the cache."""
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


def gathered(x: Any) -> list[Any]:
    """What all processes have."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """Note the tensors that `all_reduce` is given."""
    sent: list[Any] = []
    send = dist.all_reduce

    def noting(x: Any, *given: Any, **how: Any) -> Any:
        sent.append(x)
        return send(x, *given, **how)

    dist.all_reduce = noting
    try:
        yield sent
    finally:
        dist.all_reduce = send
