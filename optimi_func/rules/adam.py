"""Adam: step along the mean gradient, measured in its own root mean square.

Kingma & Ba 2015, arXiv:1412.6980; AMSGrad: Reddi, Kale & Kumar 2018, arXiv:1904.09237.

    m <- b1 * m + (1 - b1) * g
    v <- b2 * v + (1 - b2) * g^2
    d  = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

AMSGrad divides by the largest v so far in place of v.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func._rule import Direction, Rule, Scalar
from optimi_func.rules._common import moment, power, root, second_moment, sqrt


class Hyper(NamedTuple):
    betas: tuple[Scalar, Scalar]
    eps: Scalar  # added to sqrt(v) after its correction


class State(NamedTuple):
    exp_avg: Tensor  # m
    exp_avg_sq: Tensor  # v


class PeakState(NamedTuple):
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor  # the largest v so far


class Coeffs(NamedTuple):
    keep1: Scalar
    fresh1: Scalar
    keep2: Scalar
    fresh2: Scalar
    unbias1: Scalar  # 1 / (1 - b1^t)
    unbias2: Scalar  # 1 / sqrt(1 - b2^t)
    eps: Scalar


def init(p: Tensor, dtype: torch.dtype) -> State:
    return State(moment(p, dtype), second_moment(p, dtype))


def coeffs(h: Hyper, t: Scalar) -> Coeffs:
    b1, b2 = h.betas
    return Coeffs(
        keep1=b1,
        fresh1=1.0 - b1,
        keep2=b2,
        fresh2=1.0 - b2,
        unbias1=1.0 / (1.0 - power(b1, t)),
        unbias2=1.0 / sqrt(1.0 - power(b2, t)),
        eps=h.eps,
    )


def moments(g: Tensor, m: Tensor, v: Tensor, c: Coeffs) -> State:
    return State(c.keep1 * m + c.fresh1 * g, c.keep2 * v + c.fresh2 * (g * g))


def accumulate(c: Coeffs) -> Coeffs:
    # m is the whole gradient's; v adds squares of parts (AdamA, arXiv:2305.19982).
    return c._replace(keep1=1.0, keep2=1.0)


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    m, v = new = moments(g, s.exp_avg, s.exp_avg_sq, c)
    return Direction(c.unbias1 * m / (c.unbias2 * root(v) + c.eps), new)


def init_peak(p: Tensor, dtype: torch.dtype) -> PeakState:
    return PeakState(*init(p, dtype), second_moment(p, dtype))


def direction_peak(g: Tensor, s: PeakState, c: Coeffs) -> Direction:
    m, v = moments(g, s.exp_avg, s.exp_avg_sq, c)
    peak = torch.maximum(s.max_exp_avg_sq, v)
    d = c.unbias1 * m / (c.unbias2 * root(peak) + c.eps)
    return Direction(d, PeakState(m, v, peak))


adam = Rule("adam", State, init, coeffs, direction, accumulate=accumulate)
amsgrad = Rule(
    "amsgrad", PeakState, init_peak, coeffs, direction_peak, accumulate=accumulate
)
