"""Shaped kernels on CPU: steps of whole tensors, compiled once for all shapes of a rank.

If a rule's map is sums over dimensions and elementwise operations, Inductor joins it with
the step in one C++ function, whose last arguments are sizes. cpp/list.cpp calls that for
each tensor of a list, and threads take one tensor after the other. No result depends on
their number or on other tensors. If private parts of Inductor are not as expected, or the
results are others, tensors are mapped one by one.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.fx import GraphModule

from optimi_func.execution.cpp import address, native
from optimi_func.execution.list_kernel import only_call

# Shapes of examples, by rank. All sizes differ, so that each number tells what it is made
# of. Where a sum has more than LONG elements, Inductor adds it up in parts.
EXAMPLES = {1: (4099,), 2: (61, 89), 3: (5, 61, 89), 4: (3, 5, 61, 89)}
LONG, LONG_EXAMPLES = 4096, (4099, 4111)
GRAIN = 1 << 15  # elements that are worth a thread
_ALIGNMENT = 64


class ShapedKernel:
    """A kernel for tensors of one rank, with all their state.

    Its machine code is the function `kernel` of the library at `path`. Each argument of
    that is (place, dims, width): of one of `run`'s columns, of the size `dims` if the width
    is 0, or, if the place is -1, of a temporary tensor whose length is the product of the
    dimensions with the bits `dims`. `lengths` are those of our tensors, as bits.
    """

    def __init__(self, path: str, arguments: list[list[int]], lengths: list[int]) -> None:
        self.made_of = path, arguments, lengths
        self._code = ctypes.cast(ctypes.CDLL(path).kernel, ctypes.c_void_p).value or 0
        inside = [place < 0 and width > 0 for place, _, width in arguments]
        self._inside = array("q", inside)

    def __call__(self, *tensors: Tensor) -> None:
        """Run the kernel on scalars and one parameter."""
        self.run([[x.data_ptr()] for x in tensors], *self.prepared([tensors[1].shape]))

    def fits(self, shape: Sequence[int], lengths: list[int], first: int) -> bool:
        """Return True if tensors from the first on have the lengths for this shape."""
        own = [_length(shape, x) for x in self.made_of[2][first:]]
        return lengths == own[: len(lengths)]

    def prepared(self, shapes: Sequence[Sequence[int]]) -> "tuple[array[int], int, int]":
        """Return rows of arguments, the bytes that these need, and how many threads."""
        rows, most = array("q"), 0
        for shape in shapes:
            offset = 0
            for place, dims, width in self.made_of[1]:
                if width and place < 0:
                    rows.append(offset)
                    offset += -(-_length(shape, dims) * width // _ALIGNMENT) * _ALIGNMENT
                else:
                    rows.append(0 if width else shape[dims])
            most = max(most, offset)
        return rows, most, min(len(shapes), 1 + sum(map(prod, shapes)) // GRAIN)

    def run(
        self, columns: Sequence[Sequence[int]], rows: "array[int]", room: int, threads: int
    ) -> None:
        """Run the kernel on rows of `prepared`, with the addresses in these columns."""
        functions, count = native(), len(self._inside)
        assert functions is not None
        for i, (place, _, width) in enumerate(self.made_of[1]):
            if width and place >= 0:
                rows[i::count] = array("q", columns[place])
        table = len(rows) // count, address(rows), address(self._inside)
        threads = min(threads, torch.get_num_threads())
        if functions.run_shaped(self._code, count, *table, room, threads):
            raise MemoryError(f"a step needs {threads} times {room} bytes beside its state")


def example_of(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the example that a kernel for this shape is compiled with."""
    sizes = EXAMPLES[len(shape)]
    if len(shape) != 2:
        return sizes
    return tuple([y if n > LONG else x for n, x, y in zip(shape, sizes, LONG_EXAMPLES)])


def trials(rank: int) -> list[tuple[int, ...]]:
    """Return shapes on which a kernel has to agree with the eager step."""
    sizes, ones = (2, 3, 17, 40)[-rank:], (1,) * (rank - 1)
    return [sizes, sizes[::-1], (2,) * rank, (*ones, 33), (33, *ones)]


def shaped_kernel_of(
    generated: Callable[[list[object]], object], order: list[int], example: Sequence[Tensor]
) -> ShapedKernel | None:
    """Make a shaped kernel of Inductor's code, or return None."""
    call, sizes = only_call(generated, order, [*example]), example[1].shape
    if call is None or native() is None or isinstance(call[1][-1], Tensor):
        return None
    places = {x.data_ptr(): i for i, x in enumerate(example)}
    arguments: list[list[int]] = []
    for x in call[1]:
        if isinstance(x, Tensor):
            place, dims = places.get(x.data_ptr(), -1), _dimensions(sizes, x.numel())
            arguments.append([place, dims, x.element_size()])
            if place < 0 and dims < 0:
                return None
        elif x in sizes:
            arguments.append([-1, sizes.index(x), 0])
        else:
            return None
    lengths = [_dimensions(sizes, x.numel()) for x in example]
    return ShapedKernel(call[0], arguments, lengths)


def _dimensions(sizes: Sequence[int], length: int) -> int:
    """Return as bits the dimensions of which a length is the product, -1 if it is none."""
    bits = sum([1 << i for i, n in enumerate(sizes) if length % n == 0])
    return bits if length and _length(sizes, bits) == length else -1


def _length(sizes: Sequence[int], bits: int) -> int:
    return 0 if bits < 0 else prod([n for i, n in enumerate(sizes) if bits >> i & 1])


def store_vectors(module: GraphModule) -> dict[str, object]:
    """Change a graph so that Inductor computes once what it broadcasts.

    It would compute that anew for each element of a loop over a whole tensor. Returns the
    options that Inductor needs for the graph, which are none.
    """

    def rank(value: object) -> int:
        sizes = value.shape if isinstance(value, Tensor) else ()
        return sum([not isinstance(n, int) or n > 1 for n in sizes])

    for node in list(module.graph.nodes):
        value = node.meta.get("val")
        computed = isinstance(value, Tensor) and node.op == "call_function"
        if computed and any([rank(x.meta.get("val")) > rank(value) for x in node.users]):
            with module.graph.inserting_after(node):
                # Its argument has to be in memory.
                stored = module.graph.call_function(torch.ops.aten.as_strided.default)
            stored.meta = dict(node.meta)
            node.replace_all_uses_with(stored)
            stored.args = node, list(value.shape), list(value.stride())
    module.recompile()
    return {}
