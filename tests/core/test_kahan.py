"""The one write: compensated summation, dtypes of state, weights that users overwrite."""

from typing import Any

import pytest
import torch
from cases import MAPPED, NAMES, SCHEDULE_FREE, assert_moved_alike, problem
from tiers import few
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import optimi_func
import optimi_func as T
from optimi_func.core.codes import widen
from optimi_func.core.leaf import leaf_step
from optimi_func.core.rule import Leaf, NoState, Rates, Scalars, gradient_rule


def decayed(dtype: torch.dtype, steps: int, share: float, **init) -> float:
    """What is left of 1 after decaying alone; the compensation counted in."""
    p = torch.ones(3, dtype=dtype)
    # What is written is the same for every rule; this one has the least besides.
    state = optimi_func.sgd_init(p, **init)
    g = torch.zeros(3, dtype=dtype)
    step = optimi_func.sgd(lr=share, weight_decay=1.0, decouple_wd=True).step
    leaves, spec = pytree.tree_flatten(state)

    def flat(p: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
        return pytree.tree_leaves(step(p, g, pytree.tree_unflatten(leaves, spec)))

    # The operations alone: what finds them takes ten times as long as they do.
    traced = make_fx(flat)(p, *leaves)
    for _ in range(steps):
        p, *leaves = traced(p, *leaves)
    comp = pytree.tree_unflatten(leaves, spec).leaves.kahan_comp
    return p.double().mean().item() + (0.0 if comp is None else comp.double().mean().item())


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16], ["torch.bfloat16"]))
def test_thousands_of_small_decays(dtype: torch.dtype) -> None:
    exact = (1 - 5e-5) ** 2_000
    assert decayed(dtype, 2_000, 5e-5) == pytest.approx(exact, rel=0.02)
    # Without it, every one of them rounds to nothing.
    assert decayed(dtype, 100, 5e-5, kahan_sum=False) == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_kahan_stays_closer_to_float64(name: str) -> None:
    p, grads = problem((8, 8))
    grads = [(g.to(torch.bfloat16)).double() for g in grads]
    start = p.to(torch.bfloat16)
    ends = {}
    for kind, dtype, kahan in (
        ("exact", torch.float64, False),
        ("kahan", torch.bfloat16, None),
        ("plain", torch.bfloat16, False),
    ):
        q = start.to(dtype)
        init = getattr(optimi_func, f"{name}_init")
        state = init(q, kahan_sum=kahan, state_dtype=torch.float32)
        step = getattr(optimi_func, name)(lr=1e-3).step
        for g in grads:
            q, state = step(q, g.to(dtype), state)
        comp = state.leaves.kahan_comp
        ends[kind] = q.double() + (0.0 if comp is None else comp.double())
    error = {k: (v - ends["exact"]).abs().mean() for k, v in ends.items()}
    assert error["kahan"] * 50 < error["plain"]


@pytest.mark.full
def test_kahan_survives_users_compilers() -> None:
    """Inductor folds x.to(bfloat16).to(float32) into x; the compensation must not go."""
    p = torch.ones(4, dtype=torch.bfloat16)
    state = optimi_func.sgd_init(p)
    step = torch.compile(optimi_func.sgd(lr=1e-4).step, fullgraph=True)
    _, after = step(p, torch.ones_like(p), state)
    assert after.leaves.kahan_comp.tolist() == pytest.approx([-1e-4] * 4, rel=1e-2)


@pytest.mark.filterwarnings("ignore:kahan_sum=True has no effect")
@pytest.mark.parametrize(
    ("dtype", "kahan", "kept"),
    [
        (torch.float32, None, False),
        (torch.float64, None, False),
        (torch.bfloat16, None, True),
        (torch.float16, None, True),
        (torch.bfloat16, False, False),
        (torch.float32, True, False),
    ],
)
def test_which_parameters_are_compensated(dtype, kahan, kept: bool) -> None:
    leaf = optimi_func.adamw_init(torch.ones(2, dtype=dtype), kahan_sum=kahan).leaves
    assert (leaf.kahan_comp is not None) == kept
    w = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    w.grad = torch.ones_like(w)
    optimizer = optimi_func.AdamW([w], lr=1e-3, kahan_sum=kahan, compile=False)
    optimizer.step()
    assert ("kahan_comp" in optimizer.state[w]) == kept


