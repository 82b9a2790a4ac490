"""Write the tables of the documentation pages from the committed benchmark results.

A table is placed in a page between `<!-- its name -->` and `<!-- / -->`, so that you can
read the page without a build. A test fails if a table is not the one that the committed
results give. Below each table are the command, the machine, the date and the commit of its
results.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/cpu-epyc-2-threads"
ONE_THREAD = ROOT / "benchmarks/results/cpu-epyc-1-threads"
WHICH = ROOT / "benchmarks/results/cpu-xeon-processor-2-threads/which.json"
DATA = ROOT / "docs/pictures/data"
Rows = list[Sequence[str]]
PAGES = ("../README.md", "index.md", "precision.md", "compiled.md", "benchmarks.md")
PAGES += ("which.md", "hooks.md")


@cache
def load(path: Path) -> Any:
    """Read a file of results once; callers must not change what it returns."""
    return json.loads(path.read_text())


def command(about: Any) -> str:
    """Return the command of a measurement, with the variables that affect times."""
    environment = [f"{k}={v}" for k, v in about.get("environment", {}).items()]
    return f"`{' '.join([*environment, about['command'].partition('  #')[0]])}`"


def source(*found: Any) -> str:
    """Name the source of the results above: commands on one machine, dates and commits."""
    about = [x["machine"] for x in found]
    threads = sorted({x["threads"] for x in about})
    made = [
        " and ".join(map(command, about)),
        ", ".join(filter(None, [about[0]["name"], about[0].get("instructions")])),
        f"{' or '.join(map(str, threads))} thread{'s' * (threads != [1])}, CPU",
        f"torch {about[0]['torch'].partition('+')[0]}",
        ", ".join(sorted({x["date"] for x in about})),
        ", ".join(sorted({x["commit"] for x in about if x["commit"]})),
    ]
    return " · ".join(filter(None, made))


def table(rows: Rows, said: str) -> str:
    """Return a table and its source as Markdown; the first row is the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + f"\n\n*{said}*\n"


def ratio(cell: Any) -> str:
    """Format a median with its quartiles."""
    if cell is None:
        return "-"
    return f"{cell['ratio']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})"


SHAPES = {
    "vit-b": "ViT-B/16",
    "gpt2": "GPT-2",
    "large": "4 x 4096 x 4096",
    "resnet50": "ResNet-50, channels_last",
    "vit-tiny": "ViT-tiny/16",
    "odd": "120 odd shapes",
    "small": "1000 tensors of 16",
}


def of_steps(columns: Sequence[tuple[str, str, str]], folder: Path = RESULTS) -> str:
    """Tabulate step times by set of shapes; each column is a dtype, a way and a title."""
    found = load(folder / "step_time.json")
    rows: Rows = [["", *(title for *_, title in columns)]]
    for key in filter(found["steps"].__contains__, SHAPES):
        cells = found["steps"][key]
        rows.append([SHAPES[key], *(ratio(cells[d].get(who)) for d, who, _ in columns)])
    return table(rows, source(found))


def steps(folder: Path = RESULTS) -> str:
    """Tabulate step times for all sets of shapes that were measured."""
    dtypes = ("float32", "bfloat16", "bfloat16 + Kahan")
    return of_steps([(dtype, "optimi_func", dtype) for dtype in dtypes], folder)


def steps_avx2() -> str:
    """Tabulate step times without the vector instructions that only newer CPUs have."""
    return steps(RESULTS / "avx2")


def uncompiled() -> str:
    """Tabulate times of steps that need no compiler, and of optimi's steps."""
    ways = [
        ("float32", "compile=False", "`compile=False`"),
        ("float32", "torch for-loop", "torch for-loop (torch's default)"),
        ("float32", "torch foreach", "torch foreach"),
        ("float32", "optimi", "optimi 0.3.3"),
    ]
    return of_steps(ways)


def uncompiled_kahan() -> str:
    """Tabulate times of steps with Kahan summation that need no compiler."""
    ways = {"optimi_func": "compiled", "compile=False": "`compile=False`"}
    ways["optimi"] = "optimi 0.3.3"
    return of_steps([("bfloat16 + Kahan", way, title) for way, title in ways.items()])


