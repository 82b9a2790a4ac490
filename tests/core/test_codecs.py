"""The codecs of moments and compensations, `exact` beside float32, errors of updates."""

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DECAYS, LR, NAMES, OPTIONS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import same_bits
from tiers import built, row
from torch import Tensor

import optimi_func
from optimi_func import schedules
from optimi_func.core.codes import (
    GROUP,
    NEAREST,
    Moment8,
    SecondMoment8,
    is_eligible,
    narrow,
    widen,
)
from optimi_func.core.rule import Scalars, Storage

pytestmark = pytest.mark.filterwarnings("ignore:weight_decay=", "ignore:max_lr=")
BF16 = torch.bfloat16

# exact


AMSGRAD = Case("adam", {"amsgrad": True, "weight_decay": 0.1})
NESTEROV = Case("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1})
# One kind of decay for each rule.
FIRST = {case.name: case for case in reversed(DECAYS)}.values()


def exact_rows() -> list[Any]:
    columns = [case for case in OPTIONS if "columns" in str(case.options)]
    tiers = [("", [*FIRST, AMSGRAD, NESTEROV]), ("full", [*DECAYS, *columns])]
    tiers += [("soak", OPTIONS)]
    found = {}
    for tier, cases in tiers:
        for case in cases:
            found.setdefault(case.id, row(case, id=case.id, tier=tier))
    return built([*found.values()])


@pytest.mark.parametrize("case", exact_rows())
def test_exact_is_float32_bit_for_bit(case: Case) -> None:
    steps = 40
    optimizer = case.functional(schedules.warmup_cosine(LR, warmup=5, total=steps))
    shape = (7, 5) if "split" in case.options else (7, 24)
    low = torch.randn(shape).to(BF16)
    wide = low.float()
    state = optimizer.init(low, storage="exact")
    known = optimizer.init(wide)
    generator = torch.Generator().manual_seed(1)
    for i in range(steps):
        g = torch.randn(low.shape, generator=generator) * 0.9**i
        # Half of the gradients are float32, and stay so.
        g = g if i % 2 else g.to(BF16)
        low, state = optimizer.step(low, g, state)
        wide, known = optimizer.step(wide, g.float(), known)
    assert low.dtype == BF16 and state.leaves.kahan_comp.dtype == torch.int16
    assert torch.equal(joined(low, state), wide)
    for name, ours in state.leaves.rule_state._asdict().items():
        theirs = getattr(known.leaves, name)
        if name == "p0":  # it was a bfloat16
            ours = ours.to(torch.float32)
        assert ours.dtype == theirs.dtype == torch.float32
        assert torch.equal(ours, theirs)


def joined(low: Tensor, state: Any) -> Tensor:
    """Join the bits of parameter and compensation by integer arithmetic alone."""
    high = low.view(torch.int16).numpy().astype("int32") << 16
    both = high + state.leaves.kahan_comp.numpy().astype("int32")
    return torch.from_numpy(both).view(torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_exact_keeps_what_is_not_finite(name: str) -> None:
    inf, nan = math.inf, math.nan
    low = torch.tensor([[nan, inf, -inf, 1.0, 1.0, -0.0]], dtype=BF16)
    wide = low.float()
    optimizer = getattr(optimi_func, name)(lr=0.1, weight_decay=0.0)
    state, known = optimizer.init(low, storage="exact"), optimizer.init(wide)
    for g in ([0.0, 0.0, 0.0, nan, inf, 0.0], [0.0] * 6, [1.0] * 6):
        low, state = optimizer.step(low, torch.tensor([g]).to(BF16), state)
        wide, known = optimizer.step(wide, torch.tensor([g]), known)
        assert same_bits(widen(low, state.leaves.kahan_comp, torch.float32)[1], wide)
    # The sign of a NaN is 0.
    assert wide[0, 0].isnan() and (name in ("lion", "rprop") or wide[0, 3].isnan())


def test_every_float32_is_split_and_joined() -> None:
    """All high halves, each with the low halves at which rounding changes."""
    high = torch.arange(1 << 16, dtype=torch.int64)
    lows = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD]
    bits = (high[:, None] << 16 | torch.tensor(lows)).reshape(-1)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    x = bits.view(torch.float32)
    zeros = torch.zeros_like(x, dtype=BF16), torch.zeros_like(x, dtype=torch.int16)
    p, rest = narrow(x, *zeros)
    back = widen(p, rest, torch.float32)[1]
    nan = x.isnan()
    assert nan.sum() > 1000 and p[nan].isnan().all() and back[nan].isnan().all()
    # This includes -0 and subnormal numbers.
    assert torch.equal(back.view(torch.int32)[~nan], bits[~nan])
    # The high half is the nearest bfloat16, unless two are equally near.
    fits = ~nan & (rest != -(1 << 15))
    assert torch.equal(p[fits], x[fits].to(BF16))


# Moments


LENGTHS = (64, 8192, 8200, 1003)


def coded(x: Tensor, second: bool, dither: float = NEAREST) -> Moment8 | SecondMoment8:
    zeros = (SecondMoment8 if second else Moment8).zeros(x)
    return zeros.encode(x, dither)


@st.composite
def magnitudes(draw: Any) -> Tensor:
    """Draw groups whose elements differ by many powers of ten."""
    seed, size = draw(st.integers(0, 1 << 30)), draw(st.sampled_from(LENGTHS))
    scale = 10.0 ** draw(st.integers(-12, 10))
    spread = draw(st.sampled_from([0.0, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    x *= scale * (spread * torch.randn(size, generator=generator)).exp()
    if draw(st.booleans()):
        x[: size // 2] = 0.0
    return x


@pytest.mark.parametrize("second", [False, True], ids=["m", "v"])
@settings(max_examples=50)
@given(x=magnitudes())
def test_what_comes_out_of_codes_goes_into_the_same(second: bool, x: Tensor) -> None:
    x = x.square() if second else x
    codes = coded(x, second, 0.3)
    again = coded(codes.decode(torch.float32), second)
    assert torch.equal(again.q, codes.q)
    torch.testing.assert_close(again.scale, codes.scale, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("second", [False, True], ids=["m", "v"])
@settings(max_examples=50)
@given(x=magnitudes())
def test_codes_are_the_nearest(second: bool, x: Tensor) -> None:
    """Codes are evenly spaced in the square root of |m| and the fourth root of v."""
    x = x.square() if second else x
    y = coded(x, second).decode(torch.float32)
    levels, power = (255, 0.25) if second else (127, 0.5)

    def spaced(z: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(z, (0, -z.numel() % GROUP)).view(-1, GROUP)
        rows = rows.double().abs() ** power
        most = x_most.double() ** power
        return torch.where(most > 0, rows / most * levels, 0.0)

    x_most = torch.nn.functional.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)
    x_most = x_most.abs().amax(1, keepdim=True)
    wanted = spaced(x)
    # Except in a group of zeros and in the padding of the last group.
    floor = torch.nn.functional.pad(torch.ones_like(x), (0, -x.numel() % GROUP))
    floor = floor.view(-1, GROUP) * (x_most > 0)
    wanted = torch.maximum(wanted, floor) if second else wanted
    assert (spaced(y) - wanted).abs().max() < 0.5001
    assert not second or bool((y[x == 0] >= 0).all())
    assert torch.equal(y.sign()[y != 0], x.sign()[y != 0]) or second


def test_means_of_squares_are_never_0_beside_others() -> None:
    x = torch.full((64,), 1e-30)
    x[5] = 1.0
    assert (coded(x, True).q == torch.tensor(1).where(x < 1, 255)).all()
    assert (coded(x, True).decode(torch.float32) > 0).all()


def test_the_dither_of_many_steps_is_even() -> None:
    """Over many steps a value between two codes is their average."""
    optimizer = optimi_func.adamw(lr=0.1)
    codes = SecondMoment8.zeros(torch.zeros(64))
    x = torch.full((64,), (100.25 / 255) ** 4)
    x[0] = 1.0
    found = [codes.encode(x, dithers(optimizer, t)).q[1].item() for t in range(1, 401)]
    assert set(found) == {100, 101}
    assert sum(found) / len(found) == pytest.approx(100.25, abs=0.01)


def dithers(optimizer: Any, t: int) -> float:
    """Return the dither of a step."""
    from optimi_func.core.codes import dither_at

    assert Scalars._fields[-1] == "dither"
    return float(dither_at(t))


@pytest.mark.parametrize("second", [False, True], ids=["m", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_takes_its_group_and_no_other(bad: float, second: bool) -> None:
    x = torch.rand(8200) + 0.5
    clean = coded(x, second).decode(torch.float32)
    x[70] = x[8199] = bad
    y = coded(x, second).decode(torch.float32)
    spoilt = torch.zeros(8200, dtype=torch.bool)
    spoilt[64:128] = spoilt[8192:] = True
    assert torch.equal(y.isnan(), spoilt)
    assert torch.equal(y[~spoilt], clean[~spoilt])
    # Encoding again changes nothing.
    assert torch.equal(coded(y, second).decode(torch.float32).isnan(), spoilt)


@pytest.mark.parametrize("second", [False, True], ids=["m", "v"])
def test_a_scale_that_has_no_inverse(second: bool) -> None:
    x = torch.full((128,), 1e-38)
    x[64:] = 1.0
    y = coded(x, second)
    assert y.decode(torch.float32).isfinite().all()
    if second:
        # The scale of v is a root, which has an inverse.
        assert torch.allclose(y.decode(torch.float32), x, rtol=1e-2, atol=1e-44)
    else:
        assert (y.q[:64] == 0).all() and (y.q[64:] == 127).all()


def orders() -> dict[str, Tensor]:
    x = torch.randn(32, 64, 2, 4)
    return {
        "contiguous": x,
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.reshape(64, 256).t(),
        "permuted": x.permute(2, 0, 3, 1),
        "64 does not divide": torch.randn(8193),
        "last dimension short": torch.randn(128, 8, 16),
        "a dimension of 1": torch.randn(128, 1, 64),
    }


@pytest.mark.parametrize("second", [False, True], ids=["m", "v"])
@pytest.mark.parametrize("order", orders())
def test_groups_are_what_lies_side_by_side(order: str, second: bool) -> None:
    x = orders()[order]
    x = x.square() if second else x
    assert is_eligible(x)
    codes = coded(x, second)
    assert codes.q.shape == x.shape and codes.q.stride() == x.stride()
    y = codes.decode(torch.float32)
    assert y.shape == x.shape and y.stride() == x.stride()
    flat = torch.as_strided(x, (x.numel(),), (1,))
    plain = coded(flat, second)
    assert torch.equal(plain.scale, codes.scale.reshape(-1))
    assert torch.equal(plain.decode(torch.float32), torch.as_strided(y, (x.numel(),), (1,)))
    assert (x - y).norm() < 0.02 * x.norm()


def test_who_is_kept_in_codes() -> None:
    """Shape and strides decide. Sharding dimension 0 shards scales too."""
    shapes = {
        (8192,): (128,),
        (8191,): None,
        (8193,): (129,),
        (128, 64): (128, 1),
        (127, 64): None,
        (64, 130): None,
        (100, 192): (100, 3),
        (64, 8, 32): (64, 4),
        (2, 3, 64, 64): (2, 3, 64, 1),
        (8192, 1): None,
        (1, 8192): (1, 128),
        (64, 64, 3, 3): (64, 9),
        (64, 3, 3, 3, 5): None,
    }
    for shape, scale in shapes.items():
        p = torch.zeros(shape)
        assert is_eligible(p) == (scale is not None), shape
        if scale is not None:
            assert tuple(Moment8.zeros(p).scale.shape) == scale
    holes = torch.zeros(128, 128)[:, :64]
    assert not is_eligible(holes) and is_eligible(torch.zeros(64, 256).t())
    assert not is_eligible(torch.zeros(64).expand(128, 64))
    leaf = optimi_func.adamw_init(
        torch.zeros(127, 64), storage=Storage(None, "8bit")
    ).leaves
    assert leaf.exp_avg.dtype == torch.float32


# Compensations in 8 bits


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@settings(max_examples=50)
@given(seed=st.integers(0, 1 << 30), power=st.integers(-7, 3))
def test_a_compensation_in_8_bits_holds_8_bits(dtype: Any, seed: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, generator=generator) * 10.0**power
    zeros = torch.zeros(512, dtype=dtype), torch.zeros(512, dtype=torch.int8)
    p, rest = narrow(x, *zeros)
    assert torch.equal(p, x.to(dtype)) and rest.dtype == torch.int8
    y = widen(p, rest, torch.float32)[1]
    info = torch.finfo(dtype)
    # 127 units are half a bit of p. At most half a unit is lost, and what float32 rounds.
    unit = p.float().abs().clamp_min(info.tiny) * info.eps / 2 / 127
    assert ((y - x).abs() <= 0.52 * unit).all()
    # A value halfway between two values of p may round to either.
    again = widen(*narrow(y, p, rest), torch.float32)[1]
    assert ((again - y).abs() <= 0.52 * unit).all()
    assert (again == y).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_ends_of_a_compensation_in_8_bits(dtype: Any) -> None:
    big = torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, big, -big, 1e-40])
    p, rest = narrow(x, torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=torch.int8))
    y = widen(p, rest, torch.float32)[1]
    assert y[2].isnan() and not y[3:5].isfinite().any()
    assert torch.equal(y[5:7], x[5:7]) and torch.equal(y[:2], x[:2])
    assert y[7].abs() < 1e-39 and torch.equal(p[5:7], x[5:7].to(dtype))


def test_float16_weights_that_are_not_normal_follow_small_steps() -> None:
    p = torch.tensor([3e-5, 1e-7, 0.0], dtype=torch.float16)
    optimizer = optimi_func.sgd(lr=1.0)
    state = optimizer.init(p, storage=Storage("kahan8"))
    start, g = p.double(), torch.full((3,), -1e-9)
    for _ in range(200):
        p, state = optimizer.step(p, g, state)
    x = widen(p, state.leaves.kahan_comp, torch.float32)[1].double()
    assert torch.allclose(x - start, torch.full((3,), 2e-7).double(), rtol=0.2)


# How far codes move updates


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_of_errors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/storage.py, whose table has these numbers too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    import storage

    yield storage
    for name in ("storage", "step_time", "harness"):
        if name not in known:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("kind", "steps", "error", "largest"),
    [
        row("stationary", 60, 0.07, 1.7, id="stationary"),
        row("spikes", 60, 0.3, 4.0, id="spikes"),
        row("1e-8", 60, 0.07, 1.7, id="1e-8"),
        row("falls", 60, 0.07, 1.7, id="falls"),
        row("stationary", 400, 0.12, 1.7, id="stationary, long", tier="full"),
        row("spikes", 400, 0.5, 8.0, id="spikes, long", tier="full"),
        row("1e-8", 400, 0.12, 1.7, id="1e-8, long", tier="full"),
        row("falls", 400, 0.2, 1.7, id="falls, long", tier="full"),
    ],
)
def test_updates_stay_near_float32s(
    benchmark_of_errors: Any, kind: str, steps: int, error: float, largest: float
) -> None:
    found = benchmark_of_errors.errors(["8bit"], kind, steps=steps)["8bit"]
    assert 0 < found["error"] <= error
    assert 1 < found["largest"] <= largest


def test_what_is_measured_is_stored_in_codes() -> None:
    p = torch.zeros(512, 64)
    state = optimi_func.adamw_init(p, storage=Storage(moments="8bit"))
    assert [x.dtype for x in state.leaves.exp_avg] == [torch.int8, torch.float32]
    assert [x.dtype for x in state.leaves.exp_avg_sq] == [torch.uint8, torch.float32]


def test_the_measure_tells_codes_apart(
    benchmark_of_errors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second moment that rounds to 0."""

    def linear(eps: float) -> Any:
        m, v, steps = torch.zeros(512, 64), torch.zeros(512, 64), itertools.count(1)

        def update(g: Tensor) -> Tensor:
            nonlocal m, v
            t = next(steps)
            m, v = m.lerp(g, 0.1), v.lerp(g * g, 0.001)
            root = (v / (1 - 0.999**t)).sqrt() + eps
            v = (v / v.max() * 255).round() / 255 * v.max()
            return m / (1 - 0.9**t) / root

        return update

    monkeypatch.setitem(benchmark_of_errors.ROWS, "linear", linear)
    found = benchmark_of_errors.errors(["8bit", "linear"], "stationary", steps=30)
    assert found["linear"]["error"] > 1.5 * found["8bit"]["error"]
    assert found["linear"]["largest"] > 2 * found["8bit"]["largest"]
