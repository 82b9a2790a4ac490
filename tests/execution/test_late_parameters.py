"""Parameters of one group that differ: each steps as it would in an optimizer of its own.

A step computes scalars once for all parameters that share them, and one launch updates many
parameters. A parameter that started late, missed a gradient, came in a later part of the
step's batch, or is given other extras must still get its own scalars. Every way to run a
step is compared with the same way for that parameter alone, bit for bit.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cases import NAMES, NO_CODES, REFUSE_STATES, SCHEDULE_FREE, SOME, Case
from tiers import few
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimi_func import compiled, prepare_for_gradient_release
from optimi_func.core.rule import Storage
from optimi_func.rules import Optimizer, Wide

# The steps at which each parameter has a gradient. Three start late and miss some, so that
# the second has as many steps as the first at 2, and as many as the last at 5. The third,
# which misses none, is a tree's clock, because the leaves of a tree have one step count.
AT = ((1, 2, 4, 5, 6, 7), (1, 2, 5, 6, 7), tuple(range(8)), (2, 3, 5, 6, 7))
CLOCK, STEPS = 2, 8
# What all parameters of these have in common follows from all of them.
JOINED = tuple(n for n in NAMES if Case(n).functional().rule.join is not None)
APART = [Case(n, {"momentum": 0.9} if n == "sgd" else {}) for n in NAMES if n not in JOINED]
BF16 = torch.bfloat16
# The tensors of each parameter, before the first step and after each.
History = list[list[list[Tensor]]]


class Problem(NamedTuple):
    """A rule, the parameters that it steps, how they are stored, and what it is given."""

    case: Any
    shape: tuple[int, int] = (8, 6)
    dtype: torch.dtype = torch.float32
    storage: Any = None
    gaps: bool = False  # tensors with gaps in memory, which no kernel takes
    extras: Mapping[str, Any] = {}  # for each parameter
    lr: float = 0.02
    drift: float = 0.0  # what all gradients have in common

    def tensor(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.placed(torch.randn(self.shape, generator=generator).to(self.dtype))

    def placed(self, x: Tensor) -> Tensor:
        return torch.stack([x, x], -1)[..., 0] if self.gaps else x

    def params(self) -> list[Any]:
        return [nn.Parameter(self.tensor(i)) for i in range(len(AT))]

    def grads(self, t: int, present: Collection[int]) -> list[Tensor | None]:
        """The gradients of a step; a parameter's are the same whatever else is there."""
        return [
            self.tensor(100 * t + i + 10) + self.drift
            if i in present and t in steps
            else None
            for i, steps in enumerate(AT)
        ]


def copied(params: Iterable[Any], states: Iterable[Any]) -> list[list[Tensor]]:
    rows = [[p.detach(), *pytree.tree_leaves(s)] for p, s in zip(params, states)]
    return [[x.clone() for x in row if isinstance(x, Tensor)] for row in rows]


def entries(optimizer: Any, params: Iterable[Any]) -> list[Any]:
    return [dict(sorted(optimizer.state.get(p, {}).items())) for p in params]


def made(problem: Problem, params: Any, **how: Any) -> Any:
    options = {"compile": False, "storage": problem.storage, **problem.case.options, **how}
    return problem.case.cls(params, lr=problem.lr, **options)


def by_class(problem: Problem, present: Collection[int], **how: Any) -> History:
    params = problem.params()
    optimizer = made(problem, params, **how)
    found = [copied(params, entries(optimizer, params))]
    for t in range(STEPS):
        for p, g in zip(params, problem.grads(t, present)):
            p.grad = g
        optimizer.step(**problem.extras)
        found.append(copied(params, entries(optimizer, params)))
    return found


def backward(params: Iterable[Any], grads: list[Tensor | None]) -> bool:
    """Give parameters these gradients in one backward; False if there are none."""
    terms = [(p * g).sum() for p, g in zip(params, grads) if g is not None]
    if terms:
        torch.stack(terms).sum().backward()
    return bool(terms)


