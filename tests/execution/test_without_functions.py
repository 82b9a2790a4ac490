"""Steps where the C++ functions could not be compiled, as when the disk was full.

Steps run eagerly then. Users are told once, and the next optimizer tries again, because the
cause may be gone.
"""

import warnings
from threading import Event
from typing import Any

import pytest
import torch
from tiers import row
from torch import Tensor

import optimi_func
from optimi_func import AdamW, Storage, adamw, compiled, prepare_for_gradient_release
from optimi_func.core.rule import Scalars
from optimi_func.core.runtime import runtime
from optimi_func.execution import codecs, cpp, kernels
from optimi_func.execution.kernels import KernelKey, _without_lists, has_list_kernels

TEXT = (
    r"runs eagerly.*C\+\+ functions .*OSError: No space left .*next optimizer tries again"
)


class Disk:
    """A disk that is full at first; counts how often the functions are made."""

    def __init__(self) -> None:
        self.full, self.tried, self.load = True, 0, cpp._load

    def __call__(self) -> Any:
        self.tried += 1
        if self.full:
            raise OSError("No space left on device")
        return self.load()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A process that has neither the functions nor a kernel."""
    found = Disk()
    monkeypatch.setattr(cpp, "_load", found)
    monkeypatch.setattr(runtime, "tries_again", Event())
    for name in "functions", "errors", "other_code":
        monkeypatch.setattr(runtime, name, [])
    monkeypatch.setattr(runtime, "kernels", {})
    monkeypatch.setattr(runtime, "said", set())
    return found


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each kernel could be compiled; nothing is compiled."""
    asked: list[bool] = []

    def compile_kernel(key: KernelKey, scalars: Scalars) -> Any:
        asked.append(has_list_kernels() and cpp.native() is not None)
        if not asked[-1]:
            raise _without_lists(key)
        return lambda *tensors: None

    monkeypatch.setattr(kernels, "_compile", compile_kernel)
    return asked


