"""Gradient transforms that see parameters, paths and extras, and what they may return."""

import copy
import math
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func import adamw, sgd
from optimi_func.rules import Optimizer
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

Tensors = dict[str, Tensor]


def problem(steps: int = 10, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    params = {"w": 1 + 0.5 * torch.randn(4, 3), "b": torch.randn(3)}
    grads = [{k: torch.randn(p.shape) for k, p in params.items()} for _ in range(steps)]
    return pytree.tree_map(lambda x: x.to(dtype), (params, grads))


def run(optimizer: Any, params: Any, grads: list[Any], **options: Any) -> Any:
    state = optimizer.init(params, **options)
    for g in grads:
        params, state = optimizer.step(params, g, state)
    return params


def flat(tree: Any) -> Tensor:
    return torch.cat([x.flatten() for x in pytree.tree_leaves(tree)])


def no_state(params: Any) -> tuple[()]:
    return ()


def scale(factor: Any) -> GradientTransform:
    return GradientTransform(no_state, scaled, {"factor": factor})


def scaled(updates, state, step, factor):
    return [None if u is None else factor * u for u in updates], state


def by_path(grads, state, step, paths, params, loss):
    pairs = zip(grads, paths, params)
    found = [g * loss if path.endswith("b") else g + p for g, path, p in pairs]
    return found, state


def test_all_of_it_compiles_into_one_graph(graphs) -> None:
    params, grads = problem(3)
    optimizer = chain(
        clip_global_norm(1.0),
        GradientTransform(no_state, by_path),
        adamw(lr=0.02),
    )
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    ours = theirs = params, optimizer.init(params)
    for i, g in enumerate(grads):
        loss = torch.tensor(0.5 + i).double()
        ours = step(ours[0], g, ours[1], loss=loss)
        theirs = optimizer.step(theirs[0], g, theirs[1], loss=loss)
    assert graphs() == 1
    for x, y in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
        assert torch.allclose(x, y, rtol=1e-12)


# What a rewrite is given


def test_rewrites_take_what_they_name() -> None:
    seen: dict[str, Any] = {}

    def look(grads, mine, when, *, paths, params, loss, scale=3.0, other=None):
        seen.update(paths=paths, params=params, loss=loss, scale=scale, other=other)
        return grads, mine

    p = {"body": [torch.ones(2).bfloat16(), {"b": torch.ones(1)}], "head": None}
    g = {"body": [torch.ones(2).bfloat16(), {"b": torch.ones(1)}], "head": None}
    optimizer = ema(chain(GradientTransform(no_state, look), sgd(lr=0.1)), 0.9)
    optimizer.step(p, g, optimizer.init(p), loss=torch.tensor(2.0), scale=5.0)
    assert seen["paths"] == ["body.0", "body.1.b"]
    assert [x.dtype for x in seen["params"]] == [torch.float32] * 2
    assert (seen["loss"].item(), seen["scale"], seen["other"]) == (2.0, 5.0, None)


def test_extras_that_are_missing_or_that_nobody_takes() -> None:
    def takes_loss(grads, state, step, loss):
        return [g * loss for g in grads], state

    p, g = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    optimizer = chain(clip_value(1.0), GradientTransform(no_state, takes_loss), sgd(lr=0.1))
    state = optimizer.init(p)
    with pytest.raises(TypeError, match=r"part 1, .*takes_loss, takes 'loss'.*loss=\.\.\."):
        optimizer.step(p, g, state)
    with pytest.raises(
        TypeError,
        match=r"the step of sgd got the extras \['hessian'\]: its direction takes \[\]",
    ):
        optimizer.step(p, g, state, loss=2.0, hessian=1.0)
    moved, _ = optimizer.step(p, g, state, loss=2.0)
    assert moved["w"].tolist() == pytest.approx([0.8, 0.8])


class Scaled(Optimizer):
    def direction(self, g: Tensor, loss: Tensor):
        return g * loss


@pytest.mark.parametrize("around", [lambda o: o, lambda o: ema(o, 0.9)])
def test_an_extra_is_given_to_a_transform_and_to_the_rule(around: Any) -> None:
    def takes_loss(grads, state, step, loss, other=0.0):
        return [g * loss for g in grads], state

    optimizer = chain(GradientTransform(no_state, takes_loss), around(Scaled.pure(lr=0.1)))
    p, loss = torch.ones(2), torch.tensor(3.0)
    moved, _ = optimizer.step(p, torch.ones(2), optimizer.init(p), loss=loss, other=1.0)
    assert moved.tolist() == pytest.approx([0.1, 0.1])


Pair = namedtuple("Pair", "first second")


def test_a_graph_sees_the_same_paths() -> None:
    found: list[list[str]] = []

    def look(grads, state, step, paths):
        found.append(paths)
        return grads, state

    optimizer = chain(GradientTransform(no_state, look), sgd(lr=0.1))
    inner = OrderedDict(z=torch.ones(1), a=(torch.ones(1), torch.ones(2)))
    tree = {"pair": Pair(torch.ones(1), [torch.ones(1), inner]), 3: torch.ones(1)}
    state = optimizer.init(tree)
    optimizer.step(tree, tree, state)

    def paths_alone(p: Any) -> Tensor:
        optimizer.step(p, p, state)
        return p[3] + 1

    torch.compile(paths_alone, fullgraph=True, backend="eager")(tree)
    assert found[0] == found[-1] and len(found) == 2
    assert found[0] == ["pair.first", "pair.second.0", *found[0][2:5], "3"]


# What it returns

WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda g, s, t: g, TypeError, r"returned a list: allowed is \(grads, state\)"),
    (lambda g, s, t: (g[:1], s), ValueError, "returned a list in the place of 2 gradients"),
    (lambda g, s, t: ({"w": g[0]}, s), ValueError, "returned a dict in the place of 2"),
    (
        lambda g, s, t: ([g[0].sum(), g[1]], s),
        ValueError,
        r"returned a tensor of shape \(\) .* for leaf 0, .* tensor of shape \(4, 3\)",
    ),
    (lambda g, s, t: ([0.0, g[1]], s), ValueError, r"returned 0\.0 for leaf 0"),
    (
        lambda g, s, t: (g, None),
        ValueError,
        "returned a state of another structure than that of",
    ),
]


