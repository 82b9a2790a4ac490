"""What `train_step` refuses before it has seen a batch."""

import inspect
from numbers import Real
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def check_arguments(
    model: Any, loss_fn: Any, accumulate: Any, clip: Any, donate: Any
) -> None:
    """Refuse arguments that no step could honour, by name and value."""
    if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
        raise TypeError(
            "model_or_fn is torch.compile's, and this step compiles the model itself: pass "
            "the module that you gave to torch.compile (its parameters are the same)"
        )
    for name, x in (("model_or_fn", model), ("loss_fn", loss_fn)):
        if not callable(x):
            raise TypeError(f"{name}={x!r}: allowed are callables")
    if not _takes_two(loss_fn):
        raise TypeError(
            f"loss_fn={loss_fn!r}: allowed is a function of two arguments, "
            "loss_fn(output, batch)"
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"accumulate={accumulate!r}: allowed are integers, at least 1")
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate}: allowed are integers, at least 1")
    if clip is not None:
        if isinstance(clip, bool) or not isinstance(clip, Real):
            raise TypeError(
                f"clip_global_norm={clip!r}: allowed are positive numbers and None"
            )
        if not float(clip) > 0.0:
            raise ValueError(
                f"clip_global_norm={clip}: allowed are positive numbers and None"
            )
    if not isinstance(donate, bool):
        raise TypeError(f"donate={donate!r}: allowed are True and False")


def check_single(module: torch.nn.Module) -> None:
    """Refuse a module whose gradients others wait for.

    Only the wrapper tells: the module inside of one, passed by itself, is trained as one
    process alone would.
    """
    if any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        raise ValueError(
            "model_or_fn is trained by DistributedDataParallel, which this step would not "
            "ask to reduce gradients: train it by an ordinary loop"
        )


def _takes_two(function: Any) -> bool:
    """Whether it can be called with two arguments, as far as its signature says."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True  # a builtin without one
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True
