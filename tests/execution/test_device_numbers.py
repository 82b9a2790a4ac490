"""The numbers of a step on their way to a device: uploads, launches, and CUDA graphs.

A device that computes nothing ("meta") and kernels that do nothing show what would be
launched on one that does.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CLASSES, ELEMENTWISE, MEASURED
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import optimi_func
from optimi_func import compiled
from optimi_func.classes import stepping
from optimi_func.classes.groups import as_scalar
from optimi_func.core import packed
from optimi_func.core.distributed import ShardSpec
from optimi_func.core.packed import ALIGNMENT, Packed
from optimi_func.core.rule import Rates, Scalars
from optimi_func.execution import executors, kernels, launches, slots, trees
from optimi_func.execution.executors import SMALL
from optimi_func.execution.kernels import CaptureError

META = torch.device("meta")
CPU = torch.device("cpu")
LARGE = 2 * SMALL


class Operations(TorchDispatchMode):
    """Notes the operations that would launch something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves([args, result]) if isinstance(x, Tensor)]
        there = any(x.device == META for x in tensors)
        if there and not (
            func.is_view or "empty" in func.name() or "detach" in func.name()
        ):
            self.names.append(func.name())
        return result


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """What kernels are called with; they do nothing."""
    calls: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(executors, "kernel", lambda *_: lambda *given: calls.append(given))
    # torch knows no autocast for this device.
    monkeypatch.setattr(stepping, "has_memory", lambda _: True)  # as a device's would
    monkeypatch.setattr(stepping, "kernel_context", lambda _: kernels.kernel_context(CPU))
    return calls


def meta_params(count: int, numel: int = LARGE) -> list[Tensor]:
    ps = [torch.ones(numel, device=META, requires_grad=True) for _ in range(count)]
    for p in ps:
        p.grad = torch.ones_like(p)
    return ps


# Prodigy reads its sums, which have no values here.
@pytest.mark.parametrize("name", [x for x in ELEMENTWISE if x != "prodigy"])
def test_the_scalars_of_a_group_are_one_upload(
    name: str, called: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[int] = []
    run = packed._uploaded
    monkeypatch.setattr(packed, "_uploaded", lambda *x: uploads.append(1) or run(*x))
    ps = meta_params(6)
    groups = [{"params": ps[i : i + 2], "lr": 0.1 * (i + 1)} for i in (0, 2, 4)]
    optimizer = CLASSES[name](groups, lr=0.1, compile=True)
    for _ in range(3):
        uploads.clear()
        called.clear()
        optimizer.step()
        assert len(uploads) == len(groups)
    each = 2 if name in MEASURED else 1  # its means, and its move
    assert len(called) == each * len(ps)
    for values, *_ in called:
        assert values.storage_offset() * values.element_size() % ALIGNMENT == 0
        assert values.is_contiguous()


@pytest.mark.parametrize("name", ["adamw", "stableadamw"])
def test_operations_do_not_grow_with_the_number_of_tensors(name: str, called: Any) -> None:
    counts: list[int] = []
    for count in (3, 30):
        optimizer = CLASSES[name](meta_params(count), lr=0.1, compile=True)
        optimizer.step()
        with Operations() as operations:
            optimizer.step()
        counts.append(len(operations.names))
    assert counts[0] == counts[1] <= 8


def test_a_mean_of_a_class_lies_in_a_row_of_its_own(called: Any) -> None:
    """All are measured, then moved; no two parameters share a row."""
    CLASSES["stableadamw"](meta_params(3), lr=0.1, compile=True).step()
    rows = [values for values, *_ in called]
    for some in (rows[:3], rows[3:]):
        assert len({x.storage_offset() for x in some}) == 3


@pytest.mark.full
def test_kernels_of_one_tensor_measure_for_others_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of shards: means are written down, and read again to move."""
    monkeypatch.setattr(kernels, "LISTED", set())
    ends = []
    for sharded in (False, True):
        if sharded:
            # One process, which gets the sums that it sends.
            monkeypatch.setattr(
                slots,
                "shards_of",
                lambda p: ShardSpec(None, (), (), tuple(p.shape), p.stride()),
            )
            monkeypatch.setattr(launches, "all_reduce_sum", lambda sums, _: sums)
        own = torch.Generator().manual_seed(0)
        ps = [torch.randn(SMALL + i, generator=own).requires_grad_() for i in range(3)]
        optimizer = CLASSES["stableadamw"](ps, lr=0.1, compile=True)
        for t in range(3):
            for i, p in enumerate(ps):
                # Growing, each at its own pace: every mean is above 1, none like another.
                p.grad = torch.randn(p.shape, generator=own) * (2.0 + i) ** t
            optimizer.step()
        ends.append([p.detach() for p in ps])
    for p, q in zip(*ends):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_counts_on_the_device_cost_few_operations(called: Any) -> None:
    ps = meta_params(3)
    optimizer = CLASSES["adamw"](ps, lr=0.1, compile=True, capturable=True)
    with pytest.MonkeyPatch.context() as patch:
        # Counts of another device are read once, to tell those that differ.
        patch.setattr(Tensor, "tolist", lambda x: [0.0] * len(x))
        optimizer.step()
    with Operations() as operations:
        optimizer.step()
    assert len(operations.names) <= 16, operations.names


def test_numbers_from_host_and_device_are_each_rounded_once() -> None:
    third = torch.tensor(1.0 / 3.0, dtype=torch.float64)
    numbers = Scalars((0.1, third, True), Rates(third * 2, 0.7, 0.0, torch.tensor(0.25)))
    values = [0.1, 1.0 / 3.0, 2.0 / 3.0, 0.7, 0.0, 0.25, 0.5]
    for dtype in (torch.float32, torch.float64):
        found = Packed(numbers).tensor(dtype, CPU)
        assert found.equal(torch.tensor(values, dtype=torch.float64).to(dtype))


# CUDA graphs


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begins the capture of a CUDA graph, as far as this package can tell."""

    def begin() -> None:
        for module in (stepping, kernels, packed, trees):
            monkeypatch.setattr(module, "is_capturing", lambda _: True)
        monkeypatch.setattr(stepping, "_is_cuda", lambda _: True)

    return begin


HOW: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "foreach": {"foreach": True},
}


