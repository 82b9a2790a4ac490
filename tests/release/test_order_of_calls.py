"""Calls in an order that the ordinary step allows, and what a handle is loaded with."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from released import Net, batch, make, prepared, train
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.optim import lr_scheduler

from optimi_func import (
    AdamW,
    ScheduleFreeAdamW,
    prepare_for_gradient_release,
)

LATE = "of param group 0 was .* moved the parameters, and is .* now: it comes a step late"


def loss_of(model: nn.Module, i: int) -> Tensor:
    return model(batch(i)).square().mean()


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", ["lr", "betas", "weight_decay"])
def test_hyperparameters_written_after_backward_are_named(
    name: str, capturable: bool
) -> None:
    """A warmup from 0 that sets lr between backward and step() begins with the full lr."""
    lr: Any = torch.tensor(0.1) if capturable else 0.1
    model, optimizer, _ = prepared(make(lr=lr, weight_decay=0.1, capturable=capturable))
    before = copy.deepcopy(model.state_dict())
    group = optimizer.param_groups[0]
    loss_of(model, 0).backward()
    assert not torch.equal(before["last.weight"], model.last.weight)
    if name == "lr" and capturable:
        lr.fill_(0.0)
    else:
        group[name] = (0.5, 0.9) if name == "betas" else 0.0
    with pytest.warns(UserWarning, match=f"{name} {LATE}"):
        optimizer.step()
    optimizer.zero_grad()
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        loss_of(model, 1).backward()
        group[name] = (0.6, 0.9) if name == "betas" else 0.01
        optimizer.step()


def test_hyperparameters_in_time_are_not_named() -> None:
    """Before backward, after step(), in the last micro-batch's step() or in a closure."""
    model, optimizer, handle = prepared()
    schedulers = [
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
        lr_scheduler.LambdaLR(optimizer, lambda i: 0.9**i),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scheduler in schedulers:
            train(model, optimizer, 3, scheduler=scheduler)
        for i in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 * i
            loss_of(model, i).backward()
            optimizer.step()
        handle.accumulation = "buffer"
        for i in range(6):
            loss_of(model, i).backward()
            optimizer.param_groups[0]["lr"] = 0.1 * i  # nothing has moved
            if i % 2:
                optimizer.step()
        handle.accumulation = None

        def closure() -> Tensor:
            optimizer.param_groups[0]["lr"] = 0.2
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
        with handle.paused():  # the ordinary step takes what is there at step()
            loss_of(model, 1).backward()
        optimizer.param_groups[0]["lr"] = 0.3
        optimizer.step()


def test_micro_batches_move_the_state_alone_without_release_too() -> None:
    """As in release: each step() of the flag is one of the moments."""
    ends: list[Any] = []
    for release in (False, True):
        model, optimizer = make(release=release, weight_decay=0.1)
        if release:
            prepare_for_gradient_release(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        for i in range(4):
            optimizer.optimizer_accumulation = i < 3
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
            same = [torch.equal(x, before[k]) for k, x in model.state_dict().items()]
            assert all(same) if i < 3 else not any(same)
        assert optimizer.state[model.last.weight]["step"] == 4
        ends.append(model.state_dict())
    assert all(torch.equal(x, ends[1][k]) for k, x in ends[0].items())
    frozen = nn.Parameter(torch.ones(2))
    optimizer = ScheduleFreeAdamW([frozen], lr=0.1, compile=False)
    frozen.grad, optimizer.optimizer_accumulation = torch.ones(2), True
    with pytest.raises(ValueError, match="the state cannot accumulate alone"):
        optimizer.step()
    assert not optimizer.state and torch.equal(frozen, torch.ones(2))


# A handle through torch.distributed.checkpoint

WAYS: dict[str, dict[str, Any]] = {
    "buffer": {"accumulation": "buffer", "accumulation_steps": 3},
    "bfloat16": {
        "accumulation": "buffer",
        "accumulation_steps": 3,
        "buffer_dtype": torch.bfloat16,
    },
    "states": {"accumulation": "states", "accumulation_steps": 3},
    "skips": {"skip_nonfinite": True},
}


MORE = [("buffer", 3), ("bfloat16", 5), ("states", 5), ("skips", 5)]


class Part(Net):
    """A network with a layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(16, 4)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        return super().forward(x) + (self.rare(x) if rare else 0)


def fresh(way: str) -> tuple[Part, AdamW, Any]:
    torch.manual_seed(0)
    model = Part()
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "compile": False}
    optimizer = AdamW(model.named_parameters(), gradient_release=True, **options)
    return model, optimizer, prepare_for_gradient_release(model, optimizer, **WAYS[way])


def run(model: Part, handle: Any, steps: range) -> None:
    for i in steps:
        x = batch(i)
        if i == 2 and handle.options.skip_nonfinite:
            x[0, 0] = torch.inf
        (model(x).square().mean() / 3).backward()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("way", "stop"),  # between two steps, or in one
    [
        ("buffer", 5),
        *[pytest.param(*row, marks=pytest.mark.full) for row in MORE],
    ],
)
def test_checkpoints_fill_a_fresh_handle(way: str, stop: int, tmp_path: Path) -> None:
    model, optimizer, handle = fresh(way)
    run(model, handle, range(stop))
    saved = {"optimizer": optimizer.state_dict(), "handle": handle.state_dict()}
    dcp.save({"model": model.state_dict(), **saved}, checkpoint_id=tmp_path, no_dist=True)
    twin, other, its_handle = fresh(way)
    other.init_state()
    found: Any = {"model": twin.state_dict(), "optimizer": other.state_dict()}
    found["handle"] = its_handle.state_dict()
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    twin.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    its_handle.load_state_dict(found["handle"])
    assert its_handle.accumulating == handle.accumulating
    assert its_handle.skipped == handle.skipped
    run(model, handle, range(stop, 9))
    run(twin, its_handle, range(stop, 9))
    for k, x in model.state_dict().items():
        assert torch.equal(x, twin.state_dict()[k]), k
    assert model.rare.weight not in optimizer.state  # its place in the handle is no sum
    assert other.state[twin.rare.weight]["step"] == 0


@pytest.mark.parametrize("old", [False, True])
def test_an_open_cycle_without_its_sums_is_refused(old: bool) -> None:
    model, _, handle = fresh("buffer")
    run(model, handle, range(4))
    saved = handle.state_dict()
    _, _, other = fresh("buffer")
    if old:  # the names of sums were not in it
        other.load_state_dict({**saved, "begun": []})
        assert len(other.state_dict()["buffer"]) == len(saved["buffer"]) > 0
        saved["begun"] = []
    for sums in ({}, {"first.weight": saved["buffer"]["first.weight"]}):
        if old and sums:
            continue
        _, _, other = fresh("buffer")
        with pytest.raises(ValueError, match="open cycle and lacks its sums"):
            other.load_state_dict({**saved, "buffer": sums})
        assert not other.accumulating
