"""What does a step of a few tiny tensors cost the host?

Our AdamW, Adam, SGD with momentum and Lion on 1 to 50 tensors of 64 elements, against
torch's own with ``fused=True``; torch has no Lion: that one is against its AdamW. In
bfloat16 ours have Kahan summation, which is their default, and torch's have none. lr is
another one at each step, as under a scheduler. The ratio is that of the medians. The goal
is at most 1 for one tensor, and 0.75 for more.

OpenMP's threads sleep while they wait: where they spin, two libraries in one process take
the cores from each other. On a busy machine ``--cpu-time`` counts the seconds that the
calling thread ran instead of those that went by.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # Read once, when torch is imported.

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import harness
import torch
from harness import OURS, Found, Step, option, parameters
from matplotlib.axes import Axes
from tqdm import tqdm

import optimi_func

TORCH = "torch fused"
MOMENTUM = {"momentum": 0.9}
Make = Callable[..., torch.optim.Optimizer]
RULES: dict[str, tuple[Make, Make, dict[str, Any]]] = {
    "AdamW": (optimi_func.AdamW, torch.optim.AdamW, {}),
    "Adam": (optimi_func.Adam, torch.optim.Adam, {}),
    "SGD, momentum": (optimi_func.SGD, torch.optim.SGD, MOMENTUM),
    "Lion (torch: AdamW)": (optimi_func.Lion, torch.optim.AdamW, {}),
}
CLOCKS = {True: time.thread_time, False: time.perf_counter}


def goal(n: int) -> float:
    """The largest ratio that is good enough."""
    return 1.0 if n == 1 else 0.75


@dataclass(frozen=True)
class Config(harness.Timed):
    tensors: tuple[int, ...] = option((1, 2, 4, 6, 10, 20, 50), "of them")
    elements: int = option(64, "of a tensor")
    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16"), "of tensors", ("float32", "bfloat16", "float64")
    )
    rounds: int = option(60, "measured rounds, at most")
    inner: int = option(50, "steps in a round")
    threads: int = option(2, "of torch")
    compile: bool | None = option(None, "optimi_func's steps; by default if possible")
    cpu_time: bool = option(False, "count the calling thread's seconds only")


QUICK: Found = {"tensors": (1, 4), "rounds": 5, "inner": 5}


def scheduled(optimizer: torch.optim.Optimizer, steps: int) -> Step:
    """So many steps, each with an lr of its own."""

    def run() -> None:
        for _ in range(steps):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9999
            optimizer.step()

    return run


def measure_cell(rule: str, dtype: str, n: int, config: Config) -> dict[str, Found]:
    """Ours and torch's, seconds of one step."""
    torch.manual_seed(config.seed)
    shape = (n, config.elements)
    tensors, grads = (list(torch.randn(shape).to(getattr(torch, dtype))) for _ in range(2))
    own, other, options = RULES[rule]
    made = {
        TORCH: other(parameters(tensors, grads), lr=1e-3, fused=True, **options),
        OURS: own(parameters(tensors, grads), lr=1e-3, compile=config.compile, **options),
    }
    steps = {way: scheduled(optimizer, config.inner) for way, optimizer in made.items()}
    title, clock = f"{rule}, {dtype}, {n} tensors", CLOCKS[config.cpu_time]
    taken = harness.interleave(steps, config, title, clock=clock)
    each = {way: [s / config.inner for s in seconds] for way, seconds in taken.items()}
    cells = harness.ratios(each, TORCH)
    middle = cells[OURS].seconds / cells[TORCH].seconds
    return {
        TORCH: asdict(cells[TORCH]),
        OURS: asdict(cells[OURS]) | {"ratio": middle, "goal": goal(n)},
    }


def measure(config: Config) -> Found:
    """By dtype, rule and number of tensors."""
    found: Found = {d: {r: {} for r in RULES} for d in config.dtypes}
    cells = [(d, r, n) for d in config.dtypes for r in RULES for n in config.tensors]
    for dtype, rule, n in tqdm(cells, "cells", disable=None):
        found[dtype][rule][str(n)] = measure_cell(rule, dtype, n, config)
    return {"host cost": found}


def clock(found: Found) -> str:
    """Return the name of the clock."""
    cpu = found["config"]["cpu_time"]
    return "CPU time of the calling thread" if cpu else "wall time"


def report(found: Found) -> str:
    """A line per dtype and number of tensors, a column per rule."""
    rows = [[f"{found['config']['elements']} elements each", "goal", *RULES]]
    for dtype, by_rule in found["host cost"].items():
        for n in next(iter(by_rule.values())):
            texts = [cell_text(by_rule[rule][n]) for rule in RULES]
            rows.append([f"{dtype}, n = {n}", f"<= {goal(int(n)):.2f}", *texts])
    texts = [text for row in rows[1:] for text in row[2:]]
    missed, open_ = (sum(mark in text for text in texts) for mark in "!?")
    return (
        f"{clock(found)}: ratio to torch fused (quartiles), us ours / us torch's\n\n"
        f"{harness.table(rows)}\n\n! above the goal: {missed} of {len(texts)}; ? the goal "
        f"is between the quartiles, noise decides: {open_}"
    )


def cell_text(cell: dict[str, Found]) -> str:
    """The ratio and both times."""
    ours, other = cell[OURS], cell[TORCH]
    mark = "? " if ours["low"] <= ours["goal"] <= ours["high"] else ""
    mark += "! " if ours["ratio"] > ours["goal"] else ""
    times = f"{1e6 * ours['seconds']:.1f} / {1e6 * other['seconds']:.1f}"
    return f"{mark}{harness.text(ours)}, {times}"


def draw(found: Found) -> Axes:
    """A line per rule, with quartiles, and the goal."""
    title = f"Step of n tensors of {found['config']['elements']} elements: {clock(found)}"
    by_dtype, top = found["host cost"], 0.0
    grid = harness.axes_of(title, 1, len(by_dtype), figsize=(12, 5), sharey=True)
    for axes, (dtype, by_rule) in zip(grid, by_dtype.items()):
        for (rule, cells), marker in zip(by_rule.items(), "osD^"):
            ns = [int(n) for n in cells]
            middle, low, high = zip(*(harness.spread(c[OURS]) for c in cells.values()))
            axes.plot(ns, middle, marker=marker, label=rule)
            axes.fill_between(ns, low, high, alpha=0.2)
        goals = [goal(n) for n in ns]
        axes.step(ns, goals, "k--", where="mid", linewidth=1, label="goal, at most")
        axes.set(xscale="log", xlabel="tensors", title=dtype)
        axes.set_xticks(ns, [str(n) for n in ns])
        axes.minorticks_off()
        top = max(top, *(line.get_ydata().max() for line in axes.lines))
    grid[0].set_ylim(0, 1.2 * top)
    grid[0].set_ylabel("ratio to torch fused; less is faster")
    harness.legend(grid[0])
    return grid[0]


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
