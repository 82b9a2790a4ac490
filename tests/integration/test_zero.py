"""torch's ZeroRedundancyOptimizer divides the states of our classes, on gloo."""

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import training
from cases import CLASSES
from one_process import assert_alike, kept
from shards import EAGER
from torch import Tensor, nn
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

    def loss(i: int) -> Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        return model(x.to(next(model.parameters()).dtype)).float().square().mean()

    training.train(optimizer, loss, steps, schedule)


def divided(model: nn.Module, kind: Any, lr: float = 0.01) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=lr)


def elements(optimizer: Any) -> int:
    entries = optimizer.state.values()
    return sum(x.numel() for entry in entries for x in entry.values())


def check(name: str, dtype: torch.dtype, **options: Any) -> None:
    # Of its own keywords torch's makes options of param groups.
    make, about = partial(CLASSES[name], **options, **EAGER), (name, dtype)
    one, model, onward = (net(dtype) for _ in range(3))
    alone, optimizer = make(one.parameters(), lr=0.01), divided(model, make)
    train(one, alone, range(3))
    train(model, optimizer, range(3))
    assert_alike(model.state_dict(), one.state_dict(), about=about)
    assert elements(optimizer.optim) < elements(alone) or not elements(alone)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        twin = net(dtype)
        again = make(twin.parameters(), lr=0.01)
        again.load_state_dict(optimizer.state_dict())
        ours, theirs = (dict(x.named_parameters()) for x in (twin, one))
        assert_alike(kept(ours, again), kept(theirs, alone), about=about)
    onward.load_state_dict(one.state_dict())
    back = divided(onward, make)
    back.load_state_dict(copy.deepcopy(alone.state_dict()))  # which torch's would share
    train(one, alone, range(3, 5))
    train(onward, back, range(3, 5))
    assert_alike(onward.state_dict(), one.state_dict(), about=about)


@world(full=[2])
def test_every_rule_steps_and_is_loaded_as_in_one_process() -> None:
    for name in RULES:
        check(name, torch.float32)


@world(full=[2])
def test_prodigy_grows_another_d() -> None:
    """What the page excludes: a process that sums its share grows another d."""
    one, model, kind = net(), net(), partial(CLASSES["prodigy"], d0=1e-3, **EAGER)
    alone = kind(one.parameters(), lr=1.0)
    optimizer = divided(model, kind, 1.0)
    train(one, alone, range(8))
    train(model, optimizer, range(8))
    d = alone.param_groups[0]["d"]
    assert d > 2e-3 and d != optimizer.optim.param_groups[0]["d"]
    assert not any(map(torch.equal, one.parameters(), model.parameters()))


@world(full=[2])
def test_storages() -> None:
    for storage in (None, "exact", "compact"):
        check("adamw", torch.bfloat16, storage=storage)
    check("adamw", torch.bfloat16, state_dtype="float32")
