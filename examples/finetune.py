"""Small steps onto trained weights: which storage of bfloat16 parameters follows float32?

A network that has learned handwritten digits learns them anew, moved by a pixel, with
AdamW and a learning rate of 1e-5 and of 1e-6, as one finetunes: a step is then far below
what the last bit of a bfloat16 weight stands for. Six runs begin from the same bfloat16
weights and get the same gradients, those of the float32 run. So what they differ in comes
from how their parameters are stored alone:

* ``float32``: the reference;
* ``bfloat16``: as they are (``storage=Storage("plain", torch.float32)``);
* ``kahan``: with a compensation in bfloat16 (``Storage("kahan", torch.float32)``);
* ``kahan8``: with one of 8 bits (``Storage("kahan8", torch.float32)``);
* ``compact``: the same, and moments in 8 bits (``storage="compact"``);
* ``exact``: with the 16 bits that they lack (``storage="exact"``).

What to expect: bfloat16 hardly moves; Kahan follows; exact is float32 to the last bit.
kahan8 and compact have 24 bits a weight, which lose steps below 2^-16 of it: they follow at
1e-5, and lose much of what they should move at 1e-6, of which they warn. Compact's moments
take it to other places of about the same loss. What was measured is printed, and drawn to
``--out``: how far each run is from float32, as a share of float32's own movement, and its
loss on the new digits.
"""

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # Only a file is drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

import optimi_func
from optimi_func import Storage

FLOAT32 = torch.float32
# The dtype of the parameters, how they are stored, and a color.
WAYS: dict[str, tuple[torch.dtype, Storage | str | None, str]] = {
    "float32": (FLOAT32, None, "tab:gray"),
    "bfloat16": (torch.bfloat16, Storage("plain", FLOAT32), "tab:orange"),
    "kahan": (torch.bfloat16, Storage("kahan", FLOAT32), "tab:blue"),
    "kahan8": (torch.bfloat16, Storage("kahan8", FLOAT32), "tab:purple"),
    "compact": (torch.bfloat16, "compact", "tab:green"),
    "exact": (torch.bfloat16, "exact", "tab:red"),
}
PICTURE = Path("outputs/finetune.png")


@dataclass(frozen=True)
class Config:
    """The settings of the run."""

    lrs: tuple[float, ...] = (1e-5, 1e-6)
    steps: int = 200
    pretraining: int = 150
    width: int = 256
    batch: int = 128
    seed: int = 0
    out: Path = PICTURE

    def quick(self) -> "Config":
        """Fewer steps: this shows that all works."""
        return replace(self, steps=20, pretraining=20)


Weights = dict[str, Tensor]


@dataclass
class Run:
    """One way to store parameters, and what was measured of it."""

    model: nn.Module
    optimizer: optimi_func.AdamW
    losses: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)

    def weights(self) -> Weights:
        """Return the weights with their compensations added."""
        return self.optimizer.master_state_dict(self.model)

    def step(self, grads: Weights) -> None:
        """With gradients that may be wider than the parameters."""
        for name, p in self.model.named_parameters():
            p.grad_dtype = grads[name].dtype
            p.grad = grads[name]
        self.optimizer.step()


