"""Codes in every executor: C++ against torch, kernels against single operations."""

import math
from typing import Any

import pytest
import torch
from stored import (
    BF16,
    CODED,
    KEPT,
    assert_same_bits,
    gradients,
    kept_in_codes,
    made,
    meant,
    same_bits,
    starts,
    train,
)
from torch import Tensor

import optimi_func
from optimi_func import AdamW, adamw, compiled
from optimi_func.core.codes import NEAREST, Moment8, SecondMoment8, narrow, widen
from optimi_func.core.rule import WHOLE_BATCH, Storage
from optimi_func.execution import codecs
from optimi_func.execution.cpp import native
from optimi_func.execution.launches import ListLaunch

F32 = torch.float32
COMPILED = {"compile": True}
# A kernel costs seconds: these share one of each rule, the rest soak.
QUICK = {("adamw", "compact"), ("adamw", "exact"), ("stableadamw", "float32")}
QUICK |= {("lion", "compact")}


def launches(optimizer: Any) -> list[Any]:
    plans = optimizer._plans.values()
    latest = [found for plan in plans for _, found in plan._cached.values()]
    return [launch for launches, _ in latest for launch in launches]


# The codecs in C++


def hard(dtype: torch.dtype = F32) -> Tensor:
    """Groups with what is not finite, not normal, 0 and of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * 40 + 5, generator=generator)
    x *= 10.0 ** torch.randint(-42, 18, x.shape, generator=generator)
    x[64:128] = 0.0
    x[130], x[200], x[270], x[-1] = math.nan, math.inf, -math.inf, math.nan
    x[320:384] = -0.0
    x[384:448] = 1e-40
    return x.to(dtype)


@pytest.mark.parametrize("dither", [0.001, NEAREST, 0.999])
@pytest.mark.parametrize("second", [False, True], ids=["m", "v"])
def test_moments_in_c_are_those_of_torch(second: bool, dither: float) -> None:
    functions = native()
    assert functions is not None
    x = hard().square() if second else hard()
    zeros = (SecondMoment8 if second else Moment8).zeros(x)
    wanted = zeros.encode(x, dither)
    q, scale = (y.clone() for y in zeros)
    codec, places = codecs._MOMENTS[q.dtype], (q.data_ptr(), scale.data_ptr())
    functions.encode(codec, x.data_ptr(), *places, len(x), dither)
    assert same_bits(scale, wanted.scale)
    finite = wanted.decode(F32).isfinite()
    assert 100 < finite.sum() < len(x) - 100
    assert torch.equal(q[finite], wanted.q[finite])
    back = torch.empty_like(x)
    functions.decode(codec, *places, back.data_ptr(), len(x))
    assert torch.equal(back.isfinite(), finite)
    assert torch.equal(back[finite], wanted.decode(F32)[finite])


def test_exact_in_c_is_that_of_torch() -> None:
    functions = native()
    assert functions is not None
    high = torch.arange(1 << 16, dtype=torch.int64)
    bits = (high[:, None] << 16 | torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF])).reshape(-1)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    x = bits.view(F32)
    p, rest = torch.zeros_like(x, dtype=BF16), torch.zeros_like(x, dtype=torch.int16)
    wanted = narrow(x, p, rest)
    places = p.data_ptr(), rest.data_ptr()
    codec = codecs._PARAMS[torch.int16]
    functions.encode(codec, x.data_ptr(), *places, len(x), 0.0)
    assert same_bits(p, wanted[0]) and torch.equal(rest, wanted[1])
    back = torch.empty_like(x)
    functions.decode(codec, *places, back.data_ptr(), len(x))
    nan = x.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], bits[~nan]) and back[nan].isnan().all()


def test_kahan8_in_c_is_that_of_torch() -> None:
    functions = native()
    assert functions is not None
    x = hard()
    x = x[(x == 0) | (x.abs() > 1e-30) | ~x.isfinite()]
    p, rest = torch.zeros_like(x, dtype=BF16), torch.zeros_like(x, dtype=torch.int8)
    wanted = narrow(x, p, rest)
    places = p.data_ptr(), rest.data_ptr()
    codec = codecs._PARAMS[torch.int8]
    functions.encode(codec, x.data_ptr(), *places, len(x), 0.0)
    finite = x.isfinite()
    assert torch.equal(p[finite], wanted[0][finite])
    assert torch.equal(rest[finite], wanted[1][finite])
    back = torch.empty_like(x)
    functions.decode(codec, *places, back.data_ptr(), len(x))
    assert torch.equal(back[finite], widen(*wanted, F32)[1][finite])
    assert not back[~finite].isfinite().any() and (~finite).any()


# Kernels


def row(name: str, kind: str) -> Any:
    marks = () if (name, kind) in QUICK else pytest.mark.soak
    return pytest.param(name, kind, id=f"{name}-{kind}", marks=marks)


ALL = (
    "sgd",
    "adam",
    "adamw",
    "stableadamw",
    "radam",
    "ranger",
    "adan",
    "lion",
    "ademamix",
    "adopt",
    "schedule_free_adamw",
    "schedule_free_radam",
    "lamb",
)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in ("adamw", "stableadamw") else pytest.mark.soak)
        for x in ALL
    ],
)
def test_exact_is_float32_bit_for_bit(name: str) -> None:
    ps, optimizer = made(name, "exact", BF16, weight_decay=0.1, **COMPILED)
    qs, other = made(name, None, F32, weight_decay=0.1, **COMPILED)
    for p, q in zip(ps, qs):
        q.data.copy_(p.data)
    grads = gradients(20)
    for i in range(200):
        if i == 150:
            # From now on wider than the parameters: they are taken as they are.
            grads = gradients(20, F32)
            for p in ps:
                p.grad, p.grad_dtype = None, F32
        lr = 0.01 * (1 - i / 200)
        optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = lr
        train(optimizer, ps, [grads[i % 20]])
        train(other, qs, [[g.float() for g in grads[i % 20]]])
    assert {type(x) for x in launches(optimizer)} == {ListLaunch}
    for p, q in zip(ps, qs):
        state, known = optimizer.state[p], other.state[q]
        assert p.dtype == BF16 and state["kahan_comp"].dtype == torch.int16
        assert torch.equal(meant(p, state), q)
        assert all(torch.equal(state[field], x) for field, x in known.items())


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kind"), [row(name, kind) for name in ALL for kind in KEPT]
)
def test_kernels_do_what_single_operations_do(name: str, kind: str) -> None:
    storage, dtype = KEPT[kind]
    grads = gradients(8, dtype)
    ps, optimizer = made(name, storage, dtype, weight_decay=0.1, **COMPILED)
    train(optimizer, ps, grads)
    qs, other = made(name, storage, dtype, weight_decay=0.1)
    train(other, qs, grads)
    assert kept_in_codes(optimizer) == CODED
    assert {type(x) for x in launches(optimizer)} == {ListLaunch}
    # One for those in codes, and one for the others; Ranger has two kinds of steps.
    assert len(launches(optimizer)) == (4 if name == "ranger" else 2)
    for start, p, q in zip(starts(dtype), ps, qs):
        state, known = optimizer.state[p], other.state[q]
        assert list(state) == list(known)
        for field, x in state.items():
            assert x.dtype == known[field].dtype and x.stride() == known[field].stride()
            if field.endswith("_q"):
                apart = (x.int() - known[field].int()).abs()
                # What differs by one may by two when it is rounded again.
                assert apart.max() <= 2 and (apart > 0).float().mean() < 2e-3
        moved = meant(p, state) - start.float()
        expected = meant(q, known) - start.float()
        limit = 0.1 if name == "lion" else 2e-3
        assert (moved - expected).norm() <= limit * expected.norm()


@pytest.mark.kernels
def test_one_graph_whatever_the_shapes(graphs: Any) -> None:
    """And for all storages that a kernel finds decoded alike."""
    ps, optimizer = made("adamw", "compact", BF16, **COMPILED)
    train(optimizer, ps, gradients(2))
    before = graphs()
    for storage in ("compact", "exact", Storage("exact", "8bit"), Storage("kahan8", F32)):
        for shapes in (
            [(8192,)],
            [(128, 64), (64, 4, 64)],
            [(9000,), (300, 128), (200, 64)],
        ):
            qs = [torch.ones(s, dtype=BF16, requires_grad=True) for s in shapes]
            other = AdamW(qs, lr=0.1, storage=storage, compile=True)
            for _ in range(2):
                train(other, qs, [[torch.ones_like(q) for q in qs]])
            assert {type(x) for x in launches(other)} == {ListLaunch}
            assert len(launches(other)) == 1
    assert graphs() == before


@pytest.mark.kernels
def test_a_step_makes_no_tensor_as_long_as_a_parameter() -> None:
    ps = [torch.ones(1024, 512, dtype=BF16, requires_grad=True) for _ in range(3)]
    optimizer = AdamW(ps, lr=0.1, storage="compact", compile=True)
    grads = [torch.ones_like(p) for p in ps]
    train(optimizer, ps, [grads] * 3)
    before = [p.detach().clone() for p in ps]
    with torch.profiler.profile(profile_memory=True) as profiled:
        optimizer.step()
    asked = [e.cpu_memory_usage for e in profiled.key_averages()]
    assert sum(x for x in asked if x > 0) < 10_000
    assert not any(torch.equal(p, q) for p, q in zip(ps, before))


@pytest.mark.kernels
@pytest.mark.parametrize("way", [COMPILED, {"foreach": True, "compile": None}, {}])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_skipped_step_changes_no_code(way: dict[str, Any], capturable: bool) -> None:
    """One parameter's gradient is not finite: it alone stays, by a flag on the device."""
    grads = gradients(3)
    ps, optimizer = made("adamw", "compact", BF16, capturable=capturable, **way)
    train(optimizer, ps, grads[:2])
    before = [{k: x.clone() for k, x in optimizer.state[p].items()} for p in ps]
    values = [p.detach().clone() for p in ps]
    flags = [torch.tensor(i not in (0, 4)) for i in range(len(ps))]
    kept = [WHOLE_BATCH._replace(finite=flag) for flag in flags]
    some = [g if flag else g * math.nan for g, flag in zip(grads[2], flags)]
    optimizer.update(ps, some, kept, write=True, count=True)
    for p, known, value, flag in zip(ps, before, values, flags):
        state = optimizer.state[p]
        same = [same_bits(x, known[k]) for k, x in state.items()]
        assert torch.equal(p, value) != bool(flag)
        assert not any(same) if flag else all(same)
    # And it goes on.
    train(optimizer, ps, grads[:1])
    assert all(p.isfinite().all() for p in ps)


