"""`storage=` of the classes: every rule, loading between storages, master weights."""

import copy
import io
import json
import pickle
from typing import Any, get_type_hints

import pytest
import torch
from cases import CLASSES, ELEMENTWISE, NO_CODES, fitting
from refusals import Scene, refuses
from stored import (
    BF16,
    CODED,
    KEPT,
    WIDE,
    assert_same_bits,
    decoded,
    gradients,
    kept_in_codes,
    made,
    meant,
    same_bits,
    starts,
    train,
)
from torch import Tensor, nn

import optimi_func
from optimi_func import SGD, Adam, AdamW, Lion, adamw
from optimi_func.core.codes import MOMENTS, PARAMS
from optimi_func.core.rule import Rule, Storage
from optimi_func.core.storage import storage_of
from optimi_func.rules import Moment, SecondMoment

F32 = torch.float32


def slow(rule: Rule) -> set[str]:
    """Fields declared as wide whatever the storage: bfloat16 could not follow them."""
    declared = get_type_hints(rule.state, include_extras=True)
    return {k for k, kind in declared.items() if kind not in (Moment, SecondMoment)}


# Every rule in every storage: adamw's and the compact ones; the rest soak.
ROWS = [
    pytest.param(
        name,
        kind,
        options,
        id="-".join([name, kind, *options]),
        marks=() if kind == "compact" or name == "adamw" else pytest.mark.soak,
    )
    for kind in KEPT
    for name, options in [
        *[
            (name, {"lr": 1.0} if name == "adadelta" else {})
            for name in CLASSES
            if name not in NO_CODES
        ],
        ("sgd", {}),  # with momentum
        ("adam", {"amsgrad": True}),
        ("adamw", {"maximize": True, "decouple_lr": True, "weight_decay": 1e-4}),
    ]
]


@pytest.mark.parametrize(("name", "kind", "options"), ROWS)
def test_every_rule_follows_float64(name: str, kind: str, options: dict[str, Any]) -> None:
    storage, dtype = KEPT[kind]
    grads = gradients(20, dtype)
    ps, optimizer = made(name, storage, dtype, **options)
    train(optimizer, ps, grads)
    qs, other = made(name, None, dtype, **options)
    for q in qs:
        q.data = q.data.double()
    train(other, qs, [[g.double() for g in some] for some in grads])
    # A vector's last group may be shorter, a matrix's may not.
    expected = [x and (p.dim() < 2 or p.numel() % 64 == 0) for x, p in zip(CODED, ps)]
    expected = CODED if name in ELEMENTWISE else expected
    assert kept_in_codes(optimizer) == expected
    begun = fitting(name, starts(dtype))
    for start, p, q, coded in zip(begun, ps, qs, expected):
        state = optimizer.state[p]
        assert p.dtype == dtype and p.stride() == start.stride()
        if coded:
            wide = {
                k for k, x in state.items() if x.numel() == p.numel() and x.dtype != dtype
            }
            wide -= {"kahan_comp", "slow_param", *(k for k in wide if k.endswith("_q"))}
            rule = optimizer.rule_of(optimizer.param_groups[0])
            assert wide <= slow(rule)
            assert {k for k in state if not k.endswith(("_q", "_scale"))} <= {
                *WIDE,
                *slow(rule),
                "step",
                "kahan_comp",
                *rule.running._fields,
            }
            assert all(state[k].dtype == F32 for k in state if k.endswith("_scale"))
        moved = meant(p, state).double() - start.detach().double()
        wanted = q.detach() - start.detach().double()
        # Lion's sign of a mean near 0 turns.
        limit = 0.1 if name == "lion" else 0.06
        assert (moved - wanted).norm() < limit * wanted.norm()


