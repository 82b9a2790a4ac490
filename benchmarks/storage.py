"""What do stored codes cost: in error, in time, in bytes?

* error: AdamW's update, as a distance from float32's (rms of the difference over rms, of
  all steps) and the largest element, on gradients g = exp(sigma * z) * N(0, 1) where z is
  normal and fixed for each element: 512 x 64 of them, 400 steps, beta2 0.999. Four kinds:
  ``stationary``; ``spikes``, where each element of each step is with probability 1e-4 ten
  thousand times as large; ``1e-8``, all of them so much smaller (eps 1e-12); ``falls``,
  where half of each 64 is tenfold smaller after a quarter of the steps. In more steps the
  moments forget: ``--long-steps`` of the last kind too. The parameters stay zeros and lr
  is 1, so that what a step writes is the update itself, to the last bit.
* time: a step on the shapes of ViT-B/16 beside our own in float32, interleaved.
* bytes: of the tensors that are alive after a step, parameters and state, on the shapes of
  a 12-layer GPT-2.

torchao's and bitsandbytes' AdamW8bit are beside ours where they are installed. FlashOptim's
moments in 8 bits need a GPU.
"""

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import harness
import torch
from harness import NUMBERS, Found, Step, load, option, parameters
from matplotlib.axes import Axes
from step_time import SETS
from torch import Tensor
from tqdm import tqdm

import optimi_func
from optimi_func import Storage

# Error

SHAPE = (512, 64)
BETAS = (0.9, 0.999)
Update = Callable[[Tensor], Tensor]


def gradients(kind: str, sigma: float, steps: int, seed: int) -> Iterator[Tensor]:
    """One for each step."""
    own = torch.Generator().manual_seed(seed)
    size = torch.randn(SHAPE, generator=own).mul(sigma).exp()
    half = torch.rand(SHAPE, generator=own).argsort(1) < SHAPE[1] // 2
    for t in range(steps):
        g = size * torch.randn(SHAPE, generator=own)
        if kind == "spikes":
            g = torch.where(torch.rand(SHAPE, generator=own) < 1e-4, 1e4 * g, g)
        elif kind == "1e-8":
            g = 1e-8 * g
        elif kind == "falls" and t >= steps // 4:
            g = torch.where(half, 0.1 * g, g)
        yield g


KINDS = ("stationary", "spikes", "1e-8", "falls")


def eps_of(kind: str) -> float:
    """Small beside the gradients."""
    return 1e-12 if kind == "1e-8" else 1e-8


def stored(storage: Storage, eps: float) -> Update:
    """This library's updates."""
    optimizer = optimi_func.adamw(lr=1.0, betas=BETAS, eps=eps, weight_decay=0.0)
    zeros = torch.zeros(SHAPE)
    state = optimizer.init(zeros, storage=storage)

    def update(g: Tensor) -> Tensor:
        nonlocal state
        with warnings.catch_warnings():
            # That bfloat16 moments hardly move with such a beta2 is what this shows.
            warnings.simplefilter("ignore")
            moved, state = optimizer.step(zeros, g, state)
        return -moved

    return update


def others(module: str, eps: float, **options: Any) -> Update:
    """Updates of another library's AdamW8bit, as it leaves them in a parameter of zeros."""
    p = torch.zeros(SHAPE, requires_grad=True)
    numbers = {"lr": 1.0, "betas": BETAS, "eps": eps, "weight_decay": 0.0}
    optimizer = load(module).AdamW8bit([p], **numbers, **options)

    def update(g: Tensor) -> Tensor:
        p.data.zero_()
        p.grad = g
        optimizer.step()
        return -p.detach()

    return update


EXACT = "float32"
OWN_8BIT = "8bit"
ROWS: dict[str, Callable[[float], Update]] = {
    EXACT: partial(stored, Storage()),
    OWN_8BIT: partial(stored, Storage(moments="8bit")),
    "bfloat16 moments": partial(stored, Storage(moments=torch.bfloat16)),
    "torchao": partial(others, "torchao.optim"),
    "bitsandbytes": partial(others, "bitsandbytes.optim", min_8bit_size=1),
}
PACKAGES = ("torchao", "bitsandbytes")


def errors(
    names: list[str], kind: str, sigma: float = 1.0, steps: int = 400, seed: int = 0
) -> Found:
    """Return each way's error of updates, and the largest update."""
    ways = {name: ROWS[name](eps_of(kind)) for name in [EXACT, *names]}
    apart, largest, size = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0), 0.0
    for g in gradients(kind, sigma, steps, seed):
        updates = {name: update(g).double() for name, update in ways.items()}
        exact = updates[EXACT]
        size += exact.square().sum().item()
        for name, u in updates.items():
            apart[name] += (u - exact).square().sum().item()
            # One NaN, and it stays.
            largest[name] = torch.tensor([largest[name], u.abs().max()]).max().item()
    return {
        name: {"error": math.sqrt(apart[name] / size), "largest": largest[name]}
        for name in ways
    }


# Time and bytes

FLOAT32 = torch.float32
# The parameters' dtype, and how they and their moments are kept.
RECIPES: dict[str, tuple[torch.dtype, Storage | str]] = {
    "float32": (FLOAT32, Storage()),
    "float32 + 8bit": (FLOAT32, Storage(moments="8bit")),
    "kahan + bfloat16 moments": (torch.bfloat16, Storage("kahan")),
    "kahan + 8bit": (torch.bfloat16, Storage("kahan", "8bit")),
    "exact + 8bit": (torch.bfloat16, Storage("exact", "8bit")),
    "exact + float32 moments": (torch.bfloat16, "exact"),
    "compact": (torch.bfloat16, "compact"),
}