def by_release(problem: Problem, present: Collection[int]) -> History:
    """One backward for each step; small parameters are applied together."""
    model = nn.ParameterList(problem.params())
    optimizer = made(problem, model.parameters(), gradient_release=True)
    prepare_for_gradient_release(model, optimizer)
    if problem.extras:
        optimizer.give(**problem.extras)
    found = [copied(model, entries(optimizer, model))]
    for t in range(STEPS):
        if backward(model, problem.grads(t, present)):
            optimizer.step()
        found.append(copied(model, entries(optimizer, model)))
    return found


def by_released_value(problem: Problem, present: Collection[int]) -> History:
    model = nn.ParameterList(problem.params())
    handle = prepare_for_gradient_release(model, problem.case.functional(problem.lr))
    found = [copied(model, handle.state.leaves.values())]
    for t in range(STEPS):
        backward(model, problem.grads(t, present))
        handle.step()
        found.append(copied(model, handle.state.leaves.values()))
    return found


def by_tree(
    problem: Problem, present: Collection[int], step: Callable[..., Any]
) -> History:
    params = [p.detach() for p in problem.params()]
    value = problem.case.functional(problem.lr)
    state = value.init(params, storage=problem.storage)
    found = [copied(params, state.leaves)]
    for t in range(STEPS):
        params, state = step(value, params, problem.grads(t, present), state)
        params = list(map(problem.placed, params))
        found.append(copied(params, state.leaves))
    return found


def pure(value: Any, *trees: Any) -> Any:
    return value.step(*trees)


EAGER: dict[str, Any] = {
    "eager": by_class,
    "foreach": partial(by_class, foreach=True, compile=None),
    "capturable": partial(by_class, capturable=True),
    "release": by_release,
    "pure": partial(by_tree, step=pure),
}
KERNELS: dict[str, Any] = {
    "kernels": partial(by_class, compile=True),
    "compiled": partial(by_tree, step=compiled.step),
    "compiled in place": partial(by_tree, step=compiled.step_),
    "released value": by_released_value,
}
WAYS = EAGER | KERNELS
TREES = ("pure", "compiled", "compiled in place", "released value")


def check(problem: Problem, way: str) -> None:
    run = partial(WAYS[way], problem)
    together = run(range(len(AT)))
    for i in (0, 1, 3):
        alone = run({i, CLOCK} if way in TREES else {i})
        start, end = alone[0][i][0], alone[-1][i][0]
        assert not torch.equal(start, end), "it does not move"
        for t, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
            for x, y in zip(ours[i], theirs[i], strict=True):
                assert torch.equal(x, y), f"parameter {i} after {t} steps"
            # A step without its gradient leaves it as it was, with its state.
            if t > 0 and t - 1 not in AT[i]:
                assert all(map(torch.equal, ours[i], together[t - 1][i])), (i, t)


@pytest.mark.parametrize("way", EAGER)
@pytest.mark.parametrize("case", APART, ids=lambda c: c.name)
def test_each_steps_as_if_it_were_alone(case: Case, way: str) -> None:
    check(Problem(case), way)


@pytest.mark.parametrize("way", KERNELS)
@pytest.mark.parametrize("case", APART, ids=lambda c: c.name)
def test_so_it_does_where_no_kernel_takes_it(case: Case, way: str) -> None:
    """Compiled steps run tensors with gaps operation by operation, in the same plans."""
    check(Problem(case, gaps=True), way)


ADAM = Case("adamw")
COMPILED = {
    "adamw": ("kernels", Problem(ADAM)),
    "adamw, pure": ("compiled", Problem(ADAM)),
    "adamw in bfloat16": ("kernels", Problem(ADAM, dtype=BF16)),
    "stableadamw": ("kernels", Problem(Case("stableadamw"))),
    "ranger": ("kernels", Problem(Case("ranger"))),
    "schedule_free_adamw": ("kernels", Problem(Case("schedule_free_adamw"))),
    "muon": ("kernels", Problem(Case("muon"))),
    "adafactor": ("kernels", Problem(Case("adafactor"), (61, 89))),
    "adamw, compact": ("kernels", Problem(ADAM, (128, 64), BF16, "compact")),
    "adamw, compact in a tree": (
        "compiled in place",
        Problem(ADAM, (128, 64), BF16, "compact"),
    ),
}


