"""What does a whole training step in one graph save, and what does it cost?

Three answers, beside compiled models and gradient release, for a small GPT and an MLP:

* memory: the most bytes allocated during a step, less those allocated when it began
  (parameters and the optimizer's state), as a share of the bytes of all gradients;
* time: the ratio to ``torch.compile(model)`` with ``torch.optim.AdamW(fused=True)``;
* compilation: seconds from the model to the end of its first step, in a process of its own
  whose caches are empty.

The ways that are compared, all AdamW:

* ``eager + fused``: the model as it is, ``torch.optim.AdamW(fused=True)``;
* ``compile(model) + fused``: the same with a compiled model;
* ``release by hooks``: the model as it is, ``optimi_func.AdamW`` with gradient release;
* ``one graph``: ``optimi_func.compiled.train_step`` with ``optimi_func.AdamW``;
* ``one graph, pure``: the same with ``optimi_func.adamw`` and its state.

The compilations take turns as well. On a shared machine times come out differently every
time: run it more than once.
"""

import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
import torch.nn.functional as F
from harness import NUMBERS, Found, Step, option
from matplotlib.axes import Axes
from torch import Tensor, nn
from tqdm import tqdm

import optimi_func
from optimi_func.compiled import train_step

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_gpt

STANDARD = "compile(model) + fused"


@dataclass(frozen=True)
class Config(harness.Timed):
    models: tuple[str, ...] = option(("GPT", "MLP"), "to measure", ("GPT", "MLP"))
    layers: int = option(12, "of the GPT")
    width: int = option(384, "of the GPT")
    batch: int = option(2, "sequences in a batch")
    context: int = option(64, "bytes in a sequence")
    mlp_layers: int = option(8, "of the MLP")
    mlp_width: int = option(512, "of the MLP")
    mlp_batch: int = option(32, "rows of its batch")
    compilations: int = option(3, "of each way, each in a process of its own")
    rounds: int = option(40, "measured rounds, at most")
    seconds: float = option(300.0, "to measure a model for; no fewer than 5 rounds")
    warmup: int = option(5, "rounds before those that are measured, at most")
    threads: int = option(2, "of torch")


QUICK: Found = {
    **{"layers": 1, "width": 32, "context": 8, "mlp_layers": 1, "mlp_width": 32},
    **{"rounds": 2, "warmup": 1, "compilations": 1},
}


LossFn = Callable[[Tensor, Any], Tensor]


