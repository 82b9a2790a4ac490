"""Gradient release of parameters and moments in codes: the steps of an ordinary loop."""

from typing import Any

import pytest
import torch
from cases import CLASSES, NO_CODES, taken
from released import EAGER, Net, batch
from stored import BF16, assert_same_bits, kept_in_codes, meant
from torch import nn

import optimi_func
from optimi_func import adamw, prepare_for_gradient_release
from optimi_func.core.rule import Storage
from optimi_func.core.runtime import runtime

CODES = ["compact", Storage("exact", "8bit"), Storage("kahan", "8bit")]
# Only middle.weight is large enough to be in codes.
CODED = [False, False, True, False, False, False, False]


def make(name: str, storage: Any, release: bool, dtype: Any = BF16, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Net().to(dtype)
    options = {**EAGER, "lr": 1e-2, "storage": storage, "gradient_release": release}
    if name == "sgd":
        options["momentum"] = 0.9
    cls = CLASSES[name]
    return model, cls(taken(cls, model), **{**options, **more})


def backward(model: nn.Module, i: int) -> None:
    model(batch(i, next(model.parameters()).dtype)).float().square().mean().backward()


# The options of a release, for each of which `ordinary` has the same step without one.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "buffer": {"accumulation": "buffer", "accumulation_steps": 2},
    "value": {"clip_value": 1e-3},
    "param norm": {"clip_param_norm": 0.01},
    "global norm": {"clip_global_norm": 0.01},
    "norms": {"grad_norm": True, "skip_nonfinite": True},
}


def ordinary(model: nn.Module, optimizer: Any, mode: str, steps: int) -> None:
    params = list(model.parameters())
    for i in range(steps):
        backward(model, i)
        if mode == "buffer" and i % 2 == 0:
            continue
        if mode == "value":
            torch.nn.utils.clip_grad_value_(params, 1e-3)
        if mode == "param norm":
            for p in params:
                torch.nn.utils.clip_grad_norm_([p], 0.01)
        if mode == "global norm":
            torch.nn.utils.clip_grad_norm_(params, 0.01)
        optimizer.step()
        optimizer.zero_grad()


def released(model: nn.Module, handle: Any, steps: int) -> None:
    for i in range(steps):
        if handle.options.two_pass:
            handle.backward(lambda i=i: model(batch(i, BF16)).float().square().mean())
        else:
            backward(model, i)


@pytest.mark.parametrize("storage", [*CODES, "exact"], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_released_steps_are_the_ordinary_ones(mode: str, storage: Any) -> None:
    model, optimizer = make("adamw", storage, True)
    with prepare_for_gradient_release(model, optimizer, **MODES[mode]) as handle:
        released(model, handle, 6)
    twin, other = make("adamw", storage, False)
    ordinary(twin, other, mode, 6)
    assert kept_in_codes(optimizer) == [x and storage != "exact" for x in CODED]
    if mode in ("plain", "norms"):
        assert_same_bits(optimizer, other)
        return
    start = make("adamw", storage, False)[0]
    # torch clips gradients where they are, in bfloat16; ours on the way, and sums of two
    # are float32.
    for p, q, x in zip(model.parameters(), twin.parameters(), start.parameters()):
        a, b = meant(p, optimizer.state[p]), meant(q, other.state[q])
        assert (a - b).norm() < 0.05 * (b - x.float()).norm()


# Those that have nothing to keep in codes refuse them.
@pytest.mark.parametrize("name", [n for n in CLASSES if n == "sgd" or n not in NO_CODES])
def test_every_rule_is_released(name: str) -> None:
    model, optimizer = make(name, "compact", True)
    prepare_for_gradient_release(model, optimizer)
    twin, other = make(name, "compact", False)
    for i in range(4):
        backward(model, i)
    ordinary(twin, other, "plain", 4)
    assert kept_in_codes(optimizer).count(True) == 1
    assert_same_bits(optimizer, other)


@pytest.mark.parametrize("storage", CODES, ids=str)
def test_accumulation_in_the_state_is_one_step(storage: Any) -> None:
    """The parameters stay until the last part, and are in the same codes then."""
    ends = []
    for how in ("states", "buffer"):
        model, optimizer = make("adamw", storage, True)
        options = {"accumulation": how, "accumulation_steps": 2}
        prepare_for_gradient_release(model, optimizer, **options)
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, 0)
        assert all(map(torch.equal, before, model.parameters()))
        for i in range(1, 4):
            backward(model, i)
        ends.append(
            [(p, optimizer.state[p], x) for p, x in zip(model.parameters(), before)]
        )
        assert kept_in_codes(optimizer) == CODED
    for (p, state, start), (q, known, _) in zip(*ends):
        assert state["step"] == known["step"] == 2
        a, b = meant(p, state) - start.float(), meant(q, known) - start.float()
        # v adds the parts' squares up: another mean of squares, of the same order.
        assert 0.3 * b.norm() < a.norm() < 3 * b.norm()


def test_a_tree_in_codes_is_released(monkeypatch) -> None:
    """A pure optimizer's state is the storage that it was made in."""
    monkeypatch.setattr(runtime, "uncompilable", {"cpu"})
    monkeypatch.setattr(runtime, "failures", {"cpu": 3})  # and not tried again
    model, _ = make("adamw", None, False)
    handle = prepare_for_gradient_release(model, adamw(lr=1e-2))
    params = dict(model.named_parameters())
    handle.state = optimi_func.adamw_init(params, storage="compact")
    twin, other = make("adamw", "compact", False)
    for i in range(4):
        backward(model, i)
    ordinary(twin, other, "plain", 4)
    leaf = handle.state.leaves["middle.weight"]
    assert leaf.exp_avg.q.dtype == torch.int8 and handle.state.step == 4
    q = other.state[twin.middle.weight]["exp_avg_sq_q"]
    apart = (leaf.exp_avg_sq.q.int() - q.int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 2e-3
