"""Complex parameters on shards and on replicas, on gloo."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from cases import CLASSES
from one_process import (
    Training,
    as_one_process,
    assert_alike,
    fully_sharded,
    of,
    parameters,
    replicated,
)
from torch import Tensor, nn
from worlds import raises, world

from optimi_func import AdamW, Storage


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


def batch(i: int) -> Tensor:
    source = torch.Generator().manual_seed(i)
    return torch.randn(8, 64, dtype=torch.complex64, generator=source)


def training(cls: Any, release: Any = None, **options: Any) -> Training:
    how: dict[str, Any] = {"batch": batch, "loss": lambda model, x: model(x)}
    return Training(Net, of(cls, lr=0.02, **options), steps=3, release=release, **how)


@world(full=[2])
def test_fsdp2_with_and_without_release_is_one_process() -> None:
    among = replace(fully_sharded(), share=lambda x: x)
    rows: list[Any] = [(CLASSES[name], {}) for name in ("adamw", "lamb", "prodigy")]
    rows.append((AdamW, {"storage": Storage(moments="8bit")}))
    for cls, options in rows:
        than = training(cls, **options).alone
        for release in (None, {}):
            about, here = (cls, options, release), training(cls, release, **options)
            as_one_process(here, among, tolerance=1e-5, about=about, than=than)


@world(full=[2])
def test_averages_of_complex_gradients() -> None:
    """Averages of complex gradients; a narrower dtype for them is refused."""
    among = replace(replicated(), share=lambda x: x)
    there = replace(training(AdamW, {}), model=lambda: Net(dist.get_rank()))
    begun = replace(there, release={"reduce_dtype": torch.bfloat16})
    with raises(ValueError, "reduce_dtype=torch.bfloat16 with part.weight, which is comp"):
        begun.run(among)
    ours, theirs = there.run(among), training(AdamW).alone
    starts = training(AdamW).starts
    assert_alike(parameters(ours), parameters(theirs), starts, 1e-6)
