"""Schedule-Free SGD, AdamW and RAdam (Defazio et al. 2024): rules, values and classes.

    z <- z + u,   x <- (1 - c) * x + c * z,   y <- (1 - b1) * z + b1 * x

u is the move of the rule, computed at y, and x is the weighted average of all z. The
parameter is y, where gradients are taken; the model is evaluated at x. x is not stored,
because x = (y - (1 - b1) * z) / b1.
"""

from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.classes.evaluation import Evaluated
from optimi_func.classes.fields import Float
from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.checks import check_number
from optimi_func.core.math import (
    choose,
    power,
    root,
    slow_moment,
    slow_second_moment,
    sqrt,
    warmed,
)
from optimi_func.core.rule import Direction, MomentStorage, Rule, Scalar, along_gradient
from optimi_func.optimizers.radam import rectification
from optimi_func.pure.functional import FunctionalOptimizer, Number

__all__ = [
    "ScheduleFreeAdamW",
    "ScheduleFreeRAdam",
    "ScheduleFreeSGD",
    "schedule_free_adamw",
    "schedule_free_adamw_init",
    "schedule_free_adamw_step",
    "schedule_free_radam",
    "schedule_free_radam_init",
    "schedule_free_radam_step",
    "schedule_free_sgd",
    "schedule_free_sgd_init",
    "schedule_free_sgd_step",
]


class Running(NamedTuple):
    weight_sum: Scalar = 0.0  # W: the sum of all weights
    lr_max: Scalar = 0.0  # the largest lr, after its warmup
    beta1: Scalar = 0.0  # b1 of the last step, which made y; 0 while W is 0


class Averaging(NamedTuple):
    warmed: Scalar  # factor on lr, for its warmup
    begins: Scalar  # 1 while W is 0, when nothing has moved and z is y; then 0
    weight: Scalar  # factor on z - y in the move of y: c, if b1 has not changed
    inner: Scalar  # factor on u in the move of y: 1 - b1 * (1 - c)
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
    """Return the averaging of step t, and `running` after it."""
    now = lr * warmed
    top = choose(now > running.lr_max, now, running.lr_max)
    # The derivative of a power of 0 is not finite, so another base takes its place.
    moved = top > 0
    of_none = choose(weight_lr_power == 0, 1.0, 0.0)
    w = choose(moved, choose(moved, top, 1.0) ** weight_lr_power, of_none) * t**r
    total = running.weight_sum + w
    some = total > 0
    c = choose(some, w / choose(some, total, 1.0), 0.0)
    begins = choose(running.weight_sum == 0, 1.0, 0.0)
    inner = 1.0 - beta1 * (1.0 - c)
    # x follows from y by the b1 that y was made with.
    before = choose(running.beta1 == 0, beta1, running.beta1)
    # A tensor may be 0, though no number may: x is lost then, but derivatives stay finite.
    beyond = 1.0 / choose(before == 0, 1.0, before) - 1.0
    weight = choose(before == beta1, c, inner - (1.0 - inner) * beyond)
    found = Averaging(warmed, begins, weight, inner, beyond)
    return found, Running(total, top, choose(some, beta1, running.beta1))


def z_of(x: Tensor, z: Tensor, c: Averaging) -> Tensor:
    """Return z before a step: the parameter itself if no step has moved it."""
    return z + c.begins * (x - z)


def after(x: Tensor, u: Tensor, s: Any, c: Any) -> tuple[Tensor, Any]:
    a: Averaging = c.averaging
    z = z_of(x, s.z, a)
    u = a.warmed * u
    return a.weight * (z - x) + a.inner * u, s._replace(z=z + u)


def eval_point(x: Tensor, s: Any, c: Any) -> Tensor:
    a: Averaging = c.averaging
    return x + a.beyond * (x - z_of(x, s.z, a))


class SGDState(NamedTuple):
    z: Tensor  # at least float32; the parameter is y


