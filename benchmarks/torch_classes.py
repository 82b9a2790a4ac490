"""How long is a step of each class of torch.optim, and of the same class here?

`optimi_func.optim`, compiled and with ``compile=False``, beside torch.optim on the shapes
of ViT-tiny in float32: the for-loop, which is torch's default on a CPU, foreach and, where
there is one, fused. The ways take turns and have parameters of their own, so that each
finds the caches as the others left them. The bytes are those that a step has to move at
least: the gradient is read, the parameter and the state are read and written.
"""

from dataclasses import asdict, dataclass
from typing import Any

import harness
import step_time
import torch
from harness import OURS, Found, Step, option, parameters
from matplotlib.axes import Axes

from optimi_func import optim

LOOP, FOREACH, FUSED = "torch for-loop", "torch foreach", "torch fused"
EAGER = "compile=False"
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
# The class and its options, and the tensors of the state that each step moves.
CLASSES: dict[str, tuple[str, dict[str, Any], int]] = {
    "SGD": ("SGD", {}, 0),
    "SGD, momentum": ("SGD", MOMENTUM, 1),
    "SGD, Nesterov": ("SGD", MOMENTUM | {"nesterov": True}, 1),
    "Adam": ("Adam", {}, 2),
    "AdamW": ("AdamW", {}, 2),
    "RAdam": ("RAdam", {}, 2),
    "NAdam": ("NAdam", {}, 2),
    "Adamax": ("Adamax", {}, 2),
    "Adadelta": ("Adadelta", {}, 2),
    "Adagrad": ("Adagrad", {}, 1),
    "RMSprop": ("RMSprop", {}, 1),
    "RMSprop, centered, momentum": ("RMSprop", MOMENTUM | {"centered": True}, 3),
    "ASGD": ("ASGD", {}, 1),
    "Rprop": ("Rprop", {}, 2),
}


@dataclass(frozen=True)
class Config(harness.OnDevice):
    width: int = option(192, "of the vision transformer")


QUICK: Found = {"width": 8, "rounds": 5, "seconds": 1.0, "warmup": 1}


def measure_class(name: str, config: Config) -> Found:
    """Times of one class."""
    cls, options, state = CLASSES[name]
    torch.manual_seed(config.seed)
    shapes = step_time.vit(config.width)
    tensors = [torch.randn(shape, device=config.device) for shape in shapes]
    grads = [torch.randn_like(x) for x in tensors]
    kinds: dict[str, dict[str, Any]] = {
        LOOP: {"foreach": False},
        FOREACH: {"foreach": True},
    }
    if cls in ("SGD", "Adam", "AdamW", "Adagrad"):
        kinds[FUSED] = {"fused": True}
    own = {OURS: {"compile": config.compile}, EAGER: {"compile": False}}
    steps: dict[str, Step] = {}
    for kind, how in (own | kinds).items():
        made: Any = getattr(optim if kind in own else torch.optim, cls)
        steps[kind] = made(parameters(tensors, grads), lr=1e-4, **options, **how).step
    seconds = harness.interleave(steps, config, name)
    found: Found = {"bytes per parameter": 4 * (3 + 2 * state)}
    for kind in kinds:
        beside = harness.ratios(seconds, kind)
        found[kind] = {way: asdict(beside[way]) for way in own}
    return found


def measure(config: Config) -> Found:
    """Times of all classes."""
    return {"torch classes": {name: measure_class(name, config) for name in CLASSES}}


def report(found: Found) -> str:
    """A line per class."""
    kinds = (LOOP, FOREACH, FUSED)
    heads = [f"{way}, of {kind}'s" for way in (OURS, EAGER) for kind in kinds]
    rows = [["class", "ms", "bytes per parameter", *heads]]
    for name, cells in found["torch classes"].items():
        of = [harness.text(cells.get(k, {}).get(w)) for w in (OURS, EAGER) for k in kinds]
        moved = str(cells["bytes per parameter"])
        rows.append([name, harness.milliseconds(cells[LOOP][OURS]), moved, *of])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """A bar per class and way."""
    (axes,) = harness.axes_of("Step time, as a ratio to torch's", figsize=(14, 4.5))
    kinds = (LOOP, FUSED)
    bars = {
        name: {kind: cells[kind][OURS] for kind in kinds if kind in cells}
        for name, cells in found["torch classes"].items()
    }
    harness.bars(axes, bars, kinds)
    axes.set_ylabel("ratio; less is faster")
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
