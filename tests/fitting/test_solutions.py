"""Derivatives of solutions, and what `solve` says and takes: batches, states, vmap."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacrev, vmap

from optimi_func import implicit_root, lbfgs

WIDE = torch.float64
SHARP = lbfgs(tolerance_change=0.0, tolerance_grad=1e-11)


def bent(p: Tensor, a: Tensor) -> Tensor:
    return ((p - a) ** 2).sum() + (p**4).sum()


def drawn(*shape: int, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def solution_of(a: Tensor) -> Tensor:
    return SHARP.solve(bent, torch.zeros_like(a.detach()), a)[0]


def test_second_and_third_derivatives_are_those_of_the_closed_form() -> None:
    a = torch.tensor(0.8, dtype=WIDE)
    x = solution_of(a)
    slope = 2 / (2 + 12 * x**2)
    curved = -24 * x * slope**2 / (2 + 12 * x**2)
    torch.testing.assert_close(grad(grad(solution_of))(a), curved)
    b = a.clone().requires_grad_()
    (first,) = torch.autograd.grad(solution_of(b), b, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first, b)[0], curved)
    near = [grad(grad(solution_of))(a + h) for h in (1e-4, -1e-4)]
    third = grad(grad(grad(solution_of)))(a)
    torch.testing.assert_close(third, (near[0] - near[1]) / 2e-4, rtol=1e-5, atol=1e-5)


DATA = drawn(6, 3)


def tree_loss(p: Any, a: Tensor, b: Tensor) -> Tensor:
    fit = (DATA @ p["w"] - a).square().sum() + b * p["w"].square().sum()
    far = (p["c"] - b) ** 4 + (p["c"] - a.sum()) ** 2
    return fit + (p["w"] ** 4).sum() + far + p["c"] * p["w"][0]


def polished(loss: Any, p: Tensor, *args: Tensor) -> Tensor:
    """The solution to the last digit, for finite differences."""
    p, args = p.detach(), tuple(x.detach() for x in args)
    for _ in range(9):
        p = p - torch.linalg.solve(hessian(loss)(p, *args), grad(loss)(p, *args))
    return p


def test_derivatives_of_trees_pass_torchs_checks() -> None:
    def solved(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        def flat(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return tree_loss({"w": x[:3], "c": x[3]}, a, b)

        x = polished(flat, torch.ones(4, dtype=WIDE), a, b)
        root = implicit_root(grad(tree_loss), {"w": x[:3], "c": x[3]}, a, b)
        return root["w"], root["c"]

    a, b = drawn(6).requires_grad_(), torch.tensor(0.7, dtype=WIDE, requires_grad=True)
    assert gradcheck(solved, (a, b)) and gradgradcheck(solved, (a, b), fast_mode=True)


def test_batches_have_the_second_derivatives_of_each_problem() -> None:
    a = drawn(3, 2)

    def together(a: Tensor) -> Tensor:
        return SHARP.solve(bent, torch.zeros(3, 2, dtype=WIDE), a, in_dims=0)[0].sum()

    def one(a: Tensor) -> Tensor:
        return solution_of(a).sum()

    second = jacrev(jacrev(together))(a)
    for i in range(3):
        for j in range(3):
            wanted = jacrev(jacrev(one))(a[i]) if i == j else torch.zeros(2, 2).to(WIDE)
            torch.testing.assert_close(second[i, :, j], wanted, rtol=1e-7, atol=1e-9)


def test_tensors_from_elsewhere_are_refused() -> None:
    b = torch.ones(3, dtype=WIDE, requires_grad=True)
    start, text = (
        torch.zeros(3, dtype=WIDE),
        r"from elsewhere.*shape \(3,\).*pass it in args",
    )

    def solved(b: Tensor) -> Tensor:
        return lbfgs().solve(lambda p: ((p - b) ** 2).sum(), start)[0].sum()

    for call in (
        lambda: solved(b * 2),
        lambda: grad(solved)(b.detach()),
        lambda: grad(grad(solved))(b.detach()),
        lambda: vmap(grad(solved))(torch.ones(2, 3, dtype=WIDE)),
        lambda: implicit_root(lambda p: p - b, start),
        lambda: lbfgs().solve(
            lambda p: ((p - b) ** 2).sum(), start.expand(2, 3), in_dims=(0,)
        ),
        lambda: torch.func.jvp(solved, (b.detach(),), (b.detach(),)),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
    # What does not need a derivative, or changes no solution, may come from anywhere.
    with torch.no_grad():
        torch.testing.assert_close(solved(b), b.sum())
    torch.testing.assert_close(solved(b.detach()), b.sum().detach())
    found, _ = lbfgs().solve(lambda p: ((p - 1) ** 2).sum() + b.sum(), start)
    torch.testing.assert_close(found, b.detach())


@pytest.mark.parametrize("condition", [1e4, 1e8, 8e9])
def test_ill_conditioned_solutions_have_derivatives(condition: float) -> None:
    q, _ = torch.linalg.qr(drawn(20, 20))
    h = q * torch.logspace(0, torch.tensor(condition).log10(), 20, dtype=WIDE) @ q.mT
    h = (h + h.mT) / 2
    b, v = drawn(20).requires_grad_(), drawn(2, 20)[1]
    x = implicit_root(lambda x, b: h @ x - b, torch.linalg.solve(h, b.detach()), b)
    wanted = torch.linalg.solve(h, v)
    (slope,) = torch.autograd.grad(x @ v, b)
    assert (slope - wanted).norm() < 1e-16 * condition * 100 * wanted.norm()


def test_many_unknowns_take_conjugate_gradients_which_tell_their_residual() -> None:
    q, v = drawn(300, 300), drawn(2, 300)[1]
    h = q @ q.mT / 300 + torch.eye(300, dtype=WIDE)
    b = drawn(300).requires_grad_()

    def slope(h: Tensor) -> Tensor:
        x = implicit_root(lambda x, b: h @ x - b, torch.zeros(300, dtype=WIDE), b)
        return torch.autograd.grad(x @ v, b)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(slope(h), torch.linalg.solve(h, v))
    scale = torch.logspace(0, 6, 300, dtype=WIDE)
    with pytest.warns(UserWarning, match=r"a residual of \d.*like scale"):
        slope(scale * h * scale[:, None])
    with pytest.raises(RuntimeError, match="positive definite"):
        slope(h - 2 * torch.eye(300, dtype=WIDE))


def test_a_batch_with_a_saddle_has_nan_there_and_says_so() -> None:
    signs = torch.tensor([1.0, -1.0, 1.0], dtype=WIDE)
    b = torch.ones(3, 2, dtype=WIDE, requires_grad=True)
    x = vmap(lambda s, b: implicit_root(lambda x, b: s * x - b, b.detach(), b))(signs, b)
    with pytest.warns(UserWarning, match="1 of 3 solutions have the derivative NaN"):
        (slope,) = torch.autograd.grad(x.sum(), b)
    assert slope.isnan().all(1).tolist() == [False, True, False]
    assert (slope[::2] == 1).all()
    skewed = torch.tensor([[2.0, 1.0], [0.0, 2.0]])
    one = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="needs a symmetric positive definite"):
        implicit_root(lambda x, b: skewed @ x - b, torch.ones(2), one).sum().backward()


def test_reasons() -> None:
    start = torch.ones(2)

    def end(loss: Any, p: Tensor = start, **options: Any) -> tuple[Tensor, int, bool]:
        p, state = lbfgs(**options).solve(loss, p)
        assert state.done == (state.reason > 0)
        return p, int(state.reason), bool(state.converged)

    assert end(lambda p: ((p - 2) ** 2).sum())[1:] == (1, True)
    assert end(lambda p: (p**4).sum(), tolerance_grad=0.0)[1:] == (2, True)
    x, *told = end(lambda p: p.sum())  # without a minimum
    assert told == [3, False] and x.isfinite().all() and (x < -1e6).all()
    x, *told = end(lambda p: (p * torch.nan).sum())
    assert told == [4, False] and torch.equal(x, start)
    # A search that meets NaN turns back.
    x, *told = end(lambda p: (p.log() ** 2 + p).sum(), start * 30)
    assert told == [2, True]
    torch.testing.assert_close(2 * x.log(), -x, rtol=1e-3, atol=0.0)
    # Without a search the last finite point is kept.
    x, *told = end(lambda p: (p**4).sum(), start * 3, line_search_fn=None, lr=10.0)
    assert told == [4, False] and x.isfinite().all()
    _, state = lbfgs().solve(lambda p: (p**4).sum(), start * 3, max_steps=2)
    assert not state.done and not state.converged


def test_a_batch_tells_the_reason_of_each_member() -> None:
    kinds = torch.tensor([0.0, 1.0, torch.nan])

    def loss(p: Tensor, kind: Tensor) -> Tensor:
        return torch.where(kind == 0, ((p - 2) ** 2).sum(), p.sum() * kind)

    x, state = lbfgs().solve(loss, torch.ones(3, 2), kinds, in_dims=0)
    assert state.reason.tolist() == [1, 3, 4]
    assert state.converged.tolist() == [True, False, False]
    assert x.isfinite().all() and torch.equal(x[2], torch.ones(2))


def test_a_loss_of_few_digits_converges() -> None:
    """In float32 searches end in the rounding of the loss, which is no failure."""
    t = torch.linspace(0, 3, 12)
    y = 2 * torch.exp(-(torch.rand(200, 1, generator=torch.Generator()) + 0.5) * t)
    y = y + 0.1 * drawn(200, 12, dtype=torch.float32)

    def loss(p: Tensor, y: Tensor) -> Tensor:
        return (p[0] * torch.exp(-p[1] * t) - y).square().sum()

    x, state = lbfgs().solve(loss, torch.ones(200, 2), y, in_dims=0)
    wide, _ = lbfgs().solve(loss, torch.ones(200, 2).double(), y, in_dims=0)
    assert state.converged.float().mean() > 0.97
    torch.testing.assert_close(x.double(), wide, rtol=0.0, atol=2e-2)


@pytest.mark.parametrize("search", ["strong_wolfe", None])
def test_float32_gradients_whose_squares_overflow(search: Any) -> None:
    """From where torch's class goes on to the minimum, or ends in NaN itself."""

    def loss(p: Tensor) -> Tensor:
        return (p**2).exp().sum()

    start = torch.tensor([5.0, 6.6])
    (slope,) = torch.autograd.grad(loss(x := start.clone().requires_grad_()), x)
    assert slope.square().isinf().any() and slope.isfinite().all()
    x, state = lbfgs(line_search_fn=search).solve(loss, start)
    assert x.abs().max() < 1e-3 and state.converged


