"""Rules of users on shards, on gloo."""

from typing import Any
from unittest import mock

import torch
from apollo import APOLLO
from conda import Conda
from d_adaptation import DAdaptation
from galore import GaLore
from kourkoutas import Kourkoutas
from lars import LARS
from mars import MARS
from own_rules import NormedLAMB, Sphere, Tangent
from peaks import Peak
from psgd import PSGD
from sgld import SGLD
from shards import EAGER, flat_mesh, full, placed
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from worlds import world

# By means before the direction, by whole matrices, and by sums over all parameters.
RULES: list[tuple[Any, dict[str, Any]]] = [
    (LARS, {"lr": 0.1, "trust": 0.1, "l2": 0.1}),
    (MARS, {"lr": 0.1}),
    (Kourkoutas, {"lr": 0.1, "eps": 1e-2}),  # and numbers that last
    (NormedLAMB, {"lr": 0.1, "weight_decay": 0.1}),  # and of the direction
    (Peak, {"lr": 0.1}),  # maxima before the direction and of it
    (Tangent, {"lr": 0.1, "weight_decay": 0.1}),  # and of the finished delta
    (Sphere, {"lr": 0.1}),  # of a map's
    (PSGD, {"lr": 0.1}),
    (SGLD, {"lr": 0.1}),
    (GaLore, {"lr": 0.1, "rank": 2, "gap": 2}),
    (APOLLO, {"lr": 0.1, "rank": 2, "gap": 2}),
    (Conda, {"lr": 0.1, "gap": 2}),  # which reads a moment
    (DAdaptation, {"lr": 0.1, "first": 0.1}),
]


@world(full=[2])
def test_steps_of_users_rules_are_those_of_one_process() -> None:
    """Eager, foreach and kernels, float64 and bfloat16, the class and the pure step."""
    sent: list[Any] = []
    reduce = dist.all_reduce

    def counted(*args: Any, **more: Any) -> Any:
        sent.append(args)
        return reduce(*args, **more)

    def train(cls: Any, hyper: Any, cut: int | None, dtype: Any, how: Any) -> list[Any]:
        torch.manual_seed(3)
        put = (lambda x: x) if cut is None else placed(flat_mesh(), Shard(cut))
        few = cls in (PSGD, GaLore, Sphere, APOLLO, Conda)
        shapes = [(7, 9), (5, 5), (3,)][: 2 if few else 3]
        params = [nn.Parameter(put(torch.randn(s).to(dtype))) for s in shapes]
        optimizer, value = cls(params, **hyper, **how), cls.pure(**hyper)
        tree = [p.detach().clone() for p in params]
        state = value.init(tree)
        for _ in range(4):
            grads = [put(torch.randn(s).to(dtype)) for s in shapes]
            for p, g in zip(params, grads):
                p.grad = g
            sent.clear()
            with mock.patch.object(dist, "all_reduce", counted):
                optimizer.step()
            # One for each round and kind.
            messages = {LARS: 1, Kourkoutas: 1, NormedLAMB: 2, Peak: 4, Tangent: 3}
            if cls in messages and cut is not None:
                assert len(sent) == messages[cls], (cls, how, cut, len(sent))
            tree, state = value.step(tree, grads, state)
        return [*map(full, params), *map(full, tree)]

    for cls, hyper in RULES:
        ways: list[Any] = [(torch.float64, EAGER)]
        if cls is SGLD:
            ways.append((torch.float32, EAGER))
        if cls in (LARS, Kourkoutas):
            ways.append((torch.bfloat16, {"foreach": True}))
        if cls in (LARS, NormedLAMB, Peak, Kourkoutas, Tangent, Sphere):
            ways.append((torch.float32, {"compile": True}))
        for dtype, how in ways:
            alone = train(cls, hyper, None, dtype, how)
            for cut in (0, 1):
                found = train(cls, hyper, cut, dtype, how)
                most = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
                for x, want in zip(found, alone):
                    error = (x - want).abs().max().item()
                    assert error <= most, (cls, dtype, how, cut, error)
