"""Transforms: each compiles, vmaps, differentiates, and equals a plain loop; they nest."""

import copy
import dataclasses
import math
import pickle
import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from cases import ELEMENTWISE, NAMES, SENSITIVE, Case, assert_moved_alike
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import plain_philox
from refusals import Scene, refused, refuses
from tiers import few
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import adamw, lion, sgd
from optimi_func.core.math import norm
from optimi_func.core.philox import philox
from optimi_func.schedules import warmup_cosine
from optimi_func.transforms import (
    GradientTransform,
    add_noise,
    apply_if_finite,
    centralize,
    chain,
    clip_global_norm,
    clip_param_norm,
    clip_value,
    ema,
    every_k,
    masked,
    partition,
)

LR, STEPS = 0.02, 12
Tensors = dict[str, Tensor]
DECAY = 0.1  # of weights: large enough to show


def adamw_of(lr: Any) -> optimi_func.FunctionalOptimizer:
    return adamw(lr=lr, weight_decay=DECAY)


def problem(steps: int = STEPS) -> tuple[Tensors, list[Tensors]]:
    torch.manual_seed(0)
    shapes = {"w": (4, 3), "b": (3,)}
    double = torch.float64
    params = {k: 1 + 0.5 * torch.randn(s, dtype=double) for k, s in shapes.items()}
    grads = [
        {k: torch.randn(s, dtype=double) * 2 * 0.9**i for k, s in shapes.items()}
        for i in range(steps)
    ]
    return params, grads


# The references: what each transform does to gradients, then a plain loop a leaf.


def each_leaf(params: Tensors, grads: list[Tensors], lr: Any) -> list[Tensors]:
    paths = {
        k: reference.adamw(p, [g[k] for g in grads], lr=lr, weight_decay=DECAY)
        for k, p in params.items()
    }
    return [dict(zip(paths, step)) for step in zip(*paths.values())]


def changed(change: Callable[[Tensors, int, float], Tensors]):
    def run(params, grads, lr, number):
        return each_leaf(params, [change(g, i, number) for i, g in enumerate(grads)], lr)

    return run


def plain_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(x.item() ** 2 for g in tensors for x in g.flatten()))


def plain_global(g: Tensors, i: int, number: float) -> Tensors:
    norm = plain_norm(list(g.values()))
    return {k: x * min(1.0, number / (norm + 1e-6)) for k, x in g.items()}


def plain_param(g: Tensors, i: int, number: float) -> Tensors:
    return {k: x * min(1.0, number / (plain_norm([x]) + 1e-6)) for k, x in g.items()}


def plain_value(g: Tensors, i: int, number: float) -> Tensors:
    return {k: x.clamp(-number, number) for k, x in g.items()}


def plain_centralize(g: Tensors, i: int, number: float) -> Tensors:
    rows = [row - sum(row) / len(row) for row in g["w"]]
    return {"w": torch.stack(rows), "b": g["b"]}


SEED = 5 * 2**32 + 7


