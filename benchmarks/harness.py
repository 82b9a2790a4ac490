"""Options, timing, reports and figures of the benchmarks, which each ask one question.

A file has a frozen dataclass of options, and three functions: `measure` turns the options
into numbers, `report` the numbers into text, `draw` the numbers into a figure. `main` makes
the command line from the fields, runs them, and writes numbers and figure to
``results/<machine>/<file>.json`` and ``.png`` (under ``--quick`` to ``outputs/bench``,
which git ignores). Every file takes:

* ``--quick``: small sizes, for seconds: does it work? What is given explicitly stays;
* ``--json FILE``: where to write; the figure goes beside it;
* ``--show FILE``: measure nothing, print and draw what was written;
* ``--compare OLD NEW``: measure nothing, divide new numbers by old ones.

Ways to do something take turns within each round, beginning with another one each time,
and ratios are taken in each round: what slows the machine down for a while slows all of
them, and nobody always comes after the same one, whose leavings are in the caches.
"""

import argparse
import dataclasses
import gc
import importlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import matplotlib

matplotlib.use("Agg")  # Only files are drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

import optimi_func

ROOT = Path(__file__).parent.parent
OURS = "optimi_func"
NUMBERS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.99),
    "eps": 1e-6,
    "weight_decay": 0.01,
}

Step = Callable[[], Any]
Clock = Callable[[], float]
Seconds = dict[str, list[float]]
Found = dict[str, Any]


# Options


def option(default: Any, meaning: str, choices: Sequence[str] | None = None) -> Any:
    """A field that the command line has too."""
    metadata = {"help": meaning, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Options of every benchmark."""

    seed: int = option(0, "of everything random")
    threads: int = option(torch.get_num_threads(), "of torch")


@dataclass(frozen=True)
class Timed(Options):
    """Options of benchmarks that measure time."""

    rounds: int = option(200, "measured rounds, at most")
    seconds: float = option(5.0, "to measure one comparison for; no fewer than 5 rounds")
    warmup: int = option(3, "rounds before those that are measured, at most")


@dataclass(frozen=True)
class OnDevice(Timed):
    """Options of benchmarks that measure time on any device."""

    device: str = option(
        "cuda" if torch.cuda.is_available() else "cpu", "to run on", ("cpu", "cuda")
    )
    compile: bool | None = option(None, "optimi_func's steps; by default if possible")


# Time


def timed(step: Step, device: str, clock: Clock) -> float:
    """Seconds of one step; on CUDA from events."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = clock()
    step()
    return clock() - began


def interleave(
    steps: dict[str, Step],
    config: Timed,
    title: str,
    before: dict[str, Step] | None = None,
    clock: Clock = time.perf_counter,
) -> Seconds:
    """Seconds of every way, one value a round; what comes before a step is not counted."""
    names, before, device = list(steps), before or {}, getattr(config, "device", "cpu")
    seconds: Seconds = {name: [] for name in names}

    def turn(i: int) -> Iterator[tuple[str, float]]:
        for name in names[i % len(names) :] + names[: i % len(names)]:
            before.get(name, int)()
            yield name, timed(steps[name], device, clock)

    # Without a terminal there is no bar.
    with tqdm(desc=title, unit="round", leave=False, disable=None) as bar:
        for i in range(config.warmup):
            began = time.perf_counter()
            for name, _ in turn(i):
                bar.set_postfix_str(f"warm-up: {name}")
            took = time.perf_counter() - began
            if i and took > config.seconds:
                break  # Large enough to need no more.
        bar.reset(config.rounds)
        bar.set_postfix_str("")
        began = time.perf_counter()
        for i in range(config.rounds):
            if i >= 5 and time.perf_counter() - began > config.seconds:
                break
            for name, taken in turn(i):
                seconds[name].append(taken)
            bar.update()
    return seconds


@dataclass(frozen=True)
class Ratio:
    """A median time, and the median and quartiles of its ratio to the reference's."""

    seconds: float
    ratio: float
    low: float
    high: float
    rounds: int


def ratios(seconds: Seconds, reference: str) -> dict[str, Ratio]:
    """Over the rounds."""
    summary: dict[str, Ratio] = {}
    for name, taken in seconds.items():
        paired = [own / other for own, other in zip(taken, seconds[reference])]
        low, middle, high = quantiles(paired, n=4)
        summary[name] = Ratio(median(taken), middle, low, high, len(taken))
    return summary


def in_new_process(code: str, arguments: Sequence[Any], cache: str) -> float:
    """The number that a program prints last; it finds the compiler's caches in a folder."""
    paths = [Path(__file__).parent, Path(optimi_func.__file__).parent.parent]
    environment = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "OPTIMI_FUNC_CACHE": f"{cache}/optimi_func",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout.split()[-1])


# Memory

MEASURED = "what is measured"