@pytest.mark.kernels
@pytest.mark.parametrize(("way", "problem"), COMPILED.values(), ids=COMPILED)
def test_so_it_does_in_kernels(way: str, problem: Problem) -> None:
    check(problem, way)


STORED = {
    "8bit": Problem(ADAM, (128, 64), storage=Storage(moments="8bit")),
    "compact": Problem(ADAM, (128, 64), BF16, "compact"),
    "exact": Problem(ADAM, dtype=BF16, storage="exact"),
    "stochastic": Problem(ADAM, dtype=BF16, storage=Storage("stochastic", seed=3)),
    "float32": Problem(ADAM, dtype=BF16, storage=Storage(moments=torch.float32)),
}
CODED = [case for case in APART if case.name not in NO_CODES]


@pytest.mark.parametrize("way", EAGER)
@pytest.mark.parametrize("storage", STORED)
def test_so_it_does_in_every_storage(storage: str, way: str) -> None:
    check(STORED[storage], way)


@pytest.mark.parametrize("case", few(CODED, SOME, lambda c: c.name))
def test_codes_of_every_rule_are_rounded_by_the_parameters_own_count(case: Case) -> None:
    check(STORED["8bit"]._replace(case=case), "eager")


# What several parameters have in common.


@pytest.mark.parametrize("way", [way for way in EAGER if way != "pure"])
@pytest.mark.parametrize("name", JOINED)
def test_sums_over_parameters_of_which_some_start_late(name: str, way: str) -> None:
    """The pure step, whose leaves have one count, has the same estimate after each step."""
    problem = Problem(Case(name), dtype=torch.float64, lr=1.0, drift=0.5)
    present, found = range(len(AT)), list[History]()
    for some in ("pure", way):
        found.append(WAYS[some](problem, present))
    for t, (want, got) in enumerate(zip(*found)):
        for i, (ours, theirs, start) in enumerate(zip(got, want, problem.params())):
            if t == 0:
                continue
            moved = (theirs[0] - start.detach()).norm()
            assert (ours[0] - theirs[0]).norm() <= 1e-12 * moved, (i, t)
    numbers = [
        x.item() for x in found[1][-1][0] if x.dim() == 0 and x.dtype == x.double().dtype
    ]
    assert max(numbers) > 0.1  # the estimate, from 0.05


@pytest.mark.parametrize("way", ["eager", "foreach", "capturable"])
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_equal_step_counts_do_not_share_other_running_scalars(name: str, way: str) -> None:
    """A parameter that comes from another optimizer has its own sum of weights."""
    how = {"foreach": True, "compile": None} if way == "foreach" else {}
    how |= {"capturable": True} if way == "capturable" else {}
    problem = Problem(Case(name, {"warmup_steps": 3} if "radam" not in name else {}))
    ends: list[list[list[Tensor]]] = []
    for present in ((0, 1), (0,), (1,)):
        params = problem.params()[:2]
        for lr, p in zip((0.02, 0.3), params):
            p.grad = torch.ones_like(p)
            before = made(problem, [p], **how)
            before.param_groups[0]["lr"] = lr
            for _ in range(6):
                before.step()
            p.state = before.state[p]
        optimizer = made(problem, [params[i] for i in present], **how)
        for i in present:
            optimizer.state[params[i]] = params[i].state
        for _ in range(3):
            optimizer.step()
        ends.append(copied(params, entries(optimizer, params)))
    both, *alone = ends
    for i in (0, 1):
        assert all(map(torch.equal, both[i], alone[i][i])), i


# What differs within one step.


class Weighed(Optimizer):
    """Averages weighed gradients, and scales the average: by one extra each."""

    class State(NamedTuple):
        average: Wide

    def direction(self, g: Tensor, s: State, weight: Tensor, scale: Tensor):
        average = 0.9 * s.average + weight * g
        return scale * average, self.State(average)


WEIGHED = SimpleNamespace(cls=Weighed, options={})
WHOLE = [torch.full((8, 6), x) for x in (0.5, 2.0, 3.0, 5.0)]
NUMBERS = list(map(torch.tensor, (0.25, 4.0, 8.0, 2.0)))
EXTRAS = {
    "numbers": {"weight": NUMBERS, "scale": NUMBERS[::-1]},
    "one of both for all": {"weight": NUMBERS, "scale": 0.5},
    "tensors": {"weight": WHOLE, "scale": WHOLE[::-1]},
    "a number and a tensor": {"weight": [NUMBERS[0], *WHOLE[1:]], "scale": NUMBERS},
}


