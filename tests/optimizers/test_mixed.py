"""`Mixed`: several rules in one optimizer; who is selected, what is saved, who steps it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from refusals import Scene, refuses
from released import assert_same
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

from optimi_func import (
    AdamW,
    Mixed,
    Muon,
    MuonAdamW,
    Storage,
    adamw,
    hidden_matrices,
    lion,
    muon,
    prepare_for_gradient_release,
)

EAGER: dict[str, Any] = {"compile": False}


class Net(nn.Module):
    """An embedding tied to the head, a convolution, a class token, two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.positions = nn.Parameter(torch.randn(5, 8) / 4)
        self.first = nn.Linear(8, 16)
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.tokens(x) + self.positions)
        x = self.last(self.norm(x).relu())
        return self.head(x) * self.conv(x[:, None]).mean()


HIDDEN = ["first.weight", "conv.weight", "last.weight"]


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def backward(model: nn.Module, i: int) -> None:
    x = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(i))
    logits = model(x).float()
    nn.functional.cross_entropy(logits.flatten(0, 1), x.roll(1, 1).flatten()).backward()


def train(model: nn.Module, optimizers: Any, steps: range, schedulers: Any = ()) -> None:
    for i in steps:
        backward(model, i)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        model.zero_grad()


def parted(model: nn.Module, hidden: bool) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in model.named_parameters() if (n in HIDDEN) == hidden]


def mixed(model: nn.Module, **options: Any) -> Mixed:
    select = hidden_matrices(model)
    options = {**EAGER, **options}
    return Mixed(
        model.named_parameters(), (select, muon(lr=0.02)), rest=adamw(lr=0.01), **options
    )


