"""Frozen parameters, optimizers of two functions, torch.export, classes and populations."""

import functools
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import NAMES
from tiers import few
from torch import Tensor, nn
from torch.func import grad, jacfwd
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import adamw, compiled, population, sgd, unroll
from optimi_func.core.rule import Storage
from optimi_func.transforms import (
    add_noise,
    apply_if_finite,
    chain,
    clip_global_norm,
    clip_value,
    ema,
    every_k,
    masked,
    partition,
)

X = torch.tensor([1.0, 2.0, 3.0])


def trees() -> tuple[Any, Any]:
    """Return parameters with frozen ones, and the same parameters without them."""
    w, a = torch.linspace(-1.0, 1.0, 6).view(2, 3), torch.ones(3)
    frozen = {"w": w, "bias": None, "sub": {"a": a, "b": None}}
    return frozen, {"w": w.clone(), "sub": {"a": a.clone()}}


def loss(params: Any, x: Tensor) -> Tensor:
    return ((params["w"] * x) ** 2).mean() + (params["sub"]["a"] * x).exp().mean()


def gradients(params: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.sin, params)


def assert_same(frozen: Any, plain: Any) -> None:
    some = [x for x in pytree.tree_leaves(frozen) if x is not None]
    others = pytree.tree_leaves(plain)
    assert len(some) == len(others)
    assert all(map(torch.equal, some, others))


class Halves:
    """An optimizer of a user: two functions, and no options of `init`."""

    def init(self, params: Any) -> Tensor:
        return torch.zeros(())

    def step(self, params: Any, grads: Any, state: Tensor) -> tuple[Any, Tensor]:
        def half(p: Tensor | None, g: Tensor | None) -> Tensor | None:
            return p if p is None or g is None else p - 0.5 * g

        return pytree.tree_map(half, params, grads), state + 1.0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda p, s: p, r"returned a dict: allowed is \(params, state\)"),
        (lambda p, s: (p, s, s), r"returned a tuple: allowed is \(params, state\)"),
        (lambda p, s: None, r"returned None: allowed is \(params, state\)"),
        (lambda p, s: ({}, s), r"params\['w'\] has no counterpart"),
        (lambda p, s: ([p["w"]], s), r"params\['w'\] has no counterpart"),
        (lambda p, s: ({"w": "a"}, s), r"returned 'a' for params\['w'\]"),
        (lambda p, s: ({"w": p["w"][0]}, s), r"shape \(\).* for params\['w'\]"),
        (lambda p, s: (p, (s, s)), "a state of another structure than that of init"),
        (lambda p, s: (p, 1.0), "a state of another structure than that of init"),
    ],
)
def test_a_step_that_returns_another_structure_is_named(wrong: Any, text: str) -> None:
    class Mine(Halves):
        def step(self, params: Any, grads: Any, state: Tensor) -> Any:
            return wrong(params, state)

    params = {"w": X}
    members = population.init(Mine(), params, n=2)
    for owner, run in (
        ("unroll", lambda: unroll(Mine(), lambda p, x: p["w"].sum(), params, None, [X])),
        ("population", lambda: population.step(Mine(), members, members.params)),
    ):
        with pytest.raises((TypeError, ValueError), match=text) as raised:
            run()
        assert f"the step of {owner}'s optimizer, Mine, returned" in str(raised.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_parameter_has_a_hypergradient(name: str) -> None:
    params = [torch.ones(2, 2), torch.ones(0, 2)]

    def end(lr: Tensor) -> Tensor:
        optimizer = getattr(optimi_func, name)(lr=lr)
        found, _ = optimizer.step(params, params, optimizer.init(params))
        return found[0].sum() + found[1].sum()

    assert grad(end)(torch.tensor(0.1)).isfinite()


AROUND: dict[str, Callable[[Any], Any]] = {
    "itself": lambda inner: inner,
    "chain": lambda inner: chain(clip_global_norm(1.0), add_noise(0.1, seed=1), inner),
    "ema": lambda inner: ema(inner, 0.5),
    "every_k": lambda inner: every_k(inner, 2),
    "apply_if_finite": apply_if_finite,
    "partition": lambda inner: partition(("w", inner), ("sub.*", ema(inner, 0.5))),
    "masked": lambda inner: masked(inner, "sub.*"),
}

# Frozen parameters.


@pytest.mark.parametrize("name", NAMES)
def test_none_is_a_frozen_parameter(name: str) -> None:
    optimizer = getattr(optimi_func, name)(lr=0.1)
    params = [{"w": torch.eye(2), "bias": None}, {"w": torch.eye(2)}]
    ends: list[Any] = []
    for p in params:
        state = optimizer.init(p)
        for _ in range(7):  # ScheduleFreeRAdam rests for five
            p, state = optimizer.step(p, gradients(p), state)
        ends.append((p, state, optimizer.eval_params(p, state)))
    assert_same(*ends)
    assert ends[0][0]["bias"] is None
    assert ends[0][1].leaves["bias"] is None
    assert not torch.equal(ends[0][0]["w"], torch.eye(2))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_transforms_of_frozen_parameters(around: Callable[[Any], Any]) -> None:
    ends: list[Any] = []
    for p in trees():
        optimizer = around(adamw(lr=0.1))
        state = optimizer.init(p)
        for _ in range(2):
            p, state = optimizer.step(p, gradients(p), state)
        ends.append((p, state))
        leaves, spec = pytree.tree_leaves(state), pytree.tree_structure(optimizer.init(p))
        assert pytree.tree_structure(pytree.tree_unflatten(leaves, spec)) == spec
    assert_same(*ends)
    assert ends[0][0]["bias"] is None
    assert ends[0][0]["sub"]["b"] is None


def test_no_gradients_for_a_subtree() -> None:
    for p in trees():
        both: list[Any] = [adamw(lr=0.1), chain(clip_value(1.0), adamw(lr=0.1))]
        for optimizer in both:
            grads = {**gradients(p), "sub": None}
            new, _ = optimizer.step(p, grads, optimizer.init(p))
            assert new["sub"]["a"] is p["sub"]["a"]
            assert not torch.equal(new["w"], p["w"])
            new, _ = optimizer.step(p, None, optimizer.init(p))
            assert new["w"] is p["w"]


def test_frozen_parameters_have_no_gradient_and_may_have_a_number() -> None:
    p, _ = trees()
    lrs: Any = {"w": 0.1, "bias": 0.5, "sub": 0.2}
    optimizer = adamw(lr=lrs)
    new, _ = optimizer.step(p, gradients(p), optimizer.init(p))
    assert (new["sub"]["a"] - p["sub"]["a"]).abs().max().item() == pytest.approx(0.2, 1e-1)


FACTORIES: dict[str, Any] = {
    "adamw": adamw,
    "nested": lambda lr: chain(
        clip_global_norm(1.0), ema(partition(("w", adamw(lr=lr)), rest=sgd(lr=lr)), 0.9)
    ),
}


def member(tree: Any, i: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x[i].clone(), tree)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())
def test_populations_of_frozen_parameters(factory: Any) -> None:
    ends: list[Any] = []
    for source in trees():
        lrs = {"lr": torch.tensor([0.1, 0.2])}
        members = population.init(factory, source, lrs, n=2)
        for _ in range(2):
            _, grads = population.loss_and_grad(loss, members, X)
            members = population.step(factory, members, grads)
        members = population.clone(members, [0], [1])
        members = population.select(members, [1, 0])
        parts = [member(members.params, i) for i in range(2)]
        losses, _ = population.loss_and_grad(loss, members, X)
        ends.append((members, parts, losses))
        assert len(members) == 2
    assert_same(*ends)
    assert ends[0][0].params["sub"]["b"] is None


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())
def test_runs_with_frozen_parameters(factory: Any) -> None:
    ends: list[Any] = []
    for params in trees():

        def run(lr: Tensor, params: Any = params) -> Any:
            return unroll(factory, loss, params, None, X, steps=4, hyper={"lr": lr})

        def end(lr: Tensor, run: Any = run) -> Tensor:
            return loss(run(lr).params, X)

        lr = torch.tensor(0.1)
        ends.append((grad(end)(lr), jacfwd(end)(lr), run(lr)))
    assert_same(*ends)
    assert ends[0][2].params["bias"] is None
    assert ends[0][0] != 0.0


