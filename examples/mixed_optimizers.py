"""Train one network by two optimizers: Lion on its matrices, AdamW on all the rest.

A small network learns scikit-learn's digits (1797 images of 8 x 8 pixels; those it trains
on get noise) twice from the same weights and batches: by AdamW alone, and with Lion on the
weight matrices and AdamW on biases, norms and the scale of the logits. Both runs clip the
gradient's norm over all parameters, follow one WSD schedule (warmup, stable, decay) and
keep an exponential moving average of their weights:

    ema(chain(clip_global_norm(1.0), partition((is_matrix, lion(...)), rest=adamw(...))))

Everything that a run carries is one pytree. What to expect: the average lags at first;
then, while the learning rate is at its peak, its loss is smoother and, under AdamW, mostly
lower than that of the weights themselves, until the decay brings both together. This shows
how to mix, average and schedule; it is no contest between optimizers, and 1797 images would
not decide one.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # Only a file is drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from tqdm import tqdm

from optimi_func import PureOptimizer, adamw, lion
from optimi_func.schedules import Schedule, wsd
from optimi_func.transforms import chain, clip_global_norm, ema, partition


@dataclass(frozen=True)
class Config:
    """The settings of the run."""

    steps: int = 1000
    batch: int = 64
    # Of pixels from 0 to 1. Without it 1200 images are soon known by heart.
    noise: float = 0.5
    width: int = 128
    lr: float = 4e-3  # AdamW's; Lion's is a tenth of it, as its paper advises
    decay: float = 0.98  # of the average: over some 50 steps
    held_out: int = 597
    evaluations: int = 100
    seed: int = 0
    out: Path = Path("outputs/mixed_optimizers.png")

    def quick(self) -> "Config":
        """Shrink to a few seconds: this shows that all works."""
        return replace(self, steps=30, width=16, evaluations=5)


class Net(nn.Module):
    """Two hidden layers, and a learned scale of the logits: a 0-d parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(
            *(nn.Linear(64, width), nn.LayerNorm(width), nn.GELU()),
            *(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()),
        )
        self.head = nn.Linear(width, 10)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.hidden(x))


