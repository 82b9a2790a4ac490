"""Lion: step by the sign of an interpolation between momentum and gradient.

Chen et al. 2023, arXiv:2302.06675.

    d  = sign(b1 * m + (1 - b1) * g)
    m <- b2 * m + (1 - b2) * g
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func._rule import Direction, Rule, Scalar
from optimi_func.rules._common import choose, moment


class Hyper(NamedTuple):
    betas: tuple[Scalar, Scalar]


class State(NamedTuple):
    exp_avg: Tensor  # m


class Coeffs(NamedTuple):
    hold: Scalar  # b1: share of m in the step
    lean: Scalar  # 1 - b1: share of g in the step
    keep: Scalar
    fresh: Scalar


def init(p: Tensor, dtype: torch.dtype) -> State:
    return State(moment(p, dtype))


def coeffs(h: Hyper, t: Scalar) -> Coeffs:
    del t
    b1, b2 = h.betas
    return Coeffs(b1, 1.0 - b1, b2, 1.0 - b2)


def accumulate(c: Coeffs) -> Coeffs:
    # The m before this step and the parts of g in it cannot be told apart again. The last
    # part leans as if it were the whole: as much more as there are parts would be mostly
    # its noise. With b2 = 0 nothing is left of the m before, and the parts decide.
    gone = c.keep == 0
    hold = choose(gone, c.lean / c.fresh, c.hold / choose(gone, 1.0, c.keep))
    return Coeffs(hold, c.lean, 1.0, c.fresh)


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    d = (c.hold * s.exp_avg + c.lean * g).sign()
    return Direction(d, State(c.keep * s.exp_avg + c.fresh * g))


lion = Rule("lion", State, init, coeffs, direction, accumulate=accumulate)
