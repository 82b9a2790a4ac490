"""The first of two passes: it measures the gradients and changes nothing."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optimi_func.core import torch_private
from optimi_func.core.distributed import any_distributed
from optimi_func.gradient_release.norms import Norm
from optimi_func.gradient_release.runner import Runner

NO_REENTRANCE = (
    "reentrant checkpointing hides where a backward ends, which accumulation_steps, "
    "clip_global_norm and grad_norm must know: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


def measure(
    runner: Runner, model: nn.Module, loss_fn: Callable[[], Tensor]
) -> tuple[Tensor, list[Norm]]:
    """Return the loss and its gradients' norms; restore .grad, buffers and random state."""
    params = list(runner.params.values())
    if any_distributed(params) and torch_private.has_unreduced_grads(params):
        raise RuntimeError(
            f"clip_global_norm={runner.options.clip_global_norm} after or in a backward "
            "that fully_shard does not reduce (set_requires_gradient_sync or "
            "set_requires_all_reduce) would measure a part of the gradient: reduce every "
            "backward, with accumulation='buffer'"
        )
    buffers = Buffers(model)
    grads: dict[Tensor, Tensor | None] = {
        p: p.grad.clone() for p in params if p.grad is not None
    }
    random_state = random.getstate()
    devices = {p.device.index for p in params if p.is_cuda}
    try:
        with runner.measuring() as backward, torch.random.fork_rng(sorted(devices)):
            loss = loss_fn()
            kinds, leaves = graph_of(loss)
            if "CheckpointFunctionBackward" in kinds:
                raise RuntimeError(NO_REENTRANCE)
            if any_distributed(params):
                # fully_shard's parameters are not leaves of the graph, so `inputs` cannot
                # keep the second pass from adding to the .grad of others again.
                for x in leaves.difference(params):
                    grads[x], x.grad = x.grad, None
                loss.backward()
            else:
                loss.backward(inputs=[p for p in params if p.requires_grad])
    finally:
        random.setstate(random_state)
        buffers.restore()
        for p, g in grads.items():
            p.grad = g
    sums = runner.cycle.buffer.items()
    rest = {p: x for p, x in sums if p not in backward.fired}
    norms = runner.norms_to_clip([*rest], [*rest.values()])
    return loss.detach(), backward.norms + norms


class Buffers:
    """A copy of a model's buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [(m, dict(m._buffers)) for m in model.modules()]
        tensors = {x for _, table in self._tables for x in table.values() if x is not None}
        self._contents = [(x, x.clone()) for x in tensors]

    def restore(self) -> None:
        """Put back the buffers that have changed, and write to no others."""
        for module, table in self._tables:
            module._buffers.clear()
            module._buffers.update(table)
        for x, before in self._contents:
            # BatchNorm changes its buffers without counting up x._version.
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                if not torch.equal(x, before):
                    x.copy_(before)


def graph_of(loss: Tensor) -> tuple[set[str], set[Tensor]]:
    """Return the type names of the nodes in the loss's graph, and the leaf tensors."""
    nodes: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        waiting += [after for after, _ in node.next_functions]
    leaves = {x.variable for x in nodes if hasattr(x, "variable")}
    return {type(x).__name__ for x in nodes}, leaves
