"""Kernels that decode and encode in Inductor's code, as on CUDA, compiled for CPU here."""

import pytest
import torch
from stored import BF16, same_bits

from optimi_func import AdamW, StableAdamW, Storage
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import scales_in
from optimi_func.execution import executors, kernels

SHAPES = [(128, 128), (300, 64), (8192 + 3,), (7, 5)]
EIGHT = Storage(moments="8bit")


@pytest.fixture(autouse=True)
def no_list_kernels(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "LISTED", set())


def squares(codes: torch.Tensor) -> torch.Tensor:
    """Return the moments that codes stand for, in units of their scales."""
    return codes.float() * codes.float().abs()


def trained(cls, storage, dtype: torch.dtype, steps: int, **options):
    own = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=own).to(dtype).requires_grad_() for s in SHAPES]
    # One is transposed in memory.
    params.append(torch.randn(128, 96, generator=own).to(dtype).t().requires_grad_())
    optimizer = cls(params, lr=1e-2, storage=storage, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=own).to(dtype)
        optimizer.step()
    return params, optimizer


@pytest.mark.full
@pytest.mark.parametrize(
    ("cls", "storage", "dtype"),
    [
        (AdamW, "compact", BF16),
        (AdamW, "exact", BF16),
        pytest.param(AdamW, EIGHT, torch.float32, marks=pytest.mark.soak),
        pytest.param(StableAdamW, "compact", BF16, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_kernel_of_codes_is_the_eager_step(cls, storage, dtype) -> None:
    ours, optimizer = trained(cls, storage, dtype, 4, compile=True)
    theirs, other = trained(cls, storage, dtype, 4, compile=False)
    start, _ = trained(cls, storage, dtype, 0)
    for p, q, s in zip(ours, theirs, start):
        moved, expected = p.detach().double() - s.double(), q.detach().double() - s.double()
        assert (moved - expected).norm() <= 0.01 * expected.norm()
        mine, known = optimizer.state[p], other.state[q]
        assert mine.keys() == known.keys()
        for name, x in known.items():
            assert mine[name].dtype == x.dtype and mine[name].stride() == x.stride()
            if name.endswith("_q"):
                assert (mine[name] != x).float().mean() < 0.01
                apart = (squares(mine[name]) - squares(x)).abs()
                assert apart.max() <= 0.02 * squares(x).abs().max()
            elif name.endswith("_scale"):
                torch.testing.assert_close(mine[name], x, rtol=1e-2, atol=0)
    names = [
        name for (key, _), (name, _) in runtime.kernels.items() if scales_in(key.names)
    ]
    assert any("codes" in name for name in names) or storage == "exact"


@pytest.mark.full
def test_only_whole_rows_are_for_a_kernel(monkeypatch) -> None:
    """Tensors with an incomplete last group are stepped eagerly."""
    eager: list[int] = []
    plan = executors.plan_eager
    monkeypatch.setattr(
        executors,
        "plan_eager",
        lambda rule, updates, write: (
            eager.extend(u.slot.numel for u in updates) or plan(rule, updates, write)
        ),
    )
    params, optimizer = trained(AdamW, "compact", BF16, 2, compile=True)
    assert set(eager) == {8192 + 3}
    codes = [p for p in params if "exp_avg_q" in optimizer.state[p]]
    assert {p.numel() for p in codes} == {128 * 128, 300 * 64, 8192 + 3, 96 * 128}


@pytest.mark.full
def test_a_skipped_step_changes_no_bit() -> None:
    params, optimizer = trained(AdamW, "compact", BF16, 1, compile=True)
    before = [(p.detach().clone(), dict(optimizer.state[p])) for p in params]
    before = [(p, {k: x.clone() for k, x in s.items()}) for p, s in before]
    from optimi_func.core.rule import Microbatch

    skip = Microbatch(1.0, False, torch.tensor(False))
    grads = [torch.full_like(p, float("nan")) for p in params]
    optimizer.update(params, grads, [skip] * len(params), True, True)
    for p, (old, state) in zip(params, before):
        assert torch.equal(p, old)
        for name, x in state.items():
            assert same_bits(optimizer.state[p][name], x)
