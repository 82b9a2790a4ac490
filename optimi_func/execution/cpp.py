"""The C++ functions that list kernels and 8-bit state run on, compiled once per machine.

Their source is cpp/list.cpp, which includes cpp/codecs.cpp.
"""

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# Elements of a piece that has a mean.
PIECE = 1 << 16
# The most pointers that a kernel takes, the most temporary tensors in it, and the most
# bytes in one of these.
MOST, SLOTS, SLOT = 32, 8, 64
_SHARED = {"PIECE": PIECE, "MOST": MOST, "SLOTS": SLOTS, "SLOT": SLOT}
# GCC makes no vectors of square roots that may have to set errno.
FLAGS = ("-fno-math-errno", *[f"-D{name}={value}" for name, value in _SHARED.items()])


class Native(NamedTuple):
    """The compiled functions, which take addresses as integers."""

    run_list: Callable[..., None]
    counts_hold: Callable[[int, int, int, int], int]
    counts_advance: Callable[[int, int, int, int], None]
    decode: Callable[..., None]
    encode: Callable[..., None]


def address(x: "array[Any]") -> int:
    """Return the address of an array's first element."""
    return x.buffer_info()[0]


def loaded() -> Native | None:
    """Return the functions, if this process has compiled or loaded them before."""
    return native() if native.cache_info().currsize else None


@cache
def native() -> Native | None:
    """Compile and load the functions. Returns None if that fails."""
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    try:
        with config.patch(cpp_cache_precompile_headers=False):
            library: Any = CppCodeCache.load(source(), extra_flags=FLAGS)
        # Counting takes less time than releasing the GIL for it would.
        counting: Any = ctypes.PyDLL(library._name)
        run, hold, advance = library.run_list, counting.counts_hold, counting.counts_advance
    except Exception:
        return None
    at, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    run.argtypes = [at, count, at, at, at, count, count, real, count]
    hold.argtypes = advance.argtypes = [at, at, count, count]
    library.decode.argtypes = [count, at, at, at, count]
    library.encode.argtypes = [count, at, at, at, count, real]
    run.restype, hold.restype, advance.restype = None, count, None
    return Native(run, hold, advance, library.decode, library.encode)


def source() -> str:
    """Read list.cpp, with codecs.cpp in place of its #include.

    Inductor's cache compares the text that it compiles, but no files that this includes.
    """
    folder = Path(__file__).with_suffix("")
    codecs = (folder / "codecs.cpp").read_text()
    return (folder / "list.cpp").read_text().replace('#include "codecs.cpp"\n', codecs)