@pytest.mark.kernels
def test_compiled_steps_of_frozen_parameters() -> None:
    for step in (compiled.adamw_step, compiled.adamw_step_):
        ends: list[Any] = []
        for p in trees():
            state = adamw(lr=0.1).init(p)
            for _ in range(2):
                p, state = step(p, gradients(p), state, lr=0.1)
            ends.append((p, state))
        assert_same(*ends)
        assert ends[0][0]["bias"] is None


@pytest.mark.full
def test_a_training_step_of_frozen_parameters() -> None:
    ends: list[Any] = []
    optimizer = adamw(lr=0.1)
    for params in trees():
        step = compiled.train_step(
            lambda p, buffers, x: loss(p, x), lambda output, x: output, optimizer
        )
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, X)
        ends.append(state)
    assert_same(*ends)
    assert ends[0].params["bias"] is None


# An optimizer of two functions.


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_two_functions_are_enough(around: Callable[[Any], Any]) -> None:
    optimizer, (_, params) = around(Halves()), trees()
    members = population.init(optimizer, params, n=2)
    _, grads = population.loss_and_grad(loss, members, X)
    moved = population.step(optimizer, members, grads)
    assert len(moved) == 2
    run = unroll(optimizer, loss, params, None, X, steps=2)
    assert not torch.equal(run.params["sub"]["a"], params["sub"]["a"])
    with pytest.raises(TypeError, match="compile a function that calls"):
        compiled.train_step(lambda p, b, x: loss(p, x), lambda o, x: o, optimizer)
    with pytest.raises(TypeError, match="storage"):
        population.init(optimizer, params, n=2, storage="compact")


