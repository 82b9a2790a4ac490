"""How much of the memory's bandwidth does a step use?

Bytes per second of our AdamW on four float32 matrices (reads p, g, m, v, writes p, m, v),
as a share of what a compiled kernel without any arithmetic worth the name, with the same
reads and writes, reaches; a copy is beside it.
"""

from dataclasses import dataclass
from statistics import median, quantiles

import harness
import torch
from harness import NUMBERS, OURS, Found, Step, option, parameters
from matplotlib.axes import Axes
from torch import Tensor

import optimi_func

# By way, of four bytes each.
MOVED = {"plain kernel": 7, OURS: 7, "copy": 2}


@dataclass(frozen=True)
class Config(harness.OnDevice):
    width: int = option(4096, "and height of the matrices")


QUICK: Found = {"width": 256, "rounds": 20}


def touch(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """Read four and write three, with next to no arithmetic."""
    m.mul_(0.5).add_(g)
    v.mul_(0.5).add_(g)
    p.sub_(m + v)


def measure(config: Config) -> Found:
    """Bytes per second of our step, of a plain kernel and of a copy."""
    torch.manual_seed(config.seed)
    shape = (4, config.width, config.width)
    tensors, grads = (list(torch.randn(shape, device=config.device)) for _ in range(2))
    flat = [torch.randn(shape, device=config.device).flatten() for _ in range(4)]
    plain = touch if config.compile is False else torch.compile(touch)
    params = parameters(tensors, grads)
    steps: dict[str, Step] = {
        "plain kernel": lambda: plain(*flat),
        OURS: optimi_func.AdamW(params, compile=config.compile, **NUMBERS).step,
        "copy": lambda: flat[0].copy_(flat[1]),
    }
    seconds = harness.interleave(steps, config, "bandwidth")
    rates = {
        name: [4 * MOVED[name] * flat[0].numel() / s for s in taken]
        for name, taken in seconds.items()
    }
    summary: Found = {"bytes per second": {n: median(r) for n, r in rates.items()}}
    for other in ("plain kernel", "copy"):
        shares = [a / b for a, b in zip(rates[OURS], rates[other])]
        low, middle, high = quantiles(shares, n=4)
        summary[f"share of {other}"] = {"share": middle, "low": low, "high": high}
    return {"bandwidth": summary}


def report(found: Found) -> str:
    """A line per way."""
    rows = [["float32, four matrices", "GB/s", "our share of it"]]
    for name, rate in found["bandwidth"]["bytes per second"].items():
        share = found["bandwidth"].get(f"share of {name}")
        rows.append([name, f"{rate / 1e9:.1f}", harness.text(share)])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """A bar per way."""
    (axes,) = harness.axes_of("Bytes moved per second", figsize=(6, 4.5))
    rates = found["bandwidth"]["bytes per second"]
    harness.bars(axes, {n: {"": rate / 1e9} for n, rate in rates.items()})
    axes.set_ylabel("GB/s")
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
