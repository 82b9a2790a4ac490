"""Pretrain a language model on several processes: the whole recipe in one program.

    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --steps 200
    torchrun --standalone --nproc-per-node 1 examples/pretrain.py --steps 300

The second command goes on where the first ended, with another number of processes. The
recipe: fully_shard (or ``--replicas``: DistributedDataParallel), Muon for the hidden
matrices and AdamW for the rest, a warmup, a constant phase and a decay (WSD), accumulation,
clipping, whole steps skipped if a gradient is not finite, an average of the weights (EMA)
to evaluate with, norms of gradients and updates in a log, and checkpoints by
torch.distributed.checkpoint.

What is learned from depends on the step alone, so that a resumed run ends as the
uninterrupted one does. The text is made up: each token follows from the two before it, with
noise. It runs on CPU (gloo) or one CUDA device a process (nccl).
"""

import argparse
import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from optimi_func import EMA, Mixed, MuonAdamW, Stats, schedules

TOKENS, LENGTH = 32, 32


@dataclass(frozen=True)
class Config:
    """The settings of the run."""

    steps: int = 200
    length: int = 300  # steps of the whole schedule
    batch: int = 16  # sequences of a micro-batch, of all processes together
    parts: int = 2  # micro-batches of a step
    width: int = 64
    layers: int = 2
    lr: float = 1e-2  # of matrices
    adamw_lr: float = 3e-3  # of the rest
    clip: float = 1.0
    decay: float = 0.95  # of the average
    log: int = 10  # steps between lines of the log
    every: int = 50  # steps between checkpoints
    replicas: bool = False
    compile: bool | None = None
    folder: Path = Path("outputs/pretrain")


