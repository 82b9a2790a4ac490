"""States of another rule, of other groups, or of bitsandbytes."""

import copy
import io
from typing import Any

import pytest
import torch
from cases import CLASSES
from torch import Tensor, nn

from optimi_func import (
    LAMB,
    SGD,
    Adam,
    AdamW,
    Lion,
    Mixed,
    RAdam,
    Storage,
    adamw,
    lion,
    muon,
)

EAGER: dict[str, Any] = {"compile": False}


def params(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator) for s in shapes or ((4, 4), (2, 4))]
    return [p.requires_grad_() for p in made]


def train(optimizer: Any, ps: list[Tensor], steps: range) -> None:
    for t in steps:
        generator = torch.Generator().manual_seed(t)
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def copied(ps: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in ps]


def assert_go_on_alike(ours: Any, ps: list[Tensor], theirs: Any, qs: list[Tensor]) -> None:
    starts = [p.detach().clone() for p in ps]
    train(ours, ps, range(3, 8))
    train(theirs, qs, range(3, 8))
    for p, q, start in zip(ps, qs, starts):
        torch.testing.assert_close(p - start, q - start, rtol=1e-4, atol=1e-6)
        assert (q - start).abs().max() > 1e-3


def assert_refused(optimizer: Any, saved: dict[str, Any], text: str, **how: Any) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved, **how)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert list(after["state"]) == list(before["state"])


# Another rule

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adan": {"betas": [0.5] * 3},
}
TORCHS = ["Adam", "NAdam", "Adamax", "RMSprop", "Adadelta", "Adagrad", "SGD"]
TORCHS += ["Rprop", "ASGD"]


def made(name: str, ps: list[Tensor]) -> Any:
    if name in TORCHS:
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(ps, lr=0.1, **options)
    return CLASSES[name](ps, lr=0.1, weight_decay=0.0, **OPTIONS.get(name, {}), **EAGER)


def test_a_state_of_adapters_alone_loads_next_to_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    adapters = AdamW(model[1].named_parameters(prefix="1"), lr=0.1, **EAGER)
    train(adapters, list(model[1].parameters()), range(1))
    whole, saved = AdamW(model.named_parameters(), lr=0.1, **EAGER), adapters.state_dict()
    assert_refused(whole, saved, r"the state has nothing for \['0.weight', '0.bias'\]")
    model[0].requires_grad_(False)
    assert whole.load_state_dict(saved).missing == ["0.weight", "0.bias"]
    assert {*whole.state} == {*model[1].parameters()}
    assert whole.state[model[1].get_parameter("weight")]["step"] == 1


@pytest.mark.parametrize("source", [*CLASSES, *TORCHS])
def test_what_loads_is_what_has_the_rules_fields_and_no_others(source: str) -> None:
    ps = params()
    other = made(source, ps)
    train(other, ps, range(2))
    saved = other.state_dict()
    fields = {*saved["state"][0], "step"}
    for target in CLASSES:
        ours = made(target, copied(ps))
        ours.init_state()
        needed = {*ours.state_dict()["state"][0]}
        if needed == fields:
            ours.load_state_dict(saved)
            assert ours.state_dict()["state"][1]["step"] >= 1
        else:
            assert_refused(
                ours,
                saved,
                "needs|does not take|Invalid (betas|momentum|eps)|has shape",
                strict=False,
            )


def test_options_of_another_rule_are_refused_where_there_is_no_state() -> None:
    ps = params()
    plain = torch.optim.SGD(ps, lr=0.1)
    train(plain, ps, range(2))
    assert not plain.state_dict()["state"]
    assert_refused(AdamW(ps, lr=1e-4, **EAGER), plain.state_dict(), "'momentum'")
    assert_refused(SGD(ps, lr=1e-4, **EAGER), AdamW(ps).state_dict(), "'betas'")