def plain_noise(g: Tensors, i: int, number: float) -> Tensors:
    noisy = {}
    for leaf, (k, x) in enumerate(g.items()):
        z: list[float] = []
        while len(z) < x.numel():
            words = plain_philox([len(z) // 4, leaf, i, 0], [7, 5])
            u = [(w + 0.5) / 2**32 for w in words]
            for a, b in ((u[0], u[1]), (u[2], u[3])):
                r = math.sqrt(-2 * math.log(a))
                z += [r * math.cos(2 * math.pi * b), r * math.sin(2 * math.pi * b)]
        noisy[k] = x + number * torch.tensor(z[: x.numel()], dtype=x.dtype).view(x.shape)
    return noisy


def plain_masked(params, grads, lr, number):
    return [{"w": s["w"], "b": params["b"]} for s in each_leaf(params, grads, lr)]


def plain_partition(params, grads, lr, number):
    bias = each_leaf(params, grads, lr)
    weight = reference.lion(params["w"], [g["w"] for g in grads], lr=number)
    return [{"w": w, "b": s["b"]} for w, s in zip(weight, bias)]


def plain_schedule(shape: Callable[[int], float]):
    def run(params, grads, lr, number):
        return each_leaf(params, grads, [number * shape(i) for i in range(len(grads))])

    return run


BAD_STEPS = {3: "nan", 4: "inf", 8: "-inf"}


def spoil(g: Tensors, i: int) -> Tensors:
    bad = torch.zeros(4, 3, dtype=g["w"].dtype)
    bad[0, 0] = float(BAD_STEPS.get(i, 0.0))
    return {"w": g["w"] + bad, "b": g["b"]}


def plain_finite(params, grads, lr, number):
    good = [g for i, g in enumerate(grads) if i not in BAD_STEPS]
    made, path = iter(each_leaf(params, good, lr)), []
    for i in range(len(grads)):
        path.append(path[-1] if i in BAD_STEPS else next(made))
    return path


def plain_ema(debias: bool):
    def run(params, grads, lr, number):
        path = [params, *each_leaf(params, grads, lr)]
        averages = []
        for t in range(1, len(path)):
            weights = [(1 - number) * number ** (t - j) for j in range(t + 1)]
            weights[0] = 0.0 if debias else number**t
            averages.append(
                {
                    k: sum(w * p[k] for w, p in zip(weights, path)) / sum(weights)
                    for k in params
                }
            )
        return averages

    return run


def plain_every(k: int, mean: bool):
    def run(params, grads, lr, number):
        batches = [grads[i : i + k] for i in range(0, len(grads), k)]
        whole = [
            {n: sum(g[n] for g in b) / (k if mean else 1) for n in params} for b in batches
        ]
        made = each_leaf(params, whole, lr)
        return [made[(i + 1) // k - 1] if i + 1 >= k else params for i in range(len(grads))]

    return run


@dataclass(frozen=True)
class Row:
    """One transform: made of a learning rate and its own number, beside its reference."""

    make: Callable[[Any, Any], Any]
    number: float
    reference: Callable[..., list[Tensors]]
    other: Callable[[Any, Any], Any] | None = None  # with one more option changed
    see: Callable[[Any, Any], Any] = lambda params, state: params
    prepare: Callable[[Tensors, int], Tensors] = lambda grads, i: grads


def over(transform: Callable[[Any], Any]):
    return lambda lr, number: chain(transform(number), adamw_of(lr))


def scheduled(schedule: Callable[[Any], Any]):
    return lambda lr, number: chain(clip_value(1e9), adamw_of(schedule(number)))


def cosine_fall(x: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * x)


def average(params, state):
    return state.average


ROWS = {
    "clip_value": Row(over(clip_value), 0.7, changed(plain_value)),
    "clip_param_norm": Row(over(clip_param_norm), 1.5, changed(plain_param)),
    "clip_global_norm": Row(over(clip_global_norm), 2.0, changed(plain_global)),
    "centralize": Row(over(lambda number: centralize()), 0.0, changed(plain_centralize)),
    "add_noise": Row(
        over(lambda number: add_noise(number, seed=SEED)),
        0.3,
        changed(plain_noise),
        over(lambda number: add_noise(number, seed=SEED + 1)),
    ),
    "masked": Row(
        lambda lr, number: masked(adamw_of(lr), "w"),
        0.0,
        plain_masked,
        lambda lr, number: masked(adamw_of(lr), "b"),
    ),
    "partition": Row(
        lambda lr, number: partition(("w", lion(lr=number)), rest=adamw_of(lr)),
        0.01,
        plain_partition,
        lambda lr, number: partition(("b", lion(lr=number)), rest=adamw_of(lr)),
    ),
    "warmup_cosine": Row(
        scheduled(lambda number: warmup_cosine(number, warmup=3, total=10)),
        0.05,
        plain_schedule(lambda i: i / 3 if i < 3 else cosine_fall(min((i - 3) / 7, 1))),
    ),
    "apply_if_finite": Row(
        lambda lr, number: apply_if_finite(adamw_of(lr)),
        0.0,
        plain_finite,
        prepare=spoil,
    ),
    "ema": Row(
        lambda lr, number: ema(adamw_of(lr), number),
        0.8,
        plain_ema(True),
        lambda lr, number: ema(adamw_of(lr), number, debias=False),
        average,
    ),
    "ema, not debiased": Row(
        lambda lr, number: ema(adamw_of(lr), number, debias=False),
        0.8,
        plain_ema(False),
        see=average,
    ),
    "every_k": Row(
        lambda lr, number: every_k(adamw_of(lr), 3),
        0.0,
        plain_every(3, True),
        lambda lr, number: every_k(adamw_of(lr), 2),
    ),
    "every_k, sum": Row(
        lambda lr, number: every_k(adamw_of(lr), 3, reduction="sum"),
        0.0,
        plain_every(3, False),
        lambda lr, number: every_k(adamw_of(lr), 3),
    ),
}


def with_own_code_object(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Dynamo counts recompilations per code object: a function a row."""
    code = fn.__code__.replace(co_name=name)
    return types.FunctionType(code, fn.__globals__, name, None, fn.__closure__)


def run(row: Row, optimizer: Any, steps: int = STEPS) -> list[Any]:
    """What the row shows after each step."""
    params, grads = problem(steps)
    state, seen = optimizer.init(params), []
    for i, g in enumerate(grads):
        params, state = optimizer.step(params, row.prepare(g, i), state)
        seen.append(row.see(params, state))
    return seen


def flat(trees: list[Any]) -> Tensor:
    return torch.cat([x.flatten() for x in pytree.tree_leaves(trees)])


def assert_paths_alike(ours: list[Any], theirs: list[Any], tolerance: float) -> None:
    start = flat([problem()[0]] * len(ours))
    assert_moved_alike(start, flat(ours), flat(theirs), tolerance)


ALL = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
# Tracing takes a second or more: these differ in form.
IN_GRAPHS = ("clip_global_norm", "every_k")


def name_of(row: Row) -> str:
    return next(name for name in ROWS if ROWS[name] is row)


@ALL
def test_equals_a_plain_loop(row: Row) -> None:
    params, grads = problem()
    want = row.reference(params, grads, LR, row.number)
    assert_paths_alike(run(row, row.make(LR, row.number)), want, 1e-12)


@pytest.mark.parametrize("row", few(ROWS.values(), IN_GRAPHS, name_of))
def test_compiles_into_one_graph(row: Row, graphs) -> None:
    """Whatever the learning rate, the transform's number and the step are."""

    def step(p, g, s, lr, number):
        return row.make(lr, number).step(p, g, s)

    name = next(name for name in ROWS if ROWS[name] is row)
    compiled = torch.compile(
        with_own_code_object(step, name), fullgraph=True, backend="aot_eager"
    )
    params, grads = problem(4)
    ours = theirs = (params, row.make(LR, row.number).init(params))
    for i, g in enumerate(grads):
        numbers = [torch.tensor(x * (1 - 0.1 * i)).double() for x in (LR, row.number)]
        ours = compiled(ours[0], row.prepare(g, i), ours[1], *numbers)
        theirs = step(theirs[0], row.prepare(g, i), theirs[1], *numbers)
    assert graphs() == 1
    for x, y in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
        assert torch.allclose(x, y, rtol=1e-12)


@ALL
def test_vmapped_members_equal_separate_runs(row: Row) -> None:
    """Each with its own learning rate and its own number of the transform's."""
    members, (params, grads) = 3, problem(6)
    scale = torch.tensor([1.0, 0.7, 1.2], dtype=torch.float64)
    lrs, numbers = LR * scale, row.number * scale.flip(0)

    def all_steps(p, lr, number):
        optimizer = row.make(lr, number)
        state = optimizer.init(p)
        for i, g in enumerate(grads):
            p, state = optimizer.step(p, row.prepare(g, i), state)
        return row.see(p, state)

    many = pytree.tree_map(lambda x: torch.stack([x + i for i in range(members)]), params)
    got = vmap(all_steps)(many, lrs, numbers)
    for i in range(members):
        p = pytree.tree_map(lambda x, i=i: x[i], many)
        want = all_steps(p, lrs[i], numbers[i])
        mine = pytree.tree_map(lambda x, i=i: x[i], got)
        assert_moved_alike(flat([p]), flat([mine]), flat([want]), 1e-12)


@ALL
def test_hypergradient_equals_finite_differences(row: Row) -> None:
    """With respect to the learning rate and the transform's own number, both modes."""
    start, _ = problem()

    def loss(lr: Tensor, number: Tensor) -> Tensor:
        optimizer, p = row.make(lr, number), start
        state = optimizer.init(p)
        for i in range(6):
            g = {k: torch.cos((i + 1.0) * x) for k, x in p.items()}
            p, state = optimizer.step(p, row.prepare(g, i), state)
        return sum((x * x).sum() for x in row.see(p, state).values())

    at = [torch.tensor(x, dtype=torch.float64) for x in (LR, row.number)]
    got = grad(loss, argnums=(0, 1))(*at)
    h = 1e-6
    for i, x in enumerate(got):
        ends = [loss(*(y + s * h * (i == j) for j, y in enumerate(at))) for s in (1, -1)]
        want = (ends[0] - ends[1]).item() / (2 * h)
        assert x.item() == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert any(x.item() != 0 for x in got)
    forward = jvp(loss, tuple(at), tuple(torch.ones_like(x) for x in at))[1]
    assert forward.item() == pytest.approx(sum(x.item() for x in got), rel=1e-9)


@ALL
def test_numbers_and_options_change_the_answer(row: Row) -> None:
    base = flat(run(row, row.make(LR, row.number)))
    if row.number:
        assert not torch.equal(base, flat(run(row, row.make(LR, 0.9 * row.number))))
    if row.other is not None:
        assert not torch.equal(base, flat(run(row, row.other(LR, row.number))))
    bare = flat(run(Row(row.make, 0.0, row.reference, prepare=row.prepare), adamw_of(LR)))
    assert not torch.equal(base, bare)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pure(row: Row, dtype: torch.dtype) -> None:
    """Inputs unchanged, outputs in memory of their own, dtypes a fixed point, no None."""
    params, grads = pytree.tree_map(lambda x: x.to(dtype), problem(4))
    # A leaf that nothing moves comes back as it is.
    moves = {k: params[k] for k in (["w"] if row is ROWS["masked"] else ["w", "b"])}
    optimizer = row.make(LR, row.number)
    state = optimizer.init(params)
    for i, g in enumerate(grads):
        g = row.prepare(g, i)
        inputs = pytree.tree_leaves((params, g, state))
        assert all(torch.is_tensor(x) for x in inputs)
        copies = [x.clone() for x in inputs]
        new, after = optimizer.step(params, g, state)
        for x, y in zip(inputs, copies):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
        memory = {x.untyped_storage().data_ptr() for x in inputs}
        outputs = pytree.tree_leaves(({k: new[k] for k in moves}, after))
        own = [x.untyped_storage().data_ptr() for x in outputs]
        assert not memory & set(own)
        assert len(set(own)) == len(own)
        assert pytree.tree_structure(after) == pytree.tree_structure(state)
        before = pytree.tree_leaves((params, state))
        for x, y in zip(before, pytree.tree_leaves((new, after))):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
        params, state = new, after
    if dtype == torch.bfloat16:
        assert "kahan_comp=tensor" in repr(state)
        bare = optimizer.init(params, kahan_sum=False, state_dtype=torch.float32)
        assert "kahan_comp=tensor" not in repr(bare)
        kinds = [x.dtype for x in pytree.tree_leaves(bare)]
        assert torch.bfloat16 not in kinds


@ALL
def test_a_leaf_without_a_gradient_is_left_alone(row: Row) -> None:
    params, grads = problem()
    optimizer = row.make(LR, row.number)
    state = start = optimizer.init(params)
    now = params
    for i, g in enumerate(grads):
        g = {"w": row.prepare(g, i)["w"], "b": None}
        now, state = optimizer.step(now, g, state)
        assert now["b"] is params["b"]
    assert not torch.equal(now["w"], params["w"])
    keyed = dict(pytree.tree_flatten_with_path(start)[0])
    held = [
        (path, x) for path, x in pytree.tree_flatten_with_path(state)[0] if x.shape == (3,)
    ]
    assert held or row is ROWS["masked"]
    for path, x in held:
        assert torch.equal(x, keyed[path])
    now, state = optimizer.step(params, {"w": None, "b": None}, start)
    assert now["w"] is params["w"]


Pair = namedtuple("Pair", "w b")
TREES = {
    "dict": lambda w, b: {"w": w, "b": b},
    "list": lambda w, b: [w, b],
    "namedtuple": Pair,
    "nested": lambda w, b: {"deep": (w, {"b": b})},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_trees_with_empty_and_0d_leaves(tree) -> None:
    """All transforms at once, which must not care how the leaves are held."""

    def optimizer():
        return apply_if_finite(
            every_k(
                ema(
                    chain(
                        *(clip_global_norm(1.0), clip_param_norm(0.9), clip_value(0.5)),
                        *(centralize(), add_noise(0.1, seed=1)),
                        partition(
                            (lambda path, p: p.dim() == 2, lion(lr=0.1)),
                            rest=masked(adamw(lr=0.1), "*"),
                        ),
                    ),
                    0.9,
                ),
                2,
            )
        )

    leaves = (torch.ones(2, 3), [torch.ones(()), torch.ones(0), torch.ones(4, 0)])
    params = tree(*leaves)
    grads = pytree.tree_map(torch.cos, params)
    opt = optimizer()
    state = opt.init(params)
    for _ in range(4):
        params, state = opt.step(params, grads, state)
    assert type(params) is type(tree(*leaves))
    listed = [*leaves]
    twin = optimizer()
    other = twin.init(listed)
    for _ in range(4):
        listed, other = twin.step(listed, pytree.tree_map(torch.cos, [*leaves]), other)
    for x, y, start in zip(*map(pytree.tree_leaves, (params, listed, leaves))):
        assert torch.equal(x, y)
        assert x.isfinite().all()
        assert x.numel() == 0 or not torch.equal(x, start)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SENSITIVE])
def test_every_rule_under_chain(name: str) -> None:
    case, (params, grads) = Case(name), problem()
    p = params["w"]
    optimizer = chain(clip_value(0.7), centralize(), case.functional())
    q, state = p, optimizer.init(p)
    for g in grads:
        q, state = optimizer.step(q, g["w"], state)
    plain = [plain_centralize(plain_value(g, 0, 0.7), 0, 0.0)["w"] for g in grads]
    assert_moved_alike(p, q, case.reference(p, plain)[-1], 1e-12)


def issues_own(lr: Any) -> Any:
    return apply_if_finite(every_k(chain(clip_global_norm(1.0), adamw_of(lr)), 2))


def test_nested_equals_a_plain_loop() -> None:
    """A bad micro-batch is left out, the cycle takes one more, the schedule waits."""
    schedule = warmup_cosine(0.05, warmup=2, total=6)
    params, grads = problem()
    optimizer = issues_own(schedule)
    now, state = params, optimizer.init(params)
    for i, g in enumerate(grads):
        now, state = optimizer.step(now, spoil(g, i), state)
    good = [g for i, g in enumerate(grads) if i not in BAD_STEPS]
    pairs = [good[i : i + 2] for i in range(0, 8, 2)]
    whole = [{k: (a[k] + b[k]) / 2 for k in a} for a, b in pairs]
    clipped = [plain_global(g, 0, 1.0) for g in whole]
    lrs = [schedule(i) for i in range(len(clipped))]
    want = each_leaf(params, clipped, lrs)[-1]
    assert_moved_alike(flat([params]), flat([now]), flat([want]), 1e-12)
    assert state.skipped == 3
    assert state.inner.calls == 1
    assert state.inner.inner.step == 4


@pytest.mark.full
def test_random_numbers_compiled_by_inductor() -> None:
    """Made of integers that wrap around, for which Inductor has code of its own."""
    optimizer = chain(add_noise(0.1, seed=SEED), sgd(lr=0.1))
    compiled = torch.compile(optimizer.step, fullgraph=True)
    p, g = torch.ones(5), torch.linspace(-1.0, 1.0, 5)
    ours = theirs = p, optimizer.init(p)
    for _ in range(2):
        ours = compiled(ours[0], g, ours[1])
        theirs = optimizer.step(theirs[0], g, theirs[1])
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.night  # half a minute for one graph, whose parts aot_eager takes apart above
def test_nested_compiled_by_inductor(graphs) -> None:
    """One graph, also with random numbers, in float32 and bfloat16 with Kahan."""

    def optimizer(lr):
        both = partition(("w", lion(lr=lr)), rest=adamw_of(0.1))
        noisy = chain(clip_global_norm(1.0), add_noise(0.1, seed=SEED), both)
        return apply_if_finite(every_k(ema(noisy, 0.9), 2))

    def step(p, g, s, lr):
        return optimizer(lr).step(p, g, s)

    params, grads = pytree.tree_map(lambda x: x.float(), problem(6))
    params["b"], grads = (
        params["b"].bfloat16(),
        [{**g, "b": g["b"].bfloat16()} for g in grads],
    )
    compiled = torch.compile(step, fullgraph=True)
    ours = theirs = (params, optimizer(0.1).init(params))
    for i, g in enumerate(grads):
        lr = torch.tensor(0.1 / (i + 1))
        ours = compiled(ours[0], spoil(g, i), ours[1], lr)
        theirs = step(theirs[0], spoil(g, i), theirs[1], lr)
    assert graphs() == 1
    for x, y in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
        tolerance = 1e-2 if x.dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance)


WRAPPERS = {
    "clip": lambda opt: chain(clip_global_norm(0.5), opt),
    "noise": lambda opt: chain(add_noise(0.1, seed=3), centralize(), opt),
    "finite": apply_if_finite,
    "ema": lambda opt: ema(opt, 0.9),
    "every": lambda opt: every_k(opt, 2),
}
CORES = {
    "all": lambda opt: opt,
    "masked": lambda opt: masked(opt, "w"),
    "partition": lambda opt: partition(
        ("b", sgd(lr=0.1, momentum=0.9)), rest=masked(opt, "w")
    ),
}


@settings(max_examples=20)
@given(
    st.sampled_from(ELEMENTWISE),
    st.sampled_from(sorted(CORES)),
    st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=5),
)
def test_any_nest_steps_and_vmaps(rule: str, core: str, names: list[str]) -> None:
    optimizer: Any = CORES[core](Case(rule).functional(0.05))
    for name in names:
        optimizer = WRAPPERS[name](optimizer)
    params, grads = problem(4)
    now, state = params, optimizer.init(params)
    structure = pytree.tree_structure(state)
    many = pytree.tree_map(lambda x: torch.stack([x, x]), (params, state))
    for g in grads:
        now, state = optimizer.step(now, g, state)
        many = vmap(optimizer.step, in_dims=(0, None, 0))(many[0], g, many[1])
        assert pytree.tree_structure(state) == structure
    for x, y in zip(pytree.tree_leaves((now, state)), pytree.tree_leaves(many)):
        assert torch.allclose(x, y[1], rtol=1e-12, atol=1e-12)


def test_wide_gradients_reach_the_pipeline_unrounded() -> None:
    """Clipped bfloat16 gradients are not rounded again; Kahan works underneath."""
    p = torch.randn(64).bfloat16()
    g = torch.randn(64).bfloat16()
    bare, chained = adamw(lr=1e-4), chain(clip_param_norm(0.1), adamw(lr=1e-4))
    ours, theirs = (p, chained.init(p)), (p, bare.init(p))
    clipped = g.float() * (0.1 / (g.float().norm() + 1e-6))
    for _ in range(50):
        ours = chained.step(ours[0], g, ours[1])
        theirs = bare.step(theirs[0], clipped, theirs[1])
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1].inner.leaves.kahan_comp, theirs[1].leaves.kahan_comp)


