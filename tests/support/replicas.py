"""A model on replicas, its data, and gradient release that averages."""

from typing import Any

import torch
import torch.distributed as dist
from shards import EAGER
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optimi_func import AdamW, GradientRelease, prepare_for_gradient_release

CAP = 0.01  # MiB: several buckets
STEPS = 5


class Net(nn.Module):
    """Blocks; which ones are used depends on `skipped`, and `never` is not."""

    def __init__(self, width: int = 32, blocks: int = 3, kind: str = "plain") -> None:
        super().__init__()
        self.kind, self.skipped = kind, -1
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(blocks)
        )
        self.last = nn.Linear(width, 16)
        if kind == "tied":
            self.last.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
            self.blocks[1][1].weight = self.blocks[0][1].weight
        if kind == "frozen":
            self.blocks[0].requires_grad_(False)
        if kind == "unused":
            self.never = nn.Linear(width, width)
        if kind == "mixed":
            self.blocks.bfloat16()
        if kind == "buffers":
            self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.norm(x) if self.kind == "buffers" else x)
        for i, block in enumerate(self.blocks):
            if i == self.skipped:
                continue
            if self.kind in ("checkpointed", "reentrant"):
                reentrant = self.kind == "reentrant"
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            elif self.kind == "mixed":
                x = x + block(x.bfloat16())
            else:
                x = x + block(x)
        return self.last(x)


def net(kind: str = "plain", **more: Any) -> Net:
    torch.manual_seed(5)
    return Net(kind=kind, **more)


def whole_batch(i: int) -> Tensor:
    """Return what all processes together learn from."""
    source = torch.Generator().manual_seed(1000 + i)
    return torch.randn(8 * dist.get_world_size(), 16, generator=source)


def batch(i: int, rank: int | None = None) -> Tensor:
    """Return this process's share of a step's data, or another one's."""
    rank = dist.get_rank() if rank is None else rank
    return whole_batch(i).chunk(dist.get_world_size())[rank]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    x = x.to(next(model.parameters()).dtype)
    return (model(x) - x.square()).float().square().mean()


def adamw(model: nn.Module, gradient_release: bool = False, **more: Any) -> AdamW:
    named = model.named_parameters()
    options = {"lr": 1e-2, "weight_decay": 0.1, **EAGER, **more}
    return AdamW(named, gradient_release=gradient_release, **options)


def prepare(model: nn.Module, optimizer: Any, **options: Any) -> GradientRelease:
    group = options.pop("process_group", dist.group.WORLD)
    options = {"bucket_cap_mb": CAP, **options}
    return prepare_for_gradient_release(model, optimizer, process_group=group, **options)


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    state = theirs.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in ours.state_dict().items())


def assert_same_everywhere(model: nn.Module) -> None:
    for name, x in model.state_dict().items():
        told = x.clone()
        dist.broadcast(told, 0)
        assert torch.equal(told, x), name
