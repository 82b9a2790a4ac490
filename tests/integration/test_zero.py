"""torch's ZeroRedundancyOptimizer divides the states of our classes, on gloo."""

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cases import CLASSES
from shards import EAGER
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from worlds import world

# Rules of one parameter at a time; Prodigy joins sums over all of them, and Kron's noise
# depends on a parameter's place in its optimizer.
RULES = sorted({*CLASSES} - {"prodigy", "kron"})


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False)
    return nn.Sequential(first, last).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    for i in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def divided(model: nn.Module, name: str, **options: Any) -> ZeroRedundancyOptimizer:
    # Of its own keywords torch's makes options of param groups.
    kind: Any = partial(CLASSES[name], **options, **EAGER)
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=0.01)


def elements(optimizer: Any) -> int:
    entries = optimizer.state.values()
    return sum(x.numel() for entry in entries for x in entry.values())


def check(name: str, dtype: torch.dtype, **options: Any) -> None:
    one, model = net(dtype), net(dtype)
    alone = CLASSES[name](one.parameters(), lr=0.01, **options, **EAGER)
    optimizer = divided(model, name, **options)
    train(one, alone, range(3))
    train(model, optimizer, range(3))
    for p, q in zip(one.parameters(), model.parameters()):
        assert torch.equal(p, q), (name, dtype)
    assert elements(optimizer.optim) < elements(alone) or not elements(alone)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        again = CLASSES[name](net(dtype).parameters(), lr=0.01, **options, **EAGER)
        again.load_state_dict(optimizer.state_dict())
        for p, entry in zip(again.state, alone.state.values()):
            same = [torch.equal(again.state[p][k], x) for k, x in entry.items()]
            assert all(same), (name, dtype)
    onward = net(dtype)
    onward.load_state_dict(one.state_dict())
    back = divided(onward, name, **options)
    back.load_state_dict(copy.deepcopy(alone.state_dict()))  # which torch's would share
    train(one, alone, range(3, 5))
    train(onward, back, range(3, 5))
    for p, q in zip(one.parameters(), onward.parameters()):
        assert torch.equal(p, q), (name, dtype)


@world(full=[2])
def test_every_rule_steps_and_is_loaded_as_in_one_process() -> None:
    for name in RULES:
        check(name, torch.float32)


@world(full=[2])
def test_prodigy_grows_another_d() -> None:
    """What the page excludes: a process that sums its share grows another d."""
    one, model, kind = net(), net(), partial(CLASSES["prodigy"], d0=1e-3, **EAGER)
    alone = kind(one.parameters(), lr=1.0)
    divided = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=1.0)
    train(one, alone, range(8))
    train(model, divided, range(8))
    d = alone.param_groups[0]["d"]
    assert d > 2e-3 and d != divided.optim.param_groups[0]["d"]
    assert not any(map(torch.equal, one.parameters(), model.parameters()))


@world(full=[2])
def test_storages() -> None:
    for storage in (None, "exact", "compact"):
        check("adamw", torch.bfloat16, storage=storage)
    check("adamw", torch.bfloat16, state_dtype="float32")
