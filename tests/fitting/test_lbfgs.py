"""`lbfgs` beside torch.optim.LBFGS and scipy; batches, graphs, and derivatives."""

import math
from typing import Any

import pytest
import scipy.optimize
import torch
from torch import Tensor

from optimi_func import LBFGS, implicit_root, lbfgs

WIDE = torch.float64


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def bowl(x: Tensor) -> Tensor:
    return (torch.arange(1.0, len(x) + 1, dtype=x.dtype) * x**2).sum() + (x**4).sum()


def logistic(x: Tensor) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    data = torch.randn(40, len(x), generator=drawn, dtype=WIDE)
    wanted = (torch.rand(40, generator=drawn) > 0.5).to(WIDE)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(data @ x, wanted)
    return loss + 1e-2 * (x**2).sum()


def start(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=WIDE)


def value_and_grad(fn: Any) -> Any:
    def both(p: Any) -> Any:
        grads, value = torch.func.grad_and_value(fn)(p)
        return value, grads

    return both


def minimized_by_torch(fn: Any, n: int, **options: Any) -> tuple[Tensor, int]:
    """Return where torch's class ends in one step, and its evaluations."""
    x, calls = start(n).requires_grad_(), 0
    optimizer = LBFGS([x], max_iter=500, max_eval=1000, **options)

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        (loss := fn(x)).backward()
        return loss

    optimizer.step(closure)
    return x.detach(), calls


def minimized(fn: Any, n: int, most: int = 600, **options: Any) -> tuple[Tensor, Any, int]:
    """Return where the value's steps end, their state, and their evaluations."""
    calls, fit, params = 0, lbfgs(**options), {"x": start(n)}

    def counted(p: Any) -> Any:
        nonlocal calls
        calls += 1
        return value_and_grad(lambda tree: fn(tree["x"]))(p)

    state = fit.init(params)
    for i in range(most):
        if state.done:
            break
        params, state = fit.step(params, state, counted)
        assert calls == i + 1 == int(state.func_evals)
    return params["x"], state, calls


