"""A forward and backward on tensors without memory, to see what a step will meet.

Tells what no graph says afterwards: which parameters the loss does not reach (a graph has
zeros for their gradients, where a step must leave them alone), which buffers are written,
and whether the loss is one. Nothing is computed and no random number drawn.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimi_func._bound import check_loss

# (params, buffers, batch) -> (loss, aux, buffers afterwards); the lists are flat.
Program = Callable[[list[Tensor], list[Tensor], Any], tuple[Any, Any, list[Tensor]]]


class DryRun(NamedTuple):
    """What a dry run found."""

    used_params: tuple[int, ...]  # the parameters that the loss reaches
    mutated_buffers: tuple[int, ...]  # the buffers that the forward changes
    aliased_aux: tuple[int, ...]  # the leaves of aux that are parameters, or parts of them
    aux: pytree.TreeSpec | None  # of what loss_fn returned beside the loss


def dry_run(
    program: Program, params: list[Tensor], buffers: list[Tensor], batch: Any
) -> DryRun:
    """Run a program on shapes alone.

    Raises:
        TypeError: A loss that is not a floating tensor, or something beside it that is
            not a tensor.
        ValueError: A loss that is not a scalar, or depends on no parameter.
        Exception: Whatever the program raised.
    """
    mode, convert = _fake_mode()
    with mode, torch.enable_grad():
        leaves = [convert(p.detach()).requires_grad_() for p in params]
        given = [convert(b.detach()) for b in buffers]
        batch = pytree.tree_map_only(Tensor, lambda x: convert(x.detach()), batch)
        with _Writes() as writes:
            loss, aux, after = program(leaves, list(given), batch)
        check_loss(loss)
        if not loss.requires_grad:
            raise ValueError("loss_fn returned a loss that depends on no parameter")
        grads: Any = torch.autograd.grad(loss, leaves, allow_unused=True)
    items, spec = ([], None) if aux is None else pytree.tree_flatten(aux)
    for x in items:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"loss_fn returned {x!r} beside the loss: allowed are trees of tensors"
            )
    mutated_buffers = [
        i
        for i, (old, new) in enumerate(zip(given, after))
        if new is not old or writes.saw(old)
    ]
    used_params = [i for i, g in enumerate(grads) if g is not None]
    memory = {p.untyped_storage()._cdata for p in leaves}
    aliased_aux = [i for i, x in enumerate(items) if x.untyped_storage()._cdata in memory]
    return DryRun(tuple(used_params), tuple(mutated_buffers), tuple(aliased_aux), spec)


class _Writes(TorchDispatchMode):
    """Records the memory of every tensor that an operation writes to."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation as it stands."""
        kwargs = kwargs or {}
        # These write to the running statistics, and their schemas do not say so.
        silent = "batch_norm" in func.name()
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if silent or (argument.alias_info and argument.alias_info.is_write):
                for x in pytree.tree_leaves(value):
                    if isinstance(x, Tensor):
                        self._storages.append(x.untyped_storage())
        return func(*args, **kwargs)

    def saw(self, x: Tensor) -> bool:
        """Whether x was written to, directly or through a view."""
        own = x.untyped_storage()._cdata
        return any(storage._cdata == own for storage in self._storages)


def _fake_mode() -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Torch's own way to compute shapes: the mode, and what converts a tensor for it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return mode, mode.from_tensor


def check_unscaled(loss_fn: Callable[..., Any]) -> None:
    """Refuse a loss_fn that has a GradScaler: nobody would unscale its gradients.

    Looked for among what the function names: globals, variables of the functions around
    it, and for a method its object's attributes. A scaler behind anything else is not
    found.

    Raises:
        ValueError: There is one, enabled.
    """
    try:
        used = inspect.getclosurevars(loss_fn)
    except (TypeError, ValueError):  # not a Python function; a variable without a value
        return
    found = {**used.globals, **used.nonlocals}
    if inspect.ismethod(loss_fn):
        attributes = getattr(loss_fn.__self__, "__dict__", {})
        names = loss_fn.__func__.__code__.co_names
        found.update((name, attributes[name]) for name in names if name in attributes)
    for name, x in found.items():
        if isinstance(x, GradScaler) and x.is_enabled():
            raise ValueError(
                f"loss_fn has a GradScaler, {name}, which skips steps and moves its scale "
                "on the host, as no graph can: return the loss unscaled, and train in "
                "bfloat16, which needs no scaler"
            )