def test_state_dtypes() -> None:
    half, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    for name in NAMES:
        if name in ("sgd", "adafactor", *MAPPED, *SCHEDULE_FREE):  # which have no moment
            continue
        init = getattr(optimi_func, f"{name}_init")
        leaf = init(torch.ones(2, dtype=half)).leaves
        if not {"exp_avg", "exp_avg_sq"} <= {*leaf._fields} and name != "lion":
            continue  # torch's names of other moments
        # d * g of Prodigy would underflow.
        assert leaf.exp_avg.dtype == (f32 if name == "prodigy" else half)
        if name != "lion":
            assert leaf.exp_avg_sq.dtype == f32
        assert init(torch.ones(2, dtype=bf16)).leaves.exp_avg.dtype == bf16
        wide = init(torch.ones(2, dtype=bf16), state_dtype=f32).leaves
        assert wide.exp_avg.dtype == f32
    assert optimi_func.ranger_init(torch.ones(2, dtype=bf16)).leaves.slow_param.dtype == f32
    w = torch.nn.Parameter(torch.ones(2, dtype=bf16))
    v = torch.nn.Parameter(torch.ones(2, dtype=bf16))
    w.grad, v.grad = torch.ones_like(w), torch.ones_like(v)
    groups = [{"params": [w]}, {"params": [v], "state_dtype": f32}]
    optimizer = optimi_func.AdamW(groups, lr=1e-3, compile=False)
    optimizer.step()
    assert optimizer.state[w]["exp_avg"].dtype == bf16
    assert optimizer.state[v]["exp_avg"].dtype == f32


