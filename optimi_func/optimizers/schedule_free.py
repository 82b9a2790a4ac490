"""Schedule-Free SGD, AdamW and RAdam (Defazio et al. 2024): rules, values and classes.

    z <- z + u,   x <- (1 - c) * x + c * z,   y <- (1 - b1) * z + b1 * x

u is the update that the rule computes at y, and x is a weighted average of all values
of z so far. The parameter holds y. Gradients are computed at y, and the model is
evaluated at x. x is not stored, because it can be computed as
x = (y - (1 - b1) * z) / b1.
"""

from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.classes.evaluation import Evaluated
from optimi_func.core.checks import check_number
from optimi_func.core.hooks import restored
from optimi_func.core.rule import Scalar
from optimi_func.optimizers.radam import rectification
from optimi_func.rules import (
    Betas,
    Body,
    Float,
    SlowSecondMoment,
    Wide,
    functions,
    root,
    where,
)

__all__ = ["ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD"]
__all__ += ["schedule_free_adamw", "schedule_free_adamw_init", "schedule_free_adamw_step"]
__all__ += ["schedule_free_radam", "schedule_free_radam_init", "schedule_free_radam_step"]
__all__ += ["schedule_free_sgd", "schedule_free_sgd_init", "schedule_free_sgd_step"]


class Averaging(NamedTuple):
    weight: Scalar  # factor on z - y in the move of y: c, if b1 has not changed
    inner: Scalar  # factor on u in the move of y: 1 - b1 * (1 - c)
    beyond: Scalar  # (1 - b1) / b1, of the last step
    running: "Running"  # after the step


class ScheduleFreeOptimizer(Evaluated, Body):
    """Base class of the Schedule-Free optimizers.

    In every storage mode, z is stored in float32, and v is stored in float32 or in 8 bits.
    bfloat16 could not represent the small changes in z and v. lr may have a schedule.

    Args:
        betas: b1 and b2. b1, in (0, 1), is the weight given to x in y = (1 - b1) * z +
            b1 * x. b2, in [0, 1), is the fraction of v that carries over from one step to
            the next.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True. Weight decay is computed from y, not from
            z.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment.
        warmup_steps: Number of steps over which lr grows linearly from 0.
        r: The weight of step t in the average is proportional to t^r.
        weight_lr_power: The weight of a step in the average is proportional to
            lr_max^weight_lr_power, where lr_max is the largest learning rate so far, with
            the warmup applied.
    """

    class Running(NamedTuple):
        weight_sum: Scalar = 0.0  # W: the sum of all weights
        lr_max: Scalar = 0.0  # the largest lr, after its warmup
        beta1: Scalar = 0.0  # b1 of the last step, which made y; 0 while W is 0

    def share(self: Any) -> Scalar:
        """Return b1, the weight given to x in y."""
        return self.betas[0]

    def warmed(self: Any, t: Scalar) -> Scalar:
        """Return the factor by which the warmup multiplies lr at step t."""
        warmup = self.warmup_steps
        return where(t < warmup, t / where(warmup > 0, warmup, 1.0), 1.0)

    def averaging(self: Any, t: Scalar, r: "Running") -> Averaging:
        """Return the coefficients with which step t updates the averages."""
        b1, now = self.share(), self.lr * self.warmed(t)
        top = where(now > r.lr_max, now, r.lr_max)
        # The derivative of a power of 0 is not finite, so another base takes its place.
        any_lr = top > 0
        of_none = where(self.weight_lr_power == 0, 1.0, 0.0)
        w = where(any_lr, where(any_lr, top, 1.0) ** self.weight_lr_power, of_none)
        w = w * t**self.r
        total = r.weight_sum + w
        any_weight = total > 0
        c = where(any_weight, w / where(any_weight, total, 1.0), 0.0)
        inner = 1.0 - b1 * (1.0 - c)
        # x follows from y by the b1 that y was made with.
        before = where(r.beta1 == 0, b1, r.beta1)
        # A tensor may be 0, though no number may: x is lost then, but derivatives stay
        # finite.
        beyond = 1.0 / where(before == 0, 1.0, before) - 1.0
        weight = where(before == b1, c, inner - (1.0 - inner) * beyond)
        after = self.Running(total, top, where(any_weight, b1, r.beta1))
        return Averaging(weight, inner, beyond, after)

    def z_of(self, x: Tensor, s: "SGDState | State", r: Running) -> Tensor:
        """Return z before a step, or the parameter itself if no step has moved it."""
        return s.z + where(r.weight_sum == 0, 1.0, 0.0) * (x - s.z)

    def after(self, x: Tensor, u: Tensor, s: "SGDState | State", t: float, r: Running):
        a, z, u = self.averaging(t, r), self.z_of(x, s, r), self.warmed(t) * u
        return a.weight * (z - x) + a.inner * u, s._replace(z=z + u)

    def eval_point(self, x: Tensor, s: "SGDState | State", t: float, r: Running):
        return x + self.averaging(t, r).beyond * (x - self.z_of(x, s, r))

    def check(self: Any) -> None:
        # If it were 0, x could not be computed from y.
        check_number("beta1 parameter", "betas[0]", self.share(), above=0.0, below=1.0)
        if self.cautious or any([x.reads_gradient for x in map(restored, self.hooks)]):
            raise ValueError(
                "cautious=True with a direction that always has the gradient's sign, so "
                "that there is nothing to leave out. Allowed is cautious=False"
            )


