"""Weights and states in float32, whatever they are kept in; the table of how that is."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimi_func import SGD, AdamW, Lion
from optimi_func.core.rule import Storage

STORAGES: list[Any] = [
    None,
    "compact",
    "exact",
    Storage("kahan", "8bit"),
    Storage("exact", "8bit"),
]


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)).to(dtype)


def train(net: nn.Module, optimizer: Any, steps: int) -> None:
    own = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=own).to(p.dtype)
        optimizer.step()


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def test_a_model_of_which_the_optimizer_has_no_parameter() -> None:
    net, copy = model(), model()
    optimizer = AdamW(net.named_parameters(), lr=1e-3, storage="exact", compile=False)
    before, masters = weights(copy), model(torch.float32).state_dict()
    with pytest.raises(ValueError, match="none of the model's parameters"):
        optimizer.master_state_dict(copy)
    with pytest.raises(ValueError, match="none of the model's parameters"):
        optimizer.load_master_state_dict(copy, {k: x + 1 for k, x in masters.items()})
    assert all(map(torch.equal, weights(copy), before))


def test_what_a_models_own_state_dict_has_more() -> None:
    """Buffers, and the second name of a tied parameter, are not loaded."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    wide[1].weight = wide[0].weight
    net: Any = copy.deepcopy(wide).bfloat16()
    optimizer = AdamW(net.parameters(), lr=1e-3, storage="exact", compile=False)
    optimizer.load_master_state_dict(net, wide.state_dict())
    loaded = optimizer.master_state_dict(net)
    assert all(torch.equal(loaded[k], p) for k, p in wide.named_parameters())
    state: Any = wide.state_dict()
    state["1.bia"] = state.pop("1.bias")
    with pytest.raises(
        ValueError, match=r"for \['1.bias'\], and no parameters \['1.bia'\]$"
    ):
        optimizer.load_master_state_dict(net, state)
    with pytest.raises(ValueError, match=r"^state_dict: no parameters \['1.bia'\]$"):
        optimizer.load_master_state_dict(net, {**wide.state_dict(), "1.bia": torch.ones(4)})
    with pytest.raises(TypeError, match=r"model=a OrderedDict: allowed is a torch\.nn"):
        optimizer.load_master_state_dict(state, net)
    nothing: Any = None
    with pytest.raises(TypeError, match="state_dict=None: allowed is a dict by name"):
        optimizer.load_master_state_dict(net, nothing)


def test_master_weights_that_no_compensation_could_keep() -> None:
    net, masters = model(), dict(model(torch.float32).named_parameters())
    optimizer = AdamW(net.parameters(), lr=1e-3, kahan_sum=False, compile=False)
    with pytest.warns(UserWarning, match=r"kahan_sum=False, are rounded"):
        optimizer.load_master_state_dict(net, masters)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_master_weights_go_back_as_they_came(storage: Any) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-3, storage=storage, compile=False)
    train(net, optimizer, 3)
    masters = optimizer.master_state_dict(net)
    assert {x.dtype for x in masters.values()} == {torch.float32}
    # What is beside the parameters is in them, and nothing of theirs is shared.
    rounded = [x.to(torch.bfloat16) for x in masters.values()]
    plain = [p.float() for p in net.parameters()]
    assert any(not x.equal(y) for x, y in zip(masters.values(), plain))
    others = model()
    fresh = AdamW(others.parameters(), lr=1e-3, storage=storage, compile=False)
    for p in others.parameters():
        p.detach().zero_()
    fresh.load_master_state_dict(others, masters)
    for name, x in fresh.master_state_dict(others).items():
        torch.testing.assert_close(x, masters[name], rtol=2.0**-15, atol=0)
    for p, r in zip(others.parameters(), rounded):
        # To the nearest: of ties, which are rare, to either side.
        assert p.ne(r).sum() <= p.numel() // 1000
    if storage == "exact":
        assert all(x.equal(y) for x, y in zip(
            fresh.master_state_dict(others).values(), masters.values()
        ))  # fmt: skip


def test_wrong_masters_are_refused_before_anything_is_loaded() -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-3, storage="compact", compile=False)
    before, masters = weights(net), optimizer.master_state_dict(net)
    with pytest.raises(ValueError, match=r"nothing for \['0.weight'\].*\['x'\]"):
        optimizer.load_master_state_dict(
            net, {("x" if k == "0.weight" else k): v for k, v in masters.items()}
        )
    masters["2.bias"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"'2.bias'\] has shape \(3,\).*\(64,\)"):
        optimizer.load_master_state_dict(net, masters)
    assert all(p.equal(x) for p, x in zip(net.parameters(), before))


