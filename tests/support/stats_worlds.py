"""`Stats` in several processes: norms of whole tensors."""

from pathlib import Path
from typing import Any

import pytest
import replicas as on_replicas
import torch.distributed as dist
from shards import batch, flat_mesh, loss_of, mine, plain, sharded

from optimi_func import AdamW, MuonAdamW, Stats, prepare_for_gradient_release

EAGER: dict[str, Any] = {"compile": False}


def expected() -> list[Any]:
    """The numbers of one process, step by step."""
    model, found = plain(), list[Any]()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, **EAGER)
    measured = Stats(optimizer)
    for i in range(3):
        measured.track()
        loss_of(model, batch(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(measured.stats(by="parameter"))
    return found


def shards(folder: Path) -> None:
    """Shards under fully_shard, with step() and under release: one message."""
    whole, send = expected(), dist.all_reduce
    for release in (False, True):
        model = sharded(flat_mesh())
        way: dict[str, Any] = {"gradient_release": release, **EAGER}
        optimizer = AdamW(model.named_parameters(), lr=1e-2, **way)
        if release:
            prepare_for_gradient_release(model, optimizer)
        measured = Stats(optimizer)
        for i in range(3):
            measured.track()
            loss_of(model, mine(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent: list[Any] = []
            dist.all_reduce = lambda *x, sent=sent, **k: (sent.append(x), send(*x, **k))[1]
            found = measured.stats(by="parameter")
            dist.all_reduce = send
            assert len(sent) == 1
            for key, one in whole[i].items():
                one = {k: x for k, x in one.items() if not (release and k == "grad_norm")}
                assert found[key] == pytest.approx(one, rel=1e-9), key


def replicas(folder: Path) -> None:
    """Release on replicas, and Muon's matrices divided among processes."""
    model = on_replicas.net()
    handle = on_replicas.prepare(model, on_replicas.adamw(model, True))
    optimizer: Any = handle.optimizer
    (measured := Stats(optimizer)).track()
    on_replicas.loss_of(model, on_replicas.batch(0)).backward()
    optimizer.step()
    found = [measured.stats()["all"]]
    handle.remove()
    way: dict[str, Any] = {"process_group": dist.group.WORLD, **EAGER}
    muon = MuonAdamW(model, lr=0.1, **way)
    (measured := Stats(muon)).track()
    for p in model.parameters():
        p.grad = p.detach().sin()
    muon.step()
    found.append(measured.stats()["all"])
    every: list[Any] = [None, None]
    dist.all_gather_object(every, found)
    assert every[0] == every[1] and found[0]["update_norm"] > 0