class State(NamedTuple):
    z: Tensor  # at least float32; the parameter is y
    exp_avg_sq: Tensor  # v


class SGDCoeffs(NamedTuple):
    averaging: Averaging


class AdamWCoeffs(NamedTuple):
    averaging: Averaging
    beta2: Scalar
    one_minus_beta2: Scalar
    inv_sqrt_bias_correction2: Scalar  # 1 / sqrt(1 - b2^t)
    eps: Scalar


class RAdamCoeffs(NamedTuple):
    averaging: Averaging
    beta2: Scalar
    one_minus_beta2: Scalar
    inv_sqrt_bias_correction2: Scalar  # 1 / sqrt(1 - b2^t)
    eps: Scalar
    adaptive: Scalar  # 1 once rho > 4, before that 0
    plain: Scalar  # 1 before that, then 0


def sgd_init(p: Tensor, kept: MomentStorage) -> SGDState:
    del kept
    return SGDState(slow_moment(p))


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(slow_moment(p), slow_second_moment(p, kept))


def sgd_coeffs(
    t: Scalar,
    lr: Scalar,
    running: Running,
    *,
    momentum: Scalar,
    warmup_steps: Scalar,
    r: Scalar,
    weight_lr_power: Scalar,
) -> tuple[SGDCoeffs, Running]:
    share = warmed(t, warmup_steps)
    average, running = averaging(t, lr, running, share, momentum, r, weight_lr_power)
    return SGDCoeffs(average), running


def adamw_coeffs(
    t: Scalar,
    lr: Scalar,
    running: Running,
    *,
    betas: tuple[Scalar, Scalar],
    eps: Scalar,
    warmup_steps: Scalar,
    r: Scalar,
    weight_lr_power: Scalar,
) -> tuple[AdamWCoeffs, Running]:
    b1, b2 = betas
    share = warmed(t, warmup_steps)
    average, running = averaging(t, lr, running, share, b1, r, weight_lr_power)
    rest = b2, 1.0 - b2, 1.0 / sqrt(1.0 - power(b2, t)), eps
    return AdamWCoeffs(average, *rest), running


def radam_coeffs(
    t: Scalar,
    lr: Scalar,
    running: Running,
    *,
    betas: tuple[Scalar, Scalar],
    eps: Scalar,
    r: Scalar,
    weight_lr_power: Scalar,
    silent_sgd_phase: bool,
) -> tuple[RAdamCoeffs, Running]:
    b1, b2 = betas
    enough, rectified = rectification(t, b2, 4.0)
    share = choose(enough, rectified, 0.0 if silent_sgd_phase else 1.0)
    average, running = averaging(t, lr, running, share, b1, r, weight_lr_power)
    adaptive = choose(enough, 1.0, 0.0), choose(enough, 0.0, 1.0)
    inverse = 1.0 / sqrt(1.0 - power(b2, t))
    return RAdamCoeffs(average, b2, 1.0 - b2, inverse, eps, *adaptive), running


def second_moment(
    g: Tensor, s: State, c: AdamWCoeffs | RAdamCoeffs
) -> tuple[Tensor, State]:
    """Return the denominator sqrt(vhat) + eps, and the state with the new v."""
    v = c.beta2 * s.exp_avg_sq + c.one_minus_beta2 * (g * g)
    return c.inv_sqrt_bias_correction2 * root(v) + c.eps, State(s.z, v)


def adamw_direction(g: Tensor, s: State, c: AdamWCoeffs) -> Direction:
    denominator, new = second_moment(g, s, c)
    return Direction(g / denominator, new)


def radam_direction(g: Tensor, s: State, c: RAdamCoeffs) -> Direction:
    denominator, new = second_moment(g, s, c)
    # One of the two scalars is 0, because a branch would need another graph.
    return Direction(g * (c.adaptive / denominator + c.plain), new)


