"""`EMA`: averages beside an optimizer, against a loop in float64."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shards
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from one_process import Trained, Training, as_one_process, assert_alike, fully_sharded
from refusals import Scene, refuses
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from worlds import run

from optimi_func import (
    EMA,
    AdamW,
    Mixed,
    ScheduleFreeAdamW,
    adamw,
    prepare_for_gradient_release,
    schedule_free_sgd,
    schedules,
)

EAGER: dict[str, Any] = {"compile": False}
Masters = dict[str, Tensor]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def backward(model: nn.Module, i: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(i))
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()


def step(model: nn.Module, optimizer: Any, i: int) -> None:
    backward(model, i)
    optimizer.step()
    optimizer.zero_grad()


def taken(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def compare(model: nn.Module, optimizer: Any, average: EMA, masters: Callable[[], Any]):
    """Take steps, and compare the averages with those of a loop in float64."""
    debias, decay = bool(average.weight == 0), average.decay
    a = {k: 0 * x if debias else x for k, x in masters().items()}
    share = 0.0 if debias else 1.0
    for i in range(6):
        step(model, optimizer, i)
        average.update()
        d = float(decay(torch.tensor(float(i))) if callable(decay) else decay)
        share = d * share + (1 - d)
        a = {k: d * a[k] + (1 - d) * x for k, x in masters().items()}
    found = average.state_dict()
    assert found["updates"] == 6 and found["weight"] == pytest.approx(share)
    for k, x in found["averages"].items():
        assert x.dtype == torch.promote_types(model.get_parameter(k).dtype, torch.float32)
        assert torch.allclose(x.double(), a[k] / share, rtol=2e-6, atol=1e-7), k


STORED: dict[str, Any] = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "kahan": (torch.bfloat16, {}),
    "exact": (torch.bfloat16, {"storage": "exact"}),
    "plain": (torch.bfloat16, {"kahan_sum": False}),
}


@pytest.mark.parametrize(
    "decay", [0.9, schedules.linear(0.2, 0.9, 4)], ids=["0.9", "linear"]
)
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("how", STORED)
def test_averages(how: str, debias: bool, decay: Any) -> None:
    dtype, options = STORED[how]
    model = net(dtype)
    optimizer = AdamW(model.named_parameters(), lr=1e-3, **options, **EAGER)

    def masters() -> Masters:
        return {k: x.double() for k, x in optimizer.master_state_dict(model).items()}

    compare(model, optimizer, EMA(optimizer, decay, debias=debias), masters)


def test_averages_of_bfloat16_weights_move() -> None:
    """Where torch's, in the dtype of the parameters, stand still."""
    model = net(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), lr=1e-5, weight_decay=0.0, **EAGER)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    theirs.update_parameters(model)
    ours = EMA(optimizer, 0.999, debias=False)
    before = copy.deepcopy(ours.state_dict()["averages"])
    start = [p.clone() for p in theirs.parameters()]
    for i in range(5):
        step(model, optimizer, i)
        ours.update()
        theirs.update_parameters(model)
    assert all(map(torch.equal, start, theirs.parameters()))
    for k, x in ours.state_dict()["averages"].items():
        assert not torch.equal(x, before[k])


@pytest.mark.parametrize("kind", ["class", "mixed"])
def test_of_schedule_free_the_point_to_evaluate_at_is_averaged(kind: str) -> None:
    model = net()
    if kind == "class":
        optimizer: Any = ScheduleFreeAdamW(model.named_parameters(), lr=1e-2, **EAGER)
    else:
        parts = ("0.*", schedule_free_sgd(lr=0.1))
        optimizer = Mixed(model.named_parameters(), parts, rest=adamw(lr=1e-2), **EAGER)

    def points() -> Masters:
        optimizer.eval()
        found = {k: p.detach().double() for k, p in model.named_parameters()}
        optimizer.train()
        return found

    average = EMA(optimizer, 0.7)
    compare(model, optimizer, average, points)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_applied_swaps_in_and_out(dtype: torch.dtype) -> None:
    model = net()
    params = {k: nn.Parameter(p.detach().to(dtype)) for k, p in model.named_parameters()}
    optimizer = AdamW([*params.items()], lr=1e-2, **EAGER)
    average = EMA(optimizer, 0.9)
    for i in range(3):
        for p in params.values():
            p.grad = torch.full_like(p, 1.0 + i)
        optimizer.step()
        average.update()
    before = [p.detach().clone() for p in params.values()]
    with pytest.raises(KeyError, match="the evaluation"):
        with average.applied():
            for name, p in params.items():
                assert torch.equal(p, average.state_dict()["averages"][name].to(dtype))
                assert not torch.equal(p, before[[*params].index(name)])
            for what in (optimizer.step, average.update, optimizer.reset):
                with pytest.raises(
                    RuntimeError, match=r"inside of EMA.applied\(\): leave it"
                ):
                    what()
            with pytest.raises(
                RuntimeError, match=r"EMA.applied\(\) inside of EMA.applied"
            ):
                average.applied().__enter__()
            raise KeyError("the evaluation")
    assert all(map(torch.equal, before, params.values()))
    optimizer.step()  # again allowed


@pytest.mark.parametrize("named", [True, False])
def test_saved_and_loaded_it_goes_on(named: bool) -> None:
    def made() -> tuple[Any, Any, EMA]:
        model = net(torch.bfloat16)
        params = model.named_parameters() if named else model.parameters()
        optimizer = AdamW([*params], lr=1e-2, **EAGER)
        return model, optimizer, EMA(optimizer, 0.9)

    one, two = made(), made()
    file = io.BytesIO()
    for i in range(6):
        if i == 3:
            torch.save([part.state_dict() for part in one], file)
            file.seek(0)
            for part, saved in zip(two, torch.load(file, weights_only=True)):
                part.load_state_dict(saved)
        for model, optimizer, average in (one, two) if i >= 3 else (one,):
            step(model, optimizer, i)
            average.update()
    states = [part[2].state_dict() for part in (one, two)]
    assert states[0]["updates"] == states[1]["updates"] == 6
    assert states[0]["weight"] == states[1]["weight"]
    assert list(states[0]["averages"]) == list(states[1]["averages"])
    for x, y in zip(*[state["averages"].values() for state in states]):
        assert torch.equal(x, y)


