"""What a process needs of a model that fully_shard divides; what it gathers is a guess."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from optimi_func.memory.replay import How, Param, Peak
from optimi_func.memory.trace import Trace


def largest_unit(model: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Elements of the largest block and of what is in none, as bytes of a dtype.

    Blocks are the members of lists and sequences, to which fully_shard is applied one by
    one as a rule; it is applied to the model last.
    """
    blocks = [_elements(block) for block in _blocks(model)]
    most = max(blocks, default=0)
    rest = max(0, _elements(model) - sum(blocks))
    return most * dtype.itemsize, rest * dtype.itemsize


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        yield from module.children()
        return
    for child in module.children():
        yield from _blocks(child)


def _elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def sharded_peak(
    traced: Trace | None,
    params: Sequence[Param],
    how: How,
    unit: tuple[int, int],
    ranks: int,
) -> Peak:
    """The most that a process has at once beside its parts of parameters and state.

    Args:
        traced: What forward and backward take, if it is known.
        params: Of each parameter the part that is here.
        how: What becomes of gradients.
        unit: As `largest_unit` has it.
        ranks: Processes that the parameters are divided among.
    """
    block, rest = unit
    # The block that runs and the one that comes, with their gradients; what is in no block
    # is there from forward to the end of backward.
    gathered = 2 * (2 * block + rest)
    gradients = sum(p.bytes for p in params)
    if how.release:
        # Reduced a block at a time.
        sums = sum(p.numel for p in params) * how.sum_bytes
        gradients = sums + max(block, rest) // ranks
    scratch = gathered + max((p.scratch for p in params), default=0)
    return Peak(gradients, _activations(traced), scratch, "backward")


def _activations(traced: Trace | None) -> int:
    """The most that forward and backward have beside gradients of parameters."""
    if traced is None:
        return 0
    owners = {e.block for e in traced.events if e.kind == "done"}
    most = now = 0
    for e in traced.events:
        if e.block not in owners:
            now += {"taken": 1, "freed": -1}.get(e.kind, 0) * e.bytes
            most = max(most, now)
    return most
