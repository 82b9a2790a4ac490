"""Measure the optimizer's step against torch's fused one and against other libraries.

Five questions, each a part that ``--parts`` can pick:

* ``steps``: the time of an AdamW step on seven sets of shapes, in float32, in bfloat16 and
  in bfloat16 with Kahan summation, as a ratio to ``torch.optim.AdamW(fused=True)`` in the
  same dtype;
* ``bandwidth``: the bytes per second of our step on four float32 matrices of 4096 x 4096
  (reads p, g, m, v, writes p, m, v), as a share of what a compiled kernel without any
  arithmetic worth the name, with the same reads and writes, reaches; a copy is beside it;
* ``rules``: the other rules on the same matrices: time per byte, relative to AdamW's. The
  bytes are those of p, g and the state's fields; StableAdamW's g and v count twice, for
  its mean has to be known before anything moves. Ranger's slow weights move in every
  sixth step only, which is not the median one: they are not counted;
* ``first``: seconds until the first step is done in a new process, with empty caches and
  with warm ones, beyond the import of torch and of its compiler;
* ``scaling``: time against the number of parameters, ten equal tensors in float32.

The ways to step take turns within each round, on parameters and states of their own and
on the same gradients, beginning with another one each time. The ratio is taken in each
round: what slows the machine down for a while slows all of them. Slow ways take turns
among themselves and with torch's fused step, so that the quick ones get more rounds. One
round is one step: each finds the caches as the others left them, as it would after a
backward. Tables have medians and quartiles over the rounds.

Ways that compile for the shapes they meet (torch.compile, heavyball, torchao) take up to
a minute a set before the first step; sets with more tensors than ``--compile-limit`` are
left out for them. Other libraries are left out, by name, where they are not installed:
``pip install '.[bench]'``. torchao's keeps its moments in 8 bits; heavyball's rounds
bfloat16 stochastically; optimi's has Kahan summation too.

On CUDA times are from events, and the kernels that a step launches are counted.

``--compare OLD.json NEW.json`` measures nothing and divides new ratios by old ones.
"""

import argparse
import gc
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import matplotlib

matplotlib.use("Agg")  # Only files are drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import optimi_func

ROOT = Path(__file__).parent.parent
NUMBERS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.99),
    "eps": 1e-6,
    "weight_decay": 0.01,
}
REFERENCE = "torch fused"
OURS = "optimi_func"
PARTS = ("steps", "bandwidth", "rules", "first", "scaling")

Shape = tuple[int, ...]
Step = Callable[[], Any]
Seconds = dict[str, list[float]]


# Shapes


def linear(out: int, width: int) -> list[Shape]:
    """A weight and a bias."""
    return [(out, width), (out,)]


def block(w: int) -> list[Shape]:
    """Of a transformer: two norms, attention, MLP."""
    attention = linear(3 * w, w) + linear(w, w)
    return [(w,)] * 4 + attention + linear(4 * w, w) + linear(w, 4 * w)


def vit(w: int, depth: int = 12, tokens: int = 197, classes: int = 1000) -> list[Shape]:
    """A vision transformer on 16 x 16 patches."""
    embedding = [(1, 1, w), (1, tokens, w), (w, 3, 16, 16), (w,)]
    return embedding + block(w) * depth + [(w,)] * 2 + linear(classes, w)


def gpt2(w: int = 768, depth: int = 12) -> list[Shape]:
    """GPT-2, whose output layer is its embedding."""
    return [(50257, w), (1024, w), *block(w) * depth, (w,), (w,)]


def resnet50() -> list[Shape]:
    """Convolutions, each with a norm, and a linear layer."""
    convolutions, channels = [(64, 3, 7, 7)], 64
    for w, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(depth):
            bottleneck = [(w, channels, 1, 1), (w, w, 3, 3), (4 * w, w, 1, 1)]
            shortcut = [(4 * w, channels, 1, 1)] if i == 0 else []
            convolutions += bottleneck + shortcut
            channels = 4 * w
    normed = [[shape, shape[:1], shape[:1]] for shape in convolutions]
    return [*chain.from_iterable(normed), *linear(1000, channels)]


