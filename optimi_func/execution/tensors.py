"""Facts about tensors: memory, layout and order of elements."""

import gc
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optimi_func.core.rule import Leaf
from optimi_func.core.storage import tensors_of
from optimi_func.core.torch_private import is_plain


def current_stream(device: torch.device) -> Any:
    """Return the CUDA stream that this thread launches on, or None."""
    # A fake tensor can be on a GPU that this build of torch does not support.
    built = device.type == "cuda" and torch.backends.cuda.is_built()
    return torch.cuda.current_stream(device) if built else None


def is_plainly_strided(x: Tensor) -> bool:
    """Return True if x is strided memory without a pending negation."""
    return x.layout == torch.strided and is_plain(x) and not x.is_neg()


def write_back(targets: Mapping[str, Tensor], new: Leaf) -> None:
    """Copy a step's results onto their targets, without those that are the target."""
    for name, result in tensors_of(new).items():
        if result is not targets[name]:
            targets[name].copy_(result)


@contextmanager
def uncollected() -> Generator[None]:
    """Switch the garbage collector off, which many new objects would start often."""
    collecting = gc.isenabled()
    try:  # before `disable`, or an interrupt in between would leave it switched off
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()
