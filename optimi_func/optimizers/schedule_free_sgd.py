"""Schedule-Free SGD (Defazio et al. 2024): the rule, the pure optimizer and the class."""

from dataclasses import InitVar, dataclass
from typing import NamedTuple

from torch import Tensor

from optimi_func._checks import check_number
from optimi_func._functional import FunctionalOptimizer, Number
from optimi_func._math import slow_moment, warmed
from optimi_func._rule import MomentStorage, Rule, Scalar, along_gradient
from optimi_func.optimizers._evaluation import Evaluated
from optimi_func.optimizers._forms import init_function, step_function
from optimi_func.optimizers._schedule_free import (
    Averaging,
    Running,
    after,
    averaging,
    check_averaging,
    check_positive_beta,
    eval_point,
)

__all__ = [
    "ScheduleFreeSGD",
    "schedule_free_sgd",
    "schedule_free_sgd_init",
    "schedule_free_sgd_step",
]

# The rule


class State(NamedTuple):
    z: Tensor  # where the steps go, at least float32; y is the parameter


class Coeffs(NamedTuple):
    averaging: Averaging


def init(p: Tensor, kept: MomentStorage) -> State:
    del kept
    return State(slow_moment(p))


def coeffs(
    t: Scalar,
    lr: Scalar,
    running: Running,
    *,
    momentum: Scalar,
    warmup_steps: Scalar,
    r: Scalar,
    weight_lr_power: Scalar,
) -> tuple[Coeffs, Running]:
    share = warmed(t, warmup_steps)
    average, running = averaging(t, lr, running, share, momentum, r, weight_lr_power)
    return Coeffs(average), running


schedule_free_sgd_rule = Rule(
    "schedule_free_sgd",
    State,
    init,
    coeffs,
    along_gradient,
    after=after,
    running=Running,
    eval_point=eval_point,
)

# The pure optimizer


@dataclass(frozen=True, kw_only=True, repr=False)
class schedule_free_sgd(FunctionalOptimizer, rule=schedule_free_sgd_rule):
    """`ScheduleFreeSGD` as a value: `init`, `step` and `eval_params` over a tree."""

    momentum: Number = 0.9
    warmup_steps: Number = 0
    r: Number = 0.0
    weight_lr_power: Number = 2.0

    def check(self) -> None:
        super().check()
        check_positive_beta("momentum", "momentum", self.momentum)
        check_number("warmup", "warmup_steps", self.warmup_steps)
        check_averaging(self.r, self.weight_lr_power, self.cautious)


schedule_free_sgd_init = init_function(schedule_free_sgd_rule, "schedule_free_sgd")
schedule_free_sgd_step = step_function(schedule_free_sgd)

# The class


class ScheduleFreeSGD(Evaluated):
    """Schedule-Free SGD: SGD without a schedule, by an average of where it has been.

        lr_t = lr * min(1, t / warmup_steps),   z <- z - lr_t * (g + weight_decay * y)
        x <- (1 - c) * x + c * z,   y <- (1 - momentum) * z + momentum * x

    with g at y, which is the parameter, and c the share of this step's weight
    t^r * max(lr_1, ..., lr_t)^weight_lr_power in the sum of all.

    Call `train()` and `eval()` where the model's are called: from `eval()` to `train()` the
    parameters are x, and no step can be taken. lr needs no schedule but its warmup, and may
    have one. z is float32 whatever the storage: bfloat16 could not follow it.

    Args:
        params: Parameters, named parameters, or param groups.
        lr: Learning rate, a number or a tensor of one element; ten times that of SGD with
            momentum 0.9, as a rule.
        momentum: The share of x in y, in (0, 1).
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr; at y.
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
    >>> optimizer = ScheduleFreeSGD([w], lr=0.1, compile=False)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(2)
    ...     optimizer.step()
    >>> w.detach()
    tensor([0.8450, 0.8450])
    >>> optimizer.eval()
    >>> w.detach()  # the mean of 0.9 and 0.8
    tensor([0.8500, 0.8500])
    """

    factory = schedule_free_sgd

    lr: InitVar[float | Tensor] = 1.0
    momentum: InitVar[float] = 0.9
    weight_decay: InitVar[float] = 0.0
    warmup_steps: InitVar[int] = 0
    r: InitVar[float] = 0.0
    weight_lr_power: InitVar[float] = 2.0
