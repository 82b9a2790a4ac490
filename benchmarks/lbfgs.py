"""How long is an iteration of LBFGS, and how long are a thousand fits at once?

In processor time. "iteration" is a step of the class from a fresh state, on a quadratic
whose gradients are set by hand, divided by its iterations; torch.optim.LBFGS is beside it.
"fits" are curve fits of two parameters: by `lbfgs.solve(in_dims=)` all at once, and one by
one, of which a few are measured and multiplied.
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

REFERENCE, OURS = "torch.optim.LBFGS", "optimi_func.LBFGS"
CLASSES: dict[str, Any] = {REFERENCE: torch.optim.LBFGS, OURS: optimi_func.LBFGS}
TOGETHER, SOLVE, TORCH = "solve, in_dims", "solve, one by one", "torch, one by one"
WOLFE: Found = {"line_search_fn": "strong_wolfe"}


@dataclass(frozen=True)
class Config(harness.Timed):
    largest: int = option(100_000, "number of parameters")
    iterations: int = option(150, "of a step, at most")
    fits: int = option(1000, "at once")
    alone: int = option(50, "fits that are measured one by one")


QUICK: Found = {"largest": 1000, "iterations": 20, "fits": 20, "alone": 3, "rounds": 5}
QUICK |= {"seconds": 1.0, "warmup": 1}


def run_of(cls: Any, n: int, history: int, config: Config) -> Callable[[], int]:
    """Return a run from a fresh state, which returns its iterations."""
    weights = torch.logspace(0, 4, n, dtype=torch.float64)
    start = torch.randn(n, dtype=torch.float64)
    sizes = [n // 5, n // 5, n - 2 * (n // 5)]

    def run() -> int:
        params = [x.clone().requires_grad_() for x in start.split(sizes)]
        scaled = weights.split(sizes)
        optimizer = cls(
            *(params, 1, config.iterations), history_size=history, max_eval=10**6, **WOLFE
        )

        @torch.no_grad()
        def closure() -> Tensor:
            for p, w in zip(params, scaled):
                p.grad = w * p
            return sum([p.dot(p.grad) for p in params]) / 2.0

        optimizer.step(closure)
        return optimizer.state[params[0]]["n_iter"]

    return run


def iterations(config: Config) -> Found:
    """Times of an iteration, for numbers of parameters and sizes of the history."""
    found: Found = {}
    for n in (10, 1000, 100_000):
        for history in (10, 100):
            if n > config.largest:
                continue
            torch.manual_seed(config.seed)
            runs = {k: run_of(cls, n, history, config) for k, cls in CLASSES.items()}
            counts = {k: run() for k, run in runs.items()}
            title = f"{n} parameters, history {history}"
            seconds = harness.interleave(runs, config, title, clock=time.process_time)
            each = {k: [x / counts[k] for x in taken] for k, taken in seconds.items()}
            cells = harness.ratios(each, REFERENCE)
            found[f"{n:,}, {history}"] = {
                k: asdict(x) | {"iterations": counts[k]} for k, x in cells.items()
            }
    return found


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
                params.values(), max_iter=100, history_size=10, **WOLFE
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
    """Both."""
    return {"iterations": iterations(config), "fits": fits(config)}


def report(found: Found) -> str:
    """Two tables."""
    rows = [["parameters, history", "torch, ms", "optimi_func, ms", "ratio (quartiles)"]]
    for name, cells in found["iterations"].items():
        times = [f"{1e3 * cells[k]['seconds']:.3f}" for k in (REFERENCE, OURS)]
        rows.append([name, *times, harness.text(cells[OURS])])
    more = [["fits", "s", "ratio (quartiles)"]]
    for way, cell in found["fits"].items():
        more.append([way, f"{cell['seconds']:.3f}", harness.text(cell)])
    return f"{harness.table(rows)}\n\n{harness.table(more)}"


def draw(found: Found) -> Axes:
    """The ratios of an iteration."""
    (axes,) = harness.axes_of(f"An iteration compared with {REFERENCE}")
    harness.bars(axes, found["iterations"], [REFERENCE, OURS])
    harness.legend(axes)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