@pytest.mark.soak
def test_parts_of_a_step_move_the_state_alone() -> None:
    """As accumulation in the state does: no parameter, and no compensation, is written."""
    ends = []
    for way in (COMPILED, {}):
        grads = gradients(4)
        ps, optimizer = made("adamw", "compact", BF16, **way)
        for i, some in enumerate(grads):
            last = i % 2 == 1
            before = [meant(p, optimizer.state[p]) for p in ps]
            parts = [WHOLE_BATCH._replace(accumulate=last)] * len(ps)
            optimizer.update(ps, some, parts, write=last, count=last)
            for p, x in zip(ps, before):
                assert torch.equal(meant(p, optimizer.state[p]), x) != last
        ends.append((ps, optimizer))
    (ps, optimizer), (qs, other) = ends
    for p, q, start in zip(ps, qs, starts()):
        a, b = meant(p, optimizer.state[p]), meant(q, other.state[q])
        assert (a - b).norm() < 2e-3 * (b - start.float()).norm()


@pytest.mark.kernels
def test_tied_and_strided_gradients_and_threads(threads: Any) -> None:
    """What the list kernel is handed is memory; how many threads does not matter."""
    ends = []
    for count in (2, 1):
        threads(count)
        ps, optimizer = made("adamw", "compact", BF16, **COMPILED)
        for some in gradients(3):
            odd = [torch.stack([g, g], -1)[..., 0] for g in some]
            train(optimizer, ps, [odd if count == 1 else some])
        ends.append(optimizer)
    assert_same_bits(*ends)


