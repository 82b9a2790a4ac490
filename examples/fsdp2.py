"""Train on several processes with fully_shard (FSDP2), and resume on any number of them.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --steps 60
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --steps 120

Every process holds a shard of each parameter and of its optimizer state, which are
DTensors; the optimizer's kernels see the local shards. With ``--release`` the step is fused
into backward: each shard is updated as soon as its gradient has been reduced and is freed
then, so that a process holds the gradients of a few blocks at a time. The norm by which
they are clipped is that of the whole model. With ``--muon`` the matrices of the hidden
layers follow Muon, and each is orthogonalized by one of the processes; the rest follows
AdamW, in one optimizer.

A checkpoint is a folder by torch.distributed.checkpoint, which is whole once its
``.metadata`` is there: the run goes on from the last whole one, among as many processes as
there are now. AdamW and Muon have a folder each. What is learned from depends on the step
alone, so that the resumed run ends as the uninterrupted one does.

The model is a small transformer that learns to copy a sequence of digits backwards; it
runs on CPU (gloo) or one CUDA device a process (nccl).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

from optimi_func import AdamW, Mixed, MuonAdamW, prepare_for_gradient_release

DIGITS, LENGTH = 10, 8


@dataclass(frozen=True)
class Config:
    """The settings of the run."""

    steps: int = 60
    batch: int = 64  # of all processes together
    width: int = 64
    layers: int = 2
    lr: float = 3e-3
    clip: float = 1.0
    every: int = 20  # steps between checkpoints
    release: bool = False
    muon: bool = False
    compile: bool | None = None
    folder: Path = Path("outputs/fsdp2/adamw")


class Net(nn.Module):
    """A transformer encoder: all positions see each other."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS, config.width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, config.width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                *(config.width, 4, 2 * config.width),
                dropout=0.0,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(config.layers)
        )
        self.head = nn.Linear(config.width, DIGITS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(x), dim=-1)


def build(config: Config, mesh: DeviceMesh) -> nn.Module:
    """The model, each block a unit that is gathered and freed by itself."""
    torch.manual_seed(0)
    model = Net(config).to(mesh.device_type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch_of(step: int, config: Config, mesh: DeviceMesh) -> Tensor:
    """This process's share of what a step learns from."""
    source = torch.Generator().manual_seed(step)
    x = torch.randint(DIGITS, (config.batch, LENGTH), generator=source)
    return x.chunk(mesh.size())[mesh.get_local_rank()].to(mesh.device_type)


def save(step: int, model: nn.Module, optimizer: AdamW | Mixed, config: Config) -> None:
    """Every process writes its shards."""
    weights, state = get_state_dict(model, optimizer)
    kept = {"model": weights, "optimizer": state}
    dcp.save(kept, checkpoint_id=config.folder / f"step {step}")


def resume(model: nn.Module, optimizer: AdamW | Mixed, config: Config) -> int:
    """Load the last whole checkpoint, if there is one; how many steps it has taken."""
    whole = [path.parent for path in config.folder.glob("step */.metadata")]
    if not whole:
        return 0
    last = max(whole, key=lambda path: int(path.name.removeprefix("step ")))
    # The state to load into: the optimizer makes it without taking a step.
    weights, state = get_state_dict(model, optimizer)
    kept = {"model": weights, "optimizer": state}
    try:
        dcp.load(kept, checkpoint_id=last)
    except dcp.api.CheckpointException as error:
        (reason, *_) = (str(e) for e, _ in error.failures.values())
        sys.exit(
            f"{last} does not fit this run: {reason.rstrip('.')}. Was it saved with other "
            "options (--muon, --quick)? Then pass another --folder"
        )
    set_state_dict(
        *(model, optimizer),
        model_state_dict=kept["model"],
        optim_state_dict=kept["optimizer"],
    )
    return int(last.name.removeprefix("step "))


def train(config: Config, mesh: DeviceMesh) -> float:
    """Run to the last step; the last loss over all processes."""
    model = build(config, mesh)
    optimizer: AdamW | Mixed
    if config.muon:
        optimizer = MuonAdamW(
            model,
            lr=config.lr,
            gradient_release=config.release,
            compile=config.compile,
        )
    else:
        optimizer = AdamW(
            model.named_parameters(),
            lr=config.lr,
            gradient_release=config.release,
            compile=config.compile,
        )
    # After fully_shard, which replaces the parameters.
    handle = (
        prepare_for_gradient_release(model, optimizer, clip_global_norm=config.clip)
        if config.release
        else None
    )
    begin, first = resume(model, optimizer, config), mesh.get_rank() == 0
    mean = torch.full((), float("nan"))
    steps = range(begin, config.steps)
    for step in tqdm(steps, initial=begin, total=config.steps, disable=not first):
        x = batch_of(step, config, mesh)

        def loss_of(x: Tensor = x) -> Tensor:
            return F.nll_loss(model(x).flatten(0, 1), x.flip(1).flatten())

        if handle is not None:
            loss = handle.backward(loss_of)
        else:
            loss = loss_of()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        if (step + 1) % config.every == 0:
            save(step + 1, model, optimizer, config)
    if first:
        print(f"{mesh.size()} processes: steps {begin} to {config.steps}, loss {mean:.6f}")
    return mean.item()


def parse(arguments: Sequence[str] | None) -> Config:
    """The command line."""
    usual = Config()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--batch", type=int, default=usual.batch)
    parser.add_argument("--every", type=int, default=usual.every, help="save so often")
    parser.add_argument("--folder", type=Path, help="default: outputs/fsdp2/<rule>")
    parser.add_argument("--release", action="store_true", help="step within backward")
    parser.add_argument("--muon", action="store_true", help="for the hidden matrices")
    parser.add_argument("--no-compile", action="store_true", help="step eagerly")
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    given = parser.parse_args(arguments)
    return Config(
        steps=given.steps,
        batch=given.batch,
        width=16 if given.quick else usual.width,
        layers=1 if given.quick else usual.layers,
        every=given.every,
        release=given.release,
        muon=given.muon,
        compile=False if given.no_compile else None,
        folder=given.folder or usual.folder.with_name("muon" if given.muon else "adamw"),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    config = parse(arguments)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        train(config, init_device_mesh(kind, (dist.get_world_size(),)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
