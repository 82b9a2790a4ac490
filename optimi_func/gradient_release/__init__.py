"""Gradient release, which updates each parameter during the backward pass.

While hooks are attached, each parameter is updated as soon as its gradient is complete, and
this gradient is freed before the next gradient is computed.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.checks import check_flag, check_module, warn_user
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
    """Add hooks to a model, which update its parameters during the backward pass.

    After this call, `loss.backward()` updates each parameter as soon as its gradient is
    complete, and frees the gradient at once. `optimizer.step()` and `zero_grad()` have
    nothing left to do, but you can leave them in the training loop. If the gradients of a
    backward pass must not be applied, run this pass in `with handle.paused():`. Schedulers,
    changes of param groups, and load_state_dict take effect, because the hooks read the
    param groups and the state whenever they run.

    With `accumulation`, several backward passes form one step. Their gradients are summed,
    as in p.grad, and not divided. The step ends with the `accumulation_steps`-th backward
    pass or with `step()`, whichever comes first.

    - "buffer": The sum of the gradients is stored. In the last backward pass, the sum of
      each parameter is freed as soon as the parameter is updated. The result is exact for
      every rule.
    - "states": No sum is stored. The moments decay once per step, and each gradient is
      added to the moments: `m <- m + (1 - b1) * g_i`, `v <- v + (1 - b2) * g_i^2`. The
      result is exact for SGD with momentum. For other rules, the first moment is exact, but
      v receives the sum of the squared gradients instead of the square of their sum. In
      addition, Nesterov momentum and Lion look ahead along the last gradient only.
      docs/release.md shows how large these differences are.

    To use gradient release with fully_shard (FSDP2), call fully_shard before this function.
    Each process then updates its shards as soon as they are reduced. Norms are computed
    over whole gradients, and all processes skip the same parameters. Backward passes in
    which fully_shard does not reduce the gradients (set_requires_gradient_sync) are not
    counted as backward passes of a step.

    With `process_group`, the backward pass also averages the gradients over replicas, in
    buckets that are freed again. The model must not be wrapped in DistributedDataParallel,
    which has buckets of its own. This function also sets the parameters and buffers of all
    processes to those of the group's first process.

    Args:
        model: The model, whose trainable parameters get the hooks.
        optimizer: An instance of an optimizer class of this package that was created with
            `gradient_release=True`. It may contain only some of the model's parameters,
            because several optimizers can share a model if each of them has its own handle.
            You can also pass a FunctionalOptimizer, which works on the tree {name:
            parameter} and whose state is `handle.state`.
        ignore_existing_hooks: Add the hooks even if other code has already added hooks to
            the parameters.
        accumulation: "buffer", "states", or None if every backward pass is a step.
        accumulation_steps: The number of backward passes per step. With None, only `step()`
            ends a step.
        buffer_dtype: The dtype of the sums: float32, float64 or bfloat16. None means the
            dtype of the gradients, but at least float32.
        clip_param_norm: Scale each gradient separately, so that its norm is at most this
            number.
        clip_value: Clamp each element of each gradient to the range from -clip_value to
            clip_value.
        clip_global_norm: Scale all gradients by one factor, so that their global norm is at
            most this number. To know the exact norm before the first update,
            `handle.backward(loss_fn)` runs each backward pass that completes a step twice.
            Only accumulation="buffer" without accumulation_steps needs no second pass,
            because `step()` applies the sums.
        grad_norm: Measure the norm of the gradients in every backward pass, as
            `handle.grad_norm`.
        skip_nonfinite: With True, a parameter, its state and its step count are left
            unchanged if its gradient contains an inf or NaN, and `handle.skipped` counts
            the skipped updates. With accumulation="states", only the gradient that contains
            the inf or NaN is left out of the step. With "step", all parameters in all
            processes are left unchanged if any gradient contains an inf or NaN. "step"
            requires all gradients before the first update, so also pass clip_global_norm
            (which may be inf), or accumulation="buffer" without accumulation_steps.
        groups: Process groups in which each process has different parameters, such as the
            stages of a pipeline. clip_global_norm, grad_norm and skip_nonfinite="step" then
            use the gradients of all these processes, as in `clip_grad_norm_`. All these
            processes have to end their steps together.
        process_group: The processes that have copies of the same model and average its
            gradients, such as `torch.distributed.group.WORLD`. With False, gradients are
            not averaged.
        bucket_cap_mb: With `process_group`, the size of a bucket of gradients in MiB. About
            four buckets are in memory during the backward pass.
        reduce_dtype: With `process_group`, the dtype in which gradients are averaged. None
            means the dtype of the parameter.
        broadcast_buffers: With `process_group`, the first forward pass of a step in train
            mode copies the buffers of the first process to all processes, such as the
            statistics of BatchNorm.

    Returns:
        The handle. Its method `remove()` detaches the hooks. The handle is also a context
        manager, which detaches the hooks at its end.

    Raises:
        TypeError: An argument has the wrong type, for example an optimizer of another
            library.
        ValueError: The optimizer was created without `gradient_release=True`, or contains
            none of the model's parameters. The parameters already have hooks. An option is
            out of its range, or options exclude each other. The model is wrapped in
            DistributedDataParallel or FullyShardedDataParallel. With `process_group`,
            parameters are DTensors, or the models, options or states of the processes
            differ. No hook has been added in any of these cases.
        RuntimeError: A later backward pass or step raises this error if it uses a
            GradScaler (train in bfloat16 instead), compiled autograd, a
            DistributedDataParallel that was wrapped around the model later, or
            `backward(create_graph=True)` (run it in `with handle.paused():`). It also
            raises this error if a parameter gets two gradients in one backward pass, as a
            shared parameter does with reentrant checkpointing (pass `use_reentrant=False`).

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
    _check_unwrapped(model)
    params = _owned(model, optimizer)
    runner_of, how_replicas = Runner, (bucket_cap_mb, reduce_dtype, broadcast_buffers)
    if process_group is not False:
        runner_of = partial(ReplicaRunner, replicas=Replicas(process_group, *how_replicas))
    elif how_replicas != (25, None, True):
        names = "bucket_cap_mb, reduce_dtype, broadcast_buffers"
        raise ValueError(f"{names} = {how_replicas}: they need process_group")
    _check_unhooked(params, ignore_existing_hooks and process_group is False)
    return GradientRelease(model, optimizer, params, options, runner_of)


def _check_unwrapped(model: nn.Module) -> None:
    """Raise an error if a part of the model is wrapped in DDP or in FSDP1."""
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


def _check_unhooked(params: dict[str, Tensor], ignores: bool) -> None:
    """Raise an error if gradient release or other code has hooks on the parameters.

    Args:
        params: The parameters that are to get hooks, by name.
        ignores: True if the hooks of other code are allowed.
    """
    hooked = [p for p in params.values() if has_foreign_hooks(p)]
    releases = releases_on(params.values())
    if releases:
        names = " and ".join(type(handle.optimizer).__name__ for handle in releases)
        raise ValueError(
            f"the model's parameters are released already, to {names}, which would step "
            "instead of this optimizer: call remove_gradient_release(model) first, for "
            "example if a notebook's cell is run again"
        )
    if hooked and not ignores:
        raise ValueError(
            f"{len(hooked)} parameters have post-accumulate-grad hooks already: pass "
            "ignore_existing_hooks=True if they are meant to stay, but not process_group, "
            "which averages gradients after they have run"
        )


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

    This includes hooks that were added through another module with the same parameters. If
    the model has no such hooks, for example because you have already called this function,
    a warning is emitted.
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