class ScheduleFreeSGD(ScheduleFreeOptimizer, name="schedule_free_sgd"):
    """Schedule-Free SGD: SGD without a schedule, evaluated with an average of the weights.

        lr_t = lr * min(1, t / warmup_steps)
        z <- z - lr_t * (g + weight_decay * y)
        x <- (1 - c) * x + c * z,   y <- (1 - momentum) * z + momentum * x

    The gradient g is computed at the parameter y, and you evaluate the model with the
    average x. In this average, step t has the weight t^r * max(lr_1, ...,
    lr_t)^weight_lr_power. c is the weight of step t divided by the sum of all weights so
    far.

    Wherever you call `model.train()` or `model.eval()`, also call the same method on the
    optimizer. In eval mode the parameters hold the average x, and a step raises an error.
    The learning rate needs a warmup, but no other schedule.

    Args:
        lr: Learning rate, usually ten times the learning rate of SGD with a momentum of
            0.9.
        momentum: The fraction of y that x contributes, between 0 and 1. The rest is z.

    Arguments not named here are described under `ScheduleFreeOptimizer` and
    `BaseOptimizer`.

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

    lr: Float = Float(1.0)
    momentum: Float = Float(0.9, "momentum", above=0.0, below=1.0)
    weight_decay: Float = Float(0.0)
    warmup_steps: Float = Float(0, "warmup", argument=int)
    r: Float = Float(0.0, "power of the step")
    weight_lr_power: Float = Float(2.0, "power of the learning rate")

    class State(NamedTuple):
        z: Wide  # the parameter is y

    def share(self) -> Scalar:
        return self.momentum

    def direction(self, g: Tensor, s: State, t: float, r: ScheduleFreeOptimizer.Running):
        return g, s, self.averaging(t, r).running


class Squares(ScheduleFreeOptimizer):
    """Base class of the Schedule-Free optimizers with a second moment."""

    lr: Float = Float(2.5e-3)
    betas: Betas = Betas(0.9, 0.999)
    weight_decay: Float = Float(0.0)
    eps: Float = Float(1e-8, "epsilon")

    class State(NamedTuple):
        z: Wide  # the parameter is y
        exp_avg_sq: SlowSecondMoment  # v

    def direction(self, g: Tensor, s: State, t: float, r: ScheduleFreeOptimizer.Running):
        _, b2 = self.betas
        v = b2 * s.exp_avg_sq + (1 - b2) * (g * g)
        d = self.divided(g, 1 / (1 - b2**t) ** 0.5 * root(v) + self.eps, t)
        return d, self.State(s.z, v), self.averaging(t, r).running

    def divided(self, g: Tensor, root: Tensor, t: float) -> Tensor:
        """Return the gradient, divided by sqrt(vhat) + eps."""
        return g / root


class ScheduleFreeAdamW(Squares, name="schedule_free_adamw"):
    """Schedule-Free AdamW: AdamW without a schedule, evaluated with averaged weights.

        v <- b2 * v + (1 - b2) * g^2,   lr_t = lr * min(1, t / warmup_steps)
        z <- z - lr_t * (g / (sqrt(vhat) + eps) + weight_decay * y)
        x <- (1 - c) * x + c * z,   y <- (1 - b1) * z + b1 * x

    Here vhat = v / (1 - b2^t). The gradient g is computed at the parameter y, and you
    evaluate the model with the average x. In this average, step t has the weight t^r *
    max(lr_1, ..., lr_t)^weight_lr_power. c is the weight of step t divided by the sum of
    all weights so far.

    Wherever you call `model.train()` or `model.eval()`, also call the same method on the
    optimizer. In eval mode the parameters hold the average x, and a step raises an error.
    The learning rate needs a warmup, but no other schedule.

    Args:
        lr: Learning rate, usually larger than AdamW's.

    Arguments not named here are described under `ScheduleFreeOptimizer` and
    `BaseOptimizer`.

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

    warmup_steps: Float = Float(0, "warmup", argument=int)
    r: Float = Float(0.0, "power of the step")
    weight_lr_power: Float = Float(2.0, "power of the learning rate")


