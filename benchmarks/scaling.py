"""How does the time of a step grow with the number of parameters?

Ten equal tensors in float32, torch's fused AdamW and ours.
"""

from dataclasses import dataclass

import harness
from harness import OURS, Found, option
from matplotlib.axes import Axes
from step_time import REFERENCE, Shapes, measure_set
from step_time import Config as StepTime
from tqdm import tqdm


@dataclass(frozen=True)
class Config(harness.OnDevice):
    largest: float = option(3e8, "number of parameters, each of which takes 32 bytes")
    seconds: float = option(1.0, "to measure each number for; no fewer than 5 rounds")


QUICK: Found = {"largest": 1e6, "rounds": 20}


def measure(config: Config) -> Found:
    """Time of torch's fused step and of ours by number of parameters."""
    scaling: Found = {}
    counts = [10**4 * k * 10**e for e in range(5) for k in (1, 3)]
    given = {f: getattr(config, f) for f in harness.OnDevice.__dataclass_fields__}
    once = StepTime(ways=(OURS,), memory=1e9, **given)
    for n in tqdm([n for n in counts if n <= config.largest], "sizes", disable=None):
        shapes = Shapes(f"{n:.0e} parameters", [(n // 10,)] * 10)
        scaling[str(n)] = measure_set(shapes, "float32", once)
    return {"scaling": scaling}


def report(found: Found) -> str:
    """A line per number of parameters."""
    rows = [["parameters", "torch fused, ms", "optimi_func, ms", "ratio"]]
    for n, cell in found["scaling"].items():
        times = [harness.milliseconds(cell[way]) for way in (REFERENCE, OURS)]
        rows.append([f"{int(n):.0e}", *times, harness.text(cell[OURS])])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """Time against the number of parameters."""
    title = "AdamW step, float32, ten equal tensors"
    (axes,) = harness.axes_of(title, figsize=(8, 5.5))
    scaling = found["scaling"]
    for way, marker in ((REFERENCE, "o"), (OURS, "s")):
        times = [1e3 * cell[way]["seconds"] for cell in scaling.values()]
        axes.plot([int(n) for n in scaling], times, marker=marker, label=way)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="milliseconds a step")
    axes.legend(frameon=False)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
