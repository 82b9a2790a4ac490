"""`skip_nonfinite="step"`: whole steps without gradients that are not finite."""

import copy
import math
from contextlib import nullcontext
from typing import Any

import one_process
import pytest
import replicas
import shards
import torch
import torch.distributed as dist
from layers import loss_of, net
from refusals import Scene, refuses
from released import assert_same
from torch import Tensor, nn
from worlds import counted, world

from optimi_func import (
    SGD,
    AdamW,
    Muon,
    MuonAdamW,
    Prodigy,
    ScheduleFreeAdamW,
    StableAdamW,
    adamw,
    prepare_for_gradient_release,
)
from optimi_func.compiled import train_step

EAGER: dict[str, Any] = {"compile": False}
SKIP: dict[str, Any] = {"skip_nonfinite": "step"}


def poison(model: Any, value: float) -> None:
    """Change one element of the next gradient of one parameter."""

    def spoil(g: Tensor) -> Tensor:
        handle.remove()
        return g.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value).to(g))

    handle = model[2].weight.register_hook(spoil)


CLASSES: dict[str, Any] = {
    "AdamW": AdamW,
    "SGD": lambda params, **o: SGD(params, **o, momentum=0.9, weight_decay=0.1),
    "StableAdamW": StableAdamW,
    "Prodigy": Prodigy,
    "ScheduleFreeAdamW": ScheduleFreeAdamW,
    "MuonAdamW": MuonAdamW,
}
WAYS = {
    "eager": EAGER,
    "foreach": {"foreach": True},
    "device": {"capturable": True, **EAGER},
}


