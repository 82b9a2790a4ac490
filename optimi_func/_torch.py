"""Every use of a private torch API outside compiled/, a small function each.

tests/test_public.py fails where a torch no longer has what these need.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward now running has finished without an error."""
    Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """A number that tells one running backward from another; -1 outside of any."""
    return torch._C._current_graph_task_id()


def has_accumulate_hooks(p: Tensor) -> bool:
    """Whether anybody registered a post-accumulate-grad hook on p."""
    return bool(getattr(p, "_post_accumulate_grad_hooks", None))
