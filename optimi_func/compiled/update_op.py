"""The update of some parameters as one operation that a graph can hold.

Inductor would write every leaf's update anew into a graph that holds the pipeline itself:
as many kernels to compile as there are shapes. It takes this operation as it is, puts it
where its gradients are ready and its parameters have been read for the last time, and
what runs behind it are the kernels of every other executor, compiled once.

Only gradients and parameters pass through the graph. The optimizer's state is nothing that
a forward could read: it stays with whoever runs the graph.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    any_torch_dispatch_mode_on_stack,
)

# (indices of parameters, their gradients, a factor on these or None) -> None, in place
Update: TypeAlias = Callable[[Sequence[int], list[Tensor], Tensor | None], None]


def update_(
    after: Tensor,
    places: list[int],
    grad_scale: Tensor | None,
    grads: list[Tensor],
    params: list[Tensor],
) -> None:
    """Have the update of `running` update these parameters, here in the graph.

    Args:
        after: What has to be computed first: an error there finds nothing written.
        places: Where the parameters stand among those of the step.
        grad_scale: What the gradients are scaled by, 0-d; None for 1.
        grads: A gradient for each.
        params: The parameters; written.
    """
    torch.ops.optimi_func.update_(after, places, grad_scale, grads, params)


@functools.cache
def read_before_written() -> None:
    """Have Inductor compute what reads a parameter before the update that writes to it.

    Inductor computes an elementwise expression where it is used. For an operation of one's
    own that writes to its arguments it does so too late: it computes what has still to
    read them once the operation is in its list (`torch._inductor.ir.MutationOutput`), and
    so after the write. The gradient of one factor of a product would be the new value of
    the other.

    Inductor's cache on disk does not know how an operation is lowered: who changes this
    function gives the operation another name, or old graphs go on to be found.

    This sets Inductor's lowering of this one operation, which nobody else has; all others
    stay as they are. Torch 2.11 to 2.15; no upstream issue is known. A torch without these
    names fails in test_private_torch_is_there, one that computes too late again in
    test_gradients_read_parameters_before_they_move.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag

    update = torch.ops.optimi_func.update_.default
    layout = lowering.tag_to_layout_constraint(
        get_layout_constraint_tag(update, with_default=True)
    )
    # The lowering that Inductor gives every operation that it has no code for.
    lowering.make_fallback(update, layout_constraint=layout)
    call = lowering.lowerings[update]

    def lower(*args: Any) -> Any:
        for p in args[-1]:
            V.graph.mark_buffer_mutated(p.get_name())
        return call(*args)

    lowering.lowerings[update] = lower


@contextmanager
def running(update: Update, params: list[Tensor]) -> Generator[None]:
    """Within, `update_` in a graph that this thread runs calls `update`."""
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
    del after
    update, owned = _running.get()
    # Where the graph reads a parameter's old value after this, the compiler passes a copy,
    # which it copies into the parameter at the end: until then the parameter keeps its old
    # value, and the copy gets the new one.
    copies = [
        (owned[i], owned[i].clone(), p)
        for i, p in zip(places, params)
        if p.data_ptr() != owned[i].data_ptr()
    ]
    if any_torch_dispatch_mode_on_stack():
        # The first call of a graph is watched by a dispatch mode of the compiler's own.
        with _disable_current_modes():
            update(places, list(grads), grad_scale)
    else:
        update(places, list(grads), grad_scale)
    for own, old, p in copies:
        p.copy_(own)
        own.copy_(old)


def _trace(*arguments: Any) -> None:
    """The operation on shapes alone: it returns nothing."""


_library = torch.library.Library("optimi_func", "FRAGMENT")
_library.define(
    "update_(Tensor after, int[] places, Tensor? grad_scale, Tensor[] grads, "
    "Tensor(a!)[] params) -> ()"
)
_library.impl("update_", _update, "CompositeExplicitAutograd")
torch.library.register_fake("optimi_func::update_", _trace, lib=_library)
