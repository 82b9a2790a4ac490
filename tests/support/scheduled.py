"""A run of an AdamW under a learning rate schedule: torch's, ours, or in backward."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

import optimi_func
from optimi_func import prepare_for_gradient_release

STEPS = 16


def drive(
    cls: Any, make: Callable[[Any], Any], lr: Any, release: bool = False
) -> tuple[list[Any], list[torch.Tensor]]:
    """What each step found in its groups, and where the parameters ended."""
    options: dict[str, Any] = {}
    if cls is optimi_func.AdamW:
        options = {"compile": False, "gradient_release": release}
    model = torch.nn.ParameterList(start())
    own = [lr.clone() if torch.is_tensor(lr) else lr for _ in model]
    groups = [{"params": [p], "lr": x} for p, x in zip(model, own)]
    numbers = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = cls(groups, lr=lr, **numbers, **options)
    if release:
        prepare_for_gradient_release(model, optimizer)
    schedule = make(optimizer)
    seen = []
    for i in range(STEPS):
        seen.append([(float(g["lr"]), *g["betas"]) for g in optimizer.param_groups])
        generator = torch.Generator().manual_seed(i)
        grads = [torch.randn(p.shape, generator=generator) for p in model]
        sum((p * g.double()).sum() for p, g in zip(model, grads)).backward()
        optimizer.step()
        optimizer.zero_grad()
        # A loss that no longer falls, for those who want one.
        schedule.step(*[1.0] * ("metrics" in inspect.signature(schedule.step).parameters))
    kinds = {type(g["lr"]) for g in optimizer.param_groups}
    assert kinds == {torch.Tensor if torch.is_tensor(lr) else float}
    return seen, [p.detach() for p in model]


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(3, 2), (4,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
