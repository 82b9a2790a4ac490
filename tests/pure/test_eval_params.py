"""Where to evaluate what a pure optimizer trains: alone, in transforms, in torch.func."""

from typing import Any

import pytest
import torch
from cases import NAMES, SCHEDULE_FREE, Case
from torch import Tensor
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import adamw, schedule_free_adamw, schedule_free_sgd, sgd
from optimi_func.transforms import (
    apply_if_finite,
    chain,
    clip_value,
    ema,
    every_k,
    masked,
    partition,
)

DOUBLE = torch.float64


def problem(steps: int = 6) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    shapes = {"w": (4, 3), "b": (3,)}
    draw = [
        {k: torch.randn(x, dtype=DOUBLE) for k, x in shapes.items()}
        for _ in range(steps + 1)
    ]
    return draw[0], draw[1:]


def trained(optimizer: Any, steps: int = 6) -> tuple[Any, Any]:
    params, grads = problem(steps)
    state = optimizer.init(params)
    for g in grads:
        params, state = optimizer.step(params, g, state)
    return params, state


@pytest.mark.parametrize("name", NAMES)
def test_of_most_rules_it_is_the_parameters(name: str) -> None:
    torch.manual_seed(0)
    p = {"w": torch.randn(4, 4, dtype=DOUBLE)}
    optimizer = Case(name).functional()
    state = optimizer.init(p)
    assert torch.equal(optimizer.eval_params(p, state)["w"], p["w"])
    for _ in range(7):
        p, state = optimizer.step(p, pytree.tree_map(torch.cos, p), state)
    found = optimizer.eval_params(p, state)
    assert (found is p) == (name not in SCHEDULE_FREE)
    assert torch.equal(found["w"], p["w"]) == (name not in SCHEDULE_FREE)


def test_transforms_ask_their_optimizer() -> None:
    inner = schedule_free_adamw(lr=0.1, warmup_steps=3)
    params, state = trained(inner)
    want = inner.eval_params(params, state)
    for optimizer in (
        chain(clip_value(1e9), inner),
        apply_if_finite(inner),
        every_k(inner, 1),
        masked(inner, "*"),
        apply_if_finite(chain(clip_value(1e9), inner)),
    ):
        now, outer = trained(optimizer)
        found = optimizer.eval_params(now, outer)
        for key, x in want.items():
            torch.testing.assert_close(found[key], x, rtol=1e-12, atol=1e-13)
            assert not torch.equal(found[key], now[key])
    # In the midst of a cycle nothing has moved yet.
    optimizer = every_k(inner, 4)
    params, outer = trained(optimizer, 10)
    other = inner.eval_params(params, outer.inner)
    for key, x in optimizer.eval_params(params, outer).items():
        assert torch.equal(x, other[key])


def test_a_partition_asks_each_part() -> None:
    optimizer = partition(("w", schedule_free_sgd(lr=0.1)), rest=adamw(lr=0.1))
    params, state = trained(optimizer)
    found = optimizer.eval_params(params, state)
    assert found["b"] is params["b"]
    assert not torch.equal(found["w"], params["w"])
    plain = partition(("w", sgd(lr=0.1)), rest=adamw(lr=0.1))
    params, state = trained(plain)
    assert plain.eval_params(params, state) is params


class Foreign:
    """A pure optimizer of somebody's own."""

    def init(self, params: Any, **options: Any) -> Any:
        return ()

    def step(self, params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        return params, state


def test_where_it_cannot_be_said() -> None:
    params, _ = problem()
    for average in (ema(schedule_free_sgd(lr=0.1), 0.9), ema(sgd(lr=0.1), 0.9)):
        with pytest.raises(ValueError, match=r"state\.average"):
            average.eval_params(params, average.init(params))
    other = chain(clip_value(1.0), Foreign())
    with pytest.raises(TypeError, match="Foreign"):
        other.eval_params(params, other.init(params))
    state = optimi_func.schedule_free_sgd_init(params)
    with pytest.raises(ValueError, match="optimizer needs"):
        schedule_free_adamw(lr=0.1).eval_params(params, state)


def test_numbers_of_a_state_that_do_not_fit() -> None:
    optimizer = schedule_free_sgd(lr=0.1)
    params, state = trained(optimizer)
    leaf = state.leaves["w"]
    assert leaf.weight_sum.item() == pytest.approx(6 * 0.1**2)
    assert leaf.lr_max.item() == pytest.approx(0.1)
    assert "weight_sum" in repr(leaf)
    bare = optimi_func.LeafState(leaf.rule_state, None)
    with pytest.raises(ValueError, match=r"running scalars \(\)"):
        optimizer.step(params, params, state._replace(leaves={"w": bare, "b": bare}))
    vector = leaf.running._replace(lr_max=torch.ones(2))
    odd = optimi_func.LeafState(leaf.rule_state, None, vector)
    with pytest.raises(ValueError, match=r"'lr_max'\] has shape \(2,\).*shape \(\)"):
        optimizer.step(params, params, state._replace(leaves={"w": odd, "b": odd}))


def test_it_can_be_differentiated_and_vmapped() -> None:
    """Through lr, also by way of the weights; each member has its own."""
    params, grads = problem()

    def end(lr: Tensor) -> Tensor:
        now, state = params, schedule_free_adamw(lr=lr).init(params)
        for i, g in enumerate(grads):
            optimizer = schedule_free_adamw(lr=lr * (1.0 + i), weight_lr_power=1.0)
            now, state = optimizer.step(now, g, state)
        found = optimizer.eval_params(now, state)
        return sum((x * x).sum() for x in found.values())  # type: ignore[return-value]

    lr, h = torch.tensor(0.05, dtype=DOUBLE), 1e-6
    want = (end(lr + h) - end(lr - h)) / (2 * h)
    assert grad(end)(lr).item() == pytest.approx(want.item(), rel=1e-7)
    lrs = torch.tensor([0.02, 0.05, 0.1], dtype=DOUBLE)
    torch.testing.assert_close(vmap(end)(lrs), torch.stack([end(x) for x in lrs]))


def test_bfloat16_parameters_are_evaluated_as_they_are_meant() -> None:
    p = torch.randn(50).to(torch.bfloat16)
    optimizer = schedule_free_sgd(lr=1e-3)
    state = optimizer.init(p)
    for _ in range(50):
        p, state = optimizer.step(p, torch.randn(50), state)
    leaf = state.leaves
    y = p.double() + leaf.kahan_comp.double()
    want = (y - 0.1 * leaf.z.double()) / 0.9
    found = optimizer.eval_params(p, state)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, want.to(torch.bfloat16))
