"""Gradients that wait on one CUDA stream and are used on another.

Hooks run on the streams of autograd's nodes, the end of a backward on the caller's. The
allocator hands a tensor's memory out again as soon as the host has dropped it, for work on
the stream that it was made on: work on another one has to be told to it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from optimi_func._distributed import to_local


def current_stream(device: torch.device) -> Any:
    """The stream that this thread launches on; None where there are none."""
    # A tensor that only pretends to be on a GPU has no stream either.
    built = device.type == "cuda" and torch.backends.cuda.is_built()
    return torch.cuda.current_stream(device) if built else None


def wait_for(streams: Iterable[Any], device: torch.device) -> None:
    """Let this thread's stream begin after what has been launched on others."""
    here = current_stream(device)
    for stream in set(streams):
        if stream is not None and stream != here:
            here.wait_stream(stream)


def record(tensors: list[Tensor]) -> None:
    """Tell the allocator that this thread's stream uses tensors, made on whichever."""
    for x in to_local([x for x in tensors if x.is_cuda]):
        stream = current_stream(x.device)
        if stream is not None:
            x.record_stream(stream)
