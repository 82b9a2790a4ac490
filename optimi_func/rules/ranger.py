"""Ranger: RAdam, pulled back every k steps towards a slow copy of the weights.

Lookahead: Zhang, Lucas, Hinton & Ba 2019, arXiv:1907.08610; RAdam: arXiv:1908.03265;
the combination: Wright 2019. With u RAdam's delta, every k-th step:

    slow <- slow + alpha * (x + u - slow)
    u    <- slow - x
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func._rule import Direction, Rule, Scalar
from optimi_func.rules import adam, radam
from optimi_func.rules._common import choose, scalar_dtype


class Hyper(NamedTuple):
    betas: tuple[Scalar, Scalar]
    eps: Scalar
    k: Scalar  # steps between syncs
    alpha: Scalar  # how far slow moves towards x at a sync


class State(NamedTuple):
    exp_avg: Tensor
    exp_avg_sq: Tensor
    slow_param: Tensor  # at least float32: no compensation protects it


class Coeffs(NamedTuple):
    radam: radam.Coeffs
    sync: bool | Scalar  # is this a k-th step: static on the host, traced as 0.0 or 1.0
    pull: Scalar  # alpha at a sync, else 0


def init(p: Tensor, dtype: torch.dtype) -> State:
    wide = torch.promote_types(p.dtype, torch.float32)
    m, v = adam.init(p, dtype)
    return State(m, v, p.to(wide, copy=True))


def coeffs(h: Hyper, t: Scalar) -> Coeffs:
    due = t % h.k == 0
    sync = due.to(scalar_dtype(due.device)) if isinstance(due, Tensor) else bool(due)
    inner = radam.coeffs(adam.Hyper(h.betas, h.eps), t)
    return Coeffs(inner, sync, choose(due, h.alpha, 0.0))


def accumulate(c: Coeffs) -> Coeffs:
    return c._replace(radam=radam.accumulate(c.radam))


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    d, new, _ = radam.direction(g, adam.State(s.exp_avg, s.exp_avg_sq), c.radam)
    return Direction(d, State(new.exp_avg, new.exp_avg_sq, s.slow_param))


def after(x: Tensor, u: Tensor, s: State, c: Coeffs) -> tuple[Tensor, State]:
    if c.sync is False:
        return u, s
    slow = s.slow_param + c.pull * (x + u - s.slow_param)
    return u + c.sync * (slow - x - u), s._replace(slow_param=slow)


ranger = Rule("ranger", State, init, coeffs, direction, after, accumulate)
