"""Optimizers whose parameters are not where to evaluate: `train()` and `eval()`.

In eval mode a parameter is its `eval_point`, and `state[p]` has what it was as
"train_param". So whatever saves, loads, copies or moves state does it with that too.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from optimi_func._codes import to
from optimi_func._distributed import from_local, is_distributed, leaf_to_local, to_local
from optimi_func._leaf import leaf_eval_point
from optimi_func._rule import Leaf
from optimi_func._saved import TRAIN_PARAM, LoadReport
from optimi_func._storage import state_in
from optimi_func.execution.kernels import kernel_context
from optimi_func.optimizers._checkpoints import Checkpoints
from optimi_func.optimizers._groups import Group, Path


class Evaluated(Checkpoints):
    """Of a class, the part that switches between where it steps and where to evaluate."""

    releases: list[Any]
    optimizer_accumulation: bool

    @torch.no_grad()
    def eval(self) -> None:
        """Let the parameters be those to evaluate, and to publish, the model with.

        `train()` brings back, bit for bit, what they were. Until then no step can be
        taken. A second call changes nothing.

        A checkpoint may be made in either mode. Made in this one, the model's state_dict
        holds the parameters to evaluate, and the optimizer's both its mode and what the
        parameters were: loaded, into an optimizer in either mode, it is in this mode,
        and after `train()` it goes on exactly.

        Raises:
            RuntimeError: A step's gradients have been taken in part: within an
                accumulation cycle of gradient release, or with `optimizer_accumulation`.
        """
        groups = [group for group in self._evaluated() if group["train_mode"]]
        if groups:
            self._check_between_steps()
        written: list[Tensor] = []
        try:
            for group in groups:
                for p, x in self._eval_params(group):
                    self.state[p][TRAIN_PARAM] = p.detach().clone()
                    written.append(p)
                    _write(p, x)
        except BaseException:  # no memory, perhaps
            self._restore(written)
            raise
        for group in groups:
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Go on with training: let the parameters be what they were before `eval()`.

        Raises:
            RuntimeError: A state that was loaded in eval mode without what the parameters
                were; nothing is written then.
        """
        groups = [group for group in self._evaluated() if not group["train_mode"]]
        for group in groups:
            for p in group["params"]:
                entry = self.state.get(p, {})
                if "step" in entry and entry.get(TRAIN_PARAM) is None:
                    raise RuntimeError(
                        f"train(): state{Path(group, p)} has no {TRAIN_PARAM!r}, which "
                        "eval() put there: the parameter to go on from is lost. Load "
                        "the whole state, or save it in train mode"
                    )
        for group in groups:
            self._restore([p for p in group["params"] if "step" in self.state.get(p, {})])
            group["train_mode"] = True

    def _restore(self, params: list[Tensor]) -> None:
        for p in params:
            _write(p, *to_local([self.state[p][TRAIN_PARAM]]))
            del self.state[p][TRAIN_PARAM]

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, in the mode that the others are in: see `BaseOptimizer`."""
        mode = all(group["train_mode"] for group in self._evaluated())
        super().add_param_group(param_group)
        self._set_mode(mode)

    @torch.no_grad()
    def init_state(self) -> None:
        """Make the state of every trainable parameter that has none: see `BaseOptimizer`.

        In eval mode it holds, as after `eval()`, what the parameter is in train mode.
        """
        found = [
            p
            for group in self._evaluated()
            for p in group["params"]
            if not (group["train_mode"] or "step" in self.state.get(p, {}))
        ]
        super().init_state()
        for p in found:
            if "step" in self.state.get(p, {}):
                self.state[p][TRAIN_PARAM] = p.detach().clone()

    def _evaluated(self) -> list[Group]:
        """The groups whose parameters are not where to evaluate."""
        return [
            group
            for group in self.param_groups
            if self.rule_of(group).eval_point is not None
        ]

    def _check_between_steps(self) -> None:
        """Refuse the switch within a step."""
        if self.optimizer_accumulation or any(x.accumulating for x in self.releases):
            raise RuntimeError(
                "eval() inside an accumulation cycle, whose gradients are those of the "
                "parameters as they are: end it before, by its last backward or by "
                "handle.step()"
            )

    def _eval_params(self, group: Group) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each parameter with a state where to evaluate: what lies here, and wide."""
        bound = self.bound_of(group)
        rule = bound.rule
        for p in group["params"]:
            entry = self.state.get(p, {})
            if "step" not in entry:
                continue
            now = p.detach() if group["train_mode"] else entry[TRAIN_PARAM]
            leaf = leaf_to_local(Leaf(now, *state_in(rule, entry)))
            running = rule.running(*[entry[k].item() for k in rule.running._fields])
            with kernel_context(p.device):
                coeffs, _ = bound.advance(entry["step"].item() + 1.0, running)
                x = leaf_eval_point(rule, leaf, coeffs)
            yield p, x

    def _set_mode(self, mode: bool) -> None:
        """Let all groups be in one mode."""
        for group in self._evaluated():
            group["train_mode"] = mode

    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """As `Checkpoints.master_state_dict`; in eval mode those to evaluate."""
        found = super().master_state_dict(model)
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        with torch.no_grad():
            for group in self._evaluated():
                some = [] if group["train_mode"] else self._eval_params(group)
                for p, x in some:
                    if p in names:
                        x = to(x, torch.promote_types(p.dtype, torch.float32))
                        found[names[p]] = from_local(x, p)
        return found

    def load_master_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Tensor]
    ) -> None:
        """As `Checkpoints.load_master_state_dict`, in train mode.

        Raises:
            RuntimeError: In eval mode.
        """
        self.check_train_mode("load_master_state_dict()")
        super().load_master_state_dict(model, state_dict)

    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        state_dict: dict[str, Any],
        *,
        strict: bool = True,
        keep_dtypes: bool = False,
        match: Literal["names", "order"] = "names",
    ) -> LoadReport:
        """As `Checkpoints.load_state_dict`; the mode becomes the file's.

        No parameter is written to. With a state of train mode the parameters have to be
        those of the file's model, with one of eval mode `train()` sets them.
        """
        before = [(group, group["train_mode"]) for group in self._evaluated()]
        self._set_mode(True)
        try:
            report = super().load_state_dict(
                state_dict, strict=strict, keep_dtypes=keep_dtypes, match=match
            )
        except BaseException:
            for group, mode in before:
                group["train_mode"] = mode
            raise
        self._set_mode(all(group["train_mode"] for group in self._evaluated()))
        return report


def _write(p: Tensor, x: Tensor) -> None:
    """Write x into what lies here of p."""
    (part,) = to_local([p.detach()])
    part.copy_(x)
    if is_distributed(p):
        # Autograd has not seen its local part written.
        torch.autograd.graph.increment_version(p)