class ScheduleFreeRAdam(Squares, name="schedule_free_radam"):
    """Schedule-Free RAdam: AdamW without a schedule, with RAdam's warmup.

        rho_inf = 2 / (1 - b2) - 1,   rho = rho_inf - 2 * t * b2^t / (1 - b2^t)
        r_t^2 = (rho - 4)(rho - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho)
        lr_t = lr * r_t  once rho > 4, before: 0

    All other formulas are the same as in `ScheduleFreeAdamW`. With silent_sgd_phase=False,
    steps with rho <= 4 are SGD steps: z <- z - lr * (g + weight_decay * y).

    Wherever you call `model.train()` or `model.eval()`, also call the same method on the
    optimizer. In eval mode the parameters hold the average x, and a step raises an error.
    The learning rate needs no warmup or any other schedule.

    Args:
        lr: Learning rate, usually larger than RAdam's.
        silent_sgd_phase: Do not move the parameters while rho <= 4. With
            silent_sgd_phase=False, steps with rho <= 4 are SGD steps with weight decay.

    Arguments not named here are described under `ScheduleFreeOptimizer` and
    `BaseOptimizer`.

    References:
        Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, as in the
        authors' package schedulefree; Liu et al., "On the Variance of the Adaptive Learning
        Rate", arXiv:1908.03265.

    >>> w = torch.ones(2, requires_grad=True)
    >>> betas = 0.9, 0.99
    >>> optimizer = ScheduleFreeRAdam([w], lr=0.1, betas=betas, compile=False)
    >>> for _ in range(6):
    ...     w.grad = torch.ones(2)
    ...     optimizer.step()
    >>> w.detach()  # the first four steps do not move w
    tensor([0.9886, 0.9886])
    """

    r: Float = Float(0.0, "power of the step")
    weight_lr_power: Float = Float(2.0, "power of the learning rate")
    silent_sgd_phase: bool = True

    def warmed(self, t: Scalar) -> Scalar:
        enough, rectified = rectification(t, self.betas[1], 4.0)
        return where(enough, rectified, 0.0 if self.silent_sgd_phase else 1.0)

    def divided(self, g: Tensor, root: Tensor, t: float) -> Tensor:
        enough, _ = rectification(t, self.betas[1], 4.0)
        # One of the two scalars is 0, because a branch would need another graph.
        return g * (where(enough, 1.0, 0.0) / root + where(enough, 0.0, 1.0))


# Their names in trees that were saved earlier.
SGDState = ScheduleFreeSGD.State
State = Squares.State
Running = ScheduleFreeOptimizer.Running
schedule_free_sgd, schedule_free_sgd_init, schedule_free_sgd_step = functions(
    ScheduleFreeSGD
)
schedule_free_adamw, schedule_free_adamw_init, schedule_free_adamw_step = functions(
    ScheduleFreeAdamW
)
schedule_free_radam, schedule_free_radam_init, schedule_free_radam_step = functions(
    ScheduleFreeRAdam
)
