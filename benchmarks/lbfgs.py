"""How long are a thousand fits at once?

In processor time: curve fits of two parameters by `lbfgs.solve(in_dims=)` all at once, and
one by one, also by torch.optim.LBFGS, of which a few are measured and multiplied.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import harness
import torch
from harness import Found, option
from matplotlib.axes import Axes
from torch import Tensor

import optimi_func

TOGETHER, SOLVE, TORCH = "solve, in_dims", "solve, one by one", "torch, one by one"


@dataclass(frozen=True)
class Config(harness.Timed):
    fits: int = option(1000, "at once")
    alone: int = option(50, "fits that are measured one by one")


QUICK: Found = {"fits": 20, "alone": 3, "rounds": 5, "seconds": 1.0, "warmup": 1}


AT = torch.linspace(0, 3, 12, dtype=torch.float64)


def curve(p: Any, y: Tensor) -> Tensor:
    """Return the squared error of an exponential."""
    return ((p["a"] * torch.exp(-p["b"] * AT) - y) ** 2).sum()


def ones(*shape: int) -> dict[str, Tensor]:
    """Return where a fit begins."""
    return {x: torch.ones(shape, dtype=torch.float64) for x in "ab"}


def fits(config: Config) -> Found:
    """Times of many fits at once, and one by one."""
    torch.manual_seed(config.seed)
    a, b, noise = torch.rand(3, config.fits, 1, dtype=torch.float64) + 0.5
    y = a * torch.exp(-b * AT) + 0.02 * noise * torch.randn(config.fits, len(AT))
    fit, some = optimi_func.lbfgs(), y[: config.alone]

    def by_torch() -> None:
        for row in some:
            params = {k: x.requires_grad_() for k, x in ones().items()}
            optimizer = torch.optim.LBFGS(
                params.values(),
                max_iter=100,
                history_size=10,
                line_search_fn="strong_wolfe",
            )

            def closure(row: Tensor = row, params: Any = params, o: Any = optimizer) -> Any:
                o.zero_grad()
                loss = curve(params, row)
                loss.backward()
                return loss

            optimizer.step(closure)

    ways: dict[str, Callable[[], Any]] = {
        TOGETHER: lambda: fit.solve(curve, ones(config.fits), y, in_dims=(0, 0)),
        SOLVE: lambda: [fit.solve(curve, ones(), row) for row in some],
        TORCH: by_torch,
    }
    assert bool(ways[TOGETHER]()[1].done.all())
    seconds = harness.interleave(ways, config, "fits", clock=time.process_time)
    for way in (SOLVE, TORCH):
        seconds[way] = [x * config.fits / config.alone for x in seconds[way]]
    cells = harness.ratios(seconds, TOGETHER)
    return {way: asdict(cell) for way, cell in cells.items()}


def measure(config: Config) -> Found:
    """The times of all ways."""
    return {"fits": fits(config)}


def report(found: Found) -> str:
    """A row for each way."""
    rows = [["fits", "s", "ratio (quartiles)"]]
    for way, cell in found["fits"].items():
        rows.append([way, f"{cell['seconds']:.3f}", harness.text(cell)])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """The ratios of the ways."""
    (axes,) = harness.axes_of(f"{found['config']['fits']} fits compared with {TOGETHER}")
    harness.bars(axes, {"fits": found["fits"]}, [TOGETHER, SOLVE, TORCH])
    harness.legend(axes)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