averaged = partial(Rule, after=after, running=Running, eval_point=eval_point)
sgd_rule = averaged("schedule_free_sgd", SGDState, sgd_init, sgd_coeffs, along_gradient)
adamw_rule = averaged("schedule_free_adamw", State, init, adamw_coeffs, adamw_direction)
radam_rule = averaged("schedule_free_radam", State, init, radam_coeffs, radam_direction)


@dataclass(frozen=True, kw_only=True, repr=False)
class ScheduleFree(FunctionalOptimizer):
    """Base class of the pure optimizers, with the checks of their hyperparameters."""

    narrow = 0

    lr: Number = 2.5e-3
    r: Number = 0.0
    weight_lr_power: Number = 2.0

    def check(self) -> None:
        super().check()
        own: Any = self
        if hasattr(self, "betas"):
            label, name, beta = "beta1 parameter", "betas[0]", own.betas[0]
        else:
            label, name, beta = "momentum", "momentum", own.momentum
        # If it were 0, x could not be computed from y.
        check_number(label, name, beta, above=0.0, below=1.0)
        if hasattr(self, "warmup_steps"):
            check_number("warmup", "warmup_steps", own.warmup_steps)
        if self.cautious:
            raise ValueError(
                "cautious=True with a direction that always has the gradient's sign, so "
                "that there is nothing to leave out. Allowed is cautious=False"
            )
        check_number("power of the step", "r", self.r)
        check_number("power of the learning rate", "weight_lr_power", self.weight_lr_power)


@dataclass(frozen=True, kw_only=True, repr=False)
class schedule_free_sgd(ScheduleFree, rule=sgd_rule):
    """`ScheduleFreeSGD` as a value: `init`, `step` and `eval_params` over a tree."""

    lr: Number = 1.0
    momentum: Number = 0.9
    warmup_steps: Number = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class schedule_free_adamw(ScheduleFree, rule=adamw_rule):
    """`ScheduleFreeAdamW` as a value: `init`, `step` and `eval_params` over a tree."""

    betas: tuple[Number, Number] = (0.9, 0.999)
    eps: Number = 1e-8
    warmup_steps: Number = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class schedule_free_radam(ScheduleFree, rule=radam_rule):
    """`ScheduleFreeRAdam` as a value: `init`, `step` and `eval_params` over a tree."""

    betas: tuple[Number, Number] = (0.9, 0.999)
    eps: Number = 1e-8
    silent_sgd_phase: bool = True


schedule_free_sgd_init = init_function(sgd_rule)
schedule_free_sgd_step = step_function(schedule_free_sgd)
schedule_free_adamw_init = init_function(adamw_rule)
schedule_free_adamw_step = step_function(schedule_free_adamw)
schedule_free_radam_init = init_function(radam_rule)
schedule_free_radam_step = step_function(schedule_free_radam)


class ScheduleFreeOptimizer(Evaluated):
    """Base class of the Schedule-Free optimizers.

    z is float32 whatever the storage, and so is v unless it is in 8 bits, because bfloat16
    could not follow them. lr may have a schedule.

    Args:
        betas: b1, in (0, 1), the share of x in y; b2, in [0, 1), how much of v a step
            keeps.
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr; at y.
        eps: Added to the root, after the bias correction.
        warmup_steps: Steps over which lr grows from 0, linearly.
        r: The power of the step count in a step's weight in the average.
        weight_lr_power: The power of the largest lr so far, warmup in it, in that weight.
    """


