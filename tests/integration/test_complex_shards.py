"""Complex parameters on shards and on replicas, on gloo."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import CLASSES
from shards import EAGER, assert_close
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from worlds import raises, world

from optimi_func import AdamW, Storage, prepare_for_gradient_release


class Part(nn.Module):
    """fully_shard takes modules of one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 128, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.part, self.head = Part(), nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x).abs()).square().mean()


def go_on(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for i in range(steps):
        made = torch.Generator().manual_seed(i)
        model(torch.randn(8, 64, dtype=torch.complex64, generator=made)).backward()
        optimizer.step()
        optimizer.zero_grad()


def begun() -> list[Tensor]:
    return [p.detach() for p in Net().parameters()]


def sharded() -> Net:
    model = Net()
    fully_shard(model.part)
    fully_shard(model)
    return model


def local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@world(full=[2])
def test_fsdp2_with_release_and_checkpoints_is_one_process(tmp_path: Path) -> None:
    makes: dict[str, Any] = {name: CLASSES[name] for name in ("adamw", "lamb", "prodigy")}
    makes["8bit"] = partial(AdamW, storage=Storage(moments="8bit"))
    for name, make in makes.items():
        alone = Net()
        go_on(alone, make(alone.parameters(), lr=0.02, **EAGER))
        for release in (False, True):
            model = sharded()
            optimizer = make(model.parameters(), lr=0.02, gradient_release=release, **EAGER)
            if release:
                prepare_for_gradient_release(model, optimizer)
            go_on(model, optimizer)
            for p, q, start in zip(model.parameters(), alone.parameters(), begun()):
                ours: Any = p.detach()
                assert_close([ours.full_tensor()], [q.detach()], [start], 1e-5)
        other = sharded()
        second = make(other.parameters(), lr=0.02, **EAGER)
        path = tmp_path / name
        dcp.save(sd.get_optimizer_state_dict(model, optimizer), checkpoint_id=path)
        state = sd.get_optimizer_state_dict(other, second)
        dcp.load(state, checkpoint_id=path)
        sd.set_optimizer_state_dict(other, second, state)
        for p, q in zip(model.parameters(), other.parameters()):
            for key, x in optimizer.state[p].items():
                assert torch.equal(local(x), local(second.state[q][key])), key


@world(full=[2])
def test_averages_of_complex_gradients() -> None:
    """Averages of complex gradients; a narrower dtype for them is refused."""
    alone, model = Net(), Net(dist.get_rank())
    go_on(alone, AdamW(alone.parameters(), lr=0.02, **EAGER))
    optimizer = AdamW(model.parameters(), lr=0.02, gradient_release=True, **EAGER)
    group = dist.group.WORLD
    with raises(ValueError, "reduce_dtype=torch.bfloat16 with part.weight, which is comp"):
        prepare_for_gradient_release(
            model, optimizer, process_group=group, reduce_dtype=torch.bfloat16
        )
    for steps in (2, 1):
        with prepare_for_gradient_release(model, optimizer, process_group=group):
            for i in range(steps):
                made = torch.Generator().manual_seed(i + (steps == 1) * 2)
                x = torch.randn(8, 64, dtype=torch.complex64, generator=made)
                model(x).backward()
    for p, q, start in zip(model.parameters(), alone.parameters(), begun()):
        assert_close([p.detach()], [q.detach()], [start], 1e-6)