def peak_bytes(
    make: Callable[[], tuple[Step, Step]],
    steps: int,
    device: str = "cpu",
    whole: bool = False,
) -> int:
    """Peak of the last step above what was allocated when it began.

    `make` returns what comes before a step, and the step. It is called under the profiler:
    that reports no free of a CPU tensor whose allocation it has not seen. What it makes
    counts too where the `whole` is asked for.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        before, step = make()
        for _ in range(steps):
            before()
            with record_function(MEASURED):
                step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    part = max((e for e in trace if e["name"] == MEASURED), key=lambda e: e["ts"])
    kind = {"cpu": 0, "cuda": 1}[device]
    events = [
        (event["ts"], event["args"])
        for event in trace
        if event["name"] == "[memory]" and event["args"]["Device Type"] == kind
    ]
    events.sort(key=lambda event: event[0])
    allocated = [(when, found["Total Allocated"]) for when, found in events]
    end = part["ts"] + part["dur"]
    held = [total for when, total in allocated if when < part["ts"]][-1]
    began = allocated[0][1] - events[0][1]["Bytes"] if whole else held
    # A compiled step may allocate nothing.
    during = [total for when, total in allocated if part["ts"] <= when <= end]
    return max([held, *during]) - began


def parameters(tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Copies, which have the gradients in common: no step writes into them."""
    params = [x.clone().requires_grad_() for x in tensors]
    for p, g in zip(params, grads):
        p.grad = g
    return params


def free(device: str) -> None:
    """Give back what is no longer used."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# Packages and the machine


def load(name: str) -> Any:
    """Import it; what it warns of is not about this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine(file: str, config: Options) -> Found:
    """Describe the machine and the versions."""
    device = getattr(config, "device", "cpu")
    # Of folders of this machine nobody else knows.
    given = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    return {
        "device": device,
        "name": device_name(device),
        "instructions": instructions(),
        "threads": config.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(file).name}", *given]),
        "environment": {
            k: v
            for k, v in os.environ.items()
            if k.startswith("OMP_") or k == "ATEN_CPU_CAPABILITY"
        },
    }


def instructions() -> str:
    """Return the vector instructions that torch uses on this CPU."""
    found = torch.backends.cpu.get_cpu_capability()
    bfloat16 = found == "AVX512" and torch.cpu.get_capabilities()["avx512_bf16"]
    return f"{found} with bfloat16" if bfloat16 else found


def device_name(device: str) -> str:
    """The GPU's or the processor's."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """Return the commit that is checked out; numbers that were measured leave it clean."""
    command = ["git", "-C", str(ROOT)]
    changed = ["status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results"]
    try:
        found = [
            subprocess.run([*command, *more], capture_output=True, text=True, check=True)
            for more in (["rev-parse", "--short", "HEAD"], changed)
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return found[0].stdout.strip() + "-dirty" * bool(found[1].stdout)


def folder(about: Found) -> Path:
    """Return the folder of a machine's results, such as cpu-epyc-2-threads."""
    words = re.findall(r"[a-z0-9]+", about["name"].lower())
    named = [w for w in words if w not in ("amd", "intel", "nvidia", "r", "tm", "cpu")]
    parts = [about["device"], *named, f"{about['threads']}-threads"]
    return ROOT / "benchmarks/results" / "-".join(parts)


def heading(about: Found) -> str:
    """The machine in a line."""
    return (
        f"{about['name']}, {about['threads']} threads, torch {about['torch']}, "
        f"{about['date']}, commit {about['commit']}"
    )


# Tables


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the header, the first column is text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rules = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    padded = [
        [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:]))]
        for row in [rows[0], rules, *rows[1:]]
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def spread(value: Any) -> tuple[float, float, float]:
    """A middle with its low and high: of a ratio's numbers, of a list, of one number."""
    if isinstance(value, dict):
        middle = value["ratio"] if "ratio" in value else value["share"]
        return middle, value["low"], value["high"]
    if isinstance(value, list):
        return median(value), min(value), max(value)
    return value, value, value


def text(value: Any, digits: int = 2) -> str:
    """Middle (low-high); a dash for what there is not."""
    if not value:
        return "-"
    middle, low, high = (f"{x:.{digits}f}" for x in spread(value))
    return f"{middle} ({low}-{high})"


def milliseconds(cell: Found) -> str:
    """Format the median in milliseconds."""
    return f"{1e3 * cell['seconds']:.3g}"


