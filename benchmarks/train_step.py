"""Measure a whole training step in one graph against compiled models and gradient release.

Three questions about steps of a small GPT and of an MLP:

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

In the times they take turns within each round, and the ratio is taken in each round. The
compilations take turns as well. On a shared machine times come out differently every time:
run it more than once.
"""

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

import optimi_func
from optimi_func.compiled import train_step

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_gpt

MEASURED = "whole step"
NUMBERS = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
STANDARD = "compile(model) + fused"


@dataclass(frozen=True)
class Config:
    """What to measure, and on what."""

    layers: int = 12
    width: int = 384
    batch: int = 2
    context: int = 64
    mlp_layers: int = 8
    mlp_width: int = 512
    mlp_batch: int = 32
    rounds: int = 40
    warmup: int = 5
    compilations: int = 3
    seed: int = 0
    threads: int = 2
    models: tuple[str, ...] = ("GPT", "MLP")
    json: Path | None = None

    def quick(self) -> "Config":
        """Shrink to seconds: this shows that all works, and measures nothing."""
        return replace(
            self,
            layers=1,
            width=32,
            context=8,
            mlp_layers=1,
            mlp_width=32,
            rounds=2,
            warmup=1,
            compilations=min(self.compilations, 1),
        )


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
Step = Callable[[], None]


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
    # The profiler reports no free of what it has not seen allocated: all is made under it.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step, gradients = prepare(model, way, config)
        for _ in range(config.warmup + 1):
            with record_function(MEASURED):
                step()
    return read_peak(recorded) / gradients


def read_peak(recorded: profile) -> int:
    """Peak of the last measured part of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    part = max((e for e in trace if e["name"] == MEASURED), key=lambda e: e["ts"])
    allocated = sorted(
        (event["ts"], event["args"]["Total Allocated"])
        for event in trace
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
    )
    end = part["ts"] + part["dur"]
    before = [total for when, total in allocated if when < part["ts"]][-1]
    return max(total for when, total in allocated if part["ts"] <= when <= end) - before


def seconds_by_way(model: str, config: Config) -> dict[str, list[float]]:
    """Seconds of a step, a list per way with one value a round."""
    steps = {way: prepare(model, way, config)[0] for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for i in tqdm(
        range(config.warmup + config.rounds),
        f"{model}: steps",
        unit="round",
        disable=None,  # Without a terminal there is no bar.
    ):
        # Nobody always comes after the same one, whose leavings are in the cache.
        turn = i % len(ways)
        for way in ways[turn:] + ways[:turn]:
            start = time.perf_counter()
            steps[way]()
            if i >= config.warmup:
                seconds[way].append(time.perf_counter() - start)
    return seconds


def first_step(model: str, way: str, config: Config) -> float:
    """Seconds from the model to the end of its first step, here and now."""
    torch.manual_seed(config.seed)
    made, batch, loss_fn = MODELS[model](config)
    start = time.perf_counter()
    WAYS[way](made, batch, loss_fn)()
    return time.perf_counter() - start


def seconds_to_compile(model: str, way: str, options: Sequence[str]) -> float:
    """The same in a process of its own that finds nothing compiled."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TMPDIR": folder,
        }
        command = [sys.executable, __file__, *options, "--first-step", model, way]
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        )
    return float(done.stdout.split()[-1])


@dataclass(frozen=True)
class Row:
    """What one way comes to on one model."""

    peak: float  # share of the gradients' bytes
    milliseconds: float
    ratio: float  # to the standard, with its quartiles
    low: float
    high: float
    compilations: list[float]  # seconds

    def compilation(self) -> float:
        """The median, nan of none."""
        return median(self.compilations) if self.compilations else math.nan


