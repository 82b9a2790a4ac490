"""Measure how far gradient release's ways to accumulate end from true accumulation.

True accumulation sums the gradients of a step's micro-batches in p.grad and then makes
one ordinary step. Under gradient release the gradients are gone by then, and a policy has
to stand in for the sum:

* ``flag``: optimi's, ``optimizer.optimizer_accumulation = True`` for all micro-batches but
  the last: the state moves as in a step, the parameter does not;
* ``states``: ``accumulation="states"``: the state decays once and each gradient joins it;
* ``buffer``: ``accumulation="buffer"``: the gradients' sum is kept;
* ``bfloat16 buffer``: the same with ``buffer_dtype=torch.bfloat16``.

Two tasks, each with the same micro-batches for all policies, whose losses are divided by
their number as trainers do:

* a regression on a two-layer network with noisy targets: the distance between the weights
  at the end and those of true accumulation, as a share of the way that the latter went;
* gradients that are given, and do not depend on the weights: the distance between first
  moments as a share of the true one, the largest of all steps.

Both are medians over the seeds. How good a stand-in is depends on how much micro-batches
agree, which ``--noise`` and ``--batch`` change: with nothing but noise a sum of squares is
about the square of the sum, and where all are alike it is smaller by their number.
Bytes are those held between two backwards beside parameters and the optimizer's state.

Where the package optimi is installed, its own flag is measured too, against its own step.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

import optimi_func

try:
    import optimi
except ImportError:
    optimi = None


@dataclass(frozen=True)
class Config:
    """What to measure, and on what."""

    steps: int = 20
    micro: int = 8
    batch: int = 8
    noise: float = 1.0
    seed: int = 0
    seeds: int = 5
    json: Path | None = None

    def quick(self) -> "Config":
        """Shrink to seconds: this shows that all works, and measures nothing."""
        return replace(self, steps=3, micro=2, seeds=1)


@dataclass(frozen=True)
class Rule:
    """An optimizer, and how its library prepares a model for it."""

    make: Callable[..., Any]
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[..., Any] = optimi_func.prepare_for_gradient_release
    policies: tuple[str, ...] = ("flag", "states", "buffer", "bfloat16 buffer")


EAGER = {"compile": False}
MOMENTUM = {"momentum": 0.9}
RULES = {
    "SGD": Rule(optimi_func.SGD, 0.1, EAGER),
    "SGD, momentum": Rule(optimi_func.SGD, 0.02, MOMENTUM | EAGER),
    "SGD, Nesterov": Rule(optimi_func.SGD, 0.02, {"nesterov": True} | MOMENTUM | EAGER),
    "Adam": Rule(optimi_func.Adam, 0.01, EAGER),
    "AdamW": Rule(optimi_func.AdamW, 0.01, EAGER),
    "StableAdamW": Rule(optimi_func.StableAdamW, 0.01, EAGER),
    "RAdam": Rule(optimi_func.RAdam, 0.01, EAGER),
    "Ranger": Rule(optimi_func.Ranger, 0.01, EAGER),
    "Adan": Rule(optimi_func.Adan, 0.01, EAGER),
    "Lion": Rule(optimi_func.Lion, 0.002, EAGER),
}
if optimi is not None:
    ITS = {"prepare": optimi.prepare_for_gradient_release, "policies": ("flag",)}
    RULES |= {
        f"SGD, momentum: optimi {optimi.__version__}": Rule(
            optimi.SGD, 0.02, MOMENTUM, **ITS
        ),
        f"AdamW: optimi {optimi.__version__}": Rule(optimi.AdamW, 0.01, **ITS),
    }

POLICIES: dict[str, dict[str, Any]] = {
    "flag": {},
    "states": {"accumulation": "states"},
    "buffer": {"accumulation": "buffer"},
    "bfloat16 buffer": {"accumulation": "buffer", "buffer_dtype": torch.bfloat16},
}

# What the rules call it; optimi's SGD has Adam's name for it.
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")


class Regression(nn.Module):
    """A two-layer network that learns another one's outputs, with noise on them."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        teacher = torch.randn(16)
        x = torch.randn(config.steps, config.micro, config.batch, 16)
        self.x, y = x, torch.tanh(x @ teacher)
        self.y = y + config.noise * torch.randn(y.shape)

    def loss(self, step: int, i: int) -> Tensor:
        """Of one micro-batch."""
        return F.mse_loss(self.layers(self.x[step, i]).squeeze(-1), self.y[step, i])


