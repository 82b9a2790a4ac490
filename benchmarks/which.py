"""Which optimizer trains best, on small tasks of different kinds?

Every optimizer of the package trains every task of ``which_tasks.py``. Its lr is chosen on
seed 0 from a grid with factors of 3, which grows as long as the best is at an edge, and has
factors of 1.7 around the best. At the best lr it trains with further seeds. Schedule-free
rules also train at the lr that their authors name, and AdamW at torch's. There is no weight
decay, and no other hyperparameter is tuned. Without decay Adam is AdamW.

Runs are kept in a file as they end, so a benchmark that was stopped goes on from there. It
runs a process for each thread of ``--threads``. Small tasks train all lrs of an optimizer
and seeds together, as one vmapped population. ``--rule FILE:CLASS`` takes a rule of yours
too; if it refuses some shapes, it has the hidden matrices, and AdamW the rest.
``--into FILE`` adds what earlier results lack, of another machine too, and compares it with
their AdamW: ``--optimizers Kron --into FILE --json FILE``.

What is reported: held-out loss, with its spread over seeds; steps and time to AdamW's final
loss; the loss at a third and at three times the best lr; bytes; the time of a step.
"""

import inspect
import json
import math
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import harness
import torch
import which_tasks
from harness import Found, option
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm
from which_optimizers import CONTENDERS, Contender, rule_of_file
from which_tasks import TASKS, Task

from optimi_func import population

REFERENCE = "AdamW"
FACTOR = 3.0
EVALUATIONS = 20
# A loss is taken for this at most: what has diverged has no number.
DIVERGED = 1e4


@dataclass(frozen=True)
class Config(harness.Options):
    tasks: tuple[str, ...] = option(tuple(t.name for t in TASKS), "to train")
    optimizers: tuple[str, ...] = option(tuple(c.name for c in CONTENDERS), "to compare")
    seeds: int = option(3, "at the best lr")
    lrs: int = option(5, "of the grid; an odd number")
    growth: int = option(3, "lrs more at each edge, at most")
    shorter: int = option(1, "divides the steps")
    compile: bool = option(True, "the steps of classes")
    rule: str = option("", "to compare too, as examples/rules/laprop.py:LaProp")
    into: str = option("", "earlier results, to add what they lack to")
    times: str = option("", "earlier results, to measure their steps again here")
    rows: str = option("outputs/which/rows.jsonl", "the runs so far, to go on from")


QUICK: Found = {
    "optimizers": (REFERENCE, "MuonAdamW", "ScheduleFreeAdamW"),
    **{"seeds": 2, "lrs": 3, "growth": 0, "shorter": 25, "compile": False},
    "rows": "outputs/which/quick.jsonl",
}


class Job(NamedTuple):
    """Runs of one optimizer on one task: together if the task allows it."""

    task: str
    optimizer: str
    members: tuple[tuple[float, int], ...]  # lr and seed


class Key(NamedTuple):
    """A run."""

    task: str
    optimizer: str
    lr: float
    seed: int


Rows = dict[Key, Found]


def named(config: Config) -> tuple[dict[str, Task], dict[str, Contender]]:
    """Return the chosen tasks and optimizers by name."""
    tasks = {t.name: t.shorter(config.shorter) for t in TASKS}
    contenders = {c.name: c for c in CONTENDERS}
    chosen = [contenders[name] for name in config.optimizers]
    chosen += [rule_of_file(config.rule)] if config.rule else []
    return {name: tasks[name] for name in config.tasks}, {c.name: c for c in chosen}


# Training


def evaluated_at(steps: int, times: int = EVALUATIONS) -> set[int]:
    """Return the steps after which the held-out loss is taken."""
    return {round(steps * (i + 1) / times) for i in range(times)}