def measure(model: str, config: Config, options: Sequence[str]) -> dict[str, Row]:
    """By way."""
    peaks = {
        way: peak_share(model, way, config)
        for way in tqdm(WAYS, f"{model}: peaks", disable=None)
    }
    torch.compiler.reset()
    seconds = seconds_by_way(model, config)
    compilations: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in tqdm(range(config.compilations), f"{model}: compilations", disable=None):
        for way, taken in compilations.items():
            taken.append(seconds_to_compile(model, way, options))
    rows: dict[str, Row] = {}
    for way, taken in seconds.items():
        ratios = [own / other for own, other in zip(taken, seconds[STANDARD])]
        low, ratio, high = quantiles(ratios, n=4)
        ms = 1e3 * median(taken)
        rows[way] = Row(peaks[way], ms, ratio, low, high, compilations[way])
    return rows


def table(model: str, rows: dict[str, Row]) -> str:
    """One line per way."""
    standard = rows[STANDARD].compilation()
    lines = [
        f"| {model:<22} | peak | ms a step | ratio (quartiles) | compile, s | ratio |",
        f"|{'-' * 24}|-----:|----------:|------------------:|-----------:|------:|",
    ]
    for way, row in rows.items():
        ratio = f"{row.ratio:.2f} ({row.low:.2f}-{row.high:.2f})"
        lines.append(
            f"| {way:<22} | {row.peak:.2f} | {row.milliseconds:9.1f} | {ratio:>17} "
            f"| {row.compilation():10.1f} | {row.compilation() / standard:5.2f} |"
        )
    return "\n".join(lines)


def results(rows: dict[str, dict[str, Row]], config: Config) -> dict[str, Any]:
    """The same for a machine to read."""
    return {
        "torch": torch.__version__,
        "config": {k: v for k, v in asdict(config).items() if k != "json"},
        "models": {
            model: {way: asdict(row) for way, row in by_way.items()}
            for model, by_way in rows.items()
        },
    }


def parse_arguments(
    arguments: Sequence[str] | None = None,
) -> tuple[Config, list[str], tuple[str, str] | None]:
    """Read the configuration, the options that give it again, and what to do first."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Measure whole training steps in one graph.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    meanings = {
        "layers": "of the GPT",
        "width": "of the GPT",
        "batch": "sequences in a batch",
        "context": "bytes in a sequence",
        "mlp_layers": "of the MLP",
        "mlp_width": "of the MLP",
        "mlp_batch": "rows of its batch",
        "rounds": "measured steps of each way",
        "warmup": "steps of each way before those",
        "compilations": "of each way, each in a process of its own",
        "seed": "of the weights and batches",
        "threads": "of torch",
    }
    for name, meaning in meanings.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(default, name),
            help=meaning,
        )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=default.models,
        help="to measure",
    )
    parser.add_argument(
        "--json", type=Path, help="file for the numbers", default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, for seconds: does it work?"
    )
    parser.add_argument(
        "--first-step",
        nargs=2,
        metavar=("MODEL", "WAY"),
        help="print the seconds of one first step, and do no more",
        default=argparse.SUPPRESS,
    )
    options = vars(parser.parse_args(arguments))
    first = options.pop("first_step", None)
    quick = options.pop("quick")
    config = replace(default, **options)
    config = config.quick() if quick else config
    again = [f"--{n.replace('_', '-')}={getattr(config, n)}" for n in meanings]
    return config, again, tuple(first) if first else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    config, options, first = parse_arguments(arguments)
    torch.set_num_threads(config.threads)
    if first is not None:
        print(first_step(*first, config))
        return
    rows = {model: measure(model, config, options) for model in config.models}
    print(
        f"GPT of {config.layers} layers of {config.width}, batch {config.batch} x "
        f"{config.context}; MLP of {config.mlp_layers} layers of {config.mlp_width}, batch "
        f"{config.mlp_batch}; AdamW, float32, {config.threads} threads, torch "
        f"{torch.__version__}. Peak above parameters and state, in bytes of all gradients\n"
    )
    for model, by_way in rows.items():
        print(table(model, by_way) + "\n")
    if config.json is not None:
        text = json.dumps(results(rows, config), indent=2)
        config.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
