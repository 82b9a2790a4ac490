"""Steps that are left out: gradients that are not finite, and what a loss scaler sets."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optimi_func.classes.work import Work
from optimi_func.core.distributed import all_finite
from optimi_func.core.rule import WHOLE_BATCH
from optimi_func.core.torch_private import has_memory

if TYPE_CHECKING:
    from optimi_func.classes.base import BaseOptimizer


def check_unscaled(optimizer: "BaseOptimizer") -> None:
    """Raise if a loss scaler has set what an update within a backward cannot honour."""
    if optimizer.found_inf is not None or optimizer.grad_scale is not None:
        raise RuntimeError(
            "found_inf or grad_scale with gradient release, whose updates come before the "
            "scaler has seen all gradients: set both to None, scale no loss, and pass "
            "skip_nonfinite= to prepare_for_gradient_release"
        )


def finite_works(
    optimizer: "BaseOptimizer", works: list[Work]
) -> tuple[list[Work], Callable[[], None] | None]:
    """Return the works of a step, or none if a gradient of a process is not finite.

    If a group is capturable, the device decides. A step that the host skips is counted.

    Returns:
        (works, begin): The works, and a function to call before the first write, when no
            check can fail any more. It divides the gradients by the factor of a loss scaler
            in place, as torch's fused step does, and counts a step that the device skips.
    """
    if optimizer.optimizer_accumulation:
        raise RuntimeError(
            "skip_nonfinite='step', found_inf or grad_scale with optimizer_accumulation="
            "True, whose steps have been taken in part before: choose one"
        )
    groups, grads = optimizer.param_groups, [g for work in works for g in work.grads]
    if optimizer.releases and not grads:
        check_unscaled(optimizer)
    if not all(map(has_memory, grads)):
        return works, None
    every = [p for group in groups for p in group["params"]]
    found, scale = optimizer.found_inf, optimizer.grad_scale
    finite = torch.ones((), dtype=torch.bool, device="cpu")
    if found is not None:
        finite = found.reshape(()) == 0
    if optimizer.skips_steps:
        finite = finite & all_finite(grads, every, optimizer.process_group)
    on_device = any(group["capturable"] for group in groups)
    skipped = optimizer.skipped_steps
    if not (on_device or finite):
        optimizer.skipped_steps = skipped + 1
        return [], None

    def begin() -> None:
        # A parameter may be in the list twice.
        if scale is not None:
            for g in {id(g): g for g in grads}.values():
                g.div_(scale)
        if on_device:
            if not isinstance(skipped, Tensor):
                optimizer.skipped_steps = torch.full_like(
                    finite, skipped, dtype=torch.int64
                )
            optimizer.skipped_steps += ~finite

    if on_device:
        flags = {g.device: WHOLE_BATCH._replace(finite=finite.to(g.device)) for g in grads}
        works = [x._replace(batches=[flags[g.device] for g in x.grads]) for x in works]
    return works, begin
