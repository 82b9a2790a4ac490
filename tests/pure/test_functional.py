"""The pure API: trees, purity, transformations, numbers, eval_params, bad input."""

import copy
import pickle
import re
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cases import (
    CASES,
    ELEMENTWISE,
    MATRICES,
    NAMES,
    NO_EPS,
    SCHEDULE_FREE,
    SENSITIVE,
    SOME,
    STILL,
    USUAL,
    Case,
    assert_moved_alike,
    count_betas,
    problem,
)
from refusals import Scene, refuses
from tiers import few
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import (
    adamw,
    adamw_init,
    adamw_step,
    schedule_free_adamw,
    schedule_free_sgd,
    sgd,
)
from optimi_func.transforms import (
    apply_if_finite,
    chain,
    clip_value,
    ema,
    every_k,
    masked,
    partition,
)

Pair = namedtuple("Pair", "w b")


@dataclass
class Net:
    w: torch.Tensor
    b: torch.Tensor


pytree.register_dataclass(Net)


def step_of(name: str):
    step = getattr(optimi_func, f"{name}_step")
    return partial(step, **USUAL) if name == "prodigy" else step


def init_of(name: str):
    return getattr(optimi_func, f"{name}_init")


W, B = torch.randn(3, 2), torch.randn(1, 2)
TREES = {
    "tensor": W,
    "dict": {"w": W, "b": B},
    "nested": {"layer": {"w": W, "b": [B, (W, B)]}},
    "list": [W, B],
    "tuple": (W, B),
    "namedtuple": Pair(W, B),
    "dataclass": Net(W, B),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_trees(name: str, tree) -> None:
    grads = pytree.tree_map(torch.ones_like, tree)
    state = init_of(name)(tree)
    params, state = step_of(name)(tree, grads, state, lr=0.1)
    assert type(params) is type(tree)
    assert pytree.tree_structure(params) == pytree.tree_structure(tree)
    for before, after in zip(pytree.tree_leaves(tree), pytree.tree_leaves(params)):
        assert (before != after).all() or name in STILL
    assert state.step == 1
    _, state = step_of(name)(params, grads, state, lr=0.1)
    assert state.step == 2


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
@pytest.mark.filterwarnings("ignore:eps=", "ignore:weight_decay=")
def test_pure(case: Case) -> None:
    """Inputs unchanged, outputs in memory of their own, dtypes a fixed point."""
    for dtype in (torch.float32, torch.bfloat16):
        shapes = ((5,), ()) if case.name in ELEMENTWISE else ((7, 5), (2, 7, 5))
        shapes = ((7, 5), ()) if case.name in ("adafactor", *SENSITIVE) else shapes
        params = {k: torch.randn(x, dtype=dtype) for k, x in zip("ab", shapes)}
        grads = pytree.tree_map(torch.randn_like, params)
        optimizer = case.functional()
        state = optimizer.init(params)
        for _ in range(7):
            inputs = pytree.tree_leaves((params, grads, state))
            copies = [x.clone() for x in inputs]
            new = optimizer.step(params, grads, state)
            assert all(torch.equal(x, y) for x, y in zip(inputs, copies))
            inputs, results = (
                [x.untyped_storage().data_ptr() for x in tensors if x.numel()]
                for tensors in (inputs, pytree.tree_leaves(new))
            )
            old_memory, new_memory = {*inputs}, results
            assert not old_memory & set(new_memory)
            assert len(set(new_memory)) == len(new_memory)
            for x, y in zip(pytree.tree_leaves((params, state)), pytree.tree_leaves(new)):
                assert (x.shape, x.dtype) == (y.shape, y.dtype)
            params, state = new


def test_none_gradients_give_the_same_objects_back() -> None:
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    state = adamw_init(params)
    new, after = adamw_step(params, {"a": None, "b": torch.ones(3)}, state, lr=0.1)
    assert new["a"] is params["a"]
    assert after.leaves["a"] is state.leaves["a"]
    assert new["b"] is not params["b"]


def test_dict_order_does_not_matter() -> None:
    params = {"a": torch.zeros(2), "b": torch.zeros(3)}
    grads = {"b": torch.ones(3), "a": 2 * torch.ones(2)}
    new, _ = optimi_func.sgd_step(params, grads, optimi_func.sgd_init(params), lr=1.0)
    assert new["a"].tolist() == [-2, -2]


def test_no_leaf_is_none_or_a_number() -> None:
    for name in NAMES:
        for dtype in (torch.float32, torch.bfloat16):
            state = init_of(name)({"a": torch.ones(2, 2, dtype=dtype)})
            assert all(torch.is_tensor(x) for x in pytree.tree_leaves(state))


def test_states_copy_and_pickle() -> None:
    state = adamw_init({"w": torch.ones(2, dtype=torch.bfloat16)})
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert pytree.tree_structure(twin) == pytree.tree_structure(state)
        assert twin.leaves["w"].exp_avg.dtype == torch.bfloat16
    assert "kahan_comp" in repr(state)
    keyed, _ = pytree.tree_flatten_with_path(state)
    assert ".leaves['w'].exp_avg_sq" in [pytree.keystr(k) for k, _ in keyed]


def unrolled(name: str, zeros: bool):
    """Loss after three steps as a function of the numbers."""

    def loss(lr, betas, eps, p, state):
        for i in range(3 + STILL.get(name, 0)):
            g = torch.zeros_like(p) if zeros else torch.cos((i + 1.0) * p)
            more = {"betas": betas} if count_betas(name) else {}
            if name in (*MATRICES, "schedule_free_sgd"):
                more = {"momentum": betas[0]}
            if name not in NO_EPS:
                more["eps"] = eps
            if name == "normuon":
                more["row_beta"] = betas[1]
            if name == "adafactor":
                more = {"eps": (eps, 10 * eps), "beta1": betas[0], "scale_parameter": True}
            p, state = step_of(name)(p, g, state, lr=lr, weight_decay=0.01, **more)
        return (p * p).sum()

    return loss


def fresh(name: str, p):
    return init_of(name)(p, **({"beta1": 0.5} if name == "adafactor" else {}))


def numbers(name: str, b: float = 0.9):
    double = torch.float64
    betas = tuple(torch.tensor(b, dtype=double) for _ in range(count_betas(name) or 2))
    return torch.tensor(0.1, dtype=double), betas, torch.tensor(1e-3, dtype=double)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("b", [0.0, 0.9])
@pytest.mark.parametrize("zeros", [False, True], ids=["gradients", "zeros"])
def test_gradients_through_steps_are_finite(name: str, b: float, zeros: bool) -> None:
    """Reverse and forward, with respect to everything, also where v = 0 or beta = 0."""
    p = torch.linspace(0.5, 1.5, 4, dtype=torch.float64).view(2, 2)
    state = fresh(name, p)
    loss = unrolled(name, zeros)
    args = (*numbers(name, b), p, state)
    reverse = grad(loss, argnums=(0, 1, 2, 3, 4))(*args)
    assert all(x.isfinite().all() for x in pytree.tree_leaves(reverse))
    tangents = pytree.tree_map(torch.ones_like, args[:4])
    tangents = (*tangents, pytree.tree_map(torch.zeros_like, state))
    _, forward = jvp(loss, args, tangents)
    summed = sum(x.sum() for x in pytree.tree_leaves(reverse[:4]))
    assert forward.item() == pytest.approx(summed.item(), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_hypergradient_equals_finite_differences(name: str) -> None:
    p = torch.linspace(0.5, 1.5, 4, dtype=torch.float64).view(2, 2)
    lr, betas, eps = numbers(name)
    loss, state = unrolled(name, False), fresh(name, p)
    ours = grad(loss)(lr, betas, eps, p, state)
    h = 1e-6
    ends = [loss(lr + s * h, betas, eps, p, state) for s in (1, -1)]
    assert ours.item() == pytest.approx(((ends[0] - ends[1]) / (2 * h)).item(), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("scale", "beta"), [(0.0, 0.0), (0.0, None), (1e-30, 0.0), (1e-5, None)]
)
def test_second_derivatives_are_finite_at_zero_gradients(
    name: str, scale: float, beta: float | None
) -> None:
    """Reverse over reverse, by the learning rate and by the gradients, in float32."""
    make = getattr(optimi_func, name)
    # A root of its usual eps1, 1e-30, has no second derivative in float32.
    more = {"eps": (1e-12, 1e-3)} if name == "adafactor" else {}
    if beta is not None and count_betas(name) and name not in SCHEDULE_FREE:
        more["betas"] = (torch.tensor(beta),) * count_betas(name)

    def end(lr, g):
        optimizer, p = make(lr=lr, **more), torch.ones(2, 2)
        state = optimizer.init(p)
        for _ in range(2):
            p, state = optimizer.step(p, g, state)
        return (p**2).sum()

    def slopes(lr, g):
        return sum(x.sum() for x in torch.func.grad(end, argnums=(0, 1))(lr, g))

    given = torch.tensor(0.1), torch.full((2, 2), scale)
    for found in torch.func.grad(slopes, argnums=(0, 1))(*given):
        assert found.isfinite().all()


def test_lions_derivative_is_that_of_a_sign() -> None:
    def end(hyper, data):
        p = torch.tensor([1.0, -2.0])
        optimizer = optimi_func.lion(**hyper)
        state = optimizer.init(p)
        for _ in range(3):
            p, state = optimizer.step(p, data * p, state)
        return (p**2).sum()

    hyper = {"lr": torch.tensor(0.1), "weight_decay": torch.tensor(0.1)}
    hyper["betas"] = (torch.tensor(0.9), torch.tensor(0.99))
    slopes, by_data = torch.func.grad(end, argnums=(0, 1))(hyper, torch.ones(2))
    assert slopes["lr"] != 0
    assert slopes["weight_decay"] != 0
    assert slopes["betas"] == (0, 0)
    assert by_data.tolist() == [0, 0]


def test_a_training_step_composes_with_torch_func() -> None:
    model = torch.nn.Linear(3, 1)
    params = dict(model.named_parameters())
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def loss(p):
        return (functional_call(model, p, x) - y).square().mean()

    state = adamw_init(params)
    new, state = adamw_step(params, grad(loss)(params), state, lr=0.1)
    assert loss(new) < loss(params)


@pytest.mark.parametrize("name", few(NAMES, SOME))
def test_traces_into_one_graph(name: str, graphs) -> None:
    """Under a user's fullgraph compile; a tensor lr and the step never retrace."""
    torch._dynamo.reset()  # which counts graphs by the line
    case = Case(name)
    step = torch.compile(
        lambda p, g, s, lr: step_of(name)(p, g, s, lr=lr),
        fullgraph=True,
        backend="aot_eager",
    )
    p, grads = problem((2, 2), steps=5)
    q, state = {"w": p}, init_of(name)({"w": p})
    for i, g in enumerate(grads):
        q, state = step(q, {"w": g}, state, torch.tensor(0.02 / (i + 1)))
    assert graphs() == 1
    lrs = [torch.tensor(0.02 / (i + 1)).item() for i in range(5)]
    assert_moved_alike(p, q["w"], case.reference(p, grads, lrs)[-1], 1e-12)


@pytest.mark.parametrize("name", few(NAMES, SOME))
def test_python_numbers_that_change_are_one_more_graph(name: str, graphs) -> None:
    """The first is a constant of its graph, and all others are the second's."""
    torch._dynamo.reset()  # which counts graphs by the line
    step = torch.compile(
        lambda p, g, s, lr: step_of(name)(p, g, s, lr=lr),
        fullgraph=True,
        backend="eager",
    )
    p, grads = problem((2, 2), steps=5)
    q, state = {"w": p}, init_of(name)({"w": p})
    lrs = [0.02 / (i + 1) for i in range(5)]
    for g, lr in zip(grads, lrs):
        q, state = step(q, {"w": g}, state, lr)
    assert graphs() <= 2
    assert_moved_alike(p, q["w"], Case(name).reference(p, grads, lrs)[-1], 1e-12)


@pytest.mark.parametrize(
    "number",
    [
        lambda x: {"betas": (x, 0.99)},
        lambda x: {"betas": (0.9, x)},
        lambda x: {"eps": 1e-3 * x},
        lambda x: {"weight_decay": x},
        lambda x: {"lr": x, "weight_decay": 1e-4, "decouple_lr": True, "max_lr": 1.0},
        lambda x: {"weight_decay": 1e-4, "decouple_lr": True, "max_lr": x + 0.1},
    ],
)
def test_every_number_may_change_in_a_graph(number, graphs) -> None:
    torch._dynamo.reset()

    def plain(p, s, x):
        return optimi_func.adamw_step(p, p, s, **{"lr": 0.1, **number(x)})

    step = torch.compile(plain, fullgraph=True, backend="eager")
    p = q = {"w": torch.ones(3, dtype=torch.float64)}
    s = t = optimi_func.adamw_init(p)
    for x in (0.0, 0.3, 0.2, 0.7, 0.0):
        (p, s), (q, t) = step(p, s, x), plain(q, t, x)
    assert graphs() <= 2
    assert_moved_alike(torch.ones(3), p["w"], q["w"], 1e-12)


def test_an_optimizer_that_a_graph_makes_of_tensors(graphs) -> None:
    """One graph for all values, the bits of numbers, derivatives and members by them."""
    torch._dynamo.reset()

    def plain(p, s, lr, first, second):
        return adamw(lr=lr, betas=(first, second)).step(p, p, s)

    step = torch.compile(plain, fullgraph=True, backend="eager")
    start = {"w": torch.linspace(-1.0, 1.0, 7)}
    ours = theirs = start, adamw_init(start)
    rows = [(0.1, 0.9, 0.99), (0.03, 0.8, 0.9), (0.2, 0.5, 0.7)]
    for row in rows:
        tensors = torch.tensor(row, dtype=torch.float64).unbind()
        ours, theirs = step(*ours, *tensors), plain(*theirs, *row)
        assert torch.equal(ours[0]["w"], theirs[0]["w"])
    assert graphs() == 1
    params, state = pytree.tree_map(lambda x: x.double(), ours)

    def end(*numbers):
        return plain(params, state, *numbers)[0]["w"].square().sum()

    at, h = torch.tensor(rows[0], dtype=torch.float64).unbind(), 1e-6
    for i, slope in enumerate(grad(end, argnums=(0, 1, 2))(*at)):
        ends = [end(*(x + z * h * (i == j) for j, x in enumerate(at))) for z in (1, -1)]
        assert slope.item() == pytest.approx((ends[0] - ends[1]).item() / (2 * h), rel=1e-6)
        assert abs(slope) > 1e-3
    columns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    each = torch.stack([end(*x) for x in torch.stack(columns, 1).unbind()])
    torch.testing.assert_close(vmap(end)(*columns), each)


def test_schedules_are_called_with_the_step_before() -> None:
    seen = []

    def lr(step):
        seen.append(step.item())
        assert step.dim() == 0
        return 0.1 / (step + 1)

    optimizer = adamw(lr=lr, betas=(lambda s: 0.9 - 0.1 * s, 0.99), weight_decay=0.0)
    p = torch.ones(2, dtype=torch.float64)
    q, state = p, optimizer.init(p)
    grads = [torch.full_like(p, x) for x in (1.0, -2.0, 3.0)]
    for g in grads:
        q, state = optimizer.step(q, g, state)
    assert sorted(set(seen)) == [0, 1, 2]
    import reference

    want = reference.adamw(
        p,
        grads,
        lr=[0.1, 0.05, 0.1 / 3],
        betas=[(0.9, 0.99), (0.8, 0.99), (0.7, 0.99)],
        weight_decay=0.0,
    )[-1]
    # The schedule computed in float32, as the step it is given.
    assert_moved_alike(p, q, want, 1e-6)


def test_numbers_may_be_prefixes_of_the_parameter_tree() -> None:
    params = {"a": {"w": torch.ones(2), "b": torch.ones(2)}, "c": torch.ones(2)}
    grads = pytree.tree_map(torch.ones_like, params)
    optimizer = optimi_func.sgd(
        lr={"a": 0.1, "c": torch.tensor(0.5)},
        weight_decay={"a": {"w": 1.0, "b": 0.0}, "c": 0.0},
    )
    new, _ = optimizer.step(params, grads, optimizer.init(params))
    flat = [x[0].item() for x in (new["a"]["w"], new["a"]["b"], new["c"])]
    assert flat == pytest.approx([0.8, 0.9, 0.5])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (0, 2), (1, 1)], ids=str)
