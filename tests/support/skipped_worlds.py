"""Steps that all processes skip because one has a gradient that is not finite."""

import math
from pathlib import Path
from typing import Any

import replicas as on_replicas
import torch
import torch.distributed as dist
from shards import EAGER, assert_close, batch, flat_mesh, loss_of, mine, plain, sharded
from shards import snapshot as taken
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from optimi_func import AdamW, Muon, MuonAdamW, prepare_for_gradient_release

# Of a class and, under release, of the handle.
SKIP: dict[str, Any] = {"skip_nonfinite": "step"}
RELEASED: list[dict[str, Any]] = [
    {"clip_global_norm": math.inf},
    {"clip_global_norm": 0.1},
    {"accumulation": "buffer"},
]
BAD = 1  # the step that is skipped


class Counted:
    """The number of messages that are reduced."""

    def __init__(self) -> None:
        self.count, self._send = 0, dist.all_reduce

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._send(*args, **kwargs)


def spoiled(g: Any) -> None:
    """Write a NaN into the shard of one process."""
    part = g.to_local() if hasattr(g, "to_local") else g
    if dist.get_rank() == 1 and part.numel():
        part.view(-1)[:1] = float("nan")


def single(clip: float = math.inf) -> list[list[Tensor]]:
    """The ends of the steps of one process, which leaves the bad one out."""
    model, found = plain(), list[list[Tensor]]()
    optimizer = AdamW(model.parameters(), lr=1e-2, **EAGER)
    for i in range(3):
        loss_of(model, batch(i)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if i != BAD:
            optimizer.step()
        optimizer.zero_grad()
        found.append(taken(model))
    return found


def shards(folder: Path) -> None:
    """A class under fully_shard: one message a step."""
    model, send = sharded(flat_mesh()), dist.all_reduce
    start, expected = taken(model), single()
    optimizer = AdamW(model.parameters(), lr=1e-2, **SKIP, **EAGER)
    for i in range(3):
        loss_of(model, mine(i)).backward()
        if i == BAD:
            spoiled(model.second.weight.grad)
        dist.all_reduce = counted = Counted()
        optimizer.step()
        dist.all_reduce = send
        assert counted.count == 1
        optimizer.zero_grad()
        assert_close(taken(model), expected[i], start, 1e-9)
    assert optimizer.skipped_steps == 1
    assert {int(x["step"]) for x in optimizer.state.values()} == {2}


def released_shards(folder: Path) -> None:
    """Release under fully_shard, by two passes and by sums that step() ends."""
    for options in RELEASED:
        model, bad = sharded(flat_mesh()), [False]

        def spoil(p: Any, bad: list[bool] = bad) -> None:
            if bad[0]:
                spoiled(p.grad)

        model.second.weight.register_post_accumulate_grad_hook(spoil)
        way = {"gradient_release": True, **EAGER}
        optimizer = AdamW(model.parameters(), lr=1e-2, **way)
        handle = prepare_for_gradient_release(
            model, optimizer, ignore_existing_hooks=True, **options, **SKIP
        )
        start, expected = taken(model), single(options.get("clip_global_norm", math.inf))
        for i in range(3):
            bad[0] = i == BAD
            handle.backward(lambda i=i, model=model: loss_of(model, mine(i)))
            optimizer.step()
            optimizer.zero_grad()
            assert_close(taken(model), expected[i], start, 1e-9)
        assert set(handle.skipped.values()) == {1}
        assert len(handle.skipped) == len(handle.params)
        assert not handle.accumulating


def replicas(folder: Path) -> None:
    """Muon with process_group=: a NaN that only one process has skips the step in both."""
    for cls in (Muon, MuonAdamW):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
        params = [p for p in model.parameters() if p.dim() == 2]
        whole = DistributedDataParallel(model)
        how = {"process_group": dist.group.WORLD, **SKIP, **EAGER}
        optimizer = cls(model if cls is MuonAdamW else params, lr=0.1, **how)
        for i in range(3):
            before = taken(model)
            whole(torch.full((2, 4), 1.0 + i + dist.get_rank())).sum().backward()
            if i == BAD:
                spoiled(params[0].grad)
            optimizer.step()
            whole.zero_grad()
            same = all(map(torch.equal, before, taken(model)))
            assert same == (i == BAD)
            on_replicas.assert_same_everywhere(model)
        assert optimizer.skipped_steps == 1


def released_replicas(folder: Path) -> None:
    """Release on replicas: averages are NaN in all, so no message is needed."""
    for options in RELEASED:
        model = on_replicas.net()
        handle = on_replicas.prepare(
            model, on_replicas.adamw(model, True), **options, **SKIP
        )
        for i in range(3):
            x, before = on_replicas.batch(i), taken(model)
            if i == BAD and dist.get_rank() == 1:
                x[0, 0] = float("inf")
            handle.backward(lambda x=x, model=model: on_replicas.loss_of(model, x))
            handle.step()
            assert all(map(torch.equal, before, taken(model))) == (i == BAD)
            on_replicas.assert_same_everywhere(model)
        assert set(handle.skipped.values()) == {1}
        handle.remove()
