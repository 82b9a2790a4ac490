"""States from elsewhere: by name, from torch and optimi and back, in other dtypes."""

import copy
import pickle
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from cases import CLASSES, OPTIMI, fitting
from many_sizes import assert_alike, fill, params, train
from torch import Tensor, nn

from optimi_func import SGD, Adam, AdamW, RAdam
from optimi_func.state import stored

EAGER = {"compile": False}


def started(cls: Any, ps: Any, **options: Any) -> Any:
    optimizer = cls(ps, **{"lr": 0.05, **EAGER, **options})
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    train(optimizer, tensors, 0, 3)
    return optimizer


def copied(ps: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in ps]


def named(ps: list[Tensor]) -> dict[str, Tensor]:
    return {f"w{i}": p for i, p in enumerate(ps)}


def go_on_alike(ours: Any, ps: list[Tensor], theirs: Any, qs: list[Tensor]) -> None:
    starts = [p.detach().clone() for p in ps]
    train(ours, ps, 3, 5)
    train(theirs, qs, 3, 5)
    moved, expected = (
        [(x.detach() - start) for x, start in zip(xs, starts)] for xs in (ps, qs)
    )
    assert any(x.abs().max() > 1e-3 for x in expected if x.numel())
    assert_alike(moved, expected, 1e-6)


# Entries with the same facts


def _alike(
    storage: Any = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, dict[str, Any], list[Tensor]]:
    """An optimizer whose parameters are of two shapes, its state, and the parameters."""
    shapes = [(40, 8), (64,)] * 4
    ps = [torch.ones(x, dtype=dtype, requires_grad=True) for x in shapes]
    optimizer = started(AdamW, ps, storage=storage)
    return optimizer, copy.deepcopy(optimizer.state_dict()), ps


@pytest.mark.parametrize("storage", [None, "compact", "exact"])
def test_entries_of_one_kind_are_checked_once(storage: Any, monkeypatch) -> None:
    optimizer, saved, ps = _alike(storage)
    seen: list[object] = []
    check = stored.checked
    monkeypatch.setattr(
        stored, "checked", lambda *given: seen.append(given[2]) or check(*given)
    )
    qs = copied(ps)
    other = AdamW(qs, lr=0.3, storage=storage, **EAGER)
    optimizer.load_state_dict(saved)
    assert seen == [0, 1]
    other.load_state_dict({**saved, "state": {**saved["state"], 3: {}}})
    assert seen == [0, 1, 0, 1, 3]
    kept = {i: {k: x.data_ptr() for k, x in e.items()} for i, e in saved["state"].items()}
    other.load_state_dict(saved)
    loaded = other.state_dict()["state"]
    for i, entry in saved["state"].items():
        assert list(entry) == list(loaded[i])
        for k, x in entry.items():
            assert torch.equal(x, loaded[i][k]) and x.stride() == loaded[i][k].stride()
            assert loaded[i][k].data_ptr() != kept[i][k]
    go_on_alike(optimizer, ps, other, qs)


def assert_state_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for i, entry in wanted["state"].items():
        assert all(torch.equal(x, found["state"][i][k]) for k, x in entry.items())


@pytest.mark.parametrize(
    "change",
    [
        Tensor.double,
        lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch._neg_view(-x),
        lambda x: x.requires_grad_() if x.dim() else x,
        torch.nn.Parameter,
    ],
    ids=["wider", "another order", "strided", "negated", "graph", "parameter"],
)
def test_an_entry_with_other_facts_is_converted(change: Any) -> None:
    optimizer, saved, _ = _alike(None, torch.float32)
    other = copy.deepcopy(optimizer)
    entry = saved["state"][6]
    for k in ("exp_avg", "exp_avg_sq"):
        entry[k] = change(entry[k])
    other.load_state_dict(saved)
    assert_state_alike(other.state_dict(), optimizer.state_dict())
    for k, x in other.state_dict()["state"][6].items():
        assert type(x) is Tensor and x.dtype == torch.float32 and not x.is_neg()
        assert x.is_contiguous() and not x.requires_grad
        assert x.untyped_storage().nbytes() == x.nbytes, k


# By name