@pytest.mark.parametrize("way", [{"foreach": True, "compile": None}, {"capturable": True}])
@pytest.mark.parametrize("kind", KEPT)
def test_other_ways_of_single_operations_are_the_same(kind: str, way: dict) -> None:
    storage, dtype = KEPT[kind]
    grads = gradients(5, dtype)
    for name in ("adamw", "stableadamw") if kind == "compact" else ("adamw",):
        ps, optimizer = made(name, storage, dtype)
        train(optimizer, ps, grads)
        qs, other = made(name, storage, dtype, **way)
        train(other, qs, grads)
        for p, q, coded in zip(ps, qs, CODED):
            state, known = optimizer.state[p], other.state[q]
            a, b = meant(p, state), meant(q, known)
            if coded and "foreach" in way:
                assert torch.equal(a, b)
                assert all(same_bits(x, known[k]) for k, x in state.items())
            # Numbers computed on the device may differ in their last bit, and so a code.
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            assert list(state) == list(known)


def test_memory_orders_of_gradients_and_of_casts_do_not_matter() -> None:
    """What lies otherwise than its parameter, from the start or from some step on."""
    ends = []
    for turned in (False, True):
        ps, optimizer = made("adan", "compact", BF16)
        for i, some in enumerate(gradients(6)):
            if turned and i == 3:
                for p in ps:
                    p.data = turn(p.data)
            train(optimizer, ps, [[turn(g) for g in some] if turned else some])
        ends.append((ps, optimizer))
    (ps, optimizer), (qs, other) = ends
    assert ps[0].stride() != qs[0].stride() and ps[2].stride() != qs[2].stride()
    for p, q in zip(ps, qs):
        assert torch.equal(p, q)
        for name, x in optimizer.state[p].items():
            assert torch.equal(x, other.state[q][name]), name


def turn(x: Tensor) -> Tensor:
    """Equal, in another order of memory."""
    if x.dim() < 2:
        return x
    return x.t().contiguous().t() if x.dim() == 2 and x.is_contiguous() else x.contiguous()


# Copies


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("kind", ["compact", "exact"])
def test_copies_go_on_alike(kind: str, copier: Any) -> None:
    storage, dtype = KEPT[kind]
    grads = gradients(6)
    ps, optimizer = made("adamw", storage, dtype)
    train(optimizer, ps, grads[:3])
    twin = copier(optimizer)
    train(optimizer, ps, grads[3:])
    train(twin, twin.param_groups[0]["params"], grads[3:])
    assert twin.param_groups[0]["storage"] == storage
    assert_same_bits(optimizer, twin)


def test_functional_and_back() -> None:
    grads = gradients(6)
    ps = dict(zip("abcdef", [p.requires_grad_() for p in starts()]))
    optimizer = AdamW(ps.items(), lr=0.01, storage="compact", compile=False)
    train(optimizer, list(ps.values()), grads[:3])
    pure, state = optimizer.functional()
    assert type(state.leaves["a"].exp_avg).__name__ == "Moment8"
    params = {name: p.detach().clone() for name, p in ps.items()}
    for some in grads[3:]:
        params, state = pure.step(params, dict(zip(params, some)), state)
    qs = dict(zip("abcdef", [p.requires_grad_() for p in starts()]))
    other = AdamW(qs.items(), lr=0.01, storage="compact", compile=False)
    other.load_functional(state, params)
    train(optimizer, list(ps.values()), grads[3:])
    for p, q in zip(ps.values(), qs.values()):
        torch.testing.assert_close(
            meant(p, optimizer.state[p]), meant(q, other.state[q]), rtol=1e-3, atol=1e-5
        )
    # Into another storage.
    wide = AdamW(qs.items(), lr=0.01, compile=False)
    wide.load_functional(state)
    assert not any(kept_in_codes(wide)) and wide.state[qs["a"]]["exp_avg"].dtype == BF16
    train(wide, list(qs.values()), grads[:1])


# Loading

STORAGES: dict[str, Any] = {
    "default": None,
    "compact": "compact",
    "exact": "exact",
    "kahan 8bit": Storage("kahan", "8bit"),
    "exact 8bit": Storage("exact", "8bit"),
    "kahan8 float32": Storage("kahan8", F32),
    "plain": Storage("plain", F32),
    "stochastic": Storage("stochastic", F32, 7),
}


def test_every_format_is_among_the_storages() -> None:
    kinds = list(map(storage_of, STORAGES.values()))
    assert {x.param for x in kinds} >= {*PARAMS}
    assert {x.moments for x in kinds} >= {*MOMENTS}


