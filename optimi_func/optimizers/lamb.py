"""LAMB (You et al. 2019)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from optimi_func.optimizers.adam import Moments
from optimi_func.rules import Betas, Float, Moment, Wide, functions, is_zero, root, where

__all__ = ["LAMB", "lamb", "lamb_init", "lamb_step"]


class LAMB(Moments, name="lamb"):
    """LAMB: AdamW with the step of each tensor scaled to lr times the tensor's norm.

        r = mhat / (sqrt(vhat) + eps) + weight_decay * p
        p <- p - lr * |p| / |r| * r

    mhat and vhat are Adam's moments after bias correction. |p| and |r| are the norms of
    whole tensors. If |p| or |r| is 0, the step is not scaled. Because of the scaling, all
    layers move by the same fraction of their norms, so training stays stable with batches
    of tens of thousands of examples. With lr = 1e-3, for example, each step changes each
    tensor by a thousandth of its norm. Weight decay changes the direction of the step, but
    not its length.

    v is stored in float32 (float64 for float64 parameters) in every storage mode, because
    bfloat16 is too coarse to represent a relative change of 0.1%.

    If a tensor is sharded, LAMB uses the norm of the complete tensor. Biases and the gains
    of norm layers are usually updated by AdamW instead of LAMB, as in the authors' code,
    apex and timm. To use LAMB for matrices and AdamW for all other parameters, write
    `Mixed(named, (matrices, lamb(lr=...)), rest=adamw(lr=...))`. This package's LAMB does
    not clip gradients, whereas timm's LAMB clips the global norm of the gradients to 1.

    Args:
        lr: The length of a step, as a fraction of the tensor's norm.
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        weight_decay: Coefficient of weight decay. Because weight_decay * p is a term of r,
            each step multiplies weight decay by lr * |p| / |r|. With decouple_lr=True,
            weight decay is also divided by max_lr.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

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

    betas: Betas = Betas(0.9, 0.999)
    weight_decay: Float = Float(1e-2)

    class State(NamedTuple):
        exp_avg: Moment  # m
        exp_avg_sq: Wide  # v

    def after(self, mean: Callable[[Tensor], Tensor], x: Tensor, u: Tensor):
        xx, uu = mean(x * x), mean(u * u)
        none = is_zero(xx) | is_zero(uu)
        # Where a norm is 0, no derivative divides by its root.
        length, target = where(none, 1.0, root(uu)), where(none, 1.0, root(xx) * self.lr)
        return u * (target / length)


lamb, lamb_init, lamb_step = functions(LAMB)
