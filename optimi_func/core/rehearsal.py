"""Rehearsals: optimizer steps on the meta device that show what a real device would do.

Meta tensors have shapes and no memory, so a step on them costs nothing, whatever the size
of the model. In a rehearsal, the functions that choose how a step runs are told the device
that "meta" stands for. No kernel is compiled.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_device: ContextVar[torch.device | None] = ContextVar("device", default=None)


@contextmanager
def rehearse(device: str) -> Generator[None]:
    """Let the meta device stand for another one, of which this machine may have none."""
    token = _device.set(torch.device(device))
    try:
        yield
    finally:
        _device.reset(token)


def is_rehearsed(device: torch.device) -> bool:
    """Return True if a device is "meta" and stands for another one."""
    return device.type == "meta" and _device.get() is not None


def device_type(device: torch.device) -> str:
    """Return the type of a device, or of the one that it stands for."""
    place = _device.get() if device.type == "meta" else None
    return (place or device).type