WAYS: list[dict[str, Any]] = [
    EAGER,
    {"foreach": True, "compile": None},
    {"capturable": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_is_both_optimizers(way: dict[str, Any], dtype: torch.dtype) -> None:
    """Bit for bit, each with a schedule of its own."""
    model, twin = net(dtype), net(dtype)
    one = mixed(model, **way)
    options = {**EAGER, **way}
    two = [
        Muon(parted(twin, True), lr=0.02, **options),
        AdamW(parted(twin, False), lr=0.01, **options),
    ]
    curves: list[Any] = [lambda i: 0.9**i, lambda i: 1 / (1 + i)]
    train(model, [one], range(5), [lr_scheduler.LambdaLR(one, curves)])
    each = [lr_scheduler.LambdaLR(o, c) for o, c in zip(two, curves)]
    train(twin, two, range(5), each)
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(p, q), name
        other = two[0] if name in HIDDEN else two[1]
        assert all(torch.equal(x, other.state[q][k]) for k, x in one.state[p].items())


def test_groups_are_split_in_order() -> None:
    model = net()
    named = list(model.named_parameters())
    groups = [
        {"params": named[:3], "lr": 0.5, "betas": (0.5, 0.6), "layers": "low"},
        {"params": [], "lr": 0.1},
        {"params": named[3:5], "momentum": 0.7},
        {"params": named[5:]},
    ]
    parts = (("*weight", muon(lr=0.02)), ("*bias", lion(lr=1e-3)))
    good = [g for g in groups]
    good[0] = {**good[0], "params": [x for x in named[:3] if "tokens" not in x[0]]}
    good[3] = {"params": [x for x in named[5:] if "norm" not in x[0]]}
    optimizer = Mixed(good, *parts, rest=adamw(lr=0.01, weight_decay=0.3), **EAGER)
    found = [(g["rule"], g["param_names"], g["lr"]) for g in optimizer.param_groups]
    assert found == [
        ("muon", ["first.weight"], 0.5),
        ("adamw", ["positions"], 0.5),
        ("muon", ["conv.weight"], 0.02),
        ("lion", ["first.bias"], 1e-3),
        ("muon", ["last.weight"], 0.02),
        ("lion", ["conv.bias"], 1e-3),
    ]
    by_name = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert by_name["positions"]["betas"] == (0.5, 0.6) and by_name["positions"]["lr"] == 0.5
    assert by_name["positions"]["layers"] == "low"
    assert "betas" not in by_name["conv.weight"]
    assert by_name["conv.weight"]["momentum"] == 0.7
    assert by_name["last.weight"]["momentum"] == 0.95
    assert not {"lr", "betas", "momentum"} & set(optimizer.defaults)


def test_a_group_that_is_added_is_split_too() -> None:
    model, more = net(), nn.Linear(3, 2)
    optimizer = Mixed(
        model.named_parameters(),
        (lambda name, p: name in HIDDEN or name == "new.weight", muon(lr=0.02)),
        rest=adamw(lr=0.01),
        **EAGER,
    )
    named = [(f"new.{n}", p) for n, p in more.named_parameters()]
    optimizer.add_param_group({"params": named, "lr": 0.3})
    added = [(g["rule"], g["param_names"], g["lr"]) for g in optimizer.param_groups[2:]]
    assert added == [("muon", ["new.weight"], 0.3), ("adamw", ["new.bias"], 0.3)]


LR = r"TypeError: Invalid lr: lr=<.*use torch\.optim\.lr_sch"
REFUSED = {
    "": "Mixed got no part",
    "'a', rest=adam": "TypeError: Mixed's part 0 is 'a'",
    "(3, adam)": "TypeError: Mixed got 3 to select by",
    "('nobody', adam), rest=adam": "'nobody' selects no parameter: the param",
    "('*', adam), ('f*', adam)": (
        r"'f\*' selects no parameter that the parts before it leave"
    ),
    "('first*', adam)": "nothing selects 'positions', 'tok",
    "('*', adam), rest=adam": "no parameter is left for rest=",
    "('*', muon(lr=0.1))": r"params\['.*'\] has shape \(16,\): Muon takes",
    "('*', AdamW)": "TypeError: has no init or no step",
    "('*', chain(clip_global_norm(1.0), adam))": "TypeError: no transforms of them",
    "('*', adamw(lr=lambda i: 1))": LR,
    "('*', adamw(weight_decay={'a': 1.0}))": "TypeError: Invalid weight_decay",
}
CALLS = {f"Mixed(named, {parts})": text for parts, text in REFUSED.items()} | {
    "Mixed(model.parameters(), ('*', adam))": (
        "by name, and got some without.*named_parameters"
    ),
    "Mixed(named, ('*', adam), zz=1)": r"TypeError: no argument 'zz': allowed are",
    "optimizer.param_groups[0]['rule'] = 'lion'; optimizer.step()": (
        r"rule='lion': allowed are \['muon', 'adamw'\]"
    ),
    "add({'params': [(HIDDEN[0], model.first.weight)]})": (
        "some parameters appear in more than one"
    ),
    "add({'params': [nn.Parameter(torch.ones(2))]})": "by name",
    "add({'params': [torch.ones(2)], 'rule': 'adamw', 'lr': -1.0})": "lr=-1.0",
    "hidden_matrices(plain)('other.weight', plain[0].weight)": (
        r"the model has no parameter 'other\.weight'"
    ),
    "optimizer.load_state_dict(AdamW(model.named_parameters()).state_dict())": (
        r"no Mixed optimizer's: allowed are one, and a dict.*"
        r"load_fitting\(state_dict\) takes what fits"
    ),
    "MuonAdamW()(model, lr=1e-3)": r"TypeError: optimizer_cls_and_kwargs=\(lambda",
    "MuonAdamW([{'params': []}])": "TypeError: MuonAdamW got a list: allowed is a module",
}


@refuses(CALLS)
def test_what_is_refused() -> Scene:
    model, plain = net(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    named, adam, optimizer = [*model.named_parameters()], adamw(lr=0.1), mixed(model)
    for x in model.parameters():
        x.grad = torch.ones_like(x)
    return locals() | {"add": optimizer.add_param_group}


def test_schedulers() -> None:
    optimizer = mixed(net())
    with pytest.raises(ValueError, match="cycle_momentum"):
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for g in optimizer.param_groups:
        g.pop("initial_lr", None)
    schedule = lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.2, 0.1], total_steps=10, cycle_momentum=False
    )
    before = [(g.get("momentum"), g.get("betas")) for g in optimizer.param_groups]
    model = net()
    lrs = []
    for _ in range(9):
        optimizer.step()
        schedule.step()
        lrs.append([g["lr"] for g in optimizer.param_groups])
    assert max(x for x, _ in lrs) == pytest.approx(0.2, rel=0.05)
    assert all(a == pytest.approx(2 * b, rel=1e-3) for a, b in lrs[:3])
    assert [(g.get("momentum"), g.get("betas")) for g in optimizer.param_groups] == before
    del model


@pytest.mark.parametrize("form", ["torch", "pickle", "deepcopy"])
def test_save_and_load_in_the_middle(form: str) -> None:
    model = net(torch.bfloat16)
    optimizer = mixed(model)
    train(model, [optimizer], range(3))
    if form == "torch":
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        values, state = torch.load(file, weights_only=True)
        twin = net(torch.bfloat16)
        twin.load_state_dict(values)
        other = Mixed(
            reversed(list(twin.named_parameters())),
            (lambda name, p: name not in HIDDEN, adamw(lr=0.3)),
            rest=muon(lr=0.5),
            **EAGER,
        )
        assert other.load_state_dict(state) == ([], [])
        lrs = {g["rule"]: g["lr"] for g in other.param_groups}
        assert lrs == {"muon": 0.02, "adamw": 0.01}
    elif form == "pickle":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        twin, other = copy.deepcopy((model, optimizer))
    train(model, [optimizer], range(3, 6))
    train(twin, [other], range(3, 6))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_who_changed_sides_begins_anew() -> None:
    model = net()
    optimizer = mixed(model)
    train(model, [optimizer], range(2))
    saved = optimizer.state_dict()
    twin = copy.deepcopy(model)
    other = Mixed(
        twin.named_parameters(),
        (_two, muon(lr=0.3)),
        rest=adamw(lr=0.4),
        **EAGER,
    )
    with pytest.raises(ValueError, match=r"'last\.weight' follows adamw here and muon in"):
        other.load_state_dict(saved)
    assert not other.state and other.param_groups[0]["lr"] == 0.3
    report = other.load_state_dict(saved, strict=False)
    assert report.missing == ["last.weight"] == report.unexpected
    assert [g["lr"] for g in other.param_groups] == [0.02, 0.01]
    assert twin.last.weight not in other.state
    b = other.state[twin.first.weight]["momentum_buffer"]
    assert torch.equal(b, optimizer.state[model.first.weight]["momentum_buffer"])
    # A rule of which the state has nothing.
    only = Mixed(
        twin.named_parameters(), ("first*", lion(lr=0.3)), rest=adamw(lr=1), **EAGER
    )
    with pytest.raises(ValueError, match="follows"):
        only.load_state_dict(saved)
    report = only.load_state_dict(saved, strict=False)
    assert set(report.missing) == {
        "first.weight",
        "first.bias",
        "conv.weight",
        "last.weight",
    }


def _two(name: str, p: Tensor) -> bool:
    return name in ("first.weight", "conv.weight")


def test_torchs_two_optimizers_load_and_go_back() -> None:
    model = net()
    hidden = [(n, p) for n, p in parted(model, True) if p.dim() == 2]
    rest = [(n, p) for n, p in model.named_parameters() if (n, p) not in hidden]
    names = [n for n, _ in hidden]
    theirs: list[Any] = [
        torch.optim.Muon(hidden, lr=0.03),
        torch.optim.AdamW(rest[::-1], lr=0.05),
    ]
    train(model, theirs, range(3))
    twin = copy.deepcopy(model)
    ours = Mixed(
        twin.named_parameters(),
        (lambda name, p: name in names, muon(lr=1.0, ns_dtype=torch.bfloat16)),
        rest=adamw(lr=1.0),
        **EAGER,
    )
    saved = dict(zip(("muon", "adamw"), [o.state_dict() for o in theirs]))
    assert ours.load_state_dict(saved) == ([], [])
    first, second = ours.param_groups
    assert (first["lr"], first["adjust_lr_fn"], first["rule"]) == (0.03, None, "muon")
    assert (second["lr"], second["betas"]) == (0.05, (0.9, 0.999))
    third = copy.deepcopy(twin)
    named = dict(third.named_parameters())
    back: list[Any] = [
        torch.optim.Muon([(n, named[n]) for n in first["param_names"]]),
        torch.optim.AdamW([(n, named[n]) for n in second["param_names"]]),
    ]
    for optimizer, state in zip(back, ours.torch_state_dict().values()):
        optimizer.load_state_dict(state)
    start = [p.detach().clone() for p in model.parameters()]
    train(model, theirs, range(3, 6))
    train(twin, [ours], range(3, 6))
    train(third, back, range(3, 6))
    for p, q, r, x in zip(*[m.parameters() for m in (model, twin, third)], start):
        torch.testing.assert_close(r, p, rtol=1e-5, atol=1e-6)
        assert (q - p).norm() < 0.1 * (p - x).norm()


@pytest.mark.parametrize("storage", [None, Storage("kahan8")], ids=str)
def test_release_is_the_ordinary_step(storage: Any) -> None:
    pair = []
    for release in (False, True):
        model = net(torch.bfloat16)
        optimizer = mixed(model, gradient_release=release, storage=storage)
        if release:
            prepare_for_gradient_release(model, optimizer)
        train(model, [optimizer], range(5))
        pair.append((model, optimizer))
    assert_same(*pair)


def test_to_a_pure_optimizer_and_back() -> None:
    ends = []
    for turn in (False, True):
        model = net()
        groups = [
            {"params": list(model.named_parameters())[:4]},
            {"params": list(model.named_parameters())[4:], "weight_decay": 0.3},
        ]
        optimizer = Mixed(
            groups, (hidden_matrices(model), muon(lr=0.02)), rest=adamw(lr=0.01), **EAGER
        )
        train(model, [optimizer], range(3))
        if turn:
            pure, state = optimizer.functional()
            params = {n: p.detach().clone() for n, p in model.named_parameters()}
            for i in range(3, 6):
                backward(model, i)
                grads = {n: p.grad for n, p in model.named_parameters()}
                model.zero_grad()
                params, state = pure.step(params, grads, state)
                optimizer.load_functional(state, params)
        else:
            train(model, [optimizer], range(3, 6))
        train(model, [optimizer], range(6, 8))
        ends.append(model)
    assert all(map(torch.equal, *[m.parameters() for m in ends]))
    fresh = pure.init(params)
    assert fresh.places == state.places
    assert pytree.tree_structure(fresh) == pytree.tree_structure(state)


@pytest.mark.full
def test_the_compiled_whole_step() -> None:
    from optimi_func.compiled import train_step

    model, twin = net(), net()
    one, other = mixed(model, compile=True), mixed(twin, compile=True)
    x = torch.randint(7, (4, 5))

    def loss(logits: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    step: Any = train_step(model, loss, one)
    for _ in range(3):
        step((x, x))
        loss(twin(x), (x, x)).backward()
        other.step()
        other.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


# Who is hidden


def chosen(model: nn.Module, **more: Any) -> list[str]:
    select = hidden_matrices(model, **more)
    return [name for name, p in model.named_parameters() if select(name, p)]


def test_hidden_matrices() -> None:
    model = net()
    assert chosen(model) == HIDDEN
    assert chosen(model, exclude="last.weight") == HIDDEN[:2]
    assert chosen(model, exclude=["la*", "conv.*"]) == HIDDEN[:1]
    free = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 3, 3), nn.Linear(4, 2))
    assert chosen(free) == ["0.weight"]
    assert chosen(free, include="2.weight") == ["0.weight", "2.weight"]
    attention = nn.MultiheadAttention(4, 2)
    assert chosen(attention) == ["in_proj_weight"]