def test_odd_shapes(name: str, shape) -> None:
    p = torch.ones(shape)
    if len(shape) < 2 and name in MATRICES:
        with pytest.raises(ValueError, match=re.escape(f"{shape}: Muon takes matrices")):
            init_of(name)(p)
        return
    new, _ = step_of(name)(p, torch.ones(shape), init_of(name)(p), lr=0.1)
    assert new.shape == p.shape
    assert new.isfinite().all()


def test_zero_eps_and_zero_gradient_stay_finite() -> None:
    for name in NAMES:
        if name in (*NO_EPS, "adamax"):  # whose 0 / 0 is NaN in torch too
            continue
        p = torch.ones(1, 3)
        eps = (0.0, 0.0) if name == "adafactor" else 0.0
        new, _ = step_of(name)(p, torch.zeros(1, 3), init_of(name)(p), lr=0.1, eps=eps)
        assert new.isfinite().all()


P = {"w": torch.ones(2), "b": torch.ones(3)}
G = pytree.tree_map(torch.ones_like, P)


BAD = {
    "adamw_init({})": "holds no tensor",
    "adamw_init({'w': 1.0})": "TypeError: is not a tensor",
    "adamw_step(P, G, {}, lr=0.1)": "TypeError: state=dict is not a TreeState",
    "sgd_step(P, G, sgd_init(P), lr=0.1, momentum=0.9)": "make it with its own init",
    "adamw_step(P, G, adamw_init(small), lr=0.1)": r"\['exp_avg'\] has shape",
    "adamw_step(P, {**G, 'x': G['w']}, state, lr=0.1)": r"\['x'\] is not in params",
    "adamw_step(P, {**G, 'b': 1.0}, state, lr=0.1)": r"TypeError: grads\['b'\] is 1.0",
    "adamw_step(P, {**G, 'b': G['b'].to('meta')}, state, lr=0.1)": (
        r"grads\['b'\] is on meta"
    ),
    "vmap(lambda p: adamw_step(p, p, adamw_init(p), lr=rates))(torch.ones(3, 4))": (
        r"shape \(3,\).*positionally"
    ),
    "step_by({'w': 0.1, 'd': 0.2})": (
        r"lr is no prefix of params.*\['b'\] has no counterpart"
    ),
}


