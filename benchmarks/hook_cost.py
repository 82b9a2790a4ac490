"""How much longer is a compiled AdamW step with a hook?

As ratios to a step without hooks, on the same parameters. The names of the rows are the
calls of `optimi_func.hooks`, in one list where there are several.
"""

from dataclasses import asdict, dataclass
from typing import Any

import harness
import torch
from harness import Found, option, parameters
from matplotlib.axes import Axes

import optimi_func
from optimi_func import hooks

REFERENCE = "none"
ROWS: dict[str, list[Any]] = {
    "none": [],
    "cautious()": [hooks.cautious()],
    "floor(0.35)": [hooks.floor(0.35)],
    "hyperball()": [hooks.hyperball()],
    "clip_rms(0.5), floor(0.35), radial_brake()": [
        *(hooks.clip_rms(0.5), hooks.floor(0.35), hooks.radial_brake())
    ],
    'floor(0.35, "row")': [hooks.floor(0.35, "row")],
}
# The number of matrices, and their sides.
SHAPES = {
    "60 of 64 x 64": (60, 64),
    "8 of 512 x 512": (8, 512),
    "2 of 2048 x 2048": (2, 2048),
}


@dataclass(frozen=True)
class Config(harness.Timed):
    largest: int = option(2048, "side of a matrix, in columns")
    compile: bool | None = option(None, "by default if possible")


QUICK: Found = {"largest": 64, "rounds": 5, "warmup": 1}


def measure(config: Config) -> Found:
    """Ratios of each hook, for each list of matrices."""
    found: Found = {}
    for name, (count, side) in SHAPES.items():
        if side > config.largest:
            continue
        torch.manual_seed(config.seed)
        start = [0.02 * torch.randn(side, side) for _ in range(count)]
        grads = [torch.randn(side, side) for _ in range(count)]
        steps = {
            row: optimi_func.AdamW(
                parameters(start, grads),
                lr=1e-3,
                weight_decay=0.0,
                hooks=own,
                compile=config.compile,
            ).step
            for row, own in ROWS.items()
        }
        cells = harness.ratios(harness.interleave(steps, config, name), REFERENCE)
        found[name] = {row: asdict(x) for row, x in cells.items()}
    return {"hooks": found}


def report(found: Found) -> str:
    """A row for each list of matrices and hook."""
    rows = [["matrices", "hooks", "ms", "ratio (quartiles)"]]
    for name, cells in found["hooks"].items():
        rows += [
            [name, k, harness.milliseconds(x), harness.text(x)] for k, x in cells.items()
        ]
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """The ratios."""
    (axes,) = harness.axes_of("A compiled AdamW step with hooks compared with none")
    harness.bars(axes, found["hooks"], [*ROWS])
    harness.legend(axes)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
