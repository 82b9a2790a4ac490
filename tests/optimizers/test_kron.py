"""Kron: shapes of all kinds, its authors' steps, and which steps fit the factors."""

from typing import Any

import pytest
import reference
import torch
from cases import LR, assert_moved_alike, problem
from cookbook import drawn_whole
from torch import Tensor

from optimi_func import Kron, kron


def stepped(p: Tensor, grads: list[Tensor], **options: Any) -> tuple[Tensor, Any]:
    value = kron(lr=LR, **options)
    state = value.init(p)
    for g in grads:
        p, state = value.step(p, g, state)
    return p, state


# With a stack, a convolution, sides of 1, a vector, a number.
SHAPES = [(6, 6), (5, 9), (1, 6), (6,), (), (4, 3, 5), (4, 3, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moves_are_the_papers(shape: tuple[int, ...]) -> None:
    options = {"max_size_triangular": 5, "precond_update_prob": 0.4}
    options["precond_flat_start"] = 3.0
    p, grads = problem(shape, steps=30)
    want = reference.kron(p, grads, lr=LR, **options)[-1]
    assert_moved_alike(p, stepped(p, grads, **options)[0], want, 1e-9)


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (6,), (4, 3, 5)], ids=str)
def test_moves_are_those_of_pytorch_optimizer(shape: Any, monkeypatch: Any) -> None:
    package = pytest.importorskip("pytorch_optimizer")
    p, grads = problem(shape, steps=20)
    want = stepped(p, grads)[0]
    w, wide = p.clone().requires_grad_(), torch.float64
    dtypes = {"mu_dtype": wide, "precondition_dtype": wide}
    peer = package.Kron([w], lr=LR, pre_conditioner_update_probability=1.0, **dtypes)
    for i, g in enumerate(grads):
        v = drawn_whole(0, i, 0, shape)[0]
        monkeypatch.setattr(torch, "randn_like", lambda *_, v=v, **__: v)
        w.grad = g.clone()
        peer.step()
    assert_moved_alike(p, w.detach(), want, 1e-5)  # it solves in float32


def test_a_share_of_steps_that_falls_fits_the_factors() -> None:
    p, grads = torch.ones(3, 4), [torch.randn(3, 4) for _ in range(80)]
    value = kron(lr=LR, precond_flat_start=10.0, precond_update_prob=0.25)
    state, fits = value.init(p), list[bool]()
    for g in grads:
        before = state.leaves.factors
        p, state = value.step(p, g, state)
        fits.append(not torch.equal(state.leaves.factors, before))
    assert all(fits[:11]) and 8 <= sum(fits[40:]) <= 12
    squares = [x.abs().max() for x in state.leaves.factors.split([9, 16])]
    torch.testing.assert_close(*squares)


def test_a_count_that_is_a_tensor_fits_at_the_same_steps() -> None:
    p, grads = problem((5, 9), steps=12)
    options = {"precond_flat_start": 2.0, "precond_update_prob": 0.25}
    want = stepped(p, grads, **options)[0]
    w = p.clone().requires_grad_()
    optimizer = Kron([w], lr=LR, compile=False, capturable=True, **options)
    for g in grads:
        w.grad = g
        optimizer.step()
    assert_moved_alike(p, w.detach(), want, 1e-9)


def test_it_makes_ill_conditioned_gradients_white() -> None:
    torch.manual_seed(0)
    left, right = torch.logspace(-0.5, 0.5, 8)[:, None], torch.logspace(0.5, -0.5, 6)
    p, grads = torch.zeros(8, 6), [left * torch.randn(8, 6) * right for _ in range(300)]
    _, state = stepped(p, grads, momentum=0.0)
    a, b = (x.view(n, n) for x, n in zip(state.leaves.factors.split([64, 36]), (8, 6)))
    white = torch.stack([a @ g @ b.T for g in grads[-100:]])
    square = white.square().mean(0)
    assert square.max() / square.min() < 200 and 0.5 < square.mean() < 2  # of 10000