def test_parameters_that_join_later_begin_as_they_are() -> None:
    model, more = net(), nn.Parameter(torch.ones(3))
    model[0].weight.requires_grad_(False)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, **EAGER)
    average = EMA(optimizer, 0.9)
    assert "0.weight" not in average.state_dict()["averages"]  # it does not move
    step(model, optimizer, 0)
    average.update()
    optimizer.add_param_group({"params": [("more", more)]})
    step(model, optimizer, 1)
    average.update()
    assert torch.equal(average.averages["more"], more)


@pytest.mark.parametrize("release", [False, True])
def test_an_update_for_each_micro_batch_warns(release: bool) -> None:
    model = net()
    options = {**EAGER, "gradient_release": release}
    optimizer = AdamW(model.named_parameters(), lr=1e-2, **options)
    if release:
        how = {"accumulation": "buffer", "accumulation_steps": 2}
        handle = prepare_for_gradient_release(model, optimizer, **how)
    average = EMA(optimizer, 0.9)
    for i in range(4):  # once a step is right
        sum((p.sum() for p in model.parameters()), torch.zeros(())).backward()
        if i % 2 and not release:
            optimizer.step()
        if i % 2:
            average.update()
    sum((p.sum() for p in model.parameters()), torch.zeros(())).backward()
    with pytest.warns(UserWarning, match="a second time since the optimizer's last step"):
        average.update()
    average.update()  # said once
    if release:
        handle.remove()


OTHER = "EMA's state has other names or shapes"
BAD = {
    "saved['updates'] = torch.ones(2); load(saved)": "EMA's",
    "saved['weight'] = 1j; load(saved)": "EMA's weight is 1j: allowed is a",
    "saved['averages']['0.bias'] = saved['averages']['0.bias'].to_sparse(); load(saved)": (
        "TypeError: EMA's"
    ),
    "saved['averages']['0.bias'] = torch.ones(9); load(saved)": OTHER,
    "del saved['averages']['0.bias']; load(saved)": OTHER,
    "load({})": OTHER,
    "EMA(torch.optim.SGD(model.parameters()))": (
        r"TypeError: EMA got SGD(.|\n)*allowed are this package's classes"
    ),
    "EMA(optimizer, 1.0)": "decay",
    "EMA(optimizer, -0.1)": "decay",
    "EMA(optimizer, '0.9')": "TypeError: decay",
    "average = EMA(optimizer, lambda t: 1.5); average.update()": "decay",
}


@refuses(BAD)
def test_what_does_not_fit_is_refused() -> Scene:
    model = net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, **EAGER)
    average = EMA(optimizer, 0.9)
    step(model, optimizer, 0)
    average.update()
    saved = copy.deepcopy(average.state_dict())
    return locals() | {"load": average.load_state_dict}


def averaged(model: nn.Module) -> Any:
    """Return an optimizer that updates averages after each step."""
    optimizer: Any = AdamW(model.named_parameters(), lr=1e-2, **EAGER)
    optimizer.average = EMA(optimizer, 0.9)
    optimizer.register_step_post_hook(lambda *_: optimizer.average.update())
    return optimizer


SHARDED = Training(shards.plain, averaged)


def averages(end: Trained) -> dict[str, Any]:
    return end.optimizer.average.state_dict()["averages"]


def saved_by(end: Trained) -> dict[str, Any]:
    parts = {"model": end.model, "optimizer": end.optimizer, "ema": end.optimizer.average}
    return {name: part.state_dict() for name, part in parts.items()}


def saves(folder: Path) -> None:
    """Shards are averaged as whole tensors are, and swapped in and out."""
    steps, among = range(3), fully_sharded()
    wanted = SHARDED.run(steps=steps)
    end = as_one_process(SHARDED, among, averages, 1e-9, than=wanted, steps=steps)
    assert all(isinstance(x, DTensor) for x in averages(end).values())

    def loss(end: Trained) -> float:
        with torch.no_grad():  # the root stays gathered after this, but for reshard()
            return shards.loss_of(end.model, shards.batch(0)).item()

    trained = loss(end)
    with end.optimizer.average.applied(), wanted.optimizer.average.applied():
        assert abs(loss(end) - loss(wanted)) < 1e-12 and loss(end) != trained
    assert loss(end) == trained
    dcp.save(saved_by(end), checkpoint_id=folder)
    dist.barrier()


def goes_on(folder: Path) -> None:
    """Another number of processes continues."""
    end = SHARDED.begun(fully_sharded())
    end.optimizer.init_state()
    saved = saved_by(end)
    dcp.load(saved, checkpoint_id=folder)
    for name, part in (("model", end.model), ("optimizer", end.optimizer)):
        part.load_state_dict(saved[name])
    end.optimizer.average.load_state_dict(saved["ema"])
    SHARDED.train(end, range(3, 6))
    wanted = averages(SHARDED.run(steps=range(6)))
    assert_alike(averages(end), wanted, SHARDED.starts, 1e-9)
    assert end.optimizer.average.state_dict()["updates"] == 6


@pytest.mark.full
def test_shards_are_averaged_and_go_on_elsewhere(tmp_path: Path) -> None:
    run(saves, 2, folder=tmp_path)
    run(goes_on, 1, folder=tmp_path)
