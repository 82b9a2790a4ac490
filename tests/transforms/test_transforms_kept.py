"""Transforms kept and given: copies, what schedules return, and state that is stored."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from optimi_func import adamw, lion, sgd
from optimi_func.core.rule import Storage
from optimi_func.transforms import (
    add_noise,
    apply_if_finite,
    centralize,
    chain,
    clip_global_norm,
    clip_param_norm,
    clip_value,
    ema,
    every_k,
    partition,
)


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_chain_steps_alike(copied: Any) -> None:
    gradient = [clip_value(1.0), clip_param_norm(0.9), clip_global_norm(1.0), centralize()]
    inner = chain(*gradient, add_noise(0.1, seed=3), adamw(lr=0.1))
    other = copied(inner)
    p, g = {"w": torch.ones(2, 2)}, {"w": torch.tensor([[1.0, 2.0], [3.0, -4.0]])}
    (a, s), (b, t) = (o.step(p, g, o.init(p)) for o in (inner, other))
    for x, y in zip(pytree.tree_leaves((a, s)), pytree.tree_leaves((b, t))):
        assert torch.equal(x, y)


SCHEDULED = {
    "lr": lambda schedule: sgd(lr=schedule),
    "limit": lambda schedule: chain(clip_value(schedule), sgd(lr=0.1)),
    "max_norm": lambda schedule: chain(clip_global_norm(schedule), sgd(lr=0.1)),
    "std": lambda schedule: chain(add_noise(schedule, seed=1), sgd(lr=0.1)),
    "decay": lambda schedule: ema(sgd(lr=0.1), schedule),
}


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (None, TypeError, "returned None: allowed are numbers"),
        ("0.1", TypeError, "returned '0.1': allowed are numbers"),
        (True, TypeError, "returned True: allowed are numbers"),
        (float("nan"), ValueError, "returned nan: allowed are numbers from 0"),
        (-0.1, ValueError, r"returned -0\.1: allowed are numbers from 0"),
        (torch.ones(1), ValueError, r"returned a tensor of shape \(1,\)"),
    ],
)
def test_what_a_schedule_may_not_return(name, number, error, text) -> None:
    """A host number that the factory would refuse is refused from a schedule too."""
    optimizer = SCHEDULED[name](lambda step: number)
    p = {"w": torch.ones(2)}
    state = optimizer.init(p)
    with pytest.raises(error, match=f"^{name} is a schedule that {text}"):
        optimizer.step(p, p, state)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "std"])
@pytest.mark.parametrize("number", [math.inf, torch.tensor(math.inf)], ids=repr)
def test_only_a_limit_may_be_inf(name, number) -> None:
    made = {**SCHEDULED, "weight_decay": lambda s: sgd(lr=0.1, weight_decay=s)}
    p = {"w": torch.ones(2)}
    optimizer = made[name](lambda step: number)
    with pytest.raises(ValueError, match=f"^{name} is a schedule that returned inf: .*inf"):
        optimizer.step(p, p, optimizer.init(p))
    for limit in ("limit", "max_norm"):
        optimizer = made[limit](lambda step: number)
        moved, _ = optimizer.step(p, p, optimizer.init(p))
        assert torch.equal(moved["w"], torch.full((2,), 0.9))


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), torch.tensor(0.5)], ids=repr)
def test_what_a_schedule_may_return(number) -> None:
    p = {"w": torch.ones(2)}
    for make in SCHEDULED.values():
        scheduled, bound = make(lambda step: number), make(0.5)
        new, _ = scheduled.step(p, p, scheduled.init(p))
        expected, _ = bound.step(p, p, bound.init(p))
        torch.testing.assert_close(new, expected, rtol=1e-6, atol=0)


def mixed_tree() -> dict[str, torch.Tensor]:
    """A matrix large enough for codes, in bfloat16, and a norm's weight in float32."""
    return {"w": torch.randn(64, 128, dtype=torch.bfloat16), "norm": torch.ones(8)}


@pytest.mark.parametrize(
    "rest",
    [adamw(lr=0.1), sgd(lr=0.1), chain(clip_global_norm(1.0), sgd(lr=0.1))],
    ids=["adamw", "sgd", "chained sgd"],
)
@pytest.mark.parametrize("storage", ["compact", "exact"])
def test_parts_are_stored_as_the_whole_would_be(rest, storage: str) -> None:
    """A part without bfloat16 parameters or moments takes of a storage what it can."""
    p = mixed_tree()
    split = partition(("w", adamw(lr=0.1)), rest=rest)
    state = split.init(p, storage=storage)
    whole = adamw(lr=0.1).init(p, storage=storage)
    ours, theirs = state.parts[0].leaves["w"], whole.leaves["w"]
    for x, y in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
        assert x.dtype == y.dtype
    assert ours.kahan_comp.dtype == {"compact": torch.int8, "exact": torch.int16}[storage]
    grads = pytree.tree_map(torch.sin, p)
    new, state = split.step(p, grads, state)
    expected, _ = adamw(lr=0.1).step(p, grads, whole)
    assert torch.equal(new["w"], expected["w"])
    assert not torch.equal(new["norm"], p["norm"])


def test_a_storage_that_no_part_has_a_use_for_is_refused() -> None:
    p = {"w": torch.randn(64, 128), "b": torch.ones(8)}
    with pytest.raises(ValueError, match="no parameter is bfloat16"):
        partition(("w", adamw(lr=0.1)), rest=adamw(lr=0.1)).init(p, storage="compact")
    with pytest.raises(ValueError, match="sgd keeps no moments"):
        split = partition(("w", sgd(lr=0.1)), rest=sgd(lr=0.2))
        split.init(p, storage=Storage(moments="8bit"))


CODED = {
    "chain": lambda: chain(clip_global_norm(1.0), add_noise(0.1, seed=1), adamw(lr=0.01)),
    "every_k": lambda: every_k(adamw(lr=0.01), 2),
    "ema": lambda: ema(adamw(lr=0.01), 0.9),
    "apply_if_finite": lambda: apply_if_finite(adamw(lr=0.01)),
    "partition": lambda: partition(("w", adamw(lr=0.01)), rest=lion(lr=0.01)),
}


@pytest.mark.parametrize("name", CODED)
def test_states_in_codes_save_load_and_vmap(name: str, tmp_path) -> None:
    """Under every transform: the leaves resume to the bit, members equal single runs."""
    optimizer = CODED[name]()

    def run(p, state, steps=3):
        for i in range(steps):
            grads = pytree.tree_map(lambda x, i=i: torch.sin(3.0 * x + i), p)
            p, state = optimizer.step(p, grads, state)
        return p, state

    def start(p):
        return optimizer.init(p, storage="compact")

    p = mixed_tree()
    after, state = run(p, start(p))
    leaves = pytree.tree_leaves(state)
    assert {torch.int8, torch.uint8} <= {x.dtype for x in leaves}
    torch.save(leaves, tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    resumed = pytree.tree_unflatten(loaded, pytree.tree_structure(start(p)))
    for x, y in zip(
        pytree.tree_leaves(run(after, state)), pytree.tree_leaves(run(after, resumed))
    ):
        assert torch.equal(x, y)

    members = pytree.tree_map(lambda x: torch.stack([x, 0.5 * x])[None], p)
    many = torch.func.vmap(torch.func.vmap(lambda p: run(p, start(p), 2)))(members)
    one = pytree.tree_map(lambda x: 0.5 * x, p)
    for x, y in zip(pytree.tree_leaves(many), pytree.tree_leaves(run(one, start(one), 2))):
        assert torch.equal(x[0, 1], y)
