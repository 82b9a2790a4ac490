"""The C++ functions that list kernels and 8-bit state run on, compiled once per machine.

Their source is cpp/list.cpp, which includes cpp/codecs.cpp. `start` compiles them in the
background: a thread calls the C++ compiler, which is a process of its own, while torch's
compiler is imported and makes the first kernel. That thread imports nothing of torch,
because two threads that import parts of it would wait for each other.
"""

import atexit
import ctypes
import os
import platform
import shlex
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from tempfile import TemporaryDirectory
from threading import Event, Thread, get_ident
from typing import Any, NamedTuple, TypeVar

from optimi_func.core.runtime import runtime
from optimi_func.core.torch_private import is_switched_off
from optimi_func.execution import store

S = TypeVar("S")
# Elements of a piece that has a mean.
PIECE = 1 << 16
# The most pointers that a kernel takes, the most temporary tensors in it, and the most
# bytes in one of these.
MOST, SLOTS, SLOT = 32, 8, 64
# So often a process tries to compile the steps for a device although that has failed.
MOST_FAILURES = 3
_SHARED = {"PIECE": PIECE, "MOST": MOST, "SLOTS": SLOTS, "SLOT": SLOT}
# GCC makes no vectors of square roots that may have to set errno.
FLAGS = ("-fno-math-errno", *[f"-D{name}={value}" for name, value in _SHARED.items()])
# What is left of Inductor's options, which switch some on that later ones switch off. GCC
# makes the same machine code with both.
_OPTIONS = (
    "-O3 -march=native -ffp-contract=off -fno-omit-frame-pointer -std=c++20 -fopenmp "
    "-shared -fPIC"
).split()
# On other systems Inductor knows better which options the compiler takes.
_IS_PLAIN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


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


# The thread that `start` has started, and the compiler while it runs.
_threads: list[Thread] = []
_compilers: list["Popen[bytes]"] = []
_exits = Event()
_lock = threading.RLock()


def _forget_threads() -> None:
    global _lock
    _lock = threading.RLock()
    _compilers.clear()


# Another thread of the parent may be compiling, and does not go on in a child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def loaded() -> Native | None:
    """Return the functions, if this process has compiled or loaded them before."""
    return runtime.functions[0] if runtime.functions else None


def start() -> None:
    """Compile or load the functions in the background, if nobody in this process has yet.

    Whoever calls `native` then waits for them.
    """
    if (
        _threads
        or runtime.functions
        or runtime.errors
        or store.missing is not None
        or is_switched_off()
    ):
        return
    native_key()  # Another thread may import Inductor and change its settings soon.
    if _is_called_here():
        thread = Thread(target=native, name="optimi_func C++", daemon=True)
        with suppress(RuntimeError):  # no more threads: `native` does it without
            thread.start()
            _threads.append(thread)
            atexit.register(_stop)


def _stop() -> None:
    """End a compiler that still runs when the process exits, with its own processes."""
    _exits.set()
    for compiler in [*_compilers]:
        _end(compiler)
        for thread in _threads:
            thread.join(5.0)  # It removes its files.


def native() -> Native | None:
    """Compile and load the functions, or return None if that fails, as `failure` says.

    After an error they are compiled again when a new optimizer has called `retry`.
    """
    if runtime.functions:
        return runtime.functions[0]
    with _lock:
        if not runtime.functions and (not runtime.errors or runtime.tries_again.is_set()):
            runtime.tries_again.clear()
            runtime.errors.clear()
            try:
                if (functions := _load()) is not None:
                    runtime.functions.append(functions)
            except Exception as error:
                runtime.errors.append(error)
    return loaded()


def failure() -> Exception | None:
    """Return the error that left this process without the functions, or None."""
    if runtime.tries_again.is_set():
        native()
    return next(iter(runtime.errors), None)


def retry() -> None:
    """Let the next caller compile again what could not be compiled.

    A new optimizer calls this, because a compiler or the disk may have been missing for a
    moment. Steps that could not be compiled three times stay eager.
    """
    again = {x for x in runtime.uncompilable if runtime.failures.get(x, 0) < MOST_FAILURES}
    if runtime.errors or again:
        store.forget_compilers()
    runtime.uncompilable -= again
    if runtime.errors:
        runtime.tries_again.set()


def _load() -> Native | None:
    """Return the functions, or None where nothing is to be compiled (`warm --check`)."""
    with store.alone(native_key()):
        if entry := store.find(native_key()):
            return _functions_of(entry[0])
        if not store.may_compile("C++ functions", native_key()):
            return None
        # What is loaded stays in memory when its file is removed.
        with TemporaryDirectory(prefix="optimi_func-", ignore_cleanup_errors=True) as place:
            path = _build(place)
            store.keep(native_key(), path, None)
            # Not every folder of temporary files is one that code can be loaded from.
            kept = store.find(native_key())
            return _functions_of(kept[0] if kept else path)


