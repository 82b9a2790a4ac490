"""ASGD (Polyak & Juditsky 1992)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.core.rule import Scalar
from optimi_func.rules import Coupled, Float, Wide, functions, where
from optimi_func.state.convert import Counterparts

__all__ = ["ASGD", "asgd", "asgd_init", "asgd_step"]


class ASGD(Coupled, name="asgd", lr="inside"):
    """ASGD: step against the gradient, and average the parameters.

        p <- p - eta * (g + lambd * p),   ax <- ax + mu * (p - ax)
        eta <- lr / (1 + lambd * lr * t)^alpha,   mu <- 1 / max(1, t - t0)

    In the first step, eta equals lr. Evaluate the model with `ax`, the average of the
    parameter. During the first t0 steps, `ax` equals p. After step t0, `ax` is the mean of
    p over all steps since step t0.

    Args:
        lambd: Coefficient of the term lambd * p, which pulls p towards 0. A larger lambd
            also makes the step size eta fall faster.
        alpha: Exponent in the formula for eta. A larger alpha makes the step size eta fall
            faster.
        t0: Number of steps before averaging begins.
        weight_decay: Coefficient of weight decay. By default, weight_decay * p is added to
            the gradient. With decouple_wd=True, lr * weight_decay * p is subtracted from p
            instead. With decouple_lr=True, lr / max_lr * weight_decay * p is subtracted
            from p.
        decouple_wd: Subtract weight decay directly from the parameter instead of adding it
            to the gradient.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging",
        SIAM Journal on Control and Optimization 30, 1992.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = ASGD([w], lr=0.1, lambd=0.0, compile=False)
    >>> optimizer.step(w.sum().backward)
    >>> w.detach(), optimizer.state[w]["ax"]
    (tensor([0.9000, 0.9000]), tensor([0.9000, 0.9000]))
    """

    lr: Float = Float(1e-2)
    lambd: Float = Float(1e-4)
    alpha: Float = Float(0.75)
    t0: Float = Float(1e6, least=-math.inf, most=math.inf)
    weight_decay: Float = Float(0.0)

    counterparts = Counterparts(in_torch=torch.optim.ASGD)
    _positional = ("foreach", "maximize")

    class State(NamedTuple):
        ax: Wide

    class Running(NamedTuple):
        eta: Scalar = 0.0  # of the next step, of this step's lr
        mu: Scalar = 1.0

    def direction(self, g: Tensor, s: State, t: float, x: Tensor, r: Running):
        eta = where(t == 1, self.lr, r.eta)
        after = self.lr / (1 + self.lambd * self.lr * t) ** self.alpha
        began = where(t - self.t0 > 1, t - self.t0, 1.0)
        return eta * (g + self.lambd * x), s, self.Running(after, 1 / began)

    def after(self, x: Tensor, u: Tensor, s: State, t: float):
        mu = 1 / where(t - 1 - self.t0 > 1, t - 1 - self.t0, 1.0)
        return u, self.State((1 - mu) * s.ax + mu * (x + u))


asgd, asgd_init, asgd_step = functions(ASGD)
