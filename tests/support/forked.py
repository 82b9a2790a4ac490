"""Processes that begin with torch already imported.

A new interpreter takes seconds to import torch and its compiler, most of what a short
script takes. Here one process imports them, and each script runs in a fork of it: a process
of its own, with nothing done yet.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "matplotlib.pyplot",
    "tqdm",
]
Variables = Mapping[str, str]


def context() -> ForkServerContext:
    """Starts processes; one set of imports serves all that a test process starts."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOADED)
    return found


def stop() -> None:
    """End what processes are forked from; its time then counts as that of the tests."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def start(function: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Call a function in a new process, which ends with this one."""
    process = context().Process(target=function, args=args, daemon=True)
    process.start()
    return process


def run_script(
    path: Path,
    *options: str,
    strict: bool = True,
    environment: Variables | None = None,
    count: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """As ``python path options``, in a fork.

    Args:
        path: The script.
        options: Its command line.
        strict: Whether its warnings are errors, as with ``-W error``.
        environment: Variables to set.
        count: How many processes, with what torchrun sets for each; None: one, without.

    Returns:
        The first exit status that is not 0, and what all of them wrote.
    """
    variables = [environment or {}] if count is None else torchrun(count)
    with tempfile.TemporaryDirectory() as folder:
        processes, texts = [], []
        for rank, own in enumerate(variables):
            out, err = (Path(folder) / f"{name} {rank}" for name in ("out", "err"))
            texts.append((out, err))
            processes.append(start(_run, path, options, strict, own, out, err))
        for process in processes:
            process.join()
        status = next((p.exitcode for p in processes if p.exitcode), 0)
        out, err = ("".join(x.read_text() for x in files) for files in zip(*texts))
    return subprocess.CompletedProcess([str(path), *options], status, out, err)


def torchrun(count: int) -> list[Variables]:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    group |= {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [{**group, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]


def _run(
    path: Path,
    options: Sequence[str],
    strict: bool,
    variables: Variables,
    out: Path,
    err: Path,
) -> None:
    for stream, file in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        with file.open("w") as opened:
            os.dup2(opened.fileno(), stream.fileno())
    os.environ.update(variables)
    if "OMP_NUM_THREADS" in variables:  # which OpenMP has read
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    if strict:
        warnings.simplefilter("error")
    sys.argv = [str(path), *options]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
