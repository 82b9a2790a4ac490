"""Slots: parameters with their state, as executors see them."""

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func._distributed import ShardSpec
from optimi_func.execution.tensors import is_dense, is_plainly_strided, same_order

# Of each role (p, the state's fields, the compensation) a tensor for each parameter; None
# where a parameter has no compensation.
Roles: TypeAlias = list[list[Any]]


class Slot(NamedTuple):
    """One parameter with its state: what executors need to know of the local tensors.

    Facts alone: whoever takes a tensor out of `optimizer.state` frees its memory.
    """

    dtypes: tuple[torch.dtype, ...]  # of parameter, state and compensation
    addresses: tuple[int, ...]
    numel: int  # of the parameter, as far as it lies here
    roles: tuple[int, ...]  # of each of them, which of the plan's roles it is
    codes: tuple[bool, ...]  # of each field of the rule's state whether it is in codes
    plain: bool  # whether all are memory that holds their very elements
    dense: bool  # whether all fill their memory in one and the same order
    inference: bool  # whether any was made under inference_mode
    shard: ShardSpec | None  # where more of the parameter lies elsewhere

    @property
    def compensated(self) -> bool:
        """Whether the last of the tensors is kept beside the parameter."""
        return len(self.dtypes) > 1 + len(self.codes) + sum(self.codes)

    @property
    def scales(self) -> list[int]:
        """Which of the tensors are scales, of which a group of elements shares one."""
        return scale_places(self.codes, 1)

    @property
    def coded(self) -> bool:
        """Whether the tensors are not what the rule computes with."""
        return any(self.codes) or not self.dtypes[-1].is_floating_point

    @property
    def decoded(self) -> tuple[torch.dtype, ...]:
        """The dtypes of what the rule computes with."""
        p, *rest = self.dtypes
        comp = [rest.pop()] if self.compensated else []
        if comp and not comp[0].is_floating_point:
            p, comp = torch.float32, []
        left = iter(rest)
        fields: list[torch.dtype] = []
        for coded in self.codes:
            kept = next(left)
            fields.append(next(left) if coded else kept)  # the scale's: float32
        return (p, *fields, *comp)


def scale_places(codes: tuple[bool, ...], first: int) -> list[int]:
    """Where scales stand among tensors, of which those of a state begin at `first`.

    Args:
        codes: Of each field of the state whether it is two tensors, codes and their scales.
        first: How many stand before them.
    """
    found: list[int] = []
    place = first - 1
    for coded in codes:
        place += 1 + coded
        if coded:
            found.append(place)
    return found


def make_slots(
    names: list[str], fields: tuple[str, ...], roles: Roles, shards: list[ShardSpec | None]
) -> list[Slot]:
    """The slots of parameters.

    Args:
        names: Of the roles between the parameter and its compensation.
        fields: The rule's, which are one role, or two in codes.
        roles: What lies here of each parameter: it, those, its compensation.
        shards: Who holds others of its elements.
    """
    return [
        _make_slot(names, fields, column, shard) for shard, *column in zip(shards, *roles)
    ]


def _make_slot(
    names: list[str], fields: tuple[str, ...], column: list[Any], shard: ShardSpec | None
) -> Slot:
    present = tuple([i for i, x in enumerate(column) if x is not None])
    p, *rest = tensors = [column[i] for i in present]
    own = {names[i - 1] for i in present[1:] if i <= len(names)}
    # Scales have another shape than the parameter, and one order.
    ordered = [same_order(p, x) if x.shape == p.shape else x.is_contiguous() for x in rest]
    return Slot(
        tuple([x.dtype for x in tensors]),
        tuple(map(Tensor.data_ptr, tensors)),
        p.numel(),
        present,
        tuple([field not in own for field in fields]),
        all(map(is_plainly_strided, tensors)),
        is_dense(p) and all(ordered),
        any(map(Tensor.is_inference, tensors)),
        shard,
    )
