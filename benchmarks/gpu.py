"""How good is a step on a GPU?

AdamW on the shapes of models: the device's time as a ratio to ``torch.optim.AdamW`` fused
and to foreach, the share of the bandwidth that a copy of as many bytes reaches, how many
kernels a step launches, and how long the host takes to launch them. ``make bench
DEVICE=cuda`` asks this alone; it takes some minutes.
"""

import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import harness
import torch
from harness import OURS, Found, Step, option, parameters
from matplotlib.axes import Axes
from step_time import DTYPES, REFERENCE, SETS, WAYS, launches
from tqdm import tqdm

FOREACH, COPY = "torch foreach", "copy"
# Tensors that are read and written: p, g, m, v and p, m, v; and the compensation.
MOVED = {False: 7, True: 9}


@dataclass(frozen=True)
class Config(harness.OnDevice):
    device: str = option("cuda", "to run on", ("cpu", "cuda"))
    sets: tuple[str, ...] = option(
        ("vit-b", "gpt2", "resnet50", "large", "small", "odd"), "of shapes", tuple(SETS)
    )
    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16 + Kahan"), "of parameters", tuple(DTYPES)
    )


QUICK: Found = {"sets": ("tiny", "small"), "seconds": 0.5, "rounds": 20}


def host_seconds(step: Step, device: str, rounds: int = 20) -> float:
    """Until a step returns, while the device has nothing else to do."""
    taken: list[float] = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return median(taken)


def measure_set(key: str, dtype_name: str, config: Config) -> Found:
    """The three ways and the copy, on one set in one dtype."""
    shapes, (dtype, kahan) = SETS[key], DTYPES[dtype_name]
    torch.manual_seed(config.seed)
    tensors, grads = (shapes.tensors(dtype, config.device) for _ in range(2))
    steps = {
        name: WAYS[name].make(parameters(tensors, grads), kahan, config.compile)
        for name in (REFERENCE, FOREACH, OURS)
    }
    moved = MOVED[kahan] * dtype.itemsize * shapes.count()
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=config.device)
    target = torch.empty_like(source)
    timed = {**steps, COPY: partial(target.copy_, source)}
    seconds = harness.interleave(timed, config, f"{shapes.title}, {dtype_name}")
    found: Found = {
        f"to {other}": asdict(harness.ratios(seconds, other)[OURS])
        for other in (REFERENCE, FOREACH)
    }
    found["share of a copy"] = asdict(
        harness.ratios({COPY: seconds[COPY], OURS: seconds[OURS]}, OURS)[COPY]
    )
    found["launches"] = {name: launches(x, config.device) for name, x in steps.items()}
    found["host seconds"] = {
        name: host_seconds(x, config.device) for name, x in steps.items()
    }
    del tensors, grads, steps, timed, source, target
    torch.compiler.reset()
    harness.free(config.device)
    return found


def measure(config: Config) -> Found:
    """All sets in all dtypes."""
    found: Found = {key: {} for key in config.sets}
    cells = [(key, dtype) for key in config.sets for dtype in config.dtypes]
    for key, dtype in tqdm(cells, "sets and dtypes", disable=None):
        found[key][dtype] = measure_set(key, dtype, config)
    return {"gpu": found}


def each(cell: dict[str, Any], unit: float, digits: int) -> str:
    """Ours / fused / foreach."""
    numbers = [cell[name] for name in (OURS, REFERENCE, FOREACH)]
    texts = ["-" if x is None else f"{x * unit:.{digits}f}" for x in numbers]
    return " / ".join(texts)


def report(found: Found) -> str:
    """A line per set and dtype."""
    rows = [
        ["AdamW", "ms", "to fused", "to foreach", "of a copy", "kernels", "host, us"],
    ]
    for key, by_dtype in found["gpu"].items():
        for dtype, cell in by_dtype.items():
            rows.append(
                [
                    f"{SETS[key].title}, {dtype}",
                    harness.milliseconds(cell[f"to {REFERENCE}"]),
                    harness.text(cell[f"to {REFERENCE}"]),
                    harness.text(cell[f"to {FOREACH}"]),
                    harness.text(cell["share of a copy"]),
                    each(cell["launches"], 1, 0),
                    each(cell["host seconds"], 1e6, 0),
                ]
            )
    return f"{harness.table(rows)}\n\nkernels and host: ours / torch fused / foreach"


def draw(found: Found) -> Axes:
    """Bars by set, a row of them for each dtype."""
    dtypes = found["config"]["dtypes"]
    title = "AdamW step: time as a ratio to torch fused, and share of a copy's bandwidth"
    grid = harness.axes_of(title, len(dtypes), figsize=(11, 7), sharex=True)
    names = {f"to {REFERENCE}": "to torch fused", "share of a copy": "of a copy"}
    for axes, dtype in zip(grid, dtypes):
        groups = {
            SETS[key].title: {text: cells[dtype][name] for name, text in names.items()}
            for key, cells in found["gpu"].items()
        }
        harness.bars(axes, groups, tuple(names.values()))
        axes.set_title(dtype, loc="left", fontsize=11)
    harness.legend(grid[0])
    return grid[0]


if __name__ == "__main__":
    # Asked for by name alone, on a machine where the others would be asked of the CPU.
    asks = {"--show", "--compare", "--help", "-h", "--device"} & set(sys.argv)
    if not torch.cuda.is_available() and not asks:
        sys.exit("error: DEVICE=cuda needs a CUDA device, and torch finds none here")
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
