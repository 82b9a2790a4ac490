"""The custom operation `optimi_func::update_`, which updates parameters within a graph.

If a graph contained the update itself, Inductor would compile a kernel for each shape. It
does not look into a custom operation. It places it where the gradients are ready and the
parameters have been read for the last time. The operation runs the kernels of ordinary
steps, which are compiled once.

The optimizer's state is not in the graph, because a forward cannot read it.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    any_torch_dispatch_mode_on_stack,
)

from optimi_func.core.rule import WHOLE_BATCH, Microbatch

# (indices of parameters, their gradients, their microbatches) -> None, in place
Update: TypeAlias = Callable[[Sequence[int], list[Tensor], list[Microbatch]], None]


@functools.cache
def read_before_written() -> None:
    """Make Inductor compute expressions that read a parameter before `update_` writes it.

    Inductor computes an elementwise expression where it is used. If a custom operation
    writes to its arguments, Inductor computes pending expressions that read them only after
    the operation is in its list (`torch._inductor.ir.MutationOutput`), so after the write.
    The gradient of one factor of a product would be the new value of the other.

    A change of this function needs another name of the operation, because Inductor's cache
    on disk does not depend on the lowering and would return old graphs.

    This sets the lowering of this one operation alone. Torch 2.13 to 2.15; no upstream
    issue is known. test_private_torch_is_there fails if a name is missing, and
    test_gradients_read_parameters_before_they_move if expressions are computed too late.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag

    layout = lowering.tag_to_layout_constraint(
        get_layout_constraint_tag(update_, with_default=True)
    )
    lowering.make_fallback(update_, layout_constraint=layout)
    call = lowering.lowerings[update_]

    def lower(*args: Any) -> object:
        for p in args[-1]:
            V.graph.mark_buffer_mutated(p.get_name())
        return call(*args)

    lowering.lowerings[update_] = lower


@contextmanager
def running(update: Update, params: list[Tensor]) -> Generator[None]:
    """Set the update that `update_` calls in the graphs of this thread."""
    token = _running.set((update, params))
    try:
        yield
    finally:
        _running.reset(token)


_running: ContextVar[tuple[Update, list[Tensor]]] = ContextVar("running")


def _update(
    after: Tensor,
    places: Sequence[int],
    grad_scale: Tensor | None,
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
) -> None:
    """Update parameters at this point of the graph, by the update that `running` sets.

    `after` is computed first, so that an error in it leaves everything unwritten.
    """
    update, owned = _running.get()
    # If the graph reads the old value of a parameter later, the compiler passes a copy, and
    # copies it into the parameter at the end. The copy then gets the new value here.
    copies = [
        (owned[i], owned[i].clone(), p)
        for i, p in zip(places, params)
        if p.data_ptr() != owned[i].data_ptr()
    ]
    # The compiler runs the first call of a graph under a dispatch mode.
    watched = any_torch_dispatch_mode_on_stack()
    with _disable_current_modes() if watched else nullcontext():
        microbatch = WHOLE_BATCH
        if grad_scale is not None:
            on_host = grad_scale.device.type == "cpu"
            scale = grad_scale.item() if on_host else grad_scale
            microbatch = WHOLE_BATCH._replace(grad_scale=scale)
        update(places, list(grads), [microbatch] * len(grads))
    for own, old, p in copies:
        p.copy_(own)
        own.copy_(old)


_library = torch.library.Library("optimi_func", "FRAGMENT")
_library.define(
    "update_(Tensor after, int[] places, Tensor? grad_scale, Tensor[] grads, "
    "Tensor(a!)[] params) -> ()"
)
_library.impl("update_", _update, "CompositeExplicitAutograd")
torch.library.register_fake("optimi_func::update_", lambda *_: None, lib=_library)
update_ = torch.ops.optimi_func.update_.default
