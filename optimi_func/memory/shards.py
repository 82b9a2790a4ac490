"""The peak of one process if fully_shard divides the model; gathered bytes are a guess."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from optimi_func.memory.replay import Handling, Param, Peak
from optimi_func.memory.trace import Trace, most_alive


def largest_unit(model: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the largest block, and of all parameters in no block.

    Blocks are the members of lists and sequences. fully_shard is usually applied to each of
    them, and last to the model.
    """
    units = [*_blocks(model), model]
    *blocks, whole = [sum(p.numel() for p in unit.parameters()) for unit in units]
    rest = max(0, whole - sum(blocks))
    return max(blocks, default=0) * dtype.itemsize, rest * dtype.itemsize


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        yield from module.children()
        return
    for child in module.children():
        yield from _blocks(child)


def sharded_peak(
    traced: Trace | None,
    params: Sequence[Param],
    handling: Handling,
    unit: tuple[int, int],
    ranks: int,
) -> Peak:
    """Return the peak in one of `ranks` processes; `unit` is from `largest_unit`."""
    block, rest = unit
    # Two blocks with their gradients are whole, the running and the prefetched one.
    # Parameters in no block are whole from forward to the end of backward.
    gathered = 2 * (2 * block + rest)
    gradients = sum(p.bytes for p in params)
    if handling.release:
        # Gradients are reduced and released block by block.
        sums = sum(p.numel for p in params) * handling.sum_bytes
        gradients = sums + max(block, rest) // ranks
    scratch = gathered + max((p.scratch for p in params), default=0)
    activations = None
    if traced is not None:
        owners = {e.block for e in traced.events if e.kind == "done"}
        activations = most_alive(e for e in traced.events if e.block not in owners)
    return Peak(gradients, activations, scratch, "backward")
