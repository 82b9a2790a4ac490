"""Random numbers of a counter in plain integers, which references draw by themselves.

Philox4x32-10 (Salmon et al., SC 2011) and the method of Box and Muller, as the papers have
them. `transforms/test_transforms.py` compares them with published words.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = 2**32 - 1


def plain_philox(counter: Any, key: Any) -> list[Any]:
    """Return four words for a counter of four: Python's integers, or arrays of uint64."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & WORD,
            (first >> 32) ^ counter[3] ^ key[1],
            first & WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


def plain_normals(seed: int, step: int, place: int, count: int) -> Tensor:
    """Return so many normal numbers of a parameter's place, in float64."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    rest = [np.full_like(blocks, x) for x in (place, step & WORD, step >> 32)]
    words = plain_philox([blocks, *rest], [seed & WORD, seed >> 32])
    u = [(torch.from_numpy(x.astype(np.float64)) + 0.5) / 2**32 for x in words]
    parts: list[Tensor] = []
    for a, b in ((u[0], u[1]), (u[2], u[3])):
        r = torch.sqrt(-2 * torch.log(a))
        parts += [r * torch.cos(2 * math.pi * b), r * torch.sin(2 * math.pi * b)]
    return torch.stack(parts, -1).flatten()[:count]
