"""Prodigy: the estimate of d, over groups, parts of a step, storage and saved states."""

import copy
import io
import json
import math
import warnings
from typing import Any

import pytest
import reference
import torch
from cases import assert_moved_alike
from refusals import Scene, refuses
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import (
    Mixed,
    Prodigy,
    prepare_for_gradient_release,
    prodigy,
    prodigy_init,
    prodigy_step,
    sgd,
    unroll,
)
from optimi_func.core import distributed

EAGER: dict[str, Any] = {"compile": False}
BF16, DOUBLE = torch.bfloat16, torch.float64
# Two groups, of which the second's solution is ten times as far.
SHAPES = [[(7, 5), (4,)], [(3, 6)]]
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.1, "use_bias_correction": True, "betas": (0.8, 0.95)},
    "growth": {"growth_rate": 1.3, "safeguard_warmup": True, "d_coef": 2.0, "beta3": 0.9},
}


def problem() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Starts and solutions."""
    torch.manual_seed(0)
    starts = [[torch.randn(s, dtype=DOUBLE) for s in some] for some in SHAPES]
    offsets = [[torch.randn(s, dtype=DOUBLE) for s in some] for some in SHAPES]
    return starts, [
        [p + 10.0**i * x for p, x in zip(*pair)]
        for i, pair in enumerate(zip(starts, offsets))
    ]


def papers(
    p: Tensor, target: Tensor, lrs: list[float], **options: Any
) -> tuple[Tensor, list[float]]:
    """Return the parameter after a step for each lr, as the paper has it, and the ds."""
    decay, betas = options.pop("weight_decay", 0.0), options.pop("betas", (0.9, 0.999))
    s, ds = reference.prodigy_start(p), list[float]()
    for i, lr in enumerate(lrs):
        at = reference.At(i + 1, lr, lr * decay, betas)
        u, s = reference.prodigy_move(p, s, p - target, at, **options)
        p = p + u
        ds.append(s["d"].item())
    return p, ds


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def train(
    optimizer: Any, ps: list[list[Any]], targets: list[list[Tensor]], lrs: list[float]
) -> list[list[float]]:
    """Step with the gradients of half the square distances; return the ds of each step."""
    found: list[list[float]] = []
    for lr in lrs:
        for group, some, goals in zip(optimizer.param_groups, ps, targets):
            group["lr"] = lr
            for p, goal in zip(some, goals):
                p.grad = (p.detach() - goal).to(p.dtype)
        optimizer.step()
        found.append([float(group["d"]) for group in optimizer.param_groups])
    return found


def made(dtype: torch.dtype = DOUBLE, **options: Any) -> tuple[list[list[Any]], Prodigy]:
    starts, _ = problem()
    ps = [[p.to(dtype).requires_grad_() for p in some] for some in starts]
    groups = [{"params": some} for some in ps]
    return ps, Prodigy(groups, **{**EAGER, **options})


LRS = {"constant": [1.0] * 70, "cosine": [math.cos(i / 70) for i in range(70)]}


# The paper


@pytest.mark.parametrize("lrs", LRS.values(), ids=LRS)
@pytest.mark.parametrize("share", [False, True], ids=["groups", "shared"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_groups_follow_the_paper(options: dict, share: bool, lrs: list[float]) -> None:
    starts, targets = problem()
    ps, optimizer = made(share_d=share, **options)
    found = train(optimizer, ps, targets, lrs)
    units = [[0, 1]] if share else [[0], [1]]
    for unit in units:
        start, target, ours = (
            flat([x for i in unit for x in some[i]]) for some in (starts, targets, ps)
        )
        want, ds = papers(start, target, lrs, **options)
        assert_moved_alike(start, ours, want, 1e-11)
        for i in unit:
            assert [x[i] for x in found] == pytest.approx(ds, rel=1e-11)
    assert found[-1][0] > 1e4 * found[0][0] or "growth_rate" in options
    assert (found[-1][0] == found[-1][1]) == share


@pytest.mark.parametrize(("eps", "far"), [(1e-8, 1e-3), (1e-25, 1e-6)])
def test_pytorch_optimizer_steps_alike_but_for_d_at_eps(eps: float, far: float) -> None:
    """The d that it multiplies eps by is the new one, which differs while d grows."""
    import pytorch_optimizer

    starts, targets = problem()
    ps, optimizer = made(share_d=True, eps=eps)
    train(optimizer, ps, targets, LRS["cosine"])
    qs = [[p.clone().requires_grad_() for some in starts for p in some]]
    usual: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.0}
    theirs = pytorch_optimizer.Prodigy(qs[0], lr=1.0, eps=eps, **usual)
    goals = [[x for some in targets for x in some]]
    (*_, (d,)) = train(theirs, qs, goals, LRS["cosine"])
    start = flat([x for some in starts for x in some])
    ours = flat([x for some in ps for x in some])
    assert_moved_alike(start, ours, flat(qs[0]), far)
    assert optimizer.param_groups[0]["d"] == pytest.approx(d, rel=far)


def test_lr_needs_no_tuning_whatever_the_scale() -> None:
    """d finds the size of the steps; at 1e-3 and at 1e3 times the distance too."""
    for scale in (1e-3, 1.0, 1e3):
        start, target = torch.zeros(50, dtype=DOUBLE), torch.randn(50, dtype=DOUBLE) * scale
        p = start.clone().requires_grad_()
        optimizer = Prodigy([p], d0=1e-6 * scale, **EAGER)
        schedule = [math.cos(math.pi / 2 * i / 300) for i in range(300)]
        (*_, (d,)) = train(optimizer, [[p]], [[target]], schedule)
        assert 0.1 * scale < d < 10.0 * scale
        assert (p.detach() - target).abs().max() < 0.1 * scale


def test_a_warmup_raises_d_unless_it_is_safeguarded() -> None:
    _starts, targets = problem()
    lrs = [min(1.0, 0.01 * i) for i in range(60)]
    first: list[float] = []
    for safe in (False, True):
        ps, optimizer = made(safeguard_warmup=safe)
        first.append(train(optimizer, ps, targets, lrs)[-1][0])
    assert first[1] < first[0]


def test_nothing_happens_before_the_first_gradient_that_is_not_0() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = Prodigy([p], **EAGER)
    for _ in range(3):
        p.grad = torch.zeros(3)
        optimizer.step()
    assert p.tolist() == [1.0] * 3 and optimizer.param_groups[0]["d"] == 1e-6
    assert optimizer.state[p]["d_numerator"] == 0
    p.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert optimizer.param_groups[0]["d"] == 1e-6 and all(p < 1.0)


# Parameters that do not step


def test_an_idle_parameter_keeps_its_state_and_its_sum_counts() -> None:
    """Else one step of a bias alone would divide r by the bias's sum."""
    starts, targets = problem()
    (some, _), optimizer = made()
    (a, b), (_goal, other) = some, targets[0]
    train(optimizer, [some], targets, [1.0] * 6)
    entry = {k: x.clone() for k, x in optimizer.state[a].items()}
    s = {p: optimizer.state[p]["s"].clone() for p in some}
    a.grad, b.grad = None, b.detach() - other
    b3 = math.sqrt(0.999)
    d, r = entry["d"].item(), b3 * entry["d_numerator"].item()
    x0 = starts[0][1]
    r += d * d / 1e-6 * (b.grad * (x0 - b.detach())).sum().item()
    norm = s[a].abs().sum() + (b3 * s[b] + d * d / 1e-6 * b.grad).abs().sum()
    before = a.detach().clone()
    optimizer.param_groups[1]["params"][0].grad = None
    optimizer.step()
    now = optimizer.state[a]
    assert torch.equal(a, before) and now["step"] == 6 == optimizer.state[b]["step"] - 1
    for field in ("exp_avg", "exp_avg_sq", "s", "p0"):
        assert torch.equal(now[field], entry[field]), field
    for p in some:
        assert optimizer.state[p]["d_numerator"].item() == pytest.approx(r, rel=1e-12)
        assert optimizer.state[p]["d"].item() == pytest.approx(max(d, r / norm.item()))


