"""Prodigy (Mishchenko & Defazio 2023): the rule, the pure optimizer and the class."""

import math
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.classes.fields import Float
from optimi_func.classes.forms import init_function, step_function
from optimi_func.classes.groups import Group
from optimi_func.core.checks import check_flag, check_number, warn_user
from optimi_func.core.codes import is_eligible
from optimi_func.core.math import (
    choose,
    moment,
    power,
    root,
    slow_moment,
    slow_second_moment,
    sqrt,
)
from optimi_func.core.rule import Direction, Means, MomentStorage, Rule, Scalar
from optimi_func.optimizers import _adam as adam
from optimi_func.pure.functional import FunctionalOptimizer, Number
from optimi_func.pure.tree import TreeState

__all__ = ["Prodigy", "prodigy", "prodigy_init", "prodigy_step"]


class State(NamedTuple):
    exp_avg: Tensor  # m, of d * g
    exp_avg_sq: Tensor  # v, of (d * g)^2
    s: Tensor  # at least float32
    p0: Tensor  # x0, exact in the parameter's dtype, because its compensation was 0


class Running(NamedTuple):
    d: Scalar = 0.0  # 0 before the first step, which begins with d0
    d_max: Scalar = 0.0  # the largest estimate so far
    d_numerator: Scalar = 0.0  # r


class Coeffs(NamedTuple):
    beta1: Scalar
    of_m: Scalar  # (1 - b1) * d
    beta2: Scalar
    of_v: Scalar  # (1 - b2) * d^2
    beta3: Scalar
    of_s: Scalar  # d / d0 * lr_t, or d / d0 * d (safeguard_warmup)
    weight: Scalar  # of <g, x0 - x> in r: d / d0 * lr_t
    eps: Scalar  # d * eps
    move: Scalar  # lr_t / lr
    d0: Scalar
    d_coef: Scalar
    growth_rate: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    own = p.dtype if kept == "8bit" and not is_eligible(p) else kept
    if own == torch.float16:
        kept = torch.float32  # in float16 d * g would be 0 as long as d is small
    return State(moment(p, kept), slow_second_moment(p, kept), slow_moment(p), p.clone())


def coeffs(
    t: Scalar,
    lr: Scalar,
    running: Running,
    *,
    betas: tuple[Scalar, Scalar],
    beta3: Scalar | None,
    eps: Scalar,
    d0: Scalar,
    d_coef: Scalar,
    growth_rate: Scalar,
    use_bias_correction: bool,
    safeguard_warmup: bool,
) -> tuple[Coeffs, Running]:
    b1, b2 = betas
    # The derivative of a root of 0 is not finite.
    root2 = choose(b2 > 0, sqrt(choose(b2 > 0, b2, 1.0)), 0.0)
    b3 = root2 if beta3 is None else beta3
    d = choose(running.d == 0, d0, running.d)
    d_max = choose(running.d == 0, d0, running.d_max)
    move = d
    if use_bias_correction:
        move = d * sqrt(1.0 - power(b2, t)) / (1.0 - power(b1, t))
    weight = d / d0 * (move * lr)
    # Where lr is 0, gradients have no part in the estimate.
    of_s = choose(lr == 0, 0.0, d / d0 * d) if safeguard_warmup else weight
    found = Coeffs(
        *(b1, (1.0 - b1) * d, b2, (1.0 - b2) * (d * d), b3, of_s, weight, d * eps, move),
        *(d0, d_coef, growth_rate),
    )
    return found, Running(d, d_max, running.d_numerator)


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    m = c.beta1 * s.exp_avg + c.of_m * g
    v = c.beta2 * s.exp_avg_sq + c.of_v * (g * g)
    new = State(m, v, c.beta3 * s.s + c.of_s * g, s.p0)
    # d is that of the step before, because the sums that follow from this gradient are not
    # known yet. The authors' code takes the new d here, their paper this.
    return Direction(m / (root(v) + c.eps), new, new)


def after(x: Tensor, u: Tensor, s: State, c: Coeffs) -> tuple[Tensor, State]:
    del x
    return c.move * u, s


def measure(
    g: Tensor, x: Tensor, d: Tensor, decaying: Tensor, shared: State, c: Coeffs
) -> list[Tensor]:
    return [c.weight * (g * (shared.p0 - x)), shared.s.abs()]


def join(running: Running, sums: list[Scalar], c: Coeffs) -> Running:
    some = sums[1] > 0  # else all gradients have been 0 so far
    r = c.beta3 * running.d_numerator + sums[0]
    estimate = c.d_coef * r / choose(some, sums[1], 1.0)
    larger = estimate > running.d_max
    d_max = choose(some, choose(larger, estimate, running.d_max), running.d_max)
    # The first estimate may be any factor above d0.
    base = choose(running.d == c.d0, choose(larger, estimate, running.d), running.d)
    unlimited = c.growth_rate == math.inf
    grown = base * choose(unlimited, 1.0, c.growth_rate)
    d = choose(unlimited | (grown > d_max), d_max, grown)
    return Running(choose(some, d, running.d), d_max, r)


