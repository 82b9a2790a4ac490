"""What a backward that only measures asks of the model and of the loss's graph.

Two backwards make one step where the first only measures gradients: it has to leave the
model's buffers as it found them, and to know which leaves its gradients go to.
"""

from typing import Any

import torch
from torch import Tensor, nn

NO_REENTRANCE = (
    "reentrant checkpointing hides where a backward ends, which accumulation_steps, "
    "clip_global_norm and grad_norm must know: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Buffers:
    """A model's buffers as they were: which there are, and what is in them."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [(m, dict(m._buffers)) for m in model.modules()]
        tensors = {x for _, table in self._tables for x in table.values() if x is not None}
        self._contents = [(x, x.clone()) for x in tensors]

    def restore(self) -> None:
        """Put back what has changed, and write to nothing else."""
        for module, table in self._tables:
            module._buffers.clear()
            module._buffers.update(table)
        for x, before in self._contents:
            # Not by x._version, which BatchNorm does not count up.
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                if not torch.equal(x, before):
                    x.copy_(before)


def is_reentrant(loss: Tensor) -> bool:
    """Whether the loss was computed through a reentrant checkpoint."""
    return any(type(x).__name__ == "CheckpointFunctionBackward" for x in _nodes(loss))


def leaves_of(loss: Tensor) -> set[Tensor]:
    """The leaf tensors that a backward of the loss would give gradients."""
    return {x.variable for x in _nodes(loss) if hasattr(x, "variable")}


def _nodes(loss: Tensor) -> set[Any]:
    """Every node of the loss's autograd graph."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
    return seen
