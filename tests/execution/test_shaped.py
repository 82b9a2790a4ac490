"""Kernels of whole tensors, one for all shapes of a rank, beside the eager step."""

from typing import Any

import pytest
import torch
from tiers import row
from torch import Tensor, nn

from optimi_func import Adafactor, adafactor_init, compiled
from optimi_func.core.runtime import runtime
from optimi_func.execution import inductor, kernels, shaped, wholes

# Small, tall, wide, of one row or column, one for several vectors and one for none.
MATRICES = [(2, 2), (130, 70), (7, 300), (1, 9), (5, 1), (64, 64), (33, 17)]
ODD = [(3, 5, 7), (1, 4, 6), (4, 3, 5, 7), (100,), (1,), (), (0, 3), (2, 3, 2, 3, 2)]


def params(shapes: list[Any], dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, dtype=torch.float64).to(dtype)) for s in shapes]


def train(ps: list[Any], optimizer: Any, steps: int = 4) -> list[Tensor]:
    for i in range(steps):
        torch.manual_seed(i)
        for p in ps:
            p.grad = (torch.randn(p.shape, dtype=torch.float64) * 10.0 ** (i - 2)).to(
                p.dtype
            )
        optimizer.step()
    state = [x for p in ps for k, x in optimizer.state[p].items() if k != "kahan_comp"]
    return [*[p.detach() for p in ps], *state]


def ended(shapes: list[Any], compile: bool, dtype: Any = torch.float32, **more: Any) -> Any:
    ps = params(shapes, dtype)
    return train(ps, Adafactor(ps, lr=0.1, compile=compile, **more))


def launches_of(monkeypatch: Any) -> list[Any]:
    found: list[Any] = []
    plan = wholes.plan_shaped

    def noted(*args: Any) -> Any:
        launches, rest, error = plan(*args)
        found.append((sum([len(x.positions) for x in launches]), len(rest)))
        return launches, rest, error

    monkeypatch.setattr("optimi_func.execution.executors.plan_shaped", noted)
    return found


def errors(found: list[Tensor], exact: list[Tensor]) -> Tensor:
    """The root mean squares of the relative errors."""
    pairs = [(x.double(), y) for x, y in zip(found, exact, strict=True) if y.numel()]
    return torch.stack([((x - y).norm() / y.norm().clamp_min(1e-9)) for x, y in pairs])


@pytest.mark.kernels
def test_matrices_of_all_shapes_take_one_kernel(graphs: Any, monkeypatch: Any) -> None:
    """No result is further from float64's than the eager one, but for some roundings."""
    exact, eager = ended(MATRICES, False, torch.float64), ended(MATRICES, False)
    ended(MATRICES[:1], True)
    made, planned = graphs(), launches_of(monkeypatch)
    found = ended(MATRICES, True)
    assert (graphs(), planned) == (made, [(len(MATRICES), 0)])
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)
    assert (errors(found, exact) < 2.0 * errors(eager, exact) + 3e-7).all()


@pytest.mark.kernels
def test_threads_and_other_tensors_do_not_matter(threads: Any) -> None:
    shapes = [(150, 250), *MATRICES, (250, 150)]
    wanted = ended(shapes, True)[: len(shapes)]
    threads(3)
    found = ended(shapes, True)[: len(shapes)]
    alone = [ended([shape], True)[0] for shape in shapes[:1]]
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, alone, wanted))


@pytest.mark.kernels
def test_a_step_without_room_raises_before_it_writes(
    monkeypatch: Any, threads: Any
) -> None:
    threads(2)
    ps = params(MATRICES)
    optimizer = Adafactor(ps, lr=0.1, compile=True)
    train(ps, optimizer, 1)
    prepared = shaped.ShapedKernel.prepared
    monkeypatch.setattr(
        shaped.ShapedKernel, "prepared", lambda *given: (prepared(*given)[0], 1 << 60, 2)
    )
    state = [x for p in ps for x in optimizer.state[p].values()]
    before = [x.clone() for x in (*ps, *state)]
    optimizer._clear_caches()
    optimizer._plans.clear()
    with pytest.raises(MemoryError, match="a step needs 2 times 1152921504606846976 bytes"):
        optimizer.step()
    assert all(map(torch.equal, before, (*ps, *state)))