def test_a_tree_with_none_gradients_is_the_same() -> None:
    _starts, targets = problem()
    (some, _), optimizer = made()
    tree = [p.detach().clone() for p in some]
    state, value = prodigy_init(tree), prodigy(lr=1.0)
    for i in range(20):
        grads: list[Any] = [p - goal for p, goal in zip(tree, targets[0])]
        if i % 3 == 1:
            grads[i % 2] = None
        for p, g in zip(some, grads):
            p.grad = g
        optimizer.step()
        tree, state = value.step(tree, grads, state)
    for p, q, leaf in zip(some, tree, state.leaves):
        assert_moved_alike(p.detach() + 1.0, p, q, 1e-12)
        assert leaf.d.item() == pytest.approx(optimizer.param_groups[0]["d"], rel=1e-12)


def test_a_later_parameter_begins_with_the_groups_d() -> None:
    starts, targets = problem()
    (some, _others), optimizer = made()
    for p, goal in zip(some[:1], targets[0]):
        for _ in range(12):
            p.grad = p.detach() - goal
            optimizer.step()
    d = optimizer.param_groups[0]["d"]
    assert d > 1e-3 and some[1] not in optimizer.state
    train(optimizer, [some], targets, [1.0])
    assert (some[1].detach() - starts[0][1]).abs().max() > 0.1 * d
    assert optimizer.param_groups[0]["d"] >= d
    added = torch.zeros(3, dtype=DOUBLE, requires_grad=True)
    optimizer.add_param_group({"params": [added]})
    assert optimizer.param_groups[2]["d"] == 1e-6


