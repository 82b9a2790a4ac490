"""List kernels: results depend on neither the number of threads nor other tensors."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import CLASSES, ELEMENTWISE
from tiers import few, row
from torch import Tensor

from optimi_func import AdamW, StableAdamW, Storage, compiled, stableadamw
from optimi_func.core.runtime import runtime
from optimi_func.execution import cpp, executors, guards, kernels, list_kernel
from optimi_func.execution.cpp import PIECE
from optimi_func.execution.guards import Guard, tensor_guards
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.rules import Moment, Optimizer

# Lengths near those of vectors and pieces. A large one comes first.
SIZES = [3 * PIECE + 5, 1, 3, 16, 17, 64, 1000, PIECE - 1, PIECE, PIECE + 1]
EAGER = {"compile": False}


def params(dtype: torch.dtype, sizes: list[int] = SIZES) -> list[Tensor]:
    made = []
    for n in sizes:
        generator = torch.Generator().manual_seed(n)
        made.append(torch.randn(n, generator=generator).to(dtype).requires_grad_())
    return made


def fill(ps: list[Tensor], t: int) -> None:
    """Set gradients that grow, because means below 1 would change nothing."""
    for p in ps:
        generator = torch.Generator().manual_seed(1000 * t + p.numel())
        p.grad = 3**t * torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: Any, ps: list[Tensor], steps: int = 4) -> list[Tensor]:
    for t in range(steps):
        fill(ps, t)
        optimizer.step()
    return [x.detach() for p in ps for x in (p, *optimizer.state[p].values())]


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """Record the number of rows of each call."""
    calls: list[int] = []
    run = ListKernel.run

    def counted(self: ListKernel, numbers: int, table: Any, lengths: Any, **each: Any):
        calls.append(len(lengths))
        run(self, numbers, table, lengths, **each)

    monkeypatch.setattr(ListKernel, "run", counted)
    return calls


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("cls", "dtype"),
    [
        row(AdamW, torch.float32, id="AdamW-float32"),
        row(AdamW, torch.bfloat16, id="AdamW-bfloat16"),
        row(StableAdamW, torch.float32, id="StableAdamW-float32"),
        row(StableAdamW, torch.bfloat16, id="StableAdamW-bfloat16", tier="full"),
    ],
)
def test_neither_threads_nor_neighbours_change_a_bit(cls, dtype, threads) -> None:
    ends = []
    for count in (1, 2, 3):
        threads(count)
        ps = params(dtype)
        ends.append(train(cls(ps, lr=0.1, weight_decay=0.1), ps))
    alone = []
    for n in SIZES:
        ps = params(dtype, [n])
        alone += train(cls(ps, lr=0.1, weight_decay=0.1), ps)
    for end in [*ends[1:], alone]:
        assert all(map(torch.equal, ends[0], end))


@pytest.mark.kernels
@pytest.mark.parametrize("name", few(ELEMENTWISE, ["adamw"]))
def test_pieces_give_what_the_pipeline_gives(name: str) -> None:
    ps, qs = params(torch.float64), params(torch.float64)
    ours = train(CLASSES[name](ps, lr=0.05, weight_decay=0.1), ps)
    plain = train(CLASSES[name](qs, lr=0.05, weight_decay=0.1, **EAGER), qs)
    for x, y in zip(ours, plain):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_means_of_a_long_tensor_are_of_pieces_too(threads) -> None:
    """Pieces without means are longer if there are many of them."""
    threads(1)
    ps, qs = (params(torch.float64, [20 * PIECE + 7]) for _ in range(2))
    ours = train(StableAdamW(ps, lr=0.05), ps)
    plain = train(StableAdamW(qs, lr=0.05, **EAGER), qs)
    for x, y in zip(ours, plain):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.kernels
def test_a_step_is_one_call_and_a_mean_two_more_a_million_elements(launched) -> None:
    for cls in (AdamW, StableAdamW):
        train(cls(qs := params(torch.float32, [64]), lr=0.1), qs)  # is compiled here
    launched.clear()
    ps = params(torch.float32)
    train(AdamW(ps, lr=0.1), ps, 5)
    assert launched == [len(SIZES)] * 5
    launched.clear()
    ps = params(torch.float32, [*SIZES, 1 << 20, 1 << 20])
    train(StableAdamW(ps, lr=0.1), ps, 5)
    assert launched == [len(SIZES), len(SIZES), 1, 1, 1, 1] * 5


@pytest.mark.full
@pytest.mark.parametrize("number", [float, torch.tensor], ids=["float", "tensor"])
@pytest.mark.parametrize("decay", ["decoupled", "l2"])
def test_means_of_either_decay_are_those_of_the_pure_step(decay: Any, number: Any) -> None:
    class Decayed(stableadamw):
        @property
        def decay(self) -> Any:
            return decay

    optimizer = Decayed(lr=0.1, weight_decay=number(0.3))
    (p,) = params(torch.bfloat16, [1000])
    g = torch.ones(1000, dtype=torch.bfloat16)
    q, start, state = p.detach(), p.detach().clone(), optimizer.init(p)
    for _ in range(3):
        compiled.step_(optimizer, q, g, state)
    plain, state = start, optimizer.init(start)
    for _ in range(3):
        plain, state = optimizer.step(plain, g, state)
    assert torch.equal(q, plain)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed")
def test_a_float16_gradient_beside_a_bfloat16_parameter_is_not_taken_for_it() -> None:
    """Both have 2 bytes, but the bits of a finite float16 may be a NaN in bfloat16."""
    p, g = torch.ones(100, dtype=torch.bfloat16), torch.full((100,), 60000.0).half()
    optimizer = stableadamw(lr=0.1)
    ends = []
    for step in (compiled.step, type(optimizer).step):
        if step is compiled.step:
            ends.append(step(optimizer, p, g, optimizer.init(p))[0])
        else:
            ends.append(optimizer.step(p, g, optimizer.init(p))[0])
    assert torch.equal(*ends)


@pytest.mark.kernels
def test_later_steps_plan_nothing(monkeypatch) -> None:
    ps = params(torch.float32)
    optimizer = AdamW(ps, lr=0.1)
    train(optimizer, ps)
    planned: list[int] = []
    plan = executors._plan_kernels
    monkeypatch.setattr(
        executors, "_plan_kernels", lambda *a: planned.append(len(a[1])) or plan(*a)
    )
    train(optimizer, ps)
    assert planned == []
    # A gradient with other strides is planned once.
    for _ in range(2):
        fill(ps, 0)
        ps[5].grad = torch.stack([ps[5].grad, ps[5].grad], -1)[..., 0]
        optimizer.step()
    assert planned == [len(ps)]  # once: the copy of it is launched again, too
    train(optimizer, ps)
    assert planned == [len(ps)] * 2  # the strides of backward again, once


@pytest.mark.kernels
def test_one_gradient_for_two_parameters() -> None:
    """Dynamo's guards refuse a list with one tensor twice, so facts are compared."""
    ends = []
    for options in ({}, EAGER):
        ps = params(torch.float64, [64, 64])
        optimizer = AdamW(ps, lr=0.1, **options)
        for t in range(6):
            fill(ps, t)
            ps[1].grad = ps[0].grad
            optimizer.step()
        ends.append(ps)
    for p, q in zip(*ends):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.kernels