def test_none_leaves() -> None:
    def loss(p: Any, a: Any) -> Tensor:
        assert p["frozen"] is None and a[1] is None
        return bent(p["x"], a[0])

    a = drawn(3, 2)
    one = {"x": torch.zeros(2, dtype=WIDE), "frozen": None}
    params, state = lbfgs().solve(loss, one, (a[0], None))
    assert params["frozen"] is None and state.converged
    many = {"x": torch.zeros(3, 2, dtype=WIDE), "frozen": None}
    together, _ = lbfgs().solve(loss, many, (a, None), in_dims=0)
    torch.testing.assert_close(together["x"][0], params["x"])
    fit = lbfgs()
    given = fit.init(one)
    for _ in range(30):
        one, given = fit.step(
            one,
            given,
            lambda p: (
                bent(p["x"], a[0]),
                {"x": grad(bent)(p["x"], a[0]), "frozen": None},
            ),
        )
    torch.testing.assert_close(one["x"], params["x"])


def test_in_dims_as_of_vmap() -> None:
    a = drawn(4, 2)
    usual, _ = lbfgs().solve(bent, torch.zeros(4, 2, dtype=WIDE), a, in_dims=(0, 0))
    short, _ = lbfgs().solve(bent, torch.zeros(4, 2, dtype=WIDE), a, in_dims=0)
    assert torch.equal(usual, short)
    with pytest.raises(ValueError, match=r"have \[3, 4\] problems along"):
        lbfgs().solve(lambda p, a: bent(p["x"], a), {"x": a[:3]}, a, in_dims=0)


