"""Results in new tensors, whose memory torch fills with NaN before it hands it out.

A launch that leaves an element of a result unwritten returns whatever was in memory. With
NaN there, it cannot be right by chance.
"""

from collections.abc import Iterator
from typing import Any

import cookbook
import pytest
import torch
from cases import CASES, DEFAULTS, MATRICES, Case
from tiers import built, row
from torch import Tensor
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import compiled
from optimi_func.core.program import Room
from optimi_func.execution import trees

pytestmark = pytest.mark.filterwarnings(
    "ignore:eps=", "ignore:weight_decay=", "ignore:max_lr=", "ignore:.*hardly moves"
)
F32, BF16 = torch.float32, torch.bfloat16
# A parameter's dtype and the storage of its state.
STORED = ((F32, None), (BF16, None), (BF16, "exact"), (BF16, "compact"))
STEPS = 7  # Ranger copies its slow weights at the sixth


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN, or with the largest integer."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.use_deterministic_algorithms(False)


def test_new_memory_is_poisoned(poisoned: None) -> None:
    """Else the tests below would show nothing."""
    assert torch.empty_like(torch.ones(3)).isnan().all()


def params(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Small tensors that share a launch, others of their own, and one without elements."""
    shapes = {"a": (3, 4), "b": (3, 4), "c": (5, 2), "d": (7,), "e": (), "large": (96, 96)}
    shapes["empty"] = (0,)
    torch.manual_seed(0)
    made = {k: torch.randn(shape) for k, shape in shapes.items()}
    made["turned"] = torch.randn(4, 3).t()
    if case.name in MATRICES:
        made = {k: x for k, x in made.items() if x.dim() == 2}
    return {k: x.to(dtype) for k, x in made.items()}


def run(step: Any, case: Case, dtype: torch.dtype, storage: Any = None) -> list[Tensor]:
    """Return the parameters and the state after some steps."""
    value, ps = case.functional(), params(case, dtype)
    state = value.init(ps, storage=storage)
    for i in range(STEPS):
        torch.manual_seed(i + 1)
        grads: Any = {k: torch.randn_like(p) for k, p in ps.items()}
        if i == 3:
            grads[next(iter(ps))] = None
        ps, state = step(value, ps, grads, state)
    return [x for x in pytree.tree_leaves((ps, state)) if isinstance(x, Tensor)]


def check(one: list[Tensor], other: list[Tensor]) -> None:
    """Compare every bit; a NaN is equal to nothing."""
    for got, want in zip(one, other, strict=True):
        assert torch.equal(got, want)


def rows() -> list[Any]:
    """Every rule in every storage, and every option in float32."""
    found = [
        row(case, *how, id=f"{case.id}-{str(how[0])[6:]}-{how[1]}", tier=tier)
        for case in CASES
        for i, how in enumerate(STORED)
        for tier in ["full" if case.options or i > 2 else ""]
        if "split" not in case.options and not (case.options and i)
    ]
    return built(found)


@pytest.mark.parametrize(("case", "dtype", "storage"), rows())
def test_the_eager_step_fills_all_results(
    case: Case, dtype: torch.dtype, storage: Any, poisoned: None, monkeypatch: Any
) -> None:
    """In new tensors it computes what it computes in place."""
    make, how = trees.TreeUpdate.of, (case, dtype, storage)
    monkeypatch.setattr(trees.TreeUpdate, "of", lambda o, t, _: make(o, t, "eager"))
    check(run(trees.step, *how), run(trees.step_, *how))


@pytest.mark.parametrize("name", cookbook.ROWS)
def test_cookbook_rules_fill_all_results(name: str, poisoned: None) -> None:
    """Several keep numbers, which a parameter without elements has too."""
    hyper, more = cookbook.ROWS[name]
    value = cookbook.rule_of(name).pure(**{"lr": 0.01, **hyper})
    refuses = value.rule.refuses or (lambda p: None)
    shapes = [x for x in [(4, 3), (0, 3), (0,), ()] if refuses(torch.ones(x)) is None]
    drawn = torch.Generator().manual_seed(0)
    params = [torch.randn(x, generator=drawn) for x in shapes]
    state = value.init(params)
    for _ in range(3):
        grads = [torch.randn(x, generator=drawn) for x in shapes]
        extras = more["extras"](grads) if "extras" in more else {}
        params, state = value.step(params, grads, state, **extras)
        for x in pytree.tree_leaves((params, state)):
            assert not x.isnan().any()


@pytest.mark.parametrize("case", [pytest.param(x, id=x.id) for x in DEFAULTS])
def test_the_pure_step_fills_all_results(case: Case, poisoned: None) -> None:
    """With NaN in new memory it computes what it computes without."""
    step = type(case.functional()).step
    got = run(step, case, F32)
    torch.use_deterministic_algorithms(False)
    check(got, run(step, case, F32))


COMPILED = [("adamw", F32), ("adamw", BF16), ("ranger", F32), ("prodigy", F32)]
COMPILED += [("stableadamw", F32), ("adafactor", F32), ("muon", F32)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        row(
            *pair,
            id=f"{pair[0]}-{str(pair[1])[6:]}",
            tier="kernels" if pair == COMPILED[0] else "full",
        )
        for pair in COMPILED
    ],
)
def test_kernels_fill_all_results(name: str, dtype: torch.dtype, poisoned: None) -> None:
    got, want = (
        run(compiled.step, Case(name), dtype),
        run(compiled.step_, Case(name), dtype),
    )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2 if dtype == BF16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize("first", ["cpu", "meta"])
def test_each_device_has_its_own_buffers(first: str) -> None:
    """A group on two devices needs temporaries on both."""
    x = torch.ones(70, 70)
    room, devices = Room(), [first, "meta" if first == "cpu" else "cpu"]
    for device in devices * 2:
        (buffer,) = room.buffers((F32,), x.to(device))
        assert buffer.device.type == device
    ps = [torch.nn.Parameter(torch.ones(70, 70, device=device)) for device in devices]
    optimizer = optimi_func.AdamW(ps, lr=0.1, compile=False)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    (p,) = [p for p in ps if p.is_cpu]
    assert torch.allclose(p, torch.full_like(p, 0.9 - 0.1 * 0.01), atol=1e-3)
