"""Adam's moments for StableAdamW, which is no class body yet."""

from dataclasses import InitVar, dataclass
from typing import NamedTuple

from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.fields import Float
from optimi_func.core.math import moment, power, second_moment, sqrt
from optimi_func.core.rule import MomentStorage, Scalar
from optimi_func.optimizers.adam import Moments
from optimi_func.pure.functional import FunctionalOptimizer, Number

State = Moments.Plain


class Coeffs(NamedTuple):
    beta1: Scalar
    one_minus_beta1: Scalar
    beta2: Scalar
    one_minus_beta2: Scalar
    inv_bias_correction1: Scalar  # 1 / (1 - b1^t)
    inv_sqrt_bias_correction2: Scalar  # 1 / sqrt(1 - b2^t)
    eps: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(moment(p, kept), second_moment(p, kept))


def coeffs(t: Scalar, *, betas: tuple[Scalar, Scalar], eps: Scalar) -> Coeffs:
    b1, b2 = betas
    inverses = 1.0 / (1.0 - power(b1, t)), 1.0 / sqrt(1.0 - power(b2, t))
    return Coeffs(b1, 1.0 - b1, b2, 1.0 - b2, *inverses, eps)


def accumulate(c: Coeffs) -> Coeffs:
    # m is that of the summed gradient, but v sums the squares of the microbatches'
    # gradients (AdamA, arXiv:2305.19982).
    return c._replace(beta1=1.0, beta2=1.0)


def moments(g: Tensor, m: Tensor, v: Tensor, c: Coeffs) -> State:
    m = c.beta1 * m + c.one_minus_beta1 * g
    return State(m, c.beta2 * v + c.one_minus_beta2 * (g * g))


@dataclass(frozen=True, kw_only=True, repr=False)
class AdamLikeValue(FunctionalOptimizer):
    """Base class of pure optimizers with Adam's hyperparameters and, mostly, defaults."""

    lr: Number = 1e-3
    betas: tuple[Number, Number] = (0.9, 0.99)
    eps: Number = 1e-6


class AdamLike(BaseOptimizer):
    """Base class of optimizers with Adam's hyperparameters and, mostly, its defaults."""

    lr: Float = Float(1e-3)
    betas: InitVar[tuple[float, float]] = (0.9, 0.99)
    weight_decay: InitVar[float] = 0.0
    eps: InitVar[float] = 1e-6