def test_a_parameter_that_begins_in_an_unfinished_step_has_the_groups_d() -> None:
    """A state that is saved after a backward that failed is that of one group."""
    p, q = (torch.ones(n, requires_grad=True) for n in (3, 4))
    optimizer = Prodigy([p, q], **EAGER)
    for _ in range(12):
        q.grad = q.detach() - 3.0
        optimizer.step()
    batch = [optimi_func.core.rule.WHOLE_BATCH]
    optimizer.update([p], [torch.ones(3)], batch, write=True, count=True)
    for name in ("d", "d_numerator"):
        assert optimizer.state[p][name] == optimizer.state[q][name]
    assert optimizer.state[p]["d"] == optimizer.param_groups[0]["d"] > 1e-3


def test_a_step_without_gradients_is_none() -> None:
    _, targets = problem()
    ps, optimizer = made()
    train(optimizer, ps, targets, [1.0] * 5)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    after = pytree.tree_leaves(optimizer.state_dict())
    for x, y in zip(pytree.tree_leaves(before), after, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


# d in the groups


def test_d_is_shown_saved_and_loaded() -> None:
    _, targets = problem()
    ps, optimizer = made()
    assert [group["d"] for group in optimizer.param_groups] == [1e-6, 1e-6]
    assert "d: 1e-06" in repr(optimizer)
    train(optimizer, ps, targets, [1.0] * 9)
    ds = [group["d"] for group in optimizer.param_groups]
    assert all(type(d) is float and d > 1e-5 for d in ds) and ds[0] != ds[1]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    json.dumps(saved["param_groups"])
    qs, other = made()
    for q, p in zip((q for some in qs for q in some), (p for some in ps for p in some)):
        q.data.copy_(p.detach())
    other.load_state_dict(saved)
    assert [group["d"] for group in other.param_groups] == ds
    twin = copy.deepcopy(other)
    assert [group["d"] for group in twin.param_groups] == ds
    for one, some in ((optimizer, ps), (other, qs)):
        train(one, some, targets, [1.0] * 5)
    assert all(torch.equal(p, q) for a, b in zip(ps, qs) for p, q in zip(a, b))


def test_groups_whose_lists_are_swapped_go_on_with_the_d_that_the_error_names() -> None:
    ps = [torch.full((3,), x, requires_grad=True) for x in (1.0, 2.0)]
    optimizer = Prodigy([{"params": [p]} for p in ps], **EAGER)
    for _ in range(3):
        for i, p in enumerate(ps):
            p.grad = torch.full((3,), 1.0 + i)
        optimizer.step()
    one, two = optimizer.param_groups
    one["params"], two["params"] = two["params"], one["params"]
    before, d = [p.detach().clone() for p in ps], two["d"]
    with pytest.raises(ValueError, match=rf"set the group's d to {d}, or drop"):
        optimizer.step()
    assert all(map(torch.equal, ps, before))
    one["d"], two["d"] = two["d"], one["d"]
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in ps] == [4, 4]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_number_for_d_raises_before_the_first_step_and_if_capturable(
    steps: int, capturable: bool
) -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = Prodigy([p], capturable=capturable, **EAGER)
    p.grad = torch.ones(3)
    for _ in range(steps):
        optimizer.step()
    before, kept = p.detach().clone(), optimizer.param_groups[0]["d"]
    now = 1e-6 if steps == 0 else float(kept)
    optimizer.param_groups[0]["d"] = 0.5
    with pytest.raises(ValueError, match=rf"a group's d=0\.5 is .* go on from {now}: allo"):
        optimizer.step()
    assert torch.equal(p, before)
    optimizer.param_groups[0]["d"] = kept
    optimizer.step()
    assert not torch.equal(p, before)
    optimizer.param_groups[0]["capturable"] = True  # where d is shown as a number
    optimizer.step()


