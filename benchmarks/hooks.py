"""Do hooks help? A small GPT, trained with and without them, and at three widths.

The model, the data and the loss are those of the task "language" of ``which_tasks.py``. The
model has width 48 instead of 96, and so a third of its parameters, because several hundred
runs have to end in about an hour of one core. The steps are eager: at this size compiled
ones take as long. No optimizer decays weights.

The table has a row for AdamW, for Muon (hidden matrices; the rest by AdamW) and for SOAP:

* ``none``: no hook, and one lr for all parameters, as in ``which.py``;
* ``cautious``: for all parameters, also with one lr. Muon and SOAP refuse it;
* ``floor(0.35)``, ``floor(2)`` and ``hyperball``: for the hidden matrices. The rest trains
  without a hook, at the best lr of ``none``, and only the lr of the hidden matrices is
  searched;
* ``own lr``: the same without a hook. In these cells the hidden matrices have an lr of
  their own, which is an advantage by itself. This row shows how large it is;
* ``hyperball, unit`` and ``own lr, unit``: hidden matrices start with a root mean square of
  1 / sqrt(inputs). The GPT starts them with 0.05, or 0.025 where a layer adds to the
  residual stream, which is a third or a sixth of that. Other rules let them grow, but
  hyperball keeps the norm that it finds.

Of a hidden matrix of this width, Muon's directions have a root mean square of 0.2
(``adjust_lr_fn="match_rms_adamw"``). In the speed records of NanoGPT, where the floor of
0.35 comes from, they are 5.5 times shorter (1 / sqrt(768)). ``floor(2)`` is their floor in
our units. A floor that is never reached changes nothing, and its losses are those of
``own lr``.

Each cell has a grid of lrs with factors of 2, which grows as long as the best lr is at an
edge, and gets the half steps beside the best. The best lr is selected with seed 0, and is
then trained with the other seeds. The lr of the rest is a whole step. Losses are held-out,
in bits per byte, after the last step. Runs with the same seed have the same first weights
and the same batches, so differences between cells are taken seed by seed.

The second question is whether the best lr moves with the width. AdamW and Muon, without a
hook and with hyperball, train models of half and twice the width over the grid. Where the
hidden matrices have an lr of their own, that of the rest is the same at all widths.
``vertex`` is where a parabola through the best and its neighbours has its minimum.

Each run is written to ``--runs FILE`` when it ends, and is not trained again if the file
has it. The results are such a file, too.
"""

import inspect
import json
import math
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mean, stdev
from typing import Any, NamedTuple

import harness
import which
import which_tasks
from harness import Found, option
from matplotlib.axes import Axes
from torch import nn
from tqdm import tqdm
from which_optimizers import Contender
from which_tasks import Task

import optimi_func
from optimi_func import Mixed, hidden_matrices, hooks

WIDTH, HEAD = 48, 24  # of the table's model, and of a head of attention
NONE, OWN = "none", "own lr"
# The rules of hidden matrices and of the rest, and log2 of the lr in the middle.
RULES = {
    "AdamW": ("adamw", "adamw", -7),
    "Muon": ("muon", "adamw", -6),
    "SOAP": ("soap", "soap", -7),
}
# The losses of each seed by log2 of the lr.
Grid = dict[float, list[float]]


class Way(NamedTuple):
    """How a row of the table trains.

    Attributes:
        hooks: Of hidden matrices, and of the rest if everywhere=True.
        everywhere: All parameters have one lr, and not the rest that of the row `none`.
        middle: log2 of the lr in the middle of the grid. None: the best of the row `none`.
        unit: Hidden matrices start with a root mean square of 1 / sqrt(inputs).
    """

    hooks: tuple[Any, ...] = ()
    everywhere: bool = False
    middle: int | None = None
    unit: bool = False


