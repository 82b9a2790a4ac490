"""Where Schedule-Free steps and where it is evaluated: modes, checkpoints, numbers."""

import copy
import io
import pickle
from typing import Any

import pytest
import reference
import torch
from cases import CLASSES, LR, SCHEDULE_FREE, assert_moved_alike, problem, schedule
from refusals import Scene, refused, refuses
from released import Net, batch, make, train
from torch import Tensor, nn

import optimi_func
from optimi_func import (
    EMA,
    AdamW,
    Mixed,
    MuonAdamW,
    ScheduleFreeAdamW,
    ScheduleFreeSGD,
    Storage,
    prepare_for_gradient_release,
    schedule_free_adamw,
    sgd,
)
from optimi_func.compiled import train_step
from optimi_func.core.rule import Microbatch

BF16 = torch.bfloat16
KEPT: list[tuple[torch.dtype, Any]] = [
    (torch.float64, None),
    (torch.float32, None),
    (BF16, None),
    (BF16, Storage("plain")),
    (BF16, "compact"),
    (BF16, "exact"),
]


def bits(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(map(torch.equal, one, two))


def begun(cls: Any = ScheduleFreeAdamW, steps: int = 5, **options: Any) -> Any:
    dtype = options.pop("dtype", torch.float32)
    model, optimizer = make(cls, dtype, options.pop("release", False), **options)
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_values_are_evaluated_where_classes_are(name: str) -> None:
    p, grads = problem()
    w = nn.Parameter(p.clone())
    optimizer: Any = CLASSES[name]([w], lr=LR, r=0.5, compile=False)
    pure = getattr(optimi_func, name)
    q, state = p, pure(lr=LR, r=0.5).init(p)
    for i, (g, lr) in enumerate(zip(grads, schedule())):
        optimizer.param_groups[0]["lr"] = lr
        w.grad = g.clone()
        optimizer.step()
        value = pure(lr=lr, r=0.5)
        q, state = value.step(q, g, state)
        if i > 4:  # RAdam's first four move nothing
            optimizer.eval()
            # Which is schedulefree's: test_formulas.py.
            assert_moved_alike(p, value.eval_params(q, state), w.detach(), 1e-11)
            optimizer.train()


@pytest.mark.parametrize("cls", [CLASSES[name] for name in SCHEDULE_FREE])
@pytest.mark.parametrize(("dtype", "storage"), KEPT, ids=str)
def test_modes_change_no_bit_of_a_run(cls: Any, dtype: torch.dtype, storage: Any) -> None:
    options = {"dtype": dtype, "storage": storage}
    model, _ = begun(cls, 12, **options)
    twin, other = begun(cls, 0, **options)
    other.eval()  # before any state
    other.train()
    for i in range(12):
        train(twin, other, 1, start=i)
        trained = bits(twin)
        for _ in range(2):
            other.eval()
            shown = bits(twin)
            other.eval()
            assert same(bits(twin), shown)
            assert i < 5 or not same(shown, trained)
            other.train()
            other.train()
            assert same(bits(twin), trained)
            # The copy is there in eval mode alone.
            assert all("train_param" not in state for state in other.state.values())
    assert same(bits(model), bits(twin))


EVAL = {
    **{
        call: r"RuntimeError: in eval mode.*train\(\) first"
        for call in (
            "optimizer.step()",
            "optimizer.step(lambda: 1 / 0)",
            "optimizer.step(param=p)",
            "optimizer.update([p], [p.grad], [Microbatch(1.0, False, None)], True, True)",
        )
    },
    "optimizer.functional()": r"RuntimeError: functional\(\) in eval mode",
    "optimizer.load_functional(None, {})": r"RuntimeError: functional\(\) in eval mode",
    "optimizer.load_master_state_dict(model, optimizer.master_state_dict(model))": (
        r"RuntimeError: load_master_state_dict\(\) in eval mode"
    ),
    "step(batch(0))": "RuntimeError: a step in eval mode",
    "model(batch(9)).sum().backward()": "RuntimeError: a backward in eval mode",
    "average.update()": r"RuntimeError: EMA.update\(\) in eval mode",
    "average.applied().__enter__()": r"RuntimeError: EMA.applied\(\) in eval mode",
    # Of a file that lacks what the parameters go on from, or has another shape of it.
    "del saved['state'][0]['train_param']; optimizer.load_state_dict(saved); "
    "optimizer.train()": r"RuntimeError: state\[0\] has no 'train_param'",
    "saved['state'][0]['train_param'] = torch.ones(1); optimizer.load_state_dict(saved)": (
        r"\[0\]\['train_param'\] has shape \(1,\): .* of shape \(128, 16\)"
    ),
    "saved['state'][0]['train_param'] = 1.0; optimizer.load_state_dict(saved)": (
        r"TypeError: \[0\]\['train_param'\]=1.0: allowed is a tensor"
    ),
    "del saved['state'][0]['weight_sum']; optimizer.load_state_dict(saved)": "weight_sum",
}


@pytest.mark.kernels
@refuses(EVAL)
def test_what_is_refused_in_eval_mode() -> Scene:
    model, optimizer = begun(release=True, steps=0)
    with prepare_for_gradient_release(model, optimizer):
        train(model, optimizer, 5)
    average, p = EMA(optimizer, 0.5), next(model.parameters())
    model(batch(9)).square().mean().backward()
    handle = prepare_for_gradient_release(model, optimizer)
    optimizer.eval()
    saved = copy.deepcopy(optimizer.state_dict())
    whole, owner = begun(compile=None)
    owner.eval()
    step = train_step(whole, lambda y, x: y.square().mean(), owner)
    return locals() | {"Microbatch": Microbatch}


def test_a_release_takes_no_backward_in_eval_mode() -> None:
    for options in ({}, {"accumulation": "buffer", "accumulation_steps": 2}):
        model, optimizer = begun(release=True, steps=0)
        handle = prepare_for_gradient_release(model, optimizer, **options)
        train(model, optimizer, 4)
        optimizer.eval()
        before = bits(model)
        with pytest.raises(RuntimeError, match="a backward in eval mode"):
            model(batch(9)).square().mean().backward()
        assert same(before, bits(model))
        assert not handle.accumulating
        optimizer.train()
        train(model, optimizer, 2, start=4)
        twin, other = begun(release=True, steps=0)
        prepare_for_gradient_release(twin, other, **options)
        train(twin, other, 6)
        assert same(bits(model), bits(twin))


def test_the_state_alone_takes_no_gradient() -> None:
    model, optimizer = begun(release=True)
    optimizer.optimizer_accumulation = True
    model(batch(9)).square().mean().backward()
    p = next(model.parameters())
    text = "accumulation=True: schedule_free_adamw"
    refused(lambda: optimizer.step(param=p), ValueError, text, [model, optimizer])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("into", ["train", "eval"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_checkpoint_of_either_mode_goes_on_in_either(
    mode: str, into: str, dtype: torch.dtype, named: bool
) -> None:
    def fresh() -> Any:
        model = Net().to(dtype)
        params = model.named_parameters() if named else model.parameters()
        return model, ScheduleFreeAdamW(params, lr=0.01, warmup_steps=8, compile=False)

    model, optimizer = fresh()
    train(model, optimizer, 5)
    trained = bits(model)
    getattr(optimizer, mode)()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    shown = bits(model)
    optimizer.train()
    train(model, optimizer, 5, start=5)
    twin, other = fresh()
    train(twin, other, 2)
    getattr(other, into)()
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(state)
    twin.load_state_dict(weights)
    assert same(bits(twin), shown)
    assert other.param_groups[0]["train_mode"] == (mode == "train")
    other.eval()
    assert same(bits(twin), bits(twin))
    other.train()
    assert same(bits(twin), trained)
    train(twin, other, 5, start=5)
    assert same(bits(twin), bits(model))


@pytest.mark.parametrize("pickled", [False, True])
def test_copies_of_an_optimizer_in_eval_mode_go_on(pickled: bool) -> None:
    model, optimizer = begun()
    trained = bits(model)
    optimizer.eval()
    pair = (model, optimizer)
    twin, other = pickle.loads(pickle.dumps(pair)) if pickled else copy.deepcopy(pair)
    other.train()
    assert same(bits(twin), trained) and not same(bits(model), trained)
    optimizer.train()
    train(model, optimizer, 3, start=5)
    train(twin, other, 3, start=5)
    assert same(bits(twin), bits(model))


@pytest.mark.parametrize("back", ["before train", "after train", "never"])
def test_one_that_leaves_its_group_in_eval_mode_is_restored_by_train(back: str) -> None:
    model, optimizer = begun()
    twin, other = begun()
    for each in (optimizer, other):
        each.eval()
    params = optimizer.param_groups[0]["params"]
    first = params.pop(0)
    if back == "before train":
        params.insert(0, first)
    optimizer.train()
    other.train()
    assert same(bits(twin), bits(model))
    assert "train_param" not in optimizer.state[first]
    if back == "never":
        return
    if back == "after train":
        params.insert(0, first)
    train(model, optimizer, 3, start=5)
    train(twin, other, 3, start=5)
    assert same(bits(twin), bits(model))


def test_one_that_eval_has_not_set_joins_a_group_after_train() -> None:
    model, optimizer = begun()
    params = optimizer.param_groups[0]["params"]
    first = params.pop(0)
    trained = bits(model)
    optimizer.eval()
    params.insert(0, first)
    with pytest.raises(RuntimeError, match="take it out, call train"):
        optimizer.train()
    params.pop(0)
    optimizer.train()
    assert same(trained, bits(model))


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize(("old", "new"), [("exact", None), (None, "exact")], ids=str)
def test_eval_mode_loads_into_another_storage(old: Any, new: Any, decoded: bool) -> None:
    """What is kept beside the trained parameter is not what the average lacks."""
    model, optimizer = begun(dtype=BF16, storage=old)
    found: list[dict[str, Tensor]] = []
    for mode in (optimizer.train, optimizer.eval):
        mode()
        twin, other = begun(steps=0, dtype=BF16, storage=new)
        twin.load_state_dict(model.state_dict())
        saved = optimizer.decoded_state_dict() if decoded else optimizer.state_dict()
        other.load_state_dict(saved)
        other.train()
        found.append(other.master_state_dict(twin))
    assert same(list(found[0].values()), list(found[1].values()))


def test_state_made_in_eval_mode_is_as_if_made_before() -> None:
    model, optimizer = begun(steps=0)
    fresh = bits(model)
    optimizer.eval()
    optimizer.init_state()
    assert all("train_param" in state for state in optimizer.state.values())
    optimizer.train()
    assert same(bits(model), fresh)
    train(model, optimizer, 2)
    assert same(bits(model), bits(begun(steps=2)[0]))


def test_new_parameters_are_in_the_mode_of_the_others() -> None:
    _, optimizer = begun()
    optimizer.eval()
    w = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [w], "lr": 0.5})
    w.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="in eval mode"):
        optimizer.step()
    optimizer.train()
    optimizer.step()
    moved = w.detach().clone()
    optimizer.eval()
    optimizer.train()
    assert w.equal(moved) and not w.equal(torch.ones(3))


