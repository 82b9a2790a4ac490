"""Do the other rules use the memory as well as AdamW does?

Time per byte on four float32 matrices, relative to AdamW's. The bytes are those of p, g and
the state's fields; StableAdamW's g and v count twice, for its mean has to be known before
anything moves. Ranger's slow weights move in every sixth step only, which is not the median
one: they are not counted.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import harness
import torch
from harness import Found, Step, option, parameters
from matplotlib.axes import Axes

import optimi_func


@dataclass(frozen=True)
class Config(harness.OnDevice):
    width: int = option(4096, "and height of the matrices")


QUICK: Found = {"width": 256, "rounds": 20}


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


def measure(config: Config) -> Found:
    """Time per byte, relative to AdamW's."""
    torch.manual_seed(config.seed)
    shape = (4, config.width, config.width)
    tensors, grads = (list(torch.randn(shape, device=config.device)) for _ in range(2))
    steps: dict[str, Step] = {}
    for name, rule in RULES.items():
        options = {"lr": 1e-4, "compile": config.compile} | rule.options
        steps[name] = rule.make(parameters(tensors, grads), **options).step
    seconds = harness.interleave(steps, config, "rules")
    per_byte = {
        name: [s / RULES[name].bytes_per_parameter() for s in taken]
        for name, taken in seconds.items()
    }
    rules = {
        name: asdict(ratio)
        | {"seconds": median(seconds[name])}
        | {"bytes per parameter": RULES[name].bytes_per_parameter()}
        for name, ratio in harness.ratios(per_byte, "AdamW").items()
    }
    return {"rules": rules}


def report(found: Found) -> str:
    """A line per rule."""
    rows = [["rule", "ms", "bytes per parameter", "time per byte, AdamW's is 1"]]
    for name, cell in found["rules"].items():
        moved = str(cell["bytes per parameter"])
        rows.append([name, harness.milliseconds(cell), moved, harness.text(cell)])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """A bar per rule."""
    (axes,) = harness.axes_of("Time per byte, AdamW's is 1", figsize=(8, 4.5))
    harness.bars(axes, {name: {"": cell} for name, cell in found["rules"].items()})
    axes.set_ylabel("ratio; less is faster")
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