@refuses(BAD)
def test_bad_params_and_states() -> Scene:
    small, state = {"w": torch.ones(3), "b": torch.ones(3)}, adamw_init(P)

    def step_by(lr: Any) -> Any:
        return optimi_func.sgd(lr=lr).step(P, G, optimi_func.sgd_init(P))

    return locals() | {"P": P, "G": G, "rates": torch.ones(3)}


def test_advice() -> None:
    with pytest.warns(UserWarning, match=r"max_lr=1.0 has no effect"):
        adamw(lr=0.1, max_lr=1.0).init(P)
    with pytest.warns(
        UserWarning, match=r"weight_decay=0.1 is potentially high.*decouple_lr"
    ):
        adamw(lr=0.1, weight_decay=0.1, decouple_lr=True).init(P)
    low = torch.ones(2, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"betas\[1\]=0.999 with bfloat16"):
        adamw_step(low, low, adamw_init(low), lr=0.1, betas=(0.9, 0.999))


# Where to evaluate


DOUBLE = torch.float64


def trees_and_gradients(
    steps: int = 6,
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    shapes = {"w": (4, 3), "b": (3,)}
    draw = [
        {k: torch.randn(x, dtype=DOUBLE) for k, x in shapes.items()}
        for _ in range(steps + 1)
    ]
    return draw[0], draw[1:]


def trained(optimizer: Any, steps: int = 6) -> tuple[Any, Any]:
    params, grads = trees_and_gradients(steps)
    state = optimizer.init(params)
    for g in grads:
        params, state = optimizer.step(params, g, state)
    return params, state


@pytest.mark.parametrize("name", NAMES)
def test_of_most_rules_it_is_the_parameters(name: str) -> None:
    torch.manual_seed(0)
    p = {"w": torch.randn(4, 4, dtype=DOUBLE)}
    optimizer = Case(name).functional()
    state = optimizer.init(p)
    assert torch.equal(optimizer.eval_params(p, state)["w"], p["w"])
    for _ in range(7):
        p, state = optimizer.step(p, pytree.tree_map(torch.cos, p), state)
    found = optimizer.eval_params(p, state)
    assert (found is p) == (name not in SCHEDULE_FREE)
    assert torch.equal(found["w"], p["w"]) == (name not in SCHEDULE_FREE)


def test_transforms_ask_their_optimizer() -> None:
    inner = schedule_free_adamw(lr=0.1, warmup_steps=3)
    params, state = trained(inner)
    want = inner.eval_params(params, state)
    for optimizer in (
        chain(clip_value(1e9), inner),
        apply_if_finite(inner),
        every_k(inner, 1),
        masked(inner, "*"),
        apply_if_finite(chain(clip_value(1e9), inner)),
    ):
        now, outer = trained(optimizer)
        found = optimizer.eval_params(now, outer)
        for key, x in want.items():
            torch.testing.assert_close(found[key], x, rtol=1e-12, atol=1e-13)
            assert not torch.equal(found[key], now[key])
    # In the midst of a cycle nothing has moved yet.
    optimizer = every_k(inner, 4)
    params, outer = trained(optimizer, 10)
    other = inner.eval_params(params, outer.inner)
    for key, x in optimizer.eval_params(params, outer).items():
        assert torch.equal(x, other[key])


def test_a_partition_asks_each_part() -> None:
    optimizer = partition(("w", schedule_free_sgd(lr=0.1)), rest=adamw(lr=0.1))
    params, state = trained(optimizer)
    found = optimizer.eval_params(params, state)
    assert found["b"] is params["b"]
    assert not torch.equal(found["w"], params["w"])
    plain = partition(("w", sgd(lr=0.1)), rest=adamw(lr=0.1))
    params, state = trained(plain)
    assert plain.eval_params(params, state) is params


class Foreign:
    """A pure optimizer of somebody's own."""

    def init(self, params: Any, **options: Any) -> Any:
        return ()

    def step(self, params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        return params, state


def test_where_it_cannot_be_said() -> None:
    params, _ = trees_and_gradients()
    for average in (ema(schedule_free_sgd(lr=0.1), 0.9), ema(sgd(lr=0.1), 0.9)):
        with pytest.raises(ValueError, match=r"state\.average"):
            average.eval_params(params, average.init(params))
    other = chain(clip_value(1.0), Foreign())
    with pytest.raises(TypeError, match="Foreign"):
        other.eval_params(params, other.init(params))
    state = optimi_func.schedule_free_sgd_init(params)
    with pytest.raises(ValueError, match="optimizer needs"):
        schedule_free_adamw(lr=0.1).eval_params(params, state)


def test_numbers_of_a_state_that_do_not_fit() -> None:
    optimizer = schedule_free_sgd(lr=0.1)
    params, state = trained(optimizer)
    leaf = state.leaves["w"]
    assert leaf.weight_sum.item() == pytest.approx(6 * 0.1**2)
    assert leaf.lr_max.item() == pytest.approx(0.1)
    assert "weight_sum" in repr(leaf)
    bare = optimi_func.LeafState(leaf.rule_state, None)
    with pytest.raises(ValueError, match=r"running scalars \(\)"):
        optimizer.step(params, params, state._replace(leaves={"w": bare, "b": bare}))
    vector = leaf.running._replace(lr_max=torch.ones(2))
    odd = optimi_func.LeafState(leaf.rule_state, None, vector)
    with pytest.raises(ValueError, match=r"'lr_max'\] has shape \(2,\).*shape \(\)"):
        optimizer.step(params, params, state._replace(leaves={"w": odd, "b": odd}))


def test_it_can_be_differentiated_and_vmapped() -> None:
    """Through lr, also by way of the weights; each member has its own."""
    params, grads = trees_and_gradients()

    def end(lr: Tensor) -> Tensor:
        now, state = params, schedule_free_adamw(lr=lr).init(params)
        for i, g in enumerate(grads):
            optimizer = schedule_free_adamw(lr=lr * (1.0 + i), weight_lr_power=1.0)
            now, state = optimizer.step(now, g, state)
        found = optimizer.eval_params(now, state)
        return sum((x * x).sum() for x in found.values())  # type: ignore[return-value]

    lr, h = torch.tensor(0.05, dtype=DOUBLE), 1e-6
    want = (end(lr + h) - end(lr - h)) / (2 * h)
    assert grad(end)(lr).item() == pytest.approx(want.item(), rel=1e-7)
    lrs = torch.tensor([0.02, 0.05, 0.1], dtype=DOUBLE)
    torch.testing.assert_close(vmap(end)(lrs), torch.stack([end(x) for x in lrs]))


def test_bfloat16_parameters_are_evaluated_as_they_are_meant() -> None:
    p = torch.randn(50).to(torch.bfloat16)
    optimizer = schedule_free_sgd(lr=1e-3)
    state = optimizer.init(p)
    for _ in range(50):
        p, state = optimizer.step(p, torch.randn(50), state)
    leaf = state.leaves
    y = p.double() + leaf.kahan_comp.double()
    want = (y - 0.1 * leaf.z.double()) / 0.9
    found = optimizer.eval_params(p, state)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, want.to(torch.bfloat16))
