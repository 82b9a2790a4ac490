"""MARS as an option of AdamW and Lion: what it needs, what it refuses, what it is for."""

from typing import Any

import pytest
import torch
from cases import assert_moved_alike, problem
from refusals import Scene, refuses
from torch import nn

from optimi_func import AdamW, Lion, adamw, lion

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64


@pytest.mark.parametrize("make", [adamw, lion])
def test_the_former_gradient_is_kept_with_the_option_alone(make: Any) -> None:
    p = torch.ones(3, dtype=torch.bfloat16)
    assert not hasattr(make(lr=0.1).init(p).leaves.rule_state, "prev_grad")
    value = make(lr=0.1, mars=0.025)
    state = value.init(p)
    assert state.leaves.prev_grad.dtype == torch.bfloat16
    g = torch.tensor([0.5, -2.0, 0.0], dtype=torch.bfloat16)
    assert torch.equal(value.step(p, g, state)[1].leaves.prev_grad, g)


def test_gradients_are_clipped_to_one_by_tensor() -> None:
    """So a step does not depend on the scale of large ones, but on that of small ones."""
    p, g = torch.zeros(2, dtype=DOUBLE), torch.tensor([30.0, 40.0], dtype=DOUBLE)
    for factor, m in ((1.0, [0.06, 0.08]), (7.0, [0.06, 0.08]), (1e-3, [0.003, 0.004])):
        value = adamw(lr=0.1, mars=0.025)
        state = value.step(p, factor * g, value.init(p))[1]
        want = torch.tensor(m, dtype=DOUBLE)
        torch.testing.assert_close(state.leaves.exp_avg, want, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("kind", "make"), [(AdamW, adamw), (Lion, lion)])
def test_the_factor_may_be_a_schedule_and_appear_in_mid_run(kind: Any, make: Any) -> None:
    p0, grads = problem(steps=12)
    p = nn.Parameter(p0.clone())
    optimizer = kind([p], lr=0.1, mars=lambda step: 0.0 + 0.01 * step, **EAGER)
    q, state = p0, make(lr=0.1, mars=0.0001).init(p0)
    for i, g in enumerate(grads):
        p.grad = g
        optimizer.step()
        q, state = make(lr=0.1, mars=torch.tensor(0.01 * i, dtype=DOUBLE)).step(q, g, state)
    assert_moved_alike(p0, p.detach(), q, 1e-12)
    late = kind([p], lr=0.1, **EAGER)
    late.step()
    assert "prev_grad" not in late.state[p]
    late.param_groups[0]["mars"] = 0.025
    late.step()
    assert torch.equal(late.state[p]["prev_grad"], grads[-1]) and late.state[p]["step"] == 2


@refuses({"AdamW([w], amsgrad=True, mars=0.025)": r"amsgrad=True with mars=0\.025"})
def test_what_it_refuses() -> Scene:
    return {"w": torch.ones(3, requires_grad=True)}
