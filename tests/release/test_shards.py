"""Gradient release and Schedule-Free on what fully_shard divides, in a world of one."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from optimi_func import (
    SGD,
    AdamW,
    MuonAdamW,
    ScheduleFreeAdamW,
    prepare_for_gradient_release,
)
from optimi_func.core import torch_private

EAGER: dict[str, Any] = {"compile": False}
BLOCKS = 6


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def most_alive(names: tuple[str, ...], norms: bool) -> int:
    """Return how many blocks' gradients have memory at once, at most."""
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    last = nn.LayerNorm if norms else nn.Identity
    blocks = [nn.Sequential(nn.Linear(128, 128), last(128)) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks)
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-3, gradient_release=True, **EAGER)
    buffers: dict[int, StorageWeakRef] = {}
    alive: list[int] = []

    def seen(p: Any) -> None:
        storage = p.grad.to_local().untyped_storage()
        buffers[storage._cdata] = StorageWeakRef(storage)
        alive.append(sum(not x.expired() for x in buffers.values()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(seen)
    with prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True):
        model(torch.randn(2, 128)).sum().backward()
    return max(alive)


@pytest.mark.parametrize("norms", [False, True])
def test_small_gradients_that_wait_keep_no_block_alive(norms: bool) -> None:
    assert most_alive(("shards",), norms) == 1


def test_torch_keeps_the_gradients_of_copies() -> None:
    """docs/distributed.md says so: if a new torch frees them, it has to say that."""
    assert most_alive(("copies", "shards"), False) == BLOCKS


def test_private_groups_of_fully_shard() -> None:
    """The module of a shard, which has torch's own reshard, and what it has not reduced."""
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    for part in (model[0], model, other):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    shards = [*model.parameters()]
    for some, modules in ((shards, [model[0], model]), (shards[:1], [model[0]])):
        found = torch_private._fsdp_groups(some)
        assert {module for module, _ in found} == {*modules}
    assert torch_private._fsdp_groups([torch.ones(2)]) == []
    model(torch.ones(1, 2))
    gathered = model[2].weight
    assert not isinstance(gathered, DTensor)
    torch_private.reshard(shards[:1])
    assert model[2].weight is gathered
    torch_private.reshard(shards)
    assert model[2].weight is shards[4]
    model.set_requires_gradient_sync(False)
    assert torch_private.has_unreduced_grads(shards[:1])
    assert not torch_private.has_unreduced_grads(other.parameters())


POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "mixed": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize(
    "switch", ["set_requires_gradient_sync", "set_requires_all_reduce"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_two_passes_refuse_what_was_not_reduced(policy: str, switch: str) -> None:
    """Measured alone, the last micro-batch would be clipped too little, or the only one."""
    names = ("copies", "shards")

    def make(release: bool, **options: Any) -> Any:
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
        fully_shard(model, mesh=mesh, mp_policy=POLICIES[policy])
        optimizer = SGD(model.parameters(), lr=1.0, gradient_release=release, **EAGER)
        if release:
            return (
                model,
                optimizer,
                prepare_for_gradient_release(model, optimizer, **options),
            )
        return model, optimizer, None

    def loss(model: Any, i: int) -> Tensor:
        return 3 * model(torch.eye(4)[i : i + 1]).float().sum()

    def moved(model: Any) -> Tensor:
        return 1 - model.weight.detach().full_tensor()

    model, optimizer, _ = make(False)
    for i in range(2):
        model.set_requires_gradient_sync(i == 1)
        loss(model, i).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    wanted = moved(model)
    assert wanted.norm().item() == pytest.approx(1.0, rel=1e-2)

    model, optimizer, handle = make(True, clip_global_norm=1.0)
    getattr(model, switch)(False)
    with pytest.raises(RuntimeError, match=r"clip_global_norm=1\.0 after or in a backward"):
        handle.backward(lambda: loss(model, 0))
    loss(model, 0).backward()  # nobody sees it but fully_shard
    getattr(model, switch)(True)
    with pytest.raises(RuntimeError, match="reduce every backward, with accumulation="):
        handle.backward(lambda: loss(model, 1))
    assert not moved(model).any() and not optimizer.state
    # Both micro-batches are there still.
    handle.options = replace(handle.options, clip_global_norm=None)
    handle.backward(lambda: loss(model, 1))
    handle.options = replace(handle.options, clip_global_norm=1.0)
    assert torch.equal(moved(model), torch.tensor([[3.0, 3.0, 0.0, 0.0]]))
    nn.init.ones_(model.weight)
    optimizer.state.clear()

    # What the error says to do.
    handle.accumulation, handle.accumulation_steps = "buffer", 2
    for i in range(2):
        handle.backward(lambda i=i: loss(model, i))
    torch.testing.assert_close(moved(model), wanted, rtol=1e-2, atol=1e-3)


def ended(shard: bool, release: bool, evaluations: tuple[str, ...]) -> list[Tensor]:
    """Return the losses of some evaluations, and the parameters after training on."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).double()
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = ScheduleFreeAdamW(
        model.parameters(), lr=0.1, gradient_release=release, **EAGER
    )
    if release:
        handle = prepare_for_gradient_release(model, optimizer)
    x = torch.randn(16, 4, dtype=torch.float64)

    def loss() -> Tensor:
        return (model(x).squeeze() - x.sum(1)).square().mean()

    found: list[Tensor] = []
    for i in range(8):
        if i == 4:
            for mode in evaluations:
                getattr(optimizer, mode)()
                with torch.no_grad():
                    found.append(loss())
            optimizer.train()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    if release:
        handle.remove()
    whole = [p.full_tensor() if shard else p for p in model.parameters()]
    return [*found, *[p.detach() for p in whole]]


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("evaluations", [("eval",), ("train", "eval", "train")], ids=len)
def test_an_evaluation_between_steps_is_not_trained_on(
    release: bool, evaluations: tuple[str, ...]
) -> None:
    """fully_shard keeps the root gathered after it, with what the parameters were."""
    wanted = ended(False, False, evaluations)
    found = ended(True, release, evaluations)
    assert all(map(torch.equal, found, wanted))


def idle_steps(optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("cls", [AdamW, MuonAdamW, SGD])
def test_an_optimizer_made_before_fully_shard_says_so(cls: Any) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    given = model if cls is MuonAdamW else model.named_parameters()
    optimizer = cls(given, lr=0.1, **EAGER)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for i in range(4):
        model(torch.ones(1, 4)).sum().backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        texts = [str(x.message) for x in said]
        assert len(texts) == (i == 1), texts
        assert not texts or "trainable parameters (['0.weight'], ...) has had" in texts[0]
        optimizer.zero_grad()
    # Made after it, the first steps may be without gradients.
    idle_steps(AdamW(model.parameters(), lr=0.1, **EAGER), 3)


def test_steps_without_gradients_are_no_mistake_later() -> None:
    """A delayed actor, a frozen phase, gradients that hooks take, and release."""
    model = nn.Linear(4, 2)
    x = torch.ones(1, 4)
    optimizer = AdamW(model.parameters(), lr=0.1, **EAGER)
    idle_steps(optimizer, 1)
    model(x).sum().backward()
    optimizer.step()
    assert optimizer._empty_steps is None  # nothing is counted any more
    optimizer.zero_grad()
    idle_steps(optimizer, 5)
    model.requires_grad_(False)
    idle_steps(AdamW(model.parameters(), lr=0.1, **EAGER), 3)
    model.requires_grad_(True)
    optimizer = AdamW(model.parameters(), lr=0.1, gradient_release=True, **EAGER)

    def hook(p: Any) -> None:
        optimizer.step(param=p)
        optimizer.zero_grad(param=p)

    hooks = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
    for each in hooks:
        each.remove()
    prepare_for_gradient_release(model, optimizer)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
