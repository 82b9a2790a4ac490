"""How long is an AdamW step on the shapes of a model?

As a ratio to ``torch.optim.AdamW(fused=True)`` in the same dtype, on seven sets of shapes,
in float32, in bfloat16 and in bfloat16 with Kahan summation. The ways to step have
parameters and states of their own and the same gradients. One round is one step: each finds
the caches as the others left them, as it would after a backward. torch's default on a CPU
is the for-loop. Slow ways take turns among themselves and with torch's fused step, so that
the quick ones get more rounds.

Ways that compile for the shapes they meet (torch.compile, heavyball, torchao) take up to a
minute a set before the first step; sets with more tensors than ``--compile-limit`` are left
out for them. Other libraries are left out, by name, where they are not installed: ``pip
install '.[bench]'``. torchao's keeps its moments in 8 bits; heavyball's rounds bfloat16
stochastically; optimi's has Kahan summation too. On CUDA the kernels that a step launches
are counted.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import harness
import torch
from harness import NUMBERS, OURS, Found, Step, load, option, parameters
from matplotlib.axes import Axes
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import optimi_func

REFERENCE = "torch fused"
Shape = tuple[int, ...]


# Shapes


def linear(out: int, width: int) -> list[Shape]:
    """A weight and a bias."""
    return [(out, width), (out,)]


def block(w: int) -> list[Shape]:
    """Return the shapes of a transformer block: two norms, attention, MLP."""
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

# The dtype, and whether sums are compensated.
DTYPES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "bfloat16 + Kahan": (torch.bfloat16, True),
}


# Ways to step


@dataclass(frozen=True)
class Way:
    """A way to make an AdamW, with what it supports and needs."""

    make: Callable[..., Step]  # of the parameters, kahan, compiled
    needs: str | None = None  # a package, beside torch
    kahan: bool = False  # Can it sum with compensation?
    compiles: bool = False  # for the shapes it meets
    slow: bool = False  # Would it take the rounds' time from the quick ones?


def torch_way(
    params: list[Tensor], kahan: bool, compiled: bool | None, **how: bool
) -> Step:
    """torch's own."""
    return torch.optim.AdamW(params, **NUMBERS, **how).step


def ours(params: list[Tensor], kahan: bool, compiled: bool | None, **how: bool) -> Step:
    """This library's."""
    return optimi_func.AdamW(
        params, kahan_sum=kahan, **NUMBERS, **({"compile": compiled} | how)
    ).step


def other(package: str, name: str = "AdamW", **options: Any) -> Callable[..., Step]:
    """Another library's."""

    def make(params: list[Tensor], kahan: bool, compiled: bool | None) -> Step:
        more = {"kahan_sum": kahan} if package == "optimi" else options
        return getattr(load(package), name)(params, **more, **NUMBERS).step

    return make


WAYS = {
    REFERENCE: Way(partial(torch_way, fused=True), kahan=True),
    "torch.compile": Way(lambda *a: torch.compile(torch_way(*a)), compiles=True),
    OURS: Way(ours, kahan=True),
    "torch foreach": Way(partial(torch_way, foreach=True), slow=True),
    "torch for-loop": Way(partial(torch_way, foreach=False), slow=True),
    "compile=False": Way(partial(ours, compile=False), kahan=True, slow=True),
    "compile=False, foreach": Way(partial(ours, foreach=True), kahan=True, slow=True),
    "optimi": Way(other("optimi"), "torch-optimi", kahan=True, slow=True),
    "heavyball": Way(
        other("heavyball", consume_grad=False), "heavyball", compiles=True, slow=True
    ),
    "torchao 8-bit": Way(
        other("torchao.optim", "AdamW8bit"), "torchao", compiles=True, slow=True
    ),
}


@dataclass(frozen=True)
class Config(harness.OnDevice):
    sets: tuple[str, ...] = option(
        tuple(name for name in SETS if name != "tiny"), "of shapes", tuple(SETS)
    )
    ways: tuple[str, ...] = option(
        tuple(WAYS)[1:], "to step, beside torch fused", tuple(WAYS)
    )
    memory: float = option(10.0, "GB for copies of a set; where short, ways go in turns")
    compile_limit: int = option(8, "tensors that ways which compile for shapes may have")


QUICK: Found = {"sets": ("tiny", "small"), "seconds": 0.5, "rounds": 20, "compile_limit": 0}