def test_names_find_what_was_reordered_and_regrouped() -> None:
    ps = params()
    mine = started(AdamW, named(ps).items())
    qs = copied(ps)
    names = list(named(qs).items())
    groups = [
        {"params": names[5:][::-1], "weight_decay": 0.5},
        {"params": names[:5], "weight_decay": 0.5},
    ]
    other = AdamW(groups, lr=0.3, **EAGER)
    report = other.load_state_dict(mine.state_dict())
    assert report == ([], [])
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.05]
    assert [group["weight_decay"] for group in other.param_groups] == [0.01, 0.01]
    assert other.param_groups[0]["param_names"][0] == "w9"
    go_on_alike(other, qs, mine, ps)


@pytest.mark.parametrize("apart", [True, False])
def test_names_of_two_modules_in_one_optimizer(apart: bool) -> None:
    """`[*G.named_parameters(), *D.named_parameters()]` has every name twice."""
    ps = params()
    qs, rs = copied(ps), copied(ps)
    made: list[Any] = []
    for tensors in (qs, rs):
        half = len(tensors) // 2
        pairs = [(f"w{i % half}", x) for i, x in enumerate(tensors)]
        groups: Any = [{"params": pairs[:half]}, {"params": pairs[half:], "lr": 0.01}]
        made.append(AdamW(groups if apart else pairs, lr=0.05, **EAGER))
    train(made[0], qs, 0, 3)
    with torch.no_grad():
        for q, r in zip(qs, rs):
            r.copy_(q)
    saved = made[0].state_dict()
    made[1].load_state_dict(saved)
    for q, r in zip(qs, rs):
        assert torch.equal(made[0].state[q]["exp_avg"], made[1].state[r]["exp_avg"])
    train(made[0], qs, 3, 2)
    train(made[1], rs, 3, 2)
    assert all(map(torch.equal, qs, rs))
    other = AdamW([(f"w{i}", r) for i, r in enumerate(rs)], lr=0.05, **EAGER)
    with pytest.raises(ValueError, match=r"the state has 'w\d' twice.*match='order'"):
        other.load_state_dict(saved, strict=False)
    with pytest.raises(ValueError, match=r"the optimizer has 'w\d' twice.*match='order'"):
        made[1].load_state_dict(other.state_dict(), strict=False)


def test_names_that_only_one_side_has() -> None:
    ps = params()
    saved = started(AdamW, list(named(ps).items())[:-1]).state_dict()
    qs = copied(ps)
    other = started(AdamW, list(named(qs).items())[1:])
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"nothing for \['w9'\].*no parameters \['w0'\]"):
        other.load_state_dict(saved)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert_same_state(after, before)
    report = other.load_state_dict(saved, strict=False)
    assert report.missing == ["w9"]
    assert report.unexpected == ["w0"]
    assert qs[9] not in other.state
    assert other.state[qs[1]]["exp_avg"].equal(saved["state"][1]["exp_avg"])
    train(other, qs[1:], 3, 1)
    assert other.state[qs[9]]["step"] == 1
    assert other.state[qs[1]]["step"] == 4


def wrapped(names: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    if how == "torch.compile in it":
        return {n.replace("w1", "w1._orig_mod"): p for n, p in names.items()}
    return {how + n: p for n, p in names.items()}


WRAPPED = ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
WRAPPED += ["torch.compile in it"]


@pytest.mark.parametrize("there", ["", "module."])
@pytest.mark.parametrize("here", WRAPPED)
def test_names_of_wrapped_models_are_those_of_bare_ones(here: str, there: str) -> None:
    ps = params()
    mine = started(AdamW, wrapped(named(ps), here).items())
    qs = copied(ps)
    other = AdamW(reversed(wrapped(named(qs), there).items()), lr=0.3, **EAGER)
    assert other.load_state_dict(mine.state_dict()) == ([], [])
    assert other.param_groups[0]["param_names"][0] == f"{there}w9"
    go_on_alike(other, qs, mine, ps)


def test_the_names_that_torchs_wrappers_really_give() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    around = [torch.compile(model), torch.nn.Sequential(torch.compile(model[0]), model[1])]
    bare = SGD(model.named_parameters(), lr=0.1, momentum=0.9, **EAGER)
    bare.init_state()
    bare.state[model[0].weight]["momentum_buffer"].fill_(2.0)
    for module in around:
        optimizer = SGD(module.named_parameters(), lr=0.1, momentum=0.9, **EAGER)
        assert optimizer.load_state_dict(bare.state_dict()) == ([], [])
        found = optimizer.state[model[0].weight]["momentum_buffer"]
        assert found.flatten().tolist() == [2.0] * 6


def test_a_module_of_ones_own_called_module() -> None:
    """It is a wrapper's name only where all have it."""
    ps = params()[:2]
    mine = started(AdamW, [("module.w", ps[0]), ("w", ps[1])])
    qs = copied(ps)
    part = AdamW([("module.w", qs[0])], lr=0.1, **EAGER)
    assert part.load_state_dict(mine.state_dict(), strict=False) == ([], ["w"])
    assert part.state[qs[0]]["exp_avg"].equal(mine.state[ps[0]]["exp_avg"])


def test_nothing_in_common_is_no_load() -> None:
    ps = params()
    saved = started(AdamW, named(ps).items()).state_dict()
    qs = copied(ps)
    other = AdamW([(f"v{i}", q) for i, q in enumerate(qs)], lr=0.3, **EAGER)
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"nothing would be loaded.*match='order'"):
            other.load_state_dict(saved, strict=strict)
    assert other.param_groups[0]["lr"] == 0.3 and not other.state
    assert other.load_state_dict(saved, match="order") == ([], [])
    assert other.param_groups[0]["param_names"][0] == "v0"
    assert other.state[qs[3]]["exp_avg"].equal(saved["state"][3]["exp_avg"])
    with pytest.raises(ValueError, match="match='place': allowed are 'names'"):
        other.load_state_dict(saved, match="place")


