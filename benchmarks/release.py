"""Measure gradient release against a step after backward and against hooks of one's own.

Two questions, each about backward and the update together, on residual MLP blocks:

* memory: the most bytes allocated during it, less those allocated when it began
  (parameters, state and activations), as a share of the bytes of all gradients; a step
  after backward is a little below 1, as activations are freed while gradients come;
* time: the ratio to ``torch.optim.AdamW(fused=True)`` stepped after backward.

The ways that are compared:

* ``standard``: ``torch.optim.AdamW(fused=True)``, stepped after backward;
* ``recipe``: PyTorch's tutorial: a ``torch.optim.AdamW(foreach=False)`` for every
  parameter, stepped in a hook;
* ``recipe, fused``: the same with ``fused=True``, which the tutorial does not have;
* ``release``: ``optimi_func.AdamW`` with gradient release.

They take turns within each round, and the ratio is taken in each round: what slows the
machine down for a while slows all of them. The table has the medians over the rounds.
On a CPU run it more than once: whether a process gets its freed memory back from malloc
or page by page from the system moves all times, those of temporaries most.
"""

import argparse
import json
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

MEASURED = "backward and update"
NUMBERS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}


@dataclass(frozen=True)
class Config:
    """What to measure, and on what."""

    blocks: int = 8
    width: int = 512
    hidden: int = 2048
    memory_batch: int = 32
    batches: tuple[int, ...] = (32, 256)
    rounds: int = 60
    warmup: int = 5
    seed: int = 0
    threads: int = torch.get_num_threads()
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    compile: bool | None = None
    json: Path | None = None

    def quick(self) -> "Config":
        """Shrink to seconds: this shows that all works, and measures nothing."""
        return replace(
            self, blocks=2, width=64, hidden=128, batches=(4,), rounds=3, warmup=2
        )


class Block(nn.Module):
    """Residual MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(F.gelu(self.expand(x)))


Update = Callable[[], None]


def standard(model: nn.Module, config: Config) -> Update:
    """One optimizer for all, after backward."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **NUMBERS)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def hooked(model: nn.Module, **options: bool) -> Update:
    """An optimizer for each parameter, as soon as its gradient is complete."""
    optimizers = {
        p: torch.optim.AdamW([p], **options, **NUMBERS) for p in model.parameters()
    }

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return lambda: None


def recipe(model: nn.Module, config: Config) -> Update:
    """The tutorial's."""
    return hooked(model, foreach=False)


def recipe_fused(model: nn.Module, config: Config) -> Update:
    """The tutorial's with torch's fastest step."""
    return hooked(model, fused=True)


def release(model: nn.Module, config: Config) -> Update:
    """This library's."""
    optimizer = optimi_func.AdamW(
        model.parameters(), gradient_release=True, compile=config.compile, **NUMBERS
    )
    optimi_func.prepare_for_gradient_release(model, optimizer)
    return lambda: None


WAYS = {
    "standard": standard,
    "recipe": recipe,
    "recipe, fused": recipe_fused,
    "release": release,
}


class Training:
    """A model trained in one of the ways; all have the same weights and inputs."""

    def __init__(self, name: str, config: Config, batch: int) -> None:
        torch.manual_seed(config.seed)
        blocks = [Block(config.width, config.hidden) for _ in range(config.blocks)]
        self.device = config.device
        self.model = nn.Sequential(*blocks).to(self.device)
        self.x = torch.randn(batch, config.width).to(self.device)
        self.update = WAYS[name](self.model, config)

    def gradient_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(p.nbytes for p in self.model.parameters())

    def step(self) -> float:
        """Train one step and return the seconds of backward and update."""
        loss = self.model(self.x).square().mean()
        self.wait()
        start = time.perf_counter()
        with record_function(MEASURED):
            loss.backward()
            self.update()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until the device has done what it was asked to."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def peak_bytes(name: str, config: Config) -> tuple[int, int]:
    """Peak of backward and update above what was allocated before, and gradient bytes."""
    # Kernels are compiled before, on a model of their own.
    Training(name, config, config.memory_batch).step()
    # The model is made under the profiler: it reports no free of a CPU tensor whose
    # allocation it has not seen, and activations are freed in what is measured.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        training = Training(name, config, config.memory_batch)
        for _ in range(config.warmup + 1):
            training.step()
    return read_peak(recorded, config.device), training.gradient_bytes()


