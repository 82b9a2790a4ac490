"""SGD: step against the gradient, or against a decaying sum of gradients (momentum).

Polyak 1964; Sutskever, Martens, Dahl & Hinton 2013 (momentum and Nesterov in the form
used here). With mu = momentum and tau = dampening:

    b <- mu * b + (1 - tau) * g
    d  = b                (or g + mu * b: Nesterov)

With dampening = True, tau = mu: b is a mean of gradients and not a sum of them. A
number starts b as torch does, with the whole first gradient, and so does torch_init.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func._rule import Direction, Rule, Scalar
from optimi_func.rules._common import choose, moment


class Hyper(NamedTuple):
    momentum: Scalar
    dampening: bool | Scalar  # True: the momentum itself
    torch_init: bool


class NoState(NamedTuple):
    pass


class State(NamedTuple):
    momentum_buffer: Tensor  # b


class NoCoeffs(NamedTuple):
    pass


class Coeffs(NamedTuple):
    keep: Scalar  # mu
    fresh: Scalar  # 1 - tau
    ahead: Scalar  # mu, as Nesterov looks ahead with it


def init_plain(p: Tensor, dtype: torch.dtype) -> NoState:
    del p, dtype
    return NoState()


def coeffs_plain(h: Hyper, t: Scalar) -> NoCoeffs:
    del h, t
    return NoCoeffs()


def direction_plain(g: Tensor, s: NoState, c: NoCoeffs) -> Direction:
    del c
    return Direction(g, s)


def init(p: Tensor, dtype: torch.dtype) -> State:
    return State(moment(p, dtype))


def coeffs(h: Hyper, t: Scalar) -> Coeffs:
    tau = (
        {True: h.momentum, False: 0.0}[h.dampening]
        if isinstance(h.dampening, bool)
        else h.dampening
    )
    fresh = 1.0 - tau
    if h.torch_init or not isinstance(h.dampening, bool):
        fresh = choose(t == 1, 1.0, fresh)
    return Coeffs(h.momentum, fresh, h.momentum)


def accumulate(c: Coeffs) -> Coeffs:
    # b is the whole gradient's; in Nesterov's g + mu * b, g is the last part alone.
    return c._replace(keep=1.0)


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    b = c.keep * s.momentum_buffer + c.fresh * g
    return Direction(b, State(b))


def direction_nesterov(g: Tensor, s: State, c: Coeffs) -> Direction:
    b = c.keep * s.momentum_buffer + c.fresh * g
    return Direction(g + c.ahead * b, State(b))


plain = Rule("sgd", NoState, init_plain, coeffs_plain, direction_plain)
momentum = Rule("sgd_momentum", State, init, coeffs, direction, accumulate=accumulate)
nesterov = Rule(
    "sgd_nesterov", State, init, coeffs, direction_nesterov, accumulate=accumulate
)
