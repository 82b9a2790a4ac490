"""Ranger (Wright 2019): RAdam with lookahead."""

from typing import NamedTuple

from torch import Tensor

from optimi_func.optimizers.radam import Rectified
from optimi_func.rules import Coupled, Float, Moment, SecondMoment, Wide, functions
from optimi_func.state.convert import Counterparts

__all__ = ["Ranger", "ranger", "ranger_init", "ranger_step"]


class Ranger(Rectified, name="ranger"):
    """Ranger: RAdam that pulls the weights towards a slow copy every k steps.

        slow <- slow + alpha * (p - slow),   p <- slow      every k-th step of RAdam

    Args:
        betas: b1 and b2, each in [0, 1): the fractions of m and v that carry over from one
            step to the next.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True. With decouple_wd=False, weight_decay * p
            is added to the gradient instead.
        eps: Added to the divisor, which is the square root of the bias-corrected second
            moment.
        k: Number of steps from one pull to the next, at least 1.
        alpha: A fraction in [0, 1]. Each pull moves the slow weights by this fraction of
            their distance to p.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Zhang, Lucas, Hinton & Ba, "Lookahead Optimizer: k steps forward, 1 step back",
        arXiv:1907.08610, around RAdam, arXiv:1908.03265.

    >>> w = torch.ones(2, requires_grad=True)
    >>> Ranger([w], lr=0.1, k=1, compile=False).step(w.sum().backward)
    >>> w.detach()
    tensor([0.9500, 0.9500])
    """

    k: Float = Float(6, "lookahead period", least=1.0, argument=int)
    alpha: Float = Float(0.5, "lookahead alpha", most=1.0)
    decouple_wd: bool = True
    usual_decay = Coupled.usual_decay

    counterparts = Counterparts(optimi_names={"la_param": "slow_param"})

    class State(NamedTuple):
        exp_avg: Moment  # m
        exp_avg_sq: SecondMoment  # v
        slow_param: Wide  # at least float32, because it has no compensation

    def check(self) -> None:
        if isinstance(self.k, int | float) and self.k % 1:
            raise ValueError(f"k={self.k}: allowed are whole numbers, of steps")

    def init(self, p: Tensor):
        return self.State._make((None, None, p))

    def due(self, t: float):
        return t % self.k == 0

    def after(self, x: Tensor, u: Tensor, s: State):
        slow = s.slow_param + self.alpha * (x + u - s.slow_param)
        return u + (slow - x - u), s._replace(slow_param=slow)


ranger, ranger_init, ranger_step = functions(Ranger)
