"""Rules that map whole tensors, on shards: they equal one process, on gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import taken
from shards import (
    EAGER,
    assert_close,
    batch,
    flat_mesh,
    load,
    loss_of,
    mine,
    plain,
    released,
    save,
    sharded,
    share,
    snapshot,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from worlds import world

from optimi_func import SOAP, Muon


@world(full=[2], soak=[4])
def test_soap_is_saved_and_loaded_and_goes_on(tmp_path: Path) -> None:
    """Saved by DCP or as a full state dict and loaded, a run is the one without a stop."""
    options: dict[str, Any] = {"lr": 0.05, "precondition_frequency": 2, **EAGER}
    ends: list[list[Tensor]] = []
    for way in ("none", "dcp", "full"):
        model = sharded(flat_mesh())
        optimizer: Any = SOAP(model.parameters(), **options)
        for i in range(8):
            if i == 3 and way != "none":
                before = model, optimizer
                model = sharded(flat_mesh())
                optimizer = SOAP(model.parameters(), **options)
                if way == "dcp":
                    save(*before, tmp_path / "rotated")
                    load(model, optimizer, tmp_path / "rotated")
                else:
                    how = sd.StateDictOptions(full_state_dict=True)
                    weights, state = sd.get_state_dict(*before, options=how)
                    for x in state["state"].values():
                        assert not isinstance(x["bases"], DTensor)
                    sd.set_state_dict(
                        model,
                        optimizer,
                        model_state_dict=weights,
                        optim_state_dict=state,
                        options=how,
                    )
            loss_of(model, mine(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(snapshot(model))
    assert all(map(torch.equal, *ends[:2])) and all(map(torch.equal, *ends[1:]))


def train(model: nn.Module, data: Callable[[int], Tensor], release: bool) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "gradient_release": release, **EAGER}
    if release:
        modes = {"clip_param_norm": 0.1, "accumulation": "buffer", "accumulation_steps": 2}
        released(model, Muon, modes, data)
        return
    optimizer = Muon(taken(Muon, model), **options)
    for i in range(4):
        loss_of(model, data(i)).backward()
        nn.utils.clip_grad_norm_(taken(Muon, model), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


def models() -> list[tuple[nn.Module, Callable[[int], Tensor]]]:
    """Models, and what each process has of the data."""
    found: list[Any] = [(sharded(flat_mesh()), mine)]
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        model = parallelize_module(plain(), mesh["model"], plan)
        # What is not parallel is sharded along the same mesh by fully_shard alone.
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh["data"])
        rank = mesh["data"].get_local_rank()
        found.append((model, lambda i: share(i, rank, 2)))
    return found


@world(full=[2], soak=[4])
def test_muon_under_fully_shard_and_tensor_parallelism() -> None:
    for release in (False, True):
        for model, data in models():
            parallel = model.first.weight.device_mesh.ndim > 1
            single = plain()
            start = snapshot(single)
            if parallel and not release:
                continue  # torch clips no DTensors of two meshes together
            train(single, batch, release)
            train(model, data, release)
            assert_close(snapshot(model), snapshot(single), start, 1e-9)