def wide_call(model: nn.Module, x: Tensor) -> Tensor:
    """Apply the model, in float32 whatever its parameters are."""
    if all(p.dtype == torch.float32 for p in model.parameters()):
        return model(x)
    params = {name: p.float() for name, p in model.named_parameters()}
    return functional_call(model, params, (x,))


def alone(
    task: Task,
    contender: Contender,
    lr: float,
    seed: int,
    compile: bool,
    evaluations: int = EVALUATIONS,
) -> list[float]:
    """Train one model with the class, and return its held-out losses."""
    model = task.fresh(seed)
    optimizer = contender.make(model, lr, task.steps, compile)
    # A contender may give its groups other lrs.
    lrs = [group["lr"] for group in optimizer.param_groups]
    generator, held_out = torch.Generator().manual_seed(seed), task.held_out()
    evaluated = hasattr(optimizer, "eval")
    losses: list[float] = []
    for step in range(task.steps):
        for group, own in zip(optimizer.param_groups, lrs):
            group["lr"] = own * contender.factor(step, task.steps)
        x, y = task.batch(generator)
        task.loss(wide_call(model, x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in evaluated_at(task.steps, evaluations):
            if evaluated:
                optimizer.eval()
            with torch.no_grad():
                found = [task.loss(wide_call(model, x), y).item() for x, y in held_out]
            losses.append(mean(found))
            if evaluated:
                optimizer.train()
            if not losses[-1] < DIVERGED:
                break
    return losses


def together(
    task: Task, contender: Contender, members: Iterable[tuple[float, int]]
) -> list[list[float]]:
    """Train a population, a member for each lr and seed, and return its losses."""
    lrs, seeds = zip(*members)
    models = [task.fresh(seed) for seed in seeds]
    lr = torch.tensor(lrs, dtype=torch.float64)

    def factory(lr: Any) -> Any:
        return contender.value(models[0], lr, task.steps)

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(models[0], params, (x,)), y)

    def evaluate(params: Any, state: Any, lr: Tensor) -> Tensor:
        value = factory(lr)
        at = value.eval_params(params, state) if hasattr(value, "eval_params") else params
        found = [task.loss(functional_call(models[0], at, (x,)), y) for x, y in held_out]
        return torch.stack(found).mean()

    generators = {seed: torch.Generator().manual_seed(seed) for seed in seeds}
    at = torch.tensor([list(generators).index(seed) for seed in seeds])
    held_out = task.held_out()
    found = population.init(factory, models, {"lr": lr})
    losses: list[list[float]] = [[] for _ in lrs]
    for step in range(task.steps):
        factor = contender.factor(step, task.steps)
        found = replace(found, hyper={"lr": lr * factor})
        batches = [task.batch(generator) for generator in generators.values()]
        data = [torch.stack(part)[at] for part in zip(*batches)]
        _, grads = population.loss_and_grad(loss, found, *data, in_axes=0)
        found = population.step(factory, found, grads)
        if step + 1 in evaluated_at(task.steps):
            values = torch.vmap(evaluate)(found.params, found.state, found.hyper["lr"])
            for member, value in zip(losses, values.tolist()):
                member.append(value)
    return losses


def run(job: Job, config: Config) -> list[tuple[Key, Found]]:
    """Train the members of a job in this process, which has one thread."""
    torch.set_num_threads(1)
    tasks, contenders = named(config)
    task, contender = tasks[job.task], contenders[job.optimizer]
    began = time.perf_counter()
    if task.together and not contender.alone:
        losses = together(task, contender, job.members)
    else:
        losses = [alone(task, contender, *m, config.compile) for m in job.members]
    seconds = (time.perf_counter() - began) / len(job.members)
    rows: list[tuple[Key, Found]] = []
    for (lr, seed), curve in zip(job.members, losses):
        curve = [x if x < DIVERGED else DIVERGED for x in curve]
        curve += [DIVERGED] * (len(evaluated_at(task.steps)) - len(curve))
        row = {"losses": curve, "seconds": seconds, "members": len(job.members)}
        rows.append((Key(job.task, job.optimizer, lr, seed), row))
    return rows


# The search


def lr_at(task: Task, contender: Contender, k: float) -> float:
    """Return the lr that is k factors from the middle of the grid.

    It has four digits, so that a file finds it again.
    """
    return float(f"{task.lr * contender.ratio * FACTOR**k:.4g}")


def searched(task: Task, contender: Contender, rows: Rows) -> dict[float, float]:
    """Return the final losses of seed 0 by the place of the lr, in order."""
    found: dict[float, float] = {}
    for key, row in rows.items():
        if key[:2] == (task.name, contender.name) and key.seed == 0:
            k = math.log(key.lr / (task.lr * contender.ratio), FACTOR)
            if abs(2 * k - round(2 * k)) < 1e-2:  # else it is the untuned one
                found[round(2 * k) / 2] = row["losses"][-1]
    return dict(sorted(found.items()))


def best_of(by_place: dict[float, float]) -> float:
    """Return the place of the best lr."""
    return min(by_place, key=lambda k: by_place[k])


def needed(task: Task, contender: Contender, rows: Rows, config: Config) -> list[Job]:
    """Return the runs that come next.

    They are the grid, its growth, the places next to the best, a third and three times the
    best lr, and the other seeds.
    """
    every, several = range(config.seeds), task.together and not contender.alone

    def jobs(lrs: Iterable[float], seeds: Iterable[int]) -> list[Job]:
        asked = dict.fromkeys(product(lrs, seeds))
        missing = tuple(
            [x for x in asked if Key(task.name, contender.name, *x) not in rows]
        )
        if not missing:
            return []
        # More members of a population cost little.
        parts = [missing] if several else [(member,) for member in missing]
        return [Job(task.name, contender.name, part) for part in parts]

    def at(*places: float, seeds: Iterable[int] = every if several else (0,)) -> Any:
        return jobs([lr_at(task, contender, k) for k in places], seeds)

    half = config.lrs // 2
    found = at(*range(-half, half + 1))
    if contender.untuned is not None:
        found += jobs([contender.untuned], every)
    by_place = searched(task, contender, rows)
    if found or not by_place:
        return found
    if min(by_place.values()) >= DIVERGED:
        return at(best_of(by_place), seeds=every)  # no lr trains
    whole = {k: loss for k, loss in by_place.items() if k == int(k)}
    best = best_of(whole)
    for edge, way in ((min(whole), -1), (max(whole), 1)):
        if best == edge and abs(edge) < half + config.growth:
            return at(edge + way)
    if config.growth and (found := at(best - 0.5, best + 0.5)):
        return found
    best = best_of(by_place)
    if config.growth and (found := at(best - 1, best + 1)):
        return found
    return at(best, seeds=every)


def versions(config: Config) -> dict[str, str]:
    """Return a hash of all that decides the runs of each optimizer, by its name."""
    training = (alone, together, wide_call, evaluated_at)
    text = inspect.getsource(which_tasks) + "".join(map(inspect.getsource, training))
    _, contenders = named(config)
    every = {n: f"{text}{config.shorter}{c!r}" for n, c in contenders.items()}
    return {name: f"{zlib.crc32(text.encode()):08x}" for name, text in every.items()}


def read(path: Path, version: dict[str, str]) -> Rows:
    """Return the runs of a file that this version of each optimizer has written."""
    rows: Rows = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        *key, row = json.loads(line)
        key = Key(*key)
        if row["version"] == version.get(key.optimizer):
            rows[key] = row
    return rows


def search(config: Config) -> Rows:
    """Train everything that is not in the file yet, a process for each thread."""
    tasks, contenders = named(config)
    version = versions(config)
    path = harness.ROOT / config.rows
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, running = read(path, version), dict[Future[Any], Job]()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    expected = len(tasks) * len(contenders) * (config.lrs + config.seeds + 3)
    with (
        ProcessPoolExecutor(config.threads, get_context("spawn")) as pool,
        tqdm(total=max(expected, len(rows)), initial=len(rows), unit="run") as bar,
        path.open("a") as file,
    ):
        while True:
            submitted = set(running.values())
            for task in tasks.values():
                for contender in contenders.values():
                    for job in needed(task, contender, rows, config):
                        if job not in submitted:
                            running[pool.submit(run, job, config)] = job
            if not running:
                return rows
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                del running[future]
                for key, row in future.result():
                    rows[key] = {**row, "version": version[key.optimizer]}
                    file.write(json.dumps([*key, rows[key]]) + "\n")
                    bar.set_postfix_str(f"{key.task}, {key.optimizer}")
                    bar.update()
            file.flush()


# Time and bytes


def step_times(task: Task, contenders: dict[str, Contender], config: Config) -> Found:
    """Measure the steps of the classes in turn, and forward and backward, in seconds."""
    torch.set_num_threads(1)
    models = {name: task.fresh(0) for name in contenders}
    x, y = task.batch(torch.Generator().manual_seed(0))
    for model in models.values():
        task.loss(wide_call(model, x), y).backward()
    makes = contenders.items()
    optimizers = {n: c.make(models[n], 1e-6, task.steps, config.compile) for n, c in makes}

    def pass_() -> None:
        task.loss(wide_call(models[REFERENCE], x), y).backward()

    timed = harness.Timed(rounds=30, seconds=60.0 / config.shorter)
    ways: dict[str, Callable[[], Any]] = {n: o.step for n, o in optimizers.items()}
    # Every step comes after a pass, as in training, and finds the same in caches.
    before = dict.fromkeys(ways, pass_)
    seconds = harness.interleave({"pass": pass_, **ways}, timed, task.name, before)
    elements = sum(p.numel() for p in models[REFERENCE].parameters())
    return {
        "pass": median(seconds.pop("pass")),
        "steps": {name: of_ten(taken) for name, taken in seconds.items()},
        "bytes": {n: held(models[n], o) / elements for n, o in optimizers.items()},
    }


def of_ten(taken: list[float]) -> float:
    """Return a median of means of ten steps, one of which fits SOAP's bases anew."""
    starts = range(0, max(1, len(taken) - 9), 10)
    return median([mean(taken[i : i + 10]) for i in starts])


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters and state, without gradients."""
    tensors = [*model.parameters()]
    for entry in optimizer.state.values():
        tensors += [x for x in entry.values() if isinstance(x, Tensor)]
    return sum(x.untyped_storage().nbytes() for x in tensors)


def saved(task: Task, contender: Contender, config: Config) -> Found:
    """Measure what a population saves over its members one after the other."""
    torch.set_num_threads(1)
    short = replace(task, steps=max(12, task.steps // 10))
    places = range(-(config.lrs // 2), config.lrs // 2 + 1)
    lrs = [lr_at(task, contender, k) for k in places]
    members = list(product(lrs, range(config.seeds)))

    def seconds(train: Callable[[], Any]) -> float:
        began = time.perf_counter()
        train()
        return time.perf_counter() - began

    ratios = [
        seconds(lambda: [alone(short, contender, *m, config.compile) for m in members])
        / seconds(lambda: together(short, contender, members))
        for _ in range(4)
    ]
    return {"members": len(members), "ratio": median(ratios[1:])}


# What is found


def reached(curve: list[float], steps: int, loss: float) -> float | None:
    """Return the step at which a curve first is at a loss, between two evaluations."""
    at = sorted(evaluated_at(steps))
    for i, found in enumerate(curve):
        if found <= loss:
            if i == 0 or curve[i - 1] == found:
                return float(at[i])
            share = (curve[i - 1] - loss) / (curve[i - 1] - found)
            return at[i - 1] + share * (at[i] - at[i - 1])
    return None


def summary(task: Task, contender: Contender, rows: Rows, config: Config) -> Found:
    """Return what the runs of one optimizer on one task say."""
    by_place = searched(task, contender, rows)
    k = best_of(by_place)
    best = lr_at(task, contender, k)
    curves = {
        seed: rows[Key(task.name, contender.name, best, seed)]["losses"]
        for seed in range(config.seeds)
    }
    found: Found = {
        "lr": best,
        "at an edge": k in (min(by_place), max(by_place)),
        "final": [curve[-1] for curve in curves.values()],
        "by lr": {str(lr_at(task, contender, k)): x for k, x in by_place.items()},
        "third": by_place.get(k - 1),
        "three times": by_place.get(k + 1),
        "curves": list(curves.values()),
        "seconds": sum(
            row["seconds"]
            for key, row in rows.items()
            if key[:2] == (task.name, contender.name)
        ),
    }
    if contender.untuned is not None:
        seeds = range(config.seeds)
        keys = [Key(task.name, contender.name, contender.untuned, seed) for seed in seeds]
        found["untuned"] = {
            "lr": contender.untuned,
            "final": [rows[key]["losses"][-1] for key in keys],
        }
    return found


def earlier(config: Config) -> tuple[Found, Config]:
    """Return the results to add to, and the options with the optimizers that they lack."""
    if not config.into:
        return {}, config
    old: Found = json.loads(Path(config.into).read_text())
    for name in ("seeds", "shorter"):
        before, here = old["config"][name], getattr(config, name)
        if before != here:
            raise SystemExit(f"--{name} {here}: those of --into {config.into} are {before}")
    parts = [old["tasks"].get(task, {}).get("optimizers", {}) for task in config.tasks]
    lacked = [n for n in config.optimizers if not all(n in part for part in parts)]
    return old, replace(config, optimizers=tuple(lacked))


def keep_times(cells: Found, times: Found) -> None:
    """Write each optimizer's time of a step, with those that it is compared with."""
    beside = {"pass": times["pass"], "step": times["steps"][REFERENCE]}
    for name, cell in cells.items():
        cell |= {"step": times["steps"][name], "beside": beside}


def timed_again(config: Config) -> Found:
    """Return earlier results with the times of all steps on this machine."""
    old: Found = json.loads(Path(config.times).read_text())
    tasks, _ = named(config)
    own = {c.name: c for c in CONTENDERS}
    for name, about in old["tasks"].items():
        cells = about["optimizers"]
        keep_times(cells, step_times(tasks[name], {n: own[n] for n in cells}, config))
    return {**old, "timed": harness.machine(__file__, config)}


def measure(config: Config) -> Found:
    """Train, and measure the steps after it, when no other process runs."""
    if config.times:
        return timed_again(config)
    old, config = earlier(config)
    if not old and REFERENCE not in config.optimizers:
        raise SystemExit(f"--optimizers lack {REFERENCE}, which all are compared with")
    rows = search(config)
    tasks, contenders = named(config)
    timed = {c.name: c for c in CONTENDERS if c.name == REFERENCE} | contenders
    known = [task.name for task in TASKS]
    found: Found = {n: about for n, about in old.get("tasks", {}).items() if n in known}
    for task in tasks.values():
        cells = {n: summary(task, c, rows, config) for n, c in contenders.items()}
        every = found.get(task.name, {}).get("optimizers", {}) | cells
        target = mean(every[REFERENCE]["final"])
        times = step_times(task, timed, config)
        keep_times(cells, times)
        for name, cell in cells.items():
            steps = [reached(curve, task.steps, target) for curve in cell["curves"]]
            # A seed that never gets there counts as none that does.
            cell["steps"] = None if None in steps else mean(filter(None, steps))
            cell["bytes"] = times["bytes"][name]
        if not old:
            found[task.name] = {"about": task.about, "steps": task.steps}
            if task.together:
                saving = saved(task, contenders[REFERENCE], config)
                found[task.name]["population"] = saving
        found[task.name]["optimizers"] = every
    if not old:
        return {"tasks": found}
    added = dict.fromkeys(contenders, harness.machine(__file__, config))
    return {**old, "tasks": found, "added": old.get("added", {}) | added}


def times_of(cell: Found) -> tuple[float, float]:
    """Return the time of a step, and of one with its pass, by AdamW's beside it."""
    beside = cell["beside"]
    step, reference = cell["step"], beside["step"]
    return step / reference, (beside["pass"] + step) / (beside["pass"] + reference)


def quality(found: Found, task: str, name: str) -> list[float]:
    """Return AdamW's mean final loss by each seed's: more is better."""
    cells = found["tasks"][task]["optimizers"]
    reference = mean(cells[REFERENCE]["final"])
    return [reference / loss for loss in cells[name]["final"]]


def ranked(found: Found) -> list[str]:
    """Return the optimizers, those first whose mean rank over their tasks is best."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for part in found["tasks"].values():
        cells = part["optimizers"]
        for i, name in enumerate(sorted(cells, key=lambda n: mean(cells[n]["final"]))):
            ranks[name].append(i)
    return sorted(ranks, key=lambda name: mean(ranks[name]))


def number(loss: float | None) -> str:
    """Format a loss; a dash if there is none."""
    if loss is None or loss >= DIVERGED:
        return "-" if loss is None else "diverged"
    return f"{loss:.3g}" if loss < 0.1 else f"{loss:.3f}"


def report(found: Found) -> str:
    """A table for each task, the optimizers in the order of their mean rank."""
    parts: list[str] = []
    for task, about in found["tasks"].items():
        cells = about["optimizers"]
        head = ["", "lr", "final loss (seeds)", "of AdamW's steps", "of its time"]
        rows = [[*head, "lr / 3", "lr x 3", "untuned", "bytes", "step"]]
        for name in filter(cells.__contains__, ranked(found)):
            cell = cells[name]
            step, pace = times_of(cell)
            share = cell["steps"] and cell["steps"] / about["steps"]
            final = f"{number(mean(cell['final']))} ({number(min(cell['final']))}"
            row = [f"{cell['lr']:.2g}{' (edge)' if cell['at an edge'] else ''}"]
            row += [f"{final}-{number(max(cell['final']))})"]
            row += [f"{share:.2f}", f"{share * pace:.2f}"] if share else ["-", "-"]
            row += [number(cell["third"]), number(cell["three times"])]
            row += [number(mean(cell["untuned"]["final"])) if "untuned" in cell else ""]
            row += [f"{cell['bytes']:.1f}", f"{step:.2f}"]
            rows.append([name, *row])
        text = f"{task}: {about['about']}, {about['steps']} steps\n\n{harness.table(rows)}"
        if "population" in about:
            saving = about["population"]
            text += f"\n\n{saving['members']} runs of AdamW as a population: "
            text += f"{saving['ratio']:.2f} times faster than one after the other"
        parts.append(text)
    return "\n\n".join(parts)


def draw(found: Found) -> Axes:
    """A panel for each task: AdamW's loss by the optimizer's, a point for each seed."""
    names = ranked(found)[::-1]
    count = len(found["tasks"])
    title = "Held-out loss: AdamW's by the optimizer's, better to the right"
    panels = harness.axes_of(title, 1, count, figsize=(3 * count, 5), sharey=True)
    for axes, task in zip(panels, found["tasks"]):
        for row, name in enumerate(names):
            if name not in found["tasks"][task]["optimizers"]:
                continue
            values = quality(found, task, name)
            axes.plot(values, [row] * len(values), "o", alpha=0.4, color="tab:blue")
            axes.plot(mean(values), row, "|", markersize=14, color="tab:blue")
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.set_title(task)
        axes.set_yticks(range(len(names)), names)
    return panels[0]


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
