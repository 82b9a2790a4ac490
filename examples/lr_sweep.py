"""Sweep learning rate and weight decay of AdamW in one run: 64 networks trained as one.

A two-layer network learns scikit-learn's digits (1797 real images of 8 x 8 pixels), once
for each of 8 x 8 pairs of learning rate and weight decay, all from the same weights. The
members of ``optimi_func.population`` share one compiled step. The picture has the accuracy
on images that none of them saw, a square for each pair.

With ``--pbt``, population-based training (Jaderberg et al., arXiv:1711.09846) follows: 64
members with random learning rates, and now and then the worst take over weights, optimizer
state and hyperparameters of the best, moved by random factors. The second picture has the
way of every learning rate, colored by the accuracy at the end.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

try:
    import matplotlib
except ImportError:
    raise SystemExit("this example draws a picture: pip install '.[examples]'") from None

matplotlib.use("Agg")  # Only a file is drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from optimi_func import adamw, population
from optimi_func.population import Population

OUTPUTS = Path("outputs")


@dataclass(frozen=True)
class Config:
    """The settings of the sweep."""

    side: int = 8  # of the grid
    lowest_lr: float = 1e-4
    highest_lr: float = 0.3
    lowest_decay: float = 1e-3
    highest_decay: float = 10.0
    hidden: int = 64
    batch: int = 32
    steps: int = 1500
    rounds: int = 15  # of population-based training
    share: float = 0.2  # of the members that are replaced in each
    pbt: bool = False
    compile: bool = True
    seed: int = 0
    out: Path = OUTPUTS / "lr_sweep.png"
    pbt_out: Path = OUTPUTS / "pbt.png"

    def quick(self) -> "Config":
        """Shrink to seconds: this shows that all works, and finds nothing."""
        return replace(self, side=3, hidden=8, steps=30, rounds=3)


class Data:
    """The digits: half to train on, a quarter to select by and a quarter to test."""

    def __init__(self, seed: int) -> None:
        digits = load_digits()
        x = torch.tensor(digits.data, dtype=torch.float32) / 16
        y = torch.tensor(digits.target)
        random = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(x), generator=random)
        quarter = len(x) // 4
        self.x, self.y = x[order[2 * quarter :]], y[order[2 * quarter :]]
        self.validation = x[order[:quarter]], y[order[:quarter]]
        self.test = x[order[quarter : 2 * quarter]], y[order[quarter : 2 * quarter]]
        self.random = random

    def batches(self, steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random ones."""
        for _ in range(steps):
            some = torch.randint(len(self.x), (size,), generator=self.random)
            yield self.x[some], self.y[some]


def network(config: Config) -> nn.Module:
    """Two layers."""
    torch.manual_seed(config.seed)
    return nn.Sequential(
        nn.Linear(64, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 10)
    )