def test_without_names_order_decides() -> None:
    ps = params()
    saved = started(AdamW, named(ps).items()).state_dict()
    qs = copied(ps)[::-1]
    with pytest.raises(ValueError, match="allowed is a tensor of shape"):
        AdamW(qs, lr=0.1, **EAGER).load_state_dict(saved)
    AdamW(qs[::-1], lr=0.1, **EAGER).load_state_dict(saved)


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a["state"]) == list(b["state"])
    for i, entry in b["state"].items():
        assert list(entry) == list(a["state"][i])
        assert all(torch.equal(x, a["state"][i][k]) for k, x in entry.items())


# From torch and back

BETAS = {"betas": (0.9, 0.99), "eps": 1e-8}
TORCHS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "adam": (Adam, torch.optim.Adam, BETAS, {"weight_decay": 0.1}),
    "adam, amsgrad": (Adam, torch.optim.Adam, BETAS, {"amsgrad": True}),
    "adam, maximize": (Adam, torch.optim.Adam, BETAS, {"maximize": True}),
    "adamw": (AdamW, torch.optim.AdamW, BETAS, {"weight_decay": 0.1}),
    "radam": (RAdam, torch.optim.RAdam, BETAS, {"weight_decay": 0.1}),
    "sgd": (SGD, torch.optim.SGD, {}, {"weight_decay": 0.1}),
    "sgd, momentum": (SGD, torch.optim.SGD, {"momentum": 0.9}, {"nesterov": True}),
    "sgd, dampening": (SGD, torch.optim.SGD, {"momentum": 0.9}, {"dampening": 0.5}),
}


@pytest.mark.parametrize(
    ("ours", "theirs", "common", "options"), TORCHS.values(), ids=TORCHS
)
def test_torchs_state_is_ours_and_ours_is_torchs(ours, theirs, common, options) -> None:
    ps = params()
    given = theirs(ps, lr=0.05, **common, **options)
    train(given, ps, 0, 3)
    qs = copied(ps)
    mine = ours(qs, lr=0.7, **common, **EAGER)
    mine.load_state_dict(given.state_dict())
    for name, value in options.items():
        assert mine.param_groups[0][name] == value
    rs = copied(ps)
    back = theirs(rs, lr=0.9, **common)
    back.load_state_dict(mine.torch_state_dict())
    go_on_alike(mine, qs, given, ps)
    train(back, rs, 3, 5)
    assert_alike(rs, ps, 1e-12)


def test_torchs_decoupled_adam_and_our_moving_average() -> None:
    ps = params()
    given = torch.optim.Adam(
        ps, lr=0.05, **BETAS, weight_decay=0.3, decoupled_weight_decay=True
    )
    train(given, ps, 0, 3)
    qs = copied(ps)
    mine = Adam(qs, lr=0.1, **EAGER)
    mine.load_state_dict(given.state_dict())
    assert mine.param_groups[0]["decouple_wd"] is True
    go_on_alike(mine, qs, given, ps)
    ps = params()
    mine = started(SGD, ps, momentum=0.9, dampening=True)
    qs = copied(ps)
    theirs = torch.optim.SGD(qs, lr=0.1)
    theirs.load_state_dict(mine.torch_state_dict())
    go_on_alike(mine, ps, theirs, qs)