BALL = (hooks.hyperball(),)
WAYS = {
    NONE: Way(everywhere=True),
    "cautious": Way((hooks.cautious(),), everywhere=True),
    "hyperball": Way(BALL, middle=-6),
    OWN: Way(),
    "floor(2)": Way((hooks.floor(2.0),)),
    "floor(0.35)": Way((hooks.floor(0.35),)),
    "hyperball, unit": Way(BALL, middle=-5, unit=True),
    f"{OWN}, unit": Way(unit=True),
}
# What trains at all widths.
TRANSFERS = {
    "AdamW": (NONE, f"{OWN}, unit", "hyperball", "hyperball, unit"),
    "Muon": (NONE, "hyperball, unit"),
}
# Seconds of a run by those of AdamW's, roughly: for the estimate alone.
COSTS = {"AdamW": 1.0, "Muon": 1.3, "SOAP": 1.8}


@dataclass(frozen=True)
class Config(harness.Options):
    threads: int = option(1, "of torch")
    rules: tuple[str, ...] = option(tuple(RULES), "to train, of AdamW, Muon and SOAP")
    ways: tuple[str, ...] = option(tuple(WAYS), "to compare: hooks and controls")
    seeds: int = option(5, "at the best lr")
    lrs: int = option(5, "of a grid; an odd number")
    growth: int = option(4, "lrs more at each edge, at most")
    finer: bool = option(True, "the grid, by half a step beside the best")
    transferred: tuple[str, ...] = option(tuple(TRANSFERS), "to train at all widths")
    widths: tuple[int, ...] = option((24, 48, 96), "multiples of 24")
    width_seeds: int = option(2, "at each lr of the widths")
    shorter: int = option(1, "divides the steps")
    compile: bool = option(False, "the steps")
    runs: str = option("outputs/hooks/runs.json", "the runs so far, to go on from")


QUICK: Found = {
    **{"rules": ("AdamW", "Muon"), "ways": (NONE, "cautious", "hyperball", OWN)},
    **{"seeds": 2, "lrs": 3, "growth": 0, "finer": False, "shorter": 100},
    **{"transferred": ("AdamW",), "widths": (24, 48), "width_seeds": 1},
    "runs": "outputs/hooks/quick.json",
}


@dataclass(frozen=True)
class Hooked(Contender):
    """An optimizer with hooks, for a model of any width.

    Attributes:
        rest: The rule of all parameters but the hidden matrices.
        hooks: Of the hidden matrices.
        rest_hooks: Of the rest.
        rest_lr: The lr of the rest. None: the same as that of the hidden matrices.
        unit: Hidden matrices start with a root mean square of 1 / sqrt(inputs).
    """

    rest: str = "adamw"
    hooks: tuple[Any, ...] = ()
    rest_hooks: tuple[Any, ...] = ()
    rest_lr: float | None = None
    unit: bool = False

    def make(self, model: nn.Module, lr: float, steps: int, compile: bool) -> Any:
        """Return the optimizer of a model."""
        del steps
        is_hidden = hidden_matrices(model)
        for name, p in model.named_parameters():
            if self.unit and is_hidden(name, p):
                p.data /= p.data.square().mean().sqrt() * math.sqrt(p.shape[1])
        hidden = getattr(optimi_func, self.pure)(lr=lr, weight_decay=0.0, hooks=self.hooks)
        rest_lr = lr if self.rest_lr is None else self.rest_lr
        of_rest = partial(getattr(optimi_func, self.rest), hooks=self.rest_hooks)
        rest = of_rest(lr=rest_lr, weight_decay=0.0)
        part = is_hidden, hidden
        return Mixed(model.named_parameters(), part, rest=rest, compile=compile)


def contender(rule: str, way: str, rest_lr: float) -> Hooked:
    """Return a cell of the table: the lr of the rest counts if hidden matrices have one."""
    pure, rest, _ = RULES[rule]
    chain, everywhere, _, unit = WAYS[way]
    given: dict[str, Any] = {"rest": rest, "hooks": chain, "unit": unit}
    given |= {"rest_hooks": chain} if everywhere else {"rest_lr": rest_lr}
    apart = "" if everywhere else f", the rest at lr {rest_lr:g}"
    return Hooked(f"{rule}, {way}{apart}", pure, **given)


