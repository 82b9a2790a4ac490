"""List kernels on CUDA: one launch for many tensors, around the body of Inductor's kernel.

A launch for each tensor costs the host some microseconds, and a small tensor fills a small
part of a GPU. Here the blocks of one launch are those of all tensors: each looks up in a
table of which tensor it is, and where that lies. Blocks that are whole and aligned are
read and written without a mask, by vectors.

What it needs of Inductor is private: its Triton kernel within the code that it generated,
the lines at the head of that kernel's body, and a module written to its cache (all as of
torch 2.13 with triton 3.9; see `list_source` and `_parts`). Where these are not as
expected, and wherever the result is not bit for bit that of the generated code,
`triton_list_kernel_of` says None, and a kernel is launched for each tensor.
"""

import inspect
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.execution.tensors import foreach_add_, is_capturing

# Elements of a block, the warps that share them, and the elements of what is left at the
# end of a tensor that they take at a time: one a thread, which needs few registers.
BLOCK, WARPS, REST = 1024, 4, 128
# What has been captured in graphs, none of which says when it is gone: kept for good.
_captured: list[tuple[Tensor, ...]] = []

# Inductor's kernel of one dimension, whose body may know only where its elements lie.
_KERNEL = re.compile(
    r"@triton\.jit\n"
    r"def \w+\((?P<pointers>[\w, ]+), xnumel, XBLOCK ?: tl\.constexpr\):\n"
    r"    xoffset = tl\.program_id\(0\) \* XBLOCK\n"
    r"    xindex = xoffset \+ tl\.arange\(0, XBLOCK\)\[:\]\n"
    r"    xmask = xindex < xnumel\n"
    r"(?P<body>(?:    .*\n?)+)"
)
_SOURCE = """
@triton.jit
def one_block({names}, xindex, xmask, XBLOCK: tl.constexpr):
{body}

# table: columns of `count` numbers, the lengths of the tensors, the first block of each,
# and their addresses; those of the gradients, which may change, are in a column apart.
# rows: of each block its tensor. per_row: from the numbers of one tensor to the next's.
@triton.jit(do_not_specialize=["count", "per_row"])
def all_blocks(
    numbers, gradients, table, rows, count, per_row,
    XBLOCK: tl.constexpr, REST: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.load(rows + block)
    length = tl.load(table + row)
    start = (block - tl.load(table + count + row)) * XBLOCK
    numbers += row * per_row
{addresses}
    left = tl.minimum(length - start, XBLOCK)
    if (left == XBLOCK) & ((({together}) & 15) == 0):
        one_block({aligned}, tl.arange(0, XBLOCK)[:], None, XBLOCK)
    else:
        for begin in range(0, left, REST):
            xindex = begin + tl.arange(0, REST)[:]
            one_block({plain}, xindex, xindex < left, REST)
"""


class Pointer(NamedTuple):
    """A pointer that Inductor's kernel takes."""

    role: int  # which of our arguments: the numbers, p, g, and the rest
    dtype: torch.dtype


class Parts(NamedTuple):
    """What is taken from Inductor's kernel."""

    text: str  # its module
    pointers: list[Pointer]  # that it takes, in its order
    options: dict[str, Any]  # what Triton is to compile with


def list_source(text: str, pointers: Sequence[Pointer]) -> str | None:
    """The module of a list kernel; None where the kernel of one tensor is not as expected.

    Args:
        text: The module of that, as Inductor wrote it.
        pointers: What that takes, in its order.
    """
    found = _KERNEL.search(text)
    if found is None or found["pointers"].count(",") + 1 != len(pointers):
        return None
    widths = {x.role: x.dtype.itemsize for x in pointers if x.role > 0}
    addresses: list[str] = []
    for role, width in widths.items():
        # Before p's are two others, and behind it the gradients' are left out.
        column = f"table + {2 if role == 1 else role} * count"
        column = "gradients" if role == 2 else column
        addresses.append(f"    a{role} = tl.load({column} + row) + start * {width}")
    plain = ["numbers"] * len(pointers)
    aligned = list(plain)
    for i, (role, dtype) in enumerate(pointers):
        if role > 0:
            kind = str(dtype).replace("torch.", "tl.")
            plain[i] = f"a{role}.to(tl.pointer_type({kind}))"
            aligned[i] = f"tl.multiple_of({plain[i]}, 16)"
    head = text[: text.index("@triton_heuristics")]
    return head + _SOURCE.format(
        names=found["pointers"],
        body=found["body"].rstrip("\n"),
        addresses="\n".join(addresses),
        together=" | ".join(f"a{role}" for role in widths),
        aligned=", ".join(aligned),
        plain=", ".join(plain),
    )