def test_loaded_by_name_new_parameters_take_the_files_mode() -> None:
    torch.manual_seed(0)
    small, large = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = ScheduleFreeAdamW(small.named_parameters("0"), lr=0.1, compile=False)
    small(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    other = ScheduleFreeAdamW(large[1].named_parameters("1"), lr=0.1, compile=False)
    other.add_param_group({"params": list(large[0].named_parameters("0"))})
    for mode in (optimizer.eval, optimizer.train):
        mode()
        report = other.load_state_dict(optimizer.state_dict(), strict=False)
        assert report.missing == ["1.weight", "1.bias"]
        modes = [group["train_mode"] for group in other.param_groups]
        assert modes == [optimizer.param_groups[0]["train_mode"]] * 2


def test_mixed_switches_its_parts_that_average() -> None:
    model = Net()
    part = ("*.bias", schedule_free_adamw(lr=0.05))
    optimizer = Mixed(model.named_parameters(), part, rest=sgd(lr=0.05), compile=False)
    train(model, optimizer, 5)
    trained = bits(model)
    optimizer.eval()
    for (name, p), old in zip(model.named_parameters(), trained):
        assert torch.equal(p, old) == (not name.endswith("bias"))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(RuntimeError, match="in eval mode"):
        optimizer.step()
    optimizer.train()
    assert same(bits(model), trained)
    twin = Net()
    other = Mixed(twin.named_parameters(), part, rest=sgd(lr=0.05), compile=False)
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    other.train()
    assert same(bits(twin), trained)
    tree, state = other.functional()
    shown = tree.eval_params({n: p.detach() for n, p in twin.named_parameters()}, state)
    other.eval()
    assert same(list(shown.values()), bits(twin))


def test_others_have_nothing_to_switch() -> None:
    """Trainers ask whether there are the methods; a Mixed may have idle ones."""
    model, optimizer = begun(AdamW)
    assert not hasattr(optimizer, "eval") and not hasattr(optimizer, "train")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    both: Any = MuonAdamW(model, lr=0.1, compile=False)
    before = bits(model)
    both.eval()
    model(torch.ones(1, 3)).sum().backward()
    both.step()
    both.train()
    assert not same(bits(model), before)


@pytest.mark.parametrize("storage", [None, "exact", "compact"])
def test_master_weights_of_either_mode(storage: Any) -> None:
    model, optimizer = begun(dtype=BF16, steps=30, storage=storage)
    names = dict(model.named_parameters())
    train_weights = optimizer.master_state_dict(model)
    z = {name: optimizer.state[p]["z"].clone() for name, p in names.items()}
    optimizer.eval()
    found = optimizer.master_state_dict(model)
    for name, p in names.items():
        want = (train_weights[name] - 0.1 * z[name]) / 0.9
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-6)
        assert torch.equal(p, found[name].to(BF16))