@pytest.fixture(scope="module")
def saved() -> dict[str, tuple[Any, dict[str, Any]]]:
    """By storage an optimizer after some steps, and its state from a file."""
    found = {}
    for kind, storage in STORAGES.items():
        ps, optimizer = made("adamw", storage, BF16)
        train(optimizer, ps, gradients(3))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        found[kind] = optimizer, torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("into", STORAGES)
@pytest.mark.parametrize("source", STORAGES)
def test_any_storage_loads_into_any_other(source: str, into: str, saved: Any) -> None:
    optimizer, state = saved[source]
    ps = optimizer.param_groups[0]["params"]
    qs, other = made("adamw", STORAGES[into], BF16)
    for p, q in zip(ps, qs):
        q.data.copy_(p.data)
    other.load_state_dict(state)
    assert other.param_groups[0]["storage"] == STORAGES[into]
    if source == into:
        assert_same_bits(optimizer, other)
    coded = CODED if storage_of(STORAGES[into]).coded else [False] * len(CODED)
    assert kept_in_codes(other) == coded
    for p, q in zip(ps, qs):
        rule = adamw(lr=0.1).rule
        was = decoded(rule, optimizer.state[p])
        now = decoded(rule, other.state[q])
        for name in was:
            # Codes of the largest of a group's are as near as bfloat16.
            assert (was[name] - now[name]).norm() < 0.03 * was[name].norm()
        lossy = {into, source} & {"plain", "stochastic"}
        if into != "default" and not lossy:
            a, b = meant(p, optimizer.state[p]), meant(q, other.state[q])
            assert ((a - b).abs() <= 2.0**-15.9 * a.abs()).all()
    # It goes on: the same dtypes as an optimizer's that began so.
    train(other, qs, gradients(4)[3:])
    begun, twin = made("adamw", STORAGES[into], BF16)
    train(twin, begun, gradients(1))
    for q, r in zip(qs, begun):
        known = {k: (x.dtype, x.stride()) for k, x in twin.state[r].items()}
        assert {k: (x.dtype, x.stride()) for k, x in other.state[q].items()} == known
        assert other.state[q]["step"] == 4


def test_exact_is_resumed_bit_for_bit() -> None:
    """And so is float32, from where exact stood; and exact, from float32."""
    grads = gradients(8, F32)
    ps, optimizer = made("adamw", "exact", BF16)
    wide(ps)
    qs, other = made("adamw", None, F32)
    for p, q in zip(ps, qs):
        q.data.copy_(p.data)
    train(optimizer, ps, grads[:4])
    train(other, qs, grads[:4])
    rs, again = made("adamw", "exact", BF16)
    wide(rs)
    for p, r in zip(ps, rs):
        r.data.copy_(p.data)
    again.load_state_dict(optimizer.state_dict())
    train(again, rs, grads[4:])
    train(other, qs, grads[4:])
    for q, r in zip(qs, rs):
        assert torch.equal(meant(r, again.state[r]), q)
        assert torch.equal(again.state[r]["exp_avg_sq"], other.state[q]["exp_avg_sq"])


def wide(ps: list[Tensor]) -> None:
    """Let parameters have gradients of float32."""
    for p in ps:
        p.grad_dtype = F32


def test_codes_that_lost_their_strides_find_them_again(saved: Any) -> None:
    """As a format that knows no strides has it."""
    optimizer, state = saved["compact"]
    state = copy.deepcopy(state)
    for entry in state["state"].values():
        entry.update({k: x.contiguous() for k, x in entry.items()})
    _, other = made("adamw", "compact", BF16)
    other.load_state_dict(state)
    assert_same_state(optimizer, other)
    # Into a parameter that never had them, it cannot be known what belongs together.
    ps = [p.contiguous().requires_grad_() for p in starts()]
    third = AdamW(ps, lr=0.01, storage="compact", compile=False)
    with pytest.raises(ValueError, match="have lost its memory order"):
        third.load_state_dict(state)
    assert not third.state
    # With them, codes are made anew.
    third.load_state_dict(optimizer.state_dict())
    for p, q in zip(optimizer.param_groups[0]["params"], ps):
        was = decoded(adamw(lr=0.1).rule, optimizer.state[p])["exp_avg"]
        now = decoded(adamw(lr=0.1).rule, third.state[q])["exp_avg"]
        assert (was - now).norm() < 0.02 * was.norm()


