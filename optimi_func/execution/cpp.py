"""The C++ functions that list kernels and 8-bit state run on, compiled once per machine.

Their source is cpp/list.cpp, which includes cpp/codecs.cpp.
"""

import ctypes
from array import array
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar

from optimi_func.execution import store

S = TypeVar("S")
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

    run_list: Callable[..., int]
    run_shaped: Callable[..., int]
    counts_hold: Callable[[int, int, int, int], int]
    counts_advance: Callable[[int, int, int, int], None]
    decode: Callable[..., None]
    encode: Callable[..., None]
    draw_bits: Callable[..., None]


def address(x: "array[int] | array[float]") -> int:
    """Return the address of an array's first element."""
    return x.buffer_info()[0]


# The functions once they are loaded, else why they could not be, and whether to try again.
_functions: list[Native] = []
_errors: list[Exception] = []
_again = Event()


def loaded() -> Native | None:
    """Return the functions, if this process has compiled or loaded them before."""
    return _functions[0] if _functions else None


def native() -> Native | None:
    """Compile and load the functions, or return None if that fails, as `failure` says.

    After an error they are compiled again when a new optimizer has called `retry`.
    """
    if not _functions and (not _errors or _again.is_set()):
        _again.clear()
        _errors.clear()
        try:
            if (functions := _load()) is not None:
                _functions.append(functions)
        except Exception as error:
            _errors.append(error)
    return loaded()


def failure() -> Exception | None:
    """Return the error that left this process without the functions, or None."""
    if _again.is_set():
        native()
    return next(iter(_errors), None)


def retry() -> None:
    """Let the next caller compile the functions again, if that has failed."""
    if _errors:
        store.forget_compilers()
        _again.set()


def _load() -> Native | None:
    """Return the functions, or None where nothing is to be compiled (`warm --check`)."""
    with store.alone(native_key()):
        entry = store.find(native_key())
        if not entry and not store.may_compile("C++ functions", native_key()):
            return None
        path = entry[0] if entry else with_vectors(_compile)
    library = ctypes.CDLL(path)
    # Counting takes less time than releasing the GIL for it would.
    counting = ctypes.PyDLL(path)
    run, hold, advance = library.run_list, counting.counts_hold, counting.counts_advance
    at, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    run.argtypes = [at, count, at, at, at, count, count, real, count]
    hold.argtypes = advance.argtypes = [at, at, count, count]
    library.run_shaped.argtypes = [at, count, count, at, at, count, count]
    library.decode.argtypes = [count, at, at, at, count]
    library.encode.argtypes = [count, at, at, at, count, real]
    library.draw_bits.argtypes = [at, count, count, count, count, count]
    hold.restype, advance.restype = count, None
    rest = library.decode, library.encode, library.draw_bits
    return Native(run, library.run_shaped, hold, advance, *rest)


def _compile() -> str:
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    with config.patch(cpp_cache_precompile_headers=False):
        library = CppCodeCache.load(source(), extra_flags=FLAGS)
    store.keep(native_key(), library._name, None)
    return library._name


@cache
def native_key() -> str:
    """Return the key of the functions in the store, empty if they have none."""
    return store.key_of(store.machine(), name="C++ functions", functions=(source(), FLAGS))


def source() -> str:
    """Read list.cpp, with codecs.cpp in place of its #include.

    Inductor's cache compares the text that it compiles, but no files that this includes.
    """
    folder = Path(__file__).with_suffix("")
    codecs = (folder / "codecs.cpp").read_text()
    return (folder / "list.cpp").read_text().replace('#include "codecs.cpp"\n', codecs)


def with_vectors(made: Callable[[], S], cause: str = "") -> S:
    """Call a function that compiles C++, if possible without trying vectors out.

    It is called again after an error, if the error's text has the cause.
    """
    try:
        with unprobed_vectors():
            return made()
    except Exception as error:
        if cause not in str(error):
            raise
        from torch._inductor import cpu_vec_isa

        # The compiler may know fewer instructions than the processor: try them out.
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        return made()


@contextmanager
def unprobed_vectors() -> Generator[None]:
    """Compile for this processor's vector instructions without trying them out first.

    By default Inductor compiles and loads a test program for each instruction set, which
    takes a fifth of a first step (pytorch/pytorch#140970). A setting (environment
    TORCHINDUCTOR_VEC_ISA_OK) turns that off in this thread, unless the user has set it.
    """
    from torch._inductor import config

    usual = config.cpp.vec_isa_ok
    with config.patch({"cpp.vec_isa_ok": True if usual is None else usual}):
        yield