@pytest.mark.parametrize("cls", few([AdamW, StableAdamW], ["AdamW"], lambda c: c.__name__))
def test_parameters_on_one_memory_take_turns(cls, launched) -> None:
    """Two threads would race for views of one weight, as of tied layers."""
    ends = []
    for options in ({}, EAGER):
        whole = torch.ones(4 * PIECE, dtype=torch.float64)
        ps = [whole, whole.view(2, -1), torch.ones_like(whole), whole.view(4, -1)]
        ps = [p.detach().requires_grad_() for p in ps]
        train(cls(ps, lr=0.1, weight_decay=0.1, **options), ps)
        ends.append(whole)
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)
    if cls is AdamW:
        assert launched[-4:] == [1, 1, 1, 1]  # one after another


@pytest.mark.kernels
@pytest.mark.parametrize("cls", few([AdamW, StableAdamW], ["AdamW"], lambda c: c.__name__))
def test_the_users_default_device_is_not_ours(cls) -> None:
    ends = []
    for options in ({"compile": True}, EAGER):
        ps = params(torch.float64)
        optimizer = cls(ps, lr=0.1, **options)
        for t in range(4):
            fill(ps, t)
            with torch.device("meta"):
                optimizer.step()
        ends.append(ps)
    for p, q in zip(*ends):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.kernels
