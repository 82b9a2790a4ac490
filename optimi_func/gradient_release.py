"""Gradient release: the step fused into backward, a parameter at a time.

While hooks are attached, each parameter is updated as soon as its gradient is complete, and
the gradient is freed before the next one is computed: no moment holds all of them.
"""

import warnings
import weakref
from types import TracebackType

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from optimi_func import _torch
from optimi_func.compiled.batching import SMALL
from optimi_func.optimizers import BaseOptimizer

# Bytes of small gradients that may wait to be updated together.
PENDING_BYTES = 1 << 20


class GradientRelease:
    """The hooks of one model and optimizer: `remove()` them, or use as a context.

    Attributes:
        optimizer: Whose parameters are updated in backward.
        pending_bytes: Gradients of small parameters wait up to this many bytes, or the
            end of backward, and are updated by one call.
    """

    def __init__(
        self, model: nn.Module, optimizer: BaseOptimizer, pending_bytes: int
    ) -> None:
        self.optimizer = optimizer
        self.pending_bytes = pending_bytes
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._hooks: list[RemovableHandle] = []
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._waiting = 0
        self._backward = -1
        self._updated: list[str] = []
        for p in owned(model, optimizer):
            self._hooks.append(p.register_post_accumulate_grad_hook(self._on_gradient))

    def remove(self) -> None:
        """Detach the hooks; the optimizer's own step updates everything again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._drop()

    def __enter__(self) -> "GradientRelease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _on_gradient(self, p: Tensor) -> None:
        g = p.grad
        if g is None:
            return
        if g.requires_grad:
            raise RuntimeError(
                f"{self._name(p)}: backward(create_graph=True) needs the gradients that "
                "gradient release frees: remove() the hooks for it"
            )
        backward = _torch.backward_id()
        if backward != self._backward:
            self._begin(backward)
        if p.numel() < SMALL:
            # Taken off the parameter: if this backward fails, the next one must not
            # add to it.
            p.grad = None
            self._pending.append((p, g))
            self._waiting += g.nbytes
            if self._waiting > self.pending_bytes:
                self._flush()
        else:
            self._update([p])

    def _begin(self, backward: int) -> None:
        if self._updated or self._pending:
            # The one before ended in an error: its callback never came.
            names = ", ".join(self._updated) or "none"
            warnings.warn(
                "the backward before this one did not finish: gradients still waiting "
                f"were dropped; parameters already updated: {names}",
                UserWarning,
                stacklevel=3,
            )
            self._drop()
        self._backward = backward
        _torch.after_backward(self._end)

    def _end(self) -> None:
        self._flush()
        self._updated.clear()
        self._backward = -1

    def _flush(self) -> None:
        pending, self._pending, self._waiting = self._pending, [], 0
        for p, g in pending:
            p.grad = g
        if pending:
            self._update([p for p, _ in pending])

    def _update(self, params: list[Tensor]) -> None:
        names = [self._name(p) for p in params]
        try:
            self.optimizer.step_params(params)
        except Exception as error:
            raise RuntimeError(
                f"updating {', '.join(names)} in backward: {error}"
            ) from error
        finally:
            for p in params:
                p.grad = None
        self._updated += names

    def _drop(self) -> None:
        self._pending.clear()
        self._updated.clear()
        self._waiting = 0

    def _name(self, p: Tensor) -> str:
        return self._names.get(id(p), f"a parameter of shape {tuple(p.shape)}")


# A cache: which hooks a model has. Not on the model, whose copies would carry them along.
_handles: "weakref.WeakKeyDictionary[nn.Module, list[GradientRelease]]" = (
    weakref.WeakKeyDictionary()
)


def owned(model: nn.Module, optimizer: BaseOptimizer) -> list[nn.Parameter]:
    """The model's trainable parameters that the optimizer updates."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in model.parameters() if p.requires_grad and id(p) in known]


def prepare_for_gradient_release(
    model: nn.Module,
    optimizer: BaseOptimizer,
    ignore_existing_hooks: bool = False,
    *,
    pending_bytes: int = PENDING_BYTES,
) -> GradientRelease:
    """Fuse the optimizer's step into the model's backward.

    Afterwards `loss.backward()` updates the parameters and frees each gradient at once;
    `optimizer.step()` and `zero_grad()` may stay where they are and find nothing to do.
    Schedulers, param groups and load_state_dict reach the hooks, which look everything
    up when they run.

    Args:
        model: Its trainable parameters get the hooks.
        optimizer: One of this package, made with `gradient_release=True`. It may own a
            part of the parameters: several optimizers, each with a handle of its own,
            may share a model.
        ignore_existing_hooks: Add the hooks where others have theirs.
        pending_bytes: Gradients of small parameters wait up to this many bytes, or the
            end of backward, to be updated together.

    Returns:
        The handle, whose `remove()` detaches the hooks; a context manager that does so.

    Raises:
        TypeError: An optimizer of another library.
        ValueError: An optimizer without `gradient_release=True`, hooks that exist
            already, a negative pending_bytes, or a model wrapped in
            DistributedDataParallel; no hook has been added then.

    >>> import torch
    >>> from optimi_func import SGD
    >>> model = nn.Linear(2, 1, bias=False)
    >>> nn.init.ones_(model.weight).sum().item()
    2.0
    >>> optimizer = SGD(model.parameters(), lr=0.1, gradient_release=True, compile=False)
    >>> with prepare_for_gradient_release(model, optimizer):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad is None, model.weight.detach()
    (True, tensor([[0.9000, 0.9000]]))
    """
    if not isinstance(optimizer, BaseOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not one of optimi_func's classes"
        )
    if not optimizer.defaults["gradient_release"]:
        raise ValueError("the optimizer was not made with gradient_release=True")
    if pending_bytes < 0:
        raise ValueError(f"pending_bytes={pending_bytes}: allowed is at least 0")
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "DistributedDataParallel copies its buckets back into p.grad after the "
            "hooks: use FSDP2 (torch.distributed.fsdp.fully_shard) with gradient release"
        )
    params = owned(model, optimizer)
    hooked = [p for p in params if _torch.has_accumulate_hooks(p)]
    if hooked and not ignore_existing_hooks:
        raise ValueError(
            f"{len(hooked)} parameters have post-accumulate-grad hooks already: pass "
            "ignore_existing_hooks=True if they are meant to stay"
        )
    left = sum(p.requires_grad for p in model.parameters()) - len(params)
    if left and not ignore_existing_hooks:
        warnings.warn(
            f"{left} trainable parameters are not the optimizer's: they keep their .grad",
            UserWarning,
            stacklevel=2,
        )
    handle = GradientRelease(model, optimizer, pending_bytes)
    _handles.setdefault(model, []).append(handle)
    return handle


def remove_gradient_release(model: nn.Module) -> None:
    """Detach every hook that `prepare_for_gradient_release` added to the model.

    Warns where there is none.
    """
    handles = _handles.pop(model, [])
    if not any(handle._hooks for handle in handles):
        warnings.warn(
            "the model has no gradient release hooks to remove", UserWarning, stacklevel=2
        )
    for handle in handles:
        handle.remove()