def is_defined(rule: str, way: str) -> bool:
    """Return False for hooks that compare signs, if a rule mixes elements."""
    return rule == "AdamW" or not any(x.reads_gradient for x in WAYS[way].hooks)


def task_of(width: int, config: Config) -> Task:
    """Return the task of which.py for a model of this width."""
    gpt = replace(which_tasks.GPT, width=width, heads=width // HEAD)
    task = replace(which_tasks.LANGUAGE, model=partial(which_tasks.train_gpt.GPT, gpt))
    return task.shorter(config.shorter)


# Training


def version(config: Config) -> str:
    """Return a hash of all that decides a run, besides its name."""
    parts = (which_tasks, which.alone, which.evaluated_at, Hooked, task_of)
    text = "".join(map(inspect.getsource, parts)) + f"{config.shorter}{config.compile}"
    return f"{zlib.crc32(text.encode()):08x}"


class Trainer:
    """Trains what the file of runs does not have.

    Attributes:
        runs: The loss and the seconds of processor time of each run, by its name.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.path = config, harness.ROOT / config.runs
        self.version = version(config)
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        known = found.get("version") == self.version
        self.runs: dict[str, Found] = found["runs"] if known else {}
        self.used: set[str] = set()
        self.bar = tqdm(total=expected(config), unit="run", smoothing=0.05)

    def loss(self, cell: Hooked, width: int, lr: float, seed: int) -> float:
        """Return the held-out loss of a run."""
        name = f"{cell.name}; width {width}, lr {lr:g}, seed {seed}"
        if name not in self.runs:
            self.bar.set_postfix_str(name)
            began = time.process_time()
            task = task_of(width, self.config)
            losses = which.alone(task, cell, lr, seed, self.config.compile, evaluations=1)
            loss = losses[-1] if losses[-1] < which.DIVERGED else which.DIVERGED
            seconds = time.process_time() - began
            self.runs[name] = {"loss": loss, "seconds": round(seconds, 2)}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"version": self.version, "runs": self.runs}, indent=1)
            self.path.write_text(f"{text}\n")
        if name not in self.used:
            self.used.add(name)
            self.bar.update()
        return self.runs[name]["loss"]

    def search(
        self, cell: Hooked, width: int, middle: int, lrs: int, seeds: Iterable[int] = (0,)
    ) -> Grid:
        """Train a grid, which may grow."""
        half = lrs // 2
        found: Grid = {}

        def add(*places: float) -> None:
            for k in places:
                if k not in found:
                    found[k] = [self.loss(cell, width, 2.0**k, seed) for seed in seeds]

        add(*range(middle - half, middle + half + 1))
        for _ in range(self.config.growth):
            add(best_of(found) - 1, best_of(found) + 1)
        return dict(sorted(found.items()))

    def refined(self, cell: Hooked, width: int, grid: Grid) -> Grid:
        """Return a grid with the half steps beside its best."""
        best = best_of(grid)
        halves = (best - 0.5, best + 0.5) if self.config.finer else ()
        more = {k: [self.loss(cell, width, 2.0**k, 0)] for k in halves}
        return dict(sorted((grid | more).items()))


def best_of(grid: Grid) -> float:
    """Return log2 of the lr with the least mean loss."""
    return min(grid, key=lambda k: mean(grid[k]))


def grid_of(way: str, best: int, config: Config) -> tuple[int, int]:
    """Return the middle and the number of the first lrs: fewer if the best is nearby."""
    middle = WAYS[way].middle
    near = middle is None and way != NONE
    return best if middle is None else middle, min(config.lrs, 3) if near else config.lrs


def expected(config: Config) -> int:
    """Return about how many runs there are, if each grid grows by one."""
    more = config.seeds - 1 + (config.growth > 0) + 2 * config.finer
    cells = [way for rule in config.rules for way in config.ways if is_defined(rule, way)]
    runs = sum(grid_of(way, 0, config)[1] + more for way in cells)
    transferred = [way for rule in config.transferred for way in TRANSFERS[rule]]
    grids = sum(way in config.ways for way in transferred)
    # The table has the runs of one seed at one width.
    return runs + grids * (config.lrs + 1) * (len(config.widths) * config.width_seeds - 1)


def estimated(config: Config, seconds: float) -> float:
    """Return about how many seconds of processor time all runs take."""
    rules = mean(COSTS[rule] for rule in config.rules)
    wide = [sum(config.widths) / len(config.widths) / WIDTH] * bool(config.transferred)
    return expected(config) * seconds * mean([rules, *wide])


def measure(config: Config) -> Found:
    """Train all cells of the table, and then the widths."""
    if NONE not in config.ways:
        raise SystemExit(f"--ways lack {NONE!r}, whose lr the rest of a model has")
    trainer, middles = Trainer(config), {rule: RULES[rule][2] for rule in config.rules}
    first = config.rules[0]
    cell, began = contender(first, NONE, 0.0), time.process_time()
    trainer.loss(cell, WIDTH, 2.0 ** middles[first], 0)
    if (seconds := time.process_time() - began) > 0.1:
        trainer.bar.write(
            f"A run takes {seconds:.1f} s of one core, and about {expected(config)} runs "
            f"take {estimated(config, seconds) / 60:.0f} minutes"
        )
    table: Found = {rule: {} for rule in config.rules}
    # All rules in turn, so that a part of the table says something.
    for way, rule in product(config.ways, config.rules):
        if not is_defined(rule, way):
            table[rule][way] = None
            continue
        rest = 2.0 ** middles[rule]
        cell = contender(rule, way, rest)
        grid = trainer.search(cell, WIDTH, *grid_of(way, middles[rule], config))
        middle = int(best_of(grid))
        middles[rule] = middle if way == NONE else middles[rule]
        grid = trainer.refined(cell, WIDTH, grid)
        best, seeds = best_of(grid), range(config.seeds)
        table[rule][way] = {
            "log2 lr": best,
            "of whole steps": middle,
            "at an edge": best in (min(grid), max(grid)),
            "rest lr": None if WAYS[way].everywhere else rest,
            "final": [trainer.loss(cell, WIDTH, 2.0**best, seed) for seed in seeds],
            "by log2 lr": {f"{k:g}": losses[0] for k, losses in grid.items()},
        }
    transfer: Found = {}
    for rule in config.transferred:
        for way in filter(config.ways.__contains__, TRANSFERS[rule]):
            cell = contender(rule, way, 2.0 ** middles[rule])
            middle = table[rule][way]["of whole steps"]
            transfer[f"{rule}, {way}"] = {}
            for width in config.widths:
                seeds = range(config.width_seeds)
                grid = trainer.search(cell, width, middle, config.lrs, seeds)
                transfer[f"{rule}, {way}"][str(width)] = {
                    "best": best_of(grid),
                    "vertex": vertex(grid),
                    "by log2 lr": {f"{k:g}": losses for k, losses in grid.items()},
                }
    trainer.bar.close()
    runs = {name: trainer.runs[name] for name in trainer.runs if name in trainer.used}
    parameters = {
        str(width): sum(p.numel() for p in task_of(width, config).fresh(0).parameters())
        for width in sorted({WIDTH, *config.widths})
    }
    about = {"width": WIDTH, "steps": task_of(WIDTH, config).steps}
    about |= {"ways": {name: repr(way) for name, way in WAYS.items()}}
    about |= {"parameters": parameters}
    about |= {"minutes": round(sum(run["seconds"] for run in runs.values()) / 60, 1)}
    found = {"about": about, "table": table, "transfer": transfer}
    return {**found, "version": trainer.version, "runs": runs}


# What is found


def vertex(grid: Grid) -> float | None:
    """Return where the parabola through the best and its neighbours has its minimum."""
    best = best_of(grid)
    if best - 1 not in grid or best + 1 not in grid:
        return None
    low, middle, high = (mean(grid[k]) for k in (best - 1, best, best + 1))
    bend = low - 2 * middle + high
    return best + 0.5 * (low - high) / bend if bend else None


def beside(cell: Found, other: Found | None) -> str:
    """Return the mean difference of two cells' losses and its standard error."""
    if other is None or cell is other:
        return ""
    pairs = [a - b for a, b in zip(cell["final"], other["final"])]
    error = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    return f"{mean(pairs):+.4f} ± {error:.4f}"


def report(found: Found) -> str:
    """The table, and a table of the best lr at each width."""
    head = ["", "log2 lr", "loss", "s.d.", f"less {NONE}", f"less {OWN}"]
    rows: list[list[str]] = [head]
    for rule, cells in found["table"].items():
        for way, cell in cells.items():
            if cell is None:
                rows.append([f"{rule}, {way}", "not defined", *[""] * 4])
                continue
            final, edge = cell["final"], " (edge)" if cell["at an edge"] else ""
            deviation = f"{stdev(final):.4f}" if len(final) > 1 else ""
            row = [f"{rule}, {way}", f"{cell['log2 lr']:g}{edge}", f"{mean(final):.4f}"]
            own = cells.get(f"{OWN}, unit" if WAYS[way].unit else OWN)
            others = cells[NONE], None if WAYS[way].everywhere else own
            rows.append([*row, deviation, *(beside(cell, other) for other in others)])
    about = found["about"]
    text = f"{about['parameters'][str(about['width'])]} parameters, {about['steps']} steps"
    text += f", {about['minutes']} minutes of one core\n\n{harness.table(rows)}"
    for way, widths in found["transfer"].items():
        every = sorted({int(k) for x in widths.values() for k in x["by log2 lr"]})
        rows = [[f"{way}, width", "best log2 lr", "vertex", *map(str, every)]]
        for width, x in widths.items():
            vertex = "-" if x["vertex"] is None else f"{x['vertex']:.2f}"
            losses = [x["by log2 lr"].get(str(k)) for k in every]
            means = [which.number(mean(y) if y else None) for y in losses]
            rows.append([width, f"{x['best']:g}", vertex, *means])
        text += f"\n\n{harness.table(rows)}"
    return text


def draw(found: Found) -> Axes:
    """A panel of the table, a point for each seed, and a panel for each transfer."""
    count = 1 + len(found["transfer"])
    title = "Held-out loss with hooks, better to the left; and by lr at several widths"
    panels = harness.axes_of(title, 1, count, figsize=(4 * count, 5))
    table = found["table"].items()
    names = [(rule, way) for rule, cells in table for way, x in cells.items() if x]
    for row, (rule, way) in enumerate(reversed(names)):
        final = found["table"][rule][way]["final"]
        panels[0].plot(final, [row] * len(final), "o", alpha=0.4, color="tab:blue")
        panels[0].plot(mean(final), row, "|", markersize=14, color="tab:blue")
    panels[0].set_yticks(range(len(names)), [", ".join(x) for x in reversed(names)])
    panels[0].set_xlabel("bits per byte")
    for axes, (way, widths) in zip(panels[1:], found["transfer"].items()):
        for width, x in widths.items():
            means = {float(k): mean(losses) for k, losses in x["by log2 lr"].items()}
            axes.plot(list(means), list(means.values()), "o-", label=f"width {width}")
        axes.set_title(way)
        axes.set_xlabel("log2 lr")
        axes.legend()
    return panels[0]


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