def test_capturable_shows_a_tensor_and_takes_the_same_steps() -> None:
    _, targets = problem()
    runs: list[Any] = []
    for capturable in (False, True):
        ps, optimizer = made(capturable=capturable, foreach=capturable)
        train(optimizer, ps, targets, [1.0] * 12)
        runs.append(
            (flat([p for some in ps for p in some]), optimizer.param_groups[0]["d"])
        )
    (ours, d), (theirs, shown) = runs
    assert isinstance(shown, Tensor) and shown.item() == pytest.approx(d, rel=1e-12)
    assert torch.allclose(ours, theirs, rtol=1e-12)


def test_groups_that_are_joined_go_on_with_the_first_d() -> None:
    """And checkpoints by name, whatever the groups were."""
    starts, targets = problem()
    names = [["a", "b"], ["c"]]
    ps = [[p.clone().requires_grad_() for p in some] for some in starts]
    groups = [{"params": list(zip(*pair))} for pair in zip(names, ps)]
    optimizer = Prodigy(groups, **EAGER)
    train(optimizer, ps, targets, [1.0] * 12)
    saved, top = optimizer.state_dict(), optimizer.param_groups[1]["d"]
    together = [*zip(names[1], ps[1]), *zip(names[0], ps[0])]
    other = Prodigy(together, **EAGER)
    other.load_state_dict(saved)
    assert other.param_groups[0]["d"] == top
    assert other.state[ps[0][0]]["s"].equal(optimizer.state[ps[0][0]]["s"])
    train(other, [ps[1] + ps[0]], [[*targets[1], *targets[0]]], [1.0])
    kept = {other.state[p]["d"].item() for some in ps for p in some}
    assert kept == {other.param_groups[0]["d"]} and min(kept) >= top


# Options and refusals


