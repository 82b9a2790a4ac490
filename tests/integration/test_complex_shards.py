"""Complex parameters on shards and on replicas, on gloo."""

from dataclasses import replace
from functools import partial
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
from shards import ComplexNet, drawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import raises, world

from optimi_func import AdamW, Storage

BATCH = partial(drawn, 64, torch.complex64)


def training(cls: Any, release: Any = None, **options: Any) -> Training:
    made = of(cls, lr=0.02, **options)
    return Training(ComplexNet, made, BATCH, steps=3, release=release)


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
    there = replace(training(AdamW, {}), model=lambda: ComplexNet(dist.get_rank()))
    begun = replace(there, release={"reduce_dtype": torch.bfloat16})
    with raises(ValueError, "reduce_dtype=torch.bfloat16 with part.weight, which is comp"):
        begun.run(among)
    ours, theirs = there.run(among), training(AdamW).alone
    starts = training(AdamW).starts
    assert_alike(parameters(ours), parameters(theirs), starts, 1e-6)


@world(2)
def test_a_vector_that_is_cut_unevenly() -> None:
    """torch.view_as_real of such a DTensor is a copy, which has all of its elements."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    start, *grads = torch.randn(4, 7, dtype=torch.complex64).unbind()
    whole = nn.Parameter(start.clone())
    part = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    optimizers: list[Any] = [AdamW([p], lr=0.1, compile=False) for p in (whole, part)]
    for g in grads:
        whole.grad, part.grad = g, distribute_tensor(g, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(part.full_tensor().detach(), whole.detach())
    assert not torch.equal(whole.detach(), start)
    for p, optimizer in zip((whole, part), optimizers):
        assert optimizer.state[p]["exp_avg"].shape == (7,)
    assert optimizers[1].state[part]["exp_avg"].placements == (Shard(0),)