def compared(found: Found, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number that two runs can be compared by, and where it stands."""
    for key, value in found.items():
        place = ", ".join(filter(None, [path, "" if key == "ratio" else key]))
        if key in ("machine", "config", "skipped"):
            continue
        if isinstance(value, dict):
            yield from compared(value, place)
        elif isinstance(value, list) and value:
            yield place, median(value)
        elif key in ("ratio", "share", "peak") and value != 1:  # The reference's is 1.
            yield place, value


def comparison(old: Found, new: Found) -> str:
    """Compare two runs, row by row."""
    before, after = dict(compared(old)), dict(compared(new))
    names = [str(found.get("machine", {}).get("commit")) for found in (old, new)]
    rows = [["ratio", *names, "new / old"]]
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        rows.append([name, f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}" if a else "-"])
    return table([rows[0], *sorted(rows[1:])])


# Figures


def axes_of(title: str, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """Return the axes of a new figure with a title."""
    figure, grid = plt.subplots(
        rows, columns, layout="constrained", squeeze=False, **options
    )
    figure.suptitle(title)
    for axes in grid.flat:
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return list(grid.flat)


def bars(
    axes: Axes,
    groups: dict[str, dict[str, Any]],
    ways: Sequence[str] = ("",),
    base: int = 0,
) -> None:
    """Groups of bars, one each way, with low and high; each as wide as the ways it has.

    With a base of 1 the axis is logarithmic: what is faster hangs down.
    """
    colors = plt.get_cmap("tab10").colors
    shown = [[way for way in ways if way in group] for group in groups.values()]
    width = 0.85 / max(map(len, shown))
    used: set[str] = set()
    for i, group in enumerate(groups.values()):
        for j, way in enumerate(shown[i]):
            middle, low, high = spread(group[way])
            x = i + (j - (len(shown[i]) - 1) / 2) * width
            axes.bar(
                x,
                middle - base,
                0.9 * width,
                bottom=base,
                color=colors[list(ways).index(way)],
                yerr=[[max(0, middle - low)], [max(0, high - middle)]],
                error_kw={"elinewidth": 0.8},
                label=None if way in used else way,
            )
            axes.annotate(
                f"{middle:.{2 if middle < 2 else 1 if middle < 10 else 0}f}",
                (x, max(base, high)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                fontweight="bold" if way == OURS else None,
            )
            used.add(way)
    if base:
        axes.axhline(base, color="black", linewidth=1)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(groups)), [name.replace(", ", "\n") for name in groups])


def legend(axes: Axes, columns: int = 6) -> None:
    """Draw the legend of one of the axes, below all of them."""
    handles, labels = axes.get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    axes.get_figure().legend(handles, labels, **place)


# The command line


def parse(
    options: type[Options], quick: Found, description: str, arguments: Sequence[str] | None
) -> tuple[Options, argparse.Namespace]:
    """The configuration, and what `main` itself is asked for."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(options):
        how: dict[str, Any] = {"type": type(field.default)}
        if field.default is None or isinstance(field.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        elif isinstance(field.default, tuple):
            how = {"type": type(field.default[0]), "nargs": "+"}
        if field.metadata["choices"]:
            how["choices"] = field.metadata["choices"]
        shown = field.default
        shown = " ".join(map(str, shown)) if isinstance(shown, tuple) else shown
        meaning = f"{field.metadata['help']} (default: {shown})"
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, default=argparse.SUPPRESS, help=meaning, **how)
    parser.add_argument("--quick", action="store_true", help="for seconds: does it work?")
    parser.add_argument("--json", type=Path, help="for numbers; the figure is beside it")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing: show")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="measure nothing"
    )
    asked = parser.parse_args(arguments)
    given = {
        f.name: tuple(value) if isinstance(value, list) else value
        for f in dataclasses.fields(options)
        if (value := getattr(asked, f.name, None)) is not None
    }
    return options(**((quick if asked.quick else {}) | given)), asked


def main(
    file: str,
    description: str,
    options: type[Any],
    quick: Found,
    measure: Callable[[Any], Found],
    report: Callable[[Found], str],
    draw: Callable[[Found], Axes],
    arguments: Sequence[str] | None = None,
) -> None:
    """Measure, print, write and draw; or show what was written."""
    config, asked = parse(options, quick, description, arguments)
    if asked.compare:
        print(comparison(*(json.loads(path.read_text()) for path in asked.compare)))
        return
    name = f"{Path(file).stem}.json"
    if asked.show:
        found = json.loads(asked.show.read_text())
        path = asked.json or ROOT / "outputs/bench" / name
    else:
        torch.set_num_threads(config.threads)
        about = machine(file, config)
        found = {"machine": about, "config": asdict(config), **measure(config)}
        path = asked.json or (
            (ROOT / "outputs/bench" if asked.quick else folder(about)) / name
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Numbers of before there was this file lack it.
    title = heading(found["machine"]) if "machine" in found else f"torch {found['torch']}"
    print(f"{title}\n\n{report(found)}")
    if not asked.show:
        path.write_text(f"{json.dumps(found, indent=1)}\n")
    figure = draw(found).get_figure()
    assert isinstance(figure, Figure)
    figure.suptitle(f"{figure.get_suptitle()}\n{title}", fontsize=11)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    plt.close(figure)