OPTIONS = {
    "d0=0.0": r"Invalid first d: d0=0\.0",
    "d_coef=0.0": "Invalid factor on d: d_coef",
    "growth_rate=0.9": "Invalid growth of d: growth_rate",
    "betas=(0.9,)": "Invalid betas",
    "safeguard_warmup='no'": "TypeError: safeguard_warmup='no'",
    "cautious=True": "prodigy does not go with the hook cautious.* sums over",
}
REFUSED = {
    f"{make}{options})": text
    for make in ("Prodigy([p], ", "prodigy(lr=1.0, ")
    for options, text in OPTIONS.items()
} | {
    "Prodigy([p], share_d='no')": "TypeError: share_d='no': allowed are True and",
    "Prodigy([p], share_d=None)": "TypeError: share_d=None: allowed are True and",
    "optimizer.add_param_group({'params': [p.detach().clone()], 'share_d': 'no'})": (
        "TypeError: share_d='no': allowed are True and False"
    ),
    "Prodigy([{'params': [p], 'd': 0.5}])": r"a group with d=0\.5: it is",
    "released.step(param=net[0].weight)": (
        r"step\(param=...\): \['0.weight'\] follows prodi"
    ),
    "released.optimizer_accumulation = True; "
    "released.update([net[0].weight], [net[0].weight], [WHOLE_BATCH], False, False)": (
        "prodigy sums over parameters after each move"
    ),
    "grouped(net, True).functional()": "of 2 groups with share_d=False.*Mixed",
}


@refuses(REFUSED)
def test_refusals() -> Scene:
    p, net = torch.ones(3, requires_grad=True), network()
    optimizer, released = Prodigy([p], **EAGER), grouped(net, False, gradient_release=True)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    return locals() | {"WHOLE_BATCH": optimi_func.core.rule.WHOLE_BATCH}


def test_unequal_lrs_are_warned_of_if_d_is_shared() -> None:
    a, b, c = (torch.ones(3, requires_grad=True) for _ in range(3))
    groups = [{"params": [a]}, {"params": [b], "lr": 0.5}, {"params": [c], "lr": 0.0}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Prodigy(copy.deepcopy(groups), **EAGER)
        Prodigy(copy.deepcopy(groups[::2]), share_d=True, **EAGER)
    with pytest.warns(UserWarning, match=r"share_d=True with lrs \[0\.5, 1\.0\]"):
        Prodigy(groups, share_d=True, **EAGER)


def test_fully_decoupled_decay_is_multiplied_by_d_and_not_warned_of() -> None:
    p = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Prodigy([p], weight_decay=0.1, decouple_lr=True, **EAGER)
        prodigy(lr=1.0, weight_decay=0.1, decouple_lr=True).init(p)


def test_a_group_with_lr_0_has_no_part_in_a_shared_d() -> None:
    _, targets = problem()
    for safe in (False, True):
        ps, optimizer = made(share_d=True, safeguard_warmup=safe)
        qs, alone = made(safeguard_warmup=safe)
        for _ in range(9):
            for one, some in ((optimizer, ps), (alone, qs)):
                for p, goal in zip(some[0], targets[0]):
                    p.grad = p.detach() - goal
                some[1][0].grad = torch.ones_like(some[1][0])
                one.param_groups[1]["lr"] = 0.0
                one.step()
        ds = [one.param_groups[0]["d"] for one in (optimizer, alone)]
        assert ds[0] == pytest.approx(ds[1], rel=1e-12)


# Gradient release


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 90), nn.Tanh(), nn.Linear(90, 2)
    return nn.Sequential(*layers).to(dtype)


X, Y = torch.randn(32, 6), torch.randn(32, 2)


def loss_of(model: nn.Module, part: slice = slice(None)) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(X[part].to(dtype)).float() - Y[part]).square().mean()


def grouped(model: nn.Module, two: bool, **options: Any) -> Prodigy:
    named = list(model.named_parameters())
    groups = [{"params": named[:3]}, {"params": named[3:]}] if two else named
    return Prodigy(groups, **{**EAGER, **options})