IN_TORCH = [x for x in CLASSES if hasattr(torch.optim, CLASSES[x].__name__)]


@pytest.mark.parametrize("name", IN_TORCH)
def test_no_option_is_ours_alone(name: str) -> None:
    cls, w = CLASSES[name], torch.ones(2, 3, requires_grad=True)
    form = {"torch_form": True} if name == "adafactor" else {}
    ours = cls([w], **form, **EAGER).torch_state_dict()["param_groups"][0]
    theirs = getattr(torch.optim, cls.__name__)([w]).param_groups[0]
    assert {*ours} - {*theirs} <= {"foreach", "differentiable"}  # Muon has neither
    # torch's AdamW sets this name in what it loads.
    assert {*theirs} - {*ours} <= {"decoupled_weight_decay"}


# From optimi


@pytest.mark.parametrize("release", [False, True], ids=["plain", "gradient release"])
@pytest.mark.parametrize("name", OPTIMI)
def test_optimis_state_is_ours(name: str, release: bool) -> None:
    optimi = pytest.importorskip("optimi")
    cls = getattr(optimi, CLASSES[name].__name__)
    options: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    # Where triton is installed its StableAdamW takes it on CPU too, and finds no driver.
    own = {"weight_decay": 0.1, "gradient_release": release, "triton": False}
    ps = params()[:2]
    theirs = cls(ps, lr=0.05, **own, **options)

    def step(start: int, count: int) -> None:
        for t in range(start, start + count):
            fill(ps, t)
            for p in ps if release else []:
                theirs.step(param=p)
            if not release:
                theirs.step()

    step(0, 3)
    qs = copied(ps)
    ours = CLASSES[name](qs, lr=0.7, **EAGER)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.05
    fresh = CLASSES[name](copied(ps), lr=0.7, **options, **EAGER)
    fresh.init_state()  # what optimi keeps beside is no part of ours
    assert {*ours.state[qs[0]]} == {*fresh.state[fresh.param_groups[0]["params"][0]]}
    starts = [p.detach().clone() for p in ps]
    step(3, 5)
    train(ours, qs, 3, 5)
    moved, expected = (
        [(x.detach() - start) for x, start in zip(xs, starts)] for xs in (qs, ps)
    )
    assert_alike(moved, expected, 1e-6)


# Dtypes


def test_a_float32_state_goes_into_bfloat16_with_kahan_and_back() -> None:
    ps = params(torch.float32)
    wide = started(AdamW, ps)
    qs = [p.detach().bfloat16().requires_grad_() for p in ps]
    narrow = AdamW(qs, lr=0.1, **EAGER)
    narrow.load_state_dict(wide.state_dict())
    assert {x.dtype for x in tensors(narrow, qs)} == {torch.bfloat16}
    train(narrow, qs, 3, 2)
    assert all("kahan_comp" in narrow.state[q] for q in qs)
    rs = [q.detach().float().requires_grad_() for q in qs]
    back = AdamW(rs, lr=0.1, **EAGER)
    back.load_state_dict(narrow.state_dict())
    assert {x.dtype for x in tensors(back, rs)} == {torch.float32}
    assert not any("kahan_comp" in back.state[r] for r in rs)
    train(back, rs, 5, 2)
    train(wide, ps, 3, 4)
    assert_alike(rs, ps, 0.05)


@pytest.mark.parametrize("keep", [False, True])
def test_dtypes_are_the_running_optimizers_or_the_files(keep: bool) -> None:
    ps = params(torch.bfloat16)
    saved = started(AdamW, ps, state_dtype=torch.float32, kahan_sum=False).state_dict()
    other = AdamW(copied(ps), lr=0.1, **EAGER)
    other.load_state_dict(saved, keep_dtypes=keep)
    assert other.param_groups[0]["state_dtype"] is None
    assert other.param_groups[0]["kahan_sum"] is None
    qs = other.param_groups[0]["params"]
    expected = torch.float32 if keep else torch.bfloat16
    assert {other.state[q]["exp_avg"].dtype for q in qs} == {expected}


