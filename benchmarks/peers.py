"""How long is a step of each rule beside another package's?

On the shapes of a ViT-tiny; those that map matrices on the matrices that are named. Both
have the same numbers, given to both, and float32 weights and states. torch's AdamW is the
fused one; others that know ``foreach`` step with it and without it, and the quicker of the
two counts. Muon iterates in float32: torch's casts to bfloat16 whatever it is given, which
is made a copy here, as CPUs without bfloat16 instructions are a hundred times slower in it.
A package that is not installed is left out, with a word.
"""

import inspect
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import harness
import torch
from harness import NUMBERS, OURS, Found, Step, option, parameters
from matplotlib.axes import Axes
from step_time import vit
from torch import Tensor

import optimi_func

Shapes = list[tuple[int, ...]]

VIT = "ViT-tiny"
MATRICES: Shapes = [(512, 512), (2048, 512), (512, 2048)] * 2
SETS: dict[str, Shapes] = {
    VIT: vit(192),
    "6 of 512 to 2048": MATRICES,
    "768 x 3072": [(768, 3072)],
    **{f"{n} x {n}": [(n, n)] for n in (256, 512, 1024)},
}


@dataclass(frozen=True)
class Config(harness.Timed):
    rules: tuple[str, ...] = option(("all",), "of the table")
    seconds: float = option(10.0, "to measure a row for; no fewer than 5 rounds")
    compile: bool | None = option(None, "ours; by default if possible")


QUICK: Found = {"rounds": 5, "seconds": 0.1, "warmup": 1, "rules": ("Lion", "RAdam")}


def adam(beta2: float, **options: Any) -> Found:
    """Return Adam's numbers, without decay."""
    same = {"lr": 1e-3, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.0}
    return same | options


LION: Found = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}
FACTORS: Found = {"lr": 1e-3, "weight_decay": 0.0}
MUON: Found = {"lr": 1e-3, "momentum": 0.95, "eps": 1e-7, "weight_decay": 0.1}
SOAP: Found = adam(0.95, betas=(0.95, 0.95), precondition_frequency=10)
PLAIN: Found = {"relative_step": False, "scale_parameter": False}
PO = "pytorch_optimizer"

# The rule, the numbers of both, the other package, its class and its options, the shapes.
ROWS: list[tuple[str, Found, str, str, Found, str]] = [
    ("AdamW", NUMBERS, "torch", "AdamW", {"fused": True}, VIT),
    ("Adafactor", FACTORS, "transformers", "Adafactor", PLAIN, VIT),
    ("Adafactor", FACTORS, "torch", "Adafactor", {}, VIT),
    ("ScheduleFreeAdamW", adam(0.999), "schedulefree", "AdamWScheduleFree", {}, VIT),
    ("Lion", LION, PO, "Lion", {}, VIT),
    ("Adan", adam(0.92, betas=(0.98, 0.92, 0.99)), PO, "Adan", {}, VIT),
    ("ADOPT", adam(0.9999), PO, "ADOPT", {}, VIT),
    ("AdEMAMix", adam(0, betas=(0.9, 0.999, 0.9999), alpha=5.0), PO, "AdEMAMix", {}, VIT),
    ("RAdam", adam(0.999), PO, "RAdam", {}, VIT),
    ("LAMB", adam(0.999), PO, "Lamb", {}, VIT),
    ("Prodigy", adam(0.999, lr=1.0), PO, "Prodigy", {}, VIT),
    ("Muon", MUON, "torch", "Muon", {}, "6 of 512 to 2048"),
    ("Muon", MUON, "torch", "Muon", {}, "768 x 3072"),
    *[("SOAP", SOAP, PO, "SOAP", {}, f"{n} x {n}") for n in (256, 512, 1024)],
]


def theirs(package: str, name: str) -> Any:
    """The class, or None if the package is not installed."""
    if harness.installed(package) is None:
        return None
    known = {"transformers": "transformers.optimization", "torch": "torch.optim"}
    return getattr(harness.load(known.get(package, package)), name)


def uncast(step: Step) -> Step:
    """Return a step in which nothing becomes bfloat16."""

    def run() -> None:
        with patch.object(Tensor, "bfloat16", Tensor.clone):
            step()

    return run


def measure_row(
    title: str, ours: Any, other: Any, numbers: Found, options: Found, config: Config
) -> Found:
    """Ours beside the quicker of theirs."""
    torch.manual_seed(config.seed)
    shapes = SETS[title.rpartition(", ")[2]]
    tensors = [0.02 * torch.randn(shape) for shape in shapes]
    grads = [torch.randn(shape) for shape in shapes]
    ways: dict[str, Any] = {OURS: partial(ours, compile=config.compile)}
    if "foreach" in inspect.signature(other).parameters and "fused" not in options:
        ways |= {
            f"foreach={x}": partial(other, foreach=x, **options) for x in (False, True)
        }
    else:
        ways["theirs"] = partial(other, **options)
    steps: dict[str, Step] = {}
    for way, make in ways.items():
        optimizer = make(parameters(tensors, grads), **numbers)
        if way != OURS and hasattr(optimizer, "train"):
            optimizer.train()
        steps[way] = uncast(optimizer.step) if "Muon" in title else optimizer.step
    seconds = harness.interleave(steps, config, title)
    # One step in ten is another one, which a median does not see.
    if "SOAP" in title:
        seconds = {way: means(taken) for way, taken in seconds.items()}
    _, *beside = ways
    least = min(beside, key=lambda way: harness.ratios(seconds, way)[way].seconds)
    return {OURS: asdict(harness.ratios(seconds, least)[OURS]), "beside": least}


def measure(config: Config) -> Found:
    """Times of ours and theirs, for each row."""
    cells: Found = {}
    skipped: Found = {}
    for rule, numbers, package, name, options, kind in ROWS:
        if not {rule, "all"} & {*config.rules}:
            continue
        title = f"{rule}, {package}, {kind}"
        other = theirs(package, name)
        if other is None:
            skipped[title] = f"{package} is not installed"
            continue
        ours = getattr(optimi_func, rule)
        cells[title] = measure_row(title, ours, other, numbers, options, config)
        cells[title]["version"] = harness.installed(package)
    return {"peers": cells, "skipped": skipped}


def means(taken: list[float]) -> list[float]:
    """The means of ten steps, or of all that there are."""
    full = len(taken) // 10
    size = 10 if full > 1 else max(1, len(taken) // 2)
    return [sum(taken[i : i + size]) / size for i in range(0, len(taken) - size + 1, size)]


def report(found: Found) -> str:
    """A row each."""
    rows = [["rule, package, shapes", "version", "way", "ms", "of theirs (quartiles)"]]
    for name, cell in found["peers"].items():
        own = cell[OURS]
        about = [cell["version"], cell["beside"], harness.milliseconds(own)]
        rows.append([name, *about, harness.text(own)])
    lines = [f"left out: {name}: {why}" for name, why in found["skipped"].items()]
    return "\n".join([harness.table(rows), *lines])


def draw(found: Found) -> Axes:
    """The ratios."""
    (axes,) = harness.axes_of("A step beside another package's", figsize=(12, 4))
    cells = {name: {OURS: cell[OURS]} for name, cell in found["peers"].items()}
    harness.bars(axes, cells, [OURS])
    axes.tick_params(axis="x", rotation=60)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