def test_what_an_option_turned_off_left_behind_still_loads() -> None:
    for cls, options, off in (
        (SGD, {"momentum": 0.9}, {"momentum": 0.0}),
        (AdamW, {"amsgrad": True}, {"amsgrad": False}),
    ):
        ps = params()
        mine = cls(ps, lr=0.1, **options, **EAGER)
        train(mine, ps, range(2))
        mine.param_groups[0].update(off)
        train(mine, ps, range(2, 4))
        qs = copied(ps)
        other = cls(qs, lr=0.5, **EAGER)
        other.load_state_dict(mine.state_dict())
        train(mine, ps, range(4, 6))
        train(other, qs, range(4, 6))
        assert all(map(torch.equal, ps, qs))


# Another kind of weight decay


@pytest.mark.parametrize("source", [torch.optim.Adam, Adam], ids=["torch", "ours"])
def test_decay_that_joined_the_gradient_cannot_go_on_decoupled(source: Any) -> None:
    ps = params()
    options: dict[str, Any] = EAGER if source is Adam else {}
    other = source(ps, lr=0.1, weight_decay=0.25, **options)
    train(other, ps, range(2))
    ours = AdamW(copied(ps), lr=0.1, **EAGER)
    kinds = r"weight_decay=0.25 .*decouple_wd\)=\(False, False\), .*has \(False, True\)"
    with pytest.warns(UserWarning, match=kinds):
        ours.load_state_dict(other.state_dict())
    # Without decay there is nothing to say (warnings are errors here).
    other.param_groups[0]["weight_decay"] = 0.0
    ours.load_state_dict(other.state_dict())


def test_decay_by_lr_alone_is_another_kind_too() -> None:
    ps = params()
    other = torch.optim.AdamW(ps, lr=0.1)
    train(other, ps, range(2))
    ours = AdamW(copied(ps), lr=0.1, weight_decay=1e-5, decouple_lr=True, **EAGER)
    with pytest.warns(UserWarning, match=r"\(False, True\), .*has \(True, True\)"):
        ours.load_state_dict(other.state_dict())


@pytest.mark.parametrize("source", [torch.optim.AdamW, AdamW], ids=["torch", "ours"])
def test_decoupled_decay_goes_on_decoupled_in_adam(source: Any) -> None:
    ps = params()
    options: dict[str, Any] = EAGER if source is AdamW else {}
    other = source(ps, lr=0.1, weight_decay=0.5, **options)
    train(other, ps, range(3))
    qs = copied(ps)
    ours = Adam(qs, lr=0.5, weight_decay=0.1, **EAGER)
    ours.load_state_dict(other.state_dict())
    assert ours.param_groups[0]["decouple_wd"] is True
    assert_go_on_alike(ours, qs, other, ps)
    same = AdamW(qs, lr=0.5, **EAGER)
    same.load_state_dict(other.state_dict())
    assert "decouple_wd" not in same.param_groups[0]


# Other groups


def grouped(ps: list[Tensor], *options: dict[str, Any]) -> Any:
    """Two parameters, "a" and "b", in one group or in two."""
    names = list(zip("ab", ps))
    parts = [names] if len(options) == 1 else [[x] for x in names]
    groups = [{"params": part, **some} for part, some in zip(parts, options)]
    return AdamW(groups, lr=1.0, **EAGER)


REGROUPED: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "two rates into one group": (
        [{"lr": 1e-5}, {"lr": 1e-2}],
        [{"lr": 1e-3}],
        r"the state's param_groups \[0, 1\] .* lr: \{0: 1e-05, 1: 0.01\}.*deleting 'lr'",
    ),
    "one group into decay and no decay": (
        [{"weight_decay": 0.1}],
        [{"weight_decay": 0.1}, {"weight_decay": 0.0}],
        r"the optimizer's param_groups \[0, 1\] .* weight_decay: \{0: 0.1, 1: 0.0\}",
    ),
    "two rates of a schedule that starts at 0": (
        [{"lr": 0.0, "initial_lr": 1e-5}, {"lr": 0.0, "initial_lr": 1e-2}],
        [{"lr": 1e-3}],
        r"in initial_lr: \{0: 1e-05, 1: 0.01\}",
    ),
}