def test_what_a_model_says_is_its_head() -> None:
    class Says(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.head = nn.Linear(3, 4)
            self.body = nn.Linear(3, 3)
            setattr(self, how, lambda: self.head)

    assert chosen(Says("get_output_embeddings")) == ["body.weight"]
    assert chosen(Says("get_classifier")) == ["body.weight"]
    assert chosen(Says("unheard")) == ["body.weight"]  # by its name


def test_names_of_wrapped_models() -> None:
    model = net()
    select = hidden_matrices(model)
    for around in ("_orig_mod.", "module.", "module._orig_mod."):
        found = [n for n, p in model.named_parameters() if select(around + n, p)]
        assert found == HIDDEN
    assert chosen(torch.compile(model)) == ["_orig_mod." + n for n in HIDDEN]
    assert pickle.loads(pickle.dumps(select)).kinds == select.kinds


def test_muonadamw_has_one_lr_and_two_decays() -> None:
    model = net()
    model.norm.bias.requires_grad_(False)
    optimizer = MuonAdamW(model, lr=3e-3, adamw_weight_decay=0.2, **EAGER)
    first, second = optimizer.param_groups
    assert (first["rule"], first["lr"], first["weight_decay"]) == ("muon", 3e-3, 0.1)
    assert (second["rule"], second["lr"], second["weight_decay"]) == ("adamw", 3e-3, 0.2)
    assert first["param_names"] == HIDDEN and "norm.bias" in second["param_names"]
    assert MuonAdamW(model, weight_decay=0.4).param_groups[0]["weight_decay"] == 0.4
    text = optimizer.describe()
    assert "muon   16 x 8         first.weight\n" in text
    assert "adamw  7 x 8          tokens.weight\n" in text
    before = [p.detach().clone() for p in model.parameters()]
    train(model, [optimizer], range(1))
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before)]
    assert moved == [p.requires_grad for p in model.parameters()]


