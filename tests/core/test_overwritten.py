"""Weights that somebody writes to between two steps, and what is kept beside them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import optimi_func as T
from optimi_func.core.codes import narrow, widen
from optimi_func.core.leaf import leaf_move
from optimi_func.core.rule import Leaf, NoState, Rates, Scalars, gradient_rule

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
    _, _, add = leaf_move(gradient_rule, leaf, -u, scalars, True, lambda x: x)
    return add(u)


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


def test_a_pure_step_after_a_write() -> None:
    for storage in ("exact", None):
        p = torch.randn(1000).to(BF16)
        sgd = T.sgd(lr=1e-3)
        state = sgd.init(p, storage=storage)
        p, state = sgd.step(p, torch.randn(1000).to(BF16), state)
        p, _ = sgd.step(torch.zeros_like(p), torch.zeros_like(p), state)
        assert not p.isnan().any() and p.float().abs().max() < 1e-30


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
    from optimi_func.execution.cpp import native

    functions = native()
    assert functions is not None
    p = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(BF16)
    for value in (0, 1, -1, 0x7FFF, -0x8000, 1234, -1234):
        rest = torch.full((1 << 16,), value, dtype=torch.int16)
        back = torch.empty(1 << 16)
        functions.decode(4, p.data_ptr(), rest.data_ptr(), back.data_ptr(), len(back))
        wanted = widen(p, rest, F32)[1]
        assert torch.equal(back.isnan(), wanted.isnan())
        kept = ~wanted.isnan()
        assert torch.equal(back.view(torch.int32)[kept], wanted.view(torch.int32)[kept])


def test_what_exact_keeps_is_never_left_out() -> None:
    """A split float32 never joins to NaN, so that no run of numbers is changed."""
    high = torch.arange(1 << 16)[:, None] << 16
    bits = (high + torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF])).to(torch.int32)
    x = bits.view(F32)
    x = x[~x.isnan()]
    zeros = torch.zeros_like(x, dtype=BF16), torch.zeros_like(x, dtype=torch.int16)
    back = widen(*narrow(x, *zeros), F32)[1]
    assert torch.equal(back.view(torch.int32), x.view(torch.int32))