@pytest.mark.parametrize(("theirs", "ours", "text"), REGROUPED.values(), ids=REGROUPED)
def test_groups_that_changed_and_differ_are_refused(
    theirs: Any, ours: Any, text: str
) -> None:
    ps = params()
    saved = grouped(ps, *theirs)
    saved.init_state()
    for strict in (True, False):
        optimizer = grouped(copied(ps), *ours)
        assert_refused(optimizer, saved.state_dict(), text, strict=strict)
    # The way out that the error names: the optimizer's values stay.
    state = saved.state_dict()
    name = next(k for k in theirs[0] if f" {k}: " in text)
    for group in state["param_groups"]:
        del group[name]
    if name != "initial_lr":
        expected = [group[name] for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        assert [group[name] for group in optimizer.param_groups] == expected
        assert len(optimizer.state) == 2


def test_groups_that_changed_and_do_not_differ_load() -> None:
    ps = params()
    mine = grouped(ps, {"lr": 0.1, "name": "body"}, {"lr": 0.1, "name": "head"})
    train(mine, ps, range(3))
    qs = copied(ps)
    one = grouped(qs, {"lr": 0.5, "name": "all"})
    assert one.load_state_dict(mine.state_dict()) == ([], [])
    assert_go_on_alike(one, qs, mine, ps)
    # Groups of their own values, in another order.
    rs = copied(ps)
    mine.param_groups[1]["lr"] = 0.3
    both = list(zip("ab", rs))
    swapped = AdamW(
        [{"params": both[1:]}, {"params": both[:1], "lr": 2.0}], lr=1.0, **EAGER
    )
    swapped.load_state_dict(mine.state_dict())
    assert [group["lr"] for group in swapped.param_groups] == [0.3, 0.1]


def test_a_group_added_since_keeps_its_values() -> None:
    ps = params()
    mine = AdamW([("a", ps[0])], lr=0.1, **EAGER)
    mine.init_state()
    other = AdamW([("a", ps[0])], lr=0.5, **EAGER)
    other.add_param_group({"params": [("b", ps[1])], "lr": 0.01})
    assert other.load_state_dict(mine.state_dict(), strict=False) == (["b"], [])
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.01]


def test_groups_of_mixed_rules_are_compared_rule_by_rule() -> None:
    ps = params()
    named = list(zip("ab", ps))
    both = [{"params": [named[0]], "lr": 0.1}, {"params": [named[1]], "lr": 0.2}]
    parts = ("a", muon(lr=1.0))
    two = Mixed(both, parts, rest=adamw(lr=1.0), **EAGER)
    two.init_state()
    Mixed(named, parts, rest=adamw(lr=1.0), **EAGER).load_state_dict(two.state_dict())
    joined = Mixed(both, ("a", lion(lr=1.0)), rest=lion(lr=1.0), **EAGER)
    joined.init_state()
    one = Mixed(named, ("[ab]", lion(lr=1.0)), **EAGER)
    assert_refused(one, joined.state_dict(), r"lr: \{0: 0.1, 1: 0.2\}")


# Names without state, and what is no state


def test_frozen_names_of_the_state_are_no_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    every = AdamW(model.named_parameters(), lr=0.1, **EAGER)
    train(every, list(model[1].parameters()), range(2))
    adapters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    part = AdamW(adapters, lr=0.5, **EAGER)
    report = part.load_state_dict(every.state_dict())
    assert report == ([], ["0.weight", "0.bias"])
    assert part.state[adapters[0][1]]["step"] == 2
    # A name with state is a loss, and the half of the sentence that is empty is not said.
    fewer = AdamW(adapters[:1], lr=0.5, **EAGER)
    assert_refused(
        fewer, every.state_dict(), r"^the optimizer has no parameters \['1.bias'\]:"
    )
    only = AdamW(adapters[:1], lr=0.5, **EAGER)
    only.init_state()
    assert_refused(
        part, only.state_dict(), r"^the state has nothing for \['1.bias'\]: strict"
    )