def predicted(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the next bytes."""
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def squared(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(output, batch[1])


def gpt(config: Config) -> tuple[nn.Module, Any, LossFn]:
    """The example's GPT, on bytes without meaning."""
    shape = train_gpt.Config(
        layers=config.layers, heads=4, width=config.width, context=config.context
    )
    text = torch.randint(train_gpt.VOCABULARY, (config.batch, config.context + 1))
    return train_gpt.GPT(shape), (text[:, :-1], text[:, 1:]), predicted


def mlp(config: Config) -> tuple[nn.Module, Any, LossFn]:
    """Linear layers of one width."""
    width = config.mlp_width
    layers: list[nn.Module] = []
    for _ in range(config.mlp_layers):
        layers += [nn.Linear(width, width), nn.GELU()]
    batch = torch.randn(2, config.mlp_batch, width)
    return nn.Sequential(*layers), tuple(batch), squared


MODELS = {"GPT": gpt, "MLP": mlp}


def ordinary(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss_fn: LossFn
) -> Step:
    """The loop that everybody writes."""

    def step() -> None:
        loss_fn(model(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def eager(model: nn.Module, batch: Any, loss_fn: LossFn) -> Step:
    """Nothing compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **NUMBERS)
    return ordinary(model, optimizer, batch, loss_fn)


def compiled(model: nn.Module, batch: Any, loss_fn: LossFn) -> Step:
    """Forward and backward compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **NUMBERS)
    return ordinary(torch.compile(model), optimizer, batch, loss_fn)


def release(model: nn.Module, batch: Any, loss_fn: LossFn) -> Step:
    """Updated by hooks while an eager backward runs."""
    optimizer = optimi_func.AdamW(model.parameters(), gradient_release=True, **NUMBERS)
    optimi_func.prepare_for_gradient_release(model, optimizer)

    def step() -> None:
        loss_fn(model(batch[0]), batch).backward()

    return step


def one_graph(model: nn.Module, batch: Any, loss_fn: LossFn) -> Step:
    """Everything compiled together, for a class."""
    optimizer = optimi_func.AdamW(model.parameters(), **NUMBERS)
    run = train_step(model, loss_fn, optimizer)

    def step() -> None:
        run(batch)

    return step


def one_pure_graph(model: nn.Module, batch: Any, loss_fn: LossFn) -> Step:
    """Everything compiled together, for a pytree."""
    run = train_step(model, loss_fn, optimi_func.adamw(**NUMBERS))
    state = run.init()

    def step() -> None:
        run(state, batch)

    return step


WAYS = {
    "eager + fused": eager,
    STANDARD: compiled,
    "release by hooks": release,
    "one graph": one_graph,
    "one graph, pure": one_pure_graph,
}


def prepare(model: str, way: str, config: Config) -> tuple[Step, int]:
    """A step of one way, and the bytes of all gradients; all have the same weights."""
    torch.manual_seed(config.seed)
    made, batch, loss_fn = MODELS[model](config)
    gradients = sum(p.nbytes for p in made.parameters())
    return WAYS[way](copy.deepcopy(made), batch, loss_fn), gradients


def peak_share(model: str, way: str, config: Config) -> float:
    """Peak of a step above what was allocated before, as a share of the gradients."""
    gradients = [0]

    def make() -> tuple[Step, Step]:
        step, gradients[0] = prepare(model, way, config)
        return int, step  # Nothing comes before a step.

    return harness.peak_bytes(make, config.warmup + 1, "cpu") / gradients[0]


def first_step(model: str, way: str, config: Config) -> float:
    """Seconds from the model to the end of its first step, here and now."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    made, batch, loss_fn = MODELS[model](config)
    start = time.perf_counter()
    WAYS[way](made, batch, loss_fn)()
    return time.perf_counter() - start


FIRST = """
import json, sys, train_step
model, way, config = sys.argv[1:]
print(train_step.first_step(model, way, train_step.Config(**json.loads(config))))
"""


def seconds_to_compile(model: str, way: str, config: Config) -> float:
    """The same in a process of its own that finds nothing compiled."""
    with tempfile.TemporaryDirectory() as cache:
        arguments = [model, way, json.dumps(asdict(config))]
        return harness.in_new_process(FIRST, arguments, cache)


def measure_model(model: str, config: Config) -> Found:
    """By way."""
    peaks = {
        way: peak_share(model, way, config)
        for way in tqdm(WAYS, f"{model}: peaks", disable=None)
    }
    torch.compiler.reset()
    steps = {way: prepare(model, way, config)[0] for way in WAYS}
    seconds = harness.interleave(steps, config, f"{model}: steps")
    compilations: harness.Seconds = {way: [] for way in WAYS}
    for _ in tqdm(range(config.compilations), f"{model}: compilations", disable=None):
        for way, taken in compilations.items():
            taken.append(seconds_to_compile(model, way, config))
    return {
        way: {
            "peak": peaks[way],
            "milliseconds": 1e3 * ratio.seconds,
            "ratio": ratio.ratio,
            "low": ratio.low,
            "high": ratio.high,
            "compilations": compilations[way],
        }
        for way, ratio in harness.ratios(seconds, STANDARD).items()
    }


def measure(config: Config) -> Found:
    """By model."""
    return {"models": {model: measure_model(model, config) for model in config.models}}


def compilation(row: Found) -> float:
    """The median, nan of none."""
    return median(row["compilations"]) if row["compilations"] else math.nan


def report(found: Found) -> str:
    """A table per model, with one line per way."""
    config = found["config"]
    parts = [
        f"GPT of {config['layers']} layers of {config['width']}, batch {config['batch']} x "
        f"{config['context']}; MLP of {config['mlp_layers']} layers of "
        f"{config['mlp_width']}, batch {config['mlp_batch']}; AdamW, float32. Peak above "
        "parameters and state, in bytes of all gradients"
    ]
    for model, by_way in found["models"].items():
        rows = [[model, "peak", "ms a step", "ratio (quartiles)", "compile, s", "ratio"]]
        standard = compilation(by_way[STANDARD])
        for way, row in by_way.items():
            taken = compilation(row)
            times = [f"{row['milliseconds']:.1f}", harness.text(row)]
            compiled = [f"{taken:.1f}", f"{taken / standard:.2f}"]
            rows.append([way, f"{row['peak']:.2f}", *times, *compiled])
        parts.append(harness.table(rows))
    return "\n\n".join(parts)


def draw(found: Found) -> Axes:
    """Time, memory and compilation, a group of bars per model."""
    title = f"A whole training step, beside {STANDARD}"
    grid = harness.axes_of(title, 1, 3, figsize=(14, 5))
    models = found["models"]
    harness.bars(grid[0], models, list(WAYS), base=1)
    peaks = {m: {way: r["peak"] for way, r in rows.items()} for m, rows in models.items()}
    harness.bars(grid[1], peaks, list(WAYS))
    seconds = {
        model: {way: row["compilations"] or 0 for way, row in rows.items()}
        for model, rows in models.items()
    }
    harness.bars(grid[2], seconds, list(WAYS))
    names = ("ratio of times; less is faster", "peak, share of the gradients' bytes")
    for axes, name in zip(grid, (*names, "first step, seconds")):
        axes.set_ylabel(name)
    harness.legend(grid[0])
    return grid[0]


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