def read_peak(recorded: profile, device: str) -> int:
    """Peak of the last measured part of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    part = max((e for e in trace if e["name"] == MEASURED), key=lambda e: e["ts"])
    kind = {"cpu": 0, "cuda": 1}[device]
    allocated = sorted(
        (event["ts"], event["args"]["Total Allocated"])
        for event in trace
        if event["name"] == "[memory]" and event["args"]["Device Type"] == kind
    )
    end = part["ts"] + part["dur"]
    before = [total for when, total in allocated if when < part["ts"]][-1]
    return max(total for when, total in allocated if part["ts"] <= when <= end) - before


def seconds_by_way(config: Config, batch: int) -> dict[str, list[float]]:
    """Seconds of backward and update, a list per way with one value a round."""
    trainings = {name: Training(name, config, batch) for name in WAYS}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    names = list(WAYS)
    for i in tqdm(
        range(config.warmup + config.rounds),
        f"batch {batch}",
        unit="round",
        disable=None,  # Without a terminal there is no bar.
    ):
        # Nobody always comes after the same one, whose leavings are in the cache.
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            taken = trainings[name].step()
            if i >= config.warmup:
                seconds[name].append(taken)
    return seconds


@dataclass(frozen=True)
class Time:
    """The time of one way: its median, and quartiles of its ratio to the standard."""

    milliseconds: float
    ratio: float
    low: float
    high: float


def summary(seconds: dict[str, list[float]]) -> dict[str, Time]:
    """Medians over the rounds."""
    times: dict[str, Time] = {}
    for name, taken in seconds.items():
        ratios = [own / other for own, other in zip(taken, seconds["standard"])]
        low, ratio, high = quantiles(ratios, n=4)
        times[name] = Time(1e3 * median(taken), ratio, low, high)
    return times


def table(peaks: dict[str, tuple[int, int]], times: dict[int, dict[str, Time]]) -> str:
    """One line per way."""
    header = f"{'backward + update':<18} {'peak MB':>8} {'share':>6}"
    for batch in times:
        name = f"batch {batch}: ms"
        header += f"   {name:>14} {'ratio':>6} {'quartiles':>11}"
    lines = [header]
    for name, (peak, gradients) in peaks.items():
        line = f"{name:<18} {peak / 1e6:8.2f} {peak / gradients:6.3f}"
        for by_way in times.values():
            t = by_way[name]
            line += f"   {t.milliseconds:14.2f} {t.ratio:6.2f} {t.low:5.2f}-{t.high:.2f}"
        lines.append(line)
    return "\n".join(lines)


def results(
    peaks: dict[str, tuple[int, int]], times: dict[int, dict[str, Time]], config: Config
) -> dict[str, Any]:
    """The same for a machine to read."""
    return {
        "torch": torch.__version__,
        "device": config.device,
        "threads": config.threads,
        "peak": {
            name: {"bytes": peak, "gradient bytes": gradients, "share": peak / gradients}
            for name, (peak, gradients) in peaks.items()
        },
        "time": {
            f"batch {batch}": {name: asdict(t) for name, t in by_way.items()}
            for batch, by_way in times.items()
        },
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Measure the memory and time of gradient release.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "rounds": "measured steps of each way",
        "warmup": "steps of each way before those",
        "threads": "of torch",
        "seed": "of the weights and inputs",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=meaning)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=default.batches, help="sizes to time"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=default.device, help="where to run"
    )
    parser.add_argument(
        "--json", type=Path, help="file for the numbers", default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="compile optimi_func's AdamW (default: if there is a compiler)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, for seconds: does it work?"
    )
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    config = replace(default, **options)
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    config = parse_arguments(arguments)
    torch.set_num_threads(config.threads)
    peaks = {name: peak_bytes(name, config) for name in tqdm(WAYS, "peaks", disable=None)}
    times = {batch: summary(seconds_by_way(config, batch)) for batch in config.batches}
    _, gradients = peaks["standard"]
    print(
        f"{config.blocks} blocks of {config.width} x {config.hidden}, gradients of "
        f"{gradients / 1e6:.1f} MB, {config.device}, {config.threads} threads, torch "
        f"{torch.__version__}; peaks at batch {config.memory_batch}\n"
    )
    print(table(peaks, times))
    if config.json is not None:
        text = json.dumps(results(peaks, times, config), indent=2)
        config.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
