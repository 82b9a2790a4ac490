"""How long is a SOAP step that changes the bases, and one that does not?

In processor time, as ratios to an AdamW step on the same matrix. "bases kept" never changes
them after the first step; "bases changed" does so in every step, as by default every tenth
does. "mean of ten" is nine steps of the first kind and one of the other. "first" makes
them.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import harness
import torch
from harness import Found, option, parameters
from matplotlib.axes import Axes

import optimi_func

REFERENCE = "AdamW"
KEPT, CHANGED, MEAN = "SOAP, bases kept", "SOAP, bases changed", "SOAP, mean of ten"


@dataclass(frozen=True)
class Config(harness.Timed):
    largest: int = option(4096, "side of a matrix, in columns")
    seconds: float = option(60.0, "to measure a matrix for; no fewer than 5 rounds")
    compile: bool | None = option(None, "the elementwise parts; by default if possible")


QUICK: Found = {"largest": 64, "rounds": 5, "seconds": 1.0, "warmup": 1}
SHAPES = [(64, 64), (512, 512), (1024, 1024), (1024, 4096)]


def measure(config: Config) -> Found:
    """Times of each way, for each matrix."""
    found: Found = {}
    for shape in SHAPES:
        if max(shape) > config.largest:
            continue
        torch.manual_seed(config.seed)
        start, g = [0.02 * torch.randn(shape)], [torch.randn(shape)]
        how: Found = {"compile": config.compile}
        makes: dict[str, Callable[..., Any]] = {
            REFERENCE: partial(optimi_func.AdamW, **how),
            KEPT: partial(optimi_func.SOAP, **how, precondition_frequency=1 << 60),
            CHANGED: partial(optimi_func.SOAP, **how, precondition_frequency=1),
        }
        steps = {name: make(parameters(start, g)).step for name, make in makes.items()}
        steps[REFERENCE]()
        steps[KEPT]()  # compiled here, so that the next is timed without
        began = time.process_time()
        steps[CHANGED]()
        first = time.process_time() - began
        title, clock = "x".join(map(str, shape)), time.process_time
        seconds = harness.interleave(steps, config, title, clock=clock)
        both = zip(seconds[KEPT], seconds[CHANGED])
        seconds[MEAN] = [0.9 * kept + 0.1 * changed for kept, changed in both]
        cells = harness.ratios(seconds, REFERENCE)
        name = f"{shape[0]} x {shape[1]}"
        found[name] = {way: asdict(x) for way, x in cells.items()} | {"first": first}
    return {"soap": found}


def report(found: Found) -> str:
    """A row for each matrix and way."""
    rows = [["matrix", "step", "ms", "ratio (quartiles)"]]
    for name, cells in found["soap"].items():
        for way in (REFERENCE, KEPT, CHANGED, MEAN):
            cell = cells[way]
            rows.append([name, way, harness.milliseconds(cell), harness.text(cell)])
        rows.append([name, "SOAP, first", f"{1e3 * cells['first']:.0f}", ""])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """The ratios."""
    (axes,) = harness.axes_of(f"A SOAP step compared with {REFERENCE}")
    cells = {
        name: {way: x for way, x in row.items() if isinstance(x, dict)}
        for name, row in found["soap"].items()
    }
    harness.bars(axes, cells, [REFERENCE, KEPT, MEAN, CHANGED])
    harness.legend(axes)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
