"""What the rules of Schedule-Free learning share (Defazio et al. 2024): the averaging.

    z <- z + u,   x <- (1 - c) * x + c * z,   y <- (1 - b1) * z + b1 * x

u is the move of a rule, at y; x the average of all z, each by its weight. The parameter is
y, where gradients are taken, and x is where to evaluate. It is not stored:
x = (y - (1 - b1) * z) / b1.
"""

from typing import Any, NamedTuple

from torch import Tensor

from optimi_func._checks import check_betas, check_number
from optimi_func._math import choose
from optimi_func._rule import Scalar


class Running(NamedTuple):
    weight_sum: Scalar = 0.0  # W: of all z so far
    lr_max: Scalar = 0.0  # the largest lr, after its warmup
    beta1: Scalar = (
        0.0  # b1 of the last step, by which y is what it is; 0 before there was a weight
    )


class Averaging(NamedTuple):
    warmed: Scalar  # of lr what this step takes
    begins: Scalar  # 1 until there is a weight, as nothing has moved: z is y; then 0
    weight: Scalar  # of z - y what y moves by: c, where b1 is as it was
    inner: Scalar  # 1 - b1 * (1 - c): of u what y moves by
    beyond: Scalar  # (1 - b1) / b1, of the last step


def averaging(
    t: Scalar,
    lr: Scalar,
    running: Running,
    warmed: Scalar,
    beta1: Scalar,
    r: Scalar,
    weight_lr_power: Scalar,
) -> tuple[Averaging, Running]:
    """The averaging of step t, and the running numbers after it."""
    now = lr * warmed
    top = choose(now > running.lr_max, now, running.lr_max)
    # 0 to a power: its derivative by either is not finite.
    moved = top > 0
    of_none = choose(weight_lr_power == 0, 1.0, 0.0)
    w = choose(moved, choose(moved, top, 1.0) ** weight_lr_power, of_none) * t**r
    total = running.weight_sum + w
    some = total > 0
    c = choose(some, w / choose(some, total, 1.0), 0.0)
    begins = choose(running.weight_sum == 0, 1.0, 0.0)
    inner = 1.0 - beta1 * (1.0 - c)
    # x has to be told from y by the b1 that y was made by.
    before = choose(running.beta1 == 0, beta1, running.beta1)
    # A tensor may be 0, though no number may: x is lost then, but no derivative.
    beyond = 1.0 / choose(before == 0, 1.0, before) - 1.0
    weight = choose(before == beta1, c, inner - (1.0 - inner) * beyond)
    found = Averaging(warmed, begins, weight, inner, beyond)
    return found, Running(total, top, choose(some, beta1, running.beta1))


def z_of(x: Tensor, z: Tensor, c: Averaging) -> Tensor:
    """Z before a step: where there was none, the parameter itself."""
    return z + c.begins * (x - z)


def after(x: Tensor, u: Tensor, s: Any, c: Any) -> tuple[Tensor, Any]:
    """How y moves by the average, and z, for a State with z and Coeffs with averaging."""
    a: Averaging = c.averaging
    z = z_of(x, s.z, a)
    u = a.warmed * u
    return a.weight * (z - x) + a.inner * u, s._replace(z=z + u)


def eval_point(x: Tensor, s: Any, c: Any) -> Tensor:
    """The average, of the parameter y."""
    a: Averaging = c.averaging
    return x + a.beyond * (x - z_of(x, s.z, a))


def check_averaging(r: Any, weight_lr_power: Any, cautious: bool) -> None:
    """Refuse powers out of their range, and an option without effect."""
    if cautious:
        raise ValueError(
            "cautious=True with a direction that always has the gradient's sign: there is "
            "nothing to leave out. Allowed is cautious=False"
        )
    check_number("power of the step", "r", r)
    check_number("power of the learning rate", "weight_lr_power", weight_lr_power)


def check_positive_beta(label: str, name: str, beta: Any) -> None:
    """Refuse a share of x in y that is 0: x could not be told from y."""
    if isinstance(beta, float | int) and not 0.0 < beta < 1.0:
        raise ValueError(f"Invalid {label}: {name}={beta}: allowed are numbers in (0, 1)")
    check_number(label, name, beta, below=1.0)


def check_schedule_free_betas(betas: Any) -> None:
    """Refuse betas of which the first is 0, or any is out of [0, 1)."""
    check_betas(betas, 2)
    check_positive_beta("beta1 parameter", "betas[0]", betas[0])
