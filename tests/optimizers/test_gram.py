"""Muon's iteration on Gram matrices, with momenta of a small transformer's training."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

import optimi_func
from optimi_func import Mixed, Muon, muon
from optimi_func.core import math, torch_private
from optimi_func.optimizers.muon import TABLES

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices of this size are not worth waiting for another one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


@cache
def momenta() -> list[Tensor]:
    """Of 1:1, 3:1, 4:1 and 1:4 matrices, after 20 and 40 steps."""
    torch.manual_seed(1)
    text = Path(__file__).parents[2] / "LICENSE"
    data, width = torch.tensor([*text.read_bytes()[:4000]]), 64
    blocks = nn.Sequential(*[Block(width) for _ in range(2)])
    model = nn.Sequential(nn.Embedding(256, width), blocks, nn.Linear(width, 256))
    matrices = [p for p in blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not q for q in matrices)]
    first = Muon(matrices, lr=0.02, adjust_lr_fn="original", weight_decay=0.0, **EAGER)
    others = torch.optim.AdamW(rest, lr=3e-3)
    found: list[Tensor] = []
    for t in range(1, 41):
        rows = torch.stack([data[i : i + 33] for i in torch.randint(len(data) - 33, (4,))])
        logits = model(rows[:, :-1]).flatten(0, 1)
        model.zero_grad()
        functional.cross_entropy(logits, rows[:, 1:].flatten()).backward()
        first.step()
        others.step()
        if t % 20 == 0:
            found += [first.state[p]["momentum_buffer"].clone() for p in matrices]
    return found


def update_of(g: Tensor, **options: Any) -> Tensor:
    """What a first step subtracts, at lr 1."""
    optimizer = muon(lr=1.0, weight_decay=0.0, adjust_lr_fn="rms_to_rms", **options)
    p = torch.zeros_like(g)
    return -optimizer.step(p, g, optimizer.init(p))[0]


def wanted(g: Tensor, table: Any) -> Tensor:
    m, n = g.shape
    return (m / n) ** 0.5 * reference.orthogonalized(g.double(), table=table)


def distance(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Return the relative distance, and the ratio of the largest singular values."""
    largest = [torch.linalg.matrix_norm(x.double(), 2) for x in (got, want)]
    return ((got - want).norm() / want.norm()).item(), (largest[0] / largest[1]).item()


# Of an iteration in bfloat16, as far as torch's own.
@pytest.mark.parametrize(
    ("name", "far"),
    [("standard", 0.08), ("quintic", 0.08), ("polar_express", 0.1), ("deepseek", 0.3)],
)
def test_momenta_of_a_run_are_made_orthogonal(name: str, far: float) -> None:
    """Three iterations at once would reach infinity in bfloat16, or a ratio of 60,000."""
    assert {tuple(g.shape) for g in momenta()} > {(192, 64), (64, 256)}
    for dtype, most, above in (
        (torch.bfloat16, far, 0.2),
        (torch.float32, 1e-4, 1e-4),
        (DOUBLE, 1e-12, 1e-12),
    ):
        for g in momenta():
            want = wanted(g, TABLES[name])
            given = g.double() if dtype == DOUBLE else g
            got = update_of(given, ns_coefficients=name, ns_dtype=dtype)
            found, ratio = distance(got, want)
            assert found < most and ratio < 1 + above, (dtype, g.shape, found, ratio)


def test_it_is_as_near_as_torchs() -> None:
    """On the average, in bfloat16."""
    found: list[tuple[float, float]] = []
    for g in momenta():
        p = nn.Parameter(torch.zeros_like(g))
        theirs = torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0)
        p.grad = g
        theirs.step()
        m, n = g.shape
        want = wanted(g, TABLES["standard"])
        torchs = -p.detach() * (m / n) ** 0.5 / max(1.0, m / n) ** 0.5
        both = update_of(g, ns_dtype="bfloat16"), torchs
        found.append(tuple(distance(x, want)[0] for x in both))
    ours, torchs = map(sum, zip(*found))
    assert ours < 1.25 * torchs


@pytest.mark.parametrize("shape", [(12, 12), (2, 12, 30), (30, 12)], ids=str)
@pytest.mark.parametrize("name", ["standard", "polar_express"])
def test_panels_are_the_whole(shape: Any, name: str, monkeypatch: Any) -> None:
    """Values, derivatives and vmap."""
    torch.manual_seed(0)
    g, w = torch.randn(2, *shape, dtype=DOUBLE)

    def loss(g: Tensor) -> Tensor:
        return (update_of(g, ns_coefficients=name) * w).sum()

    def all_of() -> list[Tensor]:
        found = [update_of(g, ns_coefficients=name), grad(loss)(g)]
        return [*found, vmap(grad(loss))(torch.stack([g, w]))[0]]

    before = all_of()
    monkeypatch.setattr(math, "_PANELS", 3)
    for got, want in zip(all_of(), before):
        assert not torch.equal(got, want) or shape[-1] == 12
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    x = torch.randn(11, 7)
    torch.testing.assert_close(math.symmetric(x, x.mT), x @ x.mT)
    found = math.symmetric(x, x.mT, torch.eye(11), 2.0, 3.0)
    torch.testing.assert_close(found, 3 * x @ x.mT + 2 * torch.eye(11))


def test_a_derivative_is_the_formulas() -> None:
    """Of several iterations at once, beside the loop of single ones."""
    torch.manual_seed(0)
    g, w = torch.randn(2, 5, 11, dtype=DOUBLE)

    def loop(g: Tensor) -> Tensor:
        x = g / g.norm()
        for a, b, c in TABLES["quintic"]:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return ((5 / 11) ** 0.5 * x * w).sum()

    found = grad(lambda g: (update_of(g, ns_coefficients="quintic") * w).sum())(g)
    torch.testing.assert_close(found, grad(loop)(g), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fast", [False, True])
def test_the_cpu_chooses_the_dtype_unless_it_is_asked_for(
    fast: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(math, "multiplies_bfloat16", lambda: fast)
    g, usual = momenta()[0], "bfloat16" if fast else "float32"
    assert torch.equal(update_of(g), update_of(g, ns_dtype=usual))
    for dtype in ("bfloat16", "float32"):
        same = torch.equal(update_of(g, ns_dtype=dtype), update_of(g))
        assert same == (dtype == usual)
    wide = g.double()
    assert torch.equal(update_of(wide), update_of(wide, ns_dtype="float64"))
    for dtype, name in ((torch.bfloat16, usual), (DOUBLE, "float64")):
        params = [("w", nn.Parameter(g.to(dtype)))]
        for optimizer in (
            Muon(params),
            optimi_func.NorMuon(params),
            Mixed(params, ("*", muon())),
        ):
            assert f"group 0 iterates in {name} (ns_dtype)" in optimizer.describe()
    asked = Muon([nn.Parameter(g)], ns_dtype="float16")
    assert "iterates in float16 (ns_dtype)" in asked.describe()
    w = torch.randn_like(g)
    found = [
        grad(lambda g, more=more: (update_of(g, **more) * w).sum())(g)
        for more in ({}, {"ns_dtype": "float32"})
    ]
    assert torch.equal(*found)


def test_private_query_of_the_cpu_is_there() -> None:
    assert isinstance(torch_private.multiplies_bfloat16(), bool)
