"""Every use of a private torch API outside compiled/, a small function each.

tests/test_public.py fails where a torch no longer has what these need.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor, distributed
from torch.autograd import Variable, function, graph
from torch.nn.parallel import DistributedDataParallel


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward now running has finished without an error.

    It is dropped, and with it whatever it holds, if that backward fails.
    """
    Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """A number that tells one running backward from another; -1 outside of any."""
    return torch._C._current_graph_task_id()


class Unknown:
    """An outer backward that could not be found."""


def outer_loss() -> Tensor | Unknown | None:
    """What the outermost backward began with, if this one was started from inside it.

    Reentrant checkpointing starts one within a Function's backward. Which is the outer
    one no public name tells; the frames do. None in a backward of its own.
    """
    here = sys._getframe()
    apply = function.BackwardCFunction.apply.__code__
    if not any(frame.f_code is apply for frame in _below(here)):
        return None
    engine = graph._engine_run_backward.__code__
    stacks = [here, *[f for f in sys._current_frames().values() if f is not here]]
    # A device's own thread runs the inner backward, the user's waits in the outer one.
    for stack in stacks:
        runs = [frame for frame in _below(stack) if frame.f_code is engine]
        if len(runs) > (stack is here):
            loss = runs[-1].f_locals["t_outputs"][0]
            return loss if isinstance(loss, Tensor) else Unknown()
    return Unknown()


def _below(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def has_accumulate_hooks(p: Tensor) -> bool:
    """Whether anybody registered a post-accumulate-grad hook on p."""
    return bool(getattr(p, "_post_accumulate_grad_hooks", None))


def in_ddp(p: Tensor) -> bool:
    """Whether a DistributedDataParallel reduces p's gradients.

    It leaves no mark on what it wraps: every object alive is asked, where there is a
    process group at all.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    wrappers = [x for x in gc.get_objects() if type(x) is DistributedDataParallel]
    return any(q is p for wrapper in wrappers for q in wrapper.parameters())


def norms(tensors: list[Tensor], order: float) -> list[Tensor]:
    """The vector norm of each tensor, a 0-d tensor of at least float32."""
    kinds: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        kinds.setdefault(torch.promote_types(x.dtype, torch.float32), []).append(i)
    found: dict[int, Tensor] = {}
    for wide, places in kinds.items():
        some = torch._foreach_norm([tensors[i] for i in places], order, dtype=wide)
        found.update(zip(places, some))
    return [found[i] for i in range(len(tensors))]
