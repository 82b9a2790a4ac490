"""Schedules: hyperparameters as pure functions of the 0-based step.

Every hyperparameter of the pure API and of the transforms can be a schedule, such as
`adamw(lr=warmup_cosine(1e-3, warmup=100, total=1000))`. A schedule accepts the step as a
0-d tensor (in a compiled graph, or under vmap) or as a Python number (to plot the schedule,
or to use it in a torch.optim.lr_scheduler.LambdaLR), and computes in float64. The values in
the arguments of a schedule, such as `peak`, may be 0-d tensors, so that you can vmap over
them and differentiate with respect to them. The lengths of a schedule, such as `warmup`,
are ints.
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
    """A hyperparameter as a function of the step.

    The step is a Python number or a 0-d tensor. After the end of a schedule, its value
    stays constant.
    """

    def __call__(self, step: Scalar) -> Scalar:
        """Return the value of the hyperparameter at a 0-based step."""
        if isinstance(step, Tensor):
            step = step.to(scalar_dtype(step.device))
        return self.at(step)

    def at(self, step: Scalar) -> Scalar:
        """Return the value at a step, which is a Python number or a 0-d float64 tensor."""
        raise NotImplementedError

    def as_lambda(self, base_lr: float) -> Callable[[int], float]:
        """Return a function for torch's LambdaLR, which then follows this schedule.

        Args:
            base_lr: The learning rate with which the torch.optim.Optimizer was created.

        Raises:
            TypeError, ValueError: base_lr is not a number above 0.

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
        steps: Number of steps from start to end, at least 1.

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
        steps: Number of steps from start to end, at least 1.

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
    """Run several schedules one after the other.

    Each schedule counts its steps from its own boundary.

    Args:
        parts: Two or more schedules or constants, in the order in which they run. If a part
            is a function of your own, it has to accept 0-d tensors.
        boundaries: The first step of each part except the first part. Boundaries are above
            0 and increase.

    Raises:
        TypeError: A part is neither a number nor callable.
        ValueError: The boundaries do not increase, or their number is not the number of
            parts minus 1.

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

    This schedule is `linear(start, peak, steps=warmup)`, followed by `cosine(peak, end,
    steps=total - warmup)`. torch's LinearLR and CosineAnnealingLR in a SequentialLR give
    the same values.

    Args:
        peak: Value at step `warmup`, a float or a 0-d tensor.
        warmup: Number of steps in the rise. With 0, the schedule starts at the peak.
        total: Number of steps in the rise and the fall together, above `warmup`.
        start: Value at step 0. If the learning rate is 0, the first step moves no
            parameter.
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

    You can continue a run with a longer `total` from any step before the fall, because the
    values before the fall do not depend on `total`.

    Args:
        peak: Value between the warmup and the fall, a float or a 0-d tensor.
        warmup: Number of steps in the linear rise. With 0, the schedule starts at the peak.
        total: Number of steps in all three phases together.
        decay: Number of steps in the fall, at least 1. A tenth to a fifth of `total` is
            usual.
        start: Value at step 0. If the learning rate is 0, the first step moves no
            parameter.
        end: Value from step `total` on.
        shape: Shape of the fall: "linear", "cosine", or "sqrt". With "sqrt", the value is
            (1 - sqrt(x)) * peak + sqrt(x) * end, where x is the fraction of the fall that
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

    The value rises from peak / div_factor to peak at step pct_start * total - 1, and falls
    to peak / (div_factor * final_div_factor) at step total - 1. torch's OneCycleLR without
    its third phase gives the same learning rates. Unlike OneCycleLR, this schedule does not
    change the momentum.

    Args:
        peak: The largest value, a float or a 0-d tensor.
        total: Number of steps in the whole cycle.
        pct_start: Fraction of the steps in which the value rises, above 1 / total and below
            1.
        div_factor: The peak divided by the first value.
        final_div_factor: The first value divided by the last value.
        shape: Shape of the rise and the fall: "cosine", "linear" or "sqrt".

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
