"""Lion (Chen et al. 2023)."""

from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.optimizers.mars import Corrected
from optimi_func.rules import Betas, Float, Former, Moment, functions, where
from optimi_func.state.convert import Counterparts

__all__ = ["Lion", "lion", "lion_init", "lion_step"]


class Lion(Corrected, name="lion"):
    """Lion: step along the sign of an interpolation between momentum and gradient.

        p <- p - lr * sign(b1 * m + (1 - b1) * g) - lr * weight_decay * p
        m <- b2 * m + (1 - b2) * g

    Lion stores one moment, whereas Adam stores two. Use an lr that is 3 to 10 times smaller
    than AdamW's, and multiply AdamW's weight_decay by the same factor.

    Args:
        betas: b1 and b2, each in [0, 1). b1 is the weight of m in the step, and b2 is the
            fraction of m that carries over to the next step.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True.
        mars: Setting this factor turns on MARS. MARS replaces g by g + mars * b1 / (1 - b1)
            * (g - g_prev), where g_prev is the gradient of the previous step. If the result
            has a norm above 1, MARS scales it to a norm of 1. The paper uses mars=0.025 and
            two equal betas. MARS also stores g_prev. None turns MARS off.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675;
        Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large
        Models", arXiv:2411.10438.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Lion([w], lr=0.1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    """

    betas: Betas = Betas(0.9, 0.99)
    weight_decay: Float = Float(0.0)

    counterparts = Counterparts(bitsandbytes=("exp_avg",))

    class Momentum(NamedTuple):
        exp_avg: Moment  # m

    class WithFormer(NamedTuple):
        exp_avg: Moment
        prev_grad: Former  # g_prev

    @property
    def State(self) -> type[Momentum | WithFormer]:
        return self.Momentum if self.mars is None else self.WithFormer

    def plain_direction(self, g: Tensor, s: Any, t: float):
        b1, b2 = self.betas
        d = (b1 * s.exp_avg + (1 - b1) * g).sign()
        return d, s._replace(exp_avg=b2 * s.exp_avg + (1 - b2) * g)

    def plain_accumulate(self, g: Tensor, s: Any, t: float):
        # m = b2 * m_old + (1 - b2) * g_early has this step's earlier microbatches. Its
        # factor is b1 / b2, so that m_old counts b1, as in a whole step. If b2 = 0, no
        # m_old is left, and g_early counts 1 - b1, like the last microbatch.
        b1, b2 = self.betas
        early = where(b2 == 0, (1 - b1) / (1 - b2), b1 / where(b2 == 0, 1.0, b2))
        d = (early * s.exp_avg + (1 - b1) * g).sign()
        return d, s._replace(exp_avg=s.exp_avg + (1 - b2) * g)


State = Lion.Momentum  # the name of this class in saved files
lion, lion_init, lion_step = functions(Lion)
