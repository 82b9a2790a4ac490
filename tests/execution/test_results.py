"""A result of a step may be any tensor of the step: a history, a kept parameter, a swap."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from cases import CLASSES, ELEMENTWISE
from measured import allocated_by
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import SGD, AdamW, compiled, prepare_for_gradient_release
from optimi_func.core import program
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import keeps_codes
from optimi_func.execution import eager, trees
from optimi_func.rules import Optimizer
from optimi_func.testing import check_rule

DOUBLE = torch.float64


class History(Optimizer):
    """Steps by the gradient of two steps ago, and keeps the three last."""

    class State(NamedTuple):
        last: Tensor
        before: Tensor
        first: Tensor

    def direction(self, g: Tensor, s: State) -> tuple[Tensor, State]:
        return s.before + 0.1 * s.first, self.State(g, s.last, s.before)


class Kept(Optimizer):
    """Reads the parameter of the step before, as STORM and Barzilai-Borwein do."""

    class State(NamedTuple):
        old: Tensor
        older: Tensor

    def direction(self, g: Tensor, s: State, x: Tensor) -> tuple[Tensor, State]:
        return g + 0.5 * (x - s.old) + 0.1 * s.older, self.State(x, s.old)


class Swap(Optimizer):
    """Two averages that take turns, one of them through a view."""

    class State(NamedTuple):
        a: Tensor
        b: Tensor
        c: Tensor

    def direction(self, g: Tensor, s: State) -> tuple[Tensor, State]:
        m = 0.5 * s.a + g
        return m + 0.1 * s.c, self.State(s.b, m, s.b.view_as(g))


class After(Optimizer):
    """Keeps parameters in `after`."""

    class State(NamedTuple):
        a: Tensor
        b: Tensor

    def direction(self, g: Tensor, s: State) -> tuple[Tensor, State]:
        return g + 0.2 * s.b, s

    def after(self, x: Tensor, u: Tensor, s: State) -> tuple[Tensor, State]:
        return u, self.State(x, s.a)


def loop_of(name: str) -> Callable[..., list[Tensor]]:
    """The loop of a rule, in plain tensors, for one parameter at a time."""

    def loop(params: list[Tensor], grads: list[list[Tensor]], lr: float) -> list[Tensor]:
        ends: list[Tensor] = []
        for i, p in enumerate(params):
            a = b = c = torch.zeros_like(p)
            for step in grads:
                g = step[i]
                if name == "History":
                    d, a, b, c = b + 0.1 * c, g, a, b
                elif name == "Kept":
                    d, a, b = g + 0.5 * (p - a) + 0.1 * b, p, a
                elif name == "Swap":
                    m = 0.5 * a + g
                    d, a, b, c = m + 0.1 * c, b, m, b
                else:
                    d, a, b = g + 0.2 * b, p, a
                p = p - lr * d
            ends.append(p)
        return ends

    return loop


RULES: list[Any] = [History, Kept, Swap, After]
EAGER: dict[str, Any] = {"compile": False}


def problem(dtype: torch.dtype, steps: int = 6) -> tuple[list[Tensor], list[list[Tensor]]]:
    drawn = torch.Generator().manual_seed(0)
    shapes = (128, 64), (7, 5), (3,)

    def draw() -> list[Tensor]:
        return [torch.randn(x, generator=drawn).bfloat16().to(dtype) for x in shapes]

    return draw(), [draw() for _ in range(steps)]


def by_class(cls: Any, dtype: torch.dtype, **how: Any) -> list[Tensor]:
    start, grads = problem(dtype)
    release = how.pop("gradient_release", False)
    params = nn.ParameterList([p.clone() for p in start])
    optimizer = cls(params, lr=0.1, gradient_release=release, **how)
    if release:
        prepare_for_gradient_release(params, optimizer)
    for step in grads:
        torch.stack([(p * g).sum() for p, g in zip(params, step)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in params]


def by_tree(step: Any, cls: Any, dtype: torch.dtype) -> list[Tensor]:
    params, grads = problem(dtype)
    value = cls.factory(lr=0.1)
    params, state = [p.clone() for p in params], value.init(params)
    for given in grads:
        params, state = step(value, params, given, state)
    return params


COMPILED: dict[str, Any] = {
    "kernels": partial(by_class, compile=True),
    "compiled release": partial(by_class, compile=True, gradient_release=True),
    "step_": partial(by_tree, trees.step_),
    "step": partial(by_tree, trees.step),
}


def check(run: Any, cls: Any, dtype: torch.dtype, within: float) -> None:
    start, grads = problem(DOUBLE)
    want = loop_of(cls.__name__)(start, grads, lr=0.1)
    for got, end, p in zip(run(cls, dtype), want, start, strict=True):
        error = (got.double() - end).norm() / (end - p).norm()
        assert error <= within, error


@pytest.mark.parametrize("cls", RULES)
def test_results_are_other_tensors_of_the_step(cls: Any) -> None:
    loop = loop_of(cls.__name__)
    check_rule(cls, loop, compile=False, steps=6, allowed={"bfloat16": 0.2})
    check(partial(by_class, **EAGER, capturable=True), cls, DOUBLE, 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("cls", RULES)
def test_kernels_read_before_they_write(cls: Any) -> None:
    """Also as list kernels, in one loop and without temporaries."""
    before = {*runtime.kernels}
    for way, dtype in (*[(way, torch.float32) for way in COMPILED], ("kernels", DOUBLE)):
        check(COMPILED[way], cls, dtype, 1e-5)
    exact = by_class(cls, torch.bfloat16, compile=True, storage="exact")
    eager = by_class(cls, torch.bfloat16, **EAGER, storage="exact")
    for got, want in zip(exact, eager, strict=True):
        assert torch.equal(got, want)
    made = [runtime.kernels[key][1] for key in {*runtime.kernels} - before]
    assert made and {type(x).__name__ for x in made} == {"ListKernel"}


class Turns(Optimizer):
    """Running scalars that are swapped."""

    class Running(NamedTuple):
        a: float = 1.0
        b: float = 2.0

    def direction(self, g: Tensor, s: Any, r: Running) -> tuple[Tensor, Any]:
        return g * r.a, self.Running(r.b, r.a)


@pytest.mark.parametrize("how", [EAGER, {**EAGER, "capturable": True}], ids=str)
def test_running_scalars_may_be_swapped(how: dict[str, Any]) -> None:
    w = nn.Parameter(torch.zeros(1))
    optimizer = Turns([w], lr=1.0, **how)
    for _ in range(3):
        w.grad = torch.ones(1)
        optimizer.step()
    assert w.item() == -(1 + 2 + 1)


class Turned(Optimizer):
    """A map that returns a view of what it is given."""

    def direction(self, g: Tensor) -> Tensor:
        return g

    def whole(self, d: Tensor) -> Tensor:
        return d.mT


@pytest.mark.parametrize("how", [EAGER, {"foreach": True}], ids=str)
def test_a_map_may_return_a_view(how: dict[str, Any]) -> None:
    w, g = nn.Parameter(torch.zeros(40, 40)), torch.randn(40, 40)
    optimizer = Turned([w], lr=1.0, **how)
    w.grad = g
    optimizer.step()
    assert torch.equal(w, -g.mT)


class Extra(Optimizer):
    """Keeps what a step is given besides, and the same result twice."""

    class State(NamedTuple):
        h: Tensor
        m: Tensor
        n: Tensor

    def direction(self, g: Tensor, s: State, hessian: Tensor) -> tuple[Tensor, State]:
        m = s.m + g
        return m, self.State(hessian, m, m)


def addresses(tree: Any) -> set[int]:
    return {x.data_ptr() for x in pytree.tree_leaves(tree)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_of_a_pure_step_share_no_memory(dtype: torch.dtype) -> None:
    rules: list[Any] = [*RULES, Extra]
    for cls in rules:
        params, (grads, *_) = problem(dtype)
        value, more = cls.factory(lr=0.1), dict[str, Any]()
        if cls is Extra:
            more = {"hessian": [torch.ones_like(p) for p in params]}
        given = params, grads, value.init(params)
        new = value.step(*given, **more)
        leaves = pytree.tree_leaves(new)
        assert len(addresses(new)) == len(leaves)
        assert addresses(new).isdisjoint(addresses((given, more)))


def test_codes_that_a_rule_returns_unchanged_are_copied() -> None:
    class Still(Optimizer):
        class State(NamedTuple):
            m: Tensor

        def direction(self, g: Tensor, s: State) -> tuple[Tensor, State]:
            return g, s

    value, params = Still.factory(lr=0.1), [torch.ones(128, 64)]
    state = value.init(params, storage=optimi_func.Storage(None, "8bit"))
    _, after = value.step(params, [torch.ones(128, 64)], state)
    assert addresses(after).isdisjoint(addresses(state))


@pytest.mark.kernels
def test_compiled_steps_share_nothing_without_a_gradient() -> None:
    """So a later step in place leaves the tree that was kept alone."""
    params = {"w": torch.ones(3), "still": torch.ones(3)}
    state = optimi_func.adam_init(params)
    grads: dict[str, Any] = {"w": torch.ones(3), "still": None}
    new, after = compiled.adam_step(params, grads, state, lr=0.1)
    assert addresses((new, after)).isdisjoint(addresses((params, state)))
    assert torch.equal(new["still"], params["still"])
    grads["still"] = torch.ones(3)
    compiled.adam_step_(new, grads, after, lr=0.1)
    assert torch.equal(params["still"], torch.ones(3))
    assert not state.leaves["still"].exp_avg.any()


@pytest.mark.parametrize("how", [EAGER, {"foreach": True}], ids=str)
def test_parameters_that_overlap_or_repeat_lose_no_update(how: dict[str, Any]) -> None:
    flat = torch.zeros(10)
    parts = [flat[:6], torch.zeros(5), flat[4:], flat.view(5, 2)[:, 0], flat[:6]]
    params = [nn.Parameter(x) for x in parts]
    optimizer = SGD(params, lr=1.0, **how)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    want = torch.zeros(10)
    for part in want[:6], want[4:], want.view(5, 2)[:, 0], want[:6]:
        part -= 1.0
    assert torch.equal(flat, want)
    assert torch.equal(params[1], -torch.ones(5))


LARGE = 1_000_001  # with a last group that is not full


def stepped(cls: Any, dtype: torch.dtype, storage: Any) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(130, 127, generator=drawn).to(dtype).t())
    g = torch.randn(130, 127, generator=drawn).to(dtype).t()
    optimizer = cls([w], lr=0.01, compile=False, storage=storage)
    for i in range(3):
        w.grad = g * (i + 1)
        optimizer.step()
    return [w.detach(), *optimizer.state[w].values()]


@pytest.mark.parametrize("storage", [None, "exact", "compact"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_slices_change_no_bit(name: str, storage: Any, monkeypatch: Any) -> None:
    """In memory order, with codes of groups too, and means of the whole."""
    dtypes = [torch.float32, torch.bfloat16] if storage is None else [torch.bfloat16]
    if storage == "compact" and not keeps_codes(getattr(optimi_func, name)(lr=0.1).rule):
        storage = optimi_func.Storage("kahan8")
    for dtype in dtypes:
        found: list[list[Tensor]] = []
        for least in (1, 1 << 60):
            monkeypatch.setattr(eager, "SLICED", least)
            monkeypatch.setattr(program, "BYTES", least)
            found.append(stepped(CLASSES[name], dtype, storage))
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adamw", "adan"])
def test_a_large_parameter_takes_two_bytes_an_element(name: str, dtype: Any) -> None:
    """Beside the tensors, by the profiler's count of live bytes."""
    w = nn.Parameter(torch.ones(LARGE, dtype=dtype))
    optimizer = CLASSES[name]([w], lr=0.01, compile=False)  # type: ignore
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert allocated_by(optimizer.step) <= 2 * LARGE


def test_means_of_a_large_parameter_take_a_buffer_each() -> None:
    w = nn.Parameter(torch.ones(LARGE))
    optimizer = CLASSES["stableadamw"]([w], lr=0.01, compile=False)  # type: ignore
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert allocated_by(optimizer.step) <= 6 * LARGE


def test_release_steps_in_slices_without_a_compiler() -> None:
    w = nn.ParameterList([torch.ones(LARGE)])
    optimizer = AdamW(w, lr=0.01, gradient_release=True, compile=False)
    prepare_for_gradient_release(w, optimizer)

    def step() -> None:
        w[0].backward(torch.ones(LARGE))

    step()
    # The gradient, made here and in backward, and the slices.
    assert allocated_by(step) <= (2 * 4 + 2) * LARGE
