"""The one write: what compensated summation keeps, and in which dtypes state lives."""

import pytest
import torch
from cases import MAPPED, NAMES, SCHEDULE_FREE, assert_moved_alike, problem
from tiers import few
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import compiled


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
def test_ten_thousand_small_decays(dtype: torch.dtype) -> None:
    exact = (1 - 1e-5) ** 10_000
    assert decayed(dtype, 10_000, 1e-5) == pytest.approx(exact, rel=0.02)
    # Without it, every one of them rounds to nothing.
    assert decayed(dtype, 100, 1e-5, kahan_sum=False) == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_kahan_stays_closer_to_float64(name: str) -> None:
    p, grads = problem((8, 8), steps=200)
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
    assert error["kahan"] * 5 < error["plain"]


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


@pytest.mark.full
def test_compiled_kernels_compensate() -> None:
    p = torch.ones(4, dtype=torch.bfloat16)
    state = optimi_func.adamw_init(p)
    _, after = compiled.adamw_step(p, torch.zeros_like(p), state, lr=1e-5, weight_decay=1.0)
    assert after.leaves.kahan_comp.tolist() == pytest.approx([-1e-5] * 4, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_numbers_survive(dtype: torch.dtype) -> None:
    """Masks hold finfo.min; a rounding that scales up would make it NaN."""
    info = torch.finfo(dtype)
    p = torch.tensor([info.min, info.max, info.max / 4, 1.0, info.tiny], dtype=dtype)
    optimizer = optimi_func.sgd(lr=0.1)
    new, _ = optimizer.step(p, torch.zeros_like(p), optimizer.init(p))
    assert torch.equal(new, p)
