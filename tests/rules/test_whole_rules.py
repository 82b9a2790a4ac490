"""Users' rules with state in shapes of their own, beside loops of plain tensors."""

from typing import Any, NamedTuple

import pytest
import torch
from tiers import row
from torch import Tensor, nn

from optimi_func.rules import Betas, Moment, Optimizer, Shaped, ThreeBetas, root
from optimi_func.testing import check_rule


class AdamMini(Optimizer):
    """Adam with one v for each row of a matrix (arXiv:2406.16793)."""

    betas: Betas = Betas(0.9, 0.99)
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Shaped
        rows: Shaped  # v

    def init(self, p: Tensor) -> Any:
        made: Any = self.State
        return made(None, (*p.shape[:1], *[1] * (p.dim() - 1)))

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float):
        b1, b2 = self.betas
        squares = d * d
        if d.dim() > 1:
            squares = squares.mean([*range(1, d.dim())], keepdim=True)
        m = b1 * s.exp_avg + (1 - b1) * d
        v = b2 * s.rows + (1 - b2) * squares
        u = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return u, self.State(m, v)


def adam_mini(params: Any, grads: Any, lr: float, betas: Any = (0.9, 0.99)) -> Any:
    b1, b2 = betas
    for i, p in enumerate(params):
        m, v = 0 * p, 0 * p
        for t, step in enumerate(grads, 1):
            squares = step[i] ** 2
            for n in range(len(p) if p.dim() > 1 else 0):
                squares[n] = squares[n].mean()
            m, v = b1 * m + (1 - b1) * step[i], b2 * v + (1 - b2) * squares
            p = p - lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-6)
        params[i] = p
    return params


class CAME(Optimizer):
    """Adafactor's factors, and factors of how far from its mean it steps (2307.02047)."""

    betas: ThreeBetas = ThreeBetas(0.9, 0.99, 0.999)
    eps: tuple[float, float] = (1e-20, 1e-12)
    clip: float = 1.0

    class State(NamedTuple):
        exp_avg: Shaped
        rows: Shaped
        cols: Shaped
        rows_apart: Shaped
        cols_apart: Shaped

    def init(self, p: Tensor) -> Any:
        made: Any = self.State
        return made(None, *[(p.shape[0], 1), (1, p.shape[1])] * 2)

    def refuses(self, p: Tensor) -> str | None:
        return None if p.dim() == 2 else "CAME takes matrices"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        b1, b2, b3 = self.betas
        *first, v = factored(b2, s.rows, s.cols, d * d + self.eps[0])
        u = d / root(v)
        u = u / (root((u * u).mean()) / self.clip).clamp_min(1.0)
        m = b1 * s.exp_avg + (1 - b1) * u
        apart = (u - m) ** 2 + self.eps[1]
        *second, v = factored(b3, s.rows_apart, s.cols_apart, apart)
        return m / root(v), self.State(m, *first, *second)


