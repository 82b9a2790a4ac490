"""A recipe as torchtune writes them: a loop by hand, the optimizer in backward.

bfloat16 weights with Kahan summation, gradient release with accumulation, clipping by the
global norm in two passes, and checkpoints that hold all of it, also within an accumulation
cycle: weights, optimizer, schedule, and the handle, which keeps the sums of the gradients
so far. A run that stops there and resumes ends with the weights of the one that did not.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from optimi_func import (
    AdamW,
    param_groups_weight_decay,
    prepare_for_gradient_release,
    to_low_precision,
)

BACKWARDS, PARTS = 120, 4
STOP = 61  # in the middle of a cycle


class Recipe:
    """Everything a run consists of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 128), nn.GELU(), nn.Linear(128, 1))
        to_low_precision(self.model, torch.bfloat16)
        groups = param_groups_weight_decay(self.model, weight_decay=0.1)
        self.optimizer = AdamW(groups, lr=1e-2, gradient_release=True, compile=False)
        self.handle = prepare_for_gradient_release(
            *(self.model, self.optimizer),
            accumulation="buffer",
            accumulation_steps=PARTS,
            clip_global_norm=1.0,
            grad_norm=True,
        )
        steps = BACKWARDS // PARTS
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.done = 0

    def train(self, until: int) -> float:
        for i in tqdm(range(self.done, until), unit="backward"):
            x, y = batch(i)
            # The last of a cycle measures, updates, and frees gradients.
            loss = self.handle.backward(
                lambda x=x, y=y: F.mse_loss(self.model(x).float(), y) / PARTS
            )
            self.done += 1
            if self.done % PARTS == 0:
                self.optimizer.step()  # nothing left to do but to tell the schedule
                self.schedule.step()
        return loss.item() * PARTS

    def save(self, path: Path) -> None:
        checkpoint: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "handle": self.handle.state_dict(),
            "schedule": self.schedule.state_dict(),
            "done": self.done,
        }
        torch.save(checkpoint, path)

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        for name in ("model", "optimizer", "handle", "schedule"):
            getattr(self, name).load_state_dict(checkpoint[name])
        self.done = checkpoint["done"]


def batch(i: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(16, 4, generator=torch.Generator().manual_seed(i))
    return x.bfloat16(), x.sum(1, keepdim=True).sin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/recipe.pt"))
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    straight = Recipe()
    loss = straight.train(BACKWARDS)
    stopped = Recipe()
    stopped.train(STOP)
    stopped.save(out)
    resumed = Recipe()
    resumed.load(out)
    resumed.train(BACKWARDS)
    pairs = zip(straight.model.parameters(), resumed.model.parameters())
    same = all(torch.equal(p, q) for p, q in pairs)
    free = all(p.grad is None for p in resumed.model.parameters())
    print(f"loss {loss:.1e}, norm {straight.handle.grad_norm:.1e}, gradients freed: {free}")
    print(f"stopped after backward {STOP}, within a cycle: the same weights: {same}")


if __name__ == "__main__":
    main()