# Running numbers


def test_a_skipped_step_advances_nothing() -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = ScheduleFreeAdamW([w], lr=0.1, warmup_steps=4, compile=False)
    taken = nn.Parameter(torch.ones(4))
    other = ScheduleFreeAdamW([taken], lr=0.1, warmup_steps=4, compile=False)
    for i, good in enumerate([True, False, True, True, False, True]):
        g = torch.full((4,), 1.0 + i)
        flag = Microbatch(1.0, False, torch.tensor(good))
        optimizer.update([w], [g], [flag], True, True)
        if good:
            other.update([taken], [g], [Microbatch(1.0, False, None)], True, True)
    state, want = optimizer.state[w], other.state[taken]
    assert state["step"] == 4
    for name, x in want.items():
        torch.testing.assert_close(state[name], x, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(w, taken)


@pytest.mark.parametrize("capturable", [False, True])
def test_each_parameter_has_its_own_numbers(capturable: bool) -> None:
    """Those that begin later average what they have been through."""
    p, grads = problem(steps=8)
    ws = [nn.Parameter(p.clone()) for _ in range(3)]
    options = {"warmup_steps": 3, "capturable": capturable, "compile": False}
    optimizer: Any = ScheduleFreeSGD([{"params": ws[:2]}, {"params": ws[2:]}], **options)
    for i, g in enumerate(grads):
        optimizer.param_groups[0]["lr"] = LR
        optimizer.param_groups[1]["lr"] = LR * (1 + i)
        for j, w in enumerate(ws):
            w.grad = g.clone() if i >= 3 * (j == 1) else None
        optimizer.step()
    lrs = [LR] * 8, [LR] * 5, [LR * (1 + i) for i in range(8)]
    for w, given, rates in zip(ws, (grads, grads[3:], grads), lrs):
        want = reference.schedule_free_sgd(p, given, lr=rates, warmup_steps=3)
        assert_moved_alike(p, w.detach(), want[-1], 1e-12)
        state, ramp = optimizer.state[w], [1 / 3, 2 / 3, *[1.0] * 6]
        tops = [
            max(a * b for a, b in zip(rates[:n], ramp)) for n in range(1, len(given) + 1)
        ]
        assert state["lr_max"].dtype == state["weight_sum"].dtype == torch.float64
        assert state["lr_max"].item() == pytest.approx(tops[-1], rel=1e-12)
        total = sum(top**2 for top in tops)
        assert state["weight_sum"].item() == pytest.approx(total, rel=1e-12)


def few() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, [torch.randn(5, 3) for _ in range(7)]


def mean_square(y: Tensor, x: Any = None) -> Tensor:
    return y.square().mean()


@pytest.mark.full
def test_every_way_to_step_advances_the_numbers() -> None:
    """Compiled, as one graph, by release, of a class and of a tree: as the eager class."""
    numbers = {"lr": 0.05, "warmup_steps": 4}
    straight, data = few()
    optimizer = ScheduleFreeAdamW(straight.parameters(), **numbers, compile=False)
    start = torch.cat([x.flatten() for x in bits(straight)])
    for x in data:
        mean_square(straight(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = torch.cat([x.flatten() for x in bits(straight)])
    state = optimizer.state[straight[0].weight]

    def check(params: Any, weight_sum: Tensor, lr_max: Tensor) -> None:
        got = torch.cat([x.detach().flatten() for x in params])
        assert_moved_alike(start, got, want, 1e-5)
        assert weight_sum.item() == pytest.approx(state["weight_sum"].item(), rel=1e-12)
        assert lr_max.item() == pytest.approx(0.05, rel=1e-12)

    def check_class(model: Any, optimizer: Any) -> None:
        entry = optimizer.state[model[0].weight]
        check(model.parameters(), entry["weight_sum"], entry["lr_max"])

    for way in ({"compile": True}, {"foreach": True}, {"capturable": True}):
        model, _ = few()
        other = ScheduleFreeAdamW(model.parameters(), **numbers, **way)
        for x in data:
            mean_square(model(x)).backward()
            other.step()
            other.zero_grad()
        check_class(model, other)
    model, _ = few()
    other = ScheduleFreeAdamW(model.parameters(), **numbers)
    step = train_step(model, mean_square, other)
    for x in data:
        step(x)
    check_class(model, other)
    pure = schedule_free_adamw(**numbers)
    model, _ = few()
    pure_step = train_step(model, mean_square, pure)
    tree = pure_step.init()
    for x in data:
        tree, _ = pure_step(tree, x)
    leaf = tree.optimizer.leaves["0.weight"]
    check(tree.params.values(), leaf.weight_sum, leaf.lr_max)
    model, _ = few()
    handle = prepare_for_gradient_release(model, pure)
    for x in data:
        mean_square(model(x)).backward()
    leaf = handle.state.leaves["0.weight"]
    check(model.parameters(), leaf.weight_sum, leaf.lr_max)
    shown = pure.eval_params(dict(model.named_parameters()), handle.state)
    optimizer.eval()
    for x, p in zip(shown.values(), straight.parameters()):
        torch.testing.assert_close(x, p)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "way", [{"compile": False}, {"compile": True}, {"capturable": True}]
)
def test_numbers_that_somebody_sets_count(way: dict[str, Any]) -> None:
    """Written to or replaced between two steps, with a plan that knew others."""
    for replaced in (False, True):
        w = nn.Parameter(torch.ones(5))
        optimizer = ScheduleFreeAdamW([w], lr=0.05, **way)
        for i in range(6):
            w.grad = torch.full((5,), 1.0 + i)
            optimizer.step()
            if i == 3:
                state = optimizer.state[w]
                if replaced:
                    state["weight_sum"] = torch.full_like(state["weight_sum"], 1.0)
                else:
                    state["weight_sum"].fill_(1.0)
        want = 1.0 + 2 * 0.05**2
        assert optimizer.state[w]["weight_sum"].item() == pytest.approx(want, rel=1e-12)


def test_z_begins_where_the_parameter_is_at_the_first_step() -> None:
    """Not where it was as its state was made: weights may be loaded in between."""
    model, optimizer = begun(steps=0)
    twin, other = begun(steps=0)
    weights = {k: x + 1.0 for k, x in model.state_dict().items()}
    optimizer.init_state()
    model.load_state_dict(weights)
    twin.load_state_dict(weights)
    for pair in ((model, optimizer), (twin, other)):
        train(*pair, 3)
    assert same(bits(model), bits(twin))


@pytest.mark.parametrize("capturable", [False, True])
def test_a_schedule_that_cycles_momentum_leaves_the_average_exact(capturable: bool) -> None:
    """OneCycleLR does so unless told otherwise."""
    torch.manual_seed(0)
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    z = x = w.detach().clone()
    optimizer = optimi_func.ScheduleFreeSGD(
        [w], lr=0.1, compile=False, capturable=capturable
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
    seen, total, top = set(), 0.0, 0.0
    for _ in range(30):
        group = optimizer.param_groups[0]
        lr, b = float(group["lr"]), float(group["momentum"])
        seen.add(b)
        w.grad = torch.cos(3 * w.detach())
        top = max(top, lr)
        total += top**2
        z = z - lr * w.grad
        x = x + top**2 / total * (z - x)
        optimizer.step()
        assert torch.allclose(w, (1 - b) * z + b * x, rtol=0, atol=1e-12)
        schedule.step()
    optimizer.eval()
    assert torch.allclose(w, x, rtol=0, atol=1e-12)
    assert len(seen) > 10
