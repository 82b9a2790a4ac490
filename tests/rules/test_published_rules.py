"""Rules of papers, as users write them, beside loops of plain tensors in float64."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from own_rules import LARS, RULES, lars
from tiers import row
from torch import Tensor

from optimi_func.rules import Betas, Optimizer, SecondMoment, Shaped, Wide, root
from optimi_func.testing import check_rule

Step = Callable[[Tensor], Tensor]  # gradient -> move over lr


class AdaShift(Optimizer):
    """Adam whose second moment is of gradients before its first (arXiv:1810.00143)."""

    beta: float = 0.999
    keep: int = 3
    eps: float = 1e-6

    @property
    def State(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        last = [(f"g{i}", Tensor) for i in range(self.keep)]
        return NamedTuple("State", [("v", SecondMoment), *last])

    def direction(self, g: Tensor, s: Any, t: float):
        n, gs = t - self.keep, [*s[2:], g]
        on = torch.where(n > 0, 1.0, 0.0)
        v = self.beta * s.v + (1 - self.beta) * on * s[1] ** 2
        share = torch.where(n > 0, 1 - self.beta**n, 1.0)
        m = sum(gs[1:], gs[0]) / self.keep
        return on * m / (root(v / share) + self.eps), self.State(v, *gs)


def adashift(p: Tensor, beta: float, keep: int, eps: float) -> Step:
    last: list[Tensor] = []
    v = 0 * p

    def step(g: Tensor) -> Tensor:
        nonlocal v
        n = max(0, len(last) + 1 - keep)
        last.append(g)
        if not n:
            return 0 * p
        v = beta * v + (1 - beta) * last[n - 1] ** 2
        return sum(last[n:], 0 * p) / keep / ((v / (1 - beta**n)).sqrt() + eps)

    return step


class SPAM(Optimizer):
    """Adam that clips spikes and begins anew, with a warmup (arXiv:2501.06842)."""

    betas: Betas = Betas(0.9, 0.999)
    theta: float = 5000.0
    every: int = 500
    warm: int = 150
    eps: float = 1e-6

    class State(NamedTuple):
        m: Tensor
        v: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        (b1, b2), k = self.betas, (t - 1) % self.every
        keep = torch.where(k == 0, 0.0, 1.0)
        v = keep * s.v
        spike = (g * g > self.theta * v) & (v > 0)
        g = torch.where(spike, g.sign() * (self.theta * v).sqrt(), g)
        m, v = b1 * keep * s.m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        wave = 0.5 * (1 - torch.cos(math.pi * (k + 1) / self.warm))
        scale = torch.where((t > self.every) & (k < self.warm), wave, 1.0)
        d = m / (1 - b1 ** (k + 1)) / (root(v / (1 - b2 ** (k + 1))) + self.eps)
        return scale * d, self.State(m, v)


def spam(p: Tensor, betas: Any, theta: float, every: int, warm: int, eps: float) -> Step:
    (b1, b2), t = betas, 0
    m = v = 0 * p

    def step(g: Tensor) -> Tensor:
        nonlocal m, v, t
        k, t = t % every, t + 1
        if k == 0:
            m = v = 0 * p
        spike = (g * g > theta * v) & (v > 0)
        g = torch.where(spike, g.sign() * (theta * v).sqrt(), g)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        wave = 0.5 * (1 - math.cos(math.pi * (k + 1) / warm))
        d = m / (1 - b1 ** (k + 1)) / ((v / (1 - b2 ** (k + 1))).sqrt() + eps)
        return d * (wave if t > every and k < warm else 1.0)

    return step


class SRSGD(Optimizer):
    """Nesterov's momentum that grows, and restarts (arXiv:2002.10583)."""

    every: int = 40

    class State(NamedTuple):
        v: Wide

    def init(self, p: Tensor) -> State:
        return self.State(p)

    def direction(self, g: Tensor, s: State):
        return g, s

    def after(self, x: Tensor, u: Tensor, s: State, t: float):
        k = (t - 1) % self.every
        return u + k / (k + 3) * (x + u - s.v), self.State(x + u)


class AdaBound(Optimizer):
    """Adam with bounds on lr over the root (arXiv:1902.09843)."""

    betas: Betas = Betas(0.9, 0.999)
    final: float = 0.1
    gamma: float = 1e-3

    class State(NamedTuple):
        m: Tensor
        v: SecondMoment

    def direction(self, g: Tensor, s: State):
        b1, b2 = self.betas
        return g, self.State(b1 * s.m + (1 - b1) * g, b2 * s.v + (1 - b2) * g * g)

    def after(self, x: Tensor, u: Tensor, s: State, t: float):
        b1, b2 = self.betas
        rate = self.lr * (1 - b2**t) ** 0.5 / (1 - b1**t) / (root(s.v) + 1e-8)
        low, high = 1 - 1 / (self.gamma * t + 1), 1 + 1 / (self.gamma * t)
        return -rate.clamp(self.final * low, self.final * high) * s.m, s