@pytest.mark.parametrize("storage", STORAGES[1:], ids=str)
def test_a_decoded_state_loads_into_any_storage(storage: Any) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-3, storage=storage, compile=False)
    train(net, optimizer, 3)
    state = optimizer.decoded_state_dict()
    for entry, p in zip(state["state"].values(), net.parameters()):
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "kahan_comp"}
        assert all(x.is_floating_point() for x in entry.values())
        assert entry["exp_avg"].shape == p.shape
    for other in STORAGES:
        twin = AdamW(net.parameters(), lr=1e-3, storage=other, compile=False)
        twin.load_state_dict(state)
        ours, theirs = (x.master_state_dict(net) for x in (optimizer, twin))
        for name, x in ours.items():
            torch.testing.assert_close(theirs[name], x, rtol=2.0**-15, atol=0)
    again = AdamW(net.parameters(), lr=1e-3, storage=storage, compile=False)
    again.load_state_dict(state)
    for p in net.parameters():
        for name, x in optimizer.state[p].items():
            # A scale is a product again, and may be rounded.
            tight = 1e-6 if name.endswith("_scale") else 0
            torch.testing.assert_close(again.state[p][name], x, rtol=tight, atol=0)


def test_torch_goes_on_from_codes() -> None:
    net = model(torch.float32)
    optimizer = AdamW(
        net.parameters(), lr=1e-3, storage=Storage(None, "8bit"), compile=False
    )
    train(net, optimizer, 3)
    theirs = torch.optim.AdamW(net.parameters(), lr=1e-3)
    theirs.load_state_dict(optimizer.torch_state_dict())
    for p in net.parameters():
        assert set(theirs.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert theirs.state[p]["exp_avg_sq"].dtype == torch.float32
        assert theirs.state[p]["exp_avg_sq"].max() > 0
    train(net, theirs, 1)


def test_the_table_says_how_each_group_is_kept() -> None:
    net = model()
    first, *rest = net.parameters()
    optimizer = Lion(
        [{"params": [first]}, {"params": rest, "storage": "exact"}],
        lr=1e-3,
        storage="compact",
        compile=False,
    )
    before = optimizer.describe()
    train(net, optimizer, 1)
    assert optimizer.describe() == before  # as it was going to be made
    head, compact, exact, every = before.splitlines()
    assert head.split()[:3] == ["group", "tensors", "elements"]
    assert "bfloat16 + int8" in compact and "8bit" in compact and "100.0 %" in compact
    # 2 of the parameter, 1 beside it, 1 and a scale for 64 of the moment.
    assert compact.split()[-1] == f"{2 + 1 + 1 + 4 / 64:.3f}"
    assert "bfloat16 + int16" in exact and "float32" in exact and "0.0 %" in exact
    assert exact.split()[-1] == "8.000"
    held = sum(
        x.nbytes for p in net.parameters() for x in [p, *optimizer.state[p].values()]
        if x.dim()
    )  # fmt: skip
    assert f"{held:,}" in every


def test_the_table_of_a_rule_without_moments() -> None:
    net = model(torch.float32)
    assert SGD(net.parameters(), lr=0.1).describe().split()[-1] == "4.000"


@pytest.mark.parametrize("storage", [*STORAGES, Storage(None, torch.float32)], ids=str)
def test_torchs_float32_run_gets_all_that_is_kept(storage: Any) -> None:
    """No moment is rounded on the way, whatever the model's dtype."""
    net = model()
    optimizer = AdamW(net.named_parameters(), lr=1e-3, storage=storage, compile=False)
    train(net, optimizer, 3)
    kept = optimizer.decoded_state_dict()["state"]
    wide = model(torch.float32)
    wide.load_state_dict(optimizer.master_state_dict(net))
    theirs = torch.optim.AdamW(wide.named_parameters(), lr=1.0)
    theirs.load_state_dict(optimizer.torch_state_dict())
    low = 0
    for i, p in enumerate(wide.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            found = theirs.state[p][name]
            assert found.dtype == torch.float32 and found.equal(kept[i][name].float())
            low += found.equal(found.bfloat16().float())
    # What is in float32 or in codes has more bits than the model.
    full = {None: 0, "exact": 6}
    assert low <= 12 - full.get(storage, 0) and (low == 12) == (storage is None)


@pytest.mark.parametrize("storage", ["exact", Storage("exact", "8bit"), "compact", None])
def test_a_float32_run_goes_on_in_bfloat16(storage: Any) -> None:
    wide = model(torch.float32)
    old = AdamW(wide.named_parameters(), lr=1e-3, compile=False)
    train(wide, old, 3)
    net = model()
    new = AdamW(net.named_parameters(), lr=1.0, storage=storage, compile=False)
    new.load_state_dict(old.state_dict())
    new.load_master_state_dict(net, dict(wide.named_parameters()))
    bits = {None: 2.0**-16, "compact": 2.0**-15}.get(storage, 0.0)
    for (name, x), p in zip(new.master_state_dict(net).items(), wide.parameters()):
        torch.testing.assert_close(x, p.detach(), rtol=bits, atol=0, msg=name)
        assert new.state[dict(net.named_parameters())[name]]["step"] == 3
    if storage == "exact":
        own = torch.Generator().manual_seed(9)
        for p, q in zip(wide.parameters(), net.parameters()):
            q.grad = torch.randn(p.shape, generator=own).bfloat16()
            p.grad = q.grad.float()
        old.step()
        new.step()
        assert all(map(torch.equal, new.master_state_dict(net).values(), wide.parameters()))
