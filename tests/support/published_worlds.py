"""What several processes check of users' rules: their steps are those of one process."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import worlds
from own_rules import LARS, MARS, PSGD, SGLD, DAdaptation, GaLore, NormedLAMB
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# By means before the direction, by whole matrices, and by sums over all parameters.
RULES: list[tuple[Any, dict[str, Any]]] = [
    (LARS, {"lr": 0.1}),
    (MARS, {"lr": 0.1}),
    (NormedLAMB, {"lr": 0.1, "weight_decay": 0.1}),  # and of the direction
    (PSGD, {"lr": 0.1}),
    (SGLD, {"lr": 0.1}),
    (GaLore, {"lr": 0.1, "gap": 2}),
    (DAdaptation, {"lr": 0.1, "first": 0.1}),
]


def published_rules(folder: Path) -> None:
    """Eager, foreach and kernels, float64 and bfloat16, the class and the pure step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sent: list[Any] = []
    reduce = dist.all_reduce

    def counted(*args: Any, **more: Any) -> Any:
        sent.append(args)
        return reduce(*args, **more)

    def train(cls: Any, hyper: Any, cut: int | None, dtype: Any, how: Any) -> list[Any]:
        torch.manual_seed(3)

        def placed(x: Any) -> Any:
            if cut is None:
                return x
            where = Shard(cut) if x.dim() > cut else Replicate()
            return distribute_tensor(x, mesh, [where], src_data_rank=None)

        shapes = [(7, 9), (5, 5), (3,)][: 2 if cls in (PSGD, GaLore) else 3]
        params = [nn.Parameter(placed(torch.randn(s).to(dtype))) for s in shapes]
        optimizer, value = cls(params, **hyper, **how), cls.pure(**hyper)
        tree = [p.detach().clone() for p in params]
        state = value.init(tree)
        for _ in range(4):
            grads = [placed(torch.randn(s).to(dtype)) for s in shapes]
            for p, g in zip(params, grads):
                p.grad = g
            sent.clear()
            with mock.patch.object(dist, "all_reduce", counted):
                optimizer.step()
            if cls in (LARS, NormedLAMB) and cut is not None:  # a message for each round
                assert len(sent) == 1 + (cls is NormedLAMB), (cls, how, cut, len(sent))
            tree, state = value.step(tree, grads, state)
        return [*map(worlds.full, params), *map(worlds.full, tree)]

    for cls, hyper in RULES:
        ways: list[Any] = [(torch.float64, worlds.EAGER)]
        if cls is SGLD:
            ways.append((torch.float32, worlds.EAGER))
        if cls is LARS:
            ways.append((torch.bfloat16, {"foreach": True}))
        if cls in (LARS, NormedLAMB):
            ways.append((torch.float32, {"compile": True}))
        for dtype, how in ways:
            alone = train(cls, hyper, None, dtype, how)
            for cut in (0, 1):
                found = train(cls, hyper, cut, dtype, how)
                most = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
                for x, want in zip(found, alone):
                    error = (x - want).abs().max().item()
                    assert error <= most, (cls, dtype, how, cut, error)