class Given(nn.Module):
    """A parameter whose gradients are drawn beforehand."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.w = nn.Parameter(torch.randn(256))
        drift = torch.randn(256)
        noise = torch.randn(config.steps, config.micro, 256)
        self.g = drift + config.noise * noise

    def loss(self, step: int, i: int) -> Tensor:
        """Linear in the parameter."""
        return (self.w * self.g[step, i]).sum()


@dataclass(frozen=True)
class Run:
    """Where a training went, every step's first moment, and bytes held on the way."""

    start: Tensor
    end: Tensor
    moments: list[Tensor]
    held: int


def train(model: Regression | Given, rule: Rule, policy: str | None, config: Config) -> Run:
    """Train the model under a policy, or with true accumulation.

    Raises:
        ValueError: The rule refuses the policy.
    """
    release = policy is not None
    optimizer = rule.make(
        model.parameters(), lr=rule.lr, gradient_release=release, **rule.options
    )
    options = POLICIES[policy] if release else {}
    if "accumulation" in options:
        options = options | {"accumulation_steps": config.micro}
    handle = rule.prepare(model, optimizer, **options) if release else None
    start, moments, held = weights(model), [], 0
    for step in range(config.steps):
        for i in range(config.micro):
            last = i + 1 == config.micro
            if policy == "flag":
                optimizer.optimizer_accumulation = not last
            if last:
                carried = handle.state_dict()["buffer"] if options else {}
                held = held_bytes(optimizer, carried)
            (model.loss(step, i) / config.micro).backward()
        if not release:
            optimizer.step()
            optimizer.zero_grad()
        moments.append(first_moment(optimizer))
    return Run(start, weights(model), moments, held)


def weights(model: nn.Module) -> Tensor:
    """A copy of all of them, flat."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def first_moment(optimizer: Optimizer) -> Tensor:
    """A copy of all of it, flat; empty for a rule without."""
    found = [
        state[name].flatten()
        for state in optimizer.state.values()
        for name in FIRST_MOMENTS
        if state.get(name) is not None
    ]
    return torch.cat(found) if found else torch.empty(0)


def held_bytes(optimizer: Optimizer, carried: dict[str, Tensor]) -> int:
    """Bytes of state, gradients and sums of them."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    states = [x for state in optimizer.state.values() for x in state.values()]
    held = [*grads, *states, *carried.values()]
    return sum(x.nbytes for x in held if isinstance(x, Tensor))


@dataclass(frozen=True)
class Cell:
    """What a rule and a policy come to; None where there is nothing to measure."""

    error: float | None = None  # of the way that the weights went
    moment: float | None = None  # of the first moment
    extra: float | None = None  # bytes per parameter
    refusal: str | None = None


def measure(rule: Rule, config: Config) -> dict[str, Cell]:
    """By policy, medians over the seeds."""
    true = [train(task, rule, None, config) for task in tasks(config)]
    cells: dict[str, Cell] = {}
    for policy in rule.policies:
        try:
            own = [train(task, rule, policy, config) for task in tasks(config)]
        except ValueError as refusal:
            cells[policy] = Cell(refusal=str(refusal))
            continue
        pairs = list(zip(own, true))
        regression, given = pairs[: config.seeds], pairs[config.seeds :]
        moved = [distance(a.end, b.end, b.end - b.start) for a, b in regression]
        moments = [moment_distance(a, b) for a, b in given if b.moments[0].numel()]
        a, b = pairs[0]
        # What true accumulation holds is its state and a gradient for each parameter.
        extra = (a.held - b.held) / b.end.numel() + b.end.element_size()
        cells[policy] = Cell(median(moved), median(moments) if moments else None, extra)
    return cells