@pytest.mark.parametrize(("rewrite", "error", "text"), WRONG)
def test_a_rewrite_that_returns_another_structure(rewrite, error, text) -> None:
    params, (g,) = problem(1)
    own = GradientTransform(lambda params: {"mean": torch.zeros(())}, rewrite)
    optimizer = chain(clip_value(1.0), own, sgd(lr=0.1))
    with pytest.raises(error, match=f"^chain's part 1, <lambda>, {text}"):
        optimizer.step(params, g, optimizer.init(params))


def test_a_gradient_that_becomes_none_moves_nothing() -> None:
    params, (g,) = problem(1)
    none = GradientTransform(no_state, lambda g, s, t: ([None] * len(g), s))
    optimizer = chain(none, sgd(lr=0.1))
    moved, _ = optimizer.step(params, g, optimizer.init(params))
    assert moved["w"] is params["w"]


class Own:
    def __init__(self, step: Any) -> None:
        self.step = step

    def init(self, params: Any) -> dict[str, Tensor]:
        return {"count": torch.zeros(())}


BAD_STEPS: list[tuple[Any, type[Exception], str]] = [
    (lambda p, g, s: p, TypeError, r"returned a dict: allowed is \(params, state\)"),
    (lambda p, g, s: (list(p.values()), s), ValueError, "returned and params differ in"),
    (
        lambda p, g, s: ({**p, "w": p["w"].sum()}, s),
        ValueError,
        r"returned a tensor of shape \(\) .* for params\['w'\]",
    ),
    (lambda p, g, s: (p, {}), ValueError, "returned a state of another structure"),
]
AROUND = {
    "chain": lambda opt: chain(clip_value(1.0), opt),
    "ema": lambda opt: ema(opt, 0.9),
    "every_k": lambda opt: every_k(opt, 2),
    "apply_if_finite": apply_if_finite,
    "partition": lambda opt: partition(("*", opt)),
    "masked": lambda opt: masked(opt, "*"),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize(("step", "error", "text"), BAD_STEPS)
def test_an_own_optimizer_that_returns_another_structure(name, step, error, text) -> None:
    params, (g,) = problem(1)
    optimizer = AROUND[name](Own(step))
    with pytest.raises(error, match=f"the step of {name}'s optimizer, Own, {text}"):
        optimizer.step(params, g, optimizer.init(params))


# What it takes


@pytest.mark.parametrize(
    "inner", [sgd(lr=0.1), ema(sgd(lr=0.1), 0.9)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("before", [[], [clip_value(1.0)]], ids=["alone", "both sides"])
def test_the_optimizer_is_the_last_part(inner: Any, before: list[Any]) -> None:
    text = r"chain got 1 of its .* after {}\(.*has to be the last part.*hooks=\[\.\.\.\]"
    with pytest.raises(TypeError, match=text.format(type(inner).__name__)):
        chain(*before, inner, scale(0.5))


# Numbers


def test_a_limit_that_is_written_to_is_read_and_checked_by_each_step() -> None:
    limit, p = torch.tensor(0.5).double(), torch.zeros(1)
    optimizer = chain(clip_value(limit), sgd(lr=1.0))
    state, moved = optimizer.init(p), []
    for x in (0.5, 0.25, math.inf):  # a limit that is off
        limit.fill_(x)
        moved += optimizer.step(p, -torch.ones(1), state)[0].tolist()
    assert moved == [0.5, 0.25, 1.0]
    limit.fill_(-1.0)
    with pytest.raises(ValueError, match=r"limit=-1\.0: allowed"):
        optimizer.step(p, p, state)


BAD_NUMBERS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: GradientTransform(no_state, lambda g, s, t: (g, s), {"beta": 0.9}),
        TypeError,
        r"numbers has 'beta', but rewrite takes \[\]",
    ),
    *[
        (
            lambda name=name: GradientTransform(
                no_state, lambda g, s, t, params=0, paths=0: (g, s), {name: 7.0}
            ),
            TypeError,
            f"numbers has '{name}', which chain gives to rewrite: allowed are other names",
        )
        for name in ("grads", "state", "step", "params", "paths")
    ],
]


@pytest.mark.parametrize(("make", "error", "text"), BAD_NUMBERS)
def test_what_numbers_refuse(make, error, text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_and_saved_states(copied: Any, tmp_path) -> None:
    params, grads = problem(6)
    before = clip_value(1.0), clip_param_norm(0.9), clip_global_norm(1.0), centralize()
    parts = *before, scale(0.5), add_noise(0.01, seed=1), adamw(lr=0.1)
    optimizer = ema(chain(*parts), 0.9)
    other = copied(optimizer)
    state = other.init(params)
    torch.save(pytree.tree_leaves(state), tmp_path / "state.pt")
    leaves = torch.load(tmp_path / "state.pt", weights_only=True)
    state = pytree.tree_unflatten(leaves, pytree.tree_structure(optimizer.init(params)))
    now = params
    for g in grads:
        now, state = other.step(now, g, state)
    assert torch.equal(flat(now), flat(run(optimizer, params, grads)))


class Weighed(Optimizer):
    def direction(self, g: Tensor, weight: Tensor):
        return weight * g


P = {"a": torch.zeros(2), "b": torch.zeros(3)}
G = {"a": torch.ones(2), "b": torch.ones(3)}
W = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0, 5.0])}