def test_one_parameter_turned_around_in_its_memory() -> None:
    """A list of one parameter has a guard too."""
    ends = []
    for options in ({}, EAGER):
        p = torch.arange(16.0, dtype=torch.float64).view(4, 4).requires_grad_()
        optimizer = AdamW([p], lr=0.1, weight_decay=0.1, **options)
        for t in range(6):
            if t == 3:
                p.data = p.data.t()
            p.grad = torch.empty_like(p).copy_(torch.arange(16.0).view(4, 4) - t)
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


# The compiled loop


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("standard", ["c++17", "c++20"])  # torch 2.11's and 2.13's
@pytest.mark.parametrize("name", ["list", "codecs"])
def test_the_source_is_cpp_without_warnings(name: str, standard: str) -> None:
    file = Path(cpp.__file__).with_suffix("") / f"{name}.cpp"
    strict = ["-Wall", "-Wextra", "-Werror", "-fopenmp", f"-std={standard}"]
    subprocess.run(["g++", *strict, *cpp.FLAGS, "-fsyntax-only", file], check=True)


def test_the_cache_sees_all_source() -> None:
    """Inductor's cache hashes the text that it compiles, but no file that this includes."""
    text = cpp.source()
    assert '#include "' not in text
    assert "CODECS[] = {" in text and "int run_list(" in text


@pytest.mark.kernels
def test_what_does_not_give_the_same_is_not_used(unkept, monkeypatch) -> None:
    found = list_kernel._machine_code

    def broken(*args: Any) -> Any:
        code, roles, widths = found(*args)
        roles[-1], roles[-2] = roles[-2], roles[-1]
        return code, roles, widths

    monkeypatch.setattr(list_kernel, "_machine_code", broken)
    monkeypatch.setattr(runtime, "other_code", [])
    monkeypatch.setattr(runtime, "kernels", {})
    ps, qs = params(torch.float32, [9000]), params(torch.float32, [9000])
    monkeypatch.setattr(runtime, "said", set())
    with pytest.warns(UserWarning, match="runs eagerly.*other code than expected"):
        train(AdamW(ps, lr=0.1), ps)
    assert runtime.other_code
    train(AdamW(qs, lr=0.1, **EAGER), qs)
    torch.testing.assert_close(ps[0], qs[0])


@pytest.mark.full
def test_a_rule_of_many_tensors_steps_eagerly_alone(unkept, monkeypatch) -> None:
    class Many(Optimizer):
        lr: float = 0.1
        State = NamedTuple("State", [(f"m{i}", Moment) for i in range(20)])

        def direction(self, g: Tensor, s: Any):
            new = s._make([0.9 * m + g for m in s])
            return sum(new), new

    monkeypatch.setattr(runtime, "other_code", [])
    monkeypatch.setattr(runtime, "kernels", {})
    ps, qs = params(torch.float32, [50, 9000]), params(torch.float32, [50, 9000])
    monkeypatch.setattr(runtime, "said", set())
    text = "Many has 22 tensors for each parameter, .* at most 14: choose compile=False"
    with pytest.warns(UserWarning, match=f"runs eagerly.*{text}"):
        train(Many(ps, lr=0.1, compile=True), ps)
    train(Many(qs, lr=0.1, **EAGER), qs)
    assert all(map(torch.equal, ps, qs))
    assert not runtime.kernels and kernels.has_list_kernels()