def tasks(config: Config) -> Iterator[Regression | Given]:
    """All of both kinds, first the regressions."""
    for kind in (Regression, Given):
        for seed in range(config.seed, config.seed + config.seeds):
            yield kind(config, seed)


def moment_distance(own: Run, true: Run) -> float:
    """The largest of all steps."""
    return max(distance(a, b, b) for a, b in zip(own.moments, true.moments))


def distance(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """Between a and b, as a share of the norm of `scale`."""
    a, b, scale = a.double(), b.double(), scale.double()
    return ((a - b).norm() / scale.norm()).item()


Cells = dict[str, dict[str, Cell]]


def table(cells: Cells, title: str, text: Callable[[Cell], str]) -> list[str]:
    """Markdown, a line per rule and a column per policy."""
    width = max(len(title), *map(len, cells))
    heads = [f"{policy:>8}" for policy in POLICIES]
    lines = [
        f"| {title:<{width}} | {' | '.join(heads)} |",
        f"|-{'-' * width}-|{''.join('-' * len(head) + '-:|' for head in heads)}",
    ]
    for name, row in cells.items():
        texts = [text(row[policy]) if policy in row else "-" for policy in POLICIES]
        line = " | ".join(f"{t:>{len(head)}}" for t, head in zip(texts, heads))
        lines.append(f"| {name:<{width}} | {line} |")
    return lines


def percent(cell: Cell, value: float | None) -> str:
    """Two digits of it."""
    if cell.refusal is not None:
        return "refused"
    return "-" if value is None else f"{100 * value:.2g}"


def report(cells: Cells) -> str:
    """All tables, and why what is refused is."""
    lines = table(cells, "weights: error in %", lambda cell: percent(cell, cell.error))
    lines += ["", *table(cells, "first moment: %", lambda c: percent(c, c.moment))]
    # The same for all rules.
    memory = {"extra bytes": cells["AdamW"]}
    lines += ["", *table(memory, "per parameter", lambda cell: f"{cell.extra:.3g}"), ""]
    lines += [
        f"{name}, {policy}: {cell.refusal}"
        for name, row in cells.items()
        for policy, cell in row.items()
        if cell.refusal is not None
    ]
    return "\n".join(lines)


def results(cells: Cells, config: Config) -> dict[str, Any]:
    """The same for a machine to read; shares and not percents."""
    return {
        "torch": torch.__version__,
        "config": {k: v for k, v in asdict(config).items() if k != "json"},
        "cells": {
            name: {policy: asdict(cell) for policy, cell in row.items()}
            for name, row in cells.items()
        },
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Measure what accumulation under gradient release is worth.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "steps": "of the optimizer",
        "micro": "micro-batches in each",
        "batch": "size of a micro-batch of the regression",
        "noise": "standard deviation, on its targets and on given gradients",
        "seed": "the first one",
        "seeds": "to take the median of",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=type(value), default=value, help=meaning)
    parser.add_argument(
        "--json", type=Path, help="file for the numbers", default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, for seconds: does it work?"
    )
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    config = replace(default, **options)
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    config = parse_arguments(arguments)
    torch.set_num_threads(1)  # Everything is tiny.
    cells = {
        name: measure(rule, config)
        # Without a terminal there is no bar.
        for name, rule in tqdm(RULES.items(), "rules", unit="rule", disable=None)
    }
    print(
        f"{config.steps} steps of {config.micro} micro-batches of {config.batch}, noise "
        f"{config.noise:g}, median of {config.seeds} seeds, torch {torch.__version__}\n"
    )
    print(report(cells))
    if config.json is not None:
        text = json.dumps(results(cells, config), indent=2)
        config.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