def _functions_of(path: str) -> Native:
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


def _is_called_here() -> bool:
    """Return True if `_build` calls the compiler, False if it lets Inductor do so."""
    return _IS_PLAIN and bool(store.compiler()[1])


def _build(place: str) -> str:
    """Compile the functions into a folder, or Inductor's, and return the library's path."""
    if not _is_called_here():
        from torch._inductor import config
        from torch._inductor.codecache import CppCodeCache

        with config.patch(cpp_cache_precompile_headers=False):
            return with_vectors(
                lambda: CppCodeCache.load(source(), extra_flags=FLAGS)._name
            )
    Path(place, "functions.cpp").write_text(source())
    path = f"{place}/functions.so"
    _call([store.compiler()[0], "functions.cpp", *_OPTIONS, *FLAGS, "-o", path], place)
    return path


def _call(command: list[str], place: str) -> None:
    """Run a compiler in a folder, and raise if it fails."""
    if _exits.is_set():
        raise RuntimeError("nothing is compiled any more: the interpreter exits")
    said = Path(place, "said")
    # A file, because a pipe is at its end when no fork of this process has it any more. A
    # group of its own, because the compiler calls others, which have to end with it.
    with said.open("wb") as file:
        compiler = Popen(
            command, cwd=place, stdin=DEVNULL, stdout=file, stderr=STDOUT, process_group=0
        )
    _compilers.append(compiler)
    try:
        compiler.wait()
    except BaseException:
        _end(compiler)
        compiler.wait()
        raise
    finally:
        _compilers.remove(compiler)
    if compiler.returncode:
        text = said.read_text(errors="replace")[:4000]
        raise RuntimeError(f"C++ compile error of {shlex.join(command)}: {text}")


def _end(compiler: "Popen[bytes]") -> None:
    with suppress(OSError):
        os.killpg(compiler.pid, signal.SIGTERM)


@cache
def native_key() -> str:
    """Return the key of the functions in the store, empty if they have none."""
    return store.key_of(store.machine(), name="C++ functions", functions=(source(), FLAGS))


def source() -> str:
    """Read list.cpp, with codecs.cpp in place of its #include.

    The key in the store is made of the text that is compiled, but of no files that this
    includes.
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
        # The compiler may know fewer instructions than the processor: try them out.
        return made()


# Threads that compile without trying vectors out, and Inductor's own function for others.
_unprobed: list[int] = []
_usual: list[Callable[[], list[Any]]] = []
_guard = threading.Lock()


@contextmanager
def unprobed_vectors() -> Generator[None]:
    """Compile for this processor's vector instructions without trying them out first.

    By default Inductor compiles and loads a test program for each instruction set and
    each extension, six on a processor with AMX, which takes a fifth of a first step
    (pytorch/pytorch#140970). A setting (environment TORCHINDUCTOR_VEC_ISA_OK) turns off
    those without extensions. The list of all of them has no setting, so in this thread it
    is made of what the processor says of itself, unless the user has set something.
    """
    from torch._inductor import config, cpu_vec_isa

    if config.cpp.vec_isa_ok is not None or not _vectors():
        usual = config.cpp.vec_isa_ok
        with config.patch({"cpp.vec_isa_ok": True if usual is None else usual}):
            yield
        return

    def listed() -> list[Any]:
        return _vectors() if get_ident() in _unprobed else _usual[0]()

    with _guard:
        if not _unprobed:
            _usual[:] = [cpu_vec_isa.valid_vec_isa_list]
            cpu_vec_isa.valid_vec_isa_list = listed
        _unprobed.append(get_ident())
    try:
        yield
    finally:
        with _guard:
            _unprobed.remove(get_ident())
            if not _unprobed:
                cpu_vec_isa.valid_vec_isa_list = _usual[0]


@cache
def _vectors() -> list[Any]:
    """Return Inductor's instruction sets that this x86 processor has, best first.

    On other processors it is empty, because Inductor does not try out theirs.
    """
    from torch._inductor import cpu_vec_isa as isas

    has = set(isas.x86_isa_checker())
    kinds = [type(x) for x in isas.supported_vec_isa_list if has.issuperset(str(x).split())]
    # Whether one is true is what Inductor tries out.
    own = {"__bool__": lambda self: True, "__hash__": isas.VecISA.__hash__}
    return [type(kind.__name__, (kind,), own)() for kind in kinds] if has else []