def assert_same_state(one: Any, two: Any) -> None:
    for p, q in zip(one.param_groups[0]["params"], two.param_groups[0]["params"]):
        for name, x in one.state[p].items():
            assert torch.equal(x, two.state[q][name])
            assert x.stride() == two.state[q][name].stride(), name


def test_what_is_saved_is_plain(saved: Any) -> None:
    for kind, (optimizer, state) in saved.items():
        json.dumps(state["param_groups"])
        json.dumps(optimizer.defaults)
        for entry in state["state"].values():
            assert all(type(x) is Tensor for x in entry.values())
            assert ("exp_avg" in entry) != ("exp_avg_q" in entry)
        assert optimizer.param_groups[0]["storage"] == STORAGES[kind]


@pytest.mark.parametrize("source", ["compact", "default"])
def test_codes_keep_no_dtype_that_they_had(source: str, saved: Any) -> None:
    into = "compact" if source == "default" else None
    qs, other = made("adamw", into, BF16)
    with pytest.raises(ValueError, match="keep_dtypes=True with storage="):
        other.load_state_dict(saved[source][1], keep_dtypes=True)
    assert not other.state and other.param_groups[0]["params"][0] is qs[0]


CASTS = {"exp_avg_q": BF16, "exp_avg_sq_q": F32, "exp_avg_scale": BF16}


@pytest.mark.parametrize("name", CASTS)
def test_casts_of_codes_are_refused(name: str, saved: Any) -> None:
    """torch's own loading would cast them in silence."""
    state = copy.deepcopy(saved["compact"][1])
    state["state"][0][name] = state["state"][0][name].to(CASTS[name])
    qs, other = made("adamw", "compact", BF16)
    with pytest.raises(TypeError, match=rf"{name}.*as they were saved"):
        other.load_state_dict(state)
    other.load_state_dict(saved["compact"][1])
    other.state[qs[0]][name] = state["state"][0][name]
    with pytest.raises(TypeError, match=rf"{name}.*as they were saved"):
        train(other, qs, gradients(1))
    other.state[qs[0]][name] = saved["compact"][1]["state"][0][name][:3]
    with pytest.raises((TypeError, ValueError), match=name):
        train(other, qs, gradients(1))
    assert all(torch.equal(p, q) for p, q in zip(starts(), qs))


# Groups


def test_each_group_has_a_storage() -> None:
    grads = gradients(4)
    ps = [p.requires_grad_() for p in starts()]
    groups = [
        {"params": ps[:1], "storage": "exact"},
        {"params": ps[1:2], "storage": Storage("kahan", "8bit")},
        {"params": ps[2:]},
    ]
    optimizer = AdamW(groups, lr=0.01, storage="compact", compile=False)
    train(optimizer, ps, grads)
    assert kept_in_codes(optimizer) == [False, *CODED[1:]]
    kinds = [optimizer.state[p]["kahan_comp"].dtype for p in ps]
    assert kinds == [torch.int16, BF16, *[torch.int8] * 4]
    for i, storage in ((0, "exact"), (1, Storage("kahan", "8bit")), (2, "compact")):
        qs, alone = made("adamw", storage, BF16)
        train(alone, qs, grads)
        assert torch.equal(qs[i], ps[i])


def test_a_group_that_has_nothing_to_code_is_no_error() -> None:
    """Norms in float32, beside weights in bfloat16; added later too."""
    weight, norm = starts()[0].requires_grad_(), torch.ones(64, requires_grad=True)
    optimizer = AdamW([{"params": [weight]}, {"params": [norm]}], lr=0.1, storage="exact")
    later = torch.ones(64, requires_grad=True)
    optimizer.add_param_group({"params": [later]})
    optimizer.init_state()
    assert "kahan_comp" not in optimizer.state[norm]
    assert optimizer.state[weight]["kahan_comp"].dtype == torch.int16


