"""List kernels on state in 8 bits and on compensations: C++ decodes and encodes pieces.

Inductor's own loops over codes are slow, because they have no vectors of int16 and fuse no
reduction with rounding. So Inductor compiles the kernel for float32 tensors. Each thread
decodes a piece into its cache, calls the kernel on that, and encodes the results.
The formulas are those of `core.codes`. The results are compared with theirs, bit for bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.core.checks import warn_user
from optimi_func.core.codes import CODECS, COMP_CODES, MOMENTS, narrow, widen
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import COMP, GRAD, PARAM, coded_in
from optimi_func.execution.cpp import Native, native
from optimi_func.execution.slots import Slot


class Argument(NamedTuple):
    """An argument of a kernel, and the columns of a launch's table that it is stored in."""

    codec: int  # index in CODECS of codecs.cpp; 0 has nothing to decode
    first: int
    second: int
    written: bool


# Indices in CODECS of codecs.cpp: of moments and parameters, by the dtype of the codes or
# compensation, in the order in which `core.codes` lists them.
_BFLOAT16, _HALVES = 1, 2
_MOMENTS = {dtype: i for i, dtype in enumerate(CODECS, 3)}
_PARAMS = {dtype: i for i, dtype in enumerate(COMP_CODES, 3 + len(_MOMENTS))}


def can_run(slot: Slot) -> bool:
    """Return True if C++ has codecs for the slot's tensors; `are_exact` tries these."""
    return slot.compensation not in COMP_CODES or slot.dtypes[PARAM] == torch.bfloat16


def widens_gradients(slot: Slot, g: Tensor) -> bool:
    """Return True if bfloat16 gradients have to reach the kernel in float32.

    A kernel for bfloat16 gradients adds up in another order, but "exact" promises the bits
    of float32.
    """
    return slot.compensation == torch.int16 and g.dtype == torch.bfloat16


def arguments_of(
    dtypes: Mapping[str, torch.dtype],
    names: Sequence[str],
    table: Sequence[str],
    write: bool,
    moves: bool,
    widens: bool,
) -> list[Argument]:
    """Return where each argument of a kernel is stored in a launch's table.

    Args:
        dtypes: The dtypes of the parameter, its state and compensation as they are stored.
        names: The names of the kernel's arguments. Fields are decoded.
        table: The names of the table's columns.
        write: The step moves the parameters.
        moves: The kernel does more than to measure.
        widens: bfloat16 gradients are widened.
    """
    at, coded = {name: i for i, name in enumerate(table)}, coded_in(dtypes)
    comp = dtypes.get(COMP)
    found: list[Argument] = []
    for name in names:
        if name in coded:
            codes, scale = coded[name]
            found.append(Argument(_MOMENTS[dtypes[codes]], at[codes], at[scale], moves))
        elif name == PARAM and comp in _PARAMS:
            found.append(Argument(_PARAMS[comp], at[PARAM], at[COMP], write and moves))
        else:
            codec = _BFLOAT16 if widens and name == GRAD else 0
            found.append(Argument(codec, at[name], at[name], False))
    return found


def roles_in_place(
    roles: list[int], widths: list[int], ours: list[Argument]
) -> tuple[list[int], list[Argument]]:
    """Return roles and arguments with which a kernel overwrites its arguments.

    The kernel was generated to write results to new tensors. Results of 2 bytes an element
    go to a buffer first, and are copied from there.

    Args:
        roles: Which of our arguments each argument of the generated code is.
        widths: Bytes of an element of each argument of the generated code.
        ours: Our arguments, without those for new tensors.
    """
    ours, count, sizes = list(ours), len(ours), dict(zip(roles, widths))
    places = [0, *range(2, count)]  # of the arguments that have a target
    into: dict[int, int] = {}
    for target, place in enumerate(places, count):
        into[target] = place
        if ours[place].codec == 0 and sizes.get(target) == 2:
            into[target] = len(ours)
            ours.append(ours[place]._replace(codec=_HALVES, written=True))
    return [into.get(i, i) for i in roles], ours


def are_exact() -> bool:
    """Return True if every codec gives bit for bit what `core.codes` gives, on a trial."""
    if (functions := native()) is None:
        return False
    if id(functions) not in runtime.exact_codecs:
        runtime.exact_codecs[id(functions)] = _is_exact(functions)
    return runtime.exact_codecs[id(functions)]


def _is_exact(functions: Native) -> bool:
    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    x = torch.randn(1003, generator=generator, **how).mul(1e-3)
    x[::97] = 0.0
    trials: list[tuple[int, Tensor, tuple[Tensor, Tensor], Tensor]] = []
    for kinds in MOMENTS.values():
        for kind, moment in zip(kinds, (x, x.square())):
            codes = kind.zeros(x).encode(moment, 0.3)
            decoded = codes.decode(torch.float32)
            trials.append((_MOMENTS[codes.q.dtype], moment, codes, decoded))
    for dtype, codec in _PARAMS.items():
        pair = narrow(x, x.to(torch.bfloat16), x.new_zeros(1003, dtype=dtype))
        trials.append((codec, x, pair, widen(*pair, torch.float32)[1]))
    for codec, x, coded, decoded in trials:
        first, second, back = map(torch.empty_like, (*coded, x))
        places = first.data_ptr(), second.data_ptr()
        functions.encode(codec, x.data_ptr(), *places, len(x), 0.3)
        functions.decode(codec, *places, back.data_ptr(), len(x))
        if not all(map(torch.equal, (first, second, back), (*coded, decoded))):
            warn_user(
                "the C++ functions that decode state in 8 bits give other results here "
                "than torch does: steps on such state run eagerly, several times slower. "
                "Another C++ compiler (named by CXX) may do better"
            )
            return False
    return True
