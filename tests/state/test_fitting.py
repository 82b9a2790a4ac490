"""`load_fitting`: from one rule to another with what fits, and what begins anew."""

from functools import partial
from typing import Any

import pytest
import reference
import torch
from cases import assert_moved_alike, shown
from torch import Tensor, nn

from optimi_func import (
    SOAP,
    Adafactor,
    AdamW,
    Lion,
    Muon,
    MuonAdamW,
    NorMuon,
    NorMuonAdamW,
)
from optimi_func.schedules import linear

EAGER: dict[str, Any] = {"compile": False}
MATRICES = ["qkv.weight", "out.weight"]


class Net(nn.Module):
    """An embedding, two matrices, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 18, bias=False), nn.Linear(18, 6, bias=False)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        return self.head(self.norm(x + self.out(self.qkv(x).tanh())))


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def train(model: nn.Module, optimizers: list[Any], steps: range) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    for i in steps:
        x = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(i))
        logits = model(x).flatten(0, 1)
        nn.functional.cross_entropy(logits, x.roll(1, 1).flatten()).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "torch's"])
def test_adamw_to_muonadamw_keeps_the_moments_of_the_rest(theirs: bool) -> None:
    """The rest moves as one run of AdamW's loop, the matrices as a new run of Muon's."""
    model = net()
    kind = torch.optim.AdamW if theirs else AdamW
    numbers = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6}
    more = {} if theirs else EAGER
    old: Any = kind(model.named_parameters(), weight_decay=0.0, **numbers, **more)
    first = values(model)
    grads = train(model, [old], range(3))
    start = values(model)
    new = MuonAdamW(model, weight_decay=0.0, **numbers, **EAGER)
    found = new.load_fitting(old.state_dict())
    rest = [name for name in start if name not in MATRICES]
    assert found.taken == {n: ["exp_avg", "exp_avg_sq"] for n in rest}
    assert found.anew == {n: ["momentum_buffer"] for n in MATRICES}
    assert {*found.unused} == {*MATRICES}
    assert {g["lr"] for g in new.param_groups} == {0.01}
    last = train(model, [new], range(3, 6))
    for name, p in model.named_parameters():
        if name in MATRICES:
            given = [g[name] for g in last]
            want = reference.muon(start[name], given, lr=0.01, weight_decay=0.0)[-1]
            assert_moved_alike(start[name], p.detach(), want, 1e-9)
        else:
            given = [g[name] for g in (*grads, *last)]
            path = reference.adamw(first[name], given, weight_decay=0.0, **numbers)
            assert_moved_alike(path[2], p.detach(), path[-1], 1e-6)


@pytest.mark.parametrize("kind", [NorMuon, partial(Muon, element_beta=0.9)], ids=shown)
def test_muon_to_normuon_and_back_keeps_the_momentum(kind: Any) -> None:
    model = net()
    params = [(n, p) for n, p in model.named_parameters() if n in MATRICES]
    old = Muon(params, lr=0.01, **EAGER)
    train(model, [old], range(3))
    new = kind(params, lr=0.02, momentum=linear(0.5, 0.9, 9), **EAGER)
    found = new.load_fitting(old.state_dict())
    assert found.taken == {n: ["momentum_buffer"] for n in MATRICES}
    assert found.anew == {n: ["second_momentum_buffer"] for n in MATRICES}
    assert found.unused == [] and new.param_groups[0]["lr"] == 0.02
    for _, p in params:
        x, y = old.state[p], new.state[p]
        assert torch.equal(x["momentum_buffer"], y["momentum_buffer"]) and y["step"] == 3
        assert x["momentum_buffer"] is not y["momentum_buffer"]
        assert not y["second_momentum_buffer"].any()
    train(model, [new], range(3, 5))
    back = Muon(params, lr=0.01, **EAGER)
    assert back.load_fitting(new.state_dict()).anew == {}
    assert back.state[params[0][1]]["step"] == 5


def test_a_rule_whose_map_depends_on_options() -> None:
    p = nn.Parameter(torch.ones(4, 3))
    old = AdamW([("p", p)], **EAGER)
    old.init_state()
    new = Adafactor([("p", p)], beta1=0.9, **EAGER)
    assert new.load_fitting(old.state_dict()).taken == {}


def test_torchs_muon_and_adamw_to_ours() -> None:
    """torch's pair has the head with Muon, ours with AdamW."""
    model = net()
    hidden = [
        (n, p) for n, p in model.named_parameters() if n in (*MATRICES, "head.weight")
    ]
    rest = [(n, p) for n, p in model.named_parameters() if (n, p) not in hidden]
    theirs = [torch.optim.Muon(hidden, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
    train(model, theirs, range(3))
    ours = MuonAdamW(model, lr=0.02, **EAGER)
    saved = dict(zip(("muon", "adamw"), [o.state_dict() for o in theirs]))
    found = ours.load_fitting(saved)
    assert found.anew == {"head.weight": ["exp_avg", "exp_avg_sq"]}
    assert found.taken["qkv.weight"] == ["momentum_buffer"]
    assert found.taken["tokens.weight"] == ["exp_avg", "exp_avg_sq"]
    assert found.unused == ["head.weight"]


def test_moments_that_a_correction_would_misread_begin_anew() -> None:
    model = net()
    named = list(model.named_parameters())
    old = Lion(named, lr=1e-3, **EAGER)
    train(model, [old], range(2))
    new = AdamW(named, lr=1e-3, **EAGER)
    found = new.load_fitting(old.state_dict())
    assert not found.taken and {*found.anew} == {n for n, _ in named}
    assert not new.state and {*found.unused} == {n for n, _ in named}
    # The other way nothing is corrected.
    train(model, [new], range(2))
    back = Lion(named, lr=1e-3, **EAGER)
    assert back.load_fitting(new.state_dict()).anew == {}
    # Moments in other bases.
    soap = SOAP(named, lr=1e-3, **EAGER)
    train(model, [soap], range(2))
    found = new.load_fitting(soap.state_dict())
    assert not found.taken and not new.state


def test_weights_keep_their_compensation() -> None:
    model = net(torch.bfloat16)
    old = AdamW(model.named_parameters(), lr=1e-3, storage="compact", **EAGER)
    train(model, [old], range(3))
    new = NorMuonAdamW(model, lr=1e-3, storage="compact", **EAGER)
    found = new.load_fitting(old.state_dict())
    assert {*found.anew} == {*MATRICES}
    for p in model.parameters():
        assert torch.equal(old.state[p]["kahan_comp"], new.state[p]["kahan_comp"])
    assert new.state[model.qkv.weight]["step"] == 0
    assert new.state[model.tokens.weight]["step"] == 3
    train(model, [new], range(3, 5))
    last = MuonAdamW(model, lr=1e-3, **EAGER)
    assert last.load_fitting(new.state_dict()).anew == {}
    assert last.state[model.qkv.weight]["momentum_buffer"].dtype == torch.bfloat16
