"""Facts about tensors: memory, layout and order of elements."""

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optimi_func.core.rule import Leaf, Rule
from optimi_func.core.storage import entry_of, state_of
from optimi_func.core.torch_private import is_plain


def is_capturing(device: torch.device) -> bool:
    """Return True if launches of this thread are captured in a CUDA graph."""
    built = device.type == "cuda" and torch.backends.cuda.is_built()
    return built and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> Any:
    """Return the CUDA stream that this thread launches on, or None."""
    # A fake tensor can be on a GPU that this build of torch does not support.
    built = device.type == "cuda" and torch.backends.cuda.is_built()
    return torch.cuda.current_stream(device) if built else None


def is_plainly_strided(x: Tensor) -> bool:
    """Return True if x is strided memory without a pending negation."""
    return x.layout == torch.strided and is_plain(x) and not x.is_neg()


def foreach_add_(tensors: list[Tensor], number: float | list[float]) -> None:
    """Add one number to all tensors, or a list's numbers to one tensor each."""
    if tensors:
        torch._foreach_add_(tensors, number)


def flat_leaf(leaf: Leaf) -> list[Tensor]:
    """Return the tensors that a step writes: parameter, state, compensation."""
    return [leaf.p, *entry_of(leaf.state, leaf.comp).values()]


def write_back(targets: Sequence[Tensor], new: Leaf) -> None:
    """Copy a step's results onto their targets, without those that are the target."""
    for target, result in zip(targets, flat_leaf(new)):
        if result is not target:
            target.copy_(result)


def leaf_of(rule: Rule, codes: tuple[bool, ...], tensors: Sequence[Tensor]) -> Leaf:
    """Make a leaf of a parameter, its state's tensors and, if it has one, compensation."""
    p, *rest = tensors
    left = iter(rest)
    state = state_of(rule.state, left, codes or (False,) * len(rule.state._fields))
    return Leaf(p, state, next(left, None))


@contextmanager
def uncollected() -> Generator[None]:
    """Switch the garbage collector off, which many new objects would start often."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
