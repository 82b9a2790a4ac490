"""A model, its data and its training, of one process and divided among several."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from optimi_func import AdamW

EAGER: dict[str, Any] = {"compile": False}


class Net(nn.Module):
    """Sizes that 2 and 4 processes divide (8), divide unevenly (7), or not at all (1)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 7)
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(nn.functional.gelu(self.first(x)))
        return self.last(nn.functional.gelu(x))


class ComplexNet(nn.Module):
    """A complex layer and a real one, because fully_shard takes modules of one dtype."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.part = nn.Linear(64, 128, dtype=torch.complex64)
        self.head = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x).abs())


def drawn(size: int, dtype: torch.dtype, i: int) -> Tensor:
    """Return a batch of 8 rows."""
    source = torch.Generator().manual_seed(i)
    return torch.randn(8, size, dtype=dtype, generator=source)


def plain() -> Net:
    torch.manual_seed(1)
    return Net().double()


def sharded(mesh: Any) -> Net:
    model = plain()
    for part in (model.first, model.second, model.last, model):
        fully_shard(part, mesh=mesh)
    return model


def flat_mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))


def placed(mesh: Any, *places: Any) -> Callable[[Tensor], Any]:
    """Divide tensors so; what lacks a dimension is copied along it."""

    def place(x: Tensor) -> Any:
        own = [s if s.is_replicate() or s.dim < x.dim() else Replicate() for s in places]
        return distribute_tensor(x, mesh, own, src_data_rank=None)

    return place


def by_rows() -> Callable[[Tensor], Any]:
    return placed(flat_mesh(), Shard(0))


def batch(i: int) -> Tensor:
    """What all processes together learn from at a step."""
    source = torch.Generator().manual_seed(100 + i)
    return 3 * torch.randn(8, 5, dtype=torch.float64, generator=source)


def mine(i: int) -> Tensor:
    return batch(i).chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(
    model: nn.Module, optimizer: Any, steps: range, data: Callable[[int], Tensor]
) -> None:
    for i in steps:
        loss_of(model, data(i)).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(x: Tensor) -> Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [full(p) for p in model.parameters()]


def assert_close(
    ours: list[Tensor], theirs: list[Tensor], start: list[Tensor], tolerance: float
) -> None:
    """Compare movements: of all parameters together, against the largest."""
    largest = max((b - s).abs().max().item() for b, s in zip(theirs, start))
    assert largest > 0
    for a, b in zip(ours, theirs):
        error = (a - b).abs().max().item() / largest
        assert error <= tolerance, error


def fresh_pair(model: nn.Module, release: bool = False) -> tuple[nn.Module, Any]:
    """With float32 state; without release it lies in buckets from the second step on."""
    way = {"gradient_release": True, **EAGER} if release else {"foreach": True}
    options = {"lr": 1e-2, "weight_decay": 0.1, "state_dtype": torch.float32, **way}
    return model, AdamW(model.parameters(), **options)


def passed_to(
    transfer: Any, model: nn.Module, optimizer: Any, path: Path, how: Any = None
) -> Any:
    """The state of both, once dcp.save or dcp.load has had it."""
    weights, state = sd.get_state_dict(model, optimizer, options=how)
    kept = {"model": weights, "optimizer": state}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        transfer(kept, checkpoint_id=path)
    return kept


def save(model: nn.Module, optimizer: Any, path: Path, how: Any = None) -> None:
    passed_to(dcp.save, model, optimizer, path, how)


def load(model: nn.Module, optimizer: Any, path: Path, how: Any = None) -> None:
    kept = passed_to(dcp.load, model, optimizer, path, how)
    sd.set_state_dict(
        model,
        optimizer,
        model_state_dict=kept["model"],
        optim_state_dict=kept["optimizer"],
        options=how,
    )
