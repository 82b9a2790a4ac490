"""Gradient release, which updates each parameter during backward.

While hooks are attached, each parameter is updated as soon as its gradient is complete, and
the gradient is freed before the next one is computed.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.checks import (
    check_flag,
    check_module,
    warn_user,
)
from optimi_func.gradient_release.handle import (
    GradientRelease,
    has_foreign_hooks,
    releases_of,
    releases_on,
)
from optimi_func.gradient_release.options import AccumulationMode, ReleaseOptions
from optimi_func.gradient_release.replicas import ReplicaRunner, Replicas
from optimi_func.gradient_release.runner import NO_DDP, Runner
from optimi_func.pure.functional import FunctionalOptimizer

__all__ = [
    "GradientRelease",
    "ReleaseOptions",
    "prepare_for_gradient_release",
    "remove_gradient_release",
]


def prepare_for_gradient_release(
    model: nn.Module,
    optimizer: BaseOptimizer | FunctionalOptimizer,
    ignore_existing_hooks: bool = False,
    *,
    accumulation: AccumulationMode | None = None,
    accumulation_steps: int | None = None,
    buffer_dtype: torch.dtype | None = None,
    clip_param_norm: float | None = None,
    clip_value: float | None = None,
    clip_global_norm: float | None = None,
    grad_norm: bool = False,
    skip_nonfinite: bool | Literal["step"] = False,
    groups: "Sequence[distributed.ProcessGroup]" = (),
    process_group: "distributed.ProcessGroup | Literal[False]" = False,
    bucket_cap_mb: float = 25,
    reduce_dtype: torch.dtype | None = None,
    broadcast_buffers: bool = True,
) -> GradientRelease:
    """Fuse the optimizer's step into the model's backward.

    Afterwards `loss.backward()` updates the parameters and frees each gradient at once.
    `optimizer.step()` and `zero_grad()` may stay in the loop and find nothing to do.
    Run a backward whose gradients are to be thrown away in `with handle.paused():`.
    Schedulers, changes of param groups and load_state_dict take effect, because the hooks
    read everything when they run.

    With `accumulation`, several backwards make one step. Their gradients add up, as in
    p.grad, and are not divided. The step ends with the `accumulation_steps`-th backward
    or with `step()`, whichever comes first.

    - "buffer": the gradients' sum is kept, and freed parameter by parameter in the last
      backward. Exact for every rule.
    - "states": no buffer. The state decays once, and each gradient joins it: `m <- m + (1 -
      b1) * g_i`, `v <- v + (1 - b2) * g_i^2`. Exact for SGD with momentum. For the others
      the first moment is that of the whole gradient, but v is a sum of squares and not the
      square of a sum, and Nesterov and Lion look ahead along the last part alone.
      docs/release.md says what that costs.

    Under fully_shard (FSDP2), prepared after it, each process updates its shards as soon
    as they are reduced. Norms are those of whole gradients, and all processes skip the same
    parameters. Backwards that fully_shard does not reduce (set_requires_gradient_sync) do
    not count.

    With `process_group`, backward also averages gradients over replicas, in buckets that it
    frees. DistributedDataParallel, which keeps its own, must not wrap the model. Parameters
    and buffers become those of the group's first process.

    Args:
        model: Its trainable parameters get the hooks.
        optimizer: A class of this package made with `gradient_release=True`. It may own a
            part of the parameters, because several optimizers, each with its own handle,
            may share a model. Or a FunctionalOptimizer, over the tree {name: parameter},
            whose state is `handle.state`.
        ignore_existing_hooks: Add the hooks even if other code has hooks there.
        accumulation: "buffer", "states", or None if every backward is a step.
        accumulation_steps: The number of backwards in a step. With None `step()` ends it.
        buffer_dtype: The sum's dtype, which is float32, float64 or bfloat16. None takes
            the gradient's, but at least float32.
        clip_param_norm: Scale each gradient down to this norm, by itself.
        clip_value: Clamp each gradient's elements to this size.
        clip_global_norm: Scale all gradients down together to this norm. It is exact, and
            runs each backward that makes a step twice, through `handle.backward(loss_fn)`.
            Only sums of accumulation="buffer" that `step()` applies need no second pass.
        grad_norm: Report the norm of every backward's gradients as `handle.grad_norm`.
        skip_nonfinite: Leave a parameter, its state and its step count unchanged if its
            gradient has an inf or NaN; `handle.skipped` counts. With
            accumulation="states" only that part of the gradient is left out of the step.
            "step" leaves all of them unchanged, in all processes. Every gradient has to be
            known before the first update, by clip_global_norm (which may be inf), or by
            accumulation="buffer" without accumulation_steps.
        groups: Process groups whose processes have other parameters each, as the stages of
            a pipeline. clip_global_norm, grad_norm and skip_nonfinite="step" are of all of
            them, as in `clip_grad_norm_`. All end their steps together.
        process_group: The processes that hold the same model and average its gradients,
            such as `torch.distributed.group.WORLD`. False averages nothing.
        bucket_cap_mb: With `process_group`, the MiB of gradients in a bucket. About four
            buckets are in memory during backward.
        reduce_dtype: With `process_group`, the dtype in which gradients are averaged. None
            takes the parameter's.
        broadcast_buffers: With `process_group`, the first forward of a step in train mode
            takes the first process's buffers, such as BatchNorm's statistics.

    Returns:
        The handle, whose `remove()` detaches the hooks; a context manager that does so.

    Raises:
        TypeError: An argument of another type, as an optimizer of another library.
        ValueError: An optimizer without `gradient_release=True`, hooks that exist
            already, a model none of whose parameters it owns, an option out of its
            range, options that exclude each other, or a model wrapped in
            DistributedDataParallel or FullyShardedDataParallel. With `process_group`, also
            DTensors, and models, options or states that differ by process. No hook has been
            added then.
        RuntimeError: In a later backward or step: a GradScaler (train in bfloat16),
            compiled autograd, a DistributedDataParallel wrapped around the model later,
            `backward(create_graph=True)` (run it in `with handle.paused():`), and a
            parameter that gets two gradients in one backward, as a shared one under
            reentrant checkpointing does (`use_reentrant=False`).

    References:
        Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New
        Execution Algorithm", arXiv:2002.05645 (updates within backward).
        Zhang et al., "Adam Accumulation", arXiv:2305.19982 (accumulation="states").

    >>> import torch
    >>> from optimi_func import SGD
    >>> model = nn.Linear(2, 1, bias=False)
    >>> nn.init.ones_(model.weight).sum().item()
    2.0
    >>> options = dict(gradient_release=True, compile=False)
    >>> optimizer = SGD(model.parameters(), lr=0.1, **options)
    >>> with prepare_for_gradient_release(model, optimizer):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad is None, model.weight.detach()
    (True, tensor([[0.9000, 0.9000]]))
    """
    options = ReleaseOptions(
        accumulation,
        accumulation_steps,
        buffer_dtype,
        clip_param_norm,
        clip_value,
        clip_global_norm,
        grad_norm,
        skip_nonfinite,
        tuple(groups),
    )
    check_module("prepare_for_gradient_release", model)
    check_flag("ignore_existing_hooks", ignore_existing_hooks)
    # If the model uses FSDP, the module is imported already; importing it takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(NO_DDP)
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                "FullyShardedDataParallel reduces gradients after the hooks: use FSDP2 "
                "(torch.distributed.fsdp.fully_shard) with gradient release"
            )
    params = _owned(model, optimizer)
    runner_of, how_replicas = Runner, (bucket_cap_mb, reduce_dtype, broadcast_buffers)
    if process_group is not False:
        runner_of = partial(ReplicaRunner, replicas=Replicas(process_group, *how_replicas))
    elif how_replicas != (25, None, True):
        names = "bucket_cap_mb, reduce_dtype, broadcast_buffers"
        raise ValueError(f"{names} = {how_replicas}: they need process_group")
    hooked = [p for p in params.values() if has_foreign_hooks(p)]
    releases = releases_on(params.values())
    if releases:
        names = " and ".join(type(handle.optimizer).__name__ for handle in releases)
        raise ValueError(
            f"the model's parameters are released already, to {names}, which would step "
            "instead of this optimizer: call remove_gradient_release(model) first, for "
            "example if a notebook's cell is run again"
        )
    if hooked and not (ignore_existing_hooks and process_group is False):
        raise ValueError(
            f"{len(hooked)} parameters have post-accumulate-grad hooks already: pass "
            "ignore_existing_hooks=True if they are meant to stay, but not process_group, "
            "which averages gradients after they have run"
        )
    return GradientRelease(model, optimizer, params, options, runner_of)


def _owned(
    model: nn.Module, optimizer: BaseOptimizer | FunctionalOptimizer
) -> dict[str, Tensor]:
    """Return the model's trainable parameters that the optimizer updates, by name."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    params = {name: p for name, p in params.items() if p.requires_grad}
    if isinstance(optimizer, BaseOptimizer):
        if not optimizer.defaults["gradient_release"]:
            raise ValueError("the optimizer was not made with gradient_release=True")
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        params = {name: p for name, p in params.items() if id(p) in ids}
    elif not isinstance(optimizer, FunctionalOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer)} is not one of optimi_func's classes, nor a "
            "FunctionalOptimizer"
        )
    if not params:
        raise ValueError(
            "none of the model's trainable parameters is the optimizer's: make it from "
            "model.parameters() as they are now (fully_shard replaces them)"
        )
    return params


def remove_gradient_release(model: nn.Module) -> None:
    """Detach every hook that `prepare_for_gradient_release` added to the model.

    This includes hooks that it added through another module with the same parameters. Warns
    if there are none, for example because it was called before.
    """
    releases = releases_of(model)
    if not releases:
        warn_user(
            f"remove_gradient_release({type(model).__name__}): the model has no hooks of "
            "prepare_for_gradient_release. Pass the module that was prepared, or a module "
            "that has all of its parameters"
        )
    for handle in releases:
        handle.remove()