class ScheduleFreeSGD(ScheduleFreeOptimizer):
    """Schedule-Free SGD: SGD without a schedule, by an average of its past points.

        lr_t = lr * min(1, t / warmup_steps),   z <- z - lr_t * (g + weight_decay * y)
        x <- (1 - c) * x + c * z,   y <- (1 - momentum) * z + momentum * x

    with g at y, which is the parameter, and c the share of this step's weight
    t^r * max(lr_1, ..., lr_t)^weight_lr_power in the sum of all.

    Call `train()` and `eval()` where the model's are called. From `eval()` to `train()` the
    parameters are x, and no step can be taken. lr needs no schedule but its warmup.

    Args:
        lr: Learning rate, usually ten times that of SGD with momentum 0.9.
        momentum: The share of x in y, in (0, 1).

    Arguments not named here are those of `ScheduleFreeOptimizer` and `BaseOptimizer`.

    References:
        Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, as in the
        authors' package schedulefree.

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

    lr: Float = Float(1.0)
    momentum: InitVar[float] = 0.9
    weight_decay: InitVar[float] = 0.0
    warmup_steps: InitVar[int] = 0
    r: InitVar[float] = 0.0
    weight_lr_power: InitVar[float] = 2.0


class ScheduleFreeAdamW(ScheduleFreeOptimizer):
    """Schedule-Free AdamW: AdamW without a schedule, by an average of its past points.

        v <- b2 * v + (1 - b2) * g^2,   lr_t = lr * min(1, t / warmup_steps)
        z <- z - lr_t * (g / (sqrt(vhat) + eps) + weight_decay * y)
        x <- (1 - c) * x + c * z,   y <- (1 - b1) * z + b1 * x

    with g at y, which is the parameter, vhat = v / (1 - b2^t), and c the share of this
    step's weight t^r * max(lr_1, ..., lr_t)^weight_lr_power in the sum of all.

    Call `train()` and `eval()` where the model's are called. From `eval()` to `train()` the
    parameters are x, and no step can be taken. lr needs no schedule but its warmup.

    Args:
        lr: Learning rate, usually larger than AdamW's.

    Arguments not named here are those of `ScheduleFreeOptimizer` and `BaseOptimizer`.

    References:
        Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, as in the
        authors' package schedulefree.

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

    lr: Float = Float(2.5e-3)
    betas: InitVar[tuple[float, float]] = (0.9, 0.999)
    weight_decay: InitVar[float] = 0.0
    eps: InitVar[float] = 1e-8
    warmup_steps: InitVar[int] = 0
    r: InitVar[float] = 0.0
    weight_lr_power: InitVar[float] = 2.0


class ScheduleFreeRAdam(ScheduleFreeOptimizer):
    """Schedule-Free RAdam: Schedule-Free AdamW that warms up as RAdam does.

        rho_inf = 2 / (1 - b2) - 1,   rho = rho_inf - 2 * t * b2^t / (1 - b2^t)
        r_t^2 = (rho - 4)(rho - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho)
        lr_t = lr * r_t  once rho > 4, before: 0

    and the rest as in `ScheduleFreeAdamW`. With silent_sgd_phase=False the steps before
    rho > 4 are z <- z - lr * (g + weight_decay * y).

    Call `train()` and `eval()` where the model's are called. From `eval()` to `train()` the
    parameters are x, and no step can be taken. lr needs neither schedule nor warmup.

    Args:
        lr: Learning rate, usually larger than RAdam's.
        silent_sgd_phase: Move nothing while rho <= 4. False: move by lr * g and decay.

    Arguments not named here are those of `ScheduleFreeOptimizer` and `BaseOptimizer`.

    References:
        Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, as in the
        authors' package schedulefree; Liu et al., "On the Variance of the Adaptive Learning
        Rate", arXiv:1908.03265.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = ScheduleFreeRAdam([w], lr=0.1, betas=(0.9, 0.99), compile=False)
    >>> for _ in range(6):
    ...     w.grad = torch.ones(2)
    ...     optimizer.step()
    >>> w.detach()  # four steps have only measured
    tensor([0.9886, 0.9886])
    """

    factory = schedule_free_radam

    lr: Float = Float(2.5e-3)
    betas: InitVar[tuple[float, float]] = (0.9, 0.999)
    weight_decay: InitVar[float] = 0.0
    eps: InitVar[float] = 1e-8
    r: InitVar[float] = 0.0
    weight_lr_power: InitVar[float] = 2.0
    silent_sgd_phase: InitVar[bool] = True
