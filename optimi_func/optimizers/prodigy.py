"""Prodigy (Mishchenko & Defazio 2023)."""

import math
from dataclasses import InitVar
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from optimi_func.classes.fields import FloatOrNone
from optimi_func.classes.groups import Group
from optimi_func.core.checks import check_flag, warn_user
from optimi_func.core.math import dtype_in, in_codes, moment, slow_second_moment
from optimi_func.core.rule import MomentStorage, Scalar
from optimi_func.core.tree import TreeState
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.rules import Betas, Body, Float, Wide, functions, root, where

__all__ = ["Prodigy", "prodigy", "prodigy_init", "prodigy_step"]


def kept_for(p: Tensor, kept: MomentStorage) -> MomentStorage:
    """Replace float16 with float32, because d * g is 0 in float16 while d is small."""
    low = dtype_in(p, kept) == torch.float16 and not in_codes(p, kept)
    return torch.float32 if low else kept


class Prodigy(Body, name="prodigy"):
    """Prodigy: Adam that estimates its own learning rate d.

        lr_t = d * lr,   m <- b1 * m + (1 - b1) * d * g
        v <- b2 * v + (1 - b2) * (d * g)^2,   s <- b3 * s + d / d0 * lr_t * g
        r <- b3 * r + d / d0 * lr_t * sum(g * (p0 - p))
        p <- p - lr_t * (m / (sqrt(v) + d * eps) + weight_decay * p)
        d <- max(d, d_coef * r / sum(|s|))

    The sums run over all parameters of a param group, and p0 is the value of a parameter
    before its first step. d starts at d0, and grows as long as the gradients keep moving
    the parameters away from p0. d stops growing at about the distance between p0 and the
    solution. Use an lr of 1, with a schedule that ends at 0.

    You can read the current d from `optimizer.param_groups[i]["d"]`, for example to log it.
    Because d is computed from the state, you cannot set d, but you can scale d with d_coef.
    Each param group has its own d. If several saved groups are loaded into one group, that
    group continues with the d that was saved for its first parameter.

    As in the paper, eps is multiplied by the d of the previous step, so that steps are the
    same with and without gradient release. The authors' code multiplies eps by the new d
    instead. In every storage mode, s is stored in float32, and v is stored in float32 or in
    8 bits. bfloat16 could not represent the small changes in s and v. Where m would
    otherwise be stored in float16, m is stored in float32, because d * g would underflow in
    float16.

    Args:
        lr: Factor on d, usually a schedule that starts at 1. If the schedule has a warmup,
            set safeguard_warmup=True.
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by d *
            lr, or by d * lr / max_lr if decouple_lr=True.
        eps: The product d * eps is added to the square root of v.
        beta3: b3, in [0, 1): the fraction of r and s that carries over from one step to the
            next. None means sqrt(b2).
        d0: The initial value of d. Choose a d0 that is far below any learning rate that a
            problem might need.
        d_coef: Factor on the estimates of d, usually from 0.5 to 2.
        growth_rate: The largest factor by which d can grow in one step. It has to be at
            least 1. growth_rate does not limit the growth from d0 to the first
            estimate.
        use_bias_correction: Multiply lr_t by sqrt(1 - b2^t) / (1 - b1^t), as Adam does.
        safeguard_warmup: Use d instead of lr_t in the update of s. The small lr of a warmup
            would otherwise make s too small and d too large.
        share_d: Use one d for all param groups, as the authors' package does. All groups
            should then have the same lr.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

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

    lr: Float = Float(1.0)
    betas: Betas = Betas(0.9, 0.999)
    weight_decay: Float = Float(0.0)
    eps: Float = Float(1e-8, "epsilon")
    beta3: FloatOrNone = FloatOrNone(
        None, "beta parameter", type(None), argument=float | None, below=1.0
    )
    d0: Float = Float(1e-6, "first d", above=0.0)
    d_coef: Float = Float(1.0, "factor on d", above=0.0)
    growth_rate: Float = Float(math.inf, "growth of d", least=1.0, most=math.inf)
    use_bias_correction: bool = False
    safeguard_warmup: bool = False
    share_d: InitVar[bool] = False

    class State(NamedTuple):
        # m of d * g, and v of (d * g)^2
        exp_avg: Annotated[Tensor, lambda p, kept: moment(p, kept_for(p, kept))]
        exp_avg_sq: Annotated[
            Tensor, lambda p, kept: slow_second_moment(p, kept_for(p, kept))
        ]
        s: Wide
        # x0, exact in the parameter's dtype, because its compensation was 0
        p0: Annotated[Tensor, lambda p, kept: p.clone()]

    class Running(NamedTuple):
        d: Scalar = 0.0  # 0 before the first step, which begins with d0
        d_max: Scalar = 0.0  # the largest estimate so far
        d_numerator: Scalar = 0.0  # r

    def direction(self, g: Tensor, s: State, t: float, r: Running):
        b1, b2 = self.betas
        d, d_max = where(r.d == 0, self.d0, r.d), where(r.d == 0, self.d0, r.d_max)
        m = b1 * s.exp_avg + (1 - b1) * d * g
        v = b2 * s.exp_avg_sq + (1 - b2) * (d * d) * (g * g)
        of_s = self.weight(t, d)
        if self.safeguard_warmup:
            # Where lr is 0, gradients have no part in the estimate.
            of_s = where(self.lr == 0, 0.0, d / self.d0 * d)
        new = self.State(m, v, self.kept() * s.s + of_s * g, s.p0)
        # d is that of the step before, because the sums that follow from this gradient are
        # not known yet. The authors' code takes the new d here, their paper this.
        return m / (root(v) + d * self.eps), new, self.Running(d, d_max, r.d_numerator)

    def after(self, x: Tensor, u: Tensor, s: State, t: float, r: Running):
        return self.move(t, where(r.d == 0, self.d0, r.d)) * u, s

    def sums(self, g: Tensor, s: State, x: Tensor, t: float, r: Running):
        weight = self.weight(t, where(r.d == 0, self.d0, r.d))
        return weight * (g * (s.p0 - x)), s.s.abs()

    def join(self, r: Running, sums: tuple[Scalar, Scalar]):
        along, size = sums
        nonzero = size > 0  # else all gradients have been 0 so far
        total = self.kept() * r.d_numerator + along
        estimate = self.d_coef * total / where(nonzero, size, 1.0)
        larger = estimate > r.d_max
        d_max = where(nonzero, where(larger, estimate, r.d_max), r.d_max)
        # The first estimate may be any factor above d0.
        base = where(r.d == self.d0, where(larger, estimate, r.d), r.d)
        unlimited = self.growth_rate == math.inf
        grown = base * where(unlimited, 1.0, self.growth_rate)
        d = where(unlimited | (grown > d_max), d_max, grown)
        return self.Running(where(nonzero, d, r.d), d_max, total)

    def kept(self) -> Scalar:
        """Return b3."""
        return self.betas[1] ** 0.5 if self.beta3 is None else self.beta3

    def move(self, t: Scalar, d: Scalar) -> Scalar:
        """Return lr_t / lr."""
        b1, b2 = self.betas
        return d * (1 - b2**t) ** 0.5 / (1 - b1**t) if self.use_bias_correction else d

    def weight(self, t: Scalar, d: Scalar) -> Scalar:
        """Return the factor on sum(g * (p0 - p)) in r."""
        return d / self.d0 * (self.move(t, d) * self.lr)

    def unit_of(self, group: Group) -> list[Group]:
        """Return all groups that have the same d as `group`."""
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
        """Return a pure optimizer and its state, as `BaseOptimizer.functional` does.

        Raises:
            ValueError: The optimizer has several groups, each with its own d. This method
                also raises all errors that `BaseOptimizer.functional` raises.
        """
        if len(self.unit_of(self.param_groups[0])) < len(self.param_groups):
            raise ValueError(
                f"functional() of {len(self.param_groups)} groups with share_d=False: a "
                "pure Prodigy has one d for its tree. Allowed are share_d=True, and Mixed "
                "with a part for each group, whose functional() is a partition"
            )
        return super().functional()


prodigy, prodigy_init, prodigy_step = functions(Prodigy)
