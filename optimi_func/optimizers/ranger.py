"""Ranger (Wright 2019): RAdam with lookahead: rule, pure optimizer and class."""

from dataclasses import InitVar, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.checks import check_number
from optimi_func.core.math import choose, scalar_dtype
from optimi_func.core.rule import Direction, MomentStorage, Rule, Scalar
from optimi_func.optimizers import _adam as adam
from optimi_func.optimizers import radam
from optimi_func.pure.functional import Number
from optimi_func.state.convert import Counterparts

__all__ = ["Ranger", "ranger", "ranger_init", "ranger_step"]


class State(NamedTuple):
    exp_avg: Tensor  # m
    exp_avg_sq: Tensor  # v
    slow_param: Tensor  # at least float32, because it has no compensation


class Coeffs(NamedTuple):
    radam: radam.Coeffs
    sync: bool | Scalar  # True at every k-th step; of a traced t 1.0, else 0.0
    alpha: Scalar  # alpha at a sync, else 0


def init(p: Tensor, kept: MomentStorage) -> State:
    wide = torch.promote_types(p.dtype, torch.float32)
    m, v = adam.init(p, kept)
    return State(m, v, p.to(wide, copy=True))


def coeffs(
    t: Scalar, *, betas: tuple[Scalar, Scalar], eps: Scalar, k: Scalar, alpha: Scalar
) -> Coeffs:
    due = t % k == 0
    sync = due.to(scalar_dtype(due.device)) if isinstance(due, Tensor) else bool(due)
    return Coeffs(radam.coeffs(t, betas=betas, eps=eps), sync, choose(due, alpha, 0.0))


def accumulate(c: Coeffs) -> Coeffs:
    return c._replace(radam=radam.accumulate(c.radam))


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    d, new, _ = radam.direction(g, adam.State(s.exp_avg, s.exp_avg_sq), c.radam)
    return Direction(d, State(new.exp_avg, new.exp_avg_sq, s.slow_param))


def after(x: Tensor, u: Tensor, s: State, c: Coeffs) -> tuple[Tensor, State]:
    if c.sync is False:
        return u, s
    slow = s.slow_param + c.alpha * (x + u - s.slow_param)
    return u + c.sync * (slow - x - u), s._replace(slow_param=slow)


ranger_rule = Rule("ranger", State, init, coeffs, direction, after, accumulate)


@dataclass(frozen=True, kw_only=True, repr=False)
class ranger(adam.AdamLikeValue, rule=ranger_rule):
    """`Ranger` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts(optimi_names={"la_param": "slow_param"})

    k: Number = 6
    alpha: Number = 0.5
    decouple_wd: bool = True

    def check(self) -> None:
        super().check()
        check_number("lookahead period", "k", self.k, least=1.0)
        if isinstance(self.k, int | float) and self.k % 1:
            raise ValueError(f"k={self.k}: allowed are whole numbers, of steps")
        check_number("lookahead alpha", "alpha", self.alpha, most=1.0)


ranger_init = init_function(ranger_rule)
ranger_step = step_function(ranger)


class Ranger(adam.AdamLike):
    """Ranger: RAdam, pulled back every k steps towards a slow copy of the weights.

        slow <- slow + alpha * (p - slow),   p <- slow      every k-th step of RAdam

    Args:
        betas: b1 and b2, each in [0, 1): how much of m and v a step keeps.
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr, or (decouple_wd=False) added to the gradient times p.
        eps: Added to the root, after the bias correction.
        k: Steps between lookahead syncs, at least 1.
        alpha: How far the slow weights move at a sync, in [0, 1].
        decouple_wd: Subtract decay from the parameter, not through the gradient.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Zhang, Lucas, Hinton & Ba, "Lookahead Optimizer: k steps forward, 1 step back",
        arXiv:1907.08610, around RAdam, arXiv:1908.03265.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Ranger([w], lr=0.1, k=1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9500, 0.9500])
    """

    factory = ranger

    k: InitVar[int] = 6
    alpha: InitVar[float] = 0.5
    decouple_wd: InitVar[bool] = True