class Trainer:
    """The training step and the accuracy of a population of one network."""

    def __init__(self, module: nn.Module, config: Config) -> None:
        def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(module, params, x), y)

        def accuracy(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            right = functional_call(module, params, x).argmax(-1) == y
            return right.float().mean()

        def step(members: Population, x: Tensor, y: Tensor) -> tuple[Population, Tensor]:
            losses, grads = population.loss_and_grad(loss_fn, members, x, y)
            return population.step(adamw, members, grads), losses

        self._accuracy = accuracy
        self.step: Callable[[Population, Tensor, Tensor], tuple[Population, Tensor]] = (
            torch.compile(step, fullgraph=True) if config.compile else step
        )

    def train(
        self, members: Population, data: Data, steps: int, config: Config, bar: tqdm
    ) -> Population:
        """Some steps."""
        for x, y in data.batches(steps, config.batch):
            members, losses = self.step(members, x, y)
            bar.update()
        bar.set_postfix(loss=f"{losses.min():.3f}")
        return members

    def accuracy(self, members: Population, of: tuple[Tensor, Tensor]) -> Tensor:
        """Each member's share of right answers."""
        return torch.vmap(lambda params: self._accuracy(params, *of))(members.params)


def grid(config: Config) -> tuple[Tensor, Tensor]:
    """The learning rates and the weight decays of the sweep."""
    ends = torch.tensor(
        [config.lowest_lr, config.highest_lr, config.lowest_decay, config.highest_decay]
    ).log10()
    lrs = torch.logspace(ends[0].item(), ends[1].item(), config.side, dtype=torch.float64)
    decays = torch.logspace(ends[2].item(), ends[3].item(), config.side, dtype=lrs.dtype)
    return lrs, decays


def sweep(trainer: Trainer, module: nn.Module, data: Data, config: Config) -> Tensor:
    """Validation accuracy, a row per weight decay and a column per learning rate."""
    lrs, decays = grid(config)
    pairs = torch.cartesian_prod(decays, lrs)
    hyper = {"lr": pairs[:, 1], "weight_decay": pairs[:, 0]}
    members = population.init(adamw, module, hyper, n=len(pairs))
    # Without a terminal there is no bar.
    with tqdm(total=config.steps, desc="sweep", unit="step", disable=None) as bar:
        members = trainer.train(members, data, config.steps, config, bar)
    found = trainer.accuracy(members, data.validation)
    best = int(found.argmax())
    chosen = population.select(members, [best])
    tested = trainer.accuracy(chosen, data.test).item()
    print(
        f"sweep: best of {len(members)} by validation: lr {pairs[best, 1]:.2g}, weight "
        f"decay {pairs[best, 0]:.2g}: validation {found[best]:.1%}, test {tested:.1%}"
    )
    # An ordinary module again, which says the same.
    module.load_state_dict({name: p[best] for name, p in members.params.items()})
    x, y = data.test
    right = (module(x).argmax(-1) == y).float().mean().item()
    assert abs(right - tested) < 1e-6
    return found.view(config.side, config.side)


def evolve(
    trainer: Trainer, module: nn.Module, data: Data, config: Config
) -> tuple[Tensor, Tensor]:
    """Population-based training: learning rates [rounds, members], and accuracies."""
    count = config.side**2
    random = torch.Generator().manual_seed(config.seed)
    low, high = torch.tensor([config.lowest_lr, config.highest_lr]).log()
    drawn = torch.rand(count, generator=random, dtype=torch.float64)
    lrs = (low + (high - low) * drawn).exp()
    members = population.init(adamw, module, {"lr": lrs, "weight_decay": 1e-2}, n=count)
    replaced = max(1, round(config.share * count))
    ways = [members.hyper["lr"]]
    with tqdm(total=config.steps, desc="pbt", unit="step", disable=None) as bar:
        for i in range(config.rounds):
            steps = config.steps * (i + 1) // config.rounds
            steps -= config.steps * i // config.rounds
            members = trainer.train(members, data, steps, config, bar)
            found = trainer.accuracy(members, data.validation)
            if i + 1 < config.rounds:
                order = found.argsort()
                worst, best = order[:replaced], order[-replaced:]
                members = population.clone(members, source=best, into=worst)
                for values in members.hyper.values():
                    picks = torch.randint(2, (replaced,), generator=random)
                    values[worst] *= torch.tensor([0.8, 1.25], dtype=values.dtype)[picks]
            ways.append(members.hyper["lr"])
    best = int(found.argmax())
    tested = trainer.accuracy(population.select(members, [best]), data.test).item()
    print(
        f"pbt: best of {count}: lr at the end {members.hyper['lr'][best]:.2g}: validation "
        f"{found[best]:.1%}, test {tested:.1%}"
    )
    return torch.stack(ways), found


def number(x: float) -> str:
    """Short, as a tick of a logarithmic axis."""
    return f"{x:.1e}".replace("e-0", "e-").replace("e+00", "") if x < 0.01 else f"{x:.2g}"


def draw_sweep(found: Tensor, config: Config) -> None:
    """A heat map with a number in every square."""
    lrs, decays = grid(config)
    figure, axes = plt.subplots(figsize=(8.4, 7), layout="constrained")
    percent = 100 * found
    # What fails altogether would leave no colors for the rest.
    low = max(percent.min().item(), percent.max().item() - 20)
    image = axes.imshow(percent.numpy(), origin="lower", cmap="viridis", vmin=low)
    best = divmod(int(found.argmax()), config.side)
    for i in range(config.side):
        for j in range(config.side):
            value = percent[i, j].item()
            dark = value < (low + percent.max().item()) / 2
            weight = "bold" if (i, j) == best else "normal"
            color = "white" if dark else "black"
            axes.text(
                j, i, f"{value:.1f}", ha="center", va="center", color=color, weight=weight
            )
    square = plt.Rectangle(
        (best[1] - 0.5, best[0] - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2.5
    )
    axes.add_patch(square)
    axes.set_xticks(range(config.side), [number(x) for x in lrs.tolist()])
    axes.set_yticks(range(config.side), [number(x) for x in decays.tolist()])
    axes.set_xlabel("learning rate")
    axes.set_ylabel("weight decay")
    axes.set_title(
        f"AdamW on digits: {config.side**2} networks trained at once, {config.steps} steps"
    )
    extend = "min" if percent.min().item() < low else "neither"
    figure.colorbar(image, label="validation accuracy, %", extend=extend, shrink=0.85)
    save(figure, config.out)


def draw_ways(ways: Tensor, found: Tensor, config: Config) -> None:
    """Learning rates over steps, and how many of them there are at the end."""
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    steps = [config.steps * i // config.rounds for i in range(len(ways))]
    percent = 100 * found
    scale = Normalize(
        max(percent.min().item(), percent.max().item() - 5), percent.max().item()
    )
    colors = plt.get_cmap("viridis")
    for i in percent.argsort().tolist():
        color = colors(scale(percent[i].item()))
        axes.plot(steps, ways[:, i].tolist(), color=color, linewidth=1.2, alpha=0.8)
    axes.set_yscale("log")
    axes.set_xlim(0, config.steps)
    axes.set_xlabel("step")
    axes.set_ylabel("learning rate")
    axes.set_title(
        f"population-based training of {ways.shape[1]} networks on digits: every "
        f"{steps[1]} steps\nthe worst {config.share:.0%} continue from the best"
    )
    axes.grid(alpha=0.3)
    figure.colorbar(
        ScalarMappable(scale, colors),
        ax=axes,
        label="validation accuracy at the end, %",
        extend="min",
    )
    save(figure, config.pbt_out)


def save(figure: plt.Figure, path: Path) -> None:
    """Write a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"picture: {path}")


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Sweep AdamW's learning rate and weight decay on digits in one run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "side": "of the grid: as many learning rates and as many weight decays",
        "hidden": "width of the network",
        "batch": "images a step",
        "steps": "training steps",
        "rounds": "of exploitation and exploration in population-based training",
        "seed": "of weights, data and population",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=meaning)
    parser.add_argument(
        "--pbt", action="store_true", help="add a run of population-based training"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=default.compile,
        help="compile the training step",
    )
    parser.add_argument("--out", type=Path, default=default.out, help="heat map to write")
    parser.add_argument(
        "--pbt-out", type=Path, default=default.pbt_out, help="trajectories to write"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny sweep, for seconds: does it work?"
    )
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    config = replace(default, **options)
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and draw."""
    config = parse_arguments(arguments)
    # Members that decay to nothing would slow all others down: a CPU takes ten times as
    # long for numbers this side of 0.
    torch.set_flush_denormal(True)
    begin = time.perf_counter()
    module, data = network(config), Data(config.seed)
    trainer = Trainer(module, config)
    found = sweep(trainer, module, data, config)
    draw_sweep(found, config)
    if config.pbt:
        ways, accuracies = evolve(trainer, network(config), data, config)
        draw_ways(ways, accuracies, config)
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
