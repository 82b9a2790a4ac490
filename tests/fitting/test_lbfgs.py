"""`lbfgs` beside torch's and scipy: batches, graphs, derivatives of solutions, edges."""

import io
import math
import warnings
from typing import Any

import pytest
import scipy.optimize
import torch
from refusals import Scene, refuses
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacrev, vmap

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


def test_a_root_keeps_its_value_and_takes_trees() -> None:
    a = {"a": torch.tensor([8.0, 27.0], dtype=WIDE, requires_grad=True), "n": 3}
    x = (torch.tensor([2.0, 3.0], dtype=WIDE),)
    found = implicit_root(lambda x, a: (x[0] ** a["n"] - a["a"],), x, a)
    assert torch.equal(found[0].detach(), x[0])
    (slope,) = torch.autograd.grad(found[0].sum(), a["a"])
    torch.testing.assert_close(slope, 1 / (3 * x[0] ** 2))


REFUSED = {
    "lbfgs(lr=-1.0)": "lr",
    "lbfgs(lr=lambda _: 0.1)": "lr=.*allowed are numbers and 0-d",
    "lbfgs(lr=torch.ones(2))": "lr=.*allowed are numbers and 0-d",
    "lbfgs(history_size=0)": "history_size",
    "lbfgs(tolerance_grad=nan)": "tolerance_grad",
    "lbfgs(tolerance_change=nan)": "tolerance_change",
    "lbfgs(line_search_fn='wolfe')": "line_search_fn",
    "lbfgs(max_ls=0)": "max_ls",
    "init({'a': torch.ones(2).long()})": r"TypeError: params\['a'\] has dtype torch.int64",
    "init({'a': [1.0]})": r"TypeError: params\['a'\]\[0\] is 1.0, which is not a tensor",
    "init([torch.eye(2).to_sparse()])": "TypeError: has layout torch.sparse_coo: allowed",
    "init([torch.zeros(0)])": "no elements",
    "init([torch.ones(2), torch.ones(2, device='meta')])": (
        "several devices, .*'cpu'.*'meta'"
    ),
    **{
        f"solve(bent, torch.zeros(3, 2), torch.ones(3, 2), in_dims={dims})": (
            "in_dims=.*an axis for params and an axis or"
        )
        for dims in ((None, 0), (0,), [0, 0], (0, "a"), (True, 0))
    },
    "solve(lambda p, a: bent(p['x'], a), {'x': a[:3]}, a, in_dims=0)": (
        r"have \[3, 4\] problems along"
    ),
    **{
        f"solve(bent, start{dims}, a{dims}, state={state}, in_dims={n})": (
            r"state= has pairs of \("
        )
        for dims, n in (("", 0), ("[0]", None))
        for state in (f"lbfgs(history_size=3).init(a{dims})", "init(torch.ones(5))")
    },
    "torch.func.jvp(lambda a: solve(bent, start, a)[0], (a,), (a,))": (
        "NotImplementedError: backward, and none forward"
    ),
    **{
        call: rf"RuntimeError: from elsewhere.*shape \({n},\).*pass it in args"
        for call, n in {
            "solved(b * 2)": 3,
            "grad(solved)(b.detach())": 3,
            "grad(grad(solved))(b.detach())": 3,
            "vmap(grad(solved))(torch.ones(2, 3, dtype=WIDE))": 3,
            "implicit_root(lambda p: p - b, zeros)": 3,
            "solve(lambda p: ((p - b) ** 2).sum(), zeros.expand(2, 3), in_dims=(0,))": 3,
            "torch.func.jvp(solved, (b.detach(),), (b.detach(),))": 3,
        }.items()
    },
}


@refuses(REFUSED)
def test_what_is_refused() -> Scene:
    a, b = drawn(4, 2), torch.ones(3, dtype=WIDE, requires_grad=True)
    start, zeros = torch.zeros_like(a) + 3, torch.zeros(3, dtype=WIDE)

    def solved(b: Tensor) -> Tensor:
        return lbfgs().solve(lambda p: ((p - b) ** 2).sum(), zeros)[0].sum()

    return locals() | {"init": lbfgs().init, "solve": lbfgs().solve}


def test_tolerances_are_any_numbers_as_torch_takes_them() -> None:
    for tolerance in (-math.inf, -1.0, math.inf):
        assert lbfgs(tolerance_grad=tolerance).tolerance_grad == tolerance


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