def decays_of(optimizer: Mixed) -> dict[str, float]:
    return {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}


def test_muonadamw_decays_neither_norms_nor_biases_nor_embeddings_unless_asked() -> None:
    model = net()  # whose head is tied to the embedding
    expected = {n: 0.1 * (n in HIDDEN) for n, _ in model.named_parameters()}
    assert decays_of(MuonAdamW(model)) == expected
    model.head.weight = nn.Parameter(torch.randn(7, 8))
    model.wave = nn.Conv1d(2, 3, 4)
    decayed = [*HIDDEN, "head.weight", "wave.weight"]
    expected = {n: 0.3 * (n in decayed) for n, _ in model.named_parameters()}
    assert decays_of(MuonAdamW(model, weight_decay=0.3)) == expected
    assert decays_of(MuonAdamW(model, weight_decay=0.0)) == dict.fromkeys(expected, 0.0)
    expected = {n: 0.3 if n in HIDDEN else 0.2 for n in expected}
    asked = MuonAdamW(model, weight_decay=0.3, adamw_weight_decay=0.2)
    assert decays_of(asked) == expected
    expected = {n: 0.3 * (n in HIDDEN) for n in expected}
    asked = MuonAdamW(model, weight_decay=0.3, adamw_weight_decay=0.0)
    assert decays_of(asked) == expected


