"""Facts that processes compare before they step, so that all take the same step."""

from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from optimi_func.classes.work import Work
from optimi_func.core.distributed import is_distributed, to_local

if TYPE_CHECKING:
    from optimi_func.classes.base import BaseOptimizer


def check_divides(optimizer: "BaseOptimizer") -> None:
    """Raise if there is nothing that a process_group could divide."""
    rules = optimizer.rules() if optimizer.process_group is not None else []
    if rules and all(rule.whole is None for rule in rules):
        raise ValueError(
            f"process_group= with {rules[0].name}, which maps no matrices that could "
            "be divided: omit it. To divide states, make the optimizer by "
            "torch.distributed.optim.ZeroRedundancyOptimizer"
        )


def facts_of(
    optimizer: "BaseOptimizer", divided: Container[int], works: list[Work]
) -> dict[str, object]:
    """Return what processes compare before they step: numbers of the divided groups.

    Copies have every parameter, number and gradient in common, and equal weights.
    """
    if optimizer.process_group is None:
        return optimizer.numbers(type, divided)
    facts = optimizer.numbers(type)
    for i, (group, params, _, _) in enumerate(works):
        # Those of divided groups are in `agree`'s message by name.
        if id(group) not in divided and len(params) < len(group["params"]):
            names = [str(optimizer.path_of(group, p)) for p in params]
            facts[f"parameters with gradients of param group {i}"] = names
    if not optimizer._has_stepped:
        params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        plain = to_local([p for p in params if p.numel() and not is_distributed(p)])
        hashes = [str(torch.hash_tensor(p)) for p in plain]
        facts["hashes of parameters, which process_group= says are copies"] = hashes
    return facts
