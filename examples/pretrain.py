"""Pretrain a language model on any number of processes: the whole recipe in one program.

    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --steps 200
    torchrun --standalone --nproc-per-node 3 examples/pretrain.py --steps 300

The second goes on where the first ended, or where SIGTERM stopped it. Weights are bfloat16
with Kahan summation, on shards; Muon has the hidden matrices and AdamW the rest. The loss
is the mean over all tokens of a step, whichever process has them. Checkpoints are written
while training goes on, and log.jsonl has a line a step. It runs on CPU or on CUDA.
"""

import argparse
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from optimi_func import EMA, MuonAdamW, schedules

WIDTH, LAYERS, TOKENS, LENGTH = 64, 2, 32, 32
NOTHING = -100  # a target that cross_entropy leaves out


class GPT(nn.Module):
    """A causal transformer, whose blocks keep nothing but their inputs for backward."""

    def __init__(self) -> None:
        super().__init__()
        how: Any = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        made = (
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **how) for _ in range(LAYERS)
        )
        self.tokens, self.positions = (nn.Embedding(n, WIDTH) for n in (TOKENS, LENGTH))
        self.blocks, self.norm = nn.ModuleList(made), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        h: Any = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            h = checkpoint(block, h, mask, is_causal=True, use_reentrant=False)
        return self.lm_head(self.norm(h))


def text(numbers: range) -> Tensor:
    """Return sequences by number, of all lengths: tokens in equal steps, to be guessed."""
    sources = [torch.Generator().manual_seed(n) for n in numbers]
    drawn = [torch.randint(TOKENS, (3, 1), generator=x) for x in sources]
    (start, step, end), at = torch.stack(drawn, dim=1), torch.arange(LENGTH + 1)
    return ((start + step * at) % TOKENS).masked_fill(at > end + 2, NOTHING)


