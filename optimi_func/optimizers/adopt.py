"""ADOPT (Taniguchi et al. 2024): the rule, the pure optimizer and the class."""

from dataclasses import InitVar, dataclass
from typing import NamedTuple

from torch import Tensor

from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.math import choose, moment, root, slow_moment
from optimi_func.core.rule import Direction, MomentStorage, Rule, Scalar
from optimi_func.optimizers import _adam as adam
from optimi_func.pure.functional import Number

__all__ = ["ADOPT", "adopt", "adopt_init", "adopt_step"]


class State(NamedTuple):
    exp_avg: Tensor  # m
    exp_avg_sq: Tensor  # v, one gradient behind


class Coeffs(NamedTuple):
    beta1: Scalar
    one_minus_beta1: Scalar
    beta2: Scalar  # 0 at the first gradient
    one_minus_beta2: Scalar
    limit: Scalar  # (t - 1)^(1/4): of what joins m
    moves: Scalar  # 0 at the first gradient, which sets v alone, then 1
    eps: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(moment(p, kept), slow_moment(p))


def coeffs(t: Scalar, *, betas: tuple[Scalar, Scalar], eps: Scalar) -> Coeffs:
    b1, b2 = betas
    later = t > 1
    return Coeffs(
        *(b1, 1.0 - b1),
        beta2=choose(later, b2, 0.0),
        one_minus_beta2=choose(later, 1.0 - b2, 1.0),
        limit=(t - 1.0) ** 0.25,
        moves=choose(later, 1.0, 0.0),
        eps=eps,
    )


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    scaled = g / root(s.exp_avg_sq).clamp_min(c.eps)
    clipped = scaled.clamp_min(-c.limit).clamp_max(c.limit)
    m = c.beta1 * s.exp_avg + c.one_minus_beta1 * clipped
    v = c.beta2 * s.exp_avg_sq + c.one_minus_beta2 * (g * g)
    return Direction(m, State(m, v))


def after(x: Tensor, u: Tensor, s: State, c: Coeffs) -> tuple[Tensor, State]:
    del x
    return c.moves * u, s


adopt_rule = Rule("adopt", State, init, coeffs, direction, after=after)


@dataclass(frozen=True, kw_only=True, repr=False)
class adopt(adam.AdamLikeValue, rule=adopt_rule):
    """`ADOPT` as a value: `init` and `step` over a tree of parameters."""

    narrow = 1

    betas: tuple[Number, Number] = (0.9, 0.9999)
    decouple_wd: bool = False


adopt_init = init_function(adopt_rule)
adopt_step = step_function(adopt)


class ADOPT(adam.AdamLike):
    """ADOPT: Adam that divides each gradient by the root mean square of those before it.

        m <- b1 * m + (1 - b1) * clip(g / max(sqrt(v), eps), (t - 1)^(1/4))
        p <- p - lr * m
        v <- b2 * v + (1 - b2) * g^2

    The first gradient sets v = g^2 and moves nothing. Because v does not depend on the
    gradient that it divides, the method converges with any b2, while Adam may not. v is
    float32 whatever the storage, because bfloat16 could not follow it.

    Args:
        betas: b1 and b2, each in [0, 1): how much of m and v a step keeps.
        weight_decay: Decay coefficient: added to the gradient as weight_decay * p, or
            (decouple_wd) multiplied by lr, or (decouple_lr) by lr / max_lr.
        eps: The smallest divisor of a gradient.
        decouple_wd: Subtract decay from the parameter, not through the gradient.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta2 with the
        Optimal Rate", arXiv:2411.02853, with the clipping that its authors' code added.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = ADOPT([w], lr=0.1, compile=False)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(2)
    ...     optimizer.step()
    >>> w.detach()
    tensor([0.9900, 0.9900])
    """

    factory = adopt

    betas: InitVar[tuple[float, float]] = (0.9, 0.9999)
    decouple_wd: InitVar[bool] = False