@pytest.mark.parametrize("now", STORAGES)
@pytest.mark.parametrize("before", ["default", "compact", "exact"])
def test_a_storage_that_changes_in_mid_run_is_the_storage(before: str, now: str) -> None:
    grads = gradients(4)
    ps, optimizer = made("adamw", STORAGES[before], BF16)
    train(optimizer, ps, grads[:2])
    optimizer.param_groups[0]["storage"] = STORAGES[now]
    qs, twin = made("adamw", STORAGES[now], BF16)
    train(optimizer, ps, grads[2:])
    train(twin, qs, grads)
    coded = CODED if storage_of(STORAGES[now]).coded else [False] * len(CODED)
    assert kept_in_codes(optimizer) == coded
    for p, q in zip(ps, qs):
        state, known = optimizer.state[p], twin.state[q]
        assert state["step"] == 4 and set(state) == set(known)
        comp = known.get("kahan_comp")
        assert comp is None or state["kahan_comp"].dtype == comp.dtype
        for name, x in decoded(adamw(lr=0.1).rule, state).items():
            y = decoded(adamw(lr=0.1).rule, known)[name]
            assert (x - y).norm() < 0.05 * y.norm()
    # And back.
    optimizer.param_groups[0]["storage"] = STORAGES[before]
    train(optimizer, ps, grads[:1])
    coded = CODED if storage_of(STORAGES[before]).coded else [False] * len(CODED)
    assert kept_in_codes(optimizer) == coded


# What raises


STORAGES_REFUSED = {
    "storage='small'": r"storage='small': allowed are \['compact'",
    "storage=('exact', '8bit')": "TypeError: allowed are",
    "storage=Storage('half')": "storage.param='half': allowed",
    "storage=Storage(None, torch.int8)": "TypeError: 8bit",
    "storage='compact', state_dtype=torch.float32": "choose one way",
}
REFUSED = {
    f"{call}, {options})": text
    for options, text in STORAGES_REFUSED.items()
    for call in ("AdamW([w]", "adamw_init(w")
} | {
    "AdamW([w], storage='compact', kahan_sum=True)": "choose one way",
    "AdamW([norm], storage='exact')": "no parameter is bfloat16",
    "AdamW([norm]).add_param_group({'params': [other], 'storage': 'compact'})": (
        "no parameter is bfloat16 or float16"
    ),
    "SGD([w], lr=0.1, storage=Storage(moments='8bit'))": "keeps no moments",
    "sgd_init([w], storage=Storage(moments='8bit'))": "keeps no moments",
    "ScheduleFreeSGD([w], storage=Storage('kahan', '8bit'))": (
        "schedule_free_sgd keeps no moments in 8 bits"
    ),
}


@refuses(REFUSED)
def test_storages_that_there_are_not() -> Scene:
    return {
        "w": starts()[0].requires_grad_(),
        "norm": torch.ones(64),
        "other": torch.ones(8),
    }


def test_a_rule_without_moments_has_none_in_codes() -> None:
    ps = [p.requires_grad_() for p in starts()]
    groups = [{"params": ps[:1]}, {"params": ps[1:], "momentum": 0.9}]
    SGD(groups, lr=0.1, storage="compact")
    optimizer = SGD(ps, lr=0.1, storage="exact", compile=False)
    train(optimizer, ps, gradients(1))
    assert list(optimizer.state[ps[0]]) == ["step", "kahan_comp"]


@pytest.mark.parametrize("cls", [SGD, optimi_func.ScheduleFreeSGD], ids=str)
def test_compact_weights_of_a_rule_without_moments(cls: Any) -> None:
    """Weights are stored so, and fields as ever."""
    found: list[Any] = []
    for storage in ("compact", Storage("kahan8")):
        ps = [p.requires_grad_() for p in starts()]
        optimizer = cls(ps, lr=0.1, storage=storage, compile=False)
        train(optimizer, ps, gradients(3))
        assert optimizer.state[ps[0]]["kahan_comp"].dtype == torch.int8
        found.append([p.detach() for p in ps])
    assert all(map(torch.equal, *found))
    assert (
        optimi_func.sgd_init(starts(), storage="compact").leaves[0].kahan_comp is not None
    )


