"""The key of the kernel that updates a leaf."""

import torch
from torch import Tensor

from optimi_func.core.packed import Packed
from optimi_func.core.rule import Leaf, Rule
from optimi_func.core.storage import GRAD, PARAM, tensors_of
from optimi_func.execution.kernels import KernelKey


def arguments(leaf: Leaf, g: Tensor) -> dict[str, Tensor]:
    """Return the tensors that the kernel of a step in place takes after its numbers."""
    return {PARAM: leaf.p, GRAD: g, **tensors_of(leaf)}


def key_of(
    rule: Rule,
    packed: Packed,
    leaf: Leaf,
    g: Tensor,
    round: str | None = None,
    device: torch.device | None = None,
) -> KernelKey:
    """Return the key of the kernel that updates a leaf in place, or measures a round."""
    tensors = tuple([(name, x.dtype) for name, x in arguments(leaf, g).items()])
    own = packed.statics, True, True, tensors
    return KernelKey(rule, *own, leaf.p.device if device is None else device, round)
