"""List kernels on CUDA: one launch for many tensors, around the body of Inductor's kernel.

A launch costs the host some microseconds, and a small tensor fills a small part of a GPU.
Here one launch has the blocks of all tensors. Each block looks up in a table which tensor
it is for, and the addresses of that. Whole blocks that are aligned are read and written by
vectors, without a mask.

This reads private parts of Inductor: its Triton kernel in the code that it generated, the
first lines of that kernel's body, and the module in Inductor's cache. All are as of torch
2.13 with triton 3.9 (see `list_source` and `_parts`). If they are not as expected, or the
results differ in a bit, `triton_list_kernel_of` returns None and a kernel is launched for
each tensor.
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

from optimi_func.core.packed import is_capturing
from optimi_func.core.torch_private import foreach_add_
from optimi_func.execution.tensors import current_stream

# Elements of a block, its warps, and the elements of a tensor's rest that these take at a
# time. One element per thread needs few registers.
BLOCK, WARPS, REST = 1024, 4, 128
# Tensors that CUDA graphs read. They are kept forever, because no graph says when it ends.
_captured: list[tuple[Tensor, ...]] = []

# Inductor's kernel of one dimension. Its body may use no other indices than these.
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

# table: columns of `count` integers: lengths of the tensors, their first blocks, and their
# addresses. `gradients` is the column of the gradients' addresses, which may change.
# rows: the tensor of each block. per_row: from the scalars of one tensor to the next's.
@triton.jit(do_not_specialize=["count", "per_row"])
def all_blocks(
    scalars, gradients, table, rows, count, per_row,
    XBLOCK: tl.constexpr, REST: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.load(rows + block)
    length = tl.load(table + row)
    start = (block - tl.load(table + count + row)) * XBLOCK
    scalars += row * per_row
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

    role: int  # index of our argument: scalars, p, g, and the rest
    dtype: torch.dtype


def list_source(text: str, pointers: Sequence[Pointer]) -> str | None:
    """Return the source of a list kernel, or None if the text of Inductor's is another."""
    match = _KERNEL.search(text)
    if match is None or match["pointers"].count(",") + 1 != len(pointers):
        return None
    widths = {x.role: x.dtype.itemsize for x in pointers if x.role > 0}
    addresses: list[str] = []
    for role, width in widths.items():
        # Columns 0 and 1 are not addresses, and the gradients, role 2, have none.
        column = f"table + {2 if role == 1 else role} * count"
        column = "gradients" if role == 2 else column
        addresses.append(f"    a{role} = tl.load({column} + row) + start * {width}")
    plain = ["scalars"] * len(pointers)
    aligned = list(plain)
    for i, (role, dtype) in enumerate(pointers):
        if role > 0:
            kind = str(dtype).replace("torch.", "tl.")
            plain[i] = f"a{role}.to(tl.pointer_type({kind}))"
            aligned[i] = f"tl.multiple_of({plain[i]}, 16)"
    head = text[: text.index("@triton_heuristics")]
    return head + _SOURCE.format(
        names=match["pointers"],
        body=match["body"].rstrip("\n"),
        addresses="\n".join(addresses),
        together=" | ".join(f"a{role}" for role in widths),
        aligned=", ".join(aligned),
        plain=", ".join(plain),
    )


class DeviceTable:
    """Addresses and blocks of a launch's tensors, in tensors on their device.

    These are uploaded once, and the gradients' addresses each time that they change. The
    other addresses are columns: one tensor of each row, then another.
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
        self._stream = current_stream(self._device)
        self._table, self._rows = [_uploaded(x, self._device) for x in self._host]
        self._gradients: tuple[array[int], Tensor] | None = None

    def arguments(self, gradients: "array[int]") -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients' addresses, the table, and the row of each block."""
        if is_capturing(self._device):
            return self._captured(gradients)
        if current_stream(self._device) != self._stream:
            # torch may reuse memory of another stream while this one still reads it.
            self._upload()
        if self._gradients is None or self._gradients[0] != gradients:
            self._gradients = gradients, _uploaded(gradients, self._device)
        return self._gradients[1], self._table, self._rows

    def _captured(self, gradients: "array[int]") -> tuple[Tensor, Tensor, Tensor]:
        if self._gradients is not None and self._gradients[0] == gradients:
            pointers = self._gradients[1]
        else:
            # A graph would copy from host memory that may be freed before its replay, so
            # the addresses become constants of kernels.
            pointers = torch.zeros(self.count, dtype=torch.int64, device=self._device)
            foreach_add_(list(pointers.unbind()), list(gradients))
        own = (self._table, self._rows)
        _captured.append(own if self._gradients is None else (*own, self._gradients[1]))
        return pointers, *own