def large() -> str:
    """Tabulate times of other packages that can compile only a few tensors."""
    ways = ["optimi_func", "torch.compile", "heavyball", "torchao 8-bit"]
    found = load(RESULTS / "step_time.json")
    rows: Rows = [["4 x 4096 x 4096", *ways]]
    for dtype in ("float32", "bfloat16"):
        cells = found["steps"]["large"][dtype]
        rows.append([dtype, *(ratio(cells.get(way)) for way in ways)])
    return table(rows, source(found))


def rules() -> str:
    """Tabulate the time per byte of the other rules."""
    found = load(RESULTS / "rules_per_byte.json")
    rows: Rows = [["rule", "bytes per parameter", "time per byte / AdamW's"]]
    for name, cell in found["rules"].items():
        rows.append([name, str(cell["bytes per parameter"]), ratio(cell)])
    return table(rows, source(found))


LOOP = "torch for-loop"
KINDS = {LOOP: "for-loop", "torch foreach": "foreach", "torch fused": "fused"}


def of_classes(way: str) -> str:
    """Tabulate step times of torch.optim's classes, relative to each of torch's steps."""
    found = load(ONE_THREAD / "torch_classes.json")
    rows: Rows = [["class", *KINDS.values()]]
    for name, cells in found["torch classes"].items():
        rows.append([name, *(ratio(cells.get(kind, {}).get(way)) for kind in KINDS)])
    return table(rows, source(found))


def classes() -> str:
    """Tabulate step times of the compiled classes of torch.optim."""
    return of_classes("optimi_func")


def eager_classes() -> str:
    """Tabulate step times of the same classes with `compile=False`."""
    return of_classes("compile=False")


def host_cost() -> str:
    """Tabulate the host's time for steps with few small tensors."""
    found = [load(x / "host_cost.json") for x in (ONE_THREAD, RESULTS)]
    rows: Rows = [["optimizer, threads, tensors", *KINDS.values()]]
    for rule in found[0]["host cost"]:
        for x in found:
            threads = x["machine"]["threads"]
            for n, cell in x["host cost"][rule].items():
                row = f"{rule}, {threads} thread{'s' * (threads > 1)}, "
                row += f"{n} tensor{'s' * (int(n) > 1)}"
                rows.append([row, *(ratio(cell[kind]) for kind in KINDS)])
    return table(rows, source(*found))


def peers() -> str:
    """Tabulate the time of each rule relative to the same rule in another package."""
    found = load(ONE_THREAD / "peers.json")
    heads = ["optimizer", "other package", "shapes", "our time / other package's time"]
    rows: Rows = [heads]
    for name, cell in found["peers"].items():
        rule, package, shapes = name.split(", ")
        if rule == "AdamW":
            continue  # Of the classes above, whose number stands there.
        beside = f"{package} {cell['version'].partition('+')[0]}"
        if cell["beside"] == "foreach=True":
            beside += ", foreach"
        rows.append([rule, beside, shapes, ratio(cell["optimi_func"])])
    return table(rows, source(found))


def turns() -> str:
    """Tabulate times of steps that cannot reuse the preparation of earlier steps."""
    found = load(ONE_THREAD / "turns.json")
    rows: Rows = [["", "our time / for-loop", "our time / fused"]]
    for name, cell in found["turns"].items():
        rows.append([name, ratio(cell[LOOP]), ratio(cell.get("torch fused"))])
    return table(rows, source(found))


def first() -> str:
    """Tabulate the time of the constructor and the first step in a new process."""
    found = load(RESULTS / "cold_start.json")
    rows: Rows = [["", "seconds, empty caches", "seconds, full caches"]]
    for count, by_way in found["first"].items():
        for way, kinds in by_way.items():
            texts = [f"{median(x):.2f} ({min(x):.2f}-{max(x):.2f})" for x in kinds.values()]
            rows.append([f"{way}, {int(count):,} tensors", *texts])
    return table(rows, source(found))