@pytest.mark.parametrize(
    ("options", "keep", "warns"),
    [
        ({}, False, True),
        ({}, True, False),  # of moments as they were, float32
        ({"storage": "exact"}, False, False),
        ({"storage": "compact"}, False, False),
        ({"betas": (0.9, 0.999), "state_dtype": torch.float32}, False, False),
    ],
)
def test_betas_that_bfloat16_does_not_follow(options, keep: bool, warns: bool) -> None:
    wide = nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([wide], lr=0.1)
    wide.grad = torch.ones(3)
    theirs.step()
    ours = AdamW([nn.Parameter(wide.detach().bfloat16())], lr=0.1, **options, **EAGER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # the second time they are its own
            ours.load_state_dict(theirs.state_dict(), keep_dtypes=keep)
    told = [str(w.message) for w in caught if "with bfloat16 state" in str(w.message)]
    assert len(told) == warns
    assert all(w.filename == __file__ for w in caught)


def test_how_the_step_is_carried_out_stays_as_it_is() -> None:
    saved = started(AdamW, params()).state_dict()
    other = AdamW(params(), lr=0.1, foreach=True, capturable=True)
    other.load_state_dict(saved)
    group = other.param_groups[0]
    assert (group["foreach"], group["capturable"], group["compile"]) == (True, True, None)
    assert group["lr"] == 0.05


def tensors(optimizer: Any, ps: list[Tensor]) -> list[Tensor]:
    return [x for p in ps for k, x in optimizer.state[p].items() if k != "step"]


# All or nothing


# torch.optim's contract to the letter


def both(ps: list[Tensor], **options: Any) -> tuple[Any, Any]:
    """torch's AdamW and ours."""
    return (
        torch.optim.AdamW(ps, lr=0.05, **options),
        AdamW(copied(ps), lr=0.05, **EAGER, **options),
    )


def test_names_that_only_the_state_has_are_taken_over() -> None:
    saved = started(AdamW, named(params()).items()).state_dict()
    for optimizer in both(params()):
        optimizer.load_state_dict(
            saved if isinstance(optimizer, AdamW) else torch_saved(params())
        )
        (group,) = optimizer.param_groups
        assert group["param_names"] == list(named(params()))
        assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "w0"
        with pytest.raises(ValueError, match="should be with/without names"):
            optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)]})
    # Names that only the optimizer has stay.
    other = AdamW(named(params()).items(), lr=0.1, **EAGER)
    other.load_state_dict(started(AdamW, params()).state_dict())
    assert other.param_groups[0]["param_names"][-1] == "w9"