@pytest.mark.parametrize("way", [name for name in EAGER if name not in TREES])
@pytest.mark.parametrize("extras", EXTRAS)
def test_each_gets_the_extras_that_were_given_for_it(extras: str, way: str) -> None:
    check(Problem(WEIGHED, extras=EXTRAS[extras]), way)


MICROBATCHES = 3
# The microbatches in which each parameter has a gradient, in turns.
PARTS = [((0, 1, 2), (2,)), ((0,), (0, 1, 2)), ((1, 2), (0, 2)), ((0, 1), (1, 2))]
STATES = [case for case in APART if case.name not in REFUSE_STATES or case.name == "sgd"]


def by_parts(problem: Problem, present: Collection[int], **how: Any) -> Any:
    """Release with accumulation="states": parts of a gradient move the state."""
    model = nn.ParameterList(problem.params())
    optimizer = made(problem, model.parameters(), gradient_release=True, **how)
    prepare_for_gradient_release(model, optimizer, accumulation="states")
    for t, parts in enumerate(PARTS):
        for k in range(MICROBATCHES):
            grads: Any = [
                problem.tensor(1000 * t + 10 * k + i) if i in present and k in ks else None
                for i, ks in enumerate(parts)
            ]
            backward(model, grads)
        optimizer.step()
    return copied(model, entries(optimizer, model))


@pytest.mark.parametrize("case", STATES, ids=lambda c: c.name)
def test_a_first_part_decays_the_state_and_a_further_part_does_not(case: Case) -> None:
    parts_alike(Problem(case))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_so_it_does_in_kernels_of_the_state(dtype: torch.dtype) -> None:
    parts_alike(Problem(ADAM, dtype=dtype), compile=True)


def parts_alike(problem: Problem, **how: Any) -> None:
    together = by_parts(problem, {0, 1}, **how)
    for i in (0, 1):
        for x, y in zip(together[i], by_parts(problem, {i}, **how)[i], strict=True):
            assert torch.equal(x, y), i


CHANGES: dict[str, dict[str, Any]] = {
    "clip_param_norm": {"clip_param_norm": 2.0},
    "clip_value": {"clip_value": 0.5},
    "skip_nonfinite": {"skip_nonfinite": True},
    "both": {"skip_nonfinite": True, "clip_param_norm": 2.0},
    # Plans from before then know of no flags on the device.
    "skip_nonfinite from a later step on": {"skip_nonfinite": True},
}


@pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SOME)
def test_each_is_clipped_and_skipped_by_its_own_gradient(
    name: str, change: str, capturable: bool
) -> None:
    problem = Problem(Case(name))

    def run(present: Collection[int]) -> tuple[Any, Any]:
        model = nn.ParameterList(problem.params())
        how = {"gradient_release": True, "capturable": capturable}
        optimizer = made(problem, model.parameters(), **how)
        later = "later" in change
        how = {} if later else CHANGES[change]
        handle = prepare_for_gradient_release(model, optimizer, **how)
        for t in range(STEPS):
            if later and t == 3:
                handle.options = replace(handle.options, **CHANGES[change])
            grads = problem.grads(t, present)
            if "skip_nonfinite" in CHANGES[change]:
                bad = (6, 5, 3, 7)  # the step at which each has a NaN
                grads = [
                    None if g is None else g * torch.nan if t == bad[i] else g
                    for i, g in enumerate(grads)
                ]
            if backward(
                model, [None if g is None else g * 3**i for i, g in enumerate(grads)]
            ):
                optimizer.step()
        return copied(model, entries(optimizer, model)), handle.skipped

    together, skipped = run(range(len(AT)))
    for i in range(len(AT)):
        alone, own = run({i})
        assert {k: n for k, n in skipped.items() if k == str(i)} == own
        for x, y in zip(together[i], alone[i], strict=True):
            assert torch.equal(x, y), i
    assert len(skipped) == len(AT) * ("skip_nonfinite" in CHANGES[change])
