"""Scion: norms of 1, balls that are not left, and what the authors' code does."""

import math
from typing import Any

import pytest
import reference
import torch
from cases import assert_moved_alike
from refusals import Scene, refuses
from torch import Tensor, nn

from optimi_func import Mixed, hidden_matrices, scion

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64


def step_of(g: Tensor, **options: Any) -> Tensor:
    """The first step at lr 1, without the factor 1 - momentum, which norms take out."""
    value = scion(lr=1.0, weight_decay=0.0, **options)
    p = torch.zeros_like(g)
    return -value.step(p, g, value.init(p))[0]


@pytest.mark.parametrize("radius", [1.0, 50.0])
def test_steps_have_a_norm_of_radius(radius: float) -> None:
    torch.manual_seed(0)
    for shape in ((6, 3), (3, 6), (4, 3, 2, 2)):
        g = torch.randn(shape, dtype=DOUBLE)
        u = step_of(g, radius=radius, ns_coefficients="deepseek").flatten(1)
        m, n = u.shape
        spectral = torch.linalg.matrix_norm(u, 2).item() * math.sqrt(n / m)
        assert spectral == pytest.approx(radius, rel=0.03)
        signs = step_of(g, radius=radius, norm="sign").flatten(1)
        assert torch.equal(signs, g.flatten(1).sign() * (radius / n))
    for shape in ((5,), (), (5, 1)):
        u = step_of(torch.randn(shape, dtype=DOUBLE), radius=radius)
        assert u.square().mean().sqrt().item() == pytest.approx(radius, rel=1e-12)
    for norm in ("spectral", "sign"):
        for shape in ((3, 4), (4,), (0,), (0, 3)):
            zeros = torch.zeros(shape)
            assert torch.equal(step_of(zeros, norm=norm), zeros)


def test_stacks_and_parts_are_matrices_of_their_own() -> None:
    torch.manual_seed(0)
    g = torch.randn(6, 4, dtype=DOUBLE)
    want = torch.cat([step_of(x) for x in g.split(2)])
    torch.testing.assert_close(step_of(g, split=3), want, rtol=1e-12, atol=0.0)
    stack = step_of(g.view(3, 2, 4)).view(6, 4)
    torch.testing.assert_close(stack, want, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("norm", ["spectral", "sign"])
def test_the_constrained_variant_stays_in_the_ball(norm: str) -> None:
    torch.manual_seed(0)
    ends: list[float] = []
    for decay in (1.0, 0.0):
        p = torch.zeros(6, 3, dtype=DOUBLE)
        value = scion(lr=0.1, norm=norm, radius=2.0, weight_decay=decay)
        state, g = value.init(p), torch.randn(6, 3, dtype=DOUBLE)
        for _ in range(100):
            p, state = value.step(p, g, state)
        length = p.abs().max() * 3 if norm == "sign" else torch.linalg.matrix_norm(p, 2)
        ends.append(length.item() / (1 if norm == "sign" else math.sqrt(2)))
    # Muon's table makes singular values of up to 1.13.
    assert ends[0] < 2.0 * 1.14 and ends[1] > 10.0


def test_a_model_by_two_norms_is_the_authors_loop() -> None:
    """Each kind of layer in a group, as their example has it, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 7)).double()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    hidden = (hidden_matrices(model), scion(lr=0.01, radius=5.0))
    rest = scion(lr=0.01, radius=30.0, norm="sign")
    optimizer = Mixed(model.named_parameters(), hidden, rest=rest, **EAGER)
    grads: list[dict[str, Tensor]] = []
    for i in range(5):
        torch.manual_seed(i)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    for name, p in model.named_parameters():
        spectral = name == "1.weight"
        scale, w, buf = 5.0 if spectral else 30.0, start[name].clone(), 0.0
        for g in grads:
            buf = 0.9 * buf + 0.1 * g[name]
            if spectral:
                update = (p.shape[0] / p.shape[1]) ** 0.5 * reference.orthogonalized(buf)
            else:
                update = buf.sign() / (p.shape[1] if p.dim() > 1 else 1)
            w = w * (1 - 0.01) - 0.01 * scale * update
        assert_moved_alike(start[name], p.detach(), w, 1e-9)


@refuses(
    {
        "scion(lr=0.1, norm='row')": "norm='row': allowed are 'spectral' and",
        "scion(lr=0.1, split=4).init(torch.ones(3, 2))": (
            "split=4 does not divide its 3 rows"
        ),
    }
)
def test_what_it_refuses() -> Scene:
    return {}
