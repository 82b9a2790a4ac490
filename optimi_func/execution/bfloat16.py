"""Faster C++ for the kernels of bfloat16 tensors on x86, with the same bits.

Inductor's C++ calls at::vec, which converts between bfloat16 and float32 with many more
instructions than the processor needs. cpp/bfloat16.cpp has faster versions of these
functions, and compilers read it before the code that Inductor generated.
"""

import logging
import os
import platform
import shlex
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

HEADER = Path(__file__).with_name("cpp") / "bfloat16.cpp"
# Inductor has no setting for additional flags of the compiler, but it writes the value of
# this one into the command line as it is.
_FLAG = "enable_floating_point_contract_flag"
_log = logging.getLogger("optimi_func")
_failed: list[str] = []  # why the header is not used in this process


def header_options(dtypes: set[torch.dtype], elementwise: bool) -> dict[str, object]:
    """Return options of Inductor by which compilers read cpp/bfloat16.cpp.

    Args:
        dtypes: The dtypes of the kernel's tensors. Without bfloat16 there are no options.
        elementwise: True if the kernel adds up no elements, so that their order in a vector
            does not matter.
    """
    from torch._inductor import config

    x86 = platform.machine() in ("x86_64", "AMD64") and os.name != "nt"
    if torch.bfloat16 not in dtypes or not x86 or _failed:
        return {}
    if not hasattr(config.cpp, _FLAG):
        report(f"torch {torch.__version__} has no setting {_FLAG!r}")
        return {}
    # Inductor's caches compare flags, but not the files that these name.
    flags = f" -include {shlex.quote(str(HEADER))} -DOPTIMI_DIGEST={_digest()}"
    if elementwise and dtypes == {torch.bfloat16}:
        flags += " -DOPTIMI_BFLOAT16_ONLY"
    return {f"cpp.{_FLAG}": getattr(config.cpp, _FLAG) + flags}


def is_compiler_error(error: Exception) -> bool:
    """Return True if the C++ compiler refused a source, perhaps because of the header."""
    return "C++ compile error" in str(error)


def report(cause: object) -> None:
    """Do without the header from now on in this process, and say so once."""
    if not _failed:
        _failed.append(str(cause))
        _log.warning(
            "bfloat16 steps on this CPU take up to twice as long as they could: %s cannot "
            "be used with torch %s and this compiler. The results are the same. Use torch "
            "2.13 and g++ 12 or newer, or report this error: %s",
            HEADER.name,
            torch.__version__,
            cause,
        )


@cache
def _digest() -> str:
    return sha256(HEADER.read_bytes()).hexdigest()[:16]
