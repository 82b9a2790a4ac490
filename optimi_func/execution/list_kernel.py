"""List kernels: one call for many tensors, a loop in C++ around Inductor's machine code.

A kernel called from Python for each tensor costs some microseconds a call, and all threads
wait for each other at the end of it. Here the kernel is compiled for one thread, and the
loop around it cuts the list into pieces, which the threads take one after the other. So
ten thousand tensors cost what one of their size would, and neither the number of threads
nor what else is in the list changes a bit of any result.

What it needs of Inductor is private: the C++ function within the code that it generated.
Where that is not as expected, and wherever it does not give bit for bit what the generated
code gives, `list_kernel_of` says None, and a kernel is called for each tensor.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from string import Template
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func._codes import NEAREST
from optimi_func.execution import codecs
from optimi_func.execution.codecs import Argument

# Elements of a piece that has a mean.
PIECE = 1 << 16
# Pointers that a kernel can take, its scratch slots, and bytes in one.
_MOST, _SLOTS, _SLOT = 32, 8, 64
# Of others than those the fewest elements and the most, and those worth a thread.
_SIZES = {
    "PIECE": PIECE,
    "SHORTEST": 1 << 12,
    # What is decoded of a piece lies in the nearest cache.
    "DECODED": 1 << 10,
    "LONGEST": 1 << 20,
    "GRAIN": 1 << 15,
    "MOST": _MOST,
    "SLOTS": _SLOTS,
    "SLOT": _SLOT,
}

# Inductor writes vectors itself and has compilers make none; the codecs leave it to them.
# No root is a vector that may have to set errno.
_FLAGS = ("-fno-math-errno",)
_SOURCE = """
// Before any header, whose functions would not be inlined otherwise.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")
#endif
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>
$CODECS
// A kernel takes pointers and, last, how many elements they point to.
constexpr size_t MOST = $MOST;
typedef void (*Apply)(void* kernel, void** pointers, int64_t length);

template <size_t... I>
static void spread(void* kernel, void** p, int64_t length, std::index_sequence<I...>) {
    typedef void (*Kernel)(decltype((void)I, (void*)nullptr)..., int64_t);
    reinterpret_cast<Kernel>(kernel)(p[I]..., length);
}

template <size_t N>
static void apply(void* kernel, void** pointers, int64_t length) {
    spread(kernel, pointers, length, std::make_index_sequence<N>());
}

template <size_t... N>
static Apply chosen(size_t count, std::index_sequence<N...>) {
    static const Apply all[] = {apply<N>...};
    return all[count];
}

// What stands in one column of the table, or, in codes, in two.
struct Argument {
    int64_t codec, first, second, written;
};

// roles: of each argument that it takes which of ours it is; -1 the numbers; less, a
// scratch slot. widths: of each the bytes of an element. ours: null if each is a column.
struct Kernel {
    void* code;
    int64_t count;
    const int64_t* roles;
    const int64_t* widths;
    const Argument* ours;
    int64_t given;
};

