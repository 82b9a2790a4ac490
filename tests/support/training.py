"""The loops that train: on gradients that are given, or on the losses of a model."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def step_with(optimizer: Any, params: Iterable[Any], grads: Iterable[Any]) -> None:
    """Take one step, with a gradient for each parameter."""
    for p, g in zip(params, grads):
        p.grad = g
    optimizer.step()


def train(
    optimizer: Any, loss: Callable[[int], Tensor], steps: Iterable[int], *schedulers: Any
) -> None:
    """Take steps that each minimize `loss(i)`."""
    for i in steps:
        loss(i).backward()
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
