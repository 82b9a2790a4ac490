"""LAMB (You et al. 2019): the rule, the pure optimizer and the class."""

from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.math import moment, root, slow_moment
from optimi_func.core.rule import Means, MomentStorage, Rule, Scalar
from optimi_func.optimizers import _adam as adam
from optimi_func.pure.functional import Number

__all__ = ["LAMB", "lamb", "lamb_init", "lamb_step"]


def init(p: Tensor, kept: MomentStorage) -> adam.State:
    return adam.State(moment(p, kept), slow_moment(p))


def measure(
    g: Tensor, x: Tensor, d: Tensor, decaying: Tensor, shared: None, c: adam.Coeffs
) -> list[Tensor]:
    # From these means follows the norm of lr * d + decay * decaying, for any lr and decay.
    return [x * x, d * d, d * decaying, decaying * decaying]


def settle(
    means: list[Tensor], scale: Scalar, lr: Scalar, decay: Scalar, c: adam.Coeffs
) -> Tensor:
    xx, dd, db, bb = means
    own = lr * scale
    move = dd * (own * own) + db * (2.0 * own * decay) + bb * (decay * decay)
    length, wanted = root(move), root(xx) * lr
    # If either norm is 0, the length of the move does not change.
    for x in (xx, move):
        wanted = torch.where(x < torch.finfo(x.dtype).tiny, length, wanted)
    return length / wanted


lamb_rule = Rule(
    *("lamb", adam.State, init, adam.coeffs, adam.direction),
    accumulate=adam.accumulate,
    means=Means(4, measure, settle),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class lamb(adam.AdamLikeValue, rule=lamb_rule):
    """`LAMB` as a value: `init` and `step` over a tree of parameters."""

    narrow = 1

    betas: tuple[Number, Number] = (0.9, 0.999)
    weight_decay: Number = 1e-2


lamb_init = init_function(lamb_rule)
lamb_step = step_function(lamb)


class LAMB(adam.AdamLike):
    """LAMB: AdamW with steps scaled, for each tensor, to lr times the tensor's norm.

        r = mhat / (sqrt(vhat) + eps) + weight_decay * p
        p <- p - lr * |p| / |r| * r         norms over each tensor; no factor if one is 0

    with Adam's bias corrected m and v. Each layer moves by the same share of its norm,
    which keeps training stable at batches of tens of thousands. So lr is relative: 1e-3
    changes each tensor by a thousandth of its norm. Decay turns that step and does not
    lengthen it.

    v is float32 (float64 for float64 parameters) whatever the storage, because a bfloat16
    hardly moves by steps of 0.001.

    The norms are those of whole tensors, also if they are sharded. Biases and the gains of
    norms are usually left to Adam, as in the authors' code, apex and timm (which adapt no
    group without weight decay): `Mixed(named, (matrices, lamb(lr=...)),
    rest=adamw(lr=...))`. Nothing else is clipped, while timm's LAMB also clips the norm of
    all gradients to 1.

    Args:
        lr: The length of a step, as a share of the tensor's norm.
        betas: b1 and b2, each in [0, 1): how much of m and v a step keeps.
        weight_decay: Decay coefficient, added to the direction before its norm is taken,
            so multiplied by lr * |p| / |r|; or (decouple_lr) by that over max_lr.
        eps: Added to the root, after the bias correction.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    References:
        You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
        minutes", arXiv:1904.00962.

    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> optimizer = LAMB([w], lr=0.1, weight_decay=0.0, compile=False)
    >>> w.sum().backward()
    >>> optimizer.step()  # of length 0.1 * 5
    >>> w.detach()
    tensor([2.6464, 3.6464])
    """

    factory = lamb

    betas: InitVar[tuple[float, float]] = (0.9, 0.999)
    weight_decay: InitVar[float] = 1e-2