def odd() -> list[Shape]:
    """Nothing that a vector's length divides: 0-d, of one element, primes, 3-d."""
    primes = [p for p in range(2, 114) if all(p % d for d in range(2, p))]
    shapes: list[Shape] = []
    for p, q in zip(primes, reversed(primes)):
        shapes += [() if p % 4 == 1 else (1,), (211 * p,), (p, q), (p, 3, q)]
    return shapes


@dataclass(frozen=True)
class Shapes:
    """A set of parameters."""

    title: str
    shapes: list[Shape]
    elements: int | None = None  # of all together, where that is known
    channels_last: bool = False

    def __post_init__(self) -> None:
        assert self.elements in (None, self.count()), (self.title, self.count())

    def count(self) -> int:
        """Elements of all tensors."""
        return sum(map(prod, self.shapes))

    def tensors(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        """Random ones, laid out as they would be in a model."""
        made = [torch.randn(s, device=device).to(dtype) for s in self.shapes]
        if not self.channels_last:
            return made
        last = torch.channels_last
        return [x.to(memory_format=last) if x.dim() == 4 else x for x in made]


SETS = {
    "vit-b": Shapes("ViT-B/16", vit(768), 86_567_656),
    "vit-tiny": Shapes("ViT-tiny/16", vit(192), 5_717_416),
    "gpt2": Shapes("GPT-2", gpt2(), 124_439_808),
    "large": Shapes("4 x 4096 x 4096", [(4096, 4096)] * 4, 2**26),
    "small": Shapes("1000 x 16", [(16,)] * 1000),
    "resnet50": Shapes("ResNet-50, channels last", resnet50(), 25_557_032, True),
    "odd": Shapes("120 odd shapes", odd()),
    "tiny": Shapes("5 tensors", [(100, 100), (100,), (16,), (), (7, 3)]),
}
DEFAULT_SETS = tuple(name for name in SETS if name != "tiny")

# The dtype, and whether sums are compensated.
DTYPES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "bfloat16 + Kahan": (torch.bfloat16, True),
}


# Ways to step


@dataclass(frozen=True)
class Config:
    """What to measure, and on what."""

    sets: tuple[str, ...] = DEFAULT_SETS
    ways: tuple[str, ...] = ()  # All of them.
    parts: tuple[str, ...] = PARTS
    seconds: float = 5.0
    least: int = 5
    most: int = 200
    warmup: int = 3
    memory: float = 10.0
    compile_limit: int = 8
    starts: int = 3
    tensors: tuple[int, ...] = (10, 10_000)
    largest: float = 3e8
    seed: int = 0
    threads: int = torch.get_num_threads()
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    compile: bool | None = None
    out: Path = Path("outputs/bench")
    json: Path | None = None

    def quick(self) -> "Config":
        """Shrink to a minute: small sets, few rounds, nothing of the large matrices."""
        sets = tuple(s for s in self.sets if SETS[s].count() < 1e7) or ("vit-tiny",)
        parts = tuple(p for p in self.parts if p in ("steps", "first", "scaling"))
        quicker = replace(self, sets=sets, parts=parts, seconds=0.5, most=20, starts=1)
        return replace(quicker, largest=1e6)


@dataclass(frozen=True)
class Way:
    """How to make an AdamW, and what it can and needs."""

    make: Callable[[list[Tensor], bool, Config], Step]
    needs: str | None = None  # a package, beside torch
    kahan: bool = False  # Can it sum with compensation?
    compiles: bool = False  # for the shapes it meets
    slow: bool = False  # Would it take the rounds' time from the quick ones?


def torch_way(params: list[Tensor], kahan: bool, config: Config, **options: bool) -> Step:
    """torch's own."""
    return torch.optim.AdamW(params, **NUMBERS, **options).step


def torch_compile(params: list[Tensor], kahan: bool, config: Config) -> Step:
    """torch's own, through its compiler."""
    return torch.compile(torch.optim.AdamW(params, **NUMBERS).step)


def ours(params: list[Tensor], kahan: bool, config: Config, foreach: bool = False) -> Step:
    """This library's."""
    options = {"foreach": True} if foreach else {"compile": config.compile}
    return optimi_func.AdamW(params, kahan_sum=kahan, **NUMBERS, **options).step