# Gradient transforms.


def test_clipping_is_torchs() -> None:
    params, grads = problem(1)
    for transform, theirs in (
        (clip_global_norm(0.5), lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.5)),
        (clip_value(0.5), lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.5)),
    ):
        optimizer = chain(transform, sgd(lr=1.0))
        got, _ = optimizer.step(params, grads[0], optimizer.init(params))
        leaves = [x.clone().requires_grad_() for x in params.values()]
        for x, g in zip(leaves, grads[0].values()):
            x.grad = g.clone()
        theirs(leaves)
        want = torch.cat([(x - x.grad).flatten() for x in leaves])
        assert torch.allclose(flat([got]), want, rtol=1e-14)


def test_schedules_reach_the_numbers_of_transforms() -> None:
    optimizer = chain(clip_value(lambda t: 1.0 / (1.0 + t)), sgd(lr=1.0))
    p = torch.zeros(1)
    state, moves = optimizer.init(p), []
    for _ in range(3):
        new, state = optimizer.step(p, -torch.ones(1), state)
        moves.append((new - p).item())
        p = new
    assert moves == pytest.approx([1, 1 / 2, 1 / 3])
    averaged = ema(sgd(lr=1.0), lambda t: 0.5 * (t > 0))
    p = torch.tensor(0.0)
    state = averaged.init(p)
    for _ in range(2):
        p, state = averaged.step(p, torch.tensor(-1.0), state)
    assert state.average.item() == pytest.approx(1.5)