@pytest.mark.kernels
def test_compiling_leaves_the_users_random_numbers_alone(unkept, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "kernels", {})
    (p,) = params(torch.float32, [9000])
    fill([p], 0)
    torch.manual_seed(3)
    AdamW([p], lr=0.1).step()
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))


# Guards

CHANGES: dict[str, Any] = {
    "shape": lambda x: x.view(2, 4),
    "strides": lambda x: torch.stack([x, x], -1)[..., 0],
    "dtype": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "negated": torch._neg_view,
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "type": torch.nn.Parameter,
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("guarded", [True, False])
def test_guards_notice(change: Any, guarded: bool, monkeypatch) -> None:
    """Both ways to compare: Dynamo's guards in one call, and fact by fact."""
    if not guarded:
        monkeypatch.setattr(guards, "tensor_guards", lambda tensors: None)
    xs = [torch.ones(8), torch.ones(3, 5).t(), torch.ones(()), torch.ones(0)]
    guard = Guard(xs, addresses=False)
    assert guard.holds([x.clone() for x in xs])
    assert not guard.holds(xs[:-1])
    xs[0] = change(xs[0])
    assert not guard.holds(xs)


def test_guards_notice_another_address() -> None:
    xs = [torch.ones(8), torch.ones(3)]
    guard = Guard(xs, addresses=True)
    assert guard.holds([x.view(x.shape) for x in xs])
    assert not guard.holds([xs[0], xs[1].clone()])


def test_torchs_guards_are_there_and_what_else_they_look_at_does_not_matter() -> None:
    xs = [torch.ones(8), torch.ones(3, 5)]
    assert tensor_guards(xs) is not None
    guard = Guard(xs, addresses=True)
    for _ in range(10):
        xs[0].requires_grad_(not xs[0].requires_grad)
        assert guard.holds(xs)
        with torch.inference_mode():
            assert guard.holds(xs)


def test_guards_tried_within_an_operation_say_nothing_of_the_outside() -> None:
    """Negative views are invisible there. A compiled training step may be the first use."""
    from optimi_func.execution import guards

    xs = [torch.ones(8)]
    negative = torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)
    guards._guards_work.cache_clear()
    try:
        with torch._C._ExcludeDispatchKeyGuard(negative):
            assert tensor_guards(xs) is None
        assert tensor_guards(xs) is not None
    finally:
        guards._guards_work.cache_clear()


def test_guards_that_notice_nothing_are_not_used(monkeypatch) -> None:
    """Guards are private, so another torch may give them another meaning."""
    monkeypatch.setattr(guards, "_make_guards", lambda tensors: lambda *xs: True)
    guards._guards_work.cache_clear()
    try:
        assert tensor_guards([torch.ones(8)]) is None
        guard = Guard([torch.ones(8)], addresses=False)
        assert guard.holds([torch.ones(8)]) and not guard.holds([torch.ones(9)])
    finally:
        guards._guards_work.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("early", [False, True])
def test_a_kernel_that_writes_too_early_replaces_nothing(early: bool, monkeypatch) -> None:
    """Results with targets replace their origins if a trial gives the same bits."""
    made: list[Any] = []
    in_place_kernel = list_kernel.in_place_kernel

    def replaced(kernel: Any, ours: Any) -> Any:
        made.append(kernel)
        return (lambda *_: None) if early else in_place_kernel(kernel, ours)

    monkeypatch.setattr(list_kernel, "in_place_kernel", replaced)
    monkeypatch.setattr(executors, "in_place_kernel", replaced)
    list_kernel.can_run_in_place.cache_clear()
    ends = []
    for how in ({"compile": None}, {"compile": False}):
        ps = [torch.ones(300, 7, dtype=torch.bfloat16, requires_grad=True)]
        optimizer = AdamW(ps, lr=0.05, storage=Storage("plain", torch.float32), **how)
        train(optimizer, ps)
        ends.append([*ps, *optimizer.state[ps[0]].values()])
    list_kernel.can_run_in_place.cache_clear()
    assert all(map(torch.equal, *ends))
    assert len(made) == (1 if early else 2)
