"""Schedule-Free RAdam (Defazio et al. 2024): the rule, the pure optimizer and the class."""

from dataclasses import InitVar, dataclass
from typing import NamedTuple

from torch import Tensor

from optimi_func._functional import FunctionalOptimizer, Number
from optimi_func._math import choose, power, root, sqrt
from optimi_func._rule import Direction, Rule, Scalar
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
from optimi_func.optimizers.radam import rectification
from optimi_func.optimizers.schedule_free_adamw import State, init

__all__ = [
    "ScheduleFreeRAdam",
    "schedule_free_radam",
    "schedule_free_radam_init",
    "schedule_free_radam_step",
]

# The rule


class Coeffs(NamedTuple):
    averaging: Averaging
    beta2: Scalar
    one_minus_beta2: Scalar
    inv_sqrt_bias_correction2: Scalar  # 1 / sqrt(1 - b2^t)
    eps: Scalar
    adaptive: Scalar  # 1 once rho > 4, before that 0
    plain: Scalar  # 1 before that, then 0


def coeffs(
    t: Scalar,
    lr: Scalar,
    running: Running,
    *,
    betas: tuple[Scalar, Scalar],
    eps: Scalar,
    r: Scalar,
    weight_lr_power: Scalar,
    silent_sgd_phase: bool,
) -> tuple[Coeffs, Running]:
    b1, b2 = betas
    enough, rectified = rectification(t, b2, 4.0)
    share = choose(enough, rectified, 0.0 if silent_sgd_phase else 1.0)
    average, running = averaging(t, lr, running, share, b1, r, weight_lr_power)
    adaptive = choose(enough, 1.0, 0.0), choose(enough, 0.0, 1.0)
    inverse = 1.0 / sqrt(1.0 - power(b2, t))
    return Coeffs(average, b2, 1.0 - b2, inverse, eps, *adaptive), running


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    v = c.beta2 * s.exp_avg_sq + c.one_minus_beta2 * (g * g)
    # One of two scalars is 0: a branch would be another graph.
    denominator = c.inv_sqrt_bias_correction2 * root(v) + c.eps
    return Direction(g * (c.adaptive / denominator + c.plain), State(s.z, v))


schedule_free_radam_rule = Rule(
    "schedule_free_radam",
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
class schedule_free_radam(FunctionalOptimizer, rule=schedule_free_radam_rule):
    """`ScheduleFreeRAdam` as a value: `init`, `step` and `eval_params` over a tree."""

    betas: tuple[Number, Number] = (0.9, 0.999)
    eps: Number = 1e-8
    r: Number = 0.0
    weight_lr_power: Number = 2.0
    silent_sgd_phase: bool = True

    @property
    def narrow_betas(self) -> tuple[Number, ...]:
        return ()

    def check(self) -> None:
        super().check()
        check_schedule_free_betas(self.betas)
        check_averaging(self.r, self.weight_lr_power, self.cautious)


schedule_free_radam_init = init_function(schedule_free_radam_rule, "schedule_free_radam")
schedule_free_radam_step = step_function(schedule_free_radam)

# The class


class ScheduleFreeRAdam(Evaluated):
    """Schedule-Free RAdam: Schedule-Free AdamW that warms up as RAdam does.

        rho_inf = 2 / (1 - b2) - 1,   rho = rho_inf - 2 * t * b2^t / (1 - b2^t)
        r_t^2 = (rho - 4)(rho - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho)
        lr_t = lr * r_t  once rho > 4, before: 0

    and the rest as in `ScheduleFreeAdamW`. With silent_sgd_phase=False the steps before
    rho > 4 are z <- z - lr * (g + weight_decay * y).

    Call `train()` and `eval()` where the model's are called: from `eval()` to `train()` the
    parameters are x, and no step can be taken. lr needs neither schedule nor warmup, and
    may have them. z is float32 whatever the storage, and so is v where it is not in
    codes: bfloat16 could not follow them.

    Args:
        params: Parameters, named parameters, or param groups.
        lr: Learning rate, a number or a tensor of one element; larger than RAdam's, as a
            rule.
        betas: b1, in (0, 1), the share of x in y; b2, in [0, 1), how much of v a step
            keeps.
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr; at y.
        eps: Added to the root, after the bias correction.
        r: The power of the step count in a step's weight in the average.
        weight_lr_power: The power of the largest lr so far, warmup in it, in that weight.
        silent_sgd_phase: Move nothing while rho <= 4; False: by lr * g, and decay.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    Raises:
        ValueError: A hyperparameter out of its range, or options that exclude each other.

    References:
        Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, as the authors'
        package schedulefree has it; Liu et al., "On the Variance of the Adaptive Learning
        Rate", arXiv:1908.03265.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = ScheduleFreeRAdam([w], lr=0.1, betas=(0.9, 0.99), compile=False)
    >>> for _ in range(6):
    ...     w.grad = torch.ones(2)
    ...     optimizer.step()
    >>> w.detach()  # four steps have only measured
    tensor([0.9886, 0.9886])
    """

    factory = schedule_free_radam

    lr: InitVar[float | Tensor] = 2.5e-3
    betas: InitVar[tuple[float, float]] = (0.9, 0.999)
    weight_decay: InitVar[float] = 0.0
    eps: InitVar[float] = 1e-8
    r: InitVar[float] = 0.0
    weight_lr_power: InitVar[float] = 2.0
    silent_sgd_phase: InitVar[bool] = True
