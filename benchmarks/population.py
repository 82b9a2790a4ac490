"""How much faster is a step of many models at once than a loop over them?

A training step is forward, backward and update of every member, each with a learning rate
and a weight decay of its own, on one batch that all see. The ways that are compared:

* ``loop``: for each member a module and a ``torch.optim.AdamW(fused=True)``;
* ``compiled loop``: for each member one call of a pure training step, which
  ``torch.compile`` has made one graph for all of them;
* ``vmap``: ``torch.vmap`` of that step, as one writes it by hand, uncompiled;
* ``population``: ``optimi_func.population``, uncompiled;
* ``one graph``: the same under ``torch.compile(fullgraph=True)``.

The error is the largest difference between a weight and that of the loop after all of it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median, quantiles
from typing import Any

import harness
import torch
import torch.nn.functional as F
from harness import Found, Step, option
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state

from optimi_func import adamw, population
from optimi_func.population import Population

NUMBERS = {"betas": (0.9, 0.99), "eps": 1e-6}


@dataclass(frozen=True)
class Config(harness.Timed):
    members: tuple[int, ...] = option((4, 16, 64, 256), "how many models")
    inputs: int = option(64, "of the two-layer network")
    hidden: int = option(32, "its width")
    classes: int = option(10, "its outputs")
    batch: int = option(32, "samples, the same for all members")
    rounds: int = option(40, "measured rounds, at most")
    seconds: float = option(20.0, "to measure a number for; no fewer than 5 rounds")
    compile: bool = option(True, "measure the compiled step too")


QUICK: Found = {"members": (3,), "rounds": 3, "warmup": 1}
WAYS = ("loop", "compiled loop", "vmap", "population", "one graph")
Batch = tuple[Tensor, Tensor]


def batches(config: Config) -> Iterator[Batch]:
    """The same ones for each way, over and over."""
    torch.manual_seed(config.seed)
    xs = torch.randn(16, config.batch, config.inputs)
    ys = torch.randint(config.classes, (16, config.batch))
    return cycle(list(zip(xs, ys)))


def ways(members: int, config: Config) -> tuple[dict[str, Step], Callable[[str], float]]:
    """A step of all members, by way, and how far a way has come from the loop."""
    torch.manual_seed(config.seed)
    sizes = ((config.inputs, config.hidden), (config.hidden, config.classes))
    models = [
        nn.Sequential(nn.Linear(*sizes[0]), nn.ReLU(), nn.Linear(*sizes[1]))
        for _ in range(members)
    ]
    lrs = torch.logspace(-4, -2, members, dtype=torch.float64)
    decays = torch.logspace(-4, -1, members, dtype=torch.float64)
    hyper = {"lr": lrs, "weight_decay": decays, **NUMBERS}
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=wd, fused=True, **NUMBERS)
        for m, lr, wd in zip(models, lrs.tolist(), decays.tolist())
    ]

    def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(models[0], params, x), y)

    def all_at_once(members: Population, x: Tensor, y: Tensor) -> Population:
        _, grads = population.loss_and_grad(loss_fn, members, x, y)
        return population.step(adamw, members, grads)

    def member(
        params: dict[str, Tensor], state: Any, lr: Tensor, decay: Tensor, *data: Any
    ):
        optimizer = adamw(lr=lr, weight_decay=decay, **NUMBERS)
        return optimizer.step(params, grad(loss_fn)(params, *data), state)

    def loop(data: Iterator[Batch]) -> None:
        x, y = next(data)
        for model, optimizer in zip(models, optimizers):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    init = adamw(lr=1.0, **NUMBERS).init
    stacked = {k: v.detach() for k, v in stack_module_state(models)[0].items()}
    # What each way has come to: populations, a pair of stacked trees, a list of pairs.
    found: dict[str, Any] = {"vmap": (stacked, torch.vmap(init)(stacked))}
    functions = {"population": all_at_once}
    together = torch.vmap(member, in_dims=(0, 0, 0, 0, None, None))
    one = member
    if config.compile:
        torch.compiler.reset()  # Every number of members is a graph of its own.
        functions["one graph"] = torch.compile(all_at_once, fullgraph=True)
        one = torch.compile(member, fullgraph=True)
        own = [{k: v[i].clone() for k, v in stacked.items()} for i in range(members)]
        found["compiled loop"] = [(params, init(params)) for params in own]
    for way in functions:
        found[way] = population.init(adamw, models, hyper)

    def step(way: str, data: Iterator[Batch]) -> None:
        x, y = next(data)
        if way == "vmap":
            found[way] = together(*found[way], lrs, decays, x, y)
        elif way == "compiled loop":
            each = zip(found[way], lrs, decays)
            found[way] = [one(*trees, lr, decay, x, y) for trees, lr, decay in each]
        else:
            found[way] = functions[way](found[way], x, y)

    def weight(way: str, i: int, name: str) -> Tensor:
        if way == "compiled loop":
            return found[way][i][0][name]
        params = found[way][0] if way == "vmap" else found[way].params
        return params[name][i]

    def error(way: str) -> float:
        if way == "loop":
            return 0.0
        named = [(i, n, p) for i, m in enumerate(models) for n, p in m.named_parameters()]
        return max((weight(way, i, n) - p).abs().max().item() for i, n, p in named)

    steps = {way: partial(step, way, batches(config)) for way in WAYS if way in found}
    return {"loop": partial(loop, batches(config)), **steps}, error


def measure_members(members: int, config: Config) -> Found:
    """All ways, taking turns; the ratio is the loop's time by its own."""
    steps, error = ways(members, config)
    first = {
        way: harness.timed(step, "cpu", time.perf_counter) for way, step in steps.items()
    }
    seconds = harness.interleave(steps, config, f"{members} members")
    cells: Found = {}
    for way, taken in seconds.items():
        low, middle, high = quantiles([a / b for a, b in zip(seconds["loop"], taken)], n=4)
        numbers = {"seconds": median(taken), "ratio": middle, "low": low, "high": high}
        cells[way] = numbers | {"error": error(way), "compilation": first[way]}
    return cells


def measure(config: Config) -> Found:
    """By number of members."""
    return {"cells": {str(n): measure_members(n, config) for n in config.members}}


def report(found: Found) -> str:
    """A line per way and number of members."""
    config = found["config"]
    rows = [["way and members", "times faster (quartiles)", "error", "first call, s"]]
    for members, by_way in found["cells"].items():
        for way, cell in by_way.items():
            numbers = [f"{cell['error']:.1e}", f"{cell['compilation']:.2g}"]
            rows.append([f"{way} of {members}", harness.text(cell), *numbers])
    return (
        f"{config['inputs']}-{config['hidden']}-{config['classes']} network, batch "
        f"{config['batch']}, AdamW, median of {config['rounds']} rounds\n\n"
        f"{harness.table(rows)}"
    )


def draw(found: Found) -> Axes:
    """A group of bars per number of members."""
    title = "A step of many models at once: times faster than a loop over them"
    (axes,) = harness.axes_of(title, figsize=(9, 5))
    harness.bars(
        axes, {f"{n} members": cells for n, cells in found["cells"].items()}, WAYS, 1
    )
    axes.set_ylabel("times faster")
    harness.legend(axes)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