def weighed() -> Any:
    return Weighed.pure(lr=1.0)


def test_every_k_gives_the_extras_of_the_kth_call() -> None:
    opt = every_k(weighed(), 2)
    p, state = opt.step(P, G, opt.init(P), weight=torch.tensor(9.0))
    assert p["a"].tolist() == [0.0, 0.0]
    p, state = opt.step(p, G, state, weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[-1, -2], [-3, -4, -5]]


def test_apply_if_finite_passes_extras_on() -> None:
    opt = apply_if_finite(weighed())
    p, state = opt.step(P, G, opt.init(P), weight=W)
    assert p["a"].tolist() == [-1, -2]
    bad = {**G, "b": torch.full((3,), torch.nan)}
    q, _ = opt.step(p, bad, state, weight=W)
    assert torch.equal(q["a"], p["a"])


def test_parts_get_their_part_of_the_extras_that_they_take() -> None:
    opt = partition(("a", weighed()), rest=sgd(lr=1.0))
    p, _ = opt.step(P, G, opt.init(P), weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[-1, -2], [-1, -1, -1]]
    both = partition(("a", weighed()), rest=every_k(weighed(), 1))
    p, _ = both.step(P, G, both.init(P), weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[-1, -2], [-3, -4, -5]]
    p, _ = both.step(P, G, both.init(P), weight=torch.tensor(2.0))
    assert [p["a"].tolist(), p["b"].tolist()] == [[-2, -2], [-2, -2, -2]]
    alone = masked(weighed(), "b")
    p, _ = alone.step(P, G, alone.init(P), weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[0, 0], [-3, -4, -5]]


def test_a_chain_around_a_partition_keeps_what_parts_take() -> None:
    def scaled(grads: Any, state: Any, step: Tensor, weight: Any) -> Any:
        return [None if g is None else 10.0 * g for g in grads], state

    parts = partition(("a", weighed()), rest=sgd(lr=1.0))
    opt = chain(GradientTransform(lambda params: (), scaled), parts)
    p, _ = opt.step(P, G, opt.init(P), weight=W)
    assert [p["a"].tolist(), p["b"].tolist()] == [[-10, -20], [-10, -10, -10]]


def test_extras_that_nobody_takes_are_named() -> None:
    opt = partition(("a", sgd(lr=1.0)), rest=sgd(lr=1.0))
    with pytest.raises(TypeError, match="partition got the extra 'weight': no part takes"):
        opt.step(P, G, opt.init(P), weight=W)