class DeviceTable:
    """Where the tensors of a launch lie, and which blocks are whose, on their device.

    Uploaded once, but for the addresses of the gradients: these as often as they change.

    Args:
        device: Where all of them lie.
        lengths: The elements of each.
        addresses: Of all but the gradients, in columns.
    """

    def __init__(
        self, device: torch.device, lengths: "array[int]", addresses: "array[int]"
    ) -> None:
        self._device = device
        blocks = [-(-n // BLOCK) for n in lengths]
        firsts = array("q", accumulate([0, *blocks[:-1]]))
        rows = array("i")
        for row, count in enumerate(blocks):
            rows += array("i", [row]) * count
        self.count, self.blocks = len(lengths), len(rows)
        self._host = lengths + firsts + addresses, rows
        self._upload()

    def _upload(self) -> None:
        self._stream = _stream(self._device)
        self._table, self._rows = [_uploaded(x, self._device) for x in self._host]
        self._gradients: tuple[array[int], Tensor] | None = None

    def arguments(self, gradients: "array[int]") -> tuple[Tensor, Tensor, Tensor]:
        """The gradients' addresses, all others, and the tensor of each block."""
        if is_capturing(self._device):
            return self._captured(gradients)
        if _stream(self._device) != self._stream:
            # Memory belongs to the stream that it was asked for on.
            self._upload()
        if self._gradients is None or self._gradients[0] != gradients:
            self._gradients = gradients, _uploaded(gradients, self._device)
        return self._gradients[1], self._table, self._rows

    def _captured(self, gradients: "array[int]") -> tuple[Tensor, Tensor, Tensor]:
        if self._gradients is not None and self._gradients[0] == gradients:
            given = self._gradients[1]
        else:
            # A graph would copy from memory that is gone by its replay: by value.
            given = torch.zeros(self.count, dtype=torch.int64, device=self._device)
            foreach_add_(list(given.unbind()), list(gradients))
        own = (self._table, self._rows)
        _captured.append(own if self._gradients is None else (*own, self._gradients[1]))
        return given, *own


def _stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _uploaded(values: "array[int]", device: torch.device) -> Tensor:
    dtype = {"i": torch.int32, "q": torch.int64}[values.typecode]
    host = torch.frombuffer(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()  # else the host would wait for a long copy
    return host.to(device, non_blocking=True)


class TritonListKernel:
    """A kernel over rows of tensors: of each row the tensors are of one length.

    Args:
        single: The kernel of one row, which Inductor wrote.
        function: The Triton function around its body.
        options: What Triton compiles it with.
    """

    def __init__(
        self, single: Callable[..., None], function: Any, options: dict[str, Any]
    ) -> None:
        self.single, self._function, self._options = single, function, options

    def __call__(self, numbers: Tensor, *tensors: Tensor) -> None:
        """One row."""
        self.single(numbers, *tensors)

    def run(self, numbers: Tensor, table: DeviceTable, gradients: "array[int]") -> None:
        """All rows, in one launch on the current stream.

        Args:
            numbers: A row of them for each of the tensors'.
            table: Of the tensors.
            gradients: Their addresses.
        """
        arguments = table.arguments(gradients)
        with torch.cuda.device(numbers.device):
            self._function[(table.blocks,)](
                numbers,
                *arguments,
                table.count,
                numbers.stride(0),
                XBLOCK=BLOCK,
                REST=REST,
                **self._options,
            )


def triton_list_kernel_of(
    single: Callable[..., None],
    generated: Callable[[list[Any]], Any],
    order: list[int],
    example: Sequence[Tensor],
) -> TritonListKernel | None:
    """The list kernel of what Inductor generated, where it gives the same.

    Args:
        single: What calls the generated code for one row.
        generated: That code; takes a list of arguments.
        order: For each of them the index of ours, or -1 for the length.
        example: Our arguments: the numbers, then tensors of one length. Not written to.
    """
    from torch._inductor.codecache import PyCodeCache

    try:
        found = _parts(generated, order, [x[:64].clone() for x in example])
        if found is None or (source := list_source(found.text, found.pointers)) is None:
            return None
        function = PyCodeCache.load(source).all_blocks
        kernel = TritonListKernel(single, function, found.options)
        return kernel if _agrees(kernel, example) else None
    except Exception:
        return None


def _parts(generated: Any, order: list[int], example: list[Tensor]) -> Parts | None:
    """What there is of the one Triton kernel that is launched."""
    scope = _scope(generated)
    kernels = {name: x for name, x in scope.items() if hasattr(x, "triton_meta")}
    if len(kernels) != 1:
        return None
    ((name, kernel),) = kernels.items()
    calls: list[tuple[Any, ...]] = []
    length = example[-1].numel()
    scope[name] = SimpleNamespace(run=lambda *given, **_: calls.append(given))
    try:
        generated([length if i < 0 else example[i] for i in order])
    finally:
        scope[name] = kernel
    if len(calls) != 1 or calls[0][-1] != length:
        return None
    places = {x.data_ptr(): i for i, x in enumerate(example)}
    pointers: list[Pointer] = []
    for x in calls[0][:-1]:
        if not isinstance(x, Tensor) or x.data_ptr() not in places:
            return None
        pointers.append(Pointer(places[x.data_ptr()], x.dtype))
    # Triton contracts products into sums if told to; by default it may or may not.
    fused = bool(kernel.triton_meta.get("enable_fp_fusion", True))
    options = {"num_warps": WARPS, "num_stages": 1, "enable_fp_fusion": fused}
    return Parts(Path(kernel.filename).read_text(), pointers, options)


def _scope(generated: Any) -> dict[str, Any]:
    """The globals of generated code, also within what copies misaligned arguments."""
    function = getattr(generated, "__func__", generated)
    model = inspect.getclosurevars(function).nonlocals.get("model")
    return function.__globals__ if model is None else _scope(model)


def _agrees(kernel: TritonListKernel, example: Sequence[Tensor]) -> bool:
    """Whether one launch gives what one for each row gives, bit for bit."""
    # Lengths, and by how many elements a row's memory begins off its alignment.
    trials = [(1, 0), (1003, 0), (3 * BLOCK, 0), (2 * BLOCK + 5, 0), (2 * BLOCK + 5, 1)]
    own = torch.Generator().manual_seed(0)

    def made(x: Tensor, *shape: int) -> Tensor:
        on_host = torch.rand(shape, generator=own, device="cpu")
        return (on_host / 2 + 0.25).to(x.device, x.dtype)

    numbers = made(example[0], len(trials), 128)[:, : len(example[0])]
    rows = [(off, [made(x, n + off) for x in example[1:]]) for n, off in trials]
    both = [[[x.clone()[off:] for x in row] for off, row in rows] for _ in range(2)]
    for own_numbers, row in zip(numbers, both[0]):
        kernel(own_numbers, *row)
    columns = [array("q", map(Tensor.data_ptr, column)) for column in zip(*both[1])]
    p, gradients, *rest = columns
    lengths = array("q", [n for n, _ in trials])
    table = DeviceTable(numbers.device, lengths, sum(rest, p))
    kernel.run(numbers, table, gradients)
    pairs = [pair for a, b in zip(*both) for pair in zip(a, b)]
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in pairs)
