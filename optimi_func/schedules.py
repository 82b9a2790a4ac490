"""Schedules: numbers as pure functions of the 0-based step.

Any hyperparameter of the pure API takes one, `adamw(lr=warmup_cosine(1e-3, warmup=100,
total=1000))`, and so do the numbers of the transforms. A schedule is computed in float64
from a 0-d tensor (in a graph, under vmap) as from a host number (to plot it, or as the
factor of a torch.optim.lr_scheduler.LambdaLR). The numbers that it goes between may be 0-d
tensors, to be vmapped and differentiated; its lengths are host numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from optimi_func._checks import check_number
from optimi_func._math import choose, scalar_dtype, sqrt
from optimi_func._rule import Scalar

Shape: TypeAlias = Literal["linear", "cosine", "sqrt"]


class Schedule:
    """A number as a function of the step: `schedule(step)`, step a number or a 0-d tensor.

    Past its end a schedule stays at its last value.
    """

    def __call__(self, step: Scalar) -> Scalar:
        """The number of the 0-based step."""
        if isinstance(step, Tensor):
            step = step.to(scalar_dtype(step.device))
        return self.at(step)

    def at(self, step: Scalar) -> Scalar:
        """The number of a step that is a host number or a wide tensor."""
        raise NotImplementedError

    def as_lambda(self, base_lr: float) -> Callable[[int], float]:
        """The factor on `base_lr` by which a LambdaLR follows this schedule.

        Args:
            base_lr: The learning rate that the torch.optim.Optimizer was made with.

        Raises:
            ValueError: base_lr is not above 0.
            TypeError: It is no number.

        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = linear(0.2, 0.0, steps=4)
        >>> factor = schedule.as_lambda(0.1)
        >>> torch.optim.lr_scheduler.LambdaLR(optimizer, factor).get_last_lr()
        [0.2]
        """
        _check_positive("base learning rate", "base_lr", base_lr)
        return lambda step: float(self(step)) / base_lr


@dataclass(frozen=True, eq=False)
class Ramp(Schedule):
    """From start to end in `steps` steps: `linear` and `cosine` make one."""

    start: Scalar
    end: Scalar
    steps: float
    shape: Shape

    def at(self, step: Scalar) -> Scalar:
        """The number of a step."""
        x = step / self.steps
        x = x.clamp(0.0, 1.0) if isinstance(x, Tensor) else min(max(x, 0.0), 1.0)
        if self.shape == "cosine":
            x = 0.5 - 0.5 * _cos(math.pi * x)
        elif self.shape == "sqrt":
            x = sqrt(x)
        # Exact at both ends.
        return (1.0 - x) * self.start + x * self.end


@dataclass(frozen=True, eq=False)
class Joined(Schedule):
    """One schedule after the other: `join` makes it."""

    parts: tuple[Scalar | Callable[[Scalar], Scalar], ...]
    boundaries: tuple[float, ...]

    def at(self, step: Scalar) -> Scalar:
        """The number of a step."""
        value = _part(self.parts[0], step)
        for boundary, part in zip(self.boundaries, self.parts[1:]):
            if isinstance(step, Tensor):
                # No part is asked about a step before its own first.
                now = _part(part, (step - boundary).clamp_min(0.0))
                value = choose(step >= boundary, now, value)
            elif step >= boundary:
                value = _part(part, step - boundary)
        return value


def linear(start: Scalar, end: Scalar, steps: int) -> Schedule:
    """A straight line, then constant: start at step 0, end from step `steps` on.

        x = min(step / steps, 1),   (1 - x) * start + x * end

    Args:
        start: The number at step 0; a float or a 0-d tensor.
        end: The number at step `steps`; likewise.
        steps: Steps from one to the other, at least 1.

    Returns:
        A function of the 0-based step: see `Schedule`.

    Raises:
        ValueError: A number out of its range.

    >>> schedule = linear(0.0, 1.0, steps=4)
    >>> [schedule(step) for step in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    >>> schedule(torch.tensor(2.0))
    tensor(0.5000, dtype=torch.float64)
    """
    _check_length("steps", steps, 1)
    return _ramp(start, end, steps, "linear")


def cosine(start: Scalar, end: Scalar, steps: int) -> Schedule:
    """Half a wave of the cosine, then constant: slow at both ends.

        x = (1 - cos(pi * min(step / steps, 1))) / 2,   (1 - x) * start + x * end

    Args:
        start: The number at step 0; a float or a 0-d tensor.
        end: The number at step `steps`; likewise.
        steps: Steps from one to the other, at least 1.

    Returns:
        A function of the 0-based step: see `Schedule`.

    Raises:
        ValueError: A number out of its range.

    References:
        Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
        arXiv:1608.03983.

    >>> schedule = cosine(1.0, 0.0, steps=4)
    >>> [round(schedule(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    _check_length("steps", steps, 1)
    return _ramp(start, end, steps, "cosine")


def join(
    parts: Sequence[Scalar | Callable[[Scalar], Scalar]], boundaries: Sequence[int]
) -> Schedule:
    """One schedule after the other, each counting its steps from its own boundary.

    Args:
        parts: Two or more schedules or numbers, in their order. A callable of one's own
            has to be made of operations that take a 0-d tensor.
        boundaries: The step at which each but the first begins: above 0 and increasing.

    Returns:
        A function of the 0-based step: see `Schedule`.

    Raises:
        TypeError: A part is neither a number nor callable.
        ValueError: Boundaries out of order, or not one fewer than parts.

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
        _check_length(f"boundaries[{i}]", boundary, 1)
    if any(a >= b for a, b in pairwise(boundaries)):
        raise ValueError(f"boundaries={list(boundaries)}: allowed are increasing steps")
    return Joined(tuple(parts), tuple(boundaries))


def warmup_cosine(
    peak: Scalar, warmup: int, total: int, *, start: Scalar = 0.0, end: Scalar = 0.0
) -> Schedule:
    """Up a straight line to the peak, down a cosine to the end.

    `linear(start, peak, steps=warmup)`, then `cosine(peak, end, steps=total - warmup)`:
    torch's LinearLR and CosineAnnealingLR under a SequentialLR.

    Args:
        peak: The number at step `warmup`; a float or a 0-d tensor.
        warmup: Steps of the rise; 0 starts at the peak.
        total: Steps of both together, above `warmup`.
        start: The number at step 0. With 0 the first step does not move.
        end: The number from step `total` on.

    Returns:
        A function of the 0-based step: see `Schedule`.

    Raises:
        ValueError: A number out of its range, or no step left after the warmup.

    References:
        Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
        arXiv:1608.03983.

    >>> schedule = warmup_cosine(1.0, warmup=2, total=6)
    >>> [round(schedule(step), 3) for step in range(7)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    _check_length("warmup", warmup, 0)
    _check_length("total", total, 1)
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
    """Warmup, stable, decay: most of the run at the peak, a short fall at its end.

    A run may go on from any step before the fall, with a longer `total`: the numbers so
    far do not depend on it.

    Args:
        peak: The number between warmup and decay; a float or a 0-d tensor.
        warmup: Steps of the rise along a straight line; 0 starts at the peak.
        total: Steps of all three together.
        decay: Steps of the fall, at least 1; a tenth to a fifth of `total` is usual.
        start: The number at step 0. With 0 the first step does not move.
        end: The number from step `total` on.
        shape: Of the fall: "linear", "cosine", or "sqrt", which is peak and end weighted
            with 1 - sqrt(x) and sqrt(x) at the share x of the fall (arXiv:2405.18392).

    Returns:
        A function of the 0-based step: see `Schedule`.

    Raises:
        ValueError: A number out of its range, or warmup + decay above total.

    References:
        Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models with
        Scalable Training Strategies", arXiv:2404.06395.

    >>> schedule = wsd(1.0, warmup=2, total=8, decay=2)
    >>> [schedule(step) for step in range(9)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    _check_length("warmup", warmup, 0)
    _check_length("total", total, 1)
    _check_length("decay", decay, 1)
    if warmup + decay > total:
        raise ValueError(
            f"warmup={warmup} and decay={decay} with total={total}: allowed are at most "
            "total together"
        )
    parts: list[Schedule | Scalar] = [_ramp(peak, end, decay, shape)]
    boundaries: list[int] = []
    if total - decay > warmup:
        parts, boundaries = [peak, *parts], [total - decay]
    if warmup > 0:
        parts = [linear(start, peak, steps=warmup), *parts]
        boundaries = [warmup, *boundaries]
    return join(parts, boundaries) if boundaries else cast(Schedule, parts[0])


def one_cycle(
    peak: Scalar,
    total: int,
    *,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    shape: Shape = "cosine",
) -> Schedule:
    """One rise from a small number to a large one and one fall to nearly nothing.

    From peak / div_factor up to peak at step pct_start * total - 1, down to
    peak / (div_factor * final_div_factor) at step total - 1: torch's OneCycleLR (without
    its momentum and its third phase), lr by lr.

    Args:
        peak: The largest number; a float or a 0-d tensor.
        total: Steps of the whole cycle.
        pct_start: Share of them that rises, above 1 / total and below 1.
        div_factor: peak over the first number.
        final_div_factor: The first number over the last.
        shape: "cosine", "linear" or "sqrt", of both.

    Returns:
        A function of the 0-based step: see `Schedule`.

    Raises:
        ValueError: A number out of its range.

    References:
        Smith & Topin, "Super-Convergence: Very Fast Training of Neural Networks Using
        Large Learning Rates", arXiv:1708.07120.

    >>> schedule = one_cycle(1.0, total=10)
    >>> [round(schedule(step), 3) for step in range(4)]
    [0.04, 0.52, 1.0, 0.95]
    """
    _check_length("total", total, 1)
    _check_constant("peak", peak)
    _check_positive("share of steps", "pct_start", pct_start)
    _check_positive("divisor", "div_factor", div_factor)
    _check_positive("divisor", "final_div_factor", final_div_factor)
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
    _check_constant("start", start)
    _check_constant("end", end)
    if shape not in get_args(Shape):
        raise ValueError(f"shape={shape!r}: allowed are {get_args(Shape)}")
    return Ramp(start, end, steps, shape)


def _check_constant(name: str, value: Scalar) -> None:
    if callable(value):
        raise TypeError(f"{name}={value!r}: allowed are numbers and 0-d tensors")
    check_number(f"{name} of a schedule", name, value)


def _check_positive(label: str, name: str, value: Scalar) -> None:
    if callable(value):
        raise TypeError(f"{name}={value!r}: allowed are numbers above 0")
    check_number(label, name, value)
    if not value > 0:
        raise ValueError(f"{name}={value}: allowed are numbers above 0")


def _check_length(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: allowed are whole numbers from {least}")


def _part(part: Scalar | Callable[[Scalar], Scalar], step: Scalar) -> Scalar:
    return part(step) if callable(part) else part


def _cos(x: Scalar) -> Scalar:
    return torch.cos(x) if isinstance(x, Tensor) else math.cos(x)