def optimi_way(params: list[Tensor], kahan: bool, config: Config) -> Step:
    """What this library's arguments are from."""
    return load("optimi").AdamW(params, kahan_sum=kahan, **NUMBERS).step


def heavyball_way(params: list[Tensor], kahan: bool, config: Config) -> Step:
    """Compiled for the list of tensors."""
    return load("heavyball").AdamW(params, consume_grad=False, **NUMBERS).step


def torchao_way(params: list[Tensor], kahan: bool, config: Config) -> Step:
    """Moments in 8 bits."""
    return load("torchao.optim").AdamW8bit(params, **NUMBERS).step


def load(name: str) -> Any:
    """Import it; what it warns of is not about this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


WAYS = {
    REFERENCE: Way(partial(torch_way, fused=True), kahan=True),
    "torch foreach": Way(partial(torch_way, foreach=True), slow=True),
    "torch for-loop": Way(partial(torch_way, foreach=False), slow=True),
    "torch.compile": Way(torch_compile, compiles=True),
    OURS: Way(ours, kahan=True),
    "optimi_func foreach": Way(partial(ours, foreach=True), kahan=True, slow=True),
    "optimi": Way(optimi_way, "torch-optimi", kahan=True, slow=True),
    "heavyball": Way(heavyball_way, "heavyball", compiles=True, slow=True),
    "torchao 8-bit": Way(torchao_way, "torchao", compiles=True, slow=True),
}


def installed(package: str) -> str | None:
    """Its version, if there is one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def why_not(name: str, shapes: Shapes, kahan: bool, config: Config) -> str | None:
    """Why a way is left out; None if it is not."""
    way = WAYS[name]
    if way.needs is not None and installed(way.needs) is None:
        return f"{way.needs} is not installed"
    if kahan and not way.kahan:
        return "no Kahan summation"
    if way.compiles and config.compile is False:
        return "--no-compile"
    if way.compiles and len(shapes.shapes) > config.compile_limit:
        return f"compiles more than {config.compile_limit} tensors"
    return None


# Time