def test_muonadamw_goes_on_with_a_state_of_two_groups() -> None:
    """Of versions before 0.3, in which all of AdamW's parameters had one decay."""
    model = net()
    model.head.weight = nn.Parameter(torch.randn(7, 8))
    old = MuonAdamW(model, adamw_weight_decay=0.1, **EAGER)
    train(model, [old], range(2))
    new = MuonAdamW(model, **EAGER)
    assert (len(old.param_groups), len(new.param_groups)) == (2, 3)
    with pytest.raises(ValueError, match="differ in weight_decay"):
        new.load_state_dict(old.state_dict())
    before, state = decays_of(new), old.state_dict()
    for group in state["param_groups"]:
        del group["weight_decay"]
    assert new.load_state_dict(state) == ([], [])
    assert decays_of(new) == before
    for p in model.parameters():
        assert all(torch.equal(x, old.state[p][k]) for k, x in new.state[p].items())


def test_muonadamw_takes_adapters_alone() -> None:
    """As of a model with LoRA: everything that is trained is a matrix."""
    model = net()
    for name, p in model.named_parameters():
        p.requires_grad_(name in HIDDEN)
    optimizer = MuonAdamW(model, **EAGER)
    assert [g["rule"] for g in optimizer.param_groups] == ["muon", "adamw"]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def moved() -> list[str]:
        return [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]

    train(model, [optimizer], range(1))
    assert moved() == HIDDEN and len(optimizer.state) == len(HIDDEN)
    model.requires_grad_(True)  # what thaws is trained
    train(model, [optimizer], range(1))
    assert moved() == [*before] and len(optimizer.state) == len(before)
    for name, p in model.named_parameters():
        p.requires_grad_(name not in HIDDEN)
    rest = MuonAdamW(model, **EAGER)  # AdamW alone has something to train
    assert [g["rule"] for g in rest.param_groups] == ["muon", "adamw"]
    train(model, [rest], range(1))
    assert {*rest.state} == {p for p in model.parameters() if p.requires_grad}
