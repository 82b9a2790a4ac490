"""Bytes: what a user writes for them, and what of a tensor lies here."""

import re
from numbers import Real
from typing import Any

from torch import Tensor

from optimi_func._distributed import is_distributed, to_local

_UNITS = {
    **{"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")
# What CUDA's allocator rounds a block up to.
_CUDA_BLOCK = 512


def parse_size(name: str, size: Any) -> int:
    """Bytes from "24GB" (10^9), "16GiB" (2^30) or a number of bytes.

    Raises:
        TypeError, ValueError: What is no size, or none above 0.
    """
    allowed = 'allowed are sizes as "24GB" and "16GiB", and numbers of bytes'
    if isinstance(size, bool) or not isinstance(size, str | Real):
        raise TypeError(f"{name}={size!r}: {allowed}")
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        unit = None if found is None else _UNITS.get(found[2].upper())
        if found is None or unit is None:
            raise ValueError(f"{name}={size!r}: {allowed}")
        number = float(found[1]) * unit
    else:
        number = float(size)
    if not 1 <= number < float("inf"):
        raise ValueError(f"{name}={size!r} is no memory: {allowed}")
    return int(number)


def held(x: Tensor, ranks: int = 1) -> int:
    """Bytes of a tensor in one process.

    Args:
        x: Of a DTensor the local part counts.
        ranks: Processes that fully_shard divides it among, along its first dimension; the
            first of them has the most.
    """
    (part,) = to_local([x])
    if ranks == 1 or is_distributed(x) or not part.dim() or not part.numel():
        return part.nbytes
    rows = part.shape[0]
    return part.nbytes // rows * -(-rows // ranks)


def rounded(size: int, device: str) -> int:
    """Bytes that a device's allocator takes for so many."""
    return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK if device == "cuda" else size


def unit_of(size: int) -> tuple[str, int]:
    """The unit that suits a size, and its bytes."""
    return ("GB", 10**9) if size >= 10**8 else ("MB", 10**6)
