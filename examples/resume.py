"""Train so that nothing is lost: stop this at any moment, start it again, and it goes on.

A checkpoint is all that the next step depends on: weights, optimizer, schedule, random
numbers, and where in which order of the data the run stands. It is written to a temporary
file, forced to the disk, and then renamed over the one before: a run that is killed at any
moment leaves a whole checkpoint behind, the old one or the new one. Whoever interrupts the
run, and however often, it ends with the weights of the uninterrupted run, bit for bit.

    python examples/resume.py          # kill -9 it, and start it again
"""

import argparse
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

from optimi_func import AdamW


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Points on two spirals, and which of them each is on."""
    generator = torch.Generator().manual_seed(0)
    turn = 3.0 * torch.pi * torch.rand(count, generator=generator).sqrt()
    label = torch.arange(count) % 2
    angle = turn + torch.pi * label
    points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 10
    return points + 0.02 * torch.randn(count, 2, generator=generator), label


class Batches:
    """Indices of one batch after another, shuffled anew every epoch."""

    def __init__(self, count: int, size: int, epochs: int) -> None:
        self.count, self.size, self.epochs = count, size, epochs
        self.epoch = self.position = 0
        self._generator = torch.Generator().manual_seed(1)
        self._shuffle()

    def __len__(self) -> int:
        return self.epochs * (self.count // self.size)

    @property
    def done(self) -> int:
        return self.epoch * (self.count // self.size) + self.position

    def next(self) -> Tensor:
        batch = self._order[self.position * self.size :][: self.size]
        self.position += 1
        if self.position == self.count // self.size:
            self.epoch, self.position = self.epoch + 1, 0
            self._shuffle()
        return batch

    def _shuffle(self) -> None:
        self._before = self._generator.get_state()
        self._order = torch.randperm(self.count, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        # From before this epoch's shuffle, which loading repeats.
        where = {"epoch": self.epoch, "position": self.position}
        return {**where, "generator": self._before}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.epoch, self.position = saved["epoch"], saved["position"]
        self._generator.set_state(saved["generator"])
        self._shuffle()


def save(path: Path, parts: dict[str, Any]) -> None:
    """Replace the checkpoint by a new one, or leave it as it is: nothing in between."""
    checkpoint = {name: part.state_dict() for name, part in parts.items()}
    checkpoint["random"] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it has the checkpoint's name
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # and so that the name survives a power failure
    os.close(folder)


def load(path: Path, parts: dict[str, Any]) -> None:
    checkpoint = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    torch.set_rng_state(checkpoint["random"]["torch"])
    random.setstate(checkpoint["random"]["python"])


def train(path: Path, epochs: int, every: int, compile: bool | None) -> None:
    torch.manual_seed(0)
    random.seed(0)
    points, labels = spirals(1024)
    model = nn.Sequential(
        *(nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.05)),
        *(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)),
    )
    optimizer = AdamW(model.named_parameters(), lr=1e-2, compile=compile)
    batches = Batches(len(points), 64, epochs)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=len(batches) + 1)
    parts = {"model": model, "optimizer": optimizer}
    parts |= {"schedule": schedule, "batches": batches}

    if path.exists():
        load(path, parts)
        print(f"resumed after step {batches.done}", flush=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        print("begun", flush=True)
    with tqdm(total=len(batches), initial=batches.done, unit="step") as bar:
        while batches.done < len(batches):
            batch = batches.next()
            x, y = points[batch], labels[batch]
            if random.random() < 0.5:
                x, y = -x, 1 - y  # turned half around, each spiral is the other
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.update()
            if batches.done % every == 0 or batches.done == len(batches):
                save(path, parts)
                bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()
    right = (model(points).argmax(1) == labels).float().mean()
    print(f"{batches.done} steps: {right:.1%} of the points on the right spiral")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("outputs/resume/run.pt"))
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--no-compile", action="store_true", help="run the step eagerly")
    chosen = parser.parse_args(arguments)
    compile = False if chosen.no_compile else None
    train(chosen.checkpoint, chosen.epochs, chosen.every, compile)


if __name__ == "__main__":
    main()
