"""How long is a Muon step on the matrices of a ViT, and what does it need?

As a ratio to ``torch.optim.Muon`` with the iteration in the same dtype: float32 by default,
because CPUs without bfloat16 instructions are a hundred times slower in it. torch casts to
bfloat16 whatever it is given; for float32 that cast is made a copy, and nothing else of it
is changed. The ways have parameters and states of their own and the same gradients, and
take turns.

Peak bytes are those of a step above parameters, gradients and state, as a share of the
largest matrix; operations are those of torch that a step calls, without those that they
call themselves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import harness
import torch
from harness import OURS, Found, Step, option, parameters
from matplotlib.axes import Axes
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import optimi_func

REFERENCE = "torch.optim.Muon"


@dataclass(frozen=True)
class Config(harness.Timed):
    width: int = option(768, "of the ViT: 768 is ViT-B")
    blocks: int = option(1, "of it: their matrices are alike")
    dtype: str = option("float32", "of the iteration", ("float32", "bfloat16"))
    seconds: float = option(120.0, "to measure for; no fewer than 5 rounds")
    compile: bool | None = option(None, "the elementwise parts; by default if possible")


QUICK: Found = {"width": 64, "rounds": 5, "seconds": 1.0, "warmup": 1}


def shapes(config: Config) -> list[tuple[int, int]]:
    """Return the shapes of attention and MLP."""
    w = config.width
    return [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)] * config.blocks


def uncast(config: Config) -> AbstractContextManager[Any]:
    """In which torch's iterates in float32, where that was asked for."""
    if config.dtype == "bfloat16":
        return nullcontext()
    return patch.object(Tensor, "bfloat16", Tensor.clone)


def ways(config: Config) -> dict[str, Callable[[list[Tensor]], Any]]:
    """Return the functions that make the optimizers."""
    numbers: dict[str, Any] = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}
    ours = {**numbers, "ns_dtype": config.dtype}
    return {
        REFERENCE: lambda ps: torch.optim.Muon(ps, **numbers),
        OURS: lambda ps: optimi_func.Muon(ps, compile=config.compile, **ours),
        f"{OURS}, eager": lambda ps: optimi_func.Muon(ps, compile=False, **ours),
    }


def measure(config: Config) -> Found:
    """Times, peaks and operations of each way."""
    torch.manual_seed(config.seed)
    tensors = [0.02 * torch.randn(shape) for shape in shapes(config)]
    grads = [torch.randn(shape) for shape in shapes(config)]

    def stepper(make: Callable[[list[Tensor]], Any]) -> Step:
        optimizer = make(parameters(tensors, grads))

        def step() -> None:
            with uncast(config):
                optimizer.step()

        return step

    steps = {name: stepper(make) for name, make in ways(config).items()}
    seconds = harness.interleave(steps, config, "steps")
    found: Found = {}
    for name, ratio in harness.ratios(seconds, REFERENCE).items():
        make = ways(config)[name]
        peak = harness.peak_bytes(lambda make=make: (int, stepper(make)), 2)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            steps[name]()
        calls = [e for e in recorded.events() if e.name.startswith("aten::")]
        outer = [
            e for e in calls if e.cpu_parent is None or "aten::" not in e.cpu_parent.name
        ]
        found[name] = {**asdict(ratio), "peak": peak, "operations": len(outer)}
    found["elements"] = sum(x.numel() for x in tensors)
    found["largest"] = max(x.numel() for x in tensors)
    return {"muon": found}


def report(found: Found) -> str:
    """A row a way."""
    cells = found["muon"]
    rows = [["", "step ms", "ratio (quartiles)", "peak, of the largest", "operations"]]
    for name, cell in cells.items():
        if isinstance(cell, dict):
            share = cell["peak"] / (4 * cells["largest"])
            row = [harness.milliseconds(cell), harness.text(cell), f"{share:.2f}"]
            rows.append([name, *row, str(cell["operations"])])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """The ratios."""
    (axes,) = harness.axes_of(f"A Muon step beside {REFERENCE}")
    cells = {name: x for name, x in found["muon"].items() if isinstance(x, dict)}
    harness.bars(axes, {"step time": cells}, list(cells))
    harness.legend(axes)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
