"""Schedules: torch's own lr by lr, hosts and tensors alike, every option, bad input."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import Scene, refuses
from torch.func import grad, jvp, vmap
from torch.optim import lr_scheduler

from optimi_func import adamw, sgd
from optimi_func.schedules import (
    Schedule,
    cosine,
    join,
    linear,
    one_cycle,
    warmup_cosine,
    wsd,
)

PEAK = 0.3


def ours(scale: Any = 1.0) -> dict[str, Schedule]:
    """Schedules of all kinds, whose numbers are multiplied by `scale`."""
    peak, tenth, low = PEAK * scale, 0.1 * scale, 0.01 * scale
    parts = [linear(0.0, peak, steps=5), 0.2 * scale, cosine(0.2 * scale, 0.0, steps=8)]
    start = 0.03 * scale
    return {
        "linear": linear(peak, tenth, steps=10),
        "cosine": cosine(peak, tenth, steps=10),
        "warmup_cosine": warmup_cosine(peak, warmup=5, total=20, start=start, end=low),
        "no warmup": warmup_cosine(peak, warmup=0, total=20),
        "wsd": wsd(peak, warmup=5, total=25, decay=7, end=low),
        "wsd sqrt": wsd(peak, warmup=5, total=25, decay=7, shape="sqrt"),
        "wsd without stable": wsd(peak, warmup=5, total=12, decay=7, shape="cosine"),
        "wsd decay alone": wsd(peak, warmup=0, total=7, decay=7),
        "one_cycle": one_cycle(peak, total=20),
        "join": join(parts, [5, 9]),
    }


SCHEDULES = ours()


def plain(name: str, step: int) -> float:
    """The same written out."""

    def fall(x: float) -> float:
        return 0.5 + 0.5 * math.cos(math.pi * x)

    up = min(step / 5, 1) * PEAK
    late = min(max(step - 18, 0) / 7, 1)
    x20 = min(step / 20, 1)
    if name == "linear":
        return PEAK + (0.1 - PEAK) * min(step / 10, 1)
    if name == "cosine":
        return 0.1 + (PEAK - 0.1) * fall(min(step / 10, 1))
    if name == "warmup_cosine":
        if step < 5:
            return 0.03 + (PEAK - 0.03) * step / 5
        return 0.01 + (PEAK - 0.01) * fall(min((step - 5) / 15, 1))
    if name == "no warmup":
        return PEAK * fall(x20)
    if name == "wsd":
        return up if step < 18 else PEAK + (0.01 - PEAK) * late
    if name == "wsd sqrt":
        return up if step < 18 else PEAK * (1 - math.sqrt(late))
    if name == "wsd without stable":
        return up if step < 5 else PEAK * fall(min((step - 5) / 7, 1))
    if name == "wsd decay alone":
        return PEAK * (1 - min(step / 7, 1))
    if name == "one_cycle":
        low, least = PEAK / 25, PEAK / 25 / 1e4
        if step <= 5:
            return low + (PEAK - low) * (1 - fall(step / 5))
        return least + (PEAK - least) * fall(min((step - 5) / 14, 1))
    if step < 5:
        return up
    return 0.2 if step < 9 else 0.2 * fall(min((step - 9) / 8, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_and_tensors_alike(name: str) -> None:
    schedule = SCHEDULES[name]
    traced = vmap(schedule)(torch.arange(30.0))
    assert traced.dtype == torch.float64
    for step in range(30):
        want = pytest.approx(plain(name, step), rel=1e-13, abs=1e-16)
        assert schedule(step) == want
        assert isinstance(schedule(step), float)
        assert schedule(float(step)) == want
        assert schedule(torch.tensor(float(step))).item() == want
        assert traced[step].item() == want


def lrs_of(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found += scheduler.get_last_lr()
        scheduler.optimizer.step()
        scheduler.step()
    return found


def optimizer(lr: float = PEAK) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


def torch_warmup_cosine() -> lr_scheduler.LRScheduler:
    opt = optimizer()
    up = lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=5)
    down = lr_scheduler.CosineAnnealingLR(opt, T_max=15, eta_min=0.01)
    return lr_scheduler.SequentialLR(opt, [up, down], milestones=[5])


def torch_wsd() -> lr_scheduler.LRScheduler:
    opt = optimizer()
    up = lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=5)
    stay = lr_scheduler.ConstantLR(opt, 1.0)
    down = lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=7)
    return lr_scheduler.SequentialLR(opt, [up, stay, down], milestones=[5, 13])


ODD: Any = {"pct_start": 0.41, "div_factor": 5, "final_div_factor": 50}
TWINS = {
    "linear": (
        linear(PEAK, 0.1 * PEAK, steps=10),
        lambda: lr_scheduler.LinearLR(optimizer(), 1.0, 0.1, total_iters=10),
        20,
    ),
    "cosine": (
        cosine(PEAK, 0.01, steps=12),
        lambda: lr_scheduler.CosineAnnealingLR(optimizer(), T_max=12, eta_min=0.01),
        13,
    ),
    "warmup_cosine": (
        warmup_cosine(PEAK, warmup=5, total=20, start=0.03, end=0.01),
        torch_warmup_cosine,
        21,
    ),
    "wsd": (
        wsd(PEAK, warmup=5, total=20, decay=7, start=0.1 * PEAK, end=0.1 * PEAK),
        torch_wsd,
        21,
    ),
    "one_cycle": (
        one_cycle(PEAK, total=20),
        lambda: lr_scheduler.OneCycleLR(optimizer(), PEAK, total_steps=20),
        20,
    ),
    "one_cycle, odd": (
        one_cycle(PEAK, total=33, shape="linear", **ODD),
        lambda: lr_scheduler.OneCycleLR(
            optimizer(), PEAK, total_steps=33, anneal_strategy="linear", **ODD
        ),
        33,
    ),
}


@pytest.mark.parametrize(("schedule", "twin", "steps"), TWINS.values(), ids=TWINS.keys())
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_torch_has_the_same(schedule: Schedule, twin, steps: int) -> None:
    # OneCycleLR refuses a step more than its own.
    got = lrs_of(twin(), steps - 1)
    want = [schedule(step) for step in range(steps - 1)]
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lambda_lr_follows(name: str) -> None:
    schedule = SCHEDULES[name]
    opt = optimizer(0.07)
    got = lrs_of(lr_scheduler.LambdaLR(opt, schedule.as_lambda(0.07)), 30)
    assert got == pytest.approx([schedule(step) for step in range(30)], rel=1e-15)


@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_differentiate_and_vmap(name: str) -> None:
    """With respect to the peak and the other ends, without a NaN at any step."""

    def total(scale: torch.Tensor) -> torch.Tensor:
        made = ours(scale)[name]
        return sum(made(torch.tensor(float(step))) for step in range(30))

    one = torch.ones((), dtype=torch.float64)
    want = sum(plain(name, step) for step in range(30))
    # All are linear in their numbers.
    assert grad(total)(one).item() == pytest.approx(want, rel=1e-12)
    assert jvp(total, (one,), (one,))[1].item() == pytest.approx(want, rel=1e-12)
    doubled = vmap(total)(torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert doubled.tolist() == pytest.approx([want, 2 * want], rel=1e-12)


def test_one_graph_for_all_steps(graphs) -> None:
    parts = [warmup_cosine(PEAK, warmup=2, total=4), lambda t: 1.0 / (1.0 + t)]
    opt = adamw(lr=join(parts, [3]), betas=(linear(0.8, 0.95, steps=4), 0.99))
    step = torch.compile(opt.step, fullgraph=True, backend="aot_eager")
    p, q = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    state, other = opt.init(p), opt.init(q)
    for _ in range(6):
        p, state = step(p, p.cos(), state)
        q, other = opt.step(q, q.cos(), other)
    assert graphs() == 1
    assert torch.allclose(p, q, rtol=1e-14)


def test_a_schedule_in_an_optimizer_has_the_torch_schedulers_lrs() -> None:
    schedule = warmup_cosine(PEAK, warmup=3, total=10)
    p = torch.zeros((), dtype=torch.float64)
    opt = sgd(lr=schedule)
    state, moves = opt.init(p), []
    for _ in range(12):
        new, state = opt.step(p, torch.ones_like(p), state)
        moves.append((p - new).item())
        p = new
    assert moves == pytest.approx([schedule(step) for step in range(12)], abs=1e-15)


@given(
    warmup=st.integers(0, 50),
    stable=st.integers(0, 50),
    decay=st.integers(1, 50),
    peak=st.floats(1e-6, 10),
    shape=st.sampled_from(["linear", "cosine", "sqrt"]),
)
def test_wsd_rises_stays_and_falls(warmup, stable, decay, peak, shape) -> None:
    total = warmup + stable + decay
    schedule = wsd(peak, warmup=warmup, total=total, decay=decay, shape=shape)
    values = [schedule(step) for step in range(total + 3)]
    assert values[warmup : warmup + stable + 1] == [peak] * (stable + 1)
    assert values[total:] == [0.0] * 3
    assert all(a < b for a, b in pairwise(values[: warmup + 1]))
    fall = values[total - decay : total + 1]
    assert all(a > b for a, b in pairwise(fall))
    longer = wsd(peak, warmup=warmup, total=total + 5, decay=decay, shape=shape)
    assert [longer(step) for step in range(total - decay)] == values[: total - decay]


def test_options_change_the_answer() -> None:
    base = wsd(PEAK, warmup=4, total=20, decay=5)
    others = [
        (base, wsd(PEAK, warmup=5, total=20, decay=5), 2),
        (base, wsd(PEAK, warmup=4, total=21, decay=5), 17),
        (base, wsd(PEAK, warmup=4, total=20, decay=6), 17),
        (base, wsd(PEAK, warmup=4, total=20, decay=5, start=0.1), 1),
        (base, wsd(PEAK, warmup=4, total=20, decay=5, end=0.1), 17),
        (base, wsd(PEAK, warmup=4, total=20, decay=5, shape="sqrt"), 17),
    ]
    cycle = one_cycle(PEAK, total=20)
    others += [
        (cycle, one_cycle(PEAK, total=20, pct_start=0.4), 5),
        (cycle, one_cycle(PEAK, total=20, div_factor=10), 0),
        (cycle, one_cycle(PEAK, total=20, final_div_factor=10), 19),
        (cycle, one_cycle(PEAK, total=20, shape="linear"), 2),
    ]
    for one, other, step in others:
        assert one(step) != other(step)


BAD = {
    "linear(0.1, 0.0, steps=0)": "steps=0: allowed are whole numbers",
    "cosine(0.1, 0.0, steps=2.5)": r"steps=2\.5",
    "linear(-0.1, 0.0, steps=2)": r"start=-0\.1",
    "linear(0.1, float('nan'), steps=2)": "end=nan",
    "linear('0.1', 0.0, steps=2)": "TypeError: start='0.1'",
    "linear(math.sin, 0.0, steps=2)": "TypeError: start=<built-in function sin>",
    "warmup_cosine(0.1, warmup=10, total=9)": "warmup=10 with total=9",
    "warmup_cosine(0.1, warmup=9, total=9)": "warmup=9 with total=9",
    "warmup_cosine(0.1, warmup=-1, total=9)": "warmup=-1",
    "wsd(0.1, warmup=5, total=9, decay=5)": "decay=5 with total=9",
    "wsd(0.1, warmup=5, total=9, decay=0)": "decay=0",
    "wsd(0.1, warmup=1, total=9, decay=5, shape='x')": "shape='x'",
    "one_cycle(0.1, total=3)": "pct_start=0.3 with total=3",
    "one_cycle(0.1, total=9, pct_start=1.0)": "pct_start=1.0",
    "one_cycle(0.1, total=9, div_factor=0)": "div_factor=0",
    "join([0.1], [])": "1 parts with boundaries=",
    "join([0.1, 0.2], [])": r"2 parts with boundaries=\[\]",
    "join([0.1, 0.2, 0.3], [4, 4])": "increasing steps",
    "join([0.1, 0.2], [0])": r"boundaries\[0\]=0",
    "join([0.1, 'x'], [1])": r"TypeError: parts\[1\]='x'",
    "linear(0.1, 0.0, steps=2).as_lambda(0.0)": "base_lr=0.0",
    "linear(0.1, 0.0, steps=2).as_lambda(math.sin)": "TypeError: base_lr=<built",
    "one_cycle('0.1', total=9)": "TypeError: peak='0.1'",
    "one_cycle(math.sin, total=9)": "TypeError: peak=<built",
    "one_cycle(0.1, total=9, pct_start=None)": "TypeError: pct_start=None",
    "one_cycle(0.1, total=9, div_factor=math.sin)": "TypeError: div_factor=<built",
}


@refuses(BAD)
def test_bad_schedules() -> Scene:
    return {}


HOST = {
    "int": lambda step: 0.1 * 0.5 ** int(step),
    "item": lambda step: 0.1 / (1 + step.item()),
    "math": lambda step: 0.1 * math.cos(step),
    "if": lambda step: 0.1 if step < 3 else 0.2,
}


@pytest.mark.parametrize("schedule", HOST.values(), ids=HOST.keys())
def test_host_schedules_are_for_eager_mode(schedule) -> None:
    opt = adamw(lr=0.1, betas=(schedule, 0.99))
    p = torch.ones(2, 3)
    opt.step(p, p, opt.init(p))
    with pytest.raises(ValueError, match=r"betas is a schedule that turns the 0-d tensor"):
        vmap(opt.step)(p, p, vmap(opt.init)(p))


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (lambda step: 0.1, "lr is a schedule that turns the 0-d tensor step"),
        # Some versions of torch refuse the .item() before they come to its result.
        (HOST["int"], r"lr is a schedule that leaves|item\(\)"),
    ],
)
def test_a_graph_refuses_a_host_number(schedule, text: str) -> None:
    opt = sgd(lr=schedule)
    p = torch.ones(2)
    step = torch.compile(opt.step, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=text):
        step(p, p, opt.init(p))


def test_a_lambda_is_given_a_double_step() -> None:
    """In float32, 1 - 0.9999**t would be off by 2e-4 of itself."""
    opt = sgd(lr=lambda step: 1.0 - 0.9999 ** (step + 1.0))
    p = torch.zeros(2, dtype=torch.float64)
    for step in (opt.step, torch.compile(opt.step, backend="eager", fullgraph=True)):
        moved, _ = step(p, p + 1.0, opt.init(p))
        torch.testing.assert_close(moved, p - (1.0 - 0.9999), rtol=1e-10, atol=0.0)
