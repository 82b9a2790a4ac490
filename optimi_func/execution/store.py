"""The store: machine code of list kernels that later processes load without a compiler.

An entry is a library as the compiler wrote it, then facts in JSON, their length, and the
SHA-256 of the entry's key with all of that. Its name is the key: the digest of everything
that decides the machine code, but for the compiler, which is a fact: where there is none,
the code of any is loaded, and elsewhere that of another compiler is made again. What is
not exactly as this module wrote it is not loaded, and the kernel is compiled.
"""

import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from ctypes import CDLL
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from optimi_func.core.checks import is_first
from optimi_func.core.torch_private import changed_settings

VARIABLE = "OPTIMI_FUNC_CACHE"  # a folder, or "0" for no store
QUIET = "OPTIMI_FUNC_QUIET"  # "1" for no line on stderr
LONGEST = 1 << 26  # bytes of an entry, which has some 70 KB
PATIENCE = 2.0  # seconds of waiting for another process without a word
LONGEST_WAIT = 300.0  # seconds for another process's lock
OLD = 3600.0  # seconds after which a file that is no entry is a dead process's
# Beginnings of variables that Inductor reads once, at its import, of those that it reads
# later, and of those that name a compiler or that compilers read.
_ONCE = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_INDUCTOR_", "AOT")
_LATER = ("ATEN_", "OMP_PREFIX", "CONDA_PREFIX")
_COMPILERS = (
    "CXX",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "COMPILER_PATH",
    "GCC_",
    "LIBRARY_PATH",
    "NIX_CFLAGS",
    "NIX_LDFLAGS",
)
# Lines of /proc/cpuinfo that tell what -march=native chooses.
_CPU = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ", "isa", "cpu\t")

_log = logging.getLogger("optimi_func")
_started = time.time()
# `warm --check` compiles nothing: it sets this to a dict, in which `may_compile` notes by
# name what would be compiled, and why.
missing: dict[str, str] | None = None


def folder() -> Path | None:
    """Return the folder of the store, or None if there is none."""
    if value := os.environ.get(VARIABLE):
        return None if value == "0" else Path(os.path.expanduser(value)).absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():  # to be ignored, says its specification
        # Not Path's, which raises where there is no home.
        home = Path(os.path.expanduser("~/.cache"))
    return home / "optimi_func" if home.is_absolute() else None


def find(key: str) -> tuple[str, Any] | None:
    """Load the library of a checked entry. Return its path and facts, or None."""
    entry = _current(key)
    if entry is None:
        return None
    # `keep` replaces an entry by a new file, so nothing writes to a file that is loaded.
    # The loader reads the library at the beginning of the entry, and ignores the rest.
    path = str(_path(key))
    try:
        CDLL(path)  # raises where files of this folder cannot be executed
    except OSError as error:
        _warn_once("loaded", "compiled steps in %s cannot be loaded", error)
        return None
    return path, entry["facts"]


def _warn_once(what: str, text: str, error: Exception) -> None:
    """Log why each process compiles, and what to do about it."""
    if is_first(what):
        advice = "each process compiles them, for some seconds a step: %s. Name a folder "
        advice += "that works by %s, or 0 to do without"
        _log.warning(f"{text}, so that {advice}", folder(), error, VARIABLE)


def _path(key: str) -> Path | None:
    place = folder()
    return None if place is None else place / f"{key}.so"


def _current(key: str) -> dict[str, Any] | None:
    """Return an entry's record if this machine's compiler, if any, made its library."""
    entry, here = _read(key), compiler()
    return entry if entry and (not here[1] or here == entry["compiler"]) else None


def _read(key: str) -> dict[str, Any] | None:
    """Return the record of an entry that is exactly as it was written, or None."""
    try:
        path = _path(key)
        if not key or path is None or not _is_own(path.parent, os.stat(path.parent)):
            return None
        # A link is refused, and a pipe would wait.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            fits = stat.S_ISREG(about.st_mode) and about.st_size < LONGEST
            text = file.read() if fits and _is_own(path, about) else b""
        text, digest = text[:-32], text[-32:]
        if digest != sha256(key.encode() + text).digest():
            return None
        end = -4 - int.from_bytes(text[-4:], "big")
        record = json.loads(text[end:-4])  # before 0.2 a list, or null
        return record if isinstance(record, dict) else None
    except (OSError, ValueError, RuntimeError):
        return None


def keep(key: str, library: str, facts: object) -> None:
    """Write an entry of a library, or leave it if that fails."""
    try:
        if not key or (place := _made()) is None:
            return
        for part in place.glob("[0-9a-f]" * 64 + ".so.*"):
            with suppress(FileNotFoundError):
                if part.lstat().st_mtime < time.time() - OLD:  # Its writer was killed.
                    part.unlink()
        words = json.dumps({"compiler": compiler(), "facts": facts}).encode()
        text = Path(library).read_bytes() + words + len(words).to_bytes(4, "big")
        handle, new = tempfile.mkstemp(dir=place, prefix=f"{key}.so.")
        try:
            with open(handle, "wb") as file:
                file.write(text + sha256(key.encode() + text).digest())
            os.replace(new, place / f"{key}.so")
        finally:
            Path(new).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        _warn_once("kept", "compiled steps are not kept in %s", error)


def _made() -> Path | None:
    """Return the store's folder, made now if new, or None if it is not this user's."""
    if (place := folder()) is None:
        return None
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place if _is_own(place, os.stat(place)) else None