def network(config: Config) -> nn.Module:
    """Three layers."""
    layers = [(64, config.width), (config.width, config.width), (config.width, 10)]
    modules: list[nn.Module] = []
    for sizes in layers:
        modules += [nn.Linear(*sizes), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Images, the same moved by a pixel, and what they show."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(16)
    moved = images.view(-1, 8, 8).roll(1, 2).flatten(1)
    return images, moved, torch.from_numpy(labels)


def pretrained(config: Config, images: Tensor, labels: Tensor) -> Weights:
    """Weights that know the digits where they were, rounded to bfloat16."""
    torch.manual_seed(config.seed)
    model = network(config)
    optimizer = optimi_func.AdamW(model.parameters(), lr=2e-3, compile=False)
    for _ in range(config.pretraining):
        part = torch.randint(len(images), (config.batch,))
        loss = F.cross_entropy(model(images[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: p.bfloat16() for name, p in model.state_dict().items()}


def make_run(name: str, config: Config, start: Weights, lr: float) -> Run:
    """From the weights that all have."""
    dtype, storage, _ = WAYS[name]
    model = network(config)
    model.load_state_dict(start)
    model.to(dtype)
    named = model.named_parameters()
    with warnings.catch_warnings():
        # That compact loses steps as small as these is what this shows.
        warnings.filterwarnings("ignore", "lr=")
        optimizer = optimi_func.AdamW(
            named, lr=lr, weight_decay=0.0, storage=storage, compile=False
        )
    return Run(model, optimizer)


def distance(a: Weights, b: Weights) -> float:
    """Between all of them."""
    squares = [(a[name].double() - b[name].double()).square().sum() for name in a]
    return torch.stack(squares).sum().sqrt().item()


def finetune(config: Config, lr: float) -> dict[str, Run]:
    """Every way, by the gradients of float32."""
    images, moved, labels = digits()
    start = pretrained(config, images, labels)
    runs = {name: make_run(name, config, start, lr) for name in WAYS}
    model = runs["float32"].model
    for _ in tqdm(range(config.steps), f"lr {lr:g}", unit="step", disable=None):
        part = torch.randint(len(moved), (config.batch,))
        loss = F.cross_entropy(model(moved[part]), labels[part])
        found = torch.autograd.grad(loss, list(model.parameters()))
        grads = dict(zip((name for name, _ in model.named_parameters()), found))
        for run in runs.values():
            run.step(grads)
        measure(runs, model, start, moved, labels)
    return runs


@torch.no_grad()
def measure(
    runs: dict[str, Run], model: nn.Module, start: Weights, images: Tensor, labels: Tensor
) -> None:
    """Losses, and distances as shares of what float32 has moved."""
    reference = runs["float32"].weights()
    movement = distance(reference, start)
    for run in runs.values():
        weights = run.weights()
        run.apart.append(distance(weights, reference) / movement)
        predicted = functional_call(model, weights, (images,))
        run.losses.append(F.cross_entropy(predicted, labels).item())


def results_table(found: dict[float, dict[str, Run]]) -> str:
    """A line for each way and learning rate."""
    lines = [f"{'lr':<8} {'storage':<10} {'from float32 / movement':>24} {'loss':>22}"]
    for lr, runs in found.items():
        for name, run in runs.items():
            same = " (the same bits)" if run.apart[-1] == 0 else ""
            losses = f"{run.losses[0]:.5f} -> {run.losses[-1]:.5f}"
            lines.append(f"{lr:<8g} {name:<10} {run.apart[-1]:>24.2g} {losses:>22}{same}")
    return "\n".join(lines)


def plot(found: dict[float, dict[str, Run]], path: Path) -> None:
    """A column for each learning rate: distances above, losses below."""
    figure, grid = plt.subplots(
        2, len(found), figsize=(8, 6.8), layout="constrained", squeeze=False
    )
    for (above, below), (lr, runs) in zip(grid.T, found.items()):
        for name, run in runs.items():
            # float32 and exact lie on each other: the one beneath is wider.
            line = {"color": WAYS[name][2], "lw": 4 if name == "float32" else 1.6}
            label = f"{name}: {run.apart[-1]:.2g}"
            steps = range(1, len(run.apart) + 1)
            if any(run.apart):
                above.plot(steps, run.apart, label=label, **line)
            else:
                above.plot([], [], label=f"{label}, no bit differs", **line)
            style = "--" if name == "exact" else "-"
            below.plot(steps, run.losses, style, **line)
        above.set_yscale("log")
        above.set_ylim(1e-6, 3)
        above.set_title(f"learning rate {lr:g}")
        above.legend(title="at the end", frameon=False, fontsize=9)
        below.set_xlabel("step")
        for axes in (above, below):
            axes.grid(alpha=0.3)
    grid[0, 0].set_ylabel("distance from float32's weights\n/ how far those moved")
    grid[1, 0].set_ylabel("loss on the moved digits")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Finetune with small steps, by how parameters are stored.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "steps": "of each run",
        "pretraining": "steps of the weights that all begin with",
        "seed": "of the weights and the batches",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=meaning)
    parser.add_argument("--out", type=Path, default=default.out, help="PNG to write")
    parser.add_argument("--quick", action="store_true", help="few steps: does it work?")
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    config = replace(default, **options)
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Finetune, then print and draw the comparison."""
    config = parse_arguments(arguments)
    found = {lr: finetune(config, lr) for lr in config.lrs}
    print(results_table(found))
    plot(found, config.out)
    print(f"\ncurves: {config.out}")


if __name__ == "__main__":
    main()