# The pure functions, compiled


def tree(dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    return dict(zip("abcdef", starts(dtype)))


@pytest.mark.full
@pytest.mark.parametrize("storage", ["compact", Storage("exact", "8bit")], ids=str)
def test_compiled_steps_of_trees(storage: Any) -> None:
    pure = adamw(lr=0.01)
    params, state = tree(), optimi_func.adamw_init(tree(), storage=storage)
    known, kept = tree(), optimi_func.adamw_init(tree(), storage=storage)
    other, own = tree(), optimi_func.adamw_init(tree(), storage=storage)
    for some in gradients(3):
        grads = dict(zip("abcdef", some))
        last = params, state
        held = [x.clone() for x in torch.utils._pytree.tree_leaves(last)]
        params, state = compiled.adamw_step(params, grads, state, lr=0.01)
        leaves = torch.utils._pytree.tree_leaves(last)
        assert all(torch.equal(x, y) for x, y in zip(leaves, held))
        known, kept = pure.step(known, grads, kept)
        compiled.adamw_step_(other, grads, own, lr=0.01)
    assert state.step == own.step == 3
    for name in "abcdef":
        entries = [state.leaves[name], own.leaves[name], kept.leaves[name]]
        assert type(entries[0].exp_avg) is type(entries[2].exp_avg)
        first, second, third = (
            widen(p[name], leaf.kahan_comp, F32)[1]
            for p, leaf in zip((params, other, known), entries)
        )
        moved = (third - tree()[name].float()).norm()
        assert (first - third).norm() < 2e-3 * moved
        assert (second - third).norm() < 2e-3 * moved


GRAPHS = [
    ("compact", "aot_eager"),
    pytest.param(Storage("exact", "8bit"), "aot_eager", marks=pytest.mark.soak),
    pytest.param("compact", "inductor", marks=pytest.mark.soak),
    pytest.param(Storage("exact", "8bit"), "inductor", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("storage", "backend"), GRAPHS)
def test_a_users_graph_has_codes_in_it(storage: Any, backend: str) -> None:
    torch._dynamo.reset()
    pure = adamw(lr=torch.tensor(0.01, dtype=torch.float64))
    step = torch.compile(pure.step, fullgraph=True, backend=backend)
    # One in another order of memory, and one whose last group is not full.
    mine = starts()[2:3] if backend == "aot_eager" else starts()[:3]
    params, state = mine, optimi_func.adamw_init(mine, storage=storage)
    known, kept = mine, optimi_func.adamw_init(mine, storage=storage)
    for some in gradients(3):
        some = some[2:3] if backend == "aot_eager" else some[:3]
        params, state = step(params, some, state)
        known, kept = pure.step(known, some, kept)
    for p, q, ours, theirs, start in zip(params, known, state.leaves, kept.leaves, mine):
        assert ours.exp_avg.q.dtype == torch.int8 and p.stride() == q.stride()
        a, b = widen(p, ours.kahan_comp, F32)[1], widen(q, theirs.kahan_comp, F32)[1]
        assert (a - b).norm() < 2e-3 * (b - start.float()).norm()


def test_a_class_in_a_users_graph() -> None:
    torch._dynamo.reset()
    ps, optimizer = made("adamw", "compact", BF16)
    qs, other = made("adamw", "compact", BF16)
    train(optimizer, ps, gradients(2))
    step = torch.compile(other.step, backend="eager")
    for some in gradients(2):
        for q, g in zip(qs, some):
            q.grad = g
        step()
    assert_same_bits(optimizer, other)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["class", "pure"])
def test_a_train_step_on_codes(kind: str) -> None:
    torch._dynamo.reset()
    ends = []
    for whole in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).to(
            BF16
        )
        start = [p.detach().clone() for p in model.parameters()]

        def loss_fn(y: Any, batch: Any) -> Tensor:
            return (y - batch[1]).float().square().mean()

        how = {} if whole else {"compile": False}
        optimizer: Any = AdamW(model.parameters(), lr=0.01, storage="compact", **how)
        batches = [
            (torch.randn(8, 64).to(BF16), torch.randn(8, 64).to(BF16)) for _ in range(3)
        ]
        if not whole:
            for batch in batches:
                loss_fn(model(batch[0]), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        elif kind == "class":
            step = compiled.train_step(model, loss_fn, optimizer)
            for batch in batches:
                step(batch)
        else:
            step = compiled.train_step(model, loss_fn, adamw(lr=0.01))
            state = step.init(storage="compact")
            for batch in batches:
                state, _ = step(state, batch)
            assert state.optimizer.leaves["0.weight"].exp_avg.q.dtype == torch.int8
            ends.append([p.float() for p in state.params.values()])
            continue
        assert any(kept_in_codes(optimizer))
        ends.append([p.detach().float() for p in model.parameters()])
    for a, b, x in zip(*ends, start):
        assert (a - b).norm() < 0.05 * (a - x.float()).norm()