class Run:
    """Model, optimizer, schedule and average of one run: made in this order."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.args, self.device = args, mesh.device_type
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        torch.manual_seed(0)
        dtype = torch.float32 if args.float32 else torch.bfloat16
        model = GPT().to(self.device, dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model.blocks:
            if args.compile_blocks:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        # After fully_shard, which replaces the parameters.
        how: Any = {"weight_decay": 0.1, "skip_nonfinite": "step"}
        how |= {"compile": False if args.no_compile else None}
        # Where the CPU has bfloat16 instructions, Muon would iterate in bfloat16.
        how |= {"ns_dtype": "float32"} if args.float32 else {}
        self.optimizer = MuonAdamW(model, lr=1e-2, adamw_lr=3e-3, **how)
        end = args.length
        factor = schedules.wsd(1.0, warmup=end // 10, total=end, decay=end // 5, start=0.1)
        self.schedule = LambdaLR(self.optimizer, lambda step: float(factor(step)))
        self.average = EMA(self.optimizer, 0.95)  # debiased: without the first weights
        self.step = self.position = 0  # steps taken, and sequences read
        self.kept = {"run": self, "average": self.average, "schedule": self.schedule}
        self.background, self.saving = dist.new_group(backend="gloo"), None  # for saves
        self.asked = self.stop = False  # by a signal to this process, and of all
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; dcp loads into it before load_state_dict."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        kept = {"model": model, "optimizer": optimizer}
        return {**kept, "step": self.step, "position": self.position}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        states = {"model_state_dict": kept["model"], "optim_state_dict": kept["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states)
        self.step, self.position = kept["step"], kept["position"]

    def save(self) -> None:
        """Begin to write a checkpoint. The next steps are taken meanwhile."""
        self.finish(wait=True)
        path, group = self.args.folder / f"step {self.step:08}", self.background
        made: Any = dcp.async_save(self.kept, checkpoint_id=path, process_group=group)
        self.saving = path, made

    def finish(self, wait: bool) -> None:
        """Name a checkpoint as the latest once it is whole, and remove old ones."""
        if self.saving is None or not (wait or self.saving[1].done()):
            return
        (path, made), self.saving = self.saving, None
        made.result()  # raises what kept it from being written
        if self.rank == 0:  # which has heard from all that their shards are written
            new = path.with_name("latest.new")
            new.write_text(path.name)
            new.replace(path.with_name("latest"))  # at once: never half a name
            older = sorted(x for x in path.parent.glob("step *") if x.name <= path.name)
            for old in older[: -self.args.keep]:
                shutil.rmtree(old)

    def loss(self, rows: Tensor) -> Tensor:
        """Return the sum over all tokens that follow others."""
        x, y = rows[:, :-1].clamp(min=0).to(self.device), rows[:, 1:].to(self.device)
        logits = self.model(x).float().mT
        return F.cross_entropy(logits, y, ignore_index=NOTHING, reduction="sum")

    def take(self) -> dict[str, Any]:
        """Take a step; return its line of the log."""
        starts = [self.position + k * self.args.batch for k in range(self.args.parts)]
        self.position = starts[-1] + self.args.batch
        parts = [text(range(x + self.rank, x + self.args.batch, self.size)) for x in starts]
        tokens = sum(int((rows[:, 1:] != NOTHING).sum()) for rows in parts)
        told = torch.tensor([tokens, self.asked])  # on CPU, where it is read
        dist.all_reduce(told)  # Who is asked to stop stops all, after the same step.
        tokens, self.stop = int(told[0]), bool(told[1])
        total = torch.zeros((), device=self.device)
        for rows in parts:
            # Gradients are sent once, with the last micro-batch.
            self.model.set_requires_gradient_sync(rows is parts[-1])
            loss = self.loss(rows) / tokens
            (loss * self.size).backward()  # fully_shard divides by the number of processes
            total += loss.detach()
        dist.all_reduce(total)
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.average.update()
        self.step += 1
        row = {"step": self.step, "loss": total.item(), "tokens": tokens}
        row |= {"norm before clip": norm.full_tensor().item()}
        return row | {"skipped steps": int(self.optimizer.skipped_steps)}

    def evaluate(self) -> float:
        """Return the loss of the averaged weights on text that is never trained on."""
        rows = text(range(-self.args.batch, 0))  # the same in all processes
        with torch.no_grad(), self.average.applied():
            return self.loss(rows).item() / int((rows[:, 1:] != NOTHING).sum())


def train(args: argparse.Namespace, mesh: DeviceMesh) -> None:
    """Go on to the last step; log and save on the way."""
    run, row = Run(args, mesh), {"loss": float("nan")}
    args.folder.mkdir(parents=True, exist_ok=True)
    if (latest := args.folder / "latest").exists():
        dcp.load(run.kept, checkpoint_id=args.folder / latest.read_text())
    begin, bar = run.step, tqdm(total=args.steps, initial=run.step, disable=run.rank > 0)
    while run.step < args.steps and not run.stop:
        row = run.take()
        bar.update()
        if run.rank == 0:
            with (args.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
        if run.step % args.every == 0 or run.step == args.steps or run.stop:
            run.save()
        run.finish(wait=False)
    run.finish(wait=True)
    said = f"loss {row['loss']:.6f}, of the average {run.evaluate():.6f}"
    if run.rank == 0:
        print(f"{run.size} processes: steps {begin} to {run.step}, {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual, means in (
        ("steps", 200, "stop here"),
        ("length", 300, "steps of the whole schedule"),
        ("batch", 16, "sequences of a micro-batch, of all processes together"),
        ("parts", 2, "micro-batches of a step"),
        ("every", 50, "steps between checkpoints"),
        ("keep", 2, "checkpoints that stay"),
        ("folder", Path("outputs/pretrain"), "of checkpoints and log"),
        ("float32", False, "weights and computation, in place of bfloat16"),
        ("compile-blocks", False, "forward and backward of blocks by torch.compile"),
        ("no-compile", False, "step eagerly"),
    ):
        kind: Any = {"type": type(usual)} if usual else {"action": "store_true"}
        parser.add_argument(f"--{name}", default=usual, help=means, **kind)
    args, size = parser.parse_args(), int(os.environ["WORLD_SIZE"])
    if size > args.batch:  # Each needs a sequence. Shares may differ by one.
        parser.error(f"--batch {args.batch}: allowed are as many as processes, {size}")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    train(args, init_device_mesh(kind, (size,)))  # which makes the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