def release() -> str:
    """Tabulate the peak memory and the time of the backward pass and the update."""
    found = load(RESULTS / "release.json")
    names = {
        "standard": "torch AdamW (fused) after backward",
        "recipe": "the tutorial's recipe",
        "recipe, fused": "the recipe with `fused=True`",
        "release": "gradient release",
    }
    rows: Rows = [["", "peak memory", *(f"time, {batch}" for batch in found["time"])]]
    for name, title in names.items():
        times = [ratio(cells[name]) for cells in found["time"].values()]
        rows.append([title, f"{found['peak'][name]['share']:.2f}", *times])
    return table(rows, source(found))


def accumulation() -> str:
    """Tabulate how far the result of each way to accumulate is from exact accumulation."""
    found = load(ONE_THREAD / "accumulation.json")
    policies = {
        "flag": "optimi's flag",
        "states": '`"states"`',
        "buffer": '`"buffer"`',
        "bfloat16 buffer": '`"buffer"`, bfloat16',
    }
    extra = [f"{found['cells']['AdamW'][x]['extra']:g}" for x in policies]
    rows: Rows = [["rule", *policies.values()], ["extra bytes per parameter", *extra]]
    for name, cells in found["cells"].items():
        if ": optimi" not in name:
            errors = [cells[x]["error"] for x in policies]
            shown = ("not supported" if e is None else f"{100 * e:.2g}%" for e in errors)
            rows.append([name, *shown])
    return table(rows, source(found))


def muon() -> str:
    """Tabulate validation losses of AdamW and Muon, by learning rate and for seeds."""
    found = load(DATA / "muon.json")
    runs = found["runs"].values()
    rows: Rows = [["", *found["runs"]]]
    for i, lr in enumerate(found["lrs"]):
        cells = [(run["sweep"][i], min(run["sweep"])) for run in runs]
        texts = [f"**{x:.3f}**" if x == best else f"{x:.3f}" for x, best in cells]
        rows.append([f"lr {lr:g}", *texts])
    seeds = ["{mean:.3f} ± {deviation:.3f}".format(**run["seeds"]) for run in runs]
    rows.append(["best lr, three seeds", *seeds])
    least = min(run["step"] for run in runs)
    rows.append(["time of `step()`", *(f"{run['step'] / least:.0f}" for run in runs)])
    return table(rows, source(found))


ERRORS = {
    "sigma 1, stationary": "stationary",
    "sigma 1, spikes": "with spikes",
    "sigma 1, 1e-8": "small",
    "sigma 1, falls": "falling",
    "sigma 1, falls, 4000 steps": "falling, 4000 steps",
    "sigma 2, stationary": "sigma 2",
    "sigma 2, spikes": "sigma 2, with spikes",
}


def stored(number: str, form: str) -> str:
    """Tabulate errors of AdamW's updates from stored moments, by kind of gradients."""
    found = load(RESULTS / "storage.json")
    kinds = [kind for kind in found["errors"]["sigma 1, stationary"] if kind != "float32"]
    rows: Rows = [["gradients", *kinds]]
    for case, called in ERRORS.items():
        cells = [found["errors"][case][kind][number] for kind in kinds]
        rows.append([called, *(f"{x:.0e}" if x >= 1e3 else f"{x:{form}}" for x in cells)])
    return table(rows, source(found))


def storage_errors() -> str:
    """Tabulate the errors of AdamW's updates from stored moments."""
    return stored("error", ".3f")


def storage_largest() -> str:
    """Tabulate the largest elements of AdamW's updates from stored moments."""
    return stored("largest", ".2f")


def storage() -> str:
    """Tabulate the time and the bytes of each way to store a parameter."""
    found = load(RESULTS / "storage.json")
    rows: Rows = [["", "time / float32 time", "bytes per parameter", "bytes with gradient"]]
    for name, cell in found["bytes"].items():
        kept = [f"{cell[k]:.3f}" for k in ("kept", "with gradients")]
        rows.append([name, ratio(found["time"][name]), *kept])
    return table(rows, source(found))