# bitsandbytes

QUANT = "__bnb_optimizer_quant_state__"
BNB: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = {
    "adam": (Adam, torch.optim.AdamW, {}, ("exp_avg", "exp_avg_sq")),
    "adamw": (AdamW, torch.optim.AdamW, {}, ("exp_avg", "exp_avg_sq")),
    "lion": (Lion, Lion, EAGER, ("exp_avg",)),
    "sgd": (SGD, torch.optim.SGD, {"momentum": 0.9}, ("momentum_buffer",)),
}


def bitsandbytes_state(
    optimizer: Any, fields: tuple[str, ...], coded: bool, wrapped: bool = True
) -> dict[str, Any]:
    """The file that bitsandbytes 0.50 writes, with the moments of another optimizer.

    8 bits are indices of a table of 256 values, times the largest value of a block of 256.
    The tables here are straight lines, in place of its curves.
    """
    saved = optimizer.state_dict()
    tables = torch.linspace(-1, 1, 255), torch.linspace(0, 1, 256)
    state: dict[int, Any] = {}
    for i, entry in saved["state"].items():
        tensors: dict[str, Tensor] = {}
        for k, name in enumerate(fields, 1):
            x = entry[name].float()
            tensors[f"state{k}"] = x
            if coded and x.numel() >= 256:
                table = torch.cat([tables[0], torch.ones(1)]) if k == 1 else tables[1]
                blocks = [part.abs().max() for part in x.flatten().split(256)]
                units = [y / a for y, a in zip(x.flatten().split(256), blocks)]
                codes = (torch.cat(units)[:, None] - table).abs().argmin(1)
                tensors[f"state{k}"] = codes.to(torch.uint8).view(x.shape)
                tensors |= {f"qmap{k}": table, f"absmax{k}": torch.stack(blocks)}
        own = {QUANT: tensors} if wrapped else tensors
        state[i] = {"step": int(entry.get("step", 3)), **own}
    (group,) = saved["param_groups"]
    numbers = {k: group[k] for k in ("lr", "weight_decay", "params")}
    if len(fields) == 2:
        more = {"eps": group["eps"], "alpha": 0.0, "t_alpha": None, "t_beta3": None}
        numbers |= {"betas": group["betas"], **more}
    else:
        numbers |= {"betas": group.get("betas", (0.9, 0)), "eps": 0.0}
    return {"state": state, "param_groups": [numbers]}


@pytest.mark.parametrize("name", BNB)
def test_bitsandbytes_32_bits_go_on_here(name: str) -> None:
    cls, source, options, fields = BNB[name]
    ps = params((5, 3), (7,))
    theirs = source(ps, lr=0.05, weight_decay=0.1, **options)
    train(theirs, ps, range(3))
    for wrapped in (True, False):
        qs, rs = copied(ps), copied(ps)
        twin = source(rs, lr=0.05, weight_decay=0.1, **options)
        twin.load_state_dict(theirs.state_dict())
        ours = cls(qs, lr=0.7, **EAGER)
        saved = bitsandbytes_state(theirs, fields, False, wrapped)
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        ours.load_state_dict(torch.load(file, weights_only=True))
        assert_go_on_alike(ours, qs, twin, rs)


