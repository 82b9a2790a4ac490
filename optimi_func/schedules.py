"""Schedules: hyperparameters as pure functions of the 0-based step.

Every hyperparameter of the pure API and of the transforms can be a schedule, such as
`adamw(lr=warmup_cosine(1e-3, warmup=100, total=1000))`. The step is a 0-d tensor (in a
graph, under vmap) or a Python number (to plot the schedule, or as the factor of a
torch.optim.lr_scheduler.LambdaLR), and is computed with in float64. The values of a
schedule may be 0-d tensors, which can be vmapped and differentiated. Its lengths are ints.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from optimi_func.core.checks import check_number, check_whole
from optimi_func.core.math import choose, scalar_dtype, sqrt
from optimi_func.core.rule import Scalar

Shape: TypeAlias = Literal["linear", "cosine", "sqrt"]


class Schedule:
    """A hyperparameter as a function of the step, a Python number or a 0-d tensor.

    After its end a schedule stays at its last value.
    """

    def __call__(self, step: Scalar) -> Scalar:
        """Return the value at a 0-based step."""
        if isinstance(step, Tensor):
            step = step.to(scalar_dtype(step.device))
        return self.at(step)

    def at(self, step: Scalar) -> Scalar:
        """Return the value at a step, a Python number or a 0-d float64 tensor."""
        raise NotImplementedError

    def as_lambda(self, base_lr: float) -> Callable[[int], float]:
        """Return the function of the step with which a LambdaLR follows this schedule.

        Args:
            base_lr: The learning rate that the torch.optim.Optimizer was made with.

        Raises:
            TypeError, ValueError: base_lr is no number above 0.

        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = linear(0.2, 0.0, steps=4)
        >>> factor = schedule.as_lambda(0.1)
        >>> torch.optim.lr_scheduler.LambdaLR(optimizer, factor).get_last_lr()
        [0.2]
        """
        _check("base_lr", base_lr, "base learning rate", above=0.0)
        return lambda step: float(self(step)) / base_lr


@dataclass(frozen=True, eq=False)
class Ramp(Schedule):
    """A schedule from `start` to `end` in `steps` steps, made by `linear` and `cosine`."""

    start: Scalar
    end: Scalar
    steps: float
    shape: Shape

    def at(self, step: Scalar) -> Scalar:
        """Return the value at a step."""
        x = step / self.steps
        x = x.clamp(0.0, 1.0) if isinstance(x, Tensor) else min(max(x, 0.0), 1.0)
        if self.shape == "cosine":
            angle = math.pi * x
            x = 0.5 - 0.5 * (
                torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)
            )
        elif self.shape == "sqrt":
            x = sqrt(x)
        # start + x * (end - start) would round `end`.
        return (1.0 - x) * self.start + x * self.end


@dataclass(frozen=True, eq=False)
class Joined(Schedule):
    """A sequence of schedules, made by `join`."""

    parts: tuple[Scalar | Callable[[Scalar], Scalar], ...]
    boundaries: tuple[float, ...]

    def at(self, step: Scalar) -> Scalar:
        """Return the value at a step."""
        value = _part(self.parts[0], step)
        for boundary, part in zip(self.boundaries, self.parts[1:]):
            if isinstance(step, Tensor):
                # A callable of the user may not be defined before its first step.
                now = _part(part, (step - boundary).clamp_min(0.0))
                value = choose(step >= boundary, now, value)
            elif step >= boundary:
                value = _part(part, step - boundary)
        return value


def linear(start: Scalar, end: Scalar, steps: int) -> Schedule:
    """Change linearly from `start` to `end`, then stay constant.

        x = min(step / steps, 1),   (1 - x) * start + x * end

    Args:
        start: Value at step 0, a float or a 0-d tensor.
        end: Value from step `steps` on, a float or a 0-d tensor.
        steps: Steps from start to end, at least 1.

    Raises:
        ValueError: An argument is out of its range.

    >>> schedule = linear(0.0, 1.0, steps=4)
    >>> [schedule(step) for step in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    >>> schedule(torch.tensor(2.0))
    tensor(0.5000, dtype=torch.float64)
    """
    check_whole("steps", steps, 1)
    return _ramp(start, end, steps, "linear")


def cosine(start: Scalar, end: Scalar, steps: int) -> Schedule:
    """Change along half a cosine wave, slowly at both ends, then stay constant.

        x = (1 - cos(pi * min(step / steps, 1))) / 2,   (1 - x) * start + x * end

    Args:
        start: Value at step 0, a float or a 0-d tensor.
        end: Value from step `steps` on, a float or a 0-d tensor.
        steps: Steps from start to end, at least 1.

    Raises:
        ValueError: An argument is out of its range.

    References:
        Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
        arXiv:1608.03983.

    >>> schedule = cosine(1.0, 0.0, steps=4)
    >>> [round(schedule(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    check_whole("steps", steps, 1)
    return _ramp(start, end, steps, "cosine")


def join(
    parts: Sequence[Scalar | Callable[[Scalar], Scalar]], boundaries: Sequence[int]
) -> Schedule:
    """Run schedules one after the other. Each counts steps from its own boundary.

    Args:
        parts: Two or more schedules or constants, in their order. A callable has to work
            on 0-d tensors.
        boundaries: First step of each part except the first: above 0 and increasing.

    Raises:
        TypeError: A part is neither a number nor callable.
        ValueError: Boundaries do not increase, or are not one fewer than parts.

    >>> schedule = join([linear(0.0, 1.0, steps=2), 1.0, 0.5], [2, 4])
    >>> [schedule(step) for step in range(6)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.5]
    """
    if len(parts) < 2 or len(boundaries) != len(parts) - 1:
        raise ValueError(
            f"{len(parts)} parts with boundaries={list(boundaries)}: allowed are two parts "
            "or more, and a boundary before each but the first"
        )
    for i, part in enumerate(parts):
        check_number("part of a schedule", f"parts[{i}]", part)
    for i, boundary in enumerate(boundaries):
        check_whole(f"boundaries[{i}]", boundary, 1)
    if any(a >= b for a, b in pairwise(boundaries)):
        raise ValueError(f"boundaries={list(boundaries)}: allowed are increasing steps")
    return Joined(tuple(parts), tuple(boundaries))


def warmup_cosine(
    peak: Scalar, warmup: int, total: int, *, start: Scalar = 0.0, end: Scalar = 0.0
) -> Schedule:
    """Rise linearly to the peak, then fall to the end along a cosine.

    `linear(start, peak, steps=warmup)`, then `cosine(peak, end, steps=total - warmup)`, as
    torch's LinearLR and CosineAnnealingLR under a SequentialLR.

    Args:
        peak: Value at step `warmup`, a float or a 0-d tensor.
        warmup: Steps of the rise. 0 starts at the peak.
        total: Steps of rise and fall together, above `warmup`.
        start: Value at step 0. With an lr of 0 the first step moves no parameter.
        end: Value from step `total` on.

    Raises:
        ValueError: An argument is out of its range, or warmup >= total.

    >>> schedule = warmup_cosine(1.0, warmup=2, total=6)
    >>> [round(schedule(step), 3) for step in range(7)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    check_whole("warmup", warmup, 0)
    check_whole("total", total, 1)
    if warmup >= total:
        raise ValueError(f"warmup={warmup} with total={total}: allowed is below total")
    fall = cosine(peak, end, steps=total - warmup)
    if warmup == 0:
        return fall
    return join([linear(start, peak, steps=warmup), fall], [warmup])


def wsd(
    peak: Scalar,
    *,
    warmup: int,
    total: int,
    decay: int,
    start: Scalar = 0.0,
    end: Scalar = 0.0,
    shape: Shape = "linear",
) -> Schedule:
    """Warm up, stay at the peak for most of the run, and decay in a short fall.

    A run can be continued from any step before the fall with a longer `total`, because
    earlier values do not depend on it.

    Args:
        peak: Value between warmup and decay, a float or a 0-d tensor.
        warmup: Steps of the linear rise. 0 starts at the peak.
        total: Steps of all three phases together.
        decay: Steps of the fall, at least 1. A tenth to a fifth of `total` is usual.
        start: Value at step 0. With an lr of 0 the first step moves no parameter.
        end: Value from step `total` on.
        shape: Shape of the fall: "linear", "cosine", or "sqrt". With "sqrt" the weights of
            peak and end are 1 - sqrt(x) and sqrt(x), if x is the fraction of the fall that
            is done (arXiv:2405.18392).

    Raises:
        ValueError: An argument is out of its range, or warmup + decay > total.

    References:
        Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models with
        Scalable Training Strategies", arXiv:2404.06395.

    >>> schedule = wsd(1.0, warmup=2, total=8, decay=2)
    >>> [schedule(step) for step in range(9)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    check_whole("warmup", warmup, 0)
    check_whole("total", total, 1)
    check_whole("decay", decay, 1)
    if warmup + decay > total:
        raise ValueError(
            f"warmup={warmup} and decay={decay} with total={total}: allowed are at most "
            "total together"
        )
    parts: tuple[Scalar | Schedule, ...] = (_ramp(peak, end, decay, shape),)
    boundaries: tuple[int, ...] = ()
    if total - decay > warmup:
        parts, boundaries = (peak, *parts), (total - decay,)
    if warmup > 0:
        rise = linear(start, peak, steps=warmup)
        parts, boundaries = (rise, *parts), (warmup, *boundaries)
    return Joined(parts, boundaries)


def one_cycle(
    peak: Scalar,
    total: int,
    *,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    shape: Shape = "cosine",
) -> Schedule:
    """Rise from a small value to the peak, then fall to nearly 0.

    Rises from peak / div_factor to peak at step pct_start * total - 1, and falls to
    peak / (div_factor * final_div_factor) at step total - 1. These are the learning rates
    of torch's OneCycleLR without its momentum and its third phase.

    Args:
        peak: Largest value, a float or a 0-d tensor.
        total: Steps of the whole cycle.
        pct_start: Fraction of the steps that rise, above 1 / total and below 1.
        div_factor: The peak divided by the first value.
        final_div_factor: The first value divided by the last.
        shape: Shape of rise and fall: "cosine", "linear" or "sqrt".

    Raises:
        ValueError: An argument is out of its range.

    References:
        Smith & Topin, "Super-Convergence: Very Fast Training of Neural Networks Using
        Large Learning Rates", arXiv:1708.07120.

    >>> schedule = one_cycle(1.0, total=10)
    >>> [round(schedule(step), 3) for step in range(4)]
    [0.04, 0.52, 1.0, 0.95]
    """
    check_whole("total", total, 1)
    _check("peak", peak)
    _check("pct_start", pct_start, "share of steps", above=0.0)
    _check("div_factor", div_factor, "divisor", above=0.0)
    _check("final_div_factor", final_div_factor, "divisor", above=0.0)
    if not 1.0 < pct_start * total < total:
        raise ValueError(
            f"pct_start={pct_start} with total={total}: allowed is above 1 / total and "
            "below 1"
        )
    first = peak / div_factor
    top = pct_start * total - 1.0
    rise = _ramp(first, peak, top, shape)
    fall = _ramp(peak, first / final_div_factor, total - 1.0 - top, shape)
    return Joined((rise, fall), (top,))


def _ramp(start: Scalar, end: Scalar, steps: float, shape: Shape) -> Ramp:
    _check("start", start)
    _check("end", end)
    if shape not in get_args(Shape):
        raise ValueError(f"shape={shape!r}: allowed are {get_args(Shape)}")
    return Ramp(start, end, steps, shape)


def _check(name: str, value: Scalar, label: str = "", above: float | None = None) -> None:
    if callable(value):
        allowed = "numbers and 0-d tensors" if above is None else f"numbers above {above:g}"
        raise TypeError(f"{name}={value!r}: allowed are {allowed}")
    check_number(label or f"{name} of a schedule", name, value, above=above)


def _part(part: Scalar | Callable[[Scalar], Scalar], step: Scalar) -> Scalar:
    return part(step) if callable(part) else part