def plan() -> str:
    """Tabulate the bytes that were planned and the bytes that were profiled."""
    found = load(RESULTS / "plan.json")
    rows: Rows = [["", "recipe", "predicted, MB", "measured, MB", "ratio"]]
    for model, recipes in found["plans"].items():
        for recipe, x in recipes.items():
            sizes = [f"{x[k] / 1e6:.1f}" for k in ("predicted", "measured")]
            rows.append([model, recipe, *sizes, f"{x['ratio']:.4f}"])
    return table(rows, source(found))


def plan_llama() -> str:
    """Tabulate the best recipe for each Llama model on each machine."""
    found = load(DATA / "plan_llama.json")
    heads = ["Llama", "GPUs", "best recipe that fits", "its peak"]
    heads += ["float32 peak", "smallest peak"]
    rows: Rows = [heads]
    for model, machines in found["plans"].items():
        for machine, recipes in machines.items():
            fit = [name for name, (_, fits) in recipes.items() if fits]
            peaks = {name: f"{peak / 1e9:.1f}" for name, (peak, _) in recipes.items()}
            best = [fit[0], peaks[fit[0]]] if fit else ["none", "-"]
            least = min(recipes, key=lambda name: recipes[name][0])
            rows.append([model, machine, *best, peaks["float32"], peaks[least]])
    return table(rows, source(found))


POPULATION = {
    "compiled loop": "loop over a compiled step",
    "vmap": "`torch.vmap` of a pure step",
    "population": "`population`",
    "one graph": "`population`, compiled",
}


def population() -> str:
    """Tabulate the time of one graph for all members, relative to a loop over them."""
    found = load(ONE_THREAD / "population.json")
    cells = found["cells"]
    rows: Rows = [["", *(f"{count} members" for count in cells)]]
    loops = [f"{1e3 * cell['loop']['seconds']:.1f} ms" for cell in cells.values()]
    rows.append(["time of the loop", *loops])
    for way, called in POPULATION.items():
        rows.append([called, *(ratio(cell[way]) for cell in cells.values())])
    return table(rows, source(found))


def train_step() -> str:
    """Tabulate peak and time of training steps, in one graph and in other ways."""
    found = load(RESULTS / "train_step.json")
    models = found["models"]
    heads = [f"{m}: {what}" for m in models for what in ("peak", "step time (quartiles)")]
    rows: Rows = [["", *heads]]
    for way in models["GPT"]:
        if all(way in cells for cells in models.values()):
            cells = [models[m][way] for m in models]
            rows.append([way, *(x for c in cells for x in (f"{c['peak']:.2f}", ratio(c)))])
    return table(rows, source(found))


PARAMETERS = 468_224  # of the model of `make train`
RUNS = {
    "float32": ("float32", "torch `AdamW`"),
    "bfloat16": ("bfloat16", "torch `AdamW`"),
    "bfloat16 + Kahan": ("bfloat16", "`AdamW`"),
    "bfloat16 stochastic": ("bfloat16", '`AdamW(storage=Storage("stochastic"))`'),
    "bfloat16 compact": ("bfloat16", '`AdamW(storage="compact")`'),
}


def finals(compute: str, name: str) -> list[float]:
    """Return the last validation loss of each seed, by the dtype of the computation."""
    found = load(DATA / "loss.json")
    return found["runs"][compute][name]["validation"][str(found["steps"])]


def with_error(values: Sequence[float], form: str) -> str:
    """Format the mean, with its standard error if there are several seeds."""
    shown = f"{mean(values):{form}}"
    if len(values) > 1:
        shown += f" ± {stdev(values) / sqrt(len(values)):{form.lstrip('+')}}"
    return shown


COUNTS = {1: "one seed", 3: "three seeds", 5: "five seeds"}


def of_seeds() -> str:
    """Name the source of the tables of `make train`, and the number of seeds."""
    seeds = len(finals("float32", "float32"))
    many = COUNTS.get(seeds, f"{seeds} seeds")
    said = f"mean ± standard error of {many}" if seeds > 1 else many
    return f"{said} · {source(load(DATA / 'loss.json'))}"


