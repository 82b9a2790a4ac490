"""Measure a step of many models at once against a loop over them.

A training step is forward, backward and update of every member, each with a learning rate
and a weight decay of its own, on one batch that all see. The ways that are compared:

* ``loop``: for each member a module and a ``torch.optim.AdamW(fused=True)``;
* ``vmap``: ``optimi_func.population``, uncompiled;
* ``one graph``: the same under ``torch.compile(fullgraph=True)``.

They take turns within each round, and the ratio to the loop is taken in each round: what
slows the machine down for a while slows all of them. The table has the medians over the
rounds, and the largest difference between a weight and that of the loop after all of it.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from optimi_func import adamw, population
from optimi_func.population import Population

NUMBERS = {"betas": (0.9, 0.99), "eps": 1e-6}


@dataclass(frozen=True)
class Config:
    """What to measure, and on what."""

    members: tuple[int, ...] = (4, 16, 64, 256)
    inputs: int = 64
    hidden: int = 32
    classes: int = 10
    batch: int = 32
    rounds: int = 40
    warmup: int = 3
    seed: int = 0
    threads: int = torch.get_num_threads()
    compile: bool = True
    json: Path | None = None

    def quick(self) -> "Config":
        """Shrink to seconds: this shows that all works, and measures nothing."""
        return replace(self, members=(3,), rounds=3, warmup=1)


Step = Callable[[Tensor, Tensor], None]


class Ways:
    """The same members, trained in each of the ways."""

    def __init__(self, members: int, config: Config) -> None:
        torch.manual_seed(config.seed)
        self.models = [
            nn.Sequential(
                nn.Linear(config.inputs, config.hidden),
                nn.ReLU(),
                nn.Linear(config.hidden, config.classes),
            )
            for _ in range(members)
        ]
        lrs = torch.logspace(-4, -2, members, dtype=torch.float64)
        decays = torch.logspace(-4, -1, members, dtype=torch.float64)
        hyper = {"lr": lrs, "weight_decay": decays, **NUMBERS}
        self.populations = {
            "vmap": population.init(adamw, self.models, hyper),
            "one graph": population.init(adamw, self.models, hyper),
        }
        self.optimizers = [
            torch.optim.AdamW(
                m.parameters(), lr=lr, weight_decay=decay, fused=True, **NUMBERS
            )
            for m, lr, decay in zip(self.models, lrs.tolist(), decays.tolist())
        ]
        module = self.models[0]

        def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(module, params, x), y)

        def step(members: Population, x: Tensor, y: Tensor) -> Population:
            _, grads = population.loss_and_grad(loss_fn, members, x, y)
            return population.step(adamw, members, grads)

        self.functions = {"vmap": step}
        if config.compile:
            torch.compiler.reset()  # Every number of members is a graph of its own.
            self.functions["one graph"] = torch.compile(step, fullgraph=True)

    def steps(self) -> dict[str, Step]:
        """One step of all members, by way."""

        def run(way: str) -> Step:
            def step(x: Tensor, y: Tensor) -> None:
                members = self.populations[way]
                self.populations[way] = self.functions[way](members, x, y)

            return step

        return {"loop": self.loop, **{way: run(way) for way in self.functions}}

    def loop(self, x: Tensor, y: Tensor) -> None:
        """Each model by itself."""
        for model, optimizer in zip(self.models, self.optimizers):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def error(self, way: str) -> float:
        """The largest difference between a weight and that of the loop."""
        if way == "loop":
            return 0.0
        ends = population.state_dicts(self.populations[way], self.models[0])
        ours = torch.stack([torch.cat([x.flatten() for x in e.values()]) for e in ends])
        return (ours - flat(self.models)).abs().max().item()


def flat(models: Sequence[nn.Module]) -> Tensor:
    """A copy of all their weights, a row a model."""
    rows = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]
    return torch.stack(rows)


@dataclass(frozen=True)
class Cell:
    """What a way comes to."""

    seconds: float  # a step of all members
    ratio: float  # the loop's seconds by its own: how many times faster
    low: float  # of the ratio, quartiles over the rounds
    high: float
    error: float
    compilation: float  # seconds of the first call


def measure(members: int, config: Config) -> dict[str, Cell]:
    """All ways, taking turns."""
    ways = Ways(members, config)
    steps = ways.steps()
    torch.manual_seed(config.seed)
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    first: dict[str, float] = {}
    rounds = range(config.rounds + config.warmup)
    # Without a terminal there is no bar.
    for i in tqdm(rounds, f"{members} members", unit="round", disable=None, leave=False):
        x = torch.randn(config.batch, config.inputs)
        y = torch.randint(config.classes, (config.batch,))
        for way, step in steps.items():
            begin = time.perf_counter()
            step(x, y)
            taken = time.perf_counter() - begin
            first.setdefault(way, taken)
            if i >= config.warmup:
                seconds[way].append(taken)
    cells: dict[str, Cell] = {}
    for way, taken in seconds.items():
        ratios = [a / b for a, b in zip(seconds["loop"], taken)]
        low, _, high = quantiles(ratios, n=4)
        numbers = (median(taken), median(ratios), low, high)
        cells[way] = Cell(*numbers, ways.error(way), first[way])
    return cells


Cells = dict[int, dict[str, Cell]]


def report(cells: Cells) -> str:
    """A line per way and number of members."""
    head = ["members", "way", "times faster", "quartiles", "error", "first call, s"]
    rows = [
        [
            str(members),
            way.ljust(9),
            f"{cell.ratio:.3g}",
            f"{cell.low:.3g} to {cell.high:.3g}",
            f"{cell.error:.1e}",
            f"{cell.compilation:.2g}",
        ]
        for members, row in cells.items()
        for way, cell in row.items()
    ]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [" | ".join(x.rjust(w) for x, w in zip(r, widths)) for r in [head, *rows]]
    rule = "-|-".join("-" * w for w in widths)
    return "\n".join(f"| {line} |" for line in [lines[0], rule, *lines[1:]])


def results(cells: Cells, config: Config) -> dict[str, Any]:
    """The same for a machine to read."""
    return {
        "torch": torch.__version__,
        "config": {k: v for k, v in asdict(config).items() if k != "json"},
        "cells": {
            str(members): {way: asdict(cell) for way, cell in row.items()}
            for members, row in cells.items()
        },
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Measure a step of many models at once against a loop over them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--members", type=int, nargs="+", default=default.members, help="how many models"
    )
    for name, meaning in {
        "inputs": "of the two-layer network",
        "hidden": "its width",
        "classes": "its outputs",
        "batch": "samples, the same for all members",
        "rounds": "to take the median of",
        "seed": "of weights and data",
        "threads": "for torch to use",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=meaning)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=default.compile,
        help="measure the compiled step too",
    )
    parser.add_argument(
        "--json", type=Path, help="file for the numbers", default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, for seconds: does it work?"
    )
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    config = replace(default, **options)
    config = replace(config, members=tuple(config.members))
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    config = parse_arguments(arguments)
    torch.set_num_threads(config.threads)
    cells = {members: measure(members, config) for members in config.members}
    print(
        f"{config.inputs}-{config.hidden}-{config.classes} network, batch {config.batch}, "
        f"AdamW, {config.threads} threads, torch {torch.__version__}, median of "
        f"{config.rounds} rounds\n"
    )
    print(report(cells))
    if config.json is not None:
        text = json.dumps(results(cells, config), indent=2)
        config.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
