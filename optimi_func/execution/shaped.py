"""Shaped kernels on CPU: steps of whole tensors, compiled once for all shapes of a rank.

If a rule's map is made of sums over dimensions and of elementwise operations, Inductor
joins it with the rest of the step in one C++ function, whose last arguments are sizes.
cpp/list.cpp calls that for each tensor of a list, which threads take one after the other.
No result depends on the number of threads or on other tensors.

As with list kernels, if private parts of Inductor are not as expected, or the results are
others, tensors are mapped one by one.
"""

import ctypes
from array import array
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from optimi_func.core.rule import Rule
from optimi_func.execution.cpp import address, native
from optimi_func.execution.list_kernel import only_call
from optimi_func.execution.slots import Update
from optimi_func.execution.store import LOADED

# Sizes of examples, by rank. All differ, so that each number tells what it is made of, and
# sums are so long that Inductor adds them up in parts. It does so above LONG.
EXAMPLES = {1: (4099,), 2: (61, 89), 3: (5, 61, 89), 4: (3, 5, 61, 89)}
LONG, LONG_EXAMPLES = 4096, (4099, 4111)
_COLUMN, _SCALARS, _ROOM, _SIZE = range(4)  # as in list.cpp


class ShapedKernel:
    """A kernel for tensors of one rank, with all their state.

    Its machine code is the function `kernel` of the library at `path`. `arguments` are four
    numbers for each argument of that, see list.cpp. `lengths` are those of our tensors: the
    dimensions of which they are the product, as bits; -1 if the tensor is empty.
    """

    def __init__(
        self, path: str, rank: int, arguments: list[list[int]], lengths: list[int]
    ) -> None:
        self.made_of = path, rank, arguments, lengths
        self.loaded = path.startswith(LOADED)  # from the store
        code = ctypes.cast(ctypes.CDLL(path).kernel, ctypes.c_void_p).value or 0
        # C++ reads these arrays by their addresses, so they live as long as the kernel.
        self._arguments = array("q", chain.from_iterable(arguments))
        head = (code, len(arguments), rank, address(self._arguments))
        self._head, functions = array("q", head), native()
        assert functions is not None
        self._run = functions.run_shaped

    def __call__(self, scalars: Tensor, *tensors: Tensor) -> None:
        """Run the kernel on one parameter."""
        table = array("q", map(Tensor.data_ptr, tensors))
        self.run(scalars.data_ptr(), table, array("q", tensors[0].shape))

    def run(self, scalars: int, table: "array[int]", sizes: "array[int]") -> None:
        """Run the kernel on parameters with these sizes, one after the other.

        The table has pointers to its first tensor for all of them, then to its second, etc.
        """
        rows, own = len(sizes) // self.made_of[1], (address(sizes), address(table))
        self._run(address(self._head), rows, *own, scalars, torch.get_num_threads())

    def takes(self, rule: Rule, u: Update) -> bool:
        """Return True if the fields of a rule's map have the lengths for this shape."""
        lengths = self.made_of[3][2 + len(rule.fields) :]
        own = [n for _, n in u.slot.mapped or ()]
        made = [_length(u.p.shape, bits) for bits in lengths]
        return all([n == m for n, m in zip(own, made)])


def example_of(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the example that a kernel for this shape is compiled with."""
    sizes = EXAMPLES[len(shape)]
    if len(shape) != 2:
        return sizes
    return tuple([y if n > LONG else x for n, x, y in zip(shape, sizes, LONG_EXAMPLES)])


def trials(rank: int) -> list[tuple[int, ...]]:
    """Return shapes on which a kernel has to agree with the eager step."""
    sizes = (2, 3, 17, 40)[-rank:]
    return [
        sizes,
        sizes[::-1],
        (2,) * rank,
        (1,) * (rank - 1) + (33,),
        (33,) + (1,) * (rank - 1),
    ]


def shaped_kernel_of(
    generated: Any, order: list[int], example: list[Tensor]
) -> ShapedKernel | None:
    """Make a shaped kernel of Inductor's code, or return None."""
    found = only_call(generated, order, example)
    if found is None or native() is None:
        return None
    path, call = found
    sizes = example[1].shape
    places = {x.data_ptr(): i - 1 for i, x in enumerate(example)}
    arguments: list[list[int]] = []
    for x in call:
        if not isinstance(x, Tensor):
            if x not in sizes:
                return None
            arguments.append([_SIZE, sizes.index(x), 0, 0])
            continue
        bits, place = _dimensions(sizes, x.numel()), places.get(x.data_ptr())
        if bits < 0 and place is None:
            return None
        kind = _ROOM if place is None else _SCALARS if place < 0 else _COLUMN
        arguments.append([kind, place or 0, bits, x.element_size()])
    lengths = [_dimensions(sizes, x.numel()) for x in example[1:]]
    if not isinstance(call[-1], int):
        return None
    return ShapedKernel(path, len(sizes), arguments, lengths)


def _dimensions(sizes: torch.Size, length: int) -> int:
    """Return as bits the dimensions of which a length is the product, -1 if it is none."""
    found = sum([1 << i for i, n in enumerate(sizes) if length % n == 0])
    return found if length and _length(sizes, found) == length else -1


def _length(sizes: torch.Size, bits: int) -> int:
    return 0 if bits < 0 else prod([n for i, n in enumerate(sizes) if bits >> i & 1])


def store_vectors(module: Any) -> None:
    """Change a graph so that Inductor computes once what it broadcasts.

    It would compute that anew for each element of a loop over a whole tensor.
    """
    aten, graph = torch.ops.aten, module.graph

    def number(node: Any, i: int, n: Any, of: Any) -> Any:
        if isinstance(n, int):
            return n
        made = graph.call_function(of, (node, i))
        made.meta["val"] = n
        return made

    for node in list(graph.nodes):
        value = node.meta.get("val")
        ranks = [_rank(user.meta.get("val")) for user in node.users]
        made = isinstance(value, Tensor) and node.op == "call_function"
        if not made or max(ranks, default=0) <= _rank(value):
            continue
        with graph.inserting_after(node):
            # Its argument has to be in memory.
            stored = graph.call_function(aten.as_strided.default)
        stored.meta = dict(node.meta)
        node.replace_all_uses_with(stored)
        facts = (value.shape, aten.sym_size.int), (value.stride(), aten.sym_stride.int)
        given = [[(i, n, of) for i, n in enumerate(own)] for own, of in facts]
        with graph.inserting_before(stored):
            stored.args = (node, *[[number(node, *x) for x in own] for own in given])
    module.recompile()


def _rank(value: Any) -> int:
    """Return the number of dimensions that have more than one element."""
    sizes = value.shape if isinstance(value, Tensor) else ()
    return sum([not isinstance(n, int) or n > 1 for n in sizes])