def loss() -> str:
    """Tabulate how far the final losses of `make train` are from float32, seed by seed."""
    found = load(DATA / "loss.json")
    rows: Rows = [["bfloat16 weights", *(f"computed in {c}" for c in found["runs"])]]
    wide = finals("float32", "float32")
    for name in list(RUNS)[1:]:
        cells = [
            [x - y for x, y in zip(finals(c, name), wide)] if name in runs else None
            for c, runs in found["runs"].items()
        ]
        if any(cells):
            rows.append(
                [RUNS[name][1], *(with_error(x, "+.4f") if x else "-" for x in cells)]
            )
    return table(rows, of_seeds())


def headline() -> str:
    """Tabulate bytes and loss of the `make train` runs from which most people choose."""
    found = load(DATA / "loss.json")
    heads = ["weights", "optimizer", "bytes per parameter"]
    rows: Rows = [[*heads, *(f"loss, computed in {c}" for c in found["runs"])]]
    for name, (weights, optimizer) in RUNS.items():
        if name != "bfloat16 stochastic":
            size = found["runs"]["float32"][name]["bytes"] / PARAMETERS
            # float32 weights compute in float32 only.
            cells = [
                with_error(finals(c, name), ".3f") if name in runs else "-"
                for c, runs in found["runs"].items()
            ]
            rows.append([weights, optimizer, f"{size:.1f}".removesuffix(".0"), *cells])
    return table(rows, of_seeds())


def lbfgs() -> str:
    """Tabulate the time of a thousand fits."""
    found = load(ONE_THREAD / "lbfgs.json")
    rows: Rows = [["1000 fits", "seconds", "ratio (quartiles)"]]
    for name, cell in found["fits"].items():
        rows.append([name, f"{cell['seconds']:.3f}", ratio(cell)])
    return table(rows, source(found))


# Of which.md


def tasks() -> dict[str, Any]:
    """Return the results of each task by its name."""
    return load(WHICH)["tasks"]


def cells(name: str) -> dict[str, Any]:
    """Return the results of an optimizer, by task."""
    return {task: about["optimizers"][name] for task, about in tasks().items()}


def contenders() -> list[str]:
    """Return the optimizers that trained on every task, sorted by mean rank."""
    ranks: dict[str, list[int]] = {}
    every = [about["optimizers"] for about in tasks().values()]
    for part in every:
        found = {n: cell for n, cell in part.items() if all(n in other for other in every)}
        for i, name in enumerate(sorted(found, key=lambda n: mean(found[n]["final"]))):
            ranks.setdefault(name, []).append(i)
    return sorted(ranks, key=lambda name: mean(ranks[name]))


def title(name: str) -> str:
    """Return the name for a row, with a star if another machine trained this optimizer."""
    return f"`{name}`" + " \\*" * (name in load(WHICH).get("added", {}))


def loss_of(x: float | None) -> str:
    """Format a loss, or return a dash if there is none."""
    if x is None or x >= 1e4:
        return "-" if x is None else "diverged"
    return f"{x:.2g}" if x < 0.1 else f"{x:.3f}"


def which_source() -> str:
    """Name the source of the results in which.md."""
    said = source(load(WHICH))
    if added := load(WHICH).get("added"):
        about = next(iter(added.values()))
        said += f" · \\* {about['name']}, {about['date']}"
    if timed := load(WHICH).get("timed"):
        said += f" · times: {timed['name']}, 1 thread, {timed['date']}"
    return said


def by_task(rows: Rows) -> str:
    """Return rows with a column for each task, and their source."""
    return table([["", *tasks()], *rows], which_source())


def times_of(cell: Any) -> tuple[float, float]:
    """Return the times of a step, and of a pass with a step, relative to those of AdamW."""
    beside = cell["beside"]
    step, reference = cell["step"], beside["step"]
    return step / reference, (beside["pass"] + step) / (beside["pass"] + reference)


def which_loss() -> str:
    """Tabulate final losses with half of their range."""
    rows: Rows = []
    for name in contenders():
        row = [title(name)]
        for cell in cells(name).values():
            half = (max(cell["final"]) - min(cell["final"])) / 2
            row.append(f"{loss_of(mean(cell['final']))} ±{half:.1g}")
        rows.append(row)
    return by_task(rows)