def test_tensors_that_need_no_derivative_may_come_from_anywhere() -> None:
    b = torch.ones(3, dtype=WIDE, requires_grad=True)
    start = torch.zeros(3, dtype=WIDE)

    def solved(b: Tensor) -> Tensor:
        return lbfgs().solve(lambda p: ((p - b) ** 2).sum(), start)[0].sum()

    with torch.no_grad():
        torch.testing.assert_close(solved(b), b.sum())
    torch.testing.assert_close(solved(b.detach()), b.sum().detach())
    # Nor what changes no solution.
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
    for saddle_or_flat in (h - 2 * torch.eye(300, dtype=WIDE), 0.0 * h):
        with pytest.raises(RuntimeError, match="positive definite"):
            slope(saddle_or_flat)


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


# Edges: dtypes, states, transformations


def test_bfloat16_is_computed_in_float64() -> None:
    w = torch.ones(3, dtype=torch.bfloat16)
    params, state = lbfgs().solve(lambda p: ((p - 1.5) ** 2).sum(), w)
    assert params.dtype == torch.bfloat16 and state.g.dtype == torch.float64
    torch.testing.assert_close(params, torch.full_like(w, 1.5))


def test_sparse_gradients_are_made_dense() -> None:
    ends: list[Tensor] = []
    for sparse in (False, True):

        def loss(w: Tensor, sparse: bool = sparse) -> Tensor:
            rows = nn.functional.embedding(torch.tensor([0, 2]), w, sparse=sparse)
            return (rows - 2.0).square().sum() + (rows**4).sum()

        ends.append(lbfgs().solve(loss, torch.ones(3, 2))[0])
    assert torch.equal(*ends) and (ends[0][1] == 1).all() and (ends[0][0] != 1).all()


def test_a_state_is_saved() -> None:
    given = {"x": torch.zeros(2)}
    _, state = lbfgs().solve(lambda p: ((p["x"] - 1) ** 2).sum(), given)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert type(again) is type(state) and torch.equal(again.history.pairs, state[-1].pairs)


def classify(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    found = nn.functional.cross_entropy(x @ p["w"] + p["b"][0], labels)
    return found + 1e-2 * (p["w"] ** 2).sum() + 1e-2 * (p["b"][0] ** 2).sum()


def test_labels_are_arguments() -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 2, generator=drawn, dtype=torch.float64).requires_grad_()
    labels = torch.randint(3, (3, 20), generator=drawn)
    start: Any = {"w": torch.zeros(3, 2, 3).double(), "b": [torch.zeros(3, 3).double()]}
    params, state = lbfgs().solve(classify, start, x, labels, in_dims=(0, 0, 0))
    assert state.done.all()
    for i in range(3):
        one = {"w": start["w"][i], "b": [start["b"][0][i]]}
        alone, _ = lbfgs().solve(classify, one, x[i], labels[i])
        torch.testing.assert_close(alone["w"], params["w"][i], rtol=0.0, atol=1e-6)
    (slope,) = torch.autograd.grad(params["w"].square().sum(), x)
    assert slope.abs().max() > 1e-3 and slope.isfinite().all()


def test_complex_leaves_have_derivatives() -> None:
    drawn = torch.Generator().manual_seed(0)
    kind: Any = {"generator": drawn, "dtype": torch.complex128}
    data, y = torch.randn(8, 3, **kind), torch.randn(8, **kind)
    share = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def ridge(p: Any, share: Tensor) -> Tensor:
        left = (data @ p["z"] - y).abs().square().sum()
        return left + share * p["z"].abs().square().sum() + (p["x"] - share).square().sum()

    start = {"z": torch.zeros(3, dtype=torch.complex128), "x": torch.ones(2).double()}
    sharp = lbfgs(tolerance_change=0.0, tolerance_grad=1e-9)
    params, _ = sharp.solve(ridge, start, share, max_steps=200)
    eye = torch.eye(3, dtype=torch.complex128)
    exact = torch.linalg.solve(data.mH @ data + share * eye, data.mH @ y)
    torch.testing.assert_close(params["z"], exact, rtol=0.0, atol=1e-8)
    torch.testing.assert_close(params["x"], share.detach().expand(2), rtol=0.0, atol=1e-8)
    weights = torch.randn(3, **kind)
    slopes = [
        torch.autograd.grad((weights * z).real.sum(), share)[0]
        for z in (params["z"], exact)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=0.0)


def test_steps_vmap_over_lr() -> None:
    lrs = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    start, a = torch.linspace(0, 3, 2).double(), torch.ones(2).double()

    def run(lr: Any) -> Tensor:
        optimizer = lbfgs(lr=lr)
        p, state = start, optimizer.init(start)
        both = torch.func.grad_and_value(bent)
        for _ in range(6):
            p, state = optimizer.step(p, state, lambda q: both(q, a)[::-1])
        return p

    together = torch.func.vmap(run)(lrs)
    for x, lr in zip(together, lrs):
        torch.testing.assert_close(x, run(float(lr)), rtol=0.0, atol=1e-12)
    assert not torch.allclose(together[0], together[2], atol=1e-4)
