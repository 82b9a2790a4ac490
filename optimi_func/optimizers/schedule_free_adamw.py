"""Schedule-Free AdamW (Defazio et al. 2024): the rule, the pure optimizer and the class."""

from dataclasses import InitVar, dataclass
from typing import NamedTuple

from torch import Tensor

from optimi_func._checks import check_number
from optimi_func._functional import FunctionalOptimizer, Number
from optimi_func._math import power, root, slow_moment, slow_second_moment, sqrt, warmed
from optimi_func._rule import Direction, MomentStorage, Rule, Scalar
from optimi_func.optimizers._evaluation import Evaluated
from optimi_func.optimizers._forms import init_function, step_function
from optimi_func.optimizers._schedule_free import (
    Averaging,
    Running,
    after,
    averaging,
    check_averaging,
    check_schedule_free_betas,
    eval_point,
)

__all__ = [
    "ScheduleFreeAdamW",
    "schedule_free_adamw",
    "schedule_free_adamw_init",
    "schedule_free_adamw_step",
]

# The rule


class State(NamedTuple):
    z: Tensor  # where the steps go, at least float32; y is the parameter
    exp_avg_sq: Tensor  # v


class Coeffs(NamedTuple):
    averaging: Averaging
    beta2: Scalar
    one_minus_beta2: Scalar
    inv_sqrt_bias_correction2: Scalar  # 1 / sqrt(1 - b2^t)
    eps: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(slow_moment(p), slow_second_moment(p, kept))


def coeffs(
    t: Scalar,
    lr: Scalar,
    running: Running,
    *,
    betas: tuple[Scalar, Scalar],
    eps: Scalar,
    warmup_steps: Scalar,
    r: Scalar,
    weight_lr_power: Scalar,
) -> tuple[Coeffs, Running]:
    b1, b2 = betas
    share = warmed(t, warmup_steps)
    average, running = averaging(t, lr, running, share, b1, r, weight_lr_power)
    return Coeffs(average, b2, 1.0 - b2, 1.0 / sqrt(1.0 - power(b2, t)), eps), running


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    v = c.beta2 * s.exp_avg_sq + c.one_minus_beta2 * (g * g)
    d = g / (c.inv_sqrt_bias_correction2 * root(v) + c.eps)
    return Direction(d, State(s.z, v))


schedule_free_adamw_rule = Rule(
    "schedule_free_adamw",
    State,
    init,
    coeffs,
    direction,
    after=after,
    running=Running,
    eval_point=eval_point,
)

# The pure optimizer


@dataclass(frozen=True, kw_only=True, repr=False)
class schedule_free_adamw(FunctionalOptimizer, rule=schedule_free_adamw_rule):
    """`ScheduleFreeAdamW` as a value: `init`, `step` and `eval_params` over a tree."""

    betas: tuple[Number, Number] = (0.9, 0.999)
    eps: Number = 1e-8
    warmup_steps: Number = 0
    r: Number = 0.0
    weight_lr_power: Number = 2.0

    @property
    def narrow_betas(self) -> tuple[Number, ...]:
        return ()

    def check(self) -> None:
        super().check()
        check_schedule_free_betas(self.betas)
        check_number("warmup", "warmup_steps", self.warmup_steps)
        check_averaging(self.r, self.weight_lr_power, self.cautious)


schedule_free_adamw_init = init_function(schedule_free_adamw_rule, "schedule_free_adamw")
schedule_free_adamw_step = step_function(schedule_free_adamw)

# The class


class ScheduleFreeAdamW(Evaluated):
    """Schedule-Free AdamW: AdamW without a schedule, by an average of where it has been.

        v <- b2 * v + (1 - b2) * g^2,   lr_t = lr * min(1, t / warmup_steps)
        z <- z - lr_t * (g / (sqrt(vhat) + eps) + weight_decay * y)
        x <- (1 - c) * x + c * z,   y <- (1 - b1) * z + b1 * x

    with g at y, which is the parameter, vhat = v / (1 - b2^t), and c the share of this
    step's weight t^r * max(lr_1, ..., lr_t)^weight_lr_power in the sum of all.

    Call `train()` and `eval()` where the model's are called: from `eval()` to `train()` the
    parameters are x, and no step can be taken. lr needs no schedule but its warmup, and may
    have one. z is float32 whatever the storage, and so is v where it is not in
    codes: bfloat16 could not follow them.

    Args:
        params: Parameters, named parameters, or param groups.
        lr: Learning rate, a number or a tensor of one element; larger than AdamW's, as a
            rule.
        betas: b1, in (0, 1), the share of x in y; b2, in [0, 1), how much of v a step
            keeps.
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr; at y.
        eps: Added to the root, after the bias correction.
        warmup_steps: Steps over which lr grows from 0, linearly.
        r: The power of the step count in a step's weight in the average.
        weight_lr_power: The power of the largest lr so far, warmup in it, in that weight.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    Raises:
        ValueError: A hyperparameter out of its range, or options that exclude each other.

    References:
        Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, as the authors'
        package schedulefree has it.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = ScheduleFreeAdamW([w], lr=0.1, compile=False)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(2)
    ...     optimizer.step()
    >>> w.detach()
    tensor([0.8450, 0.8450])
    >>> optimizer.eval()
    >>> w.detach()  # the mean of 0.9 and 0.8
    tensor([0.8500, 0.8500])
    """

    factory = schedule_free_adamw

    lr: InitVar[float | Tensor] = 2.5e-3
    betas: InitVar[tuple[float, float]] = (0.9, 0.999)
    weight_decay: InitVar[float] = 0.0
    eps: InitVar[float] = 1e-8
    warmup_steps: InitVar[int] = 0
    r: InitVar[float] = 0.0
    weight_lr_power: InitVar[float] = 2.0
