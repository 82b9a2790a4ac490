"""One definition, every executor: the same movement from each.

`make test` compiles the rows of `QUICK` (a kernel costs seconds), `make test-full` those of
`FULL`, `make soak` a sample of all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import (
    CASES,
    ELEMENTWISE,
    MATRICES,
    MEASURED,
    TOLERANCE,
    Case,
    assert_moved_alike,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measured import allocated_by
from tiers import built, row
from torch import Tensor

from optimi_func import compiled
from optimi_func.core import program
from optimi_func.execution import eager

pytestmark = pytest.mark.filterwarnings(
    "ignore:eps=", "ignore:weight_decay=", "ignore:max_lr="
)

# In place, as the classes step.
QUICK = {
    "adamw": (torch.float32, torch.bfloat16, torch.float64),
    "stableadamw": (torch.float32,),
    "ranger": (torch.float32,),
    "sgd-momentum=0.9": (torch.float32,),
    "lion": (torch.bfloat16,),
}
FULL = {
    "stableadamw": (torch.bfloat16,),
    "sgd-momentum=0.9": (torch.float16,),
    "adam-amsgrad=True": (torch.float32,),
    "adan": (torch.float32,),
    "radam": (torch.float32,),
    "ademamix": (torch.bfloat16,),
    "adopt": (torch.bfloat16,),
    "schedule_free_adamw": (torch.bfloat16,),
    "schedule_free_sgd": (torch.float32,),
    "adamw-weight_decay=0.1-cautious_decay=True": (torch.float32,),
    "adamw-weight_decay=0.1-cautious=True": (torch.float32, torch.bfloat16),
    "stableadamw-weight_decay=0.1-cautious=True": (torch.bfloat16,),
    "lamb-weight_decay=0.1-cautious_decay=True-cautious=True": (torch.float32,),
    "lamb": (torch.bfloat16,),
}
# A pure step has kernels of its own, which differ from these in where they write: that
# does not depend on the rule, only on its having a mean and on a compensation.
QUICK_PURE = {"adamw": (torch.float32,)}
FULL_PURE = {"adamw": (torch.bfloat16,), "stableadamw": (torch.float32,)}


# Without what only some shapes have.
FITTING = [case for case in CASES if "split" not in case.options]


Some = dict[str, tuple[torch.dtype, ...]]


def rows(quick: Some, full: Some) -> list[Any]:
    found = []
    for case in FITTING:
        for dtype in TOLERANCE:
            tier = "soak"
            if dtype in quick.get(case.id, ()):
                tier = "kernels"
            elif dtype in full.get(case.id, ()):
                tier = "full"
            found.append(row(case, dtype, id=f"{case.id}-{str(dtype)[6:]}", tier=tier))
    return built(found)


SHAPES = [(), (1,), (0, 3), (7,), (3, 5), (2, 3, 4, 5), (130, 70)]


@dataclass(frozen=True)
class Layout:
    """How a tensor of some shape lies in memory."""

    shape: tuple[int, ...]
    order: str

    def fill(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A leaf tensor of these values in this layout."""
        x = values.to(dtype)
        if self.order == "transposed" and x.dim() >= 2:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if self.order == "channels_last" and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        if self.order == "strided" and x.dim() >= 1:
            return torch.stack([x, x], dim=-1)[..., 0]
        if self.order == "offset":
            return torch.cat([torch.zeros(3, dtype=dtype), x.reshape(-1)])[3:].view(x.shape)
        return x.clone(memory_format=torch.contiguous_format)


ORDERS = ["contiguous", "transposed", "channels_last", "strided", "offset"]
layouts = st.builds(Layout, st.sampled_from(SHAPES), st.sampled_from(ORDERS))