def test_float16_second_moment_does_not_underflow() -> None:
    p = torch.ones(3, dtype=torch.float16)
    g = torch.full_like(p, 1e-4)
    optimizer = optimi_func.adam(lr=1e-2)
    q, state = optimizer.step(p, g, optimizer.init(p))
    assert (state.leaves.exp_avg_sq > 0).all()
    moved = q.double() + state.leaves.kahan_comp.double()
    assert_moved_alike(p, moved, torch.full_like(q, 0.99).double(), 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wider_gradients_are_used_as_they_are(dtype: torch.dtype) -> None:
    p = torch.ones(3, dtype=dtype)
    g = torch.full((3,), 1.001, dtype=torch.float32)  # 1.0 in bfloat16
    _, state = optimi_func.sgd(lr=1e-3, momentum=0.9).step(
        p, g, optimi_func.sgd_init(p, momentum=0.9, state_dtype=torch.float32)
    )
    assert (state.leaves.momentum_buffer == g).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_numbers_survive(dtype: torch.dtype) -> None:
    """Masks hold finfo.min; a rounding that scales up would make it NaN."""
    info = torch.finfo(dtype)
    p = torch.tensor([info.min, info.max, info.max / 4, 1.0, info.tiny], dtype=dtype)
    optimizer = optimi_func.sgd(lr=0.1)
    new, _ = optimizer.step(p, torch.zeros_like(p), optimizer.init(p))
    assert torch.equal(new, p)


F32, BF16 = torch.float32, torch.bfloat16


def every(dtype: torch.dtype) -> Tensor:
    """Every finite value of a dtype of 16 bits, with both zeros."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    found = bits.view(dtype)
    return found[found.isfinite()]


def added(p: Tensor, comp: Tensor, u: Tensor) -> Leaf:
    """One write of the pipeline: p + u."""
    scalars = Scalars(NoState(), Rates(1.0, 0.0, 0.0, 1.0))
    leaf = Leaf(p, NoState(), comp)
    return leaf_step(gradient_rule, leaf, -u, scalars, True)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("kept", [None, F32], ids=str)
def test_what_a_step_keeps_is_never_left_out(dtype: Any, kept: Any) -> None:
    """From every weight, by moves of every size, also to almost 0 and from it."""
    p = every(dtype)
    generator = torch.Generator().manual_seed(0)
    for power in (-16, 0, None):
        u = torch.randn(len(p), generator=generator) * p.float().abs()
        u = torch.randn(len(p), generator=generator) if power is None else u * 2.0**power
        for move in (u, -p.float() + u, -p.float() * (1 - 2.0**-8) + u * 2.0**-8):
            comp = torch.zeros_like(p, dtype=kept)
            leaf = added(p, comp, move)
            for again in (move * 2.0**-9, -leaf.p.float()):
                assert leaf.comp is not None
                fine = leaf.p.isfinite() & leaf.comp.isfinite()
                assert fine.float().mean() > 0.7
                own = widen(leaf.p, leaf.comp, F32)[2]
                assert own is not None
                assert torch.equal(own[fine], leaf.comp.float()[fine])
                leaf = added(leaf.p, leaf.comp, again)


def test_bits_of_another_weight_make_no_nan() -> None:
    """All bfloat16 numbers beside remainders of any size: p alone where the sum is NaN."""
    p = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(BF16)[:, None]
    rests = [0, 1, -1, 0x7FFF, -0x8000, 1234, -1234]
    rest = torch.tensor(rests, dtype=torch.int16).expand(1 << 16, -1)
    joined = (p.view(torch.int16).int() << 16) + rest.int()
    before, x = joined.view(F32), widen(p, rest, F32)[1]
    p32 = p.float().expand_as(x)
    assert torch.equal(x.isnan(), p32.isnan())
    changed = before.isnan() & ~p32.isnan()
    assert torch.equal(x[changed], p32[changed]) and (p32[changed] == 0).sum() == 6
    same = ~before.isnan()
    assert torch.equal(x.view(torch.int32)[same], joined[same])


def begun(storage: Any, **options: Any) -> tuple[Tensor, Any]:
    """A weight of 1,000 after three steps, with something kept beside it."""
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(1000).to(BF16))
    optimizer = T.Adam([w], lr=1e-3, storage=storage, **options)
    for _ in range(3):
        w.grad = torch.randn(1000).to(BF16)
        optimizer.step()
    assert optimizer.state[w]["kahan_comp"].count_nonzero() > 500
    return w, optimizer


HOW = [
    *({"compile": False}, {"foreach": True}, {"compile": False, "capturable": True}),
    pytest.param({"compile": True}, marks=pytest.mark.kernels),
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("storage", ["exact", "compact", None], ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.01, 100.0])
def test_a_weight_that_was_written_stays(storage: Any, how: Any, value: float) -> None:
    w, optimizer = begun(storage, **how)
    with torch.no_grad():
        w.fill_(value)
    model = torch.nn.ParameterDict({"w": w})
    spacing = abs(value) * 2.0**-7 + 1e-30
    kept = optimizer.master_state_dict(model)["w"]
    assert ((kept - w.float()).abs() <= spacing).all()
    optimizer.param_groups[0]["lr"] = 0.0
    w.grad = torch.zeros_like(w)
    optimizer.step()
    assert not w.isnan().any() and ((w - value).abs() <= spacing).all()


def test_a_weight_after_nan_is_what_was_written() -> None:
    """The compensation of a weight that diverged is NaN, and not of the next one."""
    for param in ("kahan", "kahan8", "exact"):
        w = torch.nn.Parameter(torch.randn(100).to(BF16))
        optimizer = T.SGD([w], lr=1.0, storage=T.Storage(param), compile=False)
        w.grad = torch.full_like(w, torch.nan)
        optimizer.step()
        assert w.isnan().all()
        with torch.no_grad():
            w.fill_(0.5)
        w.grad = torch.full_like(w, 0.25)
        optimizer.step()
        assert torch.equal(w, torch.full_like(w, 0.25))


@pytest.mark.kernels
def test_bits_of_another_weight_make_no_nan_in_c() -> None:
    from optimi_func.execution.codecs import _PARAMS
    from optimi_func.execution.cpp import native

    functions, codec = native(), _PARAMS[torch.int16]
    assert functions is not None
    p = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(BF16)
    for value in (0, 1, -1, 0x7FFF, -0x8000, 1234, -1234):
        rest = torch.full((1 << 16,), value, dtype=torch.int16)
        back = torch.empty(1 << 16)
        functions.decode(codec, p.data_ptr(), rest.data_ptr(), back.data_ptr(), len(back))
        wanted = widen(p, rest, F32)[1]
        assert torch.equal(back.isnan(), wanted.isnan())
        kept = ~wanted.isnan()
        assert torch.equal(back.view(torch.int32)[kept], wanted.view(torch.int32)[kept])
