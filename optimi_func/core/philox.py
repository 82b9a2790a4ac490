"""Random numbers as a function of a counter: Philox4x32-10 in int64 tensors.

Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; also
the generator of torch's CUDA kernels. A counter of four 32-bit words and a key of two make
four random words, so that there is no state to advance.
"""

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from optimi_func.core.distributed import distribute_like
from optimi_func.core.lists import grouped
from optimi_func.core.pairs import as_real
from optimi_func.core.rule import Scalar

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
_WORD = 0xFFFFFFFF
# Places of maps are counted from here, and the last is that of first values.
_MAPS, FIRST = 1 << 31, (1 << 31) - 1
_BITS = 1 << 31  # in the last word of counters whose numbers are no normal ones
SLICE = 1 << 14  # counters


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four random 32-bit words for each counter; int64 tensors that broadcast."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(a, 0xD2511F53)
        high1, low1 = _multiply(c, 0xCD9E8D57)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return a, b, c, d


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of two words."""
    # The whole product needs 64 bits, and compilers assume that signed ones do not
    # overflow, so it is computed in halves.
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & _WORD


class Noise(NamedTuple):
    """Random numbers of a step for a leaf, which are made when they are read.

    They are standard normal and of the dtype of the arithmetic (None), or 16 random bits
    in an int32. `p` is the parameter, which may be distributed, at a place of its tree.
    """

    seed: Scalar
    step: Scalar
    place: int
    p: Tensor
    dtype: torch.dtype | None = None


def drawn(given: Sequence[Tensor | Noise], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors as they are, and draw noise, like p or as real pairs of its numbers.

    What has one seed and one step is drawn together.
    """
    noise = [x for x in given if isinstance(x, Noise)]
    found: dict[int, Tensor] = {}
    for (seed, step, own), rows in grouped(noise, itemgetter(0, 1, 4)).items():
        kind = own or dtype
        wholes: dict[int, Tensor] = {}
        for x in rows:
            shape = as_real(x.p).shape
            wholes[x.place] = torch.empty(shape, dtype=kind, device=x.p.device)
        first = min(wholes)
        tensors = [wholes.get(i) for i in range(first, max(wholes) + 1)]
        new = normals(_integer(seed), _integer(step), tensors, first)
        for x in rows:
            found[id(x)] = distribute_like(x.p, cast(Tensor, new[x.place - first]))
    return [found[id(x)] if isinstance(x, Noise) else x for x in given]


def _integer(x: Scalar, device: torch.device | str = "cpu") -> Tensor:
    if isinstance(x, Tensor):
        return x.detach().to(device, torch.int64)
    return torch.full((), x, dtype=torch.int64, device=device)


def normals(
    seed: Tensor, step: Tensor, tensors: list[Tensor | None], first: int = 0
) -> list[Tensor | None]:
    """Return standard normal tensors like the given ones (Box & Muller 1958).

    Those of int32 have 16 random bits.

    They depend on the place in the list, counted from `first`, not on the other tensors,
    which may be None. There is one draw for each dtype and device, so that a graph does not
    grow with the list. The seed, the stream, and the step, its part, are 0-d int64 from 0.
    """
    noise: list[Tensor | None] = [None] * len(tensors)
    present = [(i, x) for i, x in enumerate(tensors) if x is not None]
    kinds = grouped(present, lambda row: (row[1].dtype, row[1].device))
    for (dtype, device), rows in kinds.items():
        each = 4 if dtype.is_floating_point else 8  # numbers that four words make
        blocks = [-(-x.numel() // each) for _, x in rows]
        counted = [torch.arange(n, dtype=torch.int64, device=device) for n in blocks]
        within = torch.cat(counted)
        pairs = zip(rows, blocks)
        which = torch.cat([torch.full_like(within[:n], i + first) for (i, _), n in pairs])
        stream, now = seed.to(device), step.to(device)
        key = stream & _WORD, stream >> 32
        if dtype.is_floating_point:
            drawn = _bell(philox((within, which, now & _WORD, now >> 32), key), dtype)
        else:
            # The temporaries of a slice are in a cache. A graph has one for all.
            size = within.numel() if torch.compiler.is_compiling() else SLICE
            slices = zip(within.split(size or 1), which.split(size or 1))
            last = (now >> 32) + _BITS
            drawn = torch.cat(
                [_halves(philox((a, b, now & _WORD, last), key)) for a, b in slices]
            )
        for (i, x), z in zip(rows, drawn.split([each * n for n in blocks])):
            noise[i] = z[: x.numel()].reshape(x.shape)
    return noise


def normal_of(
    seed: Scalar, step: Scalar, place: int | Tensor, like: Tensor
) -> Callable[[Sequence[int]], Tensor]:
    """Return `normal(shape)`, of which each call draws other numbers than `normals` too."""
    used = 0

    def normal(shape: Sequence[int]) -> Tensor:
        nonlocal used
        count, start, device = math.prod(shape), used, like.device
        if device.type == "meta":  # where each operation takes 1 ms
            return like.new_empty(shape)
        used += (count + 3) // 4
        within = torch.arange(start, used, dtype=torch.int64, device=device)
        which = torch.zeros_like(within) + place + _MAPS
        stream, now = _integer(seed, device), _integer(step, device)
        counter = (within, which, now & _WORD, now >> 32)
        z = _bell(philox(counter, (stream & _WORD, stream >> 32)), like.dtype)
        return z[:count].reshape(shape)

    return normal


def _bell(words: Words, dtype: torch.dtype) -> Tensor:
    """Return four normal numbers for each four words, in a flat tensor."""
    # 0.5 avoids 0, whose logarithm is not finite.
    u = [(word.to(dtype) + 0.5) * 2.0**-32 for word in words]
    parts: list[Tensor] = []
    for radius, angle in ((u[0], u[1]), (u[2], u[3])):
        r, phi = (-2.0 * radius.log()).sqrt(), 2.0 * math.pi * angle
        parts += [r * phi.cos(), r * phi.sin()]
    return torch.stack(parts, dim=-1).flatten()


def _halves(words: Words) -> Tensor:
    """Return eight numbers of 16 bits for each four words, in a flat tensor."""
    parts = [half for x in words for half in (x & 0xFFFF, x >> 16)]
    return torch.stack(parts, dim=-1).flatten().to(torch.int32)
