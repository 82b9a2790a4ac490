"""Processes that hold copies of parameters, and divide the maps of their matrices."""

from collections.abc import Callable, Container
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from optimi_func.classes.groups import Group, path_of
from optimi_func.core.checks import warn_user
from optimi_func.core.distributed import (
    all_finite,
    any_distributed,
    comparable,
    is_distributed,
    to_local,
)
from optimi_func.core.owners import Holders, holders_of
from optimi_func.core.rule import WHOLE_BATCH, Microbatch
from optimi_func.core.torch_private import has_memory
from optimi_func.state.checkpoints import Checkpoints

# A group, some of its parameters, their gradients, and what each is to its step.
Work: TypeAlias = tuple[Group, list[Tensor], list[Tensor], list[Microbatch] | None]

_version = attrgetter("_version")


class Copies(Checkpoints):
    """The methods of an optimizer that several processes run on copies."""

    process_group: Any  # that holds copies of plain parameters, or None
    # What a loss scaler may set: not 0 leaves a step out, and the factor of all gradients.
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    _has_stepped: bool
    _idle: int  # steps before the first gradient

    def _check_group(self) -> None:
        """Raise if there is nothing that a process_group could divide."""
        rules = self.rules() if self.process_group is not None else []
        if rules and all(rule.whole is None for rule in rules):
            raise ValueError(
                f"process_group= with {rules[0].name}, which maps no matrices that could "
                "be divided: omit it. To divide states, make the optimizer by "
                "torch.distributed.optim.ZeroRedundancyOptimizer"
            )

    def _note_idle(self, params: list[Tensor]) -> None:
        """Warn at the second step of a distributed run if none of params has stepped."""
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        alone = not (distributed.is_available() and distributed.is_initialized())
        if alone or params or any_distributed(trained):
            self._idle = 3  # from now on it is no mistake, as of an actor that waits
        elif trained:
            self._idle += 1
        if self._idle == 2:
            warn_user(
                f"{type(self).__name__} has taken two steps, and none of its "
                f"{len(trained)} trainable parameters "
                f"({path_of(self.group_of(trained[0]), trained[0])}, ...) has had a "
                "gradient. fully_shard and parallelize_module replace a model's "
                "parameters: make the optimizer after them"
            )

    def holders_of(self, group: Group, p: Tensor, name: object = "") -> Holders | None:
        """Return the processes that divide the map of p, or None if one maps it alone."""
        if self.rule_of(group).whole is None:
            return None
        return holders_of(p, name, self.process_group)

    def numbers(
        self, of_device: Callable[[Tensor], object] = _version, only: Container[int] = ()
    ) -> dict[str, object]:
        """Return groups' hyperparameters, to compare; `only` are the ids of some groups."""
        return {
            f"{name} of param group {i}": comparable(group[name], of_device)
            for i, group in enumerate(self.param_groups)
            if not only or id(group) in only
            for name in self._factory_of(group)[1]
        }

    def _facts(self, divided: Container[int], works: list[Work]) -> dict[str, object]:
        """Return what processes compare before they step: numbers of the divided groups.

        Copies have every parameter, number and gradient in common, and equal weights.
        """
        if self.process_group is None:
            return self.numbers(type, divided)
        facts = self.numbers(type)
        for i, (group, params, _, _) in enumerate(works):
            # Those of divided groups are in `agree`'s message by name.
            if id(group) not in divided and len(params) < len(group["params"]):
                names = [str(path_of(group, p)) for p in params]
                facts[f"parameters with gradients of param group {i}"] = names
        if not self._has_stepped:
            params = [p.detach() for group in self.param_groups for p in group["params"]]
            plain = to_local([p for p in params if p.numel() and not is_distributed(p)])
            hashes = [str(torch.hash_tensor(p)) for p in plain]
            facts["hashes of parameters, which process_group= says are copies"] = hashes
        return facts


def check_unscaled(optimizer: Any) -> None:
    """Raise if a loss scaler has set what an update within a backward cannot honour."""
    if optimizer.found_inf is not None or optimizer.grad_scale is not None:
        raise RuntimeError(
            "found_inf or grad_scale with gradient release, whose updates come before the "
            "scaler has seen all gradients: set both to None, scale no loss, and pass "
            "skip_nonfinite= to prepare_for_gradient_release"
        )


def finite_works(optimizer: Any, works: list[Work]) -> list[Work]:
    """Return the works of a step, or none if a gradient of a process is not finite.

    If a group is capturable, the device decides. Skipped steps are counted. Gradients are
    divided by a loss scaler's factor in place, as by torch's fused step.
    """
    if optimizer.optimizer_accumulation:
        raise RuntimeError(
            "skip_nonfinite='step', found_inf or grad_scale with optimizer_accumulation="
            "True, whose steps have been taken in part before: choose one"
        )
    groups, grads = optimizer.param_groups, [g for work in works for g in work[2]]
    if optimizer.releases and not grads:
        check_unscaled(optimizer)
    if not all(map(has_memory, grads)):
        return works
    every = [p for group in groups for p in group["params"]]
    found, scale = optimizer.found_inf, optimizer.grad_scale
    finite = torch.ones((), dtype=torch.bool) if found is None else found.reshape(()) == 0
    if optimizer.skips_steps:
        finite = finite & all_finite(grads, every, optimizer.process_group)
    on_device = any(group["capturable"] for group in groups)
    skipped = optimizer.skipped_steps
    if not (on_device or finite):
        optimizer.skipped_steps = skipped + 1
        return []
    if scale is not None:
        for g in grads:
            g.div_(scale)
    if not on_device:
        return works
    if not isinstance(skipped, Tensor):
        optimizer.skipped_steps = torch.full_like(finite, skipped, dtype=torch.int64)
    optimizer.skipped_steps.add_(~finite)
    flags = {g.device: WHOLE_BATCH._replace(finite=finite.to(g.device)) for g in grads}
    return [(*work[:3], [flags[g.device] for g in work[2]]) for work in works]