def torch_saved(ps: list[Tensor]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(named(ps).items(), lr=0.05)
    train(optimizer, ps, 0, 1)
    return optimizer.state_dict()


@pytest.mark.kernels
def test_state_beside_the_parameters_is_carried_along() -> None:
    found = []
    for optimizer in both(params()):
        ps = optimizer.param_groups[0]["params"]
        train(optimizer, ps, 0, 1)
        table = {"mean": torch.ones(2), "names": ["a"]}

        def note(optimizer: Any, table: Any = table) -> None:
            optimizer.state["note"] = 1
            optimizer.state["table"] = table

        handle = optimizer.register_state_dict_pre_hook(note)
        saved = optimizer.state_dict()
        handle.remove()
        assert saved["state"]["table"] is table
        other = type(optimizer)(copied(ps), lr=0.1)
        other.load_state_dict(saved)
        again = copy.deepcopy(optimizer)
        back = pickle.loads(pickle.dumps(optimizer))
        for one in (optimizer, other, again, back):
            qs = one.param_groups[0]["params"]
            beside = {k: v for k, v in one.state.items() if not isinstance(k, Tensor)}
            assert beside["table"]["mean"].tolist() == [1, 1]
            train(one, qs, 1, 1)
            keys = [k for k in one.state_dict()["state"] if isinstance(k, str)]
            found.append((sorted(beside), keys))
    assert found[:4] == found[4:]
    theirs = torch.optim.AdamW(copied(ps), lr=0.1)
    theirs.load_state_dict(optimizer.torch_state_dict())
    assert theirs.state["note"] == 1


def adding(group: Any) -> Any:
    def call(cls: Any) -> None:
        ps = params()[:2]
        cls(ps, lr=0.1).add_param_group(group(ps))

    return call


def loading(change: Any) -> Any:
    def call(cls: Any) -> None:
        ps = params()[:3]
        optimizer = cls([{"params": ps[:2]}, {"params": ps[2:]}], lr=0.1)
        saved = copy.deepcopy(optimizer.state_dict())
        change(saved)
        optimizer.load_state_dict(saved)

    return call


def requiring(cls: Any) -> Any:
    optimizer = cls(params(), lr=0.1)
    optimizer.defaults["lr"] = torch.optim.optimizer.required
    return optimizer


# What torch.optim says too. Other numbers out of their range are refused in optimi's words
# ("Invalid epsilon: eps=-1.0"), sparse gradients as a TypeError by every rule, and a
# state_dict without its keys as a ValueError that names them.
WRONG_CALLS: dict[str, Any] = {
    "no parameters": lambda cls: cls([], lr=0.1),
    "a tensor": lambda cls: cls(params()[0], lr=0.1),
    "a set": lambda cls: cls([{"params": set(params())}], lr=0.1),
    "no tensors": lambda cls: cls([1.0], lr=0.1),
    "some names": lambda cls: cls([("w", params()[0]), params()[1]], lr=0.1),
    "no leaf": lambda cls: cls([params()[0] * 2], lr=0.1),
    "no required number": lambda cls: requiring(cls).add_param_group({"params": params()}),
    "lr below 0": lambda cls: cls(params(), lr=-1.0),
    "lr of two": lambda cls: cls(params(), lr=torch.ones(2)),
    "a closure": lambda cls: cls(params(), lr=0.1).step(1),
    "a parameter twice": adding(lambda ps: {"params": ps[:1]}),
    "no dict": adding(lambda ps: ps),
    "no params": adding(lambda ps: {"lr": 0.1}),
    "names later": adding(lambda ps: {"params": [("w", params()[0])]}),
    "a group less": loading(lambda s: s["param_groups"].pop()),
    "a parameter less": loading(lambda s: s["param_groups"][0]["params"].pop()),
}


@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_errors_begin_with_torchs_words(call: Any) -> None:
    with pytest.raises(Exception) as theirs:
        call(torch.optim.AdamW)
    with pytest.raises(type(theirs.value)) as ours:
        call(partial(AdamW, **EAGER))
    # The value, which torch appends and we name.
    words = re.sub(r": -1\.0$", ": ", str(theirs.value))
    assert str(ours.value).startswith(words)


# To a pure optimizer and back


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.filterwarnings("ignore:share_d=True with lrs")
def test_to_a_pure_optimizer_and_back(name: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    options |= {"share_d": True} if name == "prodigy" else {}  # a tree has one
    ends = []
    for turn in (True, False):
        ps = fitting(name, params(dtype))
        names = list(named(ps).items())
        groups = [
            {"params": names[:4], "lr": 0.02, "weight_decay": 0.3},
            {"params": names[4:]},
        ]
        optimizer = started(CLASSES[name], groups, **options)
        if turn:
            pure, state = optimizer.functional()
            assert pure.lr["w0"] == 0.02
            assert pure.lr["w9"] == 0.05
            tree = {n: p.detach().clone() for n, p in names}
            for t in range(3, 6):
                fill(ps, t)
                tree, state = pure.step(tree, {n: p.grad for n, p in names}, state)
            optimizer.load_functional(state, tree)
        else:
            train(optimizer, ps, 3, 3)
        train(optimizer, ps, 6, 3)
        assert {optimizer.state[p]["step"].item() for p in ps} == {9.0}
        ends.append(ps)
    assert_alike(*ends, 0.0 if dtype == torch.bfloat16 else 1e-12)


def test_a_pure_state_shares_no_memory() -> None:
    ps = params()
    optimizer = started(AdamW, named(ps).items())
    _, state = optimizer.functional()
    before = optimizer.state[ps[0]]["exp_avg"].clone()
    state.leaves["w0"].exp_avg.add_(1)
    assert optimizer.state[ps[0]]["exp_avg"].equal(before)
    optimizer.load_functional(state)
    state.leaves["w0"].exp_avg.add_(1)
    assert optimizer.state[ps[0]]["exp_avg"].equal(before + 1)


def test_what_is_frozen_is_not_in_the_pure_form() -> None:
    ps = params()
    ps[0].requires_grad_(False)
    frozen = AdamW(named(ps).items(), lr=0.1, **EAGER)
    assert "w0" not in frozen.functional()[1].leaves