def factored(b: Any, rows: Tensor, cols: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    rows = b * rows + (1 - b) * x.mean(1, keepdim=True)
    cols = b * cols + (1 - b) * x.mean(0, keepdim=True)
    return rows, cols, rows * cols / rows.mean()


def came(params: Any, grads: Any, lr: float) -> Any:
    for i, p in enumerate(params):
        m = 0 * p
        r, c, r2, c2 = (torch.zeros(n, dtype=p.dtype) for n in (*p.shape, *p.shape))
        for step in grads:
            squares = step[i] ** 2 + 1e-20
            r, c = 0.99 * r + 0.01 * squares.mean(1), 0.99 * c + 0.01 * squares.mean(0)
            u = step[i] / (torch.outer(r, c) / r.mean()).sqrt()
            u = u / max(1.0, u.square().mean().sqrt().item())
            m = 0.9 * m + 0.1 * u
            apart = (u - m) ** 2 + 1e-12
            r2, c2 = 0.999 * r2 + 0.001 * apart.mean(1), 0.999 * c2 + 0.001 * apart.mean(0)
            p = p - lr * m / (torch.outer(r2, c2) / r2.mean()).sqrt()
        params[i] = p
    return params


class Shampoo(Optimizer):
    """L^(-1/4) g R^(-1/4), with sums L and R of gg^T and g^Tg (arXiv:1802.09568)."""

    begin: float = 1.0
    most: int = 1024

    class State(NamedTuple):
        left: Shaped
        right: Shaped

    def init(self, p: Tensor) -> State:
        sides = [self.begin * torch.eye(n, dtype=p.dtype, device=p.device) for n in p.shape]
        return self.State(*sides)

    def refuses(self, p: Tensor) -> str | None:
        fits = p.dim() == 2 and max(p.shape) <= self.most
        return None if fits else f"Shampoo takes matrices of sides up to {self.most}"

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        left, right = s.left + d @ d.mT, s.right + d.mT @ d
        return fourth_root(left) @ d @ fourth_root(right), self.State(left, right)


def fourth_root(a: Tensor) -> Tensor:
    """Return a^(-1/4) by Newton's iteration, which has derivatives where eigh has none."""
    scale = 2.5 / torch.linalg.matrix_norm(a)
    one = torch.ones_like(a[0]).diag()
    found, m = scale**0.25 * one, scale * a
    for _ in range(30):
        step = (5 * one - m) / 4
        found, m = found @ step, step @ step @ step @ step @ m
    return found


def shampoo(params: Any, grads: Any, lr: float, most: int) -> Any:
    def power(a: Tensor) -> Tensor:
        values, q = torch.linalg.eigh(a)
        return (q * values**-0.25) @ q.T

    for i, p in enumerate(params):
        left, right = (torch.eye(n, dtype=p.dtype) for n in p.shape)
        for step in grads:
            g = step[i]
            left, right = left + g @ g.T, right + g.T @ g
            p = p - lr * power(left) @ g @ power(right)
        params[i] = p
    return params


ROWS = [
    row(AdamMini, adam_mini, {"betas": (0.8, 0.95)}, id="AdamMini"),
    row(CAME, came, {"lr": 1e-3}, id="CAME"),
    row(Shampoo, shampoo, {"most": 16, "lr": 0.3}, id="Shampoo", tier="full"),
]


@pytest.mark.parametrize(("cls", "loop", "hyper"), ROWS)
def test_rules_of_users(cls: Any, loop: Any, hyper: Any) -> None:
    check_rule(cls, loop, compile=False, **hyper)


class Left(Optimizer):
    """A matrix that begins as given, and a moment that the map does not see."""

    beta: float = 0.5

    class State(NamedTuple):
        exp_avg: Moment
        left: Shaped

    def init(self, p: Tensor) -> Any:
        made: Any = self.State
        return made(None, 2 * torch.eye(p.shape[0], dtype=p.dtype, device=p.device))

    def direction(self, g: Tensor, s: State):
        assert s.left is None
        m = self.beta * s.exp_avg + g
        return m, s._replace(exp_avg=m)

    def whole(self, d: Tensor, s: State, x: Tensor, lr: float) -> Any:
        assert s.exp_avg is None
        return s.left @ d + 0 * x * lr, s._replace(left=s.left * (1 - self.beta))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_first_values_of_a_shape_of_their_own(dtype: torch.dtype) -> None:
    p, g = torch.ones(2, 3, dtype=dtype), torch.full((2, 3), 0.5, dtype=dtype)
    w = nn.Parameter(p.clone())
    optimizer: Any = Left([w], lr=0.25, compile=False)
    value: Any = Left.pure(lr=0.25)
    state = value.init(p)
    assert state.leaves.left.dtype == torch.float32
    for _ in range(2):
        w.grad = g
        optimizer.step()
        p, state = value.step(p, g, state)
    # The first moves by 0.25 * 2 * 0.5, the second by 0.25 * 1 * 0.75.
    assert torch.equal(w, p) and p.unique().tolist() == [1 - 0.25 - 0.1875]
    for left in (state.leaves.left, optimizer.state[w]["left"]):
        assert left.tolist() == [[0.5, 0.0], [0.0, 0.5]]


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="fields that are Shaped come last"):

        class Mixed(Optimizer):  # type: ignore
            class State(NamedTuple):
                left: Shaped
                exp_avg: Moment

            def direction(self, g: Tensor, s: State):
                return g, s

            def whole(self, d: Tensor, s: State) -> Any:
                return d, s

    with pytest.raises(TypeError, match="are for a class with `whole`"):

        class Lacking(Optimizer):  # type: ignore
            class State(NamedTuple):
                left: Shaped

            def direction(self, g: Tensor):
                return g

    class Shrinks(Left):
        def whole(self, d: Tensor, s: Left.State) -> Any:  # type: ignore
            return d, s._replace(left=s.left[:1])

    with pytest.raises(ValueError, match=r"returned left=.* the shape \(2, 2\), which"):
        Shrinks.pure(lr=0.1).init(torch.ones(2, 3))

    class Alone(Left):
        def whole(self, d: Tensor, s: Left.State) -> Any:  # type: ignore
            return d

    with pytest.raises(ValueError, match=r"allowed is \(d, self.State\(...\)\)"):
        Alone.pure(lr=0.1).init(torch.ones(2, 3))

    class Odd(Left):
        def init(self, p: Tensor) -> Any:
            return self.State(None, (2, -1))  # type: ignore

    with pytest.raises(ValueError, match="in Shaped fields of any, and shapes"):
        Odd.pure(lr=0.1).init(torch.ones(2, 3))
