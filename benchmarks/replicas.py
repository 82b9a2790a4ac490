"""What do replicas cost beside their parameters and optimizer state?

Two processes on this machine (gloo, one thread each) train the same model of linear layers:

* ``DDP, step()``: DistributedDataParallel and the ordinary step, also with
  ``gradient_as_bucket_view=True``;
* ``DDP, torch in backward``: torch's ``_apply_optimizer_in_backward``, which is private and
  steps in DistributedDataParallel's hooks. On CPU it asks for a stream, and gets a stub;
* ``DDP, ZeroRedundancyOptimizer``: torch's, with its fused AdamW, has each process step a
  half of the parameters and send them, too;
* ``release on replicas``: ``prepare_for_gradient_release(..., process_group=...)``;
* ``fully_shard``: each process holds a half of parameters and state; with and without
  release, also on a mesh of (2, 1), which is replicas again (HSDP).

Memory is counted in malloc, in all threads (peak.c, which needs a C compiler): the peak of
the third step above parameters and state, as a share of the bytes of all gradients, and
what stays after it. Time is that of whole steps between barriers; the ways take turns.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Found, option
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optimi_func import AdamW, prepare_for_gradient_release

Step = Callable[[Tensor], None]


@dataclass(frozen=True)
class Config(harness.Timed):
    width: int = option(256, "of the model; a block has 8 times its square")
    blocks: int = option(8, "of the model")
    rows: int = option(64, "of a process's batch, where time is measured")
    bucket: float = option(1.0, "MiB of a bucket")
    compile: bool | None = option(None, "optimi_func's steps; by default if possible")


QUICK: Found = {"width": 64, "bucket": 0.1, "rounds": 5, "seconds": 1.0, "warmup": 1}
REFERENCE = "DDP, torch fused step()"
OURS = "release on replicas"


class Blocks(nn.Module):
    """Residual blocks, each with a norm and biases."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        width = config.width
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(config.blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def training(model: nn.Module, after: Callable[[], Any] = int) -> Step:
    """A step: forward, backward, and what comes after."""

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        after()

    return step


def ended(model: nn.Module, optimizer: Any) -> Step:
    """Train with the ordinary step."""
    return training(model, lambda: (optimizer.step(), optimizer.zero_grad()))


def adamw(model: nn.Module, config: Config, release: bool) -> AdamW:
    named = model.named_parameters()
    return AdamW(named, lr=1e-4, gradient_release=release, compile=config.compile)


def one(config: Config, release: bool) -> Step:
    model = Blocks(config)
    optimizer = adamw(model, config, release)
    if not release:
        return ended(model, optimizer)
    handle = prepare_for_gradient_release(model, optimizer)
    return training(model, lambda: handle)


def ddp(config: Config, view: bool = False, fused: bool = False) -> Step:
    inner = Blocks(config)
    options: dict[str, Any] = {"gradient_as_bucket_view": view}
    model = DistributedDataParallel(inner, bucket_cap_mb=config.bucket, **options)
    if fused:
        return ended(model, torch.optim.AdamW(inner.parameters(), lr=1e-4, fused=True))
    return ended(model, adamw(inner, config, False))


def torchs_zero(config: Config) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    inner = Blocks(config)
    model = DistributedDataParallel(inner, bucket_cap_mb=config.bucket)
    how: dict[str, Any] = {"optimizer_class": torch.optim.AdamW, "fused": True}
    return ended(model, ZeroRedundancyOptimizer(inner.parameters(), lr=1e-4, **how))


def torch_in_backward(config: Config) -> Step:
    from torch.distributed.optim import _apply_optimizer_in_backward

    class Stream:
        def wait_stream(self, other: Any) -> None:
            """Nothing is asynchronous on CPU."""

    torch.accelerator.current_stream = lambda *_: Stream()
    inner = Blocks(config)
    options = {"lr": 1e-4, "fused": True}
    _apply_optimizer_in_backward(torch.optim.AdamW, inner.parameters(), options)
    return training(DistributedDataParallel(inner, bucket_cap_mb=config.bucket))


def replicas(config: Config) -> Step:
    model = Blocks(config)
    how: dict[str, Any] = {"gradient_release": True, "compile": config.compile}
    handle = prepare_for_gradient_release(
        model,
        AdamW(model.named_parameters(), lr=1e-4, **how),
        process_group=dist.group.WORLD,
        bucket_cap_mb=config.bucket,
    )
    return training(model, lambda: handle)


def sharded(config: Config, release: bool, hybrid: bool = False) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    shape = (size, 1) if hybrid else (size,)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = Blocks(config)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = adamw(model, config, release)
    if not release:
        return ended(model, optimizer)
    handle = prepare_for_gradient_release(model, optimizer)
    return training(model, lambda: handle)


# How each is made, and the share of parameters and state that a process holds.
WAYS: dict[str, tuple[Callable[[Config], Step], float]] = {
    "one process, step()": (lambda c: one(c, False), 1.0),
    "one process, release": (lambda c: one(c, True), 1.0),
    "DDP, step()": (lambda c: ddp(c), 1.0),
    "DDP, step(), bucket views": (lambda c: ddp(c, view=True), 1.0),
    "DDP, ZeroRedundancyOptimizer": (torchs_zero, 2 / 3),
    "DDP, torch in backward": (torch_in_backward, 1.0),
    OURS: (replicas, 1.0),
    "fully_shard, step()": (lambda c: sharded(c, False), 0.5),
    "fully_shard, release": (lambda c: sharded(c, True), 0.5),
    "fully_shard (2, 1), step()": (lambda c: sharded(c, False, True), 1.0),
    "fully_shard (2, 1), release": (lambda c: sharded(c, True, True), 1.0),
}
TIMED: dict[str, Callable[[Config], Step]] = {
    REFERENCE: lambda c: ddp(c, fused=True),
    "DDP, step()": lambda c: ddp(c),
    "DDP, ZeroRedundancyOptimizer": torchs_zero,
    "DDP, torch in backward": torch_in_backward,
    OURS: replicas,
}


def peaks(way: str, config: Config) -> Found:
    """Peak of the third step above parameters and state, and what stays, in gradients."""
    counter = ctypes.CDLL(None)
    for name in ("live_bytes", "peak_bytes"):
        getattr(counter, name).restype = ctypes.c_long
    x = torch.randn(8, config.width)
    make, share = WAYS[way]
    gradients = sum(p.nbytes for p in Blocks(config).parameters())
    make(config)(x)  # what a process allocates once
    gc.collect()
    base = counter.live_bytes() + 3 * share * gradients
    step = make(config)
    for _ in range(3):
        counter.reset_peak()
        step(x)
        peak = counter.peak_bytes()
        dist.barrier()
    return {
        "peak": (peak - base) / gradients,
        "stays": (counter.live_bytes() - base) / gradients,
    }


def times(_: str, config: Config) -> harness.Seconds:
    """Seconds of each way's steps, as this process sees them."""
    steps = {name: make(config) for name, make in TIMED.items()}
    x = torch.randn(config.rows, config.width)
    seconds: harness.Seconds = {name: [] for name in steps}
    until = float("inf")
    for i in range(config.warmup + config.rounds):
        # All processes stop at once.
        end = torch.tensor(float(i >= config.warmup + 5 and time.time() > until))
        dist.broadcast(end, 0)
        if end:
            break
        if i == config.warmup:
            until = time.time() + config.seconds
        names = list(steps)[i % len(steps) :] + list(steps)[: i % len(steps)]
        for name in names:
            dist.barrier()
            began = time.perf_counter()
            steps[name](x)
            dist.barrier()
            if i >= config.warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def worker(question: str, way: str, number: str, store: str, given: str) -> None:
    """Answer a question in one of the processes, and print it in the first."""
    torch.set_num_threads(1)
    rank = int(number)
    config = Config(**json.loads(given))
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **where)
    answer = {"peaks": peaks, "times": times}[question](way, config)
    dist.barrier()
    if rank == 0:
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # at exit, torch's threads sometimes end the process with an error


