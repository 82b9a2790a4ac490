"""Adan: Adam with Nesterov's look ahead, from the change between successive gradients.

Xie et al. 2022, arXiv:2208.06677. The betas here are the shares kept (1 - the paper's).

    m <- b1 * m + (1 - b1) * g
    w <- b2 * w + (1 - b2) * (g - g_prev)
    n <- b3 * n + (1 - b3) * (g + b2 * (g - g_prev))^2
    d  = (m / (1 - b1^t) + b2 * w / (1 - b2^t)) / (sqrt(n / (1 - b3^t)) + eps)

The first gradient has no predecessor: its difference is 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func._rule import Direction, Rule, Scalar
from optimi_func.rules._common import choose, moment, power, root, second_moment, sqrt


class Hyper(NamedTuple):
    betas: tuple[Scalar, Scalar, Scalar]
    eps: Scalar


class State(NamedTuple):
    exp_avg: Tensor  # m
    exp_avg_diff: Tensor  # w
    exp_avg_sq: Tensor  # n
    prev_grad: Tensor  # g_prev


class Coeffs(NamedTuple):
    keep1: Scalar
    fresh1: Scalar
    keep2: Scalar
    fresh2: Scalar
    keep3: Scalar
    fresh3: Scalar
    seen: Scalar  # 0 at the first gradient, then 1
    ahead: Scalar  # b2, as the look ahead uses it
    unbias1: Scalar
    unbias2: Scalar
    unbias3: Scalar
    eps: Scalar


def init(p: Tensor, dtype: torch.dtype) -> State:
    m, w, g_prev = moment(p, dtype), moment(p, dtype), moment(p, dtype)
    return State(m, w, second_moment(p, dtype), g_prev)


def coeffs(h: Hyper, t: Scalar) -> Coeffs:
    b1, b2, b3 = h.betas
    return Coeffs(
        *(b1, 1.0 - b1, b2, 1.0 - b2, b3, 1.0 - b3),
        seen=choose(t > 1, 1.0, 0.0),
        ahead=b2,
        unbias1=1.0 / (1.0 - power(b1, t)),
        unbias2=1.0 / (1.0 - power(b2, t)),
        unbias3=1.0 / sqrt(1.0 - power(b3, t)),
        eps=h.eps,
    )


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    change = c.seen * (g - s.prev_grad)
    m = c.keep1 * s.exp_avg + c.fresh1 * g
    w = c.keep2 * s.exp_avg_diff + c.fresh2 * change
    ahead = g + c.ahead * change
    n = c.keep3 * s.exp_avg_sq + c.fresh3 * (ahead * ahead)
    d = c.unbias1 * m + c.ahead * c.unbias2 * w
    return Direction(d / (c.unbias3 * root(n) + c.eps), State(m, w, n, g))


adan = Rule("adan", State, init, coeffs, direction)