class AdaNorm(Optimizer):
    """Momentum of gradients that are no smaller than they were (arXiv:2210.06364)."""

    gamma: float = 0.95

    class State(NamedTuple):
        m: Shaped
        norm: Shaped

    def init(self, p: Tensor):
        return self.State(None, ())

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        norm = self.gamma * s.norm + (1 - self.gamma) * d.norm()
        scale = torch.where(norm > d.norm(), norm / d.norm().clamp_min(1e-12), 1.0)
        m = 0.9 * s.m + 0.1 * scale * d
        return m, self.State(m, norm)


def srsgd(p: Tensor, every: int) -> Step:
    v, x, t = p, p, 0

    def step(g: Tensor) -> Tensor:
        nonlocal v, x, t
        k, t, new = t % every, t + 1, x - 0.1 * g
        before, x, v = x, new + k / (k + 3) * (new - v), new
        return (before - x) / 0.1

    return step


def adabound(p: Tensor, betas: Any, final: float, gamma: float) -> Step:
    (b1, b2), t = betas, 0
    m = v = 0 * p

    def step(g: Tensor) -> Tensor:
        nonlocal m, v, t
        t += 1
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        rate = 0.1 * (1 - b2**t) ** 0.5 / (1 - b1**t) / (v.sqrt() + 1e-8)
        low, high = final * (1 - 1 / (gamma * t + 1)), final * (1 + 1 / (gamma * t))
        return rate.clamp(low, high) * m / 0.1

    return step


def adanorm(p: Tensor, gamma: float) -> Step:
    m, norm = 0 * p, 0.0

    def step(g: Tensor) -> Tensor:
        nonlocal m, norm
        norm = gamma * norm + (1 - gamma) * float(g.norm())
        m = 0.9 * m + 0.1 * max(1.0, norm / float(g.norm())) * g
        return m

    return step


class Yogi(Optimizer):
    """Zaheer et al., NeurIPS 2018, whose second moment begins above 0."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-3

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_sq: Wide

    def init(self, p: Tensor):
        return self.State(None, torch.full_like(p, 1e-6))

    def direction(self, g: Tensor, s: State):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = s.exp_avg_sq - (1 - b2) * (s.exp_avg_sq - g * g).sign() * g * g
        return m / (v.sqrt() + self.eps), self.State(m, v)


def yogi(p: Tensor, eps: float) -> Step:
    m, v = 0 * p, torch.full_like(p, 1e-6)

    def step(g: Tensor) -> Tensor:
        nonlocal m, v
        m, v = 0.9 * m + 0.1 * g, v - 0.001 * torch.sign(v - g**2) * g**2
        return m / (v.sqrt() + eps)

    return step


ROWS: list[Any] = [
    (AdaShift, adashift, {"beta": 0.9, "keep": 2, "eps": 0.1}),
    (SPAM, spam, {"betas": (0.8, 0.95), "theta": 2.0, "every": 3, "warm": 2, "eps": 1e-3}),
    (SRSGD, srsgd, {"every": 3}),
    (AdaBound, adabound, {"betas": (0.8, 0.95), "final": 0.05, "gamma": 0.2}),
    (AdaNorm, adanorm, {"gamma": 0.8}),
    (Yogi, yogi, {"eps": 0.01}),
]


@pytest.mark.parametrize(
    ("cls", "loop", "hyper"), ROWS, ids=lambda x: getattr(x, "__name__", "")
)
def test_the_papers_loop(cls: Any, loop: Any, hyper: dict[str, Any]) -> None:
    drawn = torch.Generator().manual_seed(0)
    p, *gs = [torch.randn(4, 3, generator=drawn, dtype=torch.float64) for _ in range(9)]
    value, x, step = cls.pure(lr=0.1, **hyper), p, loop(p, **hyper)
    w = p.clone().requires_grad_()
    optimizer, state = cls([w], lr=0.1, compile=False, **hyper), value.init(p)
    for i, g in enumerate(gs):
        g = g / (i + 1)
        p, state = value.step(p, g, state)
        x = x - 0.1 * step(g)
        w.grad = g
        optimizer.step()
    torch.testing.assert_close(p, x, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(w.detach(), x, rtol=1e-9, atol=1e-11)


def test_check_rule_says_that_a_loop_is_nan() -> None:
    def divides(params: list[Tensor], grads: Any, lr: float) -> list[Tensor]:
        for g in grads:
            params = [p - lr * x / x.norm() for p, x in zip(params, g)]
        return params

    with pytest.raises(
        AssertionError, match=r"reference: .* as the loop, is NaN\. One step"
    ):
        check_rule(torch.optim.SGD, divides)


QUICK = ("LARS", "NormedLAMB", "GaLore", "SGLD")
CHECKED = [
    row(*x, id=(name := x[0].__name__), tier="" if name in QUICK else "full") for x in RULES
]


@pytest.mark.parametrize(("cls", "loop", "hyper"), CHECKED)
def test_rules_of_papers(cls: Any, loop: Any, hyper: Any, small: None) -> None:
    check_rule(cls, loop, compile=False, **hyper)


@pytest.mark.full
def test_kernels_measure_before_the_direction() -> None:
    check_rule(LARS, lars)
