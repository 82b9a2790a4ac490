"""StableAdamW (Wortsman et al. 2023)."""

from collections.abc import Callable

from torch import Tensor

from optimi_func.optimizers.adam import Moments
from optimi_func.rules import Float, functions

__all__ = ["StableAdamW", "stableadamw", "stableadamw_init", "stableadamw_step"]


class StableAdamW(Moments, name="stableadamw"):
    """StableAdamW: AdamW that takes shorter steps if a gradient is larger than v predicts.

        RMS^2 = mean(g^2 / max(vhat, eps^2))            over each tensor
        p <- p - (lr / max(1, RMS)) * (mhat / (sqrt(vhat) + eps) + weight_decay * p)

    mhat and vhat are Adam's moments after bias correction. Each tensor has its own RMS.
    Dividing lr by max(1, RMS) is Adafactor's update clipping (arXiv:1804.04235). Update
    clipping replaces gradient clipping and has no hyperparameter.

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr /
            max(1, RMS). With decouple_lr=True, the product is also divided by max_lr.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment. eps^2 is also the lower bound of vhat in the formula for RMS^2.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Wortsman et al., "Stable and low-precision training for large-scale
        vision-language models", arXiv:2304.13013.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = StableAdamW([w], lr=0.1, weight_decay=0.5, compile=False)
    >>> optimizer.step(w.sum().backward)
    >>> w.detach()
    tensor([0.8500, 0.8500])
    """

    weight_decay: Float = Float(1e-2)

    def measure(
        self, mean: Callable[[Tensor], Tensor], g: Tensor, s: Moments.Plain, t: float
    ):
        b2 = self.betas[1]
        v = b2 * s.exp_avg_sq + (1 - b2) * (g * g)
        # g / sqrt(max(vhat, eps^2)), by roots, because eps^2 may underflow in float32.
        ratio = g / self.root(v, t).clamp_min(self.eps)
        return {"rms": mean(ratio * ratio).clamp_min(1.0).sqrt()}  # at least 1

    def after(self, u: Tensor, rms: Tensor):
        return u / rms


stableadamw, stableadamw_init, stableadamw_step = functions(StableAdamW)