@pytest.mark.kernels
@pytest.mark.parametrize("what", ["turned", "gradient", "field", "dtype", "twins"])
def test_what_is_stored_otherwise_has_the_same_step(what: str, monkeypatch: Any) -> None:
    planned = launches_of(monkeypatch)

    def stepped(compile: bool) -> list[Tensor]:
        both = params([(8, 6), (6, 8)])
        if what == "turned":
            both[0] = nn.Parameter(both[0].detach().t().contiguous().t())
        if what == "twins":
            both[1] = nn.Parameter(both[0].detach().view(6, 8))
        optimizer = Adafactor(both, lr=0.1, compile=compile)
        for p in both:
            p.grad = torch.ones_like(p) * torch.arange(1.0, p.shape[1] + 1)
            if what == "gradient":
                p.grad = p.grad.t().contiguous().t()
        optimizer.step()
        state = optimizer.state[both[0]]
        if what == "field":
            state["row_var"] = state["row_var"].expand(8, 2)[:, :1].repeat(1, 2)[:, ::2]
        if what == "dtype":
            state["row_var"] = state["row_var"].double()
        optimizer.step()
        return [*[p.detach() for p in both], *state.values()]

    torch.testing.assert_close(stepped(True), stepped(False))
    assert planned[0] == {"turned": (1, 1), "gradient": (0, 2)}.get(what, (2, 0))


@pytest.mark.kernels
def test_pure_steps_have_the_classs_bits() -> None:
    ps = params(MATRICES)
    tree = [p.detach().clone() for p in ps]
    state, grads = adafactor_init(tree), list(map(torch.ones_like, tree))
    optimizer = Adafactor(ps, lr=0.1, compile=True)
    for p, g in zip(ps, grads):
        p.grad = g
    optimizer.step()
    known = [x.clone() for x in tree]
    found, after = compiled.adafactor_step(tree, grads, state, lr=0.1)
    assert all(map(torch.equal, tree, known)) and not state.leaves[1].row_var.any()
    assert all(map(torch.equal, found, ps))
    rows = [optimizer.state[p]["row_var"] for p in ps]
    assert all(map(torch.equal, [x.row_var for x in after.leaves], rows))


@pytest.mark.full
@pytest.mark.parametrize("part", ["only_call", "argument_order", "kernels_agree"])
def test_without_torchs_private_parts_maps_are_called(part: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(runtime, "kernels", {})
    home, broken = {"only_call": (shaped, None), "kernels_agree": (kernels, False)}.get(
        part, (inductor, None)
    )
    monkeypatch.setattr(home, part, lambda *args: broken)
    monkeypatch.setattr(runtime, "said", set())
    planned = launches_of(monkeypatch)
    with pytest.warns(UserWarning, match="maps tensors one by one.*other code"):
        found = ended([(4, 3)], True)
    want = ended([(4, 3)], False)
    torch.testing.assert_close(found, want)
    assert planned == [(0, 1)]


OPTIONS: list[dict[str, Any]] = [
    {"beta1": 0.9, "weight_decay": 0.1, "cautious_decay": True},
    {"torch_form": True, "eps": (None, 1e-3), "maximize": True},
    {"scale_parameter": True, "relative_step": True, "flatten": True},
]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        # A kernel for each: the gate has every option, and every dtype without any.
        row(d, x, id=f"{d}-{x}", tier="night" if x and d != torch.float32 else "full")
        for d in (torch.float32, torch.bfloat16, torch.float64)
        for x in ({}, *OPTIONS)
    ],
)
def test_every_option_dtype_and_rank(dtype: Any, options: Any, monkeypatch: Any) -> None:
    shapes = [*MATRICES[:3], *ODD] if dtype == torch.float32 else MATRICES
    planned = launches_of(monkeypatch)
    found = ended(shapes, True, dtype, **options)
    assert planned == [(len(shapes) - 3, 3) if dtype == torch.float32 else (7, 0)]
    tight = 1e-10 if dtype == torch.float64 else 1e-5
    tight = 2e-2 if dtype == torch.bfloat16 else tight
    want = ended(shapes, False, dtype, **options)
    torch.testing.assert_close(found, want, rtol=tight, atol=tight)


@pytest.mark.full
def test_long_sums_are_as_exact_as_torchs() -> None:
    shapes = [(50_000, 8), (8, 50_000), (200_000,)]
    exact = ended(shapes, False, torch.float64)
    own, eager = (errors(ended(shapes, way), exact) for way in (True, False))
    assert (own[:3] < eager[:3]).all()
    assert (own < 2.0 * eager + 5e-7).all()


@pytest.mark.full
def test_numbers_on_the_device_and_skipped_steps() -> None:
    def stepped(**way: Any) -> list[Tensor]:
        ps = params(MATRICES[:3])
        optimizer = Adafactor(ps, lr=torch.tensor(0.1), skip_nonfinite="step", **way)
        train(ps, optimizer, 2)
        for p in ps:
            p.grad = torch.ones_like(p)
        ps[1].grad[0, 0] = torch.inf
        optimizer.step()
        return [*[p.detach() for p in ps], *[optimizer.state[p]["col_var"] for p in ps]]

    torch.testing.assert_close(stepped(compile=True), stepped(compile=False))
