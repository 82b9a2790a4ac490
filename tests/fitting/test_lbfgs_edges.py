"""`lbfgs` at its edges: dtypes, states, transformations, refusals."""

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimi_func import implicit_root, lbfgs


def test_parameters_that_are_refused() -> None:
    for params, text in (
        ({"a": torch.ones(2).long()}, r"params\['a'\] has dtype torch.int64"),
        ({"a": [1.0]}, r"params\['a'\]\[0\] is 1.0, which is not a tensor"),
        ([torch.eye(2).to_sparse()], r"has layout torch.sparse_coo: allowed is strided"),
        ([torch.zeros(0)], "no elements"),
        ([torch.ones(2), torch.ones(2, device="meta")], "several devices, .*'cpu'.*'meta'"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            lbfgs().init(params)


def test_options_that_are_refused() -> None:
    for lr in (lambda _: 0.1, torch.ones(2)):
        with pytest.raises(ValueError, match=r"lr=.*allowed are numbers and 0-d"):
            lbfgs(lr=lr)  # type: ignore[arg-type]
    for tolerance in (-math.inf, -1.0, math.inf):  # as torch takes them
        assert lbfgs(tolerance_grad=tolerance).tolerance_grad == tolerance


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


def bowl(p: Tensor, a: Tensor) -> Tensor:
    return ((p - a) ** 2).sum() + (p**4).sum()


def test_axes_that_are_refused() -> None:
    p, a = torch.zeros(3, 2), torch.ones(3, 2)
    for dims in ((None, 0), (0,), [0, 0], (0, "a"), (True, 0)):
        with pytest.raises(
            ValueError, match=r"in_dims=.*an axis for params and an axis or"
        ):
            lbfgs().solve(bowl, p, a, in_dims=dims)  # pyright: ignore[reportArgumentType]


def test_transformations_of_solve() -> None:
    p, a = torch.zeros(2), torch.ones(2)

    def solved(a: Tensor) -> Tensor:
        return lbfgs().solve(bowl, p, a)[0]

    with pytest.raises(NotImplementedError, match="backward, and none forward"):
        torch.func.jvp(solved, (a,), (a,))
    found = torch.func.grad(lambda a: solved(a).sum())(a)
    b = a.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(solved(b).sum(), b)
    assert torch.equal(found, wanted)
    x = solved(a)
    torch.testing.assert_close(found, 2 / (2 + 12 * x**2), rtol=1e-4, atol=0.0)


def test_steps_vmap_over_lr() -> None:
    lrs = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    start, a = torch.linspace(0, 3, 2).double(), torch.ones(2).double()

    def run(lr: Any) -> Tensor:
        optimizer = lbfgs(lr=lr)
        p, state = start, optimizer.init(start)
        both = torch.func.grad_and_value(bowl)
        for _ in range(6):
            p, state = optimizer.step(p, state, lambda q: both(q, a)[::-1])
        return p

    together = torch.func.vmap(run)(lrs)
    for x, lr in zip(together, lrs):
        torch.testing.assert_close(x, run(float(lr)), rtol=0.0, atol=1e-12)
    assert not torch.allclose(together[0], together[2], atol=1e-4)


def test_a_saddle_has_no_derivative() -> None:
    a = torch.tensor(0.5, requires_grad=True)
    slope: Any = lambda p, a: torch.stack([p[0] - a, -p[1] + a])  # noqa: E731
    x = implicit_root(slope, torch.tensor([0.5, 0.5]), a)
    with pytest.raises(RuntimeError, match=r"positive definite.*is it a minimum"):
        torch.autograd.grad(x[1], a)