@dataclass(frozen=True)
class Digits:
    """Images and labels, to train on and held out."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


@dataclass(frozen=True)
class Curves:
    """The results of a run."""

    train: list[float]  # every step, of its batch
    at: list[int]  # steps of the two below
    weights: list[float]  # validation loss
    averages: list[float]  # likewise, of the averaged weights
    accuracy: float  # of the averaged weights on the held out images, at the end


def load(config: Config) -> Digits:
    """The digits, shuffled and split."""
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(config.seed))
    x, y = x[order].float() / 16, y[order]
    n = config.held_out
    return Digits(x[n:], y[n:], x[:n], y[:n])


def schedule(peak: float, config: Config) -> Schedule:
    """Up for a twentieth of the run, down in its last fifth."""
    return wsd(
        peak,
        warmup=config.steps // 20,
        total=config.steps,
        decay=config.steps // 5,
        shape="sqrt",
    )


def optimizers(config: Config) -> dict[str, PureOptimizer]:
    """The two runs, which differ in nothing but who moves the matrices."""

    def is_matrix(path: str, p: Tensor) -> bool:
        return p.dim() == 2

    rest = adamw(lr=schedule(config.lr, config), weight_decay=0.01)
    # Decay is multiplied by lr: a tenth of the lr wants ten times the decay.
    matrices = lion(lr=schedule(config.lr / 10, config), weight_decay=0.1)
    mixed = partition((is_matrix, matrices), rest=rest)
    return {
        name: ema(chain(clip_global_norm(1.0), inner), config.decay)
        for name, inner in (
            ("AdamW on all", rest),
            ("Lion on matrices, AdamW on the rest", mixed),
        )
    }


def train(name: str, optimizer: PureOptimizer, data: Digits, config: Config) -> Curves:
    """One run."""
    torch.manual_seed(config.seed)
    model = Net(config.width)

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, x), y)

    params: Any = {k: p.detach() for k, p in model.named_parameters()}
    state = optimizer.init(params)
    curves = Curves([], [], [], [], 0.0)
    every = max(1, config.steps // config.evaluations)
    for step in tqdm(range(1, config.steps + 1), desc=name):
        rows = torch.randint(len(data.x), (config.batch,))
        x = data.x[rows] + config.noise * torch.randn(config.batch, 64)
        grads, loss = grad_and_value(loss_of)(params, x, data.y[rows])
        params, state = optimizer.step(params, grads, state)
        curves.train.append(loss.item())
        if step % every == 0 or step == config.steps:
            curves.at.append(step)
            for seen, tree in ((curves.weights, params), (curves.averages, state.average)):
                seen.append(loss_of(tree, data.held_x, data.held_y).item())
    logits = functional_call(model, state.average, data.held_x)
    right = (logits.argmax(-1) == data.held_y).float().mean().item()
    return replace(curves, accuracy=right)


AVERAGES: dict[str, Any] = {"linewidth": 2.2}
WEIGHTS: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.8}
TRAINING: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (1, 1.2))}


def plot(runs: dict[str, Curves], config: Config) -> None:
    """Losses above, the schedule beneath, over the same steps."""
    figure, (losses, rates) = plt.subplots(
        *(2, 1),
        sharex=True,
        figsize=(9, 7),
        layout="constrained",
        height_ratios=(4, 1),
    )
    for color, (name, curves) in zip(("#1f6fb4", "#d1495b"), runs.items()):
        window = max(1, config.steps // 60)
        smooth = torch.tensor(curves.train).unfold(0, window, 1).mean(-1).tolist()
        at = [window / 2 + i for i in range(len(smooth))]
        losses.plot(at, smooth, color=color, **TRAINING)
        losses.plot(curves.at, curves.weights, color=color, **WEIGHTS)
        label = f"{name} ({100 * curves.accuracy:.1f} % right)"
        losses.plot(curves.at, curves.averages, color=color, label=label, **AVERAGES)
    for style, label in (
        (TRAINING, f"training, mean of {window} batches"),
        (WEIGHTS, "validation"),
        (AVERAGES, "validation of the averaged weights"),
    ):
        losses.plot([], [], color="black", label=label, **style)
    losses.set_yscale("log")
    losses.minorticks_off()
    ticks = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
    losses.set_yticks(ticks, labels=[str(tick) for tick in ticks])
    losses.set_ylabel("cross entropy, nats")
    losses.set_title("Digits, with noise on the training images")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    steps = range(config.steps + 1)
    shape = schedule(1.0, config)
    rates.fill_between(steps, [shape(step) for step in steps], color="#8a8d91", alpha=0.5)
    rates.set_ylabel("lr / peak")
    rates.set_xlabel("step")
    rates.set_ylim(0, 1.1)
    for axes in losses, rates:
        axes.set_xlim(0, config.steps)
        axes.grid(alpha=0.3)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(config.out, dpi=120)
    plt.close(figure)


def parse_arguments() -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Lion on matrices and AdamW on the rest, with WSD and an average.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "steps": "training steps of each run",
        "batch": "images a step",
        "width": "of the hidden layers",
        "lr": "AdamW's peak; Lion's is a tenth of it",
        "decay": "of the average",
        "noise": "on the pixels of training images",
        "seed": "of the split, the weights and the batches",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=type(value), default=value, help=meaning)
    parser.add_argument("--out", type=Path, default=default.out, help="PNG to write")
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds")
    options = vars(parser.parse_args())
    quick = options.pop("quick")
    config = replace(default, **options)
    return config.quick() if quick else config


def main() -> None:
    """Train both, print how they ended and draw."""
    config = parse_arguments()
    data = load(config)
    runs = {
        name: train(name, optimizer, data, config)
        for name, optimizer in optimizers(config).items()
    }
    print(f"\n{'run':37}{'weights':>10}{'averages':>10}{'accuracy':>10}")
    for name, curves in runs.items():
        ends = f"{curves.weights[-1]:10.4f}{curves.averages[-1]:10.4f}"
        print(f"{name:37}{ends}{curves.accuracy:10.1%}")
    plot(runs, config)
    print(f"\nValidation loss at the end; {config.out} shows the way there.")


if __name__ == "__main__":
    main()