@contextmanager
def alone(key: str) -> Generator[None]:
    """Wait while another process compiles an entry, else let others wait for this one.

    A process that dies releases its lock. Where nothing can be locked, all go on.
    """
    with ExitStack() as stack:
        with suppress(OSError, RuntimeError):
            if key and (place := _made()) and _current(key) is None:
                lock = FileLock(place / f"{key}.so.lock", LONGEST_WAIT, 0o600)
                try:
                    stack.enter_context(lock)
                except Timeout:
                    name = lock.lock_file
                    _log.info(
                        "%s is locked for %d s: a step is compiled", name, LONGEST_WAIT
                    )
        yield


def _is_own(path: Path, about: os.stat_result) -> bool:
    """Return True if nobody but this user may write there; else say so, once."""
    mode = stat.S_IMODE(about.st_mode)
    own = about.st_uid == os.geteuid() and not mode & 0o022
    if not own and is_first(str(path)):
        _log.warning(
            "%s is not used, so that steps are compiled in each process: it belongs to "
            "user %d with mode %o. It has to be yours, and writable for you alone",
            path,
            about.st_uid,
            mode,
        )
    return own


def unwritable() -> str:
    """Return why nothing can be kept, empty if it can."""
    try:
        if (place := _made()) is None:
            return "switched off, or not this user's alone"
        with tempfile.TemporaryFile(dir=place):
            return ""
    except (OSError, RuntimeError) as error:
        return str(error)


def tell(kept: bool) -> None:
    """Say on stderr, once in a process, that a step is compiled, and for how long."""
    quiet = os.environ.get(QUIET) not in (None, "", "0")
    if quiet or sys.stderr is None or not is_first("compiled"):
        return
    kept = kept and not unwritable()
    later = f"later processes load it from {folder()}" if kept else "as in each process"
    with suppress(OSError, ValueError):  # a pipe that nobody reads, or a closed file
        print(
            "optimi_func: compiling an optimizer step for this machine, about 5 s; "
            f"{later} ({QUIET}=1 turns this line off)",
            file=sys.stderr,
            flush=True,
        )


def key_of(ingredients: Mapping[str, object] | None, **more: object) -> str:
    """Return the key of an entry, empty if there is none."""
    if ingredients is None or None in more.values():
        return ""
    text = json.dumps({**ingredients, **more}, sort_keys=True, default=repr)
    return sha256(text.encode()).hexdigest()


def may_compile(name: str, key: str) -> bool:
    """Return True if a kernel is to be compiled, and say so; note it if not.

    Raise if it is, and no compiler runs: importing Inductor first would take seconds.
    """
    if missing is not None:
        missing[name] = "not in the store" if key else "compiled in each process"
        return False
    command, version, _ = compiler()
    if not version and not os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        raise RuntimeError(f"no C++ compiler {command!r} can be called")
    tell(bool(key))
    return True


def compiler() -> list[Any]:
    """Return command, version (empty if it does not run) and variables of the compiler."""
    # Another thread may be importing it just now.
    config = getattr(sys.modules.get("torch._inductor.config"), "cpp", None)
    command = os.environ.get("CXX", "g++") if config is None else config.cxx
    command = command if isinstance(command, str) else command[-1]
    version = _version(command, os.environ.get("PATH"))
    return [command, version, _environment(_COMPILERS)]


def machine() -> dict[str, object] | None:
    """Return what decides all machine code, but for the compiler, or None."""
    if not (processor := _processor()):
        return None
    settings = changed_settings()
    # Settings are made of the variables that there were when Inductor was imported.
    known = settings is None or _environment((*_ONCE, "CXX")) == _FIRST
    if not (known and (sources := _sources())):
        return None
    return {
        "torch": (torch.__version__, torch.version.git_version, torch.__config__.show()),
        "python": (sys.version, *os.uname()[4:], os.confstr("CS_GNU_LIBC_VERSION")),
        "sources": sources,
        "processor": processor,
        "environment": _environment(_ONCE + _LATER),
        "settings": [x for x in settings or [] if not x.startswith("cpp.cxx=")],
    }


def _environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    variables = {k: v for k, v in os.environ.items() if k.startswith(prefixes)}
    variables.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return variables


_FIRST = _environment((*_ONCE, "CXX"))


@cache
def _sources() -> str:
    """Return the digest of the package's sources, empty if they are not those in use."""
    root, digest = Path(__file__).parents[1], sha256()
    files = sorted([*root.rglob("*.py"), *root.rglob("*.cpp")])
    for path in files:
        if path.stat().st_ctime > _started:  # Another version has been loaded.
            return ""
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(text)} ".encode() + text)
    return digest.hexdigest() if Path(__file__) in files else ""


@cache
def _processor() -> list[str]:
    """Return the lines about the first processor that tell its instructions."""
    if sys.platform != "linux":
        return []
    with open("/proc/cpuinfo") as file:
        lines = file.read(1 << 14).split("\n\n")[0].splitlines()
    return [line for line in lines if line.startswith(_CPU)]


def forget_compilers() -> None:
    """Ask compilers for their versions again: one may have been missing for a moment."""
    _version.cache_clear()


@cache
def _version(name: str, _path: str | None) -> str:
    try:
        return subprocess.check_output([name, "--version"], text=True, timeout=60)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