def test_derivatives_are_finite_at_zero_gradients() -> None:
    params, _ = problem()
    zeros = pytree.tree_map(torch.zeros_like, params)

    def loss(limit, grads):
        optimizer = chain(clip_global_norm(limit), clip_param_norm(limit), adamw_of(LR))
        new, _ = optimizer.step(params, grads, optimizer.init(params))
        return sum(x.sum() for x in new.values())

    one = torch.ones((), dtype=torch.float64)
    found = grad(loss, argnums=(0, 1))(one, zeros)
    assert all(x.isfinite().all() for x in pytree.tree_leaves(found))
    ones = pytree.tree_map(torch.ones_like, zeros)
    assert jvp(loss, (one, zeros), (one, ones))[1].isfinite()


@pytest.mark.parametrize("clip", [clip_global_norm, clip_param_norm])
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-30])
def test_second_derivatives_are_finite_at_zero_gradients(clip, scale: float) -> None:
    """Reverse over reverse, which equals forward over reverse."""

    def end(limit: Tensor, grads: Tensors) -> Tensor:
        params = {k: torch.ones(2, 2) for k in grads}
        optimizer = chain(clip(limit), sgd(lr=0.1))
        state = optimizer.init(params)
        for _ in range(2):
            params, state = optimizer.step(params, grads, state)
        return sum(((p**2).sum() for p in params.values()), torch.zeros(()))

    slopes = grad(end, argnums=(0, 1))

    def total(limit: Tensor, grads: Tensors) -> Tensor:
        found = pytree.tree_leaves(slopes(limit, grads))
        return sum((x.sum() for x in found), torch.zeros(()))

    limit, dead = torch.tensor(0.5), torch.full((2, 2), scale)
    for grads in ({"a": dead}, {"a": dead, "b": torch.ones(2, 2)}):
        found = grad(total, argnums=(0, 1))(limit, grads)
        ones = torch.ones(()), pytree.tree_map(torch.ones_like, grads)
        want = jvp(slopes, (limit, grads), ones)[1]
        for x, y in zip(pytree.tree_leaves(found), pytree.tree_leaves(want)):
            assert x.isfinite().all()
            assert torch.allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, float("inf"), float("nan")])
