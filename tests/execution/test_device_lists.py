"""One launch for all tensors of a GPU: its plan, its uploads and its memory.

The "meta" device and kernels that do nothing show what a GPU would launch. The results
of these kernels are tested in test_cuda_offline.py.
"""

import ctypes
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CLASSES, ELEMENTWISE, MEASURED
from torch import Tensor

from optimi_func.classes import stepping
from optimi_func.execution import executors, kernels, triton_list
from optimi_func.execution.triton_list import (
    BLOCK,
    DeviceTable,
    Pointer,
    TritonListKernel,
    list_source,
)

META, CPU = torch.device("meta"), torch.device("cpu")


class Launches:
    """Arguments of the launches that a GPU would get, of list kernels and of others."""

    def __init__(self) -> None:
        self.lists: list[tuple[Tensor, DeviceTable, tuple[Tensor, ...]]] = []
        self.single: list[tuple[Tensor, ...]] = []

    def kernel(self, key: Any, *_: Any) -> Any:
        def single(*tensors: Tensor) -> None:
            self.single.append(tensors)

        if key.round is not None:
            return single
        seen = self

        class Kernel(TritonListKernel):
            def run(self, numbers: Tensor, table: DeviceTable, gradients: Any) -> None:
                seen.lists.append((numbers, table, table.arguments(gradients)))

        return Kernel(single, None, {})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(executors, "kernel", made.kernel)
    # All addresses are 0 on meta, so any two tensors would count as tied.
    monkeypatch.setattr(executors, "split_twins", lambda updates: [updates])
    monkeypatch.setattr(stepping, "has_memory", lambda _: True)  # as a device's would
    monkeypatch.setattr(stepping, "kernel_context", lambda _: kernels.kernel_context(CPU))
    return made


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the uploads of tables."""
    found: list[Any] = []
    run = triton_list._uploaded
    monkeypatch.setattr(
        triton_list, "_uploaded", lambda x, device: found.append(x) or run(x, device)
    )
    return found


def params(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    ps = [torch.ones(n, device=META, dtype=dtype, requires_grad=True) for n in sizes]
    for p in ps:
        p.grad = torch.ones_like(p)
    return ps


SIZES = 1, 7, 300, 1 << 15, 20_000


@pytest.mark.parametrize("name", [x for x in ELEMENTWISE if x not in MEASURED])
def test_small_and_large_share_a_launch(name: str, launched: Launches) -> None:
    optimizer = CLASSES[name](params(*SIZES), lr=0.1, compile=True)
    for _ in range(2):
        launched.lists.clear()
        optimizer.step()
        ((numbers, table, _),) = launched.lists
        assert table.count == len(SIZES) == len(numbers)
        assert numbers.stride(0) == 0  # they share their numbers
    assert not launched.single


def test_a_launch_for_each_dtype_and_each_numbers(launched: Launches) -> None:
    ps = params(*SIZES)
    halves = params(*SIZES, dtype=torch.bfloat16)
    groups = [{"params": ps[:2] + halves}, {"params": ps[2:], "lr": 0.2}]
    CLASSES["adamw"](groups, lr=0.1, compile=True).step()
    assert sorted(table.count for _, table, _ in launched.lists) == [2, 3, 5]


def test_means_are_measured_by_themselves(launched: Launches) -> None:
    CLASSES["stableadamw"](params(*SIZES[1:]), lr=0.1, compile=True).step()
    ((numbers, table, _),) = launched.lists
    assert table.count == len(launched.single) == len(SIZES) - 1
    # Each wrote its mean into the row that the launch reads.
    offsets = [row.storage_offset() for row, *_ in launched.single]
    assert offsets == [numbers.stride(0) * i for i in range(table.count)]


def test_a_table_says_where_each_block_is() -> None:
    lengths = array("q", [1, BLOCK, BLOCK + 1, 5 * BLOCK - 3])
    addresses = array("q", range(100, 108))
    table = DeviceTable(CPU, lengths, addresses)
    gradients, kept, rows = table.arguments(array("q", [1, 2, 3, 4]))
    assert gradients.tolist() == [1, 2, 3, 4]
    assert rows.tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 3] and table.blocks == 9
    assert kept.tolist() == [*lengths, *(0, 1, 2, 4), *addresses]
    assert (rows.dtype, kept.dtype) == (torch.int32, torch.int64)


def test_addresses_are_uploaded_where_they_change(uploads: list[Any]) -> None:
    table = DeviceTable(CPU, array("q", [5, 6]), array("q", [10, 20]))
    assert len(uploads) == 2  # once and for all
    first = table.arguments(array("q", [1, 2]))
    for _ in range(3):
        again = table.arguments(array("q", [1, 2]))
        assert all(x is y for x, y in zip(first, again))
    assert len(uploads) == 3
    moved = table.arguments(array("q", [1, 3]))
    assert moved[0].tolist() == [1, 3] and moved[1] is first[1] and moved[2] is first[2]
    assert first[0].tolist() == [1, 2]  # a launch under way may still read it
    assert len(uploads) == 4 and uploads[-1].tolist() == [1, 3]


def test_a_stream_has_memory_of_its_own(
    uploads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = DeviceTable(CPU, array("q", [5, 6]), array("q", [10, 20]))
    first = table.arguments(array("q", [1, 2]))
    monkeypatch.setattr(triton_list, "current_stream", lambda _: "another")
    second = table.arguments(array("q", [1, 2]))
    assert all(x is not y and x.equal(y) for x, y in zip(first, second))
    assert len(uploads) == 6
    table.arguments(array("q", [1, 2]))
    assert len(uploads) == 6


def test_a_graph_keeps_what_it_reads(
    uploads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = 2**62 + 1  # no float has it
    kept: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(triton_list, "_captured", kept)
    table = DeviceTable(CPU, array("q", [5, 6]), array("q", [10, 20]))
    first = table.arguments(array("q", [1, 2]))
    uploads.clear()
    monkeypatch.setattr(triton_list, "is_capturing", lambda _: True)
    monkeypatch.setattr(triton_list, "current_stream", lambda _: "of the capture")
    assert all(x is y for x, y in zip(first, table.arguments(array("q", [1, 2]))))
    elsewhere = table.arguments(array("q", [large, 2]))
    assert elsewhere[0].tolist() == [large, 2]
    assert elsewhere[1] is first[1] and elsewhere[2] is first[2]
    assert not uploads  # nothing from memory of the host
    held = {id(x) for some in kept for x in some}
    assert {id(x) for x in first} <= held


def test_a_capture_plans_calls_of_one_tensor(
    launched: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured upload would read host memory that may be freed before the replay."""
    optimizer = CLASSES["adamw"](params(*SIZES[1:]), lr=0.1, compile=True)
    monkeypatch.setattr(executors, "is_capturing", lambda _: True)
    optimizer.step()
    assert len(launched.single) == len(SIZES) - 1 and not launched.lists