prodigy_rule: Rule[Any, Any] = Rule(
    *("prodigy", State, init, coeffs, direction, after),
    means=Means(2, measure, None),
    running=Running,
    join=join,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class prodigy(adam.AdamLikeValue, rule=prodigy_rule):
    """`Prodigy` as a value: `init` and `step` over a tree of parameters."""

    narrow = 1

    lr: Number = 1.0
    betas: tuple[Number, Number] = (0.9, 0.999)
    eps: Number = 1e-8
    beta3: Number | None = None
    d0: Number = 1e-6
    d_coef: Number = 1.0
    growth_rate: Number = math.inf
    use_bias_correction: bool = False
    safeguard_warmup: bool = False

    def check(self) -> None:
        super().check()
        if self.beta3 is not None:
            check_number("beta parameter", "beta3", self.beta3, below=1.0)
        check_number("first d", "d0", self.d0, above=0.0)
        check_number("factor on d", "d_coef", self.d_coef, above=0.0)
        if not self.growth_rate == math.inf:
            check_number("growth of d", "growth_rate", self.growth_rate, least=1.0)
        if self.cautious:
            raise ValueError(
                "cautious=True with Prodigy, which estimates d for moves along "
                "m / sqrt(v), and cautious updates are up to 1000 times as long. Allowed "
                "is cautious=False"
            )


prodigy_init = init_function(prodigy_rule)
prodigy_step = step_function(prodigy)


class Prodigy(adam.AdamLike):
    """Prodigy: Adam with a learning rate d that it estimates itself.

        lr_t = d * lr,   m <- b1 * m + (1 - b1) * d * g
        v <- b2 * v + (1 - b2) * (d * g)^2,   s <- b3 * s + d / d0 * lr_t * g
        r <- b3 * r + d / d0 * lr_t * sum(g * (p0 - p))
        p <- p - lr_t * (m / (sqrt(v) + d * eps) + weight_decay * p)
        d <- max(d, d_coef * r / sum(|s|))     sums over all parameters of a param group

    with p0 the parameter before its first step. d grows from d0 for as long as the
    gradients point on, away from p0, so up to about the distance from there to the
    solution. Leave lr at 1, with a schedule that ends at 0.

    `optimizer.param_groups[i]["d"]` is the present d, for logs. It is computed and cannot
    be set: d_coef multiplies it. Each param group has its own. Groups that are loaded into
    one go on with that of its first parameter.

    As in the paper, the d at eps is that of the step before, so that gradient release gives
    the same steps. The authors' code takes the new one. s and, unless it is in 8 bits, v
    are float32 whatever the storage, because bfloat16 could not follow them. So is m in
    place of float16, which d * g underflows.

    Args:
        lr: Factor on d, usually a schedule from 1. Set safeguard_warmup if it warms up.
        betas: b1 and b2, each in [0, 1): how much of m and v a step keeps.
        weight_decay: Decay coefficient, multiplied by d * lr, or (decouple_lr) by
            d * lr / max_lr.
        eps: Added to the root, times d.
        beta3: b3, in [0, 1): how much of r and s a step keeps. None: sqrt(b2).
        d0: The first d, smaller than any that could be right.
        d_coef: Factor on the estimates of d, usually from 0.5 to 2.
        growth_rate: The largest factor by which d grows in a step, at least 1. It does not
            limit the step from d0 to the first estimate.
        use_bias_correction: Multiply lr_t by sqrt(1 - b2^t) / (1 - b1^t), as Adam does.
        safeguard_warmup: Take d instead of lr_t in s, which small lrs of a warmup would
            make small, and d large.
        share_d: Have one d for all param groups, as the authors' package; their lrs
            should be equal.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Mishchenko & Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner",
        arXiv:2306.06101.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = Prodigy([w], compile=False)
    >>> for _ in range(20):
    ...     w.grad = w.detach().clone()
    ...     optimizer.step()
    >>> round(optimizer.param_groups[0]["d"], 3)
    0.419
    """

    factory = prodigy

    lr: Float = Float(1.0)
    betas: InitVar[tuple[float, float]] = (0.9, 0.999)
    weight_decay: InitVar[float] = 0.0
    eps: InitVar[float] = 1e-8
    beta3: InitVar[float | None] = None
    d0: InitVar[float] = 1e-6
    d_coef: InitVar[float] = 1.0
    growth_rate: InitVar[float] = math.inf
    use_bias_correction: InitVar[bool] = False
    safeguard_warmup: InitVar[bool] = False
    share_d: InitVar[bool] = False

    def _unit_of(self, group: Group) -> list[Group]:
        """Return the groups that have one d with a group."""
        alike = [x for x in self.param_groups if x["share_d"]]
        return alike if group["share_d"] else [group]

    def _warn_of_mistakes(self, first: int) -> None:
        for group in self.param_groups:
            check_flag("share_d", group["share_d"])
        super()._warn_of_mistakes(first)
        shared = [x["lr"] for x in self.param_groups if x["share_d"]]
        if len(lrs := {float(lr) for lr in shared} - {0.0}) > 1:
            warn_user(
                f"share_d=True with lrs {sorted(lrs)}: one d is estimated for all groups, "
                "as if all moved by one lr. Allowed are equal lrs, or share_d=False"
            )

    def functional(self) -> tuple[FunctionalOptimizer, TreeState]:
        """Return `Checkpoints.functional`, if there is one d.

        Raises:
            ValueError: Also for several groups, each with a d of its own.
        """
        if len(self._unit_of(self.param_groups[0])) < len(self.param_groups):
            raise ValueError(
                f"functional() of {len(self.param_groups)} groups with share_d=False: a "
                "pure Prodigy has one d for its tree. Allowed are share_d=True, and Mixed "
                "with a part for each group, whose functional() is a partition"
            )
        return super().functional()
