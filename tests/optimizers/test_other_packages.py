"""Rules beside the code of a package that has them: the same movement."""

from typing import Any

import pytest
import torch
from cases import LR, assert_moved_alike, problem, schedule

import optimi_func

# RAdam's silent phase, and its other.
FREE: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
    ("AdamW", {"r": 0.5, "weight_lr_power": 1.0}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.7, "weight_decay": 0.1, "r": 1.0, "weight_lr_power": 0.5}),
    ("RAdam", {}),
    ("RAdam", {"betas": (0.8, 0.95), "weight_decay": 0.1, "r": 0.5}),
    ("RAdam", {"silent_sgd_phase": False, "weight_lr_power": 1.0}),
]


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize(("name", "options"), FREE, ids=str)
def test_equals_schedulefree(name: str, options: Any, scheduled: bool) -> None:
    """200 steps, evaluated in between; what is trained, and what is evaluated."""
    import schedulefree

    p, grads = problem(steps=200)
    if name != "RAdam":
        options = {"warmup_steps": 30, **options}
    lrs = schedule(200) if scheduled else [LR] * 200
    found: list[list[torch.Tensor]] = []
    for make, more in (
        (getattr(schedulefree, f"{name}ScheduleFree"), {"foreach": False}),
        (getattr(optimi_func, f"ScheduleFree{name}"), {"compile": False}),
    ):
        q = torch.nn.Parameter(p.clone())
        optimizer = make([q], lr=LR, **options, **more)
        path: list[torch.Tensor] = []
        optimizer.train()
        for i, (g, lr) in enumerate(zip(grads, lrs)):
            optimizer.param_groups[0]["lr"] = lr
            q.grad = g.clone()
            optimizer.step()
            if i % 20 == 19:
                path.append(q.detach().clone())
                optimizer.eval()
                path.append(q.detach().clone())
                optimizer.train()
        found.append(path)
    for theirs, ours in zip(*found):
        assert_moved_alike(p, ours, theirs, 1e-9)


AdEMAMix, ADOPT = optimi_func.AdEMAMix, optimi_func.ADOPT
PAIRS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (AdEMAMix, {"alpha": 5.0}, {"alpha": 5.0}),
    (
        AdEMAMix,
        {"betas": (0.9, 0.95, 0.99), "alpha_warmup": 40, "beta3_warmup": 40},
        {"betas": (0.9, 0.95, 0.99), "alpha": 8.0, "t_alpha_beta3": 40},
    ),
    (AdEMAMix, {"weight_decay": 0.1}, {"weight_decay": 0.1, "alpha": 8.0, "decoupled": 1}),
    (ADOPT, {}, {}),
    (ADOPT, {"weight_decay": 0.1}, {"weight_decay": 0.1}),
    (ADOPT, {"betas": (0.5, 0.9), "maximize": True}, {"betas": (0.5, 0.9), "maximize": 1}),
]


@pytest.mark.parametrize(("cls", "ours", "theirs"), PAIRS, ids=str)
def test_equals_pytorch_optimizer(cls: Any, ours: Any, theirs: Any) -> None:
    import pytorch_optimizer

    p, grads = problem()
    theirs = dict(theirs)
    if cls is ADOPT:  # its authors count steps from 0, that package from 1
        theirs["clip_lambda"] = lambda step: (step - 1) ** 0.25
    theirs["weight_decouple"] = bool(theirs.pop("decoupled", False))
    other = getattr(pytorch_optimizer, cls.__name__)
    ended: list[torch.Tensor] = []
    for make, options in ((other, {"foreach": False, **theirs}), (cls, ours)):
        q = torch.nn.Parameter(p.clone())
        eager = {"compile": False} if make is cls else {}
        optimizer = make([q], lr=LR, **options, **eager)
        for g, lr in zip(grads, schedule()):
            optimizer.param_groups[0]["lr"] = lr
            q.grad = g.clone()
            optimizer.step()
        ended.append(q.detach())
    assert_moved_alike(p, ended[1], ended[0], 1e-12)


# Its LAMB corrects no bias: a factor that the ratio takes out again where nothing decays,
# or that is 1 where nothing is averaged.
LAMBS: list[dict[str, Any]] = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.1, "betas": (0, 0)},
]


@pytest.mark.parametrize("options", LAMBS, ids=str)
def test_lamb_equals_pytorch_optimizer(options: dict[str, Any]) -> None:
    import pytorch_optimizer

    p, grads = problem()
    grads[3] = 0.1 * grads[2]  # 0 is a direction of its own to an eps of 1e-16
    theirs = {"weight_decouple": False, "max_grad_norm": 0.0, "adam_debias": True}
    ended: list[torch.Tensor] = []
    for make, more in (
        (pytorch_optimizer.Lamb, theirs),
        (optimi_func.LAMB, {"compile": False}),
    ):
        q = torch.nn.Parameter(p.clone())
        optimizer = make([q], lr=LR, eps=1e-16, **options, **more)
        for g, lr in zip(grads, schedule()):
            optimizer.param_groups[0]["lr"] = lr
            q.grad = g.clone()
            optimizer.step()
        ended.append(q.detach())
    assert_moved_alike(p, ended[1], ended[0], 1e-12)