def _uploaded(values: "array[int]", device: torch.device) -> Tensor:
    dtype = {"i": torch.int32, "q": torch.int64}[values.typecode]
    host = torch.frombuffer(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()  # the host would wait for the end of the copy otherwise
    return host.to(device, non_blocking=True)


class TritonListKernel:
    """A kernel for rows of tensors. All tensors of a row have one length.

    It is a Triton function around the body of `single`, Inductor's kernel for one row.
    """

    def __init__(
        self, single: Callable[..., None], function: Any, options: dict[str, object]
    ) -> None:
        self.single, self._function, self._options = single, function, options

    def __call__(self, scalars: Tensor, *tensors: Tensor) -> None:
        """Run the kernel on one row."""
        self.single(scalars, *tensors)

    def run(self, scalars: Tensor, table: DeviceTable, gradients: "array[int]") -> None:
        """Run the kernel on all rows of a table, each with its row of scalars."""
        arguments = scalars, *table.arguments(gradients), table.count, scalars.stride(0)
        with torch.cuda.device(scalars.device):
            run = self._function[(table.blocks,)]
            run(*arguments, XBLOCK=BLOCK, REST=REST, **self._options)


def triton_list_kernel_of(
    single: Callable[..., None],
    generated: Callable[[list[object]], object],
    order: list[int],
    example: Sequence[Tensor],
) -> TritonListKernel | None:
    """Make a list kernel of Inductor's code. Returns None unless both give the same bits.

    `single` calls the code for one row. Its order and the example are as in
    `list_kernel_of`.
    """
    from torch._inductor.codecache import PyCodeCache

    try:
        parts = _parts(generated, order, [x[:64].clone() for x in example])
        if parts is None or (source := list_source(*parts[:2])) is None:
            return None
        function = PyCodeCache.load(source).all_blocks
        kernel = TritonListKernel(single, function, parts[2])
        return kernel if _agrees(kernel, example) else None
    except Exception:
        return None


def _parts(
    generated: Callable[[list[object]], object], order: list[int], example: list[Tensor]
) -> tuple[str, list[Pointer], dict[str, object]] | None:
    """Return the source, arguments and options of the kernel that `generated` launches.

    None if it launches several, or no Triton kernel.
    """
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
    # Both kernels have to fuse products into sums, or neither, to give the same bits.
    options: dict[str, object] = {"num_warps": WARPS, "num_stages": 1}
    options["enable_fp_fusion"] = kernel.triton_meta.get("enable_fp_fusion", True)
    return Path(kernel.filename).read_text(), pointers, options


def _scope(generated: Any) -> dict[str, Any]:
    """Return the globals of generated code, or of the code in a wrapper that aligns it."""
    function = getattr(generated, "__func__", generated)
    model = inspect.getclosurevars(function).nonlocals.get("model")
    return function.__globals__ if model is None else _scope(model)


def _agrees(kernel: TritonListKernel, example: Sequence[Tensor]) -> bool:
    """Return True if one launch gives what one for each row gives, bit for bit."""
    # (length, elements between an aligned address and the row's first element)
    trials = [(1, 0), (1003, 0), (3 * BLOCK, 0), (2 * BLOCK + 5, 0), (2 * BLOCK + 5, 1)]
    generator = torch.Generator().manual_seed(0)

    def made(x: Tensor, *shape: int) -> Tensor:
        on_host = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        return (on_host / 2 + 0.25).to(x.device, x.dtype)

    scalars = made(example[0], len(trials), 128)[:, : len(example[0])]
    rows = [(off, [made(x, n + off) for x in example[1:]]) for n, off in trials]
    both = [[[x.clone()[off:] for x in row] for off, row in rows] for _ in range(2)]
    for own_scalars, row in zip(scalars, both[0]):
        kernel(own_scalars, *row)
    columns = [array("q", map(Tensor.data_ptr, column)) for column in zip(*both[1])]
    p, gradients, *rest = columns
    lengths = array("q", [n for n, _ in trials])
    table = DeviceTable(scalars.device, lengths, sum(rest, p))
    kernel.run(scalars, table, gradients)
    pairs = [pair for a, b in zip(*both) for pair in zip(a, b)]
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in pairs)
