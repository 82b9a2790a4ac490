"""Lion (Chen et al. 2023): the rule, the pure optimizer and the class."""

from dataclasses import InitVar, dataclass
from typing import NamedTuple

from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.math import choose, moment
from optimi_func.core.rule import Direction, MomentStorage, Rule, Scalar
from optimi_func.pure.functional import FunctionalOptimizer, Number
from optimi_func.state.convert import Counterparts

__all__ = ["Lion", "lion", "lion_init", "lion_step"]


class State(NamedTuple):
    exp_avg: Tensor  # m


class Coeffs(NamedTuple):
    beta1: Scalar  # share of m in the step
    one_minus_beta1: Scalar
    beta2: Scalar  # share of m kept
    one_minus_beta2: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(moment(p, kept))


def coeffs(t: Scalar, *, betas: tuple[Scalar, Scalar]) -> Coeffs:
    del t
    b1, b2 = betas
    return Coeffs(b1, 1.0 - b1, b2, 1.0 - b2)


def accumulate(c: Coeffs) -> Coeffs:
    # m already has this step's earlier microbatches: b2 * m_old + (1 - b2) * g_early. Its
    # factor is b1 / b2, so that m_old counts b1, as in a whole step. If b2 = 0, no m_old is
    # left, and g_early counts 1 - b1, like the last microbatch.
    no_past = c.beta2 == 0
    past = c.beta1 / choose(no_past, 1.0, c.beta2)
    early = c.one_minus_beta1 / c.one_minus_beta2
    return c._replace(beta1=choose(no_past, early, past), beta2=1.0)


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    d = (c.beta1 * s.exp_avg + c.one_minus_beta1 * g).sign()
    return Direction(d, State(c.beta2 * s.exp_avg + c.one_minus_beta2 * g))


lion_rule = Rule("lion", State, init, coeffs, direction, accumulate=accumulate)


@dataclass(frozen=True, kw_only=True, repr=False)
class lion(FunctionalOptimizer, rule=lion_rule):
    """`Lion` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts(bitsandbytes=State._fields)

    betas: tuple[Number, Number] = (0.9, 0.99)


lion_init = init_function(lion_rule)
lion_step = step_function(lion)


class Lion(BaseOptimizer):
    """Lion: step by the sign of an interpolation between momentum and gradient.

        p <- p - lr * sign(b1 * m + (1 - b1) * g) - lr * weight_decay * p
        m <- b2 * m + (1 - b2) * g

    It has one moment instead of Adam's two. Its lr should be 3 to 10 times smaller than
    AdamW's, and its weight decay larger by the same factor.

    Args:
        betas: b1 (in the step) and b2 (in m), each in [0, 1).
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Lion([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    factory = lion

    lr: InitVar[float | Tensor]
    betas: InitVar[tuple[float, float]] = (0.9, 0.99)
    weight_decay: InitVar[float] = 0.0