// table: columns of pointers, each `rows` long.
// per_row, per_piece: bytes from the numbers of one row, or piece, to those of the next.
// dither: what codes are rounded by.
extern "C" void run_list(
    const Kernel* kernel, int64_t rows, const int64_t* lengths, const int64_t* table,
    char* numbers, int64_t per_row, int64_t per_piece, float dither, int64_t threads) {
    const int64_t count = kernel->count;
    const int64_t* roles = kernel->roles;
    const Argument* ours = kernel->ours;
    const int64_t given = ours ? kernel->given : 0;
    const Apply call = chosen(count, std::make_index_sequence<MOST>());
    int64_t total = 0;
    for (int64_t i = 0; i < rows; ++i) total += lengths[i];
    // Fewer are done before another thread has woken up.
    if (threads > total / $GRAIN) threads = total / $GRAIN + 1;
    // Long pieces read memory faster, as long as every thread gets a share of them. Those
    // with numbers of their own are what they are.
    int64_t size = per_piece ? $PIECE : ours ? $DECODED : $SHORTEST;
    const bool fixed = per_piece != 0 || ours;
    while (!fixed && size < $LONGEST && size * threads * 16 < total) size *= 2;
    std::atomic<int64_t> next{0};
    auto work = [&]() {
        void* pointers[MOST];
        alignas($SLOT) char scratch[$SLOTS][$SLOT];
        int64_t row = 0, before = 0;
        static thread_local std::vector<float> decoded;
        if (given) decoded.resize(given * size);
        for (;;) {
            const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
            while (row < rows && piece >= before + (lengths[row] + size - 1) / size) {
                before += (lengths[row] + size - 1) / size;
                ++row;
            }
            if (row == rows) return;
            const int64_t start = (piece - before) * size;
            const int64_t left = lengths[row] - start;
            const int64_t length = left < size ? left : size;
            auto part = [&](int64_t column, int64_t bytes, int64_t group) {
                return reinterpret_cast<char*>(table[column * rows + row])
                    + start / group * bytes;
            };
            for (int64_t i = 0; i < given; ++i) {
                const Codec& codec = CODECS[ours[i].codec];
                if (codec.decode)
                    codec.decode(
                        part(ours[i].first, codec.first, 1),
                        part(ours[i].second, codec.second, codec.group),
                        decoded.data() + i * size, length);
            }
            for (int64_t i = 0; i < count; ++i) {
                if (roles[i] >= 0 && given && ours[roles[i]].codec) {
                    pointers[i] = decoded.data() + roles[i] * size;
                } else if (roles[i] >= 0 && given) {
                    pointers[i] = part(ours[roles[i]].first, kernel->widths[i], 1);
                } else if (roles[i] >= 0) {
                    pointers[i] = part(roles[i], kernel->widths[i], 1);
                } else if (roles[i] == -1) {
                    pointers[i] = numbers + row * per_row + piece * per_piece;
                } else {
                    pointers[i] = scratch[-2 - roles[i]];
                }
            }
            call(kernel->code, pointers, length);
            for (int64_t i = 0; i < given; ++i) {
                const Codec& codec = CODECS[ours[i].codec];
                if (codec.encode && ours[i].written)
                    codec.encode(
                        decoded.data() + i * size,
                        part(ours[i].first, codec.first, 1),
                        part(ours[i].second, codec.second, codec.group), length, dither);
            }
        }
    };
    #pragma omp parallel num_threads(threads)
    work();
}

// Step counts, `floats` of them in float32, and behind them running numbers in float64.
extern "C" int64_t counts_hold(
    void* const* counts, const double* expected, int64_t floats, int64_t n) {
    for (int64_t i = 0; i < floats; ++i)
        if (*static_cast<float*>(counts[i]) != expected[i]) return 0;
    for (int64_t i = floats; i < n; ++i)
        if (*static_cast<double*>(counts[i]) != expected[i]) return 0;
    return 1;
}

// Count one step more; the running numbers become what is expected of them.
extern "C" void counts_advance(
    void* const* counts, double* expected, int64_t floats, int64_t n) {
    for (int64_t i = 0; i < floats; ++i)
        expected[i] = *static_cast<float*>(counts[i]) += 1.0f;
    for (int64_t i = floats; i < n; ++i) *static_cast<double*>(counts[i]) = expected[i];
}
"""


class ListKernel:
    """A kernel over rows of tensors: of each row the tensors are of one length.

    Args:
        code: Address of the machine code.
        roles: Of each argument that it takes which of ours it is.
        widths: Of each the bytes of an element.
        ours: How ours are kept, where any is in codes.
    """

    def __init__(
        self,
        code: int,
        roles: list[int],
        widths: list[int],
        ours: Sequence[Argument] = (),
    ) -> None:
        self._made_of = code, roles, widths
        self._roles, self._widths = array("q", roles), array("q", widths)
        self._ours = array("q", chain.from_iterable(ours))
        head = (code, len(roles), address(self._roles), address(self._widths))
        given = (address(self._ours), len(ours)) if ours else (0, 0)
        self._head = array("q", head + given)
        functions = native()
        assert functions is not None
        self._run_list, self._kernel = functions.run_list, address(self._head)

    def __call__(self, numbers: Tensor, *tensors: Tensor) -> None:
        """One row."""
        table = array("q", map(Tensor.data_ptr, tensors))
        self.run(numbers.data_ptr(), table, array("q", [tensors[-1].numel()]))

    def on_codes(self, ours: Sequence[Argument]) -> "ListKernel":
        """The same kernel, for arguments of which some are kept in codes."""
        return ListKernel(*self._made_of, ours)

    def run(
        self,
        numbers: int,
        table: "array[int]",
        lengths: "array[int]",
        per_row: int = 0,
        per_piece: int = 0,
        dither: float = NEAREST,
    ) -> None:
        """All rows, by all of torch's threads.

        Args:
            numbers: Address of the kernel's first argument.
            table: Pointers: those of the kernel's second argument for all rows, then of
                its third, and so on.
            lengths: Elements of each row.
            per_row: Bytes from the numbers of one row to those of the next.
            per_piece: Likewise of one piece, counted through all rows; a piece has PIECE
                elements, or what is left of its row.
            dither: What codes are rounded by.
        """
        self._run_list(
            self._kernel,
            len(lengths),
            address(lengths),
            address(table),
            numbers,
            per_row,
            per_piece,
            dither,
            torch.get_num_threads(),
        )


def address(x: "array[Any]") -> int:
    """Where an array's elements lie."""
    return x.buffer_info()[0]


