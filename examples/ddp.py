"""Train the same model in several processes, with and without gradient release, and resume.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --release

Every process holds the whole model and its optimizer state, and learns from its share of
each batch. Without ``--release`` DistributedDataParallel averages gradients and keeps them
in its buckets. With ``--release`` the plain module is prepared with ``process_group=``, and
its buckets are averaged during backward, applied and freed. Both take the same steps, each
of two micro-batches.

The first process writes the checkpoint, and all load it. Both ways load what either has
written. What is learned from depends on the step alone, so that a resumed run ends as the
uninterrupted one does. It runs on CPU (gloo) or one CUDA device a process (nccl).
"""

import argparse
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optimi_func import AdamW, prepare_for_gradient_release


@dataclass(frozen=True)
class Config:
    """The settings of the run."""

    steps: int = 60
    batch: int = 32  # of a micro-batch, of all processes together
    width: int = 128
    lr: float = 3e-3
    every: int = 20  # steps between checkpoints
    release: bool = False
    compile: bool | None = None
    file: Path = Path("outputs/ddp/run.pt")


def micro_batch(step: int, k: int, config: Config) -> tuple[Tensor, Tensor]:
    """Return this process's share of one of the step's micro-batches."""
    source = torch.Generator().manual_seed(2 * step + k)
    x = torch.randn(config.batch, 16, generator=source)
    y = torch.sin(3 * x).cumsum(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    return x.chunk(size)[rank], y.chunk(size)[rank]


def train(config: Config, device: torch.device) -> float:
    """Run to the last step, and return the mean of the last losses."""
    torch.manual_seed(dist.get_rank())  # the first process's weights are everyone's
    width = config.width
    model = nn.Sequential(
        *(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU()),
        nn.Linear(width, 16),
    ).to(device)
    optimizer = AdamW(
        model.named_parameters(),
        lr=config.lr,
        gradient_release=config.release,
        compile=config.compile,
    )
    begin = 0
    if config.file.exists():
        kept = torch.load(config.file, map_location=device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        begin = kept["step"]
    # After loading: that states are equal everywhere is checked.
    if config.release:
        handle = prepare_for_gradient_release(
            model, optimizer, process_group=dist.group.WORLD
        )
        called, no_sync = model, handle.no_sync
    else:
        called = DistributedDataParallel(model)
        no_sync = called.no_sync
    mean = torch.full((), float("nan"), device=device)
    for step in range(begin, config.steps):
        mean = torch.zeros((), device=device)
        for k in range(2):
            x, y = (part.to(device) for part in micro_batch(step, k, config))
            with no_sync() if k == 0 else contextlib.nullcontext():
                loss = (called(x) - y).square().mean() / 2
                loss.backward()
            mean += loss.detach() / dist.get_world_size()
        optimizer.step()  # under release the second backward has taken it
        optimizer.zero_grad()
        dist.all_reduce(mean)
        if (step + 1) % config.every == 0 and dist.get_rank() == 0:
            save(step + 1, model, optimizer, config)
    dist.barrier()  # before anyone looks for the checkpoint again
    if dist.get_rank() == 0:
        size = dist.get_world_size()
        print(f"{size} processes: steps {begin} to {config.steps}, loss {mean:.6f}")
    return mean.item()


def save(step: int, model: nn.Module, optimizer: AdamW, config: Config) -> None:
    """Write a checkpoint that is whole or not there."""
    config.file.parent.mkdir(parents=True, exist_ok=True)
    part = config.file.with_suffix(".part")
    kept = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(kept, part)
    part.replace(config.file)


def main(arguments: Sequence[str] | None = None) -> None:
    usual = Config()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--every", type=int, default=usual.every, help="save so often")
    parser.add_argument("--file", type=Path, default=usual.file, help="the checkpoint")
    parser.add_argument("--release", action="store_true", help="step within backward")
    parser.add_argument("--no-compile", action="store_true", help="step eagerly")
    given = parser.parse_args(arguments)
    config = Config(
        steps=given.steps,
        every=given.every,
        file=given.file,
        release=given.release,
        compile=False if given.no_compile else None,
    )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        train(config, torch.device(device))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