BODY = """    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), tmp0, xmask)
"""
MODULE = f"""import triton
@triton_heuristics.pointwise()
@triton.jit
def triton_poi_fused_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
{BODY}"""
POINTERS = [Pointer(1, torch.float32), Pointer(0, torch.float32), Pointer(1, torch.float32)]


def test_the_body_is_inductors() -> None:
    source = list_source(MODULE, POINTERS)
    assert source is not None and BODY in source and "triton_heuristics" not in source
    compile(source, "list", "exec")


UNEXPECTED: dict[str, Callable[[str], str]] = {
    "long indices": lambda x: x.replace("(0) *", "(0).to(tl.int64) *"),
    "two dimensions": lambda x: x.replace("[:]", "[:, None]"),
    "another argument": lambda x: x.replace("in_ptr1", "in_ptr1, in_ptr2"),
    "no kernel": lambda x: "",
}


@pytest.mark.parametrize("how", UNEXPECTED)
def test_what_is_not_as_expected_is_left_alone(how: str) -> None:
    assert list_source(UNEXPECTED[how](MODULE), POINTERS) is None


def test_without_the_list_kernel_each_tensor_is_a_launch(
    launched: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "kernel", lambda *x: launched.kernel(*x).single)
    CLASSES["adamw"](params(*SIZES), lr=0.1, compile=True).step()
    assert len(launched.single) == len([x for x in params(*SIZES) if x.numel() > 1])
    assert not launched.lists


class AtAddresses(TritonListKernel):
    """p += factor * g, row by row, at the addresses that its table has."""

    def __init__(self, factor: float) -> None:
        super().__init__(lambda numbers, p, g: p.add_(g), None, {})
        self._factor = factor

    def run(self, numbers: Tensor, table: DeviceTable, gradients: Any) -> None:
        found, kept, rows = table.arguments(gradients)
        lengths, _, places = kept.view(3, -1).tolist()
        assert rows.tolist() == [
            i for i, n in enumerate(lengths) for _ in range(0, n, BLOCK)
        ]
        for n, p, g in zip(lengths, places, found.tolist()):
            p, g = (
                torch.frombuffer((ctypes.c_float * n).from_address(x), dtype=torch.float32)
                for x in (p, g)
            )
            p.add_(g, alpha=self._factor)


def test_a_kernel_is_used_if_it_gives_the_same_bit_for_bit() -> None:
    example = [torch.ones(3), torch.ones(9), torch.ones(9)]
    assert triton_list._agrees(AtAddresses(1.0), example)
    assert not triton_list._agrees(AtAddresses(1.0 + 2**-20), example)
    assert all(x.eq(1).all() for x in example)


def test_what_fails_is_no_list_kernel() -> None:
    def generated(arguments: list[Any]) -> None:
        raise AttributeError("not as it was")

    example = [torch.ones(3), torch.ones(9), torch.ones(9)]
    found = triton_list.triton_list_kernel_of(lambda *_: None, generated, [0, 1], example)
    assert found is None