OPTIONS: list[dict[str, Any]] = [
    {},
    {"history_size": 3},
    {"lr": 0.1},
    {"lr": torch.tensor(0.5)},
    {"tolerance_grad": 1e-2},
    {"tolerance_change": 1e-3},
    {"line_search_fn": None, "lr": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("fn, n", [(rosenbrock, 6), (bowl, 8), (logistic, 5)])
def test_steps_are_torchs(fn: Any, n: int, options: dict[str, Any]) -> None:
    if fn is rosenbrock and "line_search_fn" in options:
        return  # without a search its path depends on every rounding
    options = {"history_size": 4, "line_search_fn": "strong_wolfe", **options}
    theirs, wanted = minimized_by_torch(fn, n, **options)
    ours, _, calls = minimized(fn, n, **options)
    assert calls == wanted
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-8)


@pytest.mark.parametrize("options", [*OPTIONS[1:], {"max_ls": 1}], ids=str)
def test_options_change_the_steps(options: dict[str, Any]) -> None:
    """With a first length from which a search takes several evaluations."""
    usual, other = (minimized(rosenbrock, 6, **{"lr": 5.0, **x}) for x in ({}, options))
    assert not torch.equal(usual[0], other[0])


@pytest.mark.parametrize("fn, n", [(rosenbrock, 6), (bowl, 8), (logistic, 5)])
def test_the_minimum_is_scipys(fn: Any, n: int) -> None:
    x, state, calls = minimized(fn, n)
    found = scipy.optimize.minimize(
        lambda x: fn(torch.tensor(x)).item(),
        start(n).numpy(),
        jac=lambda x: torch.func.grad(fn)(torch.tensor(x)).numpy(),
        method="L-BFGS-B",
        options={"ftol": 1e-15, "gtol": 1e-9},
    )
    torch.testing.assert_close(x, torch.tensor(found.x), rtol=0.0, atol=1e-4)
    assert float(state.f) < found.fun + 1e-8
    assert calls < 2 * found.nfev


def decay(p: Any, y: Tensor) -> Tensor:
    at = torch.linspace(0, 3, 12, dtype=WIDE)
    return ((p["a"] * torch.exp(-p["b"] * at) - y) ** 2).sum()


def curves(count: int) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    a, b, noise = torch.rand(3, count, 1, generator=drawn, dtype=WIDE) + 0.5
    return a * torch.exp(-b * torch.linspace(0, 3, 12, dtype=WIDE)) + 0.02 * noise


def ones(*shape: int) -> dict[str, Tensor]:
    return {x: torch.ones(shape, dtype=WIDE) for x in "ab"}


def test_a_batch_takes_the_steps_of_each_problem_alone() -> None:
    y, fit = curves(24), lbfgs()
    together, states = fit.solve(decay, ones(24), y, in_dims=(0, 0))
    for i in range(24):
        alone, state = fit.solve(decay, ones(), y[i])
        assert state.func_evals == states.func_evals[i]
        assert state.n_iter == states.n_iter[i]
        for x in "ab":
            torch.testing.assert_close(together[x][i], alone[x], rtol=0.0, atol=1e-9)
    assert states.done.all()
    assert len(states.func_evals.unique()) > 3


def test_finished_members_do_not_change() -> None:
    y, fit = curves(6), lbfgs()
    step = torch.func.vmap(
        lambda p, s, y: fit.step(p, s, value_and_grad(lambda q: decay(q, y)))
    )
    params, state = ones(6), torch.func.vmap(fit.init)(ones(6))
    held = 0
    for _ in range(60):
        before, known = (params, state), state.done
        params, state = step(params, state, y)
        for x, z in zip(*map(torch.utils._pytree.tree_leaves, (before, (params, state)))):
            assert torch.equal(x[known], z[known])
        held += int(known.any())
    assert state.done.all() and held > 3


def test_axes_of_a_batch() -> None:
    y = curves(5)
    usual, _ = lbfgs().solve(decay, ones(5), y, in_dims=(0, 0))
    other, _ = lbfgs().solve(decay, ones(5), y.T, in_dims=(0, 1))
    for x in "ab":
        torch.testing.assert_close(usual[x], other[x], rtol=0.0, atol=1e-12)
    few, state = lbfgs().solve(decay, ones(5), y, in_dims=(0, 0), max_steps=7)
    assert not state.done.all() and not torch.equal(few["a"], usual["a"])
    with pytest.raises(ValueError, match="in_dims"):
        lbfgs().solve(decay, ones(5), y, in_dims=(0,))


@pytest.mark.full
def test_a_step_is_one_graph() -> None:
    fit, params = lbfgs(history_size=4), start(6)
    both = value_and_grad(rosenbrock)
    compiled = torch.compile(lambda p, s: fit.step(p, s, both), fullgraph=True)
    one = two = (params, fit.init(params))
    for _ in range(12):
        one, two = fit.step(*one, both), compiled(*two)
    assert (one[0] - params).abs().max() > 0.1
    torch.testing.assert_close(two[0], one[0], rtol=0.0, atol=1e-9)


def ridge(w: Tensor, data: Tensor, y: Tensor, share: Tensor) -> Tensor:
    return ((data @ w - y) ** 2).sum() + share * (w**2).sum()


def test_a_solution_has_the_derivatives_of_the_closed_form() -> None:
    drawn = torch.Generator().manual_seed(0)
    data = torch.randn(20, 4, generator=drawn, dtype=WIDE).requires_grad_()
    y = torch.randn(20, generator=drawn, dtype=WIDE).requires_grad_()
    share = torch.tensor(0.3, dtype=WIDE, requires_grad=True)
    fit = lbfgs(tolerance_change=0.0, tolerance_grad=1e-10)
    w, _ = fit.solve(ridge, torch.zeros(4, dtype=WIDE), data, y, share, max_steps=100)
    exact = torch.linalg.solve(
        data.mT @ data + share * torch.eye(4, dtype=WIDE), data.mT @ y
    )
    torch.testing.assert_close(w, exact, rtol=0.0, atol=1e-8)
    v = torch.randn(4, generator=drawn, dtype=WIDE)
    ours = torch.autograd.grad((w * v).sum(), (data, y, share))
    wanted = torch.autograd.grad((exact * v).sum(), (data, y, share))
    for x, z in zip(ours, wanted):
        torch.testing.assert_close(x, z, rtol=1e-6, atol=1e-8)
    # A loss that is no square: against finite differences of solve.
    a = torch.tensor(0.7, dtype=WIDE, requires_grad=True)

    def bent(p: Tensor, a: Tensor) -> Tensor:
        return (p**4).sum() + ((p - a) ** 2).sum()

    def at(a: Tensor) -> Tensor:
        return fit.solve(bent, torch.ones(2, dtype=WIDE), a)[0].sum()

    (slope,) = torch.autograd.grad(at(a), a)
    near = [float(at((a + h).detach())) for h in (1e-4, -1e-4)]
    assert float(slope) == pytest.approx((near[0] - near[1]) / 2e-4, rel=1e-5)


def test_batches_have_derivatives_too() -> None:
    drawn = torch.Generator().manual_seed(0)
    data = torch.randn(20, 4, generator=drawn, dtype=WIDE)
    y = torch.randn(20, generator=drawn, dtype=WIDE).requires_grad_()
    shares = torch.rand(5, generator=drawn, dtype=WIDE).requires_grad_()
    fit = lbfgs(tolerance_change=0.0, tolerance_grad=1e-10)
    w, _ = fit.solve(
        ridge, torch.zeros(5, 4, dtype=WIDE), data, y, shares, in_dims=(0, None, None, 0)
    )
    rows = [
        torch.linalg.solve(data.mT @ data + x * torch.eye(4, dtype=WIDE), data.mT @ y)
        for x in shares
    ]
    wanted = torch.autograd.grad((torch.stack(rows) ** 2).sum(), (y, shares))
    for x, z in zip(torch.autograd.grad((w**2).sum(), (y, shares)), wanted):
        torch.testing.assert_close(x, z, rtol=1e-6, atol=1e-8)


def test_a_root_keeps_its_value_and_takes_trees() -> None:
    a = {"a": torch.tensor([8.0, 27.0], dtype=WIDE, requires_grad=True), "n": 3}
    x = (torch.tensor([2.0, 3.0], dtype=WIDE),)
    found = implicit_root(lambda x, a: (x[0] ** a["n"] - a["a"],), x, a)
    assert torch.equal(found[0].detach(), x[0])
    (slope,) = torch.autograd.grad(found[0].sum(), a["a"])
    torch.testing.assert_close(slope, 1 / (3 * x[0] ** 2))


def test_what_is_refused() -> None:
    for bad in (
        {"lr": -1.0},
        {"history_size": 0},
        {"tolerance_grad": math.nan},
        {"tolerance_change": math.nan},
        {"line_search_fn": "wolfe"},
        {"max_ls": 0},
    ):
        (name,) = bad
        with pytest.raises((ValueError, TypeError), match=name):
            lbfgs(**bad)


def test_a_nan_ends_a_problem() -> None:
    params, state = lbfgs().solve(lambda p: (p / 0.0).sum() * 0.0, torch.ones(2))
    assert state.done and state.func_evals == 1 and torch.equal(params, torch.ones(2))
