"""The update of meta and fake tensors, which have no memory that a kernel could write to.

Parameters are updated one after the other by the formula of the rule, without plans and
kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optimi_func.classes.extras import rounding_bits, with_extras
from optimi_func.classes.work import Request, Work
from optimi_func.core import checks
from optimi_func.core.leaf import (
    leaf_dtype,
    leaf_step,
    microbatch_scalars,
    with_given,
)
from optimi_func.core.philox import drawn
from optimi_func.core.rule import WHOLE_BATCH, Leaf, Scalar
from optimi_func.core.storage import group_storage, state_in, tensors_of
from optimi_func.core.torch_private import has_memory
from optimi_func.execution.counts import write_scalar
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.scalars import scalars_after
from optimi_func.state.entry import ensure_state

if TYPE_CHECKING:
    from optimi_func.classes.base import BaseOptimizer

Write = tuple[Tensor, Scalar, Tensor | None]  # a target, its value, and if it is written


def prepare_without_memory(
    optimizer: "BaseOptimizer", work: Work, request: Request
) -> Callable[[], None]:
    """Compute an update of meta or fake tensors, and return what writes it."""
    group, params, grads, batches = work
    bound, writes = optimizer.bound_of(group, params, group["capturable"]), list[Write]()
    rule, names = bound.rule, ("step", *bound.rule.running._fields)
    how = bound, group_storage(group), group["capturable"]
    batches = batches or [WHOLE_BATCH] * len(params)
    paths = [optimizer.path_of(group, p) for p in params]
    for path, p, g in zip(paths, params, grads):
        checks.check_grad(path, p, g)
    entries = [
        ensure_state(optimizer.state, request.new_entries, path, p, *how)
        for path, p in zip(paths, params)
    ]
    tensors = [[entry[name] for name in names] for entry in entries]
    counts = [(x, y) for x, *y in [list(map(_number, some)) for some in tensors]]
    scalars, after = scalars_after(bound, counts, coded=True)
    at, given = [*range(len(params))], dict[str, list[Any]]()
    bits = rounding_bits(optimizer, group, params, counts, at) if request.write else {}
    if rule.given:
        rows = bound, params, scalars, counts, at
        scalars, at, given = with_extras(optimizer, request.extras, *rows)
    given |= bits
    for i, (p, m, entry) in enumerate(zip(params, batches, entries)):
        leaf = Leaf(p.detach(), *state_in(rule, entry))
        now = microbatch_scalars(rule, scalars[at[i]], m, request.write)
        with kernel_context(p.device):
            row = {k: x for k, column in given.items() if (x := column[i]) is not None}
            more = drawn([*row.values()], leaf_dtype(leaf, grads[i]))
            inputs, now = with_given(leaf, now, dict(zip(row, more)))
            new = tensors_of(leaf_step(rule, inputs, grads[i], now, request.write))
        pairs = [(x, new.get(name, x)) for name, x in tensors_of(leaf).items()]
        writes += [(x, y, m.finite) for x, y in pairs if y is not x]
        last = zip(tensors[i], (tensors[i][0] + 1.0, *after[i])) if request.ends else ()
        writes += [(x, y, m.finite) for x, y in last]
    return partial(_write_all, writes)


def _number(x: Tensor) -> Scalar:
    # A count without memory is taken for 0.
    return x if x.is_cuda else x.item() if has_memory(x) else 0.0


@torch.no_grad()
def _write_all(writes: list[Write]) -> None:
    """Write values to their targets, unless a flag is false."""
    for x, new, flag in writes:
        write_scalar(x, new, flag)