def step(optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def new(name: str = "AdamW", **options: Any) -> Any:
    p = torch.nn.Parameter(torch.ones(9000))
    return getattr(optimi_func, name)([p], lr=0.1, **options)


def test_the_next_optimizer_tries_again(disk: Disk, compiles: list[bool]) -> None:
    first = new()
    with pytest.warns(UserWarning, match=TEXT) as said:
        for _ in range(3):
            step(first)
        step(new())  # the disk is still full
    assert len(said) == 1 and disk.tried == 2
    assert compiles == [False, False] and not has_list_kernels()
    disk.full = False
    step(first)
    assert disk.tried == 2  # it goes on as it was planned
    assert new() and disk.tried == 2  # none of its steps has needed them
    step(new())
    assert disk.tried == 3 and compiles == [False, False, True] and has_list_kernels()


def test_compiled_steps_of_another_tree_try_again(disk: Disk, compiles: list[bool]) -> None:
    optimizer = adamw(lr=0.1)

    def take(*sizes: int) -> None:
        ps = [torch.ones(n) for n in sizes]
        compiled.step_(optimizer, ps, ps, optimizer.init(ps))

    with pytest.warns(UserWarning, match=TEXT):
        take(9001)
    take(9001)
    assert disk.tried <= 2
    disk.full = False
    take(9001, 9002, 9003)
    assert compiles[0] is False and compiles[-1] is True


def test_nothing_is_tried_where_nothing_failed(disk: Disk, compiles: list[bool]) -> None:
    disk.full = False
    for _ in range(3):
        step(new())
    assert disk.tried == 1 and compiles == [True]


def test_codecs_are_tried_again(disk: Disk) -> None:
    """State in 8 bits would else step eagerly for the life of the process."""
    assert not codecs.are_exact()
    disk.full = False
    cpp.retry()
    assert cpp.failure() is None and codecs.are_exact()


def test_codecs_with_other_results_are_told(monkeypatch: Any) -> None:
    functions = cpp.native()
    assert functions is not None

    monkeypatch.setattr(
        runtime, "functions", [functions._replace(decode=lambda *args: None)]
    )
    monkeypatch.setattr(runtime, "exact_codecs", {})
    with pytest.warns(UserWarning, match="8 bits give other results.*run eagerly"):
        assert not codecs.are_exact()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not codecs.are_exact()  # it is said once


def test_a_step_that_was_asked_to_compile_warns_too(
    disk: Disk, compiles: list[bool]
) -> None:
    optimizer = new(compile=True)
    with pytest.warns(UserWarning, match=TEXT):
        step(optimizer)
    p = optimizer.param_groups[0]["params"][0]
    assert compiles == [False] and bool((p != 1).all())


def trained(
    name: str, dtype: torch.dtype, way: str, options: dict[str, Any], kernels: bool
) -> list[Tensor]:
    """Return weights that were trained one way, through kernels or eagerly."""
    torch.manual_seed(0)
    shapes = (70, 90), (3, 5), (128, 64), (7, 1)
    if name != "Muon":
        shapes = (*shapes, (9000,), (5,), (1,))
    ps = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    release = way == "release"
    cls, compile = getattr(optimi_func, name), None if kernels else False
    optimizer = cls(ps, lr=0.1, compile=compile, gradient_release=release, **options)
    model = torch.nn.ParameterList(ps)
    if release:
        prepare_for_gradient_release(model, optimizer)
    for i in range(7):
        if release:
            sum([torch.sin(p + i).float().sum() for p in ps]).backward()
        else:
            for p in ps:
                p.grad = torch.cos(p.detach() + i)
        optimizer.step()
    if release:
        optimi_func.remove_gradient_release(model)
    return [p.detach() for p in ps]


COMPACT, EXACT = {"storage": "compact"}, {"storage": "exact"}
EIGHT = {"storage": Storage(moments="8bit")}
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the optimizer step for CPU runs eagerly")
@pytest.mark.parametrize(
    ("name", "dtype", "way", "options"),
    [
        row("AdamW", F32, "class", {}, id="adamw"),
        row("AdamW", F32, "release", {}, id="adamw-release"),
        row("AdamW", BF16, "class", {}, id="adamw-kahan"),
        row("AdamW", BF16, "class", COMPACT, id="adamw-compact"),
        row("AdamW", BF16, "class", EXACT, id="adamw-exact"),
        row("AdamW", F32, "class", EIGHT, id="adamw-8bit"),
        row("StableAdamW", F32, "class", {}, id="stableadamw"),
        row("Ranger", F32, "class", {}, id="ranger"),
        row("Prodigy", F32, "class", {}, id="prodigy"),
        row("Adafactor", F32, "class", {}, id="adafactor"),
        row("Muon", F32, "class", {}, id="muon"),
    ],
)
def test_every_executor_computes_the_same(
    name: str, dtype: torch.dtype, way: str, options: dict[str, Any], disk: Disk
) -> None:
    """Without the functions, movements are those of the eager step."""
    got = trained(name, dtype, way, options, kernels=True)
    assert disk.tried and not runtime.kernels
    for x, y in zip(got, trained(name, dtype, way, options, kernels=False), strict=True):
        # Each has moved by about 0.5.
        assert float((x.double() - y.double()).abs().max()) <= (
            2e-2 if dtype == BF16 else 1e-5
        )


def test_a_compiler_that_fails_is_asked_again_by_the_next_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three times at most, because each time may take seconds. It is said once."""
    asked: list[str] = []

    def compile_kernel(key: KernelKey, scalars: Scalars) -> Any:
        asked.append(key.name)
        raise RuntimeError("no C++ compiler 'g++' can be called")

    monkeypatch.setattr(kernels, "_compile", compile_kernel)
    monkeypatch.setattr(runtime, "kernels", {})
    monkeypatch.setattr(runtime, "said", set())
    monkeypatch.setattr(runtime, "uncompilable", set())
    monkeypatch.setattr(runtime, "failures", {})

    def steps() -> None:
        p = torch.ones(3, requires_grad=True)
        optimizer = AdamW([p], lr=0.1)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()

    with pytest.warns(UserWarning, match="could not be compiled.*next optimizer tries"):
        steps()
    assert len(asked) == 1
    for _ in range(4):
        steps()
    assert len(asked) == 3
    assert runtime.failures == {"cpu": 3}


@pytest.mark.kernels
def test_the_log_says_why_some_parameters_step_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "said", set())
    parts = [torch.ones(4, 6)[:, ::2].requires_grad_() for _ in range(2)]
    for p in parts:
        p.grad = torch.ones_like(p)
        AdamW([p, torch.ones(3, requires_grad=True)], lr=0.1).step()
    value, x = optimi_func.adamw(lr=0.1), torch.ones(8192, dtype=torch.bfloat16)
    optimi_func.compiled.step(value, x, x, value.init(x, storage="exact"))
    records = [x for x in caplog.records if x.name == "optimi_func"]
    texts = [x.getMessage() for x in records if "run eagerly" in x.getMessage()]
    assert [x.levelname for x in records if x.getMessage() in texts] == ["WARNING"] * 2
    assert "does not fill its memory in one order" in texts[0]
    assert "whose name ends with _" in texts[1]
