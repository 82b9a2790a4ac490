"""The tasks of `which.py`.

Every task is small enough for a CPU core and of another kind. Its data come with Python and
scikit-learn, or are generated. Held-out loss is the quality, and is compared within a task
alone.
"""

import argparse
import inspect
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import optimi_func

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import train_gpt

Call = Callable[[Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss; lr is where AdamW's grid has its middle."""

    name: str
    about: str
    lr: float
    steps: int
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    held_out: Callable[[], list[Batch]]
    loss: Callable[[Tensor, Tensor], Tensor]
    # Of parameters; a loss is computed in float32 all the same.
    dtype: torch.dtype = torch.float32
    # Small enough that members of a population train faster together.
    together: bool = False
    # Weights of the start for a seed; None: the model's own.
    start: Callable[[int], dict[str, Tensor]] | None = None

    def fresh(self, seed: int) -> nn.Module:
        """Return the model that a run with this seed begins with."""
        torch.manual_seed(seed)
        model = self.model()
        if self.start is not None:
            model.load_state_dict(self.start(self.steps))
        return model.to(self.dtype)

    def shorter(self, factor: int) -> "Task":
        """Return the task with fewer steps, which shows that all works."""
        return replace(self, steps=max(12, self.steps // factor))


# Language: a byte-level GPT


GPT = train_gpt.Config(context=64, layers=2, heads=4, width=96)
BATCH = 16


@cache
def _windows(source: str) -> tuple[Tensor, Tensor]:
    """Return windows to train with, and those of the last sixteenth of the text."""
    if source == "documentation":
        text = train_gpt.load_text(None)
    else:
        modules = (argparse, inspect, statistics)
        code = "\n\n".join(inspect.getsource(module) for module in modules)
        text = torch.frombuffer(bytearray(code.encode()), dtype=torch.uint8).long()
    windows = text.unfold(0, GPT.context + 1, 1)
    split = len(text) - int(len(text) * train_gpt.HELD_OUT)
    # At most 128 windows are held out, spread over the sixteenth.
    held_out = windows[split :: GPT.context]
    held_out = held_out[:: max(1, len(held_out) // 128)]
    return windows[: split - GPT.context], held_out


def _text_batch(source: str, generator: torch.Generator) -> Batch:
    windows, _ = _windows(source)
    found = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
    return found[:, :-1], found[:, 1:]


def _text_held_out(source: str) -> list[Batch]:
    return [(w[:, :-1], w[:, 1:]) for w in _windows(source)[1].split(64)]


def next_byte(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of a byte, in bits."""
    return F.cross_entropy(scores.flatten(0, 1), y.flatten()) / math.log(2)


@cache
def _trained(steps: int) -> dict[str, Tensor]:
    """Train the GPT on the documentation, with AdamW, and return its weights."""
    task = replace(LANGUAGE, steps=2 * steps)
    model = task.fresh(1000)
    optimizer = optimi_func.AdamW(model.parameters(), lr=task.lr, compile=False)
    generator = torch.Generator().manual_seed(1000)
    for i in range(task.steps):
        optimizer.param_groups[0]["lr"] = task.lr * cosine(i, task.steps)
        x, y = task.batch(generator)
        task.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


# Images: a small convolutional network on scikit-learn's digits


@cache
def _digits() -> tuple[Batch, Batch]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.from_numpy(found.images).float()[:, None] / 16.0
    y = torch.from_numpy(found.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return (x[train], y[train]), (x[test], y[test])


def _shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image by at most one pixel, and add noise."""
    padded = F.pad(x, (1, 1, 1, 1))
    dx, dy = torch.randint(3, (2, len(x)), generator=generator)
    rows = dy[:, None, None] + torch.arange(8)[None, :, None]
    columns = dx[:, None, None] + torch.arange(8)[None, None, :]
    moved = padded[torch.arange(len(x))[:, None, None], 0, rows, columns][:, None]
    return moved + 0.3 * torch.randn(moved.shape, generator=generator)


def _digits_batch(generator: torch.Generator) -> Batch:
    (x, y), _ = _digits()
    chosen = torch.randint(len(x), (64,), generator=generator)
    return _shifted(x[chosen], generator), y[chosen]


@cache
def _digits_held_out() -> list[Batch]:
    _, (x, y) = _digits()
    generator = torch.Generator().manual_seed(1)
    return [(_shifted(x, generator), y) for _ in range(4)]


def _convolutions() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return [conv, nn.GroupNorm(4, outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 24, 1),
        *block(24, 48, 2),
        *block(48, 96, 2),
        nn.Flatten(),
        nn.Linear(96 * 4, 10),
    )


# A table: regression with noise


@cache
def _table() -> tuple[Batch, Batch]:
    """Draw rows of 32 columns, heavy-tailed ones among them, and a noisy target."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    x = draw(12288, 32)
    x[:, 16:24] = x[:, 16:24].sign() * x[:, 16:24].abs() ** 3  # heavy tails
    x[:, 24:] = (x[:, 24:] > 1.0).float()  # rare flags
    teacher = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 1))
    for p in teacher.parameters():
        p.data = draw(p.shape) * (1.5 / math.sqrt(p.shape[-1]))
    with torch.no_grad():
        clean = teacher(x)[:, 0] + (x[:, 0] * x[:, 1] > 0).float() + x[:, 2] * x[:, 24]
    y = (clean - clean.mean()) / clean.std() + 0.3 * draw(len(x))
    return (x[:8192], y[:8192]), (x[8192:], y[8192:])


def _table_batch(generator: torch.Generator) -> Batch:
    (x, y), _ = _table()
    chosen = torch.randint(len(x), (64,), generator=generator)
    return x[chosen], y[chosen]


def _perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(32, 64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.ReLU()),
        *(nn.Linear(64, 1), nn.Flatten(0)),
    )


def half_square(found: Tensor, y: Tensor) -> Tensor:
    """Return the mean square of the error."""
    return (found - y).square().mean()


LANGUAGE = Task(
    "language",
    "a byte-level GPT, 0.27 million parameters, on Python's documentation",
    *(4e-3, 400, partial(train_gpt.GPT, GPT)),
    *(partial(_text_batch, "documentation"), partial(_text_held_out, "documentation")),
    next_byte,
)
TASKS = (
    LANGUAGE,
    replace(
        LANGUAGE,
        name="finetune",
        about="the same GPT, trained before, in bfloat16 on Python's source code",
        lr=5e-4,
        steps=250,
        batch=partial(_text_batch, "source"),
        held_out=partial(_text_held_out, "source"),
        dtype=torch.bfloat16,
        start=_trained,
    ),
    Task(
        "images",
        "a convolutional network on shifted, noisy digits",
        *(4e-3, 400, _convolutions, _digits_batch, _digits_held_out, F.cross_entropy),
    ),
    Task(
        "table",
        "a perceptron on a table with noise, heavy tails and rare flags",
        *(4e-3, 2500, _perceptron, _table_batch, lambda: [_table()[1]], half_square),
        together=True,
    ),
)


# Schedules


def cosine(step: int, steps: int) -> float:
    """Return the factor of lr: a linear warmup over a twentieth, then a cosine to 0."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def warmed(step: int, steps: int) -> float:
    """Return the factor of lr of rules without a schedule: the warmup alone."""
    return min(1.0, (step + 1) / max(1, steps // 20))