def timed(step: Step, device: str) -> float:
    """Seconds of one step."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def interleave(steps: dict[str, Step], config: Config, title: str) -> Seconds:
    """Seconds of every way, one value a round."""
    names = list(steps)
    seconds: Seconds = {name: [] for name in names}
    with tqdm(desc=title, unit="round", leave=False, disable=None) as bar:
        for i in range(config.warmup):
            began = time.perf_counter()
            for name in names:
                bar.set_postfix_str(f"warm-up: {name}")
                timed(steps[name], config.device)
            took = time.perf_counter() - began
            if i and took > config.seconds:
                break  # Large enough to need no more.
        rounds = int(min(max(config.seconds / took, config.least), config.most))
        bar.reset(rounds)
        bar.set_postfix_str("")
        for i in range(rounds):
            turn = i % len(names)
            for name in names[turn:] + names[:turn]:
                seconds[name].append(timed(steps[name], config.device))
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
    launches: int | None = None


def ratios(seconds: Seconds, reference: str) -> dict[str, Ratio]:
    """Over the rounds."""
    summary: dict[str, Ratio] = {}
    for name, taken in seconds.items():
        paired = [own / other for own, other in zip(taken, seconds[reference])]
        low, middle, high = quantiles(paired, n=4)
        summary[name] = Ratio(median(taken), middle, low, high, len(taken))
    return summary


def launches(step: Step, device: str) -> int | None:
    """Kernels that a step puts on the device."""
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    return sum(
        event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in recorded.events()
    )


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


def batches(names: list[str], each: float, limit: float) -> list[list[str]]:
    """As many ways at a time as there is memory for, the reference with all of them.

    The slow ones go by themselves: the others have more rounds in the same time, and do
    not come after temporaries that the system has to map anew.
    """
    others = [name for name in names if name != REFERENCE]
    count = max(1, int(limit / each) - 1)
    found: list[list[str]] = []
    for slow in (False, True):
        kind = [name for name in others if WAYS[name].slow == slow]
        found += [[REFERENCE, *kind[i : i + count]] for i in range(0, len(kind), count)]
    return found or [[REFERENCE]]


def measure_set(key: str, dtype_name: str, config: Config) -> dict[str, Ratio]:
    """All ways on one set, in one dtype."""
    shapes, (dtype, kahan) = SETS[key], DTYPES[dtype_name]
    asked = [name for name in WAYS if name in (REFERENCE, *(config.ways or WAYS))]
    names = [n for n in asked if why_not(n, shapes, kahan, config) is None]
    # Parameters, two moments and Kahan's compensation or temporaries.
    each = 4 * shapes.count() * dtype.itemsize / 1e9
    summary: dict[str, Ratio] = {}
    groups = batches(names, each, config.memory)
    share = replace(config, seconds=config.seconds / len(groups))
    for batch in groups:
        torch.manual_seed(config.seed)
        tensors = shapes.tensors(dtype, config.device)
        grads = shapes.tensors(dtype, config.device)
        steps = {n: WAYS[n].make(parameters(tensors, grads), kahan, config) for n in batch}
        seconds = interleave(steps, share, f"{shapes.title}, {dtype_name}")
        counts = {name: launches(step, config.device) for name, step in steps.items()}
        for name, ratio in ratios(seconds, REFERENCE).items():
            summary.setdefault(name, replace(ratio, launches=counts[name]))
        del tensors, grads, steps
        torch.compiler.reset()
        free(config.device)
    return {name: summary[name] for name in names}


# Bandwidth, rules, scaling


def touch(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """Read four and write three, with next to no arithmetic."""
    m.mul_(0.5).add_(g)
    v.mul_(0.5).add_(g)
    p.sub_(m + v)


def measure_bandwidth(config: Config) -> dict[str, Any]:
    """Bytes per second of our step, of a plain kernel and of a copy."""
    large = SETS["large"]
    tensors = large.tensors(torch.float32, config.device)
    grads = large.tensors(torch.float32, config.device)
    flat = [torch.randn(large.count(), device=config.device) for _ in range(4)]
    plain = touch if config.compile is False else torch.compile(touch)
    steps: dict[str, Step] = {
        "plain kernel": lambda: plain(*flat),
        OURS: ours(parameters(tensors, grads), False, config),
        "copy": lambda: flat[0].copy_(flat[1]),
    }
    seconds = interleave(steps, config, "bandwidth")
    moved = {"plain kernel": 28, OURS: 28, "copy": 8}
    rates = {
        name: [moved[name] * large.count() / s for s in taken]
        for name, taken in seconds.items()
    }
    summary: dict[str, Any] = {"bytes per second": {n: median(r) for n, r in rates.items()}}
    for other in ("plain kernel", "copy"):
        low, middle, high = quantiles(
            [a / b for a, b in zip(rates[OURS], rates[other])], n=4
        )
        summary[f"share of {other}"] = {"share": middle, "low": low, "high": high}
    return summary


@dataclass(frozen=True)
class Rule:
    """An optimizer of this library, and the state that each of its steps moves."""

    make: Callable[..., Any]
    state: int
    options: dict[str, Any] = field(default_factory=dict)
    again: int = 0  # tensors that have to be read a second time

    def bytes_per_parameter(self) -> int:
        """Reads of p, g and the state, writes of p and the state, in float32."""
        return 4 * (3 + 2 * self.state + self.again)


RULES = {
    "AdamW": Rule(optimi_func.AdamW, 2),
    "SGD, momentum": Rule(optimi_func.SGD, 1, {"momentum": 0.9}),
    "Adam": Rule(optimi_func.Adam, 2),
    # The mean of g^2 / v over a whole tensor comes before its first element moves.
    "StableAdamW": Rule(optimi_func.StableAdamW, 2, again=2),
    "RAdam": Rule(optimi_func.RAdam, 2),
    "Ranger": Rule(optimi_func.Ranger, 2),
    "Adan": Rule(optimi_func.Adan, 4),
    "Lion": Rule(optimi_func.Lion, 1),
}


def measure_rules(config: Config) -> dict[str, dict[str, Any]]:
    """Time per byte, relative to AdamW's."""
    large = SETS["large"]
    tensors = large.tensors(torch.float32, config.device)
    grads = large.tensors(torch.float32, config.device)
    steps: dict[str, Step] = {}
    for name, rule in RULES.items():
        options = {"lr": 1e-4, "compile": config.compile} | rule.options
        steps[name] = rule.make(parameters(tensors, grads), **options).step
    seconds = interleave(steps, config, "rules")
    per_byte = {
        name: [s / RULES[name].bytes_per_parameter() for s in taken]
        for name, taken in seconds.items()
    }
    return {
        name: asdict(replace(ratio, seconds=median(seconds[name])))
        | {"bytes per parameter": RULES[name].bytes_per_parameter()}
        for name, ratio in ratios(per_byte, "AdamW").items()
    }


