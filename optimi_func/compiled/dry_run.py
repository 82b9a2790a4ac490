"""A forward and backward on fake tensors, before a training step is compiled.

It finds which parameters the loss depends on, which buffers are written, and whether the
loss can start a backward. The graph cannot tell: it has zeros as gradients of parameters
without use, which a step must not update. No random number is drawn.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimi_func.core import torch_private
from optimi_func.core.checks import check_loss
from optimi_func.core.rule import PyTree


class DryRun(NamedTuple):
    """The indices that a dry run found."""

    used_params: tuple[int, ...]  # parameters that the loss depends on
    mutated_buffers: tuple[int, ...]  # buffers that the forward writes
    aliased_aux: tuple[int, ...]  # leaves of aux that share memory with a parameter


def dry_run(
    program: Callable[..., tuple[Tensor, PyTree, list[Tensor]]],
    params: list[Tensor],
    buffers: list[Tensor],
    batch: object,
) -> DryRun:
    """Run a program on fake tensors. Raise if its loss cannot start a backward."""
    mode = torch_private.fake_mode()
    convert = mode.from_tensor
    with mode, torch.enable_grad():
        leaves = [convert(p.detach()).requires_grad_() for p in params]
        fake_buffers = [convert(b.detach()) for b in buffers]
        batch = pytree.tree_map_only(Tensor, lambda x: convert(x.detach()), batch)
        with _Writes() as writes:
            loss, aux, after = program(leaves, list(fake_buffers), batch)
        check_loss(loss)
        if not loss.requires_grad:
            raise ValueError("loss_fn returned a loss that depends on no parameter")
        grads: Any = torch.autograd.grad(loss, leaves, allow_unused=True)
    items = [] if aux is None else pytree.tree_leaves(aux)
    for x in items:
        if not isinstance(x, Tensor):
            raise TypeError(f"loss_fn returned {x!r} as aux: allowed are trees of tensors")
    # Buffers may be written to through views.
    written = {storage._cdata for storage in writes.storages}
    mutated = [
        new is not old or old.untyped_storage()._cdata in written
        for old, new in zip(fake_buffers, after)
    ]
    memory = {p.untyped_storage()._cdata for p in leaves}
    aliased = [x.untyped_storage()._cdata in memory for x in items]
    return DryRun(_where([g is not None for g in grads]), _where(mutated), _where(aliased))


def _where(flags: list[bool]) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags) if flag)


class _Writes(TorchDispatchMode):
    """A dispatch mode that records the storages that operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run an operation unchanged and record its writes."""
        kwargs = kwargs or {}
        # They write to the running statistics, but their schemas do not declare it.
        silent = "batch_norm" in func.name()
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if silent or (argument.alias_info and argument.alias_info.is_write):
                for x in pytree.tree_leaves(value):
                    if isinstance(x, Tensor):
                        self.storages.append(x.untyped_storage())
        return func(*args, **kwargs)


def check_unscaled(loss_fn: Callable[..., object]) -> None:
    """Raise if loss_fn refers to an enabled GradScaler, because gradients stay scaled.

    Globals, closure variables, and attributes of a method's object are searched. A scaler
    that is reached through another object is not found.
    """
    try:
        closure = inspect.getclosurevars(loss_fn)
    except (TypeError, ValueError):  # not a Python function; a variable without a value
        return
    variables = {**closure.globals, **closure.nonlocals}
    if inspect.ismethod(loss_fn):
        attributes = getattr(loss_fn.__self__, "__dict__", {})
        names = loss_fn.__func__.__code__.co_names
        variables.update((name, attributes[name]) for name in names if name in attributes)
    for name, x in variables.items():
        if isinstance(x, GradScaler) and x.is_enabled():
            raise ValueError(
                f"loss_fn has a GradScaler, {name}, which skips steps and sets its scale "
                "on the host, so no graph can contain it: return the loss unscaled, and "
                "train in bfloat16, which needs no scaler"
            )
