"""The update of some parameters as one operation that a graph can hold.

Inductor would write every leaf's update anew into a graph that holds the pipeline itself:
as many kernels to compile as there are shapes. It takes this operation as it is, puts it
where its gradients are ready and its parameters have been read for the last time, and
what runs behind it are the kernels of every other executor, compiled once.

Only gradients and parameters pass through the graph. The optimizer's state is nothing that
a forward could read: it stays with whoever runs the graph.
"""

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

# (places of parameters, their gradients, what those are scaled by): updates them in place.
Update: TypeAlias = Callable[[Sequence[int], list[Tensor], Tensor | None], None]


def update_(
    places: list[int], gain: Tensor | None, grads: list[Tensor], params: list[Tensor]
) -> None:
    """Have the update of `running` update these parameters, here in the graph.

    Args:
        places: Where the parameters stand among those of the step.
        gain: What the gradients are scaled by, 0-d; None for 1.
        grads: A gradient for each.
        params: The parameters; written.
    """
    torch.ops.optimi_func.update_(places, gain, grads, params)


@contextmanager
def running(update: Update, params: list[Tensor]) -> Generator[None]:
    """Run a graph that holds `update_`: what it means, for this thread, for now."""
    token = _running.set((update, params))
    try:
        yield
    finally:
        _running.reset(token)


_running: ContextVar[tuple[Update, list[Tensor]]] = ContextVar("running")


def _update(
    places: Sequence[int],
    gain: Tensor | None,
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
) -> None:
    update, owned = _running.get()
    if any_torch_dispatch_mode_on_stack():
        # The first call of a graph is watched by a dispatch mode of the compiler's own.
        with _disable_current_modes():
            update(places, list(grads), gain)
    else:
        update(places, list(grads), gain)
    for i, p in zip(places, params):
        # The compiler may hand in copies, and copy them back later.
        if p.data_ptr() != owned[i].data_ptr():
            p.copy_(owned[i])


def _trace(*arguments: Any) -> None:
    """Nothing comes out of it, whatever the shapes."""


_library = torch.library.Library("optimi_func", "FRAGMENT")
_library.define(
    "update_(int[] places, Tensor? gain, Tensor[] grads, Tensor(a!)[] params) -> ()"
)
_library.impl("update_", _update, "CompositeExplicitAutograd")
torch.library.register_fake("optimi_func::update_", _trace, lib=_library)