def test_norms_and_their_first_derivatives_are_torchs(shape: Any, scale: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * scale
    for y in (x, x.clone().requires_grad_()):
        assert torch.equal(norm(y).nan_to_num(), torch.linalg.vector_norm(x).nan_to_num())
    ours, torchs = grad(norm)(x), grad(torch.linalg.vector_norm)(x)
    assert torch.equal(ours.nan_to_num(7.0), torchs.nan_to_num(7.0))


def test_noise_of_sharded_gradients(tmp_path) -> None:
    """A DTensor gets the part of the noise that its elements have in a whole tensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    optimizer, p = chain(add_noise(0.1, seed=3), sgd(lr=1.0)), torch.zeros(4, 3)
    want, _ = optimizer.step(p, torch.ones(4, 3), optimizer.init(p))
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        q, g = (distribute_tensor(x, mesh, [Shard(0)]) for x in (p, torch.ones(4, 3)))
        moved, _ = optimizer.step(q, g, optimizer.init(q))
        assert moved.placements == (Shard(0),)
        assert torch.equal(moved.full_tensor(), want)
    finally:
        dist.destroy_process_group()


PUBLISHED = [  # kat_vectors of Random123 1.14, philox4x32 10: counter, key, words
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_philox_is_the_published_one(counter: str, key: str, words: str) -> None:
    counter, key, words = ([int(x, 16) for x in y.split()] for y in (counter, key, words))
    assert plain_philox(counter, key) == words
    made = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(x) for x in made] == words


def noise(seed: Any, steps: int, shapes: list[tuple[int, ...]]) -> list[list[Tensor]]:
    optimizer = chain(add_noise(1.0, seed=seed), sgd(lr=1.0))
    zeros = [torch.zeros(shape) for shape in shapes]
    state, drawn = optimizer.init(zeros), []
    for _ in range(steps):
        new, state = optimizer.step(zeros, zeros, state)
        drawn.append(new)
    return drawn


def test_noise_is_standard_normal_and_never_the_same() -> None:
    drawn = noise(0, 2, [(100, 100), (10000,)]) + noise(2**40, 1, [(10000,)])
    samples = [x.flatten().double() for step in drawn for x in step]
    for x in samples:
        assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.03
        assert abs((x**3).mean()) < 0.15 and abs((x**4).mean() - 3) < 0.3
    correlations = torch.corrcoef(torch.stack(samples)) - torch.eye(len(samples))
    assert correlations.abs().max() < 0.05
    x = samples[0]
    assert abs((x[1:] * x[:-1]).mean()) < 0.05


@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_vmapped_seeds(randomness: str) -> None:
    p = torch.zeros(3, 5)
    seeds = torch.tensor([1, 2, 1])

    def member(p, seed):
        optimizer = chain(add_noise(1.0, seed=seed), sgd(lr=1.0))
        return optimizer.step(p, torch.zeros_like(p), optimizer.init(p))[0]

    got = vmap(member, randomness=randomness)(p, seeds)
    assert torch.equal(got[0], got[2]) and not torch.equal(got[0], got[1])
    assert torch.equal(got[1], member(p[1], seeds[1]))


# Partition.


def model_params() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return {k: p.detach().double() for k, p in model.named_parameters()}


def test_patterns_and_predicates_find_dotted_paths() -> None:
    params = {"body": [torch.ones(2, 2), {"b": torch.ones(2)}], "head": torch.ones(2)}
    seen = []

    def is_matrix(path, p):
        seen.append(path)
        return p.dim() == 2

    optimizer = partition(
        (is_matrix, lion(lr=0.1)), ("body.*.b", sgd(lr=1.0)), rest=adamw(lr=0.2)
    )
    state = optimizer.init(params)
    assert seen == ["body.0", "body.1.b", "head"]
    assert state.places.tree == {"body": [0, {"b": 1}], "head": 2}
    new, state = optimizer.step(params, params, state)
    assert len(seen) == 3
    moved = pytree.tree_map(lambda x, y: (x - y).max().item(), params, new)
    assert moved == {
        "body": [pytest.approx(0.1), {"b": 1.0}],
        "head": pytest.approx(0.202, rel=1e-5),
    }
    assert [part.step.item() for part in state.parts] == [1, 1, 1]
    assert state.parts[2].leaves["head"].exp_avg.shape == (2,)
    named = model_params()
    state = partition(("*.weight", lion(lr=0.1)), rest=adamw(lr=0.1)).init(named)
    assert [*state.places.tree.values()] == [0, 1, 0, 1]
    alone = partition(("*", sgd(lr=1.0)))
    assert alone.step(torch.ones(2), torch.ones(2), alone.init(torch.ones(2)))[
        0
    ].tolist() == [0, 0]


def test_a_chain_in_a_chain_is_given_the_extras_of_both() -> None:
    def scaled(grads: Any, state: Any, step: Tensor, loss: Tensor) -> Any:
        return [loss * g for g in grads], state

    scale = GradientTransform(lambda params: (), scaled)
    p, loss = torch.ones(2), torch.tensor(3.0)
    for around in (lambda x: x, lambda x: ema(x, 0.5)):
        optimizer = chain(scale, around(chain(scale, sgd(lr=0.1))))
        new, _ = optimizer.step(p, p, optimizer.init(p), loss=loss)
        torch.testing.assert_close(new, p - 0.9)
    one = chain(scale, chain(clip_value(10.0), sgd(lr=0.1)))  # the inner one takes none
    torch.testing.assert_close(one.step(p, p, one.init(p), loss=loss)[0], p - 0.3)


def test_dict_order_does_not_matter() -> None:
    """Of the parameters, between init and step, through every transform but the noise."""

    def optimizer():
        both = partition(("w", lion(lr=0.1)), rest=adamw_of(0.1))
        clipped = chain(clip_global_norm(1.0), clip_param_norm(0.5), centralize(), both)
        return apply_if_finite(every_k(ema(clipped, 0.9), 2))

    params, grads = problem(4)
    opt = optimizer()
    state = opt.init(params)
    ours, theirs = (params, state), ({k: params[k] for k in ("b", "w")}, state)
    for g in grads:
        ours, theirs = opt.step(ours[0], g, ours[1]), opt.step(theirs[0], g, theirs[1])
    for k in params:
        assert torch.allclose(ours[0][k], theirs[0][k], rtol=1e-14)
        assert not torch.equal(ours[0][k], params[k])


def test_kahan_where_one_part_alone_is_bfloat16() -> None:
    params = {"w": torch.ones(2, 2).bfloat16(), "b": torch.ones(2)}
    optimizer = partition(("w", lion(lr=0.1)), rest=adamw(lr=0.1))
    state = optimizer.init(params, kahan_sum=True)
    assert state.parts[0].leaves["w"].kahan_comp is not None
    wide = pytree.tree_map(lambda x: x.float(), params)
    with pytest.warns(UserWarning, match="kahan_sum=True has no effect"):
        optimizer.init(wide, kahan_sum=True)


def test_prefixes_of_the_tree_reach_the_parts() -> None:
    params = {"a": {"w": torch.ones(2, 2), "b": torch.ones(2)}, "c": torch.ones(2, 2)}
    optimizer = partition(
        (lambda path, p: p.dim() == 2, sgd(lr={"a": 0.1, "c": 0.5})), rest=sgd(lr=1.0)
    )
    new, _ = optimizer.step(params, params, optimizer.init(params))
    assert [x.flatten()[0].item() for x in pytree.tree_leaves(new)] == pytest.approx(
        [0.9, 0, 0.5]
    )


def test_a_graph_takes_the_places_from_the_state(graphs) -> None:
    params = model_params()
    optimizer = partition(("*.weight", lion(lr=0.1)), rest=adamw(lr=0.1))
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    state = optimizer.init(params)
    for _ in range(3):
        params, state = step(params, pytree.tree_map(torch.cos, params), state)
    assert graphs() == 1
    assert [*state.places.tree.values()] == [0, 1, 0, 1]
    with pytest.raises(Exception, match="call init of partition and masked outside"):
        torch.compile(optimizer.init, fullgraph=True, backend="aot_eager")(params)


# Skipping.


def test_a_skipped_step_changes_nothing() -> None:
    params, grads = problem(6)
    optimizer = apply_if_finite(ema(chain(add_noise(0.1, seed=1), adamw_of(0.1)), 0.9))
    now, state = params, optimizer.init(params)
    for g in grads:
        now, state = optimizer.step(now, g, state)
    for value in ("nan", "inf", "-inf"):
        bad = {**grads[0], "b": torch.tensor([1.0, float(value), 1.0]).double()}
        same, after = optimizer.step(now, bad, state)
        assert torch.equal(flat([same]), flat([now]))
        for x, y in zip(pytree.tree_leaves(after.inner), pytree.tree_leaves(state.inner)):
            assert torch.equal(x, y)
        assert (after.consecutive.item(), after.skipped.item()) == (1, 1)
    twice = optimizer.step(same, bad, after)[1]
    assert (twice.consecutive.item(), twice.skipped.item()) == (2, 2)
    fine = optimizer.step(same, grads[0], twice)[1]
    assert (fine.consecutive.item(), fine.skipped.item()) == (0, 2)


def test_a_skipped_step_differentiates_in_forward_mode() -> None:
    """Reverse mode is 0 * inf in the loss itself, as the guide says."""

    def end(lr: Tensor, detach: bool = False) -> Tensor:
        optimizer, p = apply_if_finite(sgd(lr=lr)), torch.ones((), dtype=torch.float64)
        state = optimizer.init(p)
        for x in (0.1, 1000.0, 0.1):
            g = grad(lambda p, x=x: torch.exp(p * x))(p.detach() if detach else p)
            p, state = optimizer.step(p, g, state)
        assert state.skipped == 1.0
        return p

    lr, h = torch.tensor(0.1, dtype=torch.float64), 1e-6
    want = (end(lr + h) - end(lr - h)) / (2 * h)
    assert torch.allclose(torch.func.jacfwd(end)(lr), want)
    assert grad(end)(lr).isnan()
    assert torch.allclose(grad(lambda lr: end(lr, True))(lr), want, rtol=0.05)


def test_too_many_bad_steps_in_a_row_are_let_through() -> None:
    p, bad, good = torch.ones(2), torch.tensor([1.0, float("nan")]), torch.ones(2)
    optimizer = apply_if_finite(sgd(lr=0.1), max_consecutive=2)
    q, state = p, optimizer.init(p)
    for g in (bad, bad, good, bad, bad):
        q, state = optimizer.step(q, g, state)
        assert q.isfinite().all()
    assert (state.consecutive.item(), state.skipped.item()) == (2, 4)
    q, state = optimizer.step(q, bad, state)
    assert q[0] == pytest.approx(0.8) and q[1].isnan()
    assert (state.consecutive.item(), state.skipped.item()) == (3, 4)
    none = apply_if_finite(sgd(lr=0.1), max_consecutive=0)
    assert none.step(p, bad, none.init(p))[0].isnan().any()


# Accumulation.


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SENSITIVE])
def test_k_micro_batches_are_one_batch(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(48, 5).double(), torch.randn(48, 1).double()
    p = {"w": torch.randn(5, 1).double(), "b": torch.randn(1, 1).double()}

    def gradient(p, at, parts):
        def loss(p):
            return (x[at] @ p["w"] + p["b"] - y[at]).square().mean() / parts

        return grad(loss)(p)

    k = 4
    bare = Case(name).functional()
    optimizer = every_k(bare, k, reduction=reduction)
    ours, theirs = (p, optimizer.init(p)), (p, bare.init(p))
    for i in range(6):
        rows = torch.arange(48).roll(7 * i)
        theirs = bare.step(theirs[0], gradient(theirs[0], rows, 1), theirs[1])
        for part in rows.chunk(k):
            g = gradient(ours[0], part, k if reduction == "sum" else 1)
            ours = optimizer.step(ours[0], g, ours[1])
    assert_moved_alike(flat([p]), flat([ours[0]]), flat([theirs[0]]), 1e-12)
    assert ours[1].inner.step == 6


def test_sums_of_bfloat16_gradients_are_float32() -> None:
    p, g = torch.zeros(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    optimizer = every_k(sgd(lr=1.0), 400)
    state = optimizer.init(p)
    for _ in range(399):
        p, state = optimizer.step(p, g, state)
    assert state.sums.item() == 399  # a bfloat16 sum stops at 256


def test_a_leaf_without_its_kth_gradient_keeps_its_sum() -> None:
    p = {"a": torch.zeros(1), "b": torch.zeros(1)}
    one = torch.ones(1)
    optimizer = every_k(sgd(lr=1.0), 2, reduction="sum")
    state = optimizer.init(p)
    for b in (one, None, None, one):
        p, state = optimizer.step(p, {"a": one, "b": b}, state)
    assert p["a"].item() == -4
    assert p["b"].item() == -2


# Averages.


def test_averages_of_bfloat16_parameters_are_float32() -> None:
    p = torch.ones(1, dtype=torch.bfloat16)
    optimizer = ema(sgd(lr=0.0), 0.999, debias=False)
    state = optimizer.init(p)
    for _ in range(100):
        _, state = optimizer.step(2 * p, p, state)
    assert state.average.dtype == torch.float32
    assert state.average.item() == pytest.approx(2 - 0.999**100, rel=1e-5)


@pytest.mark.parametrize("debias", [True, False])
def test_averages_differentiate_by_the_first_parameters(debias: bool) -> None:
    optimizer = ema(sgd(lr=0.1), 0.9, debias=debias)

    def average(p):
        state = optimizer.init(p)
        for _ in range(3):
            p, state = optimizer.step(p, 2 * p, state)
        return state.average

    p = torch.tensor(2.0, dtype=torch.float64)
    # Everything is a multiple of the first parameter.
    assert grad(average)(p).item() == pytest.approx(average(p).item() / 2.0, rel=1e-12)


S = sgd(lr=0.1)
BAD = {
    "clip_value(0.0)": r"limit=0\.0: allowed is finite, above 0\.0",
    "clip_value(float('inf'))": "limit=inf",
    "clip_param_norm(-1.0)": r"max_norm=-1\.0",
    "clip_global_norm(0)": "max_norm=0",
    "clip_global_norm('1')": "TypeError: max_norm='1'",
    "add_noise(-0.1, seed=1)": r"std=-0\.1",
    "add_noise(0.1, seed=-1)": "seed=-1",
    "add_noise(0.1, seed=0.5)": r"TypeError: seed=0\.5",
    "add_noise(0.1, seed=torch.ones(2))": r"TypeError: shape \(2,\)",
    "chain()": "TypeError: chain got 0 parts",
    "chain(sgd(lr=0.1))": "TypeError: chain got 1 parts",
    "chain(clip_value(1.0))": "TypeError: allowed are one optimizer",
    "chain(sgd(lr=0.1), sgd(lr=0.1))": "TypeError: of which 2 are no gradient transforms",
    "chain(clip_value(1.0), torch.optim.SGD([torch.ones(1)], lr=0.1))": (
        "TypeError: has no init"
    ),
    "ema(optimi_func.SGD, 0.9)": "TypeError: ema got <class",
    "ema(sgd(lr=0.1), 1.0)": r"decay=1\.0.*below 1",
    "ema(sgd(lr=0.1), -0.1)": r"decay=-0\.1",
    "every_k(sgd(lr=0.1), 0)": "k=0: allowed are whole numbers from 1",
    "every_k(sgd(lr=0.1), 2.0)": r"k=2\.0",
    "every_k(sgd(lr=0.1), 2, reduction='x')": "reduction='x'",
    "apply_if_finite(sgd(lr=0.1), max_consecutive=-1)": "=-1",
    "partition()": "partition got no part",
    "partition(sgd(lr=0.1))": "TypeError: partition's part 0 is sgd",
    "partition((1, sgd(lr=0.1)))": "TypeError: got 1 to select by",
    "partition(('*', 1))": "TypeError: partition got 1, which has no init",
    "masked(sgd(lr=0.1), None)": "TypeError: masked got None to select by",
    "masked(S, '*.wieght').init(params)": (
        r"masked: '\*\.wieght' selects no parameter.*'0\.weight', '0\.bias', "
    ),
    "partition(('0.*', S), ('2.*', S), rest=S).init(params)": (
        r"'2\.\*' selects no parameter"
    ),
    "partition(('*', S), ('*.bias', S)).init(params)": (
        r"'\*\.bias' selects no parameter that the parts before it leave"
    ),
    "partition(('0.*', S)).init(params)": r"nothing selects '1\.weight', '1\.bias'.*rest=",
    "partition(('*', S), rest=S).init(params)": "no parameter is left for",
    "masked(S, lambda path, p: p.sum() < 1e9).init(params)": (
        r"TypeError: said tensor\(True\) of '0\.weight'"
    ),
    "masked(S, 'x').init(many)": r"'p19' and 10 more$",
    "two.step(p, p, one.init(p))": "state holds 1 gradient transforms, chain",
    "split.step(p, p, whole.init(p))": "state has 1 parts, partition has 2",
    "split.init(p, storage='compact')": "no parameter is bfloat16",
    "split.init(p, storage=Storage(moments='8bit'))": "sgd keeps no moments",
}


@refuses(BAD)
def test_bad_transforms() -> Scene:
    params, p = model_params(), {"w": torch.randn(64, 128), "b": torch.ones(8)}
    many = {f"p{i}": torch.ones(1) for i in range(30)}
    one, two = chain(clip_value(1.0), S), chain(clip_value(1.0), centralize(), S)
    split, whole = partition(("w", S), rest=S), partition(("*", S))
    return locals() | {"optimi_func": optimi_func}


@ALL
def test_wrong_states_and_trees(row: Row) -> None:
    params, grads = problem(1)
    optimizer, g = row.make(LR, row.number), grads[0]
    state = optimizer.init(params)
    for other in (S.init(params), {}, None, state.inner if hasattr(state, "inner") else 1):
        with pytest.raises(TypeError, match=r"is not the \w+State that \w+ needs"):
            optimizer.step(params, g, other)
    for bad, text in (
        ({"w": g["w"]}, r"grads and params differ.*\['b'\]"),
        ({"w": g["b"], "b": g["b"]}, r"grads\['w'\] has shape \(3,\)"),
    ):
        step = partial(optimizer.step, params, bad, state)
        refused(step, ValueError, text, [params, bad, state])
    refused(partial(optimizer.init, {}), ValueError, "holds no tensor")


@pytest.mark.full
def test_many_transforms_in_one_process_are_compiled() -> None:
    """Each has a step of its own for Dynamo, which recompiles a code object 8 times."""
    p, g = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    transforms = [
        *[chain(clip_value(float(i)), optimi_func.sgd(lr=1.0)) for i in range(1, 10)],
        *[every_k(optimi_func.sgd(lr=0.1), k) for k in range(1, 3)],
    ]
    for optimizer in transforms:
        state = optimizer.init(p)
        step = torch.compile(optimizer.step, fullgraph=True, backend="eager")
        new, _ = step(p, g, state)
        expected, _ = optimizer.step(p, g, state)
        assert torch.equal(new["w"], expected["w"])
    codes = {optimizer.step.__code__ for optimizer in transforms[:1]}
    assert codes == {transforms[1].step.__code__}  # alike, and not one
    assert transforms[0].step.__code__ is not transforms[1].step.__code__


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled, dataclasses.replace])
def test_a_copy_of_a_transform_steps_by_itself(copied: Any) -> None:
    inner = every_k(optimi_func.adamw(lr=0.1), 2)
    other = copied(inner)
    assert other.step.__self__ is other and other.step.__code__ is not inner.step.__code__
    assert (other.k, repr(other)) == (inner.k, repr(inner))
    p, g = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    (a, s), (b, t) = (o.step(p, g, o.init(p)) for o in (inner, other))
    assert torch.equal(a["w"], b["w"]) and torch.equal(s.sums["w"], t.sums["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_the_step_are_double(dtype: torch.dtype) -> None:
    """In float32, 1 - 0.9999**t would be off by 2e-4 of itself."""
    seen: list[Tensor] = []

    def corrected(gs: Any, mean: Tensor, step: Tensor, beta: Any) -> Any:
        seen.append(1.0 - beta ** (step + 1.0))
        mean = mean + 0.0 * step
        return [g / seen[-1] for g in gs], mean

    def zero(params: Any) -> Tensor:
        return torch.zeros((), dtype=torch.float32)

    def rising(step: Tensor) -> Tensor:
        return 1.0 - 0.9999 ** (step + 1.0)

    transform = GradientTransform(zero, corrected, {"beta": 0.9999})
    p = [torch.zeros(2, dtype=dtype), torch.zeros((), dtype=dtype)]
    g = [torch.full_like(x, 1e-4) for x in p]
    optimizer = chain(transform, sgd(lr=rising))
    state = optimizer.init(p)
    kinds = [x.dtype for x in pytree.tree_leaves(state)]
    for t in range(1, 4):
        want = 1.0 - 0.9999**t
        moved, after = optimizer.step(p, g, state)
        assert seen[-1].item() == pytest.approx(want, rel=1e-10)
        for x in moved:  # rising / corrected is 1
            torch.testing.assert_close(x, torch.full_like(x, -1e-4), rtol=1e-6, atol=0.0)
        assert [x.dtype for x in pytree.tree_leaves(after)] == kinds
        state = after


def test_a_schedule_of_a_transforms_number_is_double() -> None:
    limit = clip_value(lambda step: 1.0 - 0.9999 ** (step + 1.0))
    p = torch.zeros((), dtype=torch.float64)
    optimizer = chain(limit, sgd(lr=1.0))
    moved, _ = optimizer.step(p, p + 1.0, optimizer.init(p))
    assert moved.item() == pytest.approx(-(1.0 - 0.9999), rel=1e-10)


def test_noise_of_0_adds_nothing() -> None:
    opt, p, g = chain(add_noise(0.0, seed=0), sgd(lr=1.0)), torch.zeros(3), torch.ones(3)
    assert torch.equal(opt.step(p, g, opt.init(p))[0], -g)


# Kept and given


SCHEDULED = {
    "lr": lambda schedule: sgd(lr=schedule),
    "limit": lambda schedule: chain(clip_value(schedule), sgd(lr=0.1)),
    "max_norm": lambda schedule: chain(clip_global_norm(schedule), sgd(lr=0.1)),
    "std": lambda schedule: chain(add_noise(schedule, seed=1), sgd(lr=0.1)),
    "decay": lambda schedule: ema(sgd(lr=0.1), schedule),
}


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (None, TypeError, "returned None: allowed are numbers"),
        ("0.1", TypeError, "returned '0.1': allowed are numbers"),
        (True, TypeError, "returned True: allowed are numbers"),
        (float("nan"), ValueError, "returned nan: allowed are numbers from 0"),
        (-0.1, ValueError, r"returned -0\.1: allowed are numbers from 0"),
        (torch.ones(1), ValueError, r"returned a tensor of shape \(1,\)"),
    ],
)
def test_what_a_schedule_may_not_return(name, number, error, text) -> None:
    """A host number that the factory would refuse is refused from a schedule too."""
    optimizer = SCHEDULED[name](lambda step: number)
    p = {"w": torch.ones(2)}
    state = optimizer.init(p)
    with pytest.raises(error, match=f"^{name} is a schedule that {text}"):
        optimizer.step(p, p, state)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "std"])
@pytest.mark.parametrize("number", [math.inf, torch.tensor(math.inf)], ids=repr)
def test_only_a_limit_may_be_inf(name, number) -> None:
    made = {**SCHEDULED, "weight_decay": lambda s: sgd(lr=0.1, weight_decay=s)}
    p = {"w": torch.ones(2)}
    optimizer = made[name](lambda step: number)
    with pytest.raises(ValueError, match=f"^{name} is a schedule that returned inf: .*inf"):
        optimizer.step(p, p, optimizer.init(p))
    for limit in ("limit", "max_norm"):
        optimizer = made[limit](lambda step: number)
        moved, _ = optimizer.step(p, p, optimizer.init(p))
        assert torch.equal(moved["w"], torch.full((2,), 0.9))


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), torch.tensor(0.5)], ids=repr)
def test_what_a_schedule_may_return(number) -> None:
    p = {"w": torch.ones(2)}
    for make in SCHEDULED.values():
        scheduled, bound = make(lambda step: number), make(0.5)
        new, _ = scheduled.step(p, p, scheduled.init(p))
        expected, _ = bound.step(p, p, bound.init(p))
        torch.testing.assert_close(new, expected, rtol=1e-6, atol=0)


def mixed_tree() -> dict[str, torch.Tensor]:
    """A matrix large enough for codes, in bfloat16, and a norm's weight in float32."""
    return {"w": torch.randn(64, 128, dtype=torch.bfloat16), "norm": torch.ones(8)}


@pytest.mark.parametrize(
    "rest",
    [adamw(lr=0.1), sgd(lr=0.1), chain(clip_global_norm(1.0), sgd(lr=0.1))],
    ids=["adamw", "sgd", "chained sgd"],
)
@pytest.mark.parametrize("storage", ["compact", "exact"])
def test_parts_are_stored_as_the_whole_would_be(rest, storage: str) -> None:
    """A part without bfloat16 parameters or moments takes of a storage what it can."""
    p = mixed_tree()
    split = partition(("w", adamw(lr=0.1)), rest=rest)
    state = split.init(p, storage=storage)
    whole = adamw(lr=0.1).init(p, storage=storage)
    ours, theirs = state.parts[0].leaves["w"], whole.leaves["w"]
    for x, y in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
        assert x.dtype == y.dtype
    assert ours.kahan_comp.dtype == {"compact": torch.int8, "exact": torch.int16}[storage]
    grads = pytree.tree_map(torch.sin, p)
    new, state = split.step(p, grads, state)
    expected, _ = adamw(lr=0.1).step(p, grads, whole)
    assert torch.equal(new["w"], expected["w"])
    assert not torch.equal(new["norm"], p["norm"])


CODED = {
    "chain": lambda: chain(clip_global_norm(1.0), add_noise(0.1, seed=1), adamw(lr=0.01)),
    "every_k": lambda: every_k(adamw(lr=0.01), 2),
    "ema": lambda: ema(adamw(lr=0.01), 0.9),
    "apply_if_finite": lambda: apply_if_finite(adamw(lr=0.01)),
    "partition": lambda: partition(("w", adamw(lr=0.01)), rest=lion(lr=0.01)),
}


@pytest.mark.parametrize("name", CODED)
def test_states_in_codes_save_load_and_vmap(name: str, tmp_path) -> None:
    """Under every transform: the leaves resume to the bit, members equal single runs."""
    optimizer = CODED[name]()

    def run(p, state, steps=3):
        for i in range(steps):
            grads = pytree.tree_map(lambda x, i=i: torch.sin(3.0 * x + i), p)
            p, state = optimizer.step(p, grads, state)
        return p, state

    def start(p):
        return optimizer.init(p, storage="compact")

    p = mixed_tree()
    after, state = run(p, start(p))
    leaves = pytree.tree_leaves(state)
    assert {torch.int8, torch.uint8} <= {x.dtype for x in leaves}
    torch.save(leaves, tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    resumed = pytree.tree_unflatten(loaded, pytree.tree_structure(start(p)))
    for x, y in zip(
        pytree.tree_leaves(run(after, state)), pytree.tree_leaves(run(after, resumed))
    ):
        assert torch.equal(x, y)

    members = pytree.tree_map(lambda x: torch.stack([x, 0.5 * x])[None], p)
    many = torch.func.vmap(torch.func.vmap(lambda p: run(p, start(p), 2)))(members)
    one = pytree.tree_map(lambda x: 0.5 * x, p)
    for x, y in zip(pytree.tree_leaves(many), pytree.tree_leaves(run(one, start(one), 2))):
        assert torch.equal(x[0, 1], y)
