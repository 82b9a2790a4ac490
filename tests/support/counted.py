"""Operations of torch: how many a step has, beside the loop of the paper."""

from collections.abc import Callable
from typing import Any

import torch
from cases import Case, problem
from torch.overrides import TorchFunctionMode


class Operations(TorchFunctionMode):
    """A mode that counts the calls that return tensors; attributes are none."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.count += isinstance(found, torch.Tensor)
        return found


def operations(step: Callable[[], Any]) -> int:
    """How many calls a step has."""
    with Operations() as mode:
        step()
    return mode.count


def usual(name: str) -> Case:
    """The defaults; for SGD with a momentum, without which it has no state."""
    options = {"momentum": 0.9} if name == "sgd" else {}
    return Case(name, options, options)


def allowed(name: str) -> float:
    """How many operations a step may have: a few more than a step of the loop.

    Those few are decay, casts and new tensors. A norm or a mean is one call in a loop, and
    several of a rule that takes means, or maps a tensor.
    """
    case, rule = usual(name), usual(name).functional().rule
    counts: list[int] = []
    for steps in (6, 12):
        p, grads = problem(steps=steps)
        counts.append(operations(lambda: case.reference(p, grads)))  # noqa: B023
    loop = (counts[1] - counts[0]) / 6
    parts = (rule.sums, rule.measure, rule.whole, rule.after)
    return loop * (2.5 if any(parts) else 1) + 7
