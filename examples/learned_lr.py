"""Learn a learning rate for every layer, by the derivative of the loss that it leads to.

A deep network trains on scikit-learn's digits (1797 real images of 8 x 8 pixels) for a few
steps of SGD with momentum. The validation loss at their end is a function of each layer's
learning rate, and ``torch.func.grad`` through ``optimi_func.unroll`` has its derivative:
AdamW on their logarithms follows it. Each meta-step starts from new random weights, some of
them at once under ``vmap``.

The picture has the learning rates and the validation loss over meta-steps, and then
the accuracy of whole training runs, on images never seen before and from new weights: with
the learned rates, with the fixed one that they started as, and with the fixed one that is
best of a grid for the same loss.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    raise SystemExit("this example draws a picture: pip install '.[examples]'") from None

matplotlib.use("Agg")  # Only a file is drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator, NullFormatter
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from tqdm import tqdm

from optimi_func import FunctionalOptimizer, adamw, sgd, unroll

Params = dict[str, Tensor]
Batches = list[tuple[Tensor, Tensor]]
LEARNED = "#2a7f62"
PARTS = 5  # of a run, after each of which accuracy is taken


@dataclass(frozen=True)
class Config:
    """The settings of the run."""

    layers: int = 5
    width: int = 32
    batch: int = 32
    momentum: float = 0.9
    inner_steps: int = 30
    start_lr: float = 0.01
    meta_lr: float = 0.08
    meta_steps: int = 80
    starts: int = 4  # random weights a meta-step
    tested: int = 30  # random weights
    seed: int = 0
    out: Path = Path("outputs/learned_lr.png")

    def quick(self) -> "Config":
        """Shrink to seconds: this shows that all works, and learns little."""
        return replace(self, layers=3, width=8, inner_steps=5, meta_steps=3, tested=2)


class Data:
    """The digits: half to train on, a quarter to learn rates by and a quarter to test."""

    def __init__(self, seed: int) -> None:
        digits = load_digits()
        x = torch.tensor(digits.data, dtype=torch.float32) / 16
        y = torch.tensor(digits.target)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        quarter = len(x) // 4
        parts = order[: 2 * quarter], order[2 * quarter : 3 * quarter], order[3 * quarter :]
        self.train, self.validation, self.test = ((x[part], y[part]) for part in parts)


class Learner:
    """The network and its training runs."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data = Data(config.seed)
        self.random = torch.Generator().manual_seed(config.seed)
        widths = [64, *[config.width] * (config.layers - 1), 10]
        modules: list[nn.Module] = []
        for a, b in pairwise(widths):
            modules += [nn.Linear(a, b), nn.Tanh()]
        self.module = nn.Sequential(*modules[:-1])
        names = [name for name, _ in self.module.named_parameters()]
        self.layer = {name: int(name.split(".")[0]) // 2 for name in names}

    def weights(self, count: int) -> Params:
        """Random ones, with a first axis for each start; LeCun's initialization."""
        found: Params = {}
        for name, p in self.module.named_parameters():
            drawn = torch.randn(count, *p.shape, generator=self.random)
            found[name] = drawn / p.shape[1] ** 0.5 if p.dim() > 1 else 0 * drawn
        return found

    def batches(self, count: int) -> Batches:
        """A run's, of the images to train on, others for each start."""
        x, y = self.data.train
        shape = (self.config.inner_steps, count, self.config.batch)
        some = torch.randint(len(x), shape, generator=self.random)
        return list(zip(x[some], y[some]))

    def loss(self, params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        x, y = batch
        return F.cross_entropy(functional_call(self.module, params, x), y)

    def optimizer(self, log_lrs: Tensor) -> FunctionalOptimizer:
        """SGD with a learning rate for each layer, given by logarithms."""
        rates = log_lrs.exp()
        lr = {name: rates[i] for name, i in self.layer.items()}
        return sgd(lr=lr, momentum=self.config.momentum)

    def validation(self, log_lrs: Tensor, starts: Params) -> Tensor:
        """The validation loss at the end of a run, averaged over starts."""
        optimizer = self.optimizer(log_lrs)

        def one(params: Params, batches: Batches) -> Tensor:
            end = unroll(optimizer, self.loss, params, None, batches).params
            return self.loss(end, self.data.validation)

        count = len(next(iter(starts.values())))
        return vmap(one)(starts, self.batches(count)).mean()

    def accuracies(self, log_lrs: Tensor, starts: Params, batches: Batches) -> Tensor:
        """Test accuracy of each start every few steps: [times, starts]."""
        optimizer = self.optimizer(log_lrs)
        x, y = self.data.test

        def accuracy(params: Params) -> Tensor:
            right = functional_call(self.module, params, x).argmax(-1) == y
            return right.float().mean()

        params, state = starts, vmap(optimizer.init)(starts)
        found = [vmap(accuracy)(params)]

        def on(p: Params, s: Any, some: Batches) -> tuple[Params, Any]:
            return unroll(optimizer, self.loss, p, s, some)[:2]

        steps = len(batches) // PARTS
        for i in range(PARTS):
            some = batches[i * steps : (i + 1) * steps]
            params, state = vmap(on)(params, state, some)
            found.append(vmap(accuracy)(params))
        return torch.stack(found)

    def constant(self, lr: float) -> Tensor:
        """The same for all layers."""
        return torch.full((self.config.layers,), lr).log()


@dataclass
class History:
    """The learning rates and losses of the meta-steps."""

    lrs: list[list[float]]  # a row a meta-step, a column a layer
    losses: list[float]


def learn(learner: Learner) -> tuple[Tensor, History]:
    """Follow the hypergradient; the logarithms of the rates, and how they came about."""
    config = learner.config
    outer = adamw(lr=config.meta_lr, betas=(0.9, 0.9), weight_decay=0.0)
    log_lrs = learner.constant(config.start_lr)
    state = outer.init(log_lrs)
    history = History([log_lrs.exp().tolist()], [])
    # Without a terminal there is no bar.
    bar = tqdm(range(config.meta_steps), "learning rates", unit="step", disable=None)
    for _ in bar:
        starts = learner.weights(config.starts)
        hypergradient, loss = grad_and_value(learner.validation)(log_lrs, starts)
        log_lrs, state = outer.step(log_lrs, hypergradient, state)
        history.lrs.append(log_lrs.exp().tolist())
        history.losses.append(loss.item())
        bar.set_postfix(loss=f"{loss:.3f}")
    return log_lrs, history


def best_constant(learner: Learner) -> tuple[float, float]:
    """The best learning rate of a grid for the same loss, and that loss."""
    losses: dict[float, float] = {}
    for lr in torch.logspace(-3, 0, 13).tolist():
        starts = learner.weights(learner.config.tested)
        loss = learner.validation(learner.constant(lr), starts).item()
        losses[lr] = loss if math.isfinite(loss) else math.inf
    best = min(losses, key=losses.__getitem__)
    return best, losses[best]


def plot(learner: Learner, log_lrs: Tensor, history: History) -> None:
    """Compare with fixed rates on new weights, print and draw."""
    config = learner.config
    fixed, fixed_loss = best_constant(learner)
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(15, 4.8), layout="constrained"
    )
    colors = plt.get_cmap("viridis")
    for i, way in enumerate(zip(*history.lrs)):
        color = colors(0.9 * i / max(1, config.layers - 1))
        left.plot(way, color=color, label=f"layer {i + 1}", linewidth=2)
    left.axhline(fixed, color="black", linestyle=":", label="best fixed")
    left.set_yscale("log")
    left.set_ylabel("learning rate")
    left.set_title("learned by hypergradients")
    left.legend(fontsize=9)
    middle.plot(history.losses, color=LEARNED, label="learned")
    middle.axhline(
        fixed_loss, color="black", linestyle=":", label=f"best fixed, {fixed:.2g}"
    )
    middle.set_yscale("log")
    middle.set_ylabel(f"validation loss after {config.inner_steps} steps")
    middle.set_title(f"{config.starts} new initializations a meta-step")
    middle.legend(fontsize=9)
    for axes in (left, middle):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("meta-step")
        axes.grid(alpha=0.3, which="both")
    # The same for all.
    starts, batches = learner.weights(config.tested), learner.batches(config.tested)
    rates = {
        "learned": (log_lrs, LEARNED, "-"),
        f"best fixed, {fixed:.2g}": (learner.constant(fixed), "black", ":"),
        f"fixed, {config.start_lr:.2g}": (
            learner.constant(config.start_lr),
            "#8c8c8c",
            "-",
        ),
    }
    steps = [config.inner_steps // PARTS * i for i in range(PARTS + 1)]
    for name, (logs, color, line) in rates.items():
        found = 100 * learner.accuracies(logs, starts, batches)
        mean, half = found.mean(1), 1.96 * found.std(1) / config.tested**0.5
        right.plot(steps, mean.tolist(), line, color=color, label=name, linewidth=2)
        low, high = (mean - half).tolist(), (mean + half).tolist()
        right.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        print(f"{name}: test accuracy after {steps[-1]} steps {mean[-1]:.1f} %")
    print("learned rates:", ", ".join(f"{x:.2g}" for x in log_lrs.exp().tolist()))
    right.set_xlabel("step")
    right.set_ylabel("test accuracy, %")
    right.set_title(f"{config.tested} new initializations, mean and its 95 % interval")
    right.grid(alpha=0.3)
    right.legend(fontsize=9, loc="lower right")
    config.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(config.out, dpi=120)
    plt.close(figure)
    print(f"picture: {config.out}")


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Learn a learning rate for every layer by hypergradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "layers": "of the network",
        "width": "of its hidden layers",
        "batch": "images a step",
        "momentum": "of SGD",
        "inner-steps": f"of a training run, a multiple of {PARTS}",
        "start-lr": "of every layer",
        "meta-lr": "of AdamW on their logarithms",
        "meta-steps": "of it",
        "starts": "initializations a meta-step",
        "tested": "initializations to compare on",
        "seed": "of weights and data",
    }.items():
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=type(value), default=value, help=meaning)
    parser.add_argument("--out", type=Path, default=default.out, help="PNG to write")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, for seconds: does it work?"
    )
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    config = replace(default, **options)
    if config.inner_steps < PARTS or config.inner_steps % PARTS:
        parser.error(f"--inner-steps {config.inner_steps} is no multiple of {PARTS}")
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn and compare."""
    config = parse_arguments(arguments)
    torch.set_num_threads(1)  # Everything is tiny.
    begin = time.perf_counter()
    learner = Learner(config)
    plot(learner, *learn(learner))
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
