"""NorMuon beside its authors' formula; its rows in parts, stacks and convolutions."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from cases import assert_moved_alike
from torch import Tensor, nn

from optimi_func import Muon, NorMuon, normuon
from optimi_func.optimizers.muon import TABLES

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64
FIELD = "second_momentum_buffer"


def trained(make: Any, shapes: list[Any], steps: int = 60) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(s, dtype=DOUBLE)) for s in shapes]
    optimizer = make(ps)
    for i in range(steps):
        torch.manual_seed(i)
        for p in ps:
            p.grad = torch.randn(p.shape, dtype=DOUBLE) * (0.01 + i % 7)
        optimizer.step()
    return ps, optimizer


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"row_beta": 0.5, "momentum": 0.8}, {"beta2": 0.5, "momentum": 0.8}),
        (
            {"nesterov": False, "weight_decay": 0.1},
            {"nesterov": False, "weight_decay": 0.1},
        ),
        ({"adjust_lr_fn": "match_rms_adamw"}, {"use_adjusted_lr": True}),
    ],
    ids=str,
)
def test_equals_pytorch_optimizer(ours: Any, theirs: Any, monkeypatch: Any) -> None:
    """The authors' formula, iterated in float64."""
    package = pytest.importorskip("pytorch_optimizer")
    module = sys.modules[package.NorMuon.__module__]
    iterate = module.zero_power_via_newton_schulz_5
    monkeypatch.setattr(
        module, "zero_power_via_newton_schulz_5", partial(iterate, dtype=DOUBLE)
    )
    shapes = [(7, 5), (4, 9), (6, 2, 3, 3)]
    usual = {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "original"}

    def other(ps: Any) -> Any:
        how = {"lr": 0.02, "foreach": False, **theirs}
        return package.NorMuon([{"params": ps, "use_muon": True}], **how)

    def own(ps: Any) -> Any:
        return NorMuon(ps, **{**usual, **ours}, **EAGER)

    starts, _ = trained(own, shapes, 0)
    for p, q, start in zip(trained(own, shapes)[0], trained(other, shapes)[0], starts):
        assert_moved_alike(start.detach(), p.detach(), q.detach(), 1e-9)


def test_parts_and_stacks_are_matrices_of_their_own() -> None:
    torch.manual_seed(1)
    whole, grads = torch.randn(6, 4, dtype=DOUBLE), torch.randn(5, 6, 4, dtype=DOUBLE)
    how = {"lr": 0.1, "weight_decay": 0.0}
    rules = {
        "alone": (normuon(**how), lambda x: list(x.split(2))),
        "parts": (normuon(**how, split=3), lambda x: [x]),
        "rows": (normuon(**how, split=(2, 2, 2)), lambda x: [x]),
        "stack": (normuon(**how), lambda x: [x.view(3, 2, 4)]),
        "convolutions": (
            normuon(**how),
            lambda x: [y.view(2, 1, 2, 2) for y in x.split(2)],
        ),
    }
    ends: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for name, (rule, of) in rules.items():
        tree = of(whole)
        state = rule.init(tree)
        for g in grads:
            tree, state = rule.step(tree, of(g), state)
        ends[name] = torch.cat([x.reshape(-1, 4) for x in tree])
        fields = [getattr(s, FIELD) for s in state.leaves]
        rows[name] = torch.cat([x.reshape(-1, 1) for x in fields])
        assert [x.shape for x in fields] == [
            (*x.shape[: 1 if x.dim() > 3 else -1], 1) for x in tree
        ]
    for name, end in ends.items():
        torch.testing.assert_close(end, ends["alone"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rows[name], rows["alone"], rtol=1e-12, atol=1e-12)


def test_rows_move_alike_and_the_whole_as_with_muon() -> None:
    shapes = [(12, 5)]
    moves: dict[Any, Tensor] = {}
    for kind in (Muon, NorMuon):
        starts, _ = trained(lambda ps: ps, shapes, 0)
        ps, _ = trained(
            lambda ps, kind=kind: kind(ps, weight_decay=0.0, **EAGER), shapes, 1
        )
        moves[kind] = ps[0].detach() - starts[0].detach()
    assert moves[NorMuon].norm() == pytest.approx(moves[Muon].norm().item(), rel=1e-6)
    lengths = {kind: x.norm(dim=1) for kind, x in moves.items()}
    assert lengths[Muon].std() > 0.1 * lengths[Muon].mean()
    assert lengths[NorMuon].std() < 1e-6 * lengths[NorMuon].mean()


def test_the_rows_are_float32_and_muons_states_do_not_load() -> None:
    p = torch.ones(4, 3, dtype=torch.bfloat16, requires_grad=True)
    optimizer, other = (
        kind([p], **EAGER, **more)
        for kind, more in ((NorMuon, {"state_dtype": torch.bfloat16}), (Muon, {}))
    )
    for x in (optimizer, other):
        x.init_state()
    assert optimizer.state[p][FIELD].dtype == torch.float32
    assert optimizer.state[p][FIELD].shape == (4, 1)
    with pytest.raises(ValueError, match=f"the optimizer needs .*{FIELD}"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=f"'{FIELD}'. are another rule's"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"row_beta=1"):
        NorMuon([p], row_beta=1.0)
    with pytest.raises(ValueError, match=r"torch.optim has no NorMuon"):
        optimizer.torch_state_dict()


def test_deepseeks_coefficients_reach_one() -> None:
    """Of singular values from 0.001 on, which no other table brings as near."""
    x = torch.logspace(-3, 0, 50, dtype=DOUBLE)
    found = {}
    for name, table in TABLES.items():
        y = x
        for a, b, c in table:
            y = a * y + b * y**3 + c * y**5
        found[name] = (y - 1).abs().max().item()
    assert found["deepseek"] < 0.01 < min(y for n, y in found.items() if n != "deepseek")
