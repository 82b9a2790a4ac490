"""RAdam: Adam that trusts its second moment only once enough gradients stand behind it.

Liu et al. 2020, arXiv:1908.03265. With Adam's m and v, mhat = m / (1 - b1^t):

    rho_inf = 2 / (1 - b2) - 1
    rho     = rho_inf - 2 * t * b2^t / (1 - b2^t)
    d       = r(rho) * mhat / (sqrt(v / (1 - b2^t)) + eps)   where rho > 5, else mhat
    r(x)^2  = (x - 4)(x - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) x)
"""

from typing import NamedTuple

from torch import Tensor

from optimi_func._rule import Direction, Rule, Scalar
from optimi_func.rules import adam
from optimi_func.rules._common import choose, power, root, sqrt


class Coeffs(NamedTuple):
    adam: adam.Coeffs
    adaptive: Scalar  # r(rho) once rho > 5, before that 0
    plain: Scalar  # 1 before that, then 0


def coeffs(h: adam.Hyper, t: Scalar) -> Coeffs:
    decayed = power(h.betas[1], t)
    rho_inf = 2.0 / (1.0 - h.betas[1]) - 1.0
    rho = rho_inf - 2.0 * t * decayed / (1.0 - decayed)
    enough = rho > 5.0
    # Kept off the branch not taken, where r is undefined and its derivative not finite.
    x, x_inf = choose(enough, rho, 6.0), choose(enough, rho_inf, 6.0)
    r = sqrt((x - 4.0) * (x - 2.0) * x_inf / ((x_inf - 4.0) * (x_inf - 2.0) * x))
    return Coeffs(adam.coeffs(h, t), choose(enough, r, 0.0), choose(enough, 0.0, 1.0))


def accumulate(c: Coeffs) -> Coeffs:
    return c._replace(adam=adam.accumulate(c.adam))


def direction(g: Tensor, s: adam.State, c: Coeffs) -> Direction:
    m, v = new = adam.moments(g, s.exp_avg, s.exp_avg_sq, c.adam)
    mhat = c.adam.unbias1 * m
    # A blend of two scalars, one of them 0: a branch would be another graph.
    per_root = c.adaptive / (c.adam.unbias2 * root(v) + c.adam.eps)
    return Direction(mhat * (per_root + c.plain), new)


radam = Rule("radam", adam.State, adam.init, coeffs, direction, accumulate=accumulate)