def which_cost() -> str:
    """Tabulate the best lr, the bytes and the time of a step for the task "language"."""
    rows: Rows = [["", "best lr", "bytes per parameter", "time of a step / AdamW's"]]
    for name in contenders():
        own = cells(name)["language"]
        step, _ = times_of(own)
        rows.append([title(name), f"{own['lr']:.2g}", f"{own['bytes']:.1f}", f"{step:.1f}"])
    return table(rows, which_source())


def to_reference(timed: bool) -> str:
    """Tabulate the steps or the time to AdamW's final loss, as fractions of AdamW's."""
    rows: Rows = []
    for name in contenders():
        row = [title(name)]
        for task, cell in cells(name).items():
            share = (cell["steps"] or 0.0) / tasks()[task]["steps"]
            _, pace = times_of(cell)
            row.append(f"{share * (pace if timed else 1.0):.2f}" if share else "-")
        if name != "AdamW" and set(row[1:]) != {"-"}:
            rows.append(row)
    return by_task(rows)


def which_steps() -> str:
    """Tabulate the number of steps to AdamW's final loss."""
    return to_reference(timed=False)


def which_time() -> str:
    """Tabulate the time to AdamW's final loss."""
    return to_reference(timed=True)


# Of hooks.md


def hook_cost() -> str:
    """Tabulate the time of a step with each hook, for each list of matrices."""
    found = load(ONE_THREAD / "hook_cost.json")
    lists = found["hooks"]
    rows: Rows = [["hooks=[...] of AdamW", *lists]]
    for name in next(iter(lists.values())):
        rows.append([f"`{name}`", *[ratio(cells[name]) for cells in lists.values()]])
    return table(rows, source(found))


def hook_losses() -> str:
    """Tabulate the losses of each optimizer and hook, and the best learning rates."""
    found = load(ONE_THREAD / "hooks.json")
    kinds = found["table"]
    rows: Rows = [["", *kinds]]
    for name in next(iter(kinds.values())):
        row = [f"`{name}`"]
        for cells in kinds.values():
            if (cell := cells[name]) is None:
                row.append("refused")
                continue
            final = cell["final"]
            error = stdev(final) / sqrt(len(final))
            row.append(f"{mean(final):.3f} ±{error:.3f} (lr 2^{cell['log2 lr']})")
        rows.append(row)
    return table(rows, source(found))


def hook_widths() -> str:
    """Tabulate losses over the learning rate, for each width with and without hyperball."""
    found = load(ONE_THREAD / "hooks.json")
    rows: Rows = []
    lrs = sorted(
        {
            int(lr)
            for widths in found["transfer"].values()
            for cell in widths.values()
            for lr in cell["by log2 lr"]
        }
    )
    rows.append(["", "width", *[f"lr 2^{lr}" for lr in lrs]])
    for name, widths in found["transfer"].items():
        for width, cell in widths.items():
            losses = {int(lr): mean(x) for lr, x in cell["by log2 lr"].items()}
            best = min(losses.values())
            texts = [
                "-" if lr not in losses else f"{losses[lr]:.3f}".join(["**"] * 2)
                if losses[lr] == best else f"{losses[lr]:.3f}"
                for lr in lrs
            ]  # fmt: skip
            rows.append([name, width, *texts])
    return table(rows, source(found))


def tables() -> dict[str, str]:
    """Return every table, by the name that it has in a page."""
    made = [
        steps,
        steps_avx2,
        uncompiled,
        uncompiled_kahan,
        large,
        rules,
        classes,
        eager_classes,
        host_cost,
    ]
    made += [
        storage_errors,
        storage_largest,
        storage,
        peers,
        turns,
        population,
        train_step,
        loss,
    ]
    made += [headline, lbfgs, plan, plan_llama, first, release, accumulation, muon]
    made += [which_loss, which_cost, which_steps, which_time]
    made += [hook_cost, hook_losses, hook_widths]
    return {make.__name__: make() for make in made}


def filled(page: str) -> str:
    """Return the page with all of its tables as the present results give them."""
    made = tables()
    return re.sub(
        rf"<!-- ({'|'.join(made)}) -->\n.*?<!-- / -->",
        lambda found: f"<!-- {found[1]} -->\n\n{made[found[1]]}\n<!-- / -->",
        page,
        flags=re.S,
    )