@dataclass(frozen=True)
class Config(harness.OnDevice):
    seconds: float = option(60.0, "to measure the times for; no fewer than 5 rounds")
    steps: int = option(400, "of the errors")
    long_steps: int = option(4000, "of the error where gradients fall, once more")
    sigmas: tuple[float, ...] = option((1.0, 2.0), "how unequal gradients are")
    timed: str = option("vit-b", "shapes of a step", tuple(SETS))
    counted: str = option("gpt2", "shapes whose bytes are counted", tuple(SETS))


QUICK: Found = {
    **{"seconds": 0.5, "rounds": 5, "steps": 20, "long_steps": 0, "sigmas": (1.0,)},
    **{"timed": "odd", "counted": "vit-tiny"},
}


def optimizer_of(name: str, tensors: list[Tensor], grads: list[Tensor], config: Config):
    """This library's AdamW on copies of tensors in a recipe's dtype."""
    dtype, storage = RECIPES[name]
    cast = [[x.to(dtype) for x in xs] for xs in (tensors, grads)]
    return optimi_func.AdamW(
        parameters(*cast), storage=storage, compile=config.compile, **NUMBERS
    )


def times(config: Config) -> Found:
    """Ratios to the step in float32."""
    torch.manual_seed(config.seed)
    shapes = SETS[config.timed]
    tensors, grads = (shapes.tensors(FLOAT32, config.device) for _ in range(2))
    steps: dict[str, Step] = {
        name: optimizer_of(name, tensors, grads, config).step for name in RECIPES
    }
    seconds = harness.interleave(steps, config, shapes.title)
    return {name: asdict(r) for name, r in harness.ratios(seconds, EXACT).items()}


def bytes_of(name: str, config: Config) -> Found:
    """Bytes a parameter of all that lives after a step, and how much of it is coded."""
    torch.manual_seed(config.seed)
    shapes = SETS[config.counted]
    optimizer = optimizer_of(name, *([shapes.tensors(FLOAT32, config.device)] * 2), config)
    optimizer.step()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for state in optimizer.state.values() for x in state.values()]
    kept = [x for x in chain(params, states) if isinstance(x, Tensor)]
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    coded = sum(x.numel() for x in states if x.dtype == torch.uint8)
    count = shapes.count()
    # A gradient has the dtype of its parameter.
    total = sum(memory.values()) / count
    gradient = RECIPES[name][0].itemsize
    return {"kept": total, "with gradients": total + gradient, "coded": coded / count}


def measure(config: Config) -> Found:
    """All three."""
    missing = [name for name in PACKAGES if harness.installed(name) is None]
    ways = [name for name in ROWS if name not in (EXACT, *missing)]
    asked = [
        (f"sigma {sigma:g}, {kind}", kind, sigma, config.steps)
        for sigma in config.sigmas
        for kind in KINDS
    ]
    if config.long_steps:
        title = f"sigma 1, falls, {config.long_steps} steps"
        asked.append((title, "falls", 1.0, config.long_steps))
    found: Found = {"errors": {}, "bytes": {}}
    for title, *how in tqdm(asked, "errors", disable=None):
        found["errors"][title] = errors(ways, *how, config.seed)
    for name in tqdm(RECIPES, "bytes", disable=None):
        found["bytes"][name] = bytes_of(name, config)
        gc.collect()
    found["time"] = times(config)
    found["versions"] = {x: harness.installed(x) for x in PACKAGES if x not in missing}
    return found | {"skipped": dict.fromkeys(missing, "not installed")}


def number(x: float) -> str:
    """Short."""
    return f"{x:.3f}" if x < 10 else f"{x:.3g}"


def report(found: Found) -> str:
    """A table each."""
    titles = list(found["errors"])
    rows = [["update error / largest update", *titles]]
    for name in next(iter(found["errors"].values())):
        cells = [found["errors"][title][name] for title in titles]
        rows.append([name, *(f"{number(c['error'])} / {c['largest']:.3g}" for c in cells)])
    config = found["config"]
    times = [[f"AdamW step, {SETS[config['timed']].title}", "ms", "to float32"]]
    for name, cell in found["time"].items():
        times.append([name, harness.milliseconds(cell), harness.text(cell)])
    title = f"bytes a parameter, {SETS[config['counted']].title}"
    sizes = [[title, "parameters + state", "with gradients", "moments in codes"]]
    for name, cell in found["bytes"].items():
        share = f"{100 * cell['coded']:.2f} %"
        row = [name, f"{cell['kept']:.3f}", f"{cell['with gradients']:.3f}", share]
        sizes.append(row)
    left = [f"left out: {name}: {why}" for name, why in found["skipped"].items()]
    return "\n\n".join([*map(harness.table, (rows, times, sizes)), *left])


def draw(found: Found) -> Axes:
    """Bars of each."""
    title = "Stored codes: error of AdamW's update, time of a step, bytes a parameter"
    above, speed, size = panels = harness.axes_of(title, 3, figsize=(13, 13))
    ways = [n for n in next(iter(found["errors"].values())) if n != EXACT]
    groups: dict[str, dict[str, Any]] = {
        title: {n: cell[n]["error"] for n in ways}
        for title, cell in found["errors"].items()
    }
    harness.bars(above, groups, ways)
    above.set_yscale("log")
    above.set_ylabel("error, rms / rms of float32's update")
    above.legend(ncols=3, frameon=False)
    harness.bars(speed, {name: {"": cell} for name, cell in found["time"].items()})
    speed.set_ylabel("ratio of times; less is faster")
    kept = {name: {"": cell["kept"]} for name, cell in found["bytes"].items()}
    harness.bars(size, kept)
    size.set_ylabel("bytes a parameter, with its state")
    for axes in panels:
        axes.tick_params(axis="x", labelsize=8)
    return above


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
