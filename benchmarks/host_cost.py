"""What does a step of a few tiny tensors cost the host?

AdamW and SGD with momentum on 1 to 1000 tensors of 64 elements, in float32 and wall time,
beside torch's own as its users may ask for it: fused, foreach, and the for-loop, which is
its default on a CPU. lr is another one at each step, as under a scheduler.
"""

from dataclasses import asdict, dataclass
from typing import Any

import harness
import torch
from harness import NUMBERS, OURS, Found, Step, option, parameters
from matplotlib.axes import Axes
from tqdm import tqdm

import optimi_func

TORCH: dict[str, dict[str, bool]] = {
    "torch fused": {"fused": True},
    "torch foreach": {"foreach": True},
    "torch for-loop": {"foreach": False},
}
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", NUMBERS),
    "SGD, momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}),
}


@dataclass(frozen=True)
class Config(harness.Timed):
    tensors: tuple[int, ...] = option((1, 6, 20, 50, 1000), "of them")
    elements: int = option(64, "of a tensor")
    rounds: int = option(300, "measured rounds, at most")
    turns: int = option(400, "tensors to step in a round, at least")
    compile: bool | None = option(None, "optimi_func's steps; by default if possible")


QUICK: Found = {"tensors": (1, 4), "rounds": 5, "turns": 20}


def scheduled(optimizer: torch.optim.Optimizer, steps: int) -> Step:
    """So many steps, each with an lr of its own."""

    def run() -> None:
        for _ in range(steps):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9999
            optimizer.step()

    return run


def measure_cell(rule: str, n: int, config: Config) -> Found:
    """Ours beside each of torch's."""
    torch.manual_seed(config.seed)
    tensors, grads = (list(torch.randn(n, config.elements)) for _ in range(2))
    name, numbers = RULES[rule]
    ours, theirs = (getattr(x, name) for x in (optimi_func, torch.optim))
    made = {OURS: ours(parameters(tensors, grads), compile=config.compile, **numbers)}
    for way, how in TORCH.items():
        made[way] = theirs(parameters(tensors, grads), **how, **numbers)
    inner = max(1, config.turns // n)
    steps = {way: scheduled(optimizer, inner) for way, optimizer in made.items()}
    taken = harness.interleave(steps, config, f"{rule}, {n} tensors")
    each = {way: [s / inner for s in seconds] for way, seconds in taken.items()}
    return {way: asdict(harness.ratios(each, way)[OURS]) for way in TORCH}


def measure(config: Config) -> Found:
    """By rule and number of tensors."""
    found: Found = {rule: {} for rule in RULES}
    cells = [(rule, n) for rule in RULES for n in config.tensors]
    for rule, n in tqdm(cells, "cells", disable=None):
        found[rule][str(n)] = measure_cell(rule, n, config)
    return {"host cost": found}


def report(found: Found) -> str:
    """A line per rule and number of tensors, a column per way of torch's."""
    rows = [[f"{found['config']['elements']} elements each", "ours, us", *TORCH]]
    for rule, by_count in found["host cost"].items():
        for n, cell in by_count.items():
            own = f"{1e6 * cell['torch fused']['seconds']:.1f}"
            rows.append([f"{rule}, n = {n}", own, *(harness.text(cell[x]) for x in TORCH)])
    return f"ratio of times to torch's (quartiles)\n\n{harness.table(rows)}"


def draw(found: Found) -> Axes:
    """A line per rule and way, with quartiles."""
    title = f"Step of n tensors of {found['config']['elements']} elements"
    (axes,) = harness.axes_of(title, figsize=(9, 5))
    for rule, by_count in found["host cost"].items():
        ns = [int(n) for n in by_count]
        for way in TORCH:
            middle, low, high = zip(*(harness.spread(c[way]) for c in by_count.values()))
            axes.plot(ns, middle, marker="o", label=f"{rule}, of {way}'s")
            axes.fill_between(ns, low, high, alpha=0.2)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="tensors", ylabel="ratio; less is faster")
    harness.legend(axes, 3)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