def asked(question: str, way: str, config: Config, preload: str = "") -> Any:
    """The answer of two new processes."""
    code = "import sys, replicas; replicas.worker(*sys.argv[1:])"
    paths = [
        Path(__file__).parent,
        Path(__file__).parents[1],
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    environment |= {"LD_PRELOAD": preload} if preload else {}
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-W", "ignore", "-c", code, question, way]
        more = [f"{folder}/store", json.dumps(asdict(config))]
        how: dict[str, Any] = {"env": os.environ | environment, "stdout": subprocess.PIPE}
        processes = [
            subprocess.Popen([*run, str(rank), *more], text=True, **how)
            for rank in range(2)
        ]
        texts = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), (question, way)
    return json.loads(texts[0].splitlines()[-1])


def measure(config: Config) -> Found:
    """Bytes by way, and ratios of time."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/peak.so"
        source = str(Path(__file__).with_name("peak.c"))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        memory = {way: asked("peaks", way, config, library) for way in WAYS}
    seconds = asked("times", "", config)
    return {
        "memory": memory,
        "time": {k: asdict(v) for k, v in harness.ratios(seconds, REFERENCE).items()},
    }


def report(found: Found) -> str:
    """A table of bytes, and one of time."""
    rows = [["beside parameters and state, in gradients", "peak of a step", "stays after"]]
    for way, cell in found["memory"].items():
        rows.append([way, f"{cell['peak']:.2f}", f"{abs(cell['stays']):.2f}"])
    timed = [["whole step", "ms", f"time / {REFERENCE}"]]
    for way, cell in found["time"].items():
        timed.append([way, harness.milliseconds(cell), harness.text(cell)])
    return f"{harness.table(rows)}\n\n{harness.table(timed)}"


def draw(found: Found) -> Axes:
    """A bar each way."""
    axes, other = harness.axes_of("Replicas", columns=2, figsize=(12, 5))
    memory = {way: {"": cell["peak"]} for way, cell in found["memory"].items()}
    harness.bars(axes, memory)
    harness.bars(other, {way: {"": cell} for way, cell in found["time"].items()})
    for some, label in ((axes, "peak / bytes of the gradients"), (other, "time")):
        some.set_ylabel(label)
        some.tick_params(axis="x", rotation=60)
    return axes


def main() -> None:
    harness.main(__file__, __doc__ or "", Config, QUICK, measure, report, draw)


if __name__ == "__main__":
    main()