def test_refusals_of_two_functions_say_what_to_do() -> None:
    own, p = Halves(), torch.ones(2)
    with pytest.raises(TypeError, match=r"torch\.compile\(optimizer\.step\)"):
        compiled.step(own, p, p, own.init(p))  # pyright: ignore[reportArgumentType]
    around = chain(clip_value(1.0), own)
    with pytest.raises(TypeError, match="evaluate at its params"):
        around.eval_params(p, around.init(p))


# torch.export.


class Step(nn.Module):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def forward(self, params: Any, grads: Any, state: Any) -> Any:
        return self.optimizer.step(params, grads, state)


def exported(optimizer: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """Return the exported step, and the one that was saved and loaded."""
    program = torch.export.export(Step(optimizer), (params, gradients(params), state))
    program.example_inputs = None
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return program.module(check_guards=False), torch.export.load(file).module()


def assert_exports(optimizer: Any, **options: Any) -> None:
    # 8-bit moments are those of tensors from 4096 elements.
    params = {"w": torch.linspace(-1.0, 1.0, 4096).view(64, 64), "v": torch.eye(3)}
    state = optimizer.init(params, **options)
    ends: list[Any] = []
    for step in (*exported(optimizer, params, state), optimizer.step):
        p, s = params, state
        for _ in range(3):
            p, s = step(p, gradients(p), s)
        ends.append((p, s))
    for end in ends[:2]:
        assert pytree.tree_structure(end) == pytree.tree_structure(ends[2])
        assert_same(end, ends[2])


def test_an_export_whose_gradient_is_the_parameter_is_refused() -> None:
    """torch.export makes one input of the two, and the program moves the gradient."""
    p = {"w": torch.ones(3)}
    for optimizer in (sgd(lr=0.1), ema(chain(clip_value(1.0), sgd(lr=0.1)), 0.9)):
        with pytest.raises(ValueError, match=r"grads.* is its parameter"):
            torch.export.export(Step(optimizer), (p, p, optimizer.init(p)))
        optimizer.step(p, p, optimizer.init(p))


@pytest.mark.parametrize("name", few(NAMES, ["sgd", "adamw"]))
def test_exported_steps_save_load_and_run(name: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_exports(getattr(optimi_func, name)(lr=0.1))
    assert not caplog.records


@pytest.mark.full
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_exported_transforms(around: Callable[[Any], Any]) -> None:
    if around in (AROUND["partition"], AROUND["masked"]):
        around = lambda inner: partition(("w", inner), rest=ema(inner, 0.5))  # noqa: E731
    assert_exports(around(adamw(lr=0.1)))


@pytest.mark.full
def test_exported_states_in_codes() -> None:
    assert_exports(adamw(lr=0.1), storage=Storage(moments="8bit"))


# A run in a graph.


def test_a_run_is_one_graph(graphs: Callable[[], int]) -> None:
    def end(lr: Tensor) -> Tensor:
        more: Any = {"steps": 4, "hyper": {"lr": lr}}
        return unroll(sgd, lambda p, x: ((p * x) ** 2).sum(), X, None, X, **more).params

    lr, before = torch.tensor(0.01), graphs()
    whole = torch.compile(end, backend="eager", fullgraph=True)
    assert torch.equal(whole(lr), end(lr))
    assert graphs() > before


# Members and classes.


def net() -> nn.Module:
    # A bias before the norm would have gradients of rounding errors only.
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "ScheduleFreeSGD"])
def test_from_a_class_to_a_population_and_back(name: str) -> None:
    """Members go on as the class would, and the class as the member would."""

    def step_of(module: nn.Module, optimizer: Any) -> None:
        module(torch.arange(12.0).view(4, 3).sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def member_loss(params: Any, buffers: Any, x: Tensor) -> Any:
        output, buffers = population.call_module(module, params, buffers, x)
        return output.square().mean(), buffers

    module, x = net(), torch.arange(12.0).view(4, 3).sin()
    make = getattr(optimi_func, name)
    more = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = make(
        module.named_parameters(), lr=0.05, weight_decay=0.1, compile=False, **more
    )
    for _ in range(2):
        step_of(module, optimizer)
    lrs = {"lr": torch.tensor([0.05, 0.2])}
    value, state = optimizer.functional()
    factory = functools.partial(replace, value)
    members = population.init(factory, module, lrs, n=2)
    twice = pytree.tree_map(lambda s: torch.stack([s, s]), state)
    members = replace(members, state=twice)
    for _ in range(2):
        (_, buffers), grads = population.loss_and_grad(
            member_loss, members, x, has_aux=True
        )
        members = population.step(factory, members, grads)
        members = replace(members, buffers=buffers)
        step_of(module, optimizer)
    other = net()
    back = make(other.named_parameters(), lr=1.0, weight_decay=0.1, compile=False, **more)
    for i, same in ((1, False), (0, True)):
        one = member(members, i)
        back.load_functional(one.state, one.params)
        other.load_state_dict(one.buffers, strict=False)
        back.param_groups[0]["lr"] = one.hyper["lr"].item()
        pairs = zip(other.state_dict().values(), module.state_dict().values())
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs) == same
    step_of(module, optimizer)
    step_of(other, back)
    for a, b in zip(other.state_dict().values(), module.state_dict().values()):
        assert torch.allclose(a, b, atol=1e-6)