def why_not(name: str, shapes: Shapes, kahan: bool, config: Config) -> str | None:
    """Why a way is left out; None if it is not."""
    way = WAYS[name]
    if way.needs is not None and harness.installed(way.needs) is None:
        return f"{way.needs} is not installed"
    if kahan and not way.kahan:
        return "no Kahan summation"
    if way.compiles and config.compile is False:
        return "--no-compile"
    if way.compiles and len(shapes.shapes) > config.compile_limit:
        return f"compiles more than {config.compile_limit} tensors"
    return None


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


def batches(names: list[str], each: float, limit: float) -> list[list[str]]:
    """Split the ways into batches that fit into memory, the reference in each.

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


def measure_set(shapes: Shapes, dtype_name: str, config: Config) -> Found:
    """All ways on one set, in one dtype."""
    dtype, kahan = DTYPES[dtype_name]
    asked = [name for name in WAYS if name in (REFERENCE, *config.ways)]
    names = [n for n in asked if why_not(n, shapes, kahan, config) is None]
    # Parameters, two moments and Kahan's compensation or temporaries.
    each = 4 * shapes.count() * dtype.itemsize / 1e9
    summary: Found = {}
    groups = batches(names, each, config.memory)
    share = replace(config, seconds=config.seconds / len(groups))
    for batch in groups:
        torch.manual_seed(config.seed)
        tensors = shapes.tensors(dtype, config.device)
        grads = shapes.tensors(dtype, config.device)
        steps = {
            n: WAYS[n].make(parameters(tensors, grads), kahan, config.compile)
            for n in batch
        }
        seconds = harness.interleave(steps, share, f"{shapes.title}, {dtype_name}")
        counts = {name: launches(step, config.device) for name, step in steps.items()}
        for name, ratio in harness.ratios(seconds, REFERENCE).items():
            summary.setdefault(name, asdict(ratio) | {"launches": counts[name]})
        del tensors, grads, steps
        torch.compiler.reset()
        harness.free(config.device)
    return {name: summary[name] for name in names}


def measure(config: Config) -> Found:
    """All sets in all dtypes, and what is left out."""
    reasons = {
        f"{way}: {SETS[key].title}": why_not(way, SETS[key], False, config)
        for way in config.ways
        for key in config.sets
    }
    steps: dict[str, Found] = {key: {} for key in config.sets}
    cells = [(key, dtype) for key in config.sets for dtype in DTYPES]
    for key, dtype in tqdm(cells, "sets and dtypes", disable=None):
        steps[key][dtype] = measure_set(SETS[key], dtype, config)
    return {"skipped": {n: why for n, why in reasons.items() if why}, "steps": steps}


def ways(found: Found) -> list[str]:
    """All beside the reference that were measured."""
    cells = [cell for by_dtype in found["steps"].values() for cell in by_dtype.values()]
    return [way for way in WAYS if way != REFERENCE and any(way in cell for cell in cells)]


def report(found: Found) -> str:
    """A line per set and dtype, a column per way."""
    rows = [["AdamW, ratio to torch fused", "fused, ms", *ways(found)]]
    for key, by_dtype in found["steps"].items():
        for dtype, cell in by_dtype.items():
            texts = [ratio_text(cell.get(way)) for way in ways(found)]
            fused = harness.milliseconds(cell[REFERENCE])
            rows.append([f"{SETS[key].title}, {dtype}", fused, *texts])
    left = sorted({f"{n.split(':')[0]}: {why}" for n, why in found["skipped"].items()})
    return "\n".join([harness.table(rows), "", *(f"left out: {reason}" for reason in left)])


def ratio_text(cell: dict[str, Any] | None) -> str:
    """The median, the quartiles, and on CUDA the launches."""
    known = cell and cell["launches"] is not None
    return (
        f"{harness.text(cell)}, {cell['launches']} kernels" if known else harness.text(cell)
    )


def draw(found: Found) -> Axes:
    """Bars by set and way, a row of them for each dtype."""
    title = "AdamW step: time as a ratio to torch.optim.AdamW(fused=True)"
    grid = harness.axes_of(title, len(DTYPES), figsize=(13, 11), sharex=True, sharey=True)
    for axes, dtype in zip(grid, DTYPES):
        groups = {SETS[key].title: cells[dtype] for key, cells in found["steps"].items()}
        harness.bars(axes, groups, ways(found), base=1)
        axes.set_title(dtype, loc="left", fontsize=11)
        axes.set_ylabel("ratio; less is faster")
    harness.legend(grid[0])
    return grid[0]


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