@pytest.mark.parametrize("two", [False, True], ids=["one", "groups"])
@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_release_is_step_bit_for_bit(
    two: bool, share: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimi_func.gradient_release.runner.PENDING_BYTES", 1000)
    models = [network(dtype) for _ in range(2)]
    plain, released = (
        grouped(m, two, share_d=share, gradient_release=i)
        for m, i in zip(models, (False, True))
    )
    handle = prepare_for_gradient_release(models[1], released)
    for _ in range(12):
        loss_of(models[0]).backward()
        plain.step()
        plain.zero_grad()
        loss_of(models[1]).backward()
        released.step()
    assert [g["d"] for g in plain.param_groups] == [g["d"] for g in released.param_groups]
    assert plain.param_groups[0]["d"] > 1e-4
    assert_same(plain, released, *models)
    handle.remove()


def assert_same(plain: Any, released: Any, one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters()):
        assert torch.equal(p, q)
        ours, theirs = plain.state[p], released.state[q]
        assert ours.keys() == theirs.keys()
        for field, x in ours.items():
            assert torch.equal(x, theirs[field]), field


def test_clipping_is_exact_in_two_passes() -> None:
    models = [network() for _ in range(2)]
    plain = grouped(models[0], True)
    released = grouped(models[1], True, gradient_release=True)
    handle = prepare_for_gradient_release(models[1], released, clip_global_norm=0.1)
    for _ in range(8):
        loss_of(models[0]).backward()
        nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        handle.backward(lambda: loss_of(models[1]))
        released.step()
    for ours, theirs in zip(plain.param_groups, released.param_groups):
        assert ours["d"] == pytest.approx(theirs["d"], rel=1e-4)


@pytest.mark.full
def test_a_value_under_release_is_its_step() -> None:
    models = [network() for _ in range(2)]
    handle = prepare_for_gradient_release(models[0], prodigy(lr=1.0))
    tree = {k: p.detach().clone() for k, p in models[1].named_parameters()}
    state = prodigy_init(tree)
    for _ in range(12):
        loss_of(models[0]).backward()

        def loss(p: Any) -> Tensor:
            return (functional_call(models[1], p, (X,)) - Y).square().mean()

        tree, state = prodigy_step(tree, grad(loss)(tree), state, lr=1.0)
    for name, p in models[0].named_parameters():
        assert torch.allclose(p, tree[name], rtol=1e-4, atol=1e-6)
        d = handle.state.leaves[name].d
        assert d.item() == pytest.approx(state.leaves[name].d.item(), rel=1e-4)


def test_a_skipped_step_adds_nothing() -> None:
    model = network()
    optimizer = grouped(model, False, gradient_release=True)
    prepare_for_gradient_release(model, optimizer, skip_nonfinite=True)
    for _ in range(6):
        loss_of(model).backward()
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    (loss_of(model) * math.inf).backward()
    optimizer.step()
    after = pytree.tree_leaves(optimizer.state_dict())
    for x, y in zip(pytree.tree_leaves(before), after, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y
    loss_of(model).backward()
    assert optimizer.state[model[0].weight]["step"] == 7


def test_flags_on_the_device_add_nothing_either() -> None:
    """A flag that the host does not read: part of the parameters, and then all."""
    p, q = (torch.ones(n, requires_grad=True) for n in (3, 4))
    optimizer = Prodigy([p, q], capturable=True, **EAGER)
    for _ in range(4):
        p.grad, q.grad = torch.ones(3), torch.ones(4)
        optimizer.step()
    yes, no = torch.tensor(True), torch.tensor(False)
    kept = {k: x.clone() for k, x in optimizer.state[q].items()}
    bad = torch.full((4,), math.nan)
    whole = optimi_func.core.rule.WHOLE_BATCH
    for flags, moved in (((no, no), False), ((yes, no), True)):
        batches = [whole._replace(finite=flag) for flag in flags]
        before = optimizer.param_groups[0]["d"].item(), optimizer.state[p]["step"].item()
        given = [p, q], [torch.ones(3), bad], batches
        optimizer.finish_step(optimizer.update(*given, write=True, count=True))
        for field in ("exp_avg", "s", "p0", "step"):
            assert torch.equal(optimizer.state[q][field], kept[field])
        after = optimizer.param_groups[0]["d"].item(), optimizer.state[p]["step"].item()
        assert math.isfinite(after[0]) and (after[1] > before[1]) == moved
        r = optimizer.state[p]["d_numerator"]
        assert torch.equal(r, kept["d_numerator"]) != moved


def test_a_backward_that_fails_leaves_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimi_func.gradient_release.runner.PENDING_BYTES", 0)
    model = network()
    optimizer = grouped(model, False, gradient_release=True)
    prepare_for_gradient_release(model, optimizer)
    loss_of(model).backward()
    optimizer.step()

    def fail(g: Tensor) -> None:
        raise RuntimeError("on purpose")

    hook = model[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model).backward()
    hook.remove()
    with pytest.warns(UserWarning, match="did not finish"):
        loss_of(model).backward()
    optimizer.step()
    assert math.isfinite(optimizer.param_groups[0]["d"])


# Storage


@pytest.mark.parametrize("storage", [None, "compact", "exact"])
def test_the_start_is_exact_in_the_parameters_dtype(storage: Any) -> None:
    p = torch.randn(128, 64).to(BF16).requires_grad_()
    start = p.detach().clone()
    optimizer = Prodigy([p], storage=storage, **EAGER)
    for _ in range(9):
        p.grad = torch.randn(128, 64).to(BF16)
        optimizer.step()
    entry = optimizer.state[p]
    assert entry["p0"].dtype == BF16 and torch.equal(entry["p0"], start)
    assert entry["s"].dtype == torch.float32
    assert entry.get("exp_avg_sq", torch.ones(1)).dtype == torch.float32


@pytest.mark.parametrize("storage", [None, optimi_func.Storage(None, "8bit")], ids=str)
def test_float16_follows_float32(storage: Any) -> None:
    """In float16 the first moment of d * g would be 0, and d grow less."""
    target, found = torch.randn(16, 8, dtype=DOUBLE), list[Any]()
    large = torch.zeros(128, 64, requires_grad=True)  # which 8 bits are for
    for dtype in (torch.float32, torch.float16):
        p = torch.zeros(16, 8, dtype=dtype, requires_grad=True)
        optimizer = Prodigy([p, large], storage=storage, **EAGER)
        for _ in range(12):
            p.grad = ((p.detach() - target) * 1e-3).to(dtype)
            optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        found.append(optimizer.param_groups[0]["d"])
    assert found[0] > 1e-4 and found[1] == pytest.approx(found[0], rel=0.05)


@pytest.mark.parametrize("begun", [False, True])
def test_weights_loaded_before_the_first_step_are_the_start(begun: bool) -> None:
    """Also Ranger's slow weights, which would pull the parameter back to others."""
    for cls, field in ((Prodigy, "p0"), (optimi_func.Ranger, "slow_param")):
        model = nn.Linear(64, 8).to(BF16)
        optimizer = cls(model.named_parameters(), lr=1.0, **EAGER)
        if begun:
            optimizer.init_state()
        new = {k: torch.randn(p.shape) for k, p in model.named_parameters()}
        optimizer.load_master_state_dict(model, new)
        for name, p in model.named_parameters():
            kept = optimizer.state[p][field]
            assert torch.equal(p.detach(), new[name].to(BF16))
            assert torch.equal(kept, p.detach().to(kept.dtype))


# Other forms


def test_parts_of_mixed_and_partition_are_groups() -> None:
    model = network(DOUBLE)
    parts = ("0.*", prodigy(lr=1.0)), ("2.*", prodigy(lr=1.0, d_coef=0.5))
    optimizer = Mixed(model.named_parameters(), *parts, rest=sgd(lr=0.1), **EAGER)
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    value, state = optimizer.functional()
    names = [group.get("d") for group in optimizer.param_groups]
    assert names == [1e-6, 1e-6, None]

    def loss(p: Any) -> Tensor:
        return (functional_call(model, p, (X.double(),)) - Y).square().mean()

    for _ in range(9):
        optimizer.zero_grad()
        (model(X.double()) - Y).square().mean().backward()
        optimizer.step()
        params, state = value.step(params, grad(loss)(params), state)
    ds = [group["d"] for group in optimizer.param_groups[:2]]
    assert ds[0] != ds[1] and min(ds) > 1e-6
    pure = [state.parts[i].leaves[f"{2 * i}.bias"].d.item() for i in range(2)]
    assert pure == pytest.approx(ds, rel=1e-9)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["d"] for group in optimizer.param_groups[:2]] == ds


def test_derivatives_by_hyperparameters_are_those_of_differences() -> None:
    """Through max, where an estimate is the largest so far, and through d at the start."""
    target = torch.randn(6, dtype=DOUBLE)

    def end(d_coef: Tensor, growth: Tensor) -> Tensor:
        hyper = {"lr": 1.0, "d_coef": d_coef, "growth_rate": growth, "d0": 1e-3}
        start = torch.zeros(6, dtype=DOUBLE)
        run = unroll(
            prodigy,
            lambda p, _: (p - target).square().sum(),
            start,
            None,
            [0] * 7,
            hyper=hyper,
        )
        return run.losses[-1]

    one = torch.tensor(1.0, dtype=DOUBLE)
    for growth in (math.inf, 1.5):
        limit = torch.tensor(growth, dtype=DOUBLE)
        first, second = grad(end, argnums=(0, 1))(one, limit)
        h = 1e-6
        slope = (end(one + h, limit) - end(one - h, limit)) / (2 * h)
        assert first.item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-9)
        assert second.isfinite() and (second != 0) == (growth < 2)