class Native(NamedTuple):
    """The compiled functions; addresses are integers."""

    run_list: Callable[..., None]
    counts_hold: Callable[[int, int, int, int], int]
    counts_advance: Callable[[int, int, int, int], None]
    decode: Callable[..., None]
    encode: Callable[..., None]


def loaded() -> Native | None:
    """The functions, if a list kernel has been compiled in this process."""
    return native() if native.cache_info().currsize else None


@cache
def native() -> Native | None:
    """The loop, compiled once a machine; None without a compiler."""
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    source = Template(_SOURCE).substitute(_SIZES, CODECS=codecs.SOURCE)
    try:
        with config.patch(cpp_cache_precompile_headers=False):
            library: Any = CppCodeCache.load(source, extra_flags=_FLAGS)
        # Counting takes less time than letting other Python threads run meanwhile.
        counting: Any = ctypes.PyDLL(library._name)
        run, hold, advance = library.run_list, counting.counts_hold, counting.counts_advance
    except Exception:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    run.argtypes = [pointer, number, pointer, pointer, pointer, number, number]
    run.argtypes += [ctypes.c_float, number]
    run.restype = None
    hold.argtypes = advance.argtypes = [pointer, pointer, number, number]
    hold.restype, advance.restype = number, None
    library.decode.argtypes = [number, pointer, pointer, pointer, number]
    library.encode.argtypes = [number, *[pointer] * 3, number, ctypes.c_float]
    return Native(run, hold, advance, library.decode, library.encode)


def list_kernel_of(
    generated: Callable[[list[Any]], Any], order: list[int], example: Sequence[Tensor]
) -> ListKernel | None:
    """The list kernel of what Inductor generated, where it gives the same.

    Args:
        generated: Generated for one thread; takes a list of arguments.
        order: For each of them the index of ours, or -1 for the length.
        example: Our arguments: the numbers, then tensors of one length. Not written to.
    """
    found = _machine_code(generated, order, [x[:64].clone() for x in example])
    if found is None or native() is None:
        return None
    kernel = ListKernel(*found)
    # What nobody promised is tried, on a length that no vector divides.
    own = torch.Generator().manual_seed(0)
    trial = [x[:1003].clone().uniform_(0.25, 0.75, generator=own) for x in example]
    both = [trial, [x.clone() for x in trial]]
    generated([1003 if i < 0 else both[0][i] for i in order])
    kernel(*both[1])
    same = all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(*both))
    return kernel if same else None


def _machine_code(
    generated: Any, order: list[int], example: list[Tensor]
) -> tuple[int, list[int], list[int]] | None:
    """The address of the one C++ function that is called, its roles and widths."""
    scope = getattr(getattr(generated, "__func__", generated), "__globals__", {})
    kernels = {
        name: value
        for name, value in scope.items()
        if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
    }
    if len(kernels) != 1:
        return None
    ((name, kernel),) = kernels.items()
    calls: list[tuple[Any, ...]] = []
    length = example[-1].numel()
    scope[name] = lambda *arguments: calls.append(arguments)
    try:
        generated([length if i < 0 else example[i] for i in order])
    finally:
        scope[name] = kernel
    file = getattr(kernel.__self__, "__file__", None)
    if len(calls) != 1 or calls[0][-1] != length or file is None or len(calls[0]) >= _MOST:
        return None
    places = {x.data_ptr(): i - 1 for i, x in enumerate(example)}
    roles: list[int] = []
    slots: dict[int, int] = {}
    for x in calls[0][:-1]:
        if not isinstance(x, Tensor):
            return None
        role = places.get(x.data_ptr())
        if role is None:
            # A tensor of its own.
            if x.nbytes > _SLOT:
                return None
            role = -2 - slots.setdefault(x.data_ptr(), len(slots))
        roles.append(role)
    if len(slots) > _SLOTS:
        return None
    widths = [x.element_size() for x in calls[0][:-1]]
    code = ctypes.cast(ctypes.CDLL(file).kernel, ctypes.c_void_p).value
    return None if code is None else (code, roles, widths)
