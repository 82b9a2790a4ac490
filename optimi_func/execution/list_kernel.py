"""List kernels on CPU: one call for many tensors, a C++ loop around Inductor's kernel.

A kernel called from Python costs some microseconds per tensor, and all threads wait for
each other at its end. Here Inductor compiles the kernel for one thread, and cpp/list.cpp
cuts the tensors into pieces that the threads share. Ten thousand tensors then take as long
as one of their total size. No result depends on the number of threads or on other tensors.

This reads private parts of Inductor: the C++ function in the code that it generated. If
they are not as expected, or the results differ in a bit, `list_kernel_of` returns None and
a kernel is called for each tensor.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from optimi_func.core.codes import NEAREST
from optimi_func.execution.codecs import Argument, roles_in_place
from optimi_func.execution.cpp import MOST, SLOT, SLOTS, address, native

TRIAL = 1003  # elements of a trial, which no vector divides


class ListKernel:
    """A kernel for rows of tensors. All tensors of a row have one length.

    Its machine code is the function `kernel` of the library at `path`. For each argument of
    that, `roles` has the index of ours, -1 for the scalars, or -2 - i for temporary tensor
    i, and `widths` the bytes of an element. `ours` tells where the launch's table has our
    arguments, if any is stored in codes.
    """

    def __init__(
        self, path: str, roles: list[int], widths: list[int], ours: Sequence[Argument] = ()
    ) -> None:
        self.made_of = path, roles, widths
        code = ctypes.cast(ctypes.CDLL(path).kernel, ctypes.c_void_p).value or 0
        # C++ reads these arrays by their addresses, so they live as long as the kernel.
        self._roles, self._widths = array("q", roles), array("q", widths)
        self._ours = array("q", chain.from_iterable(ours))
        head = (code, len(roles), address(self._roles), address(self._widths))
        tail = (address(self._ours), len(ours)) if ours else (0, 0)
        self._head = array("q", head + tail)
        functions = native()
        assert functions is not None
        self._run_list, self._kernel = functions.run_list, address(self._head)

    def __call__(self, scalars: Tensor, *tensors: Tensor) -> None:
        """Run the kernel on one row."""
        table = array("q", map(Tensor.data_ptr, tensors))
        self.run(scalars.data_ptr(), table, array("q", [tensors[-1].numel()]))

    def run(
        self,
        scalars: int,
        table: "array[int]",
        lengths: "array[int]",
        per_row: int = 0,
        per_piece: int = 0,
        dither: float = NEAREST,
    ) -> None:
        """Run the kernel on all rows, with all of torch's threads.

        `scalars` is the address of the kernel's first argument. The table has pointers to
        its second argument for all rows, then to its third, etc. The scalars of a row are
        `per_row` bytes behind those of the row before, and those of a piece `per_piece`. A
        piece has PIECE elements or the rest of its row, and the count of pieces runs
        through all rows. The dither rounds second moments in 8 bits.
        """
        at, rows = lengths.buffer_info()
        pointers, threads = table.buffer_info()[0], torch.get_num_threads()
        head = self._kernel, rows, at, pointers
        if self._run_list(*head, scalars, per_row, per_piece, dither, threads):
            raise MemoryError("no memory for moments to be decoded into")


def in_place_kernel(kernel: ListKernel, ours: list[Argument]) -> ListKernel:
    """Return the in-place variant of a kernel that writes its results to new tensors."""
    path, roles, widths = kernel.made_of
    new_roles, arguments = roles_in_place(roles, widths, ours)
    return ListKernel(path, new_roles, widths, arguments)


@cache
def can_run_in_place(
    kernel: ListKernel, count: int, wide: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> bool:
    """Return True if a kernel gives the same bits when its results overwrite its arguments.

    That holds if it reads each vector completely before it writes to it. Inductor does not
    promise that, because it generated code for new tensors, so a trial decides.

    Args:
        kernel: It writes its results to new tensors.
        count: The number of its scalars.
        wide: The dtype of its scalars.
        dtypes: Those of the parameter, the gradient and the state.
    """

    def apart(scalars: Tensor, p: Tensor, g: Tensor, *state: Tensor) -> None:
        results = list(map(torch.empty_like, (p, *state)))
        kernel(scalars, p, g, *state, *results)
        torch._foreach_copy_([p, *state], results)

    kinds = (count, wide), *[(TRIAL, x) for x in dtypes]
    example = [torch.empty(n, dtype=kind, device="cpu") for n, kind in kinds]
    replacer = in_place_kernel(
        kernel, [Argument(0, i, i, False) for i in range(len(dtypes))]
    )
    return kernels_agree(replacer, apart, example, 0.0, 1.0)


def list_kernel_of(
    generated: Callable[[list[object]], object], order: list[int], example: Sequence[Tensor]
) -> ListKernel | None:
    """Make a list kernel of Inductor's code. Returns None unless both give the same bits.

    The code is compiled for one thread. Its arguments are ours, in this order, and the
    length (-1). The example, which is not written to, has scalars, then equal lengths.
    """
    parts = _machine_code(generated, order, [x[:64].clone() for x in example])
    if parts is None or native() is None:
        return None
    kernel = ListKernel(*parts)

    def run(*trial: Tensor) -> None:
        generated([TRIAL if i < 0 else trial[i] for i in order])

    # Inductor promises nothing about its kernels.
    return kernel if kernels_agree(kernel, run, example, 0.0, 1.0) else None


def kernels_agree(
    kernel: Callable[..., None],
    run: Callable[..., None],
    example: Sequence[Tensor],
    power: float,
    scale: float,
) -> bool:
    """Return True if a kernel does what a function does, on tensors like the example.

    The results may differ by the machine epsilon to that power; if it is 0, in no bit. All
    tensors but the scalars and the parameter have the scale.
    """
    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {"generator": generator, "dtype": torch.int64, "device": "cpu"}

    def drawn(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x[:TRIAL].clone().uniform_(0.25, 0.75, generator=generator)
        return torch.randint(1 << 16, (len(x[:TRIAL]),), **how).to(x)

    trial = list(map(drawn, example))
    for x in trial[2:]:
        if x.is_floating_point():
            x.mul_(scale)
    both = [trial, [x.clone() for x in trial]]
    run(*both[0])
    kernel(*both[1])
    if not power:
        return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(*both))
    errors = [torch.finfo(x.dtype).eps ** power for x in trial if x.is_floating_point()]
    near = partial(torch.allclose, equal_nan=True)
    return all(near(a, b, rtol=e, atol=e) for a, b, e in zip(*both, errors))


def _machine_code(
    generated: Callable[[list[object]], object], order: list[int], example: list[Tensor]
) -> tuple[str, list[int], list[int]] | None:
    """Return the library, roles and widths of the C++ function that `generated` calls."""
    pair = only_call(generated, order, example)
    if pair is None or pair[1][-1] != example[-1].numel():
        return None
    file, call = pair
    places = {x.data_ptr(): i - 1 for i, x in enumerate(example)}
    roles: list[int] = []
    slots: dict[int, int] = {}
    for x in call[:-1]:
        if not isinstance(x, Tensor):
            return None
        role = places.get(x.data_ptr())
        if role is None:
            # A temporary tensor, which the loop in C++ has room for if it is small.
            if x.nbytes > SLOT:
                return None
            role = -2 - slots.setdefault(x.data_ptr(), len(slots))
        roles.append(role)
    if len(slots) > SLOTS:
        return None
    widths = [x.element_size() for x in call[:-1]]
    return file, roles, widths


def only_call(
    generated: Callable[[list[object]], object], order: list[int], example: list[Tensor]
) -> tuple[str, tuple[Any, ...]] | None:
    """Return the library of the C++ function that `generated` calls, and the arguments.

    None if it calls several, or too many arguments are given.
    """
    scope = getattr(getattr(generated, "__func__", generated), "__globals__", {})
    kernels = {
        name: value
        for name, value in scope.items()
        if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
    }
    if len(kernels) != 1:
        return None
    ((name, kernel),) = kernels.items()
    calls: list[tuple[object, ...]] = []
    scope[name] = lambda *arguments: calls.append(arguments)
    try:
        generated([example[1].shape[-1 - i] if i < 0 else example[i] for i in order])
    finally:
        scope[name] = kernel
    file = getattr(kernel.__self__, "__file__", None)
    if len(calls) != 1 or file is None or len(calls[0]) >= MOST:
        return None
    return file, calls[0]
