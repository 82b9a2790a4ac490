"""Memory as the profiler has it: what plans are compared with."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimi_func.memory import Recipe

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from harness import peak_bytes


def trained_peak(
    make: Callable[[], nn.Module],
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    recipe: Recipe,
    steps: int = 3,
) -> int:
    """The most bytes at once in the last of some steps by a recipe, the model's too."""

    def training():
        model = make()
        optimizer, _ = recipe.apply(model, lr=1e-3)

        def cast(x: Tensor) -> Tensor:
            return x.clone().to(recipe.dtype if x.is_floating_point() else x.dtype)

        given = pytree.tree_map(cast, batch)

        def step() -> None:
            for _ in range(recipe.accumulation_steps):
                loss_fn(model, given).backward()
            optimizer.step()
            optimizer.zero_grad()

        return int, step

    # What is made once a process is there before, and nothing is freed in between.
    training()[1]()
    gc.collect()
    return peak_bytes(training, steps, whole=True)


def stepped_peak(make: Callable[[], Any], steps: int = 4) -> int:
    """The most bytes at once in some steps of an optimizer, with what it steps.

    `make` makes it, its parameters and their gradients.
    """

    def training():
        optimizer = make()
        optimizer.init_state()
        return int, lambda: [optimizer.step() for _ in range(steps)]

    # What is made once a process is there before.
    training()[1]()
    gc.collect()
    return peak_bytes(training, 1, whole=True)


def allocated_by(run: Callable[[], Any], tries: int = 1) -> int:
    """The most bytes of CPU memory that torch takes while something runs.

    The least of some tries, where threads of a backend of messages may be the last to let
    go of a tensor: the profiler sees nothing of that.
    """
    held: list[Any] = []

    def step() -> None:
        held.append(run())
        held.append(torch.ones(1))  # one that the profiler certainly has seen

    def made() -> Any:
        return lambda: held.append(torch.ones(1)), step

    return min(peak_bytes(made, 1) for _ in range(tries))