@pytest.mark.parametrize("name", BNB)
def test_bitsandbytes_8_bits_are_decoded(name: str) -> None:
    cls, source, options, fields = BNB[name]
    ps = params((7, 100), (5,))
    theirs = source(ps, lr=0.05, **options)
    train(theirs, ps, range(3))
    saved = bitsandbytes_state(theirs, fields, True)
    ours = cls(copied(ps), lr=0.7, **EAGER)
    ours.load_state_dict(saved)
    for i, q in enumerate(ours.param_groups[0]["params"]):
        entry, exact = saved["state"][i][QUANT], theirs.state[ps[i]]
        assert ours.state[q]["step"] == saved["state"][i]["step"]
        for k, field in enumerate(fields, 1):
            found = ours.state[q][field]
            assert found.dtype == torch.float32 and (f"qmap{k}" in entry) == (i == 0)
            flat = entry[f"state{k}"].flatten().tolist()
            if i == 0:
                table, scales = entry[f"qmap{k}"].tolist(), entry[f"absmax{k}"].tolist()
                expected = [table[c] * scales[j // 256] for j, c in enumerate(flat)]
                flat = torch.tensor(expected).tolist()
            torch.testing.assert_close(found.flatten().tolist(), flat, rtol=1e-6, atol=1e-9)
            top = exact[field].abs().max().item()
            torch.testing.assert_close(found, exact[field], rtol=0, atol=0.006 * top)


def test_bitsandbytes_other_classes_are_refused() -> None:
    ps = params((7, 100))
    adam = torch.optim.AdamW(ps, lr=0.05)
    train(adam, ps, range(1))
    saved = bitsandbytes_state(adam, BNB["adam"][3], True)
    text = r"bitsandbytes' \[.*'state1', 'state2', 'step'\] with betas=\(0.9, 0.999\)"
    for cls in (Lion, SGD, LAMB, RAdam):
        assert_refused(cls(ps, lr=0.1, **EAGER), saved, text)
    lamb = copy.deepcopy(saved)
    lamb["state"][0]["unorm_vec"] = torch.ones(1)
    assert_refused(AdamW(ps, lr=0.1, **EAGER), lamb, "'unorm_vec'")
    # Not in blocks, as versions before wrote them.
    whole = copy.deepcopy(saved)
    del whole["state"][0][QUANT]["absmax1"]
    assert_refused(AdamW(ps, lr=0.1, **EAGER), whole, "or not in blocks of 256")
    one = copy.deepcopy(saved)
    for k in ("state2", "qmap2", "absmax2"):
        del one["state"][0][QUANT][k]
    for betas, eps, taker in (((0.9, 0.99), 0.0, Lion), ((0.9, 0), 0.0, SGD)):
        one["param_groups"][0].update(betas=betas, eps=eps)
        for cls in (Lion, SGD, AdamW):
            optimizer = cls(ps, lr=0.1, **EAGER)
            if cls is taker:
                optimizer.load_state_dict(one)
            else:
                assert_refused(optimizer, one, "are not of this rule")
    one["param_groups"][0].update(betas=(0.99, 0), eps=1e-8)  # RMSprop
    for cls in (Lion, SGD, AdamW):
        assert_refused(cls(ps, lr=0.1, **EAGER), one, "eps=1e-08 are not of this rule")


def test_bitsandbytes_state_goes_into_any_storage_and_by_name() -> None:
    ps = params((64, 128), (5,))
    theirs = torch.optim.AdamW(zip("ab", ps), lr=0.05)
    train(theirs, ps, range(3))
    saved = bitsandbytes_state(theirs, BNB["adamw"][3], True)
    saved["param_groups"][0]["param_names"] = ["a", "b"]
    qs = copied(ps)
    ours = AdamW(
        [("b", qs[1]), ("a", qs[0])], lr=1.0, storage=Storage(moments="8bit"), **EAGER
    )
    assert ours.load_state_dict(saved) == ([], [])
    assert ours.state[qs[0]]["exp_avg_q"].dtype == torch.int8
    decoded = ours.decoded_state_dict()["state"][1]["exp_avg"]
    torch.testing.assert_close(decoded, theirs.state[ps[0]]["exp_avg"], rtol=0.1, atol=0.02)