@dataclass(frozen=True)
class Problem:
    """Parameters, and gradients of a few steps, in drawn layouts."""

    layouts: list[tuple[Layout, str]]  # the parameter's, and the gradient's order
    lrs: list[float]

    def params(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [
            lay.fill(0.1 * torch.rand(lay.shape, generator=generator), dtype)
            for lay, _ in self.layouts
        ]

    def grads(self, step: int, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 + step)
        made = []
        for lay, order in self.layouts:
            g = torch.randn(lay.shape, generator=generator)
            if order == "expanded" and lay.shape:
                made.append(g.flatten()[:1].sum().to(dtype).expand(lay.shape))
            else:
                made.append(Layout(lay.shape, order).fill(g, dtype))
        return made


problems = st.builds(
    Problem,
    st.lists(
        st.tuples(layouts, st.sampled_from([*ORDERS, "expanded"])),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.floats(1e-3, 1e-1), min_size=7, max_size=7),
)
MIXED = Problem(
    [
        (Layout((), "contiguous"), "contiguous"),
        (Layout((1,), "contiguous"), "contiguous"),
        (Layout((0, 3), "contiguous"), "contiguous"),
        (Layout((7,), "strided"), "contiguous"),
        (Layout((2, 3, 4, 5), "channels_last"), "contiguous"),
        (Layout((130, 70), "transposed"), "transposed"),
        (Layout((130, 70), "transposed"), "expanded"),
        (Layout((130, 70), "contiguous"), "strided"),
        (Layout((130, 70), "offset"), "contiguous"),
    ],
    [0.01, 0.02, 0.03, 0.03, 0.02, 0.01, 0.005],
)


# Where nothing is compiled, no size decides how a step runs.
SMALL = replace(
    MIXED,
    layouts=[
        (replace(lay, shape=tuple([n // 10 if n > 9 else n for n in lay.shape])), order)
        for lay, order in MIXED.layouts
    ],
)


def as_matrix(drawn: tuple[Layout, str]) -> tuple[Layout, str]:
    """With two dimensions at least."""
    layout, order = drawn
    shape = (1,) * (2 - len(layout.shape)) + layout.shape
    return replace(layout, shape=shape), order


def run_tree(case: Case, problem: Problem, dtype: torch.dtype, step) -> list[Tensor]:
    """Through one of the three functional steps."""
    params = problem.params(dtype)
    state = case.functional().init(params)
    for i, lr in enumerate(problem.lrs):
        params, state = step(case.functional(lr), params, problem.grads(i, dtype), state)
    leaves = state.leaves
    return [whole(p, leaf.kahan_comp) for p, leaf in zip(params, leaves)]


def run_class(case: Case, problem: Problem, dtype: torch.dtype, **how) -> list[Tensor]:
    """Through the class."""
    params = [torch.nn.Parameter(p) for p in problem.params(dtype)]
    optimizer = case.cls(params, lr=0.1, **case.options, **how)
    for i, lr in enumerate(problem.lrs):
        for p, g in zip(params, problem.grads(i, dtype)):
            p.grad = g
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return [whole(p, optimizer.state[p].get("kahan_comp")) for p in params]


def whole(p: Tensor, comp: Tensor | None) -> Tensor:
    p = p.detach().double()
    return p if comp is None else p + comp.double()


Run = Callable[[Case, Problem, torch.dtype], list[Tensor]]
EAGER: dict[str, Run] = {
    "class eager": partial(run_class, compile=False),
    "class foreach": partial(run_class, foreach=True),
    "class capturable": partial(run_class, compile=False, capturable=True),
}
IN_PLACE: dict[str, Run] = {
    "compiled in place": partial(run_tree, step=compiled.step_),
    "class compiled": partial(run_class, compile=True),
}
PURE: dict[str, Run] = {"compiled pure": partial(run_tree, step=compiled.step)}
ALL = EAGER | IN_PLACE | PURE


def check(case: Case, problem: Problem, dtype: torch.dtype, runs: dict[str, Run]) -> None:
    if case.name in MATRICES:
        problem = replace(problem, layouts=list(map(as_matrix, problem.layouts)))
    pure = type(case.functional()).step
    want = run_tree(case, problem, dtype, pure)
    others = {name: run(case, problem, dtype) for name, run in runs.items()}
    start, *ends = (
        torch.cat([x.double().reshape(-1) for x in tensors])
        for tensors in (problem.params(dtype), want, *others.values())
    )
    if not start.numel():
        return
    # A unit in the last place of a parameter a step is what float32 is promised: more than
    # 1e-6 of a movement that is small beside the parameter.
    moved = (ends[0] - start).abs().max().item()
    ulps = len(problem.lrs) * torch.finfo(dtype).eps / 2 * ends[0].abs().max().item()
    tolerance = max(TOLERANCE[dtype], ulps / moved if dtype == torch.float32 else 0.0)
    for name, got in zip(others, ends[1:]):
        try:
            assert_moved_alike(start, got, ends[0], tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize(("case", "dtype"), rows(QUICK, FULL))
def test_every_executor_moves_alike(case: Case, dtype: torch.dtype) -> None:
    check(case, MIXED, dtype, EAGER | IN_PLACE)


@pytest.mark.parametrize(("case", "dtype"), rows(QUICK_PURE, FULL_PURE))
def test_the_pure_compiled_step_moves_alike(case: Case, dtype: torch.dtype) -> None:
    check(case, MIXED, dtype, PURE)


def eager_rows() -> list[Any]:
    """Every case in float64. In bfloat16 options run the same operations."""
    return built(
        [
            row(case, dtype, id=f"{case.id}-{str(dtype)[6:]}", tier=tier)
            for case in FITTING
            for dtype, tier in (
                (torch.float64, ""),
                (torch.bfloat16, "soak" if case.options else ""),
            )
        ]
    )


@pytest.mark.parametrize(("case", "dtype"), eager_rows())
def test_every_eager_executor_moves_alike(case: Case, dtype: torch.dtype) -> None:
    # A rule meets all layouts with its defaults; its options do not read the layout.
    some = SMALL.layouts[::3] if case.options else SMALL.layouts
    check(case, replace(SMALL, layouts=some), dtype, EAGER)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(problem=problems)
@pytest.mark.kernels
@pytest.mark.parametrize(
    "name", [row("adamw", id="adamw"), row("stableadamw", id="stableadamw", tier="full")]
)
def test_any_layout_any_schedule(name: str, problem: Problem) -> None:
    check(Case(name), problem, torch.float32, ALL)


@pytest.mark.kernels
@settings(max_examples=50)
@given(
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    eps=st.floats(0, 1e-4),
    weight_decay=st.floats(0, 0.5),
    problem=problems,
)
def test_any_hyperparameters(betas, eps, weight_decay, problem: Problem) -> None:
    case = Case("adamw", {"betas": betas, "eps": eps, "weight_decay": weight_decay})
    check(case, problem, torch.float32, ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted({*ELEMENTWISE} - {*MEASURED}))
def test_foreach_needs_no_more_than_the_parameters_again(name, dtype) -> None:
    """By the profiler's count of bytes; a rule with means needs whole tensors."""
    shapes = [(1024, 1024)] + [(300, 300)] * 3
    params = [torch.ones(shape, dtype=dtype).requires_grad_() for shape in shapes]
    optimizer = Case(name).cls(params, lr=0.1, foreach=True)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    assert program.BYTES <= sum(p.nbytes for p in params)
    assert allocated_by(optimizer.step) <= sum(p.nbytes for p in params)


@pytest.mark.parametrize("name", ["adamw", "stableadamw"])
@pytest.mark.parametrize("transposed", [False, True])
def test_foreach_in_slices_of_large_tensors(
    name: str, transposed: bool, monkeypatch
) -> None:
    """Also where a slice is cut out of a tensor in memory order."""
    monkeypatch.setattr(eager, "SLICED", 1000)
    monkeypatch.setattr(program, "BYTES", 1000)
    order = "transposed" if transposed else "contiguous"
    large = (Layout((130, 70), order), order)
    odd = (Layout((130, 70), order), "strided")
    problem = Problem([large, odd, (Layout((7,), "contiguous"), "contiguous")], [0.01] * 7)
    want = run_class(Case(name), problem, torch.float32, compile=False)
    got = run_class(Case(name), problem, torch.float32, foreach=True)
    assert all(torch.equal(x, y) for x, y in zip(got, want))
