"""Every use of a private torch API outside compiled/, a small function each.

tests/test_public.py fails where a torch no longer has what these need.
"""

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable, function, graph
from torch.nn.parallel import DistributedDataParallel

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, left out of any graph: torch.compiler.disable, at the first call.

    That takes a second, to import the compiler.
    """
    return _disable_dynamo(function)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward now running has finished without an error.

    It is dropped, and with it whatever it holds, if that backward fails. It comes after
    what others wanted called during the backward: fully_shard reduces the last gradients
    there.
    """
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def backward_id() -> int:
    """A number that tells one running backward from another; -1 outside of any."""
    return torch._C._current_graph_task_id()


class Unknown:
    """An outer backward that could not be found."""


def outer_loss() -> Tensor | Unknown | None:
    """What the outermost backward began with, if this one was started from inside it.

    Reentrant checkpointing starts one within a Function's backward, others do in hooks.
    Which is the outer one no public name tells; the frames do. None in a backward of its
    own.
    """
    apply = function.BackwardCFunction.apply.__code__
    engine = graph._engine_run_backward.__code__
    calls = _calls(sys._getframe(), (apply, engine))
    while calls and calls[0][0] is apply:
        # Not the engine: fully_shard reduces gradients in a Function's backward.
        del calls[0]
    if len(calls) < 2:
        return None
    losses = [loss for code, loss in calls if code is engine]
    if len(losses) < 2:
        # A device's own thread runs the inner backward, the user's waits in the outer.
        stacks = sys._current_frames()
        del stacks[threading.get_ident()]
        others = [_calls(stack, (engine,)) for stack in stacks.values()]
        losses = next(([loss for _, loss in found] for found in others if found), [])
    loss = losses[-1] if losses else None
    return loss if isinstance(loss, Tensor) else Unknown()


def _calls(
    frame: FrameType | None, codes: tuple[CodeType, ...]
) -> list[tuple[CodeType, Any]]:
    """The running calls of some functions, with their first arguments, innermost first.

    No frame is kept: it would keep everything in it alive.
    """
    found: list[tuple[CodeType, Any]] = []
    while frame is not None:
        if frame.f_code in codes:
            first = frame.f_locals[frame.f_code.co_varnames[0]]
            first = first[0] if isinstance(first, tuple | list) else first
            found.append((frame.f_code, first))
        frame = frame.f_back
    return found


def in_compiled_autograd() -> bool:
    """Whether torch.compile runs the backward (torch._dynamo.config.compiled_autograd)."""
    from torch._dynamo import compiled_autograd

    return (
        compiled_autograd.compiled_autograd_enabled
        or compiled_autograd.in_compiled_autograd_region
    )


def has_fresh_scaler() -> bool:
    """Whether a GradScaler has scaled a loss and not updated yet: the first of its run.

    Nothing leads from a loss to its scaler, and one in the middle of its run may be
    somebody else's.
    """
    return any(
        x.is_enabled()
        and x._scale is not None
        and x._scale.item() == x._init_scale
        and x._get_growth_tracker() == 0
        and not x._per_optimizer_states
        for x in _alive(GradScaler)
    )


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
    wrappers = _alive(DistributedDataParallel)
    return any(q is p for wrapper in wrappers for q in wrapper.parameters())


def _alive(kind: type[T]) -> list[T]:
    # By the type, as isinstance asks objects, some of which answer with side effects.
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, a 0-d tensor of at least float32."""
    kinds: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        kinds.setdefault(torch.promote_types(x.dtype, torch.float32), []).append(i)
    found: dict[int, Tensor] = {}
    for wide, places in kinds.items():
        some = torch._foreach_norm([tensors[i] for i in places], 2, dtype=wide)
        found.update(zip(places, some))
    return [found[i] for i in range(len(tensors))]


def transform_level() -> int:
    """How many transformations of torch.func are active; 0 outside of any."""
    return _functorch.maybe_current_level() or 0


def level_of(x: Tensor) -> int:
    """Which of them x belongs to, counted from 1; -1 where to none."""
    return _functorch.maybe_get_level(x)


def no_transforms() -> AbstractContextManager[Any]:
    """Suspends all of them."""
    return temporarily_clear_interpreter_stack()