class GPT(nn.Module):
    """A causal transformer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, config.width)
        self.positions = nn.Embedding(LENGTH, config.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                *(config.width, 4, 4 * config.width),
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, TOKENS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.lm_head(self.norm(h))


def text(seed: int, count: int) -> Tensor:
    """Sequences of which each token follows from the two before it, three times in four."""
    source = torch.Generator().manual_seed(seed)
    rows = torch.randint(TOKENS, (count, LENGTH + 1), generator=source)
    sure = torch.rand(count, LENGTH + 1, generator=source) < 0.75
    for i in range(2, LENGTH + 1):
        follows = (3 * rows[:, i - 1] + rows[:, i - 2]) % TOKENS
        rows[:, i] = torch.where(sure[:, i], follows, rows[:, i])
    return rows


class Run:
    """Model, optimizer, schedule and average of one run: made in this order."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        self.config, self.mesh = config, mesh
        torch.manual_seed(0)
        model = GPT(config).to(mesh.device_type)
        how: dict[str, Any] = {"compile": config.compile, "skip_nonfinite": "step"}
        if config.replicas:
            self.model: Any = DistributedDataParallel(model)
            how["process_group"] = dist.group.WORLD
        else:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        # After fully_shard, which replaces the parameters.
        self.optimizer: Mixed = MuonAdamW(
            model, lr=config.lr, adamw_lr=config.adamw_lr, weight_decay=0.1, **how
        )
        warm, total = max(config.length // 10, 1), config.length
        factor = schedules.wsd(
            1.0, warmup=warm, total=total, decay=max(total // 5, 1), start=1 / warm
        )
        self.schedule = LambdaLR(self.optimizer, lambda step: float(factor(step)))
        self.average = EMA(self.optimizer, config.decay)
        self.measured = Stats(self.optimizer)
        self.step = 0

    def parts(self) -> dict[str, Any]:
        """Return all that a checkpoint keeps, in tensors to load into."""
        # The state to load into: the optimizer makes it without taking a step.
        model, optimizer = get_state_dict(self.model, self.optimizer)
        kept = {
            "model": model,
            "optimizer": optimizer,
            "average": self.average.state_dict(),
        }
        return {**kept, "schedule": self.schedule.state_dict(), "step": self.step}

    def save(self) -> None:
        dcp.save(self.parts(), checkpoint_id=self.config.folder / f"step {self.step}")

    def resume(self) -> None:
        """Go on from the last whole checkpoint, if there is one."""
        whole = [path.parent for path in self.config.folder.glob("step */.metadata")]
        if not whole:
            return
        kept = self.parts()
        last = max(whole, key=lambda path: int(path.name.removeprefix("step ")))
        dcp.load(kept, checkpoint_id=last)
        set_state_dict(
            *(self.model, self.optimizer),
            model_state_dict=kept["model"],
            optim_state_dict=kept["optimizer"],
        )
        self.average.load_state_dict(kept["average"])
        self.schedule.load_state_dict(kept["schedule"])
        self.step = kept["step"]

    def loss(self, seed: int) -> Tensor:
        """Return the loss of this process's share of a batch."""
        rows = text(seed, self.config.batch).chunk(self.mesh.size())
        x = rows[self.mesh.get_local_rank()].to(self.mesh.device_type)
        return F.cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def backward(self) -> Tensor:
        """Add up the gradients of a step, and return the mean loss of all processes."""
        total, parts = torch.zeros((), device=self.mesh.device_type), self.config.parts
        for k in range(parts):
            last = k == parts - 1
            alone = contextlib.nullcontext()
            if self.config.replicas:
                alone = alone if last else self.model.no_sync()
            else:  # gradients are reduced once, with the last micro-batch
                self.model.set_requires_gradient_sync(last)
            with alone:
                loss = self.loss(self.step * parts + k) / parts
                loss.backward()
            total += loss.detach() / self.mesh.size()
        dist.all_reduce(total)
        return total

    def take(self) -> tuple[Tensor, Tensor]:
        """Take a step, and return its loss and the norm of its gradients."""
        loss = self.backward()
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.average.update()
        self.step += 1
        return loss, norm if self.config.replicas else norm.full_tensor()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss of the averaged weights on text that is never trained on."""
        self.model.eval()
        with self.average.applied():
            losses = [self.loss(-1 - k) for k in range(2)]
        self.model.train()
        loss = torch.stack(losses).mean() / self.mesh.size()
        dist.all_reduce(loss)
        return loss.item()


def train(config: Config, mesh: DeviceMesh) -> None:
    """Run to the last step; log, evaluate and save on the way."""
    run, first = Run(config, mesh), mesh.get_rank() == 0
    run.resume()
    begin = run.step
    config.folder.mkdir(parents=True, exist_ok=True)
    bar = tqdm(initial=begin, total=config.steps, disable=not first)
    loss = torch.full((), math.nan)
    while run.step < config.steps:
        logged = (run.step + 1) % config.log == 0
        run.measured.track(logged)
        loss, norm = run.take()
        bar.update()
        if logged:
            found = run.measured.stats()  # in all processes: it sends a message
            row = {"step": run.step, "loss": loss.item(), "norm before clip": norm.item()}
            row |= {
                f"{k}/{name}": x for k, part in found.items() for name, x in part.items()
            }
            row["skipped steps"] = int(run.optimizer.skipped_steps)
            bar.set_postfix(loss=f"{row['loss']:.3f}", lr=f"{found['0 muon']['lr']:.1e}")
            if first:
                with (config.folder / "log.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
        if run.step % config.every == 0 or run.step == config.steps:
            run.save()
    average = run.evaluate()
    if first:
        print(
            f"{mesh.size()} processes: steps {begin} to {run.step}, "
            f"loss {loss.item():.6f}, of the average {average:.6f}"
        )


def parse(arguments: Sequence[str] | None) -> Config:
    """The command line."""
    usual = Config()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=usual.steps, help="stop here")
    parser.add_argument("--length", type=int, default=usual.length, help="of the schedule")
    parser.add_argument("--log-every", type=int, default=usual.log, help="log so often")
    parser.add_argument("--every", type=int, default=usual.every, help="save so often")
    parser.add_argument("--folder", type=Path, default=usual.folder)
    parser.add_argument("--replicas", action="store_true", help="not fully_shard")
    parser.add_argument("--no-compile", action="store_true", help="step eagerly")
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    given = parser.parse_args(arguments)
    return Config(
        steps=given.steps,
        length=given.length,
        width=16 if given.quick else usual.width,
        layers=1 if given.quick else usual.layers,
        log=given.log_every,
        every=given.every,
        replicas=given.replicas,
        compile=False if given.no_compile else None,
        folder=given.folder,
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
