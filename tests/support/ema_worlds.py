"""`EMA` of shards, and its checkpoints by torch.distributed.checkpoint."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shards import batch, flat_mesh, loss_of, mine, plain, sharded
from torch import Tensor
from torch.distributed.tensor import DTensor

from optimi_func import EMA, AdamW

OPTIONS: dict[str, Any] = {"lr": 1e-2, "compile": False}


def alone(steps: int) -> EMA:
    """The averages of one process."""
    model = plain()
    optimizer = AdamW(model.named_parameters(), **OPTIONS)
    average = EMA(optimizer, 0.9)
    for i in range(steps):
        loss_of(model, batch(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    return average


def run(steps: range, folder: Path | None) -> tuple[Any, EMA]:
    model = sharded(flat_mesh())
    optimizer = AdamW(model.named_parameters(), **OPTIONS)
    average = EMA(optimizer, 0.9)
    if folder is not None:
        optimizer.init_state()
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "ema": average}
        saved = {name: part.state_dict() for name, part in parts.items()}
        dcp.load(saved, checkpoint_id=folder / "saved")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for i in steps:
        loss_of(model, mine(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    return model, average


def assert_averages(found: EMA, wanted: EMA) -> None:
    wanted_averages: dict[str, Tensor] = wanted.state_dict()["averages"]
    for name, x in found.state_dict()["averages"].items():
        assert isinstance(x, DTensor)
        whole = x.full_tensor()
        assert torch.allclose(whole, wanted_averages[name], rtol=0, atol=1e-10), name


def saves(folder: Path) -> None:
    """Shards are averaged as whole tensors are, and swapped in and out."""
    model, average = run(range(3), None)
    wanted = alone(3)
    assert_averages(average, wanted)
    with torch.no_grad():
        model(batch(0))  # the root stays gathered after this, but for reshard()
    trained = loss_of(model, batch(0)).item()
    with average.applied(), torch.no_grad():
        of_averages = loss_of(model, batch(0))
    with wanted.applied():
        whole = plain()
        for p, a in zip(whole.parameters(), wanted.state_dict()["averages"].values()):
            p.data.copy_(a)
        assert torch.allclose(loss_of(whole, batch(0)), of_averages, atol=1e-12)
    assert loss_of(model, batch(0)).item() == trained != of_averages.item()
    parts = {"model": model, "optimizer": average.optimizer, "ema": average}
    saved = {name: part.state_dict() for name, part in parts.items()}
    dcp.save(copy.copy(saved), checkpoint_id=folder / "saved")
    dist.barrier()


def goes_on(folder: Path) -> None:
    """Another number of processes continues."""
    _, average = run(range(3, 6), folder)
    assert_averages(average, alone(6))
    assert average.state_dict()["updates"] == 6