def test_steps_too_small_for_24_bits_are_said() -> None:
    p = starts()[0].requires_grad_()
    with pytest.warns(UserWarning, match="below 2\\^-16"):
        Adam([p], lr=1e-6, storage="compact")


# Weights and states in float32


KEPT_AS: list[Any] = [
    None,
    "compact",
    "exact",
    Storage("kahan", "8bit"),
    Storage("exact", "8bit"),
]


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)).to(dtype)


def train_net(net: nn.Module, optimizer: Any, steps: int) -> None:
    own = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=own).to(p.dtype)
        optimizer.step()


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


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


def test_master_weights_that_no_compensation_could_keep() -> None:
    net, masters = model(), dict(model(torch.float32).named_parameters())
    optimizer = AdamW(net.parameters(), lr=1e-3, kahan_sum=False, compile=False)
    with pytest.warns(UserWarning, match=r"kahan_sum=False, are rounded"):
        optimizer.load_master_state_dict(net, masters)


@pytest.mark.parametrize("storage", KEPT_AS, ids=str)
def test_master_weights_go_back_as_they_came(storage: Any) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-3, storage=storage, compile=False)
    train_net(net, optimizer, 3)
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


@pytest.mark.parametrize("storage", KEPT_AS[1:], ids=str)
def test_a_decoded_state_loads_into_any_storage(storage: Any) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-3, storage=storage, compile=False)
    train_net(net, optimizer, 3)
    state = optimizer.decoded_state_dict()
    for entry, p in zip(state["state"].values(), net.parameters()):
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "kahan_comp"}
        assert all(x.is_floating_point() for x in entry.values())
        assert entry["exp_avg"].shape == p.shape
    for other in KEPT_AS:
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


@pytest.mark.parametrize("storage", ["compact", Storage(moments="8bit")])
def test_small_second_moments_beside_codes_follow_a_beta_of_0_999(storage: Any) -> None:
    p = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-3, betas=(0.9, 0.999), storage=storage, compile=False)
    generator, v = torch.Generator().manual_seed(0), torch.zeros(40, dtype=torch.float64)
    for step in range(600):  # gradients fall, and v has to
        size = 1.0 if step < 50 else 0.05
        p.grad = (size * torch.randn(40, generator=generator)).bfloat16()
        v = 0.999 * v + 0.001 * p.grad.double() ** 2
        optimizer.step()
    found = optimizer.state[p]["exp_avg_sq"]
    torch.testing.assert_close(found.double(), v, rtol=1e-4, atol=0)
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16


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
    train_net(net, optimizer, 1)
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


@pytest.mark.parametrize("storage", [*KEPT_AS, Storage(None, torch.float32)], ids=str)
def test_torchs_float32_run_gets_all_that_is_kept(storage: Any) -> None:
    """No moment is rounded on the way, whatever the model's dtype."""
    net = model()
    optimizer = AdamW(net.named_parameters(), lr=1e-3, storage=storage, compile=False)
    train_net(net, optimizer, 3)
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
    train_net(wide, old, 3)
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


def test_momentum_that_is_turned_on_later_begins_with_a_first_step() -> None:
    """Its buffer is the gradient then, without dampening."""
    w = torch.ones(3, requires_grad=True)
    optimizer = SGD([w], lr=0.1, momentum=0.0, weight_decay=0.0, compile=False)
    for _ in range(3):
        w.grad = torch.ones(3)
        optimizer.step()
    optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
    w.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert optimizer.state[w]["step"] == 1
    assert torch.equal(optimizer.state[w]["momentum_buffer"], w.grad)


@pytest.mark.parametrize("keep", [False, True])
def test_a_wider_compensation_is_converted_unless_dtypes_are_kept(keep: bool) -> None:
    w = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    optimizer = AdamW([w], lr=0.1, storage=Storage("kahan"), compile=False)
    w.grad = torch.ones_like(w)
    optimizer.step()
    saved = optimizer.state_dict()
    entry = saved["state"][0]
    entry["kahan_comp"] = entry["kahan_comp"].float()
    optimizer.load_state_dict(saved, keep_dtypes=keep)
    dtype = torch.float32 if keep else torch.bfloat16
    assert optimizer.state[w]["kahan_comp"].dtype == dtype