def cpu_params() -> list[Tensor]:
    ps = [torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True)]
    for p in ps:
        p.grad = torch.ones_like(p)
    return ps


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_capture_of_counts_on_the_host_is_refused(
    name: str, how: str, capturing: Any
) -> None:
    ps = cpu_params()
    optimizer = CLASSES[name](ps, lr=0.1, **HOW[how])
    optimizer.step()
    before = [p.detach().clone() for p in ps]
    capturing()
    with pytest.raises(RuntimeError, match="capturable=False"):
        optimizer.step()
    assert all(map(torch.equal, ps, before))
    assert all(optimizer.state[p]["step"] == 1 for p in ps)


def test_a_capture_before_the_first_step_is_refused(capturing: Any) -> None:
    ps = cpu_params()
    optimizer = CLASSES["adamw"](ps, lr=torch.tensor(0.1), capturable=True, compile=False)
    capturing()
    with pytest.raises(RuntimeError, match=r"first step of params\[0\]"):
        optimizer.step()
    assert not optimizer.state and all(p.eq(1).all() for p in ps)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_a_number_that_a_graph_keeps_is_told(name: str, how: str, capturing: Any) -> None:
    ends = []
    for capture in (False, True):
        ps = cpu_params()
        optimizer = CLASSES[name](ps, lr=0.1, capturable=True, **HOW[how])
        optimizer.step()
        if capture:
            capturing()
            with pytest.warns(UserWarning, match=r"lr=0\.1, which all its replays"):
                optimizer.step()
        else:
            optimizer.step()
        ends.append([p.detach() for p in ps])
    assert all(map(torch.equal, *ends))


def test_a_tensor_lr_is_captured_without_a_word(capturing: Any) -> None:
    ps = cpu_params()
    optimizer = CLASSES["adamw"](ps, lr=torch.tensor(0.1), capturable=True, compile=False)
    optimizer.step()
    capturing()
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 for p in ps)


@pytest.mark.parametrize("name", ["lr", "betas"])
def test_a_number_where_a_graph_cannot_read_it_is_refused(
    name: str, capturing: Any, called: Any
) -> None:
    far = {"lr": torch.tensor(0.1), "betas": (0.9, torch.tensor(0.99))}[name]
    optimizer = CLASSES["adamw"](meta_params(1), lr=0.1, capturable=True, compile=True)
    optimizer.init_state()
    optimizer.param_groups[0][name] = far
    capturing()
    with pytest.raises(RuntimeError, match=f"{name} a tensor on cpu.* to meta"):
        optimizer.step()
    assert not called


def test_a_graph_gets_no_numbers_from_memory_of_the_host(
    capturing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = torch.tensor(3.0, dtype=torch.float64)
    for numbers in (
        Scalars((0.9, 0.1), Rates(1.0 / 3.0, 0.0, 0.0, 1.0)),
        Scalars((0.9, 1.0 / count), Rates(1.0 / 3.0, 0.0, 0.0, 1.0)),
    ):
        for dtype in (torch.float32, torch.float64):
            want = Packed(numbers).tensor(dtype, CPU)
            with monkeypatch.context() as patch:
                patch.setattr(packed, "is_capturing", lambda _: True)
                patch.setattr(torch, "frombuffer", None)
                assert Packed(numbers).tensor(dtype, CPU).equal(want)


@pytest.mark.parametrize("compile", [None, True])
def test_no_kernel_is_compiled_in_a_capture(compile: bool | None, capturing: Any) -> None:
    ps = [torch.ones(3, requires_grad=True)]
    ps[0].grad = torch.ones_like(ps[0])
    # A kernel of its own, and state as after a first step.
    optimizer = CLASSES["adamw"](
        ps, lr=torch.tensor(0.1), capturable=True, compile=compile, amsgrad=True,
        state_dtype=torch.float64,
    )  # fmt: skip
    optimizer.init_state()
    capturing()
    with pytest.raises(CaptureError, match=r"kernel adamw_\w+ is not compiled yet"):
        optimizer.step()
    assert ps[0].eq(1).all()


def test_a_pure_step_counts_where_its_parameters_are(capturing: Any) -> None:
    optimizer = optimi_func.adamw(lr=0.1)
    params = torch.ones(3, device=META)
    state = optimizer.init(params)
    state = state._replace(step=torch.zeros(()))
    capturing()
    with pytest.raises(RuntimeError, match=r"state\.step is on cpu, params .* meta"):
        compiled.step_(optimizer, params, torch.ones_like(params), state)


# What a GPU's kernels and numbers do not depend on


def test_an_lr_on_the_gpu_stays_there() -> None:
    with FakeTensorMode():
        here = [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")]
        lr = torch.tensor([0.1], device="cuda")
        found = as_scalar(lr, here, False)
        assert found.device == here[0].device and found.dim() == 0
        # For others it is read, which a fake tensor cannot be.
        with pytest.raises(Exception, match=r"item|_local_scalar_dense"):
            as_scalar(lr, [*here, torch.ones(2)], False)
    assert as_scalar(torch.tensor(0.5), [torch.ones(2)], False) == 0.5
    assert as_scalar(0.5, [], False) == 0.5