def test_the_sums_of_shards_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is none if nothing is sharded; the rest is shown by processes."""
    called: list[Any] = []
    monkeypatch.setattr(distributed.distributed, "all_reduce", called.append)
    _, targets = problem()
    ps, optimizer = made(share_d=False)
    train(optimizer, ps, targets, [1.0] * 3)
    assert not called


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_kernels_measure_and_move(dtype: torch.dtype) -> None:
    models = [network(dtype) for _ in range(3)]
    runs = [
        grouped(models[0], True),
        grouped(models[1], True, compile=True),
        grouped(models[2], True, compile=True, gradient_release=True),
    ]
    prepare_for_gradient_release(models[2], runs[2])
    for _ in range(10):
        for model, optimizer in zip(models, runs):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    eager, compiled, _ = ([g["d"] for g in x.param_groups] for x in runs)
    assert compiled == pytest.approx(eager, rel=1e-4 if dtype == torch.float32 else 1e-2)
    assert_same(runs[1], runs[2], *models[1:])


def test_groups_that_exchange_all_their_parameters_begin_anew_as_the_error_says() -> None:
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    optimizer = Prodigy([{"params": [p]} for p in params], **EAGER)
    for scale in (1.0, 2.0, 3.0):
        for p, share in zip(params, (5.0, 1.0)):
            p.grad = torch.full_like(p, scale * share)
        optimizer.step()
    groups = optimizer.param_groups
    assert groups[0]["d"] != groups[1]["d"]
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    with pytest.raises(ValueError, match=r"drop their state by .*pop\(p\) and call reset"):
        optimizer.step()
    for p in params:
        optimizer.state.pop(p)
    optimizer.reset()
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 1 for p in params)