def made(name: str, model: nn.Module, **options: Any) -> Any:
    given = model if name == "MuonAdamW" else model.named_parameters()
    return CLASSES[name](given, lr=0.01, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_skips_the_step(name: str, way: str) -> None:
    """As a loop that does not call step(): state, counts and later steps are the same."""
    value = math.nan if way == "eager" else -math.inf
    one, two = net(torch.bfloat16), net(torch.bfloat16)
    ours = made(name, one, **SKIP, **WAYS[way])
    other = made(name, two, **WAYS[way])
    for i in range(5):
        for model, optimizer in ((one, ours), (two, other)):
            if i in (0, 2):
                poison(model, value)
            loss_of(model, i).backward()
            if model is one or i not in (0, 2):
                optimizer.step()
            optimizer.zero_grad()
        if i in (0, 2):
            before = net(torch.bfloat16) if i == 0 else two
            assert all(map(torch.equal, one.parameters(), before.parameters()))
    if not ours.param_groups[0]["capturable"]:
        assert_same((one, ours), (two, other))
    for p, q in zip(one.parameters(), two.parameters()):
        assert torch.equal(p, q)  # and running scalars, in double precision
        pairs = zip(ours.state[p].values(), other.state[q].values())
        assert all(torch.equal(x, y) for x, y in pairs if x.dim() == 0)
    assert {int(x["step"]) for x in ours.state.values()} == {3}
    assert ours.skipped_steps == 2
    again = copy.deepcopy(ours)
    assert again.skips_steps and again.skipped_steps == 2


@pytest.mark.parametrize("capturable", [False, True])
def test_an_error_leaves_scaled_gradients(capturable: bool) -> None:
    """What a loss scaler asks for is done when no check can fail any more."""
    w = nn.Parameter(torch.ones(2))
    optimizer: Any = AdamW([w], lr=0.1, capturable=capturable, **EAGER)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    w.grad = torch.full((2,), 4.0)
    (group,), betas = optimizer.param_groups, optimizer.param_groups[0]["betas"]
    group["betas"] = (2.0, 0.99)
    with pytest.raises(ValueError, match="betas"):
        optimizer.step()
    assert w.grad.tolist() == [4.0, 4.0] and not optimizer.state
    optimizer.found_inf.fill_(1.0)
    with pytest.raises(ValueError, match="betas") if capturable else nullcontext():
        optimizer.step()
    assert int(optimizer.skipped_steps) == (not capturable)
    group["betas"] = betas
    optimizer.found_inf.zero_()
    optimizer.step()
    assert w.grad.tolist() == [2.0, 2.0] and len(optimizer.state) == 1


def test_large_finite_gradients_are_steps() -> None:
    model = net()
    optimizer = made("AdamW", model, **SKIP, **EAGER)
    poison(model, 3e38)  # its square is inf
    loss_of(model, 0).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0 and len(optimizer.state) == 8


RELEASED: list[dict[str, Any]] = [
    {"clip_global_norm": math.inf},
    {"clip_global_norm": 0.1},
    {"accumulation": "buffer"},
]


@pytest.mark.parametrize("options", RELEASED, ids=str)
@pytest.mark.parametrize(
    "where",
    [{}, {"capturable": True}, pytest.param({"tree": True}, marks=pytest.mark.full)],
    ids=str,
)
def test_release_skips_the_step(options: dict[str, Any], where: dict[str, Any]) -> None:
    """As release without the step that has the gradient."""
    ends: list[Any] = []
    for skip in (True, False):
        model, way = net(), dict(where)
        optimizer: Any = adamw(lr=0.01)
        if not way.pop("tree", False):
            optimizer = made("AdamW", model, gradient_release=True, **EAGER, **way)
        more = SKIP if skip else {}
        handle = prepare_for_gradient_release(
            model, optimizer, grad_norm=True, **options, **more
        )
        for i in range(4):
            if i == 1 and not skip:
                continue
            if i == 1:
                poison(model, math.inf)
            handle.backward(lambda i=i, model=model: loss_of(model, i))
            handle.step()
            assert (i != 1) == bool(handle.grad_norm.isfinite())
        names = [name for name, _ in model.named_parameters()]
        assert handle.skipped == (dict.fromkeys(names, 1) if skip else {})
        assert all(p.grad is None for p in model.parameters())
        ends.append(model)
    assert all(map(torch.equal, *[model.parameters() for model in ends]))


@pytest.mark.parametrize("steps", [None, 2])
def test_release_drops_the_sums_of_a_skipped_step(steps: int | None) -> None:
    model, twin = net(), net()
    handles = []
    for net_, more in ((model, SKIP), (twin, {})):
        optimizer = made("AdamW", net_, gradient_release=True, **EAGER)
        how = {"accumulation": "buffer", "accumulation_steps": steps}
        how |= {"clip_global_norm": 0.1} if steps else {}
        handles.append(prepare_for_gradient_release(net_, optimizer, **how, **more))
    ours, other = handles
    for i in range(6):
        if i in (2, 3):
            poison(model, math.nan) if i == 2 else None
        else:
            other.backward(lambda i=i: loss_of(twin, i))
        ours.backward(lambda i=i: loss_of(model, i))
        if i % 2 and not steps:
            ours.step()
            other.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert set(ours.skipped.values()) == {1} and not ours.accumulating


CYCLE = "accumulation='buffer', accumulation_steps=2"
REFUSED = {
    **{
        f"made('AdamW', model, skip_nonfinite={x})": (r"allowed are False and 'step'\. By")
        for x in ("True", "'steps'", "None", "0")
    },
    "prepare_for_gradient_release(model, optimizer)": (
        "of the optimizer: pass it to this handle too"
    ),
    "optimizer.step(param=model[0].weight)": (
        r"with step\(param=\.\.\.\), which is a part of a step"
    ),
    "optimizer.optimizer_accumulation = True; optimizer.step()": (
        "RuntimeError: with optimizer_accumulation=True"
    ),
    **{
        f"prepare_for_gradient_release(model, optimizer, {options}**SKIP)": (
            "has to know every gradient before the first"
        )
        for options in ("", "clip_value=1.0, ", "accumulation='states', ", f"{CYCLE}, ")
    },
    "train_step(model, nn.functional.mse_loss, made('AdamW', model, **SKIP))": (
        "skip_nonfinite='step': make it without"
    ),
}


@refuses(REFUSED)
def test_what_cannot_be_honoured_is_refused() -> Scene:
    model = net()
    optimizer = made("AdamW", model, gradient_release=True, **EAGER, **SKIP)
    loss_of(model, 0).backward()
    return locals() | {"train_step": train_step}


BAD = 1  # the step that is skipped
NAN = one_process.Poison("second.weight", 1, BAD)


def left_out(clip: float = math.inf) -> one_process.Trained:
    """Return the end of one process, which leaves out the bad step."""
    how: dict[str, Any] = {"clip": clip, "poison": NAN, "steps": 3}
    return one_process.Training(shards.plain, one_process.of(AdamW), **how).alone


@world(2)
def test_a_class_skips_a_step_of_shards_by_one_message() -> None:
    made = one_process.of(AdamW, **SKIP)
    training = one_process.Training(shards.plain, made, steps=3, poison=NAN)
    among, close = one_process.fully_sharded(), {"tolerance": 1e-9, "than": left_out()}
    end = one_process.as_one_process(training, among, **close)
    assert end.optimizer.skipped_steps == 1
    assert {int(x["step"]) for x in end.optimizer.state.values()} == {2}
    training.loss(end.model, among.share(training.batch(0))).backward()
    with counted() as sent:
        end.optimizer.step()
    assert len(sent) == 1


@world(2)
def test_release_skips_a_step_of_shards() -> None:
    """By two passes and by sums that step() ends."""
    for options in RELEASED:
        than = left_out(options.get("clip_global_norm", math.inf))
        how: dict[str, Any] = {"release": {**options, **SKIP}, "steps": 3, "poison": NAN}
        training = one_process.Training(shards.plain, one_process.of(AdamW), **how)
        among, close = one_process.fully_sharded(), {"tolerance": 1e-9, "than": than}
        end = one_process.as_one_process(training, among, **close)
        assert set(end.handle.skipped.values()) == {1}
        assert len(end.handle.skipped) == len(end.handle.params)
        assert not end.handle.accumulating


@world(2)
def test_maps_that_replicas_divide_are_skipped_in_all() -> None:
    """A NaN that only one process has skips the step in both."""
    for cls in (Muon, MuonAdamW):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        params = [p for p in model.parameters() if p.dim() == 2]
        how = {"process_group": dist.group.WORLD, **SKIP, **EAGER}
        optimizer = cls(model if cls is MuonAdamW else params, lr=0.1, **how)
        for i in range(3):
            before = shards.snapshot(model)
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + i)
            if i == BAD and dist.get_rank() == 1:
                params[0].grad[0, 0] = math.nan
            optimizer.step()
            assert all(map(torch.equal, before, shards.snapshot(model))) == (i == BAD)
            replicas.assert_same_everywhere(model)
        assert optimizer.skipped_steps == 1


@world(2)
def test_release_skips_a_step_of_replicas() -> None:
    """Averages are NaN in all, so no message is needed."""
    for options in RELEASED:
        model = replicas.net()
        handle = replicas.prepare(model, replicas.adamw(model, True), **options, **SKIP)
        for i in range(3):
            x, before = replicas.batch(i), shards.snapshot(model)
            if i == BAD and dist.get_rank() == 1:
                x[0, 0] = math.inf
            handle.backward(lambda x=x, model=model: replicas.loss_of(model, x))
            handle.step()
            assert all(map(torch.equal, before, shards.snapshot(model))) == (i == BAD)
            replicas.assert_same_everywhere(model)
        assert set(handle.skipped.values()) == {1}
        handle.remove()