def test_an_empty_batch() -> None:
    a = torch.zeros(0, 2, dtype=WIDE, requires_grad=True)
    x, state = lbfgs().solve(bent, torch.zeros(0, 2, dtype=WIDE), a, in_dims=0)
    assert x.shape == (0, 2) and state.converged.shape == (0,)
    (slope,) = torch.autograd.grad(x.sum(), a)
    assert slope.shape == (0, 2)


@pytest.mark.parametrize("dims", [None, 0])
def test_a_state_goes_on(dims: Any) -> None:
    a = drawn(8, 2) if dims == 0 else drawn(2)
    start, fit = torch.zeros_like(a) + 3, lbfgs()
    straight, wanted = fit.solve(bent, start, a, in_dims=dims)
    x, state = fit.solve(bent, start, a, in_dims=dims, max_steps=5)
    assert not state.done.any()
    x, state = fit.solve(bent, x, a, in_dims=dims, state=state)
    torch.testing.assert_close(x, straight, rtol=0.0, atol=1e-12)
    assert torch.equal(state.func_evals, wanted.func_evals)
    again, same = fit.solve(bent, x, a, in_dims=dims, state=state)
    assert torch.equal(again, x) and torch.equal(same.func_evals, state.func_evals)
    for other in (lbfgs(history_size=3).init(a), fit.init(torch.ones(5))):
        with pytest.raises(ValueError, match=r"state= has pairs of \("):
            fit.solve(bent, start, a, in_dims=dims, state=other)


def test_solve_under_vmap() -> None:
    a = drawn(5, 2)
    alone = torch.stack([solution_of(x) for x in a])
    torch.testing.assert_close(vmap(solution_of)(a), alone, rtol=0.0, atol=1e-9)

    def captures(a: Tensor) -> Tensor:
        return SHARP.solve(lambda p: bent(p, a), torch.zeros(2, dtype=WIDE))[0]

    torch.testing.assert_close(vmap(captures)(a), alone, rtol=0.0, atol=1e-9)

    def batch(a: Tensor) -> Tensor:
        return SHARP.solve(bent, torch.zeros(5, 2, dtype=WIDE), a, in_dims=0)[0]

    pairs = torch.stack([a, a + 1])
    both = vmap(batch)(pairs)
    torch.testing.assert_close(both[0], alone, rtol=0.0, atol=1e-9)
    assert not torch.allclose(both[1], alone)
    slopes = vmap(grad(lambda a: solution_of(a).sum()))(a)
    torch.testing.assert_close(slopes, 2 / (2 + 12 * alone**2), rtol=1e-7, atol=0.0)


def test_an_lr_of_one_element() -> None:
    for shape in ((1,), (1, 1)):
        x, state = lbfgs(lr=torch.full(shape, 0.5)).solve(
            bent, torch.zeros(2), torch.ones(2)
        )
        usual, _ = lbfgs(lr=0.5).solve(bent, torch.zeros(2), torch.ones(2))
        assert torch.equal(x, usual) and state.search.t.shape == ()