def memory_left(device: str) -> float:
    """Bytes."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 8e9
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return 1024.0 * int(lines["MemAvailable"].split()[0])


def measure_scaling(config: Config) -> dict[str, dict[str, Any]]:
    """Time of torch's fused step and of ours by number of parameters."""
    summary: dict[str, dict[str, Any]] = {}
    for n in (10**4 * k * 10**e for e in range(5) for k in (1, 3)):
        # Two copies of p, m and v, and the gradient; some are left over.
        if n > config.largest or 8 * 4 * n > 0.9 * memory_left(config.device):
            continue
        shapes = Shapes(f"{n:.0e} parameters", [(n // 10,)] * 10)
        grads = shapes.tensors(torch.float32, config.device)
        steps = {
            name: WAYS[name].make(parameters(grads, grads), False, config)
            for name in (REFERENCE, OURS)
        }
        quicker = replace(config, seconds=config.seconds / 5)
        measured = ratios(interleave(steps, quicker, shapes.title), REFERENCE)
        summary[str(n)] = {name: asdict(ratio) for name, ratio in measured.items()}
        del grads, steps
        free(config.device)
    return summary


# The first step

FIRST = """
import sys, time
import torch, torch._dynamo, torch._inductor.compile_fx
tensors, threads, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
params = [torch.randn(16, device=device).requires_grad_() for _ in range(tensors)]
for p in params:
    p.grad = torch.randn_like(p)
start = time.perf_counter()
import optimi_func
optimi_func.AdamW(params, lr=1e-3).step()
if device == "cuda":
    torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_step(tensors: int, cache: str, config: Config) -> float:
    """Seconds in a new process."""
    package = str(Path(optimi_func.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST, str(tensors), str(config.threads), config.device],
        env=os.environ | caches | {"PYTHONPATH": path},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout)


def measure_first(config: Config) -> dict[str, dict[str, list[float]]]:
    """Seconds by number of tensors, with empty caches and with warm ones."""
    summary = {str(n): {"cold": [], "warm": []} for n in config.tensors}
    jobs = [n for _ in range(config.starts) for n in config.tensors]
    for n in tqdm(jobs, "first steps", unit="pair", leave=False, disable=None):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                summary[str(n)][kind].append(first_step(n, cache, config))
    return summary


# Results


def machine(config: Config) -> dict[str, Any]:
    """What the numbers are of."""
    peers = {way.needs: installed(way.needs) for way in WAYS.values() if way.needs}
    return {
        "device": config.device,
        "name": device_name(config.device),
        "threads": config.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "peers": peers,
    }


def device_name(device: str) -> str:
    """The GPU's or the processor's."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """What is checked out."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def measure(config: Config) -> dict[str, Any]:
    """Everything that was asked for."""
    found: dict[str, Any] = {"machine": machine(config), "skipped": skipped(config)}
    if "steps" in config.parts:
        found["steps"] = {key: {} for key in config.sets}
        cells = [(key, dtype) for key in config.sets for dtype in DTYPES]
        for key, dtype in tqdm(cells, "sets and dtypes", disable=None):
            measured = measure_set(key, dtype, config)
            found["steps"][key][dtype] = {n: asdict(r) for n, r in measured.items()}
    parts = {
        "bandwidth": measure_bandwidth,
        "rules": measure_rules,
        "first": measure_first,
        "scaling": measure_scaling,
    }
    for name, part in parts.items():
        # Without a compiler a first step is like any other.
        if name in config.parts and (name != "first" or config.compile is not False):
            found[name] = part(config)
            torch.compiler.reset()
            free(config.device)
    return found


def skipped(config: Config) -> dict[str, str]:
    """What is left out, and why."""
    reasons = {
        f"{way}: {SETS[key].title}": why_not(way, SETS[key], False, config)
        for way in config.ways or WAYS
        for key in config.sets
    }
    return {name: why for name, why in reasons.items() if why is not None}


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the header, the first column is text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rules = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    padded = [
        [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:]))]
        for row in [rows[0], rules, *rows[1:]]
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def steps_table(steps: dict[str, Any]) -> str:
    """A line per set and dtype, a column per way."""
    ways = [
        w for w in WAYS if any(w in cell for by in steps.values() for cell in by.values())
    ]
    rows = [["AdamW, ratio to torch fused", "fused, ms", *ways[1:]]]
    for key, by_dtype in steps.items():
        for dtype, cell in by_dtype.items():
            texts = [ratio_text(cell.get(way)) for way in ways[1:]]
            fused = f"{1e3 * cell[REFERENCE]['seconds']:.3g}"
            rows.append([f"{SETS[key].title}, {dtype}", fused, *texts])
    return table(rows)


def ratio_text(cell: dict[str, Any] | None) -> str:
    """The median, the quartiles, and on CUDA the launches."""
    if cell is None:
        return "-"
    text = f"{cell['ratio']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})"
    return text if cell["launches"] is None else f"{text}, {cell['launches']} kernels"


def report(found: dict[str, Any]) -> str:
    """All tables."""
    about = found["machine"]
    parts = [
        f"{about['name']}, {about['threads']} threads, torch {about['torch']}, "
        f"{about['date']}, commit {about['commit']}; medians (quartiles)"
    ]
    if "steps" in found:
        parts.append(steps_table(found["steps"]))
        reasons = sorted(
            {f"{n.split(':')[0]}: {why}" for n, why in found["skipped"].items()}
        )
        parts.append("\n".join(f"left out: {reason}" for reason in reasons))
    if "bandwidth" in found:
        rows = [["float32, 4 x 4096 x 4096", "GB/s", "our share of it"]]
        for name, rate in found["bandwidth"]["bytes per second"].items():
            share = found["bandwidth"].get(f"share of {name}")
            text = range_text(share, "share", 100, " %") if share else ""
            rows.append([name, f"{rate / 1e9:.1f}", text])
        parts.append(table(rows))
    if "rules" in found:
        rows = [["rule", "ms", "bytes per parameter", "time per byte, AdamW's is 1"]]
        for name, cell in found["rules"].items():
            moved = str(cell["bytes per parameter"])
            time_ = f"{1e3 * cell['seconds']:.3g}"
            rows.append([name, time_, moved, range_text(cell, "ratio")])
        parts.append(table(rows))
    if "first" in found:
        rows = [["first step, tensors of 16", "cold, s", "warm, s"]]
        for n, by_kind in found["first"].items():
            texts = [
                f"{median(s):.2f} ({min(s):.2f}-{max(s):.2f})" for s in by_kind.values()
            ]
            rows.append([f"{int(n):,}", *texts])
        parts.append(table(rows))
    if "scaling" in found:
        rows = [["parameters", "torch fused, ms", "optimi_func, ms", "ratio"]]
        for n, cell in found["scaling"].items():
            times = [f"{1e3 * cell[way]['seconds']:.3g}" for way in (REFERENCE, OURS)]
            rows.append([f"{int(n):.0e}", *times, range_text(cell[OURS], "ratio")])
        parts.append(table(rows))
    return "\n\n".join(filter(None, parts))


def range_text(cell: dict[str, Any], key: str, scale: float = 1, unit: str = "") -> str:
    """A median and its quartiles."""
    middle, low, high = (scale * cell[k] for k in (key, "low", "high"))
    digits = 2 if scale == 1 else 0
    return f"{middle:.{digits}f}{unit} ({low:.{digits}f}-{high:.{digits}f})"


def rows_of(found: dict[str, Any]) -> dict[str, float]:
    """Every number that two runs can be compared by; less is better."""
    numbers: dict[str, float] = {}
    for key, by_dtype in found.get("steps", {}).items():
        for dtype, cell in by_dtype.items():
            for way, ratio in cell.items():
                if way != REFERENCE:
                    numbers[f"{SETS[key].title}, {dtype}: {way}"] = ratio["ratio"]
    if "bandwidth" in found:
        share = found["bandwidth"]["share of plain kernel"]["share"]
        numbers["time beside the plain kernel's"] = 1 / share
    for name, cell in found.get("rules", {}).items():
        numbers[f"time per byte: {name}"] = cell["ratio"]
    for n, by_kind in found.get("first", {}).items():
        for kind, seconds in by_kind.items():
            numbers[f"first step, {int(n):,} tensors, {kind}, s"] = median(seconds)
    for n, cell in found.get("scaling", {}).items():
        numbers[f"{int(n):.0e} parameters"] = cell[OURS]["ratio"]
    return numbers


def comparison(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What changed between two runs, row by row."""
    before, after = rows_of(old), rows_of(new)
    names = [str(found["machine"]["commit"]) for found in (old, new)]
    rows = [["ratio", *names, "new / old"]]
    for name in before:
        if name in after:
            a, b = before[name], after[name]
            rows.append([name, f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}"])
    return table(rows)


# Pictures

COLORS: dict[str, Any] = dict(zip(WAYS, plt.get_cmap("tab10").colors))
# Ours stands out.
COLORS["torch.compile"], COLORS[OURS] = COLORS[OURS], COLORS["torch.compile"]


def draw(found: dict[str, Any], folder: Path) -> None:
    """One file for each part that has a picture."""
    about = found["machine"]
    title = f"{about['name']}, {about['threads']} threads, torch {about['torch']}"
    pictures = {"steps": draw_steps, "first": draw_first, "scaling": draw_scaling}
    for name, picture in pictures.items():
        if found.get(name):
            figure = picture(found)
            figure.suptitle(f"{figure.get_suptitle()}\n{title}", fontsize=11)
            figure.savefig(folder / f"{name}.png", dpi=120)
            plt.close(figure)


def draw_steps(found: dict[str, Any]) -> Any:
    """Bars by set and way, a row of them for each dtype."""
    steps = found["steps"]
    figure, grid = plt.subplots(
        len(DTYPES), 1, figsize=(13, 11), sharex=True, sharey=True, layout="constrained"
    )
    figure.suptitle("AdamW step: time as a ratio to torch.optim.AdamW(fused=True)")
    for axes, dtype in zip(grid, DTYPES):
        cells = [by_dtype[dtype] for by_dtype in steps.values()]
        draw_bars(axes, cells)
        axes.set_title(dtype, loc="left", fontsize=11)
        axes.set_ylabel("ratio; less is faster")
    titles = [SETS[key].title.replace(", ", "\n") for key in steps]
    grid[-1].set_xticks(range(len(steps)), titles)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False)
    return figure


def draw_bars(axes: Axes, cells: list[dict[str, Any]]) -> None:
    """Each group only as wide as the ways it has."""
    width = 0.11
    used: set[str] = set()
    for i, cell in enumerate(cells):
        ways = [way for way in cell if way != REFERENCE]
        for j, way in enumerate(ways):
            ratio = cell[way]
            x = i + (j - (len(ways) - 1) / 2) * width
            errors = [[ratio["ratio"] - ratio["low"]], [ratio["high"] - ratio["ratio"]]]
            axes.bar(
                x,
                ratio["ratio"] - 1,
                0.9 * width,
                bottom=1,  # What is faster than torch's hangs down.
                color=COLORS[way],
                yerr=errors,
                error_kw={"elinewidth": 0.8},
                label=None if way in used else way,
            )
            axes.annotate(
                f"{ratio['ratio']:.2g}" if ratio["ratio"] < 10 else f"{ratio['ratio']:.0f}",
                (x, max(1.0, ratio["high"])),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                fontweight="bold" if way == OURS else None,
            )
            used.add(way)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def draw_first(found: dict[str, Any]) -> Any:
    """Seconds until the first step is done."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    figure.suptitle("First step in a new process, beyond torch's import")
    width = 0.38
    for i, (kind, color) in enumerate((("cold", "tab:blue"), ("warm", "tab:orange"))):
        seconds = [by_kind[kind] for by_kind in found["first"].values()]
        heights = [median(s) for s in seconds]
        xs = [x + (i - 0.5) * width for x in range(len(seconds))]
        below = [h - min(s) for h, s in zip(heights, seconds)]
        above = [max(s) - h for h, s in zip(heights, seconds)]
        bars = axes.bar(
            xs, heights, 0.95 * width, yerr=[below, above], color=color, capsize=4
        )
        bars.set_label({"cold": "empty caches", "warm": "warm caches"}[kind])
        axes.bar_label(bars, fmt="{:.2f} s", padding=3)
    axes.set_xticks(
        range(len(found["first"])), [f"{int(n):,} tensors of 16" for n in found["first"]]
    )
    axes.set_ylabel("seconds (median, min to max)")
    axes.margins(y=0.3)  # The legend's place.
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    return figure


def draw_scaling(found: dict[str, Any]) -> Any:
    """Time against the number of parameters."""
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    figure.suptitle("AdamW step, float32, ten equal tensors")
    scaling = found["scaling"]
    counts = [int(n) for n in scaling]
    for way, marker in ((REFERENCE, "o"), (OURS, "s")):
        times = [1e3 * cell[way]["seconds"] for cell in scaling.values()]
        axes.plot(counts, times, marker=marker, color=COLORS[way], label=way)
    if "bandwidth" in found:
        rate = found["bandwidth"]["bytes per second"]["plain kernel"]
        ideal = [1e3 * 28 * n / rate for n in counts]
        label = f"28 bytes a parameter at {rate / 1e9:.0f} GB/s (plain kernel)"
        axes.plot(counts, ideal, color="grey", linestyle="--", label=label)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="milliseconds a step")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(frameon=False)
    return figure


# The command line


def parse_arguments(arguments: Sequence[str] | None = None) -> Config | tuple[Path, Path]:
    """Read the configuration, or the two files to compare, from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Measure the optimizer's step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, choices, meaning in (
        ("sets", tuple(SETS), "of shapes"),
        ("ways", tuple(WAYS), "to step, beside torch's fused one; none means all"),
        ("parts", PARTS, "to measure"),
    ):
        value = getattr(default, name)
        parser.add_argument(
            f"--{name}", nargs="+", choices=choices, default=value, help=meaning
        )
    for name, meaning in {
        "seconds": "to measure each set and dtype for",
        "memory": "GB for the copies of a set; where it is short, ways go in turns",
        "compile-limit": "tensors up to which ways that compile for shapes are measured",
        "starts": "new processes of each kind, for the first step",
        "largest": "number of parameters of the scaling part",
        "threads": "of torch",
        "seed": "of parameters and gradients",
    }.items():
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=type(value), default=value, help=meaning)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=default.device, help="where to run"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="compile optimi_func's steps (default: if there is a compiler)",
    )
    parser.add_argument(
        "--out", type=Path, default=default.out, help="folder for all files"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="file for the numbers (default: numbers.json in the folder)",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sets, for a minute: does it work?"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("OLD", "NEW"),
        default=argparse.SUPPRESS,
        help="measure nothing: compare two files of numbers",
    )
    options = vars(parser.parse_args(arguments))
    if "compare" in options:
        old, new = options["compare"]
        return old, new
    quick = options.pop("quick")
    known = {f.name for f in fields(Config)}
    config = replace(default, **{k: v for k, v in options.items() if k in known})
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write and draw."""
    asked = parse_arguments(arguments)
    if not isinstance(asked, Config):
        old, new = (json.loads(path.read_text()) for path in asked)
        print(comparison(old, new))
        return
    torch.set_num_threads(asked.threads)
    found = measure(asked)
    print(report(found))
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.json or asked.out / "numbers.json"
    path.write_text(f"{json.dumps(found, indent=1)}\n")
    draw(found, asked.out)


if __name__ == "__main__":
    main()
