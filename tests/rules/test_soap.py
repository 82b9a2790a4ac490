"""SOAP: its mathematics, the shapes it takes, its bases and when they change."""

from typing import Any

import pytest
import reference
import torch
from cases import LR, assert_moved_alike, problem
from tiers import few
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from optimi_func import SOAP, Mixed, Storage, adamw, prepare_for_gradient_release, soap
from optimi_func import soap_init, soap_step, unroll

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64


def stepped(p: Tensor, grads: list[Tensor], **options: Any) -> tuple[Tensor, Any]:
    optimizer = soap(lr=LR, **options)
    state = optimizer.init(p)
    for g in grads:
        p, state = optimizer.step(p, g, state)
    return p, state


# Shape, options, and what the reference calls them.
ROWS: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = [
    ((6, 6), {}, {}),
    ((7, 5), {}, {}),
    ((5, 9), {"precondition_frequency": 1}, {}),
    ((7, 5), {"max_precond_dim": 5, "precondition_frequency": 3}, {}),
    ((5, 9), {"max_precond_dim": 2}, {}),
    ((1, 6), {}, {}),
    ((6,), {}, {}),
    ((), {}, {}),
    ((6,), {"precondition_1d": True}, {}),
    ((4, 3, 5), {}, {}),
    ((4, 3, 2, 2), {}, {}),
    ((4, 3, 2, 2), {"merge_dims": True, "max_precond_dim": 12}, {"merged": (12, 4)}),
    ((4, 3, 2, 2), {"merge_dims": True, "max_precond_dim": 6}, {"merged": (4, 6, 2)}),
    ((2, 3, 7, 2), {"merge_dims": True, "max_precond_dim": 6}, {"merged": (6, 7, 2)}),
    ((6, 6), {"shampoo_beta": 0.7, "betas": (0.0, 0.9), "eps": 1e-4}, {}),
    ((6, 6), {"normalize_grads": True}, {}),
    ((6, 6), {"correct_bias": False}, {}),
]


@pytest.mark.parametrize(("shape", "options", "called"), ROWS, ids=str)
def test_sixty_steps_are_the_papers(shape: Any, options: Any, called: Any) -> None:
    p, grads = problem(shape, steps=60)
    own = {name: x for name, x in options.items() if name != "merge_dims"}
    path = reference.soap(p, grads, lr=LR, **own, **called)
    for steps in (2, 12, 60):
        got, _ = stepped(p, grads[:steps], **options)
        assert_moved_alike(p, got, path[steps - 1], 1e-9)
    if options:
        usual, _ = stepped(p, grads)
        assert (usual - path[-1]).norm() > 1e-3 * (path[-1] - p).norm()


def test_the_first_gradient_makes_the_bases_and_moves_nothing_but_decay() -> None:
    p, (g, *_) = problem((6, 4))
    moved, state = stepped(p, [g], weight_decay=0.1)
    torch.testing.assert_close(moved, p * (1 - LR * 0.1), rtol=1e-15, atol=0.0)
    s = state.leaves
    assert not s.exp_avg.any() and not s.exp_avg_sq.any()
    left, right = (x.unflatten(0, (n, n)) for n, x in zip((6, 4), s.bases.split([36, 16])))
    values = left.mT @ g @ g.mT @ left
    assert (values.diagonal().diff() <= 1e-12).all()  # from the largest
    torch.testing.assert_close(values, values.diagonal().diag(), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(right.mT @ right, torch.eye(4, dtype=DOUBLE))
