"""Parameters to evaluate: Schedule-Free's `train()` and `eval()`.

In eval mode a parameter is its `eval_point`, the average x in the place of y, and
`state[p]["train_param"]` is the parameter of train mode, so that it is saved, loaded,
copied and moved with the state.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.groups import Group
from optimi_func.core.checks import warn_user
from optimi_func.core.codes import to
from optimi_func.core.distributed import from_local, is_distributed, leaf_to_local, to_local
from optimi_func.core.leaf import leaf_eval_point
from optimi_func.core.pairs import as_complex
from optimi_func.core.rule import Leaf
from optimi_func.core.storage import group_storage, state_in
from optimi_func.core.torch_private import reshard
from optimi_func.execution.kernels import kernel_context
from optimi_func.state.convert import TRAIN_PARAM
from optimi_func.state.stored import begin


class Evaluated(BaseOptimizer):
    """Base class that adds `train()` and `eval()` to rules with an `eval_point` method."""

    @torch.no_grad()
    def eval(self) -> None:
        """Set the parameters to the weights with which to evaluate or publish the model.

        `train()` restores the training weights bit for bit. In eval mode, `step` raises an
        error, and calling `eval()` again changes nothing. A parameter that is removed from
        the param groups in eval mode is restored together with the others.

        You can save a checkpoint in either mode. In eval mode, the model's state_dict
        contains the weights for evaluation, and the optimizer's state_dict contains the
        mode and the training weights. An optimizer that loads this state_dict is in eval
        mode too, and after `train()` training continues exactly.

        Raises:
            RuntimeError: The call is inside an accumulation cycle (of gradient release, or
                with `optimizer_accumulation`), so the current step is not complete. The
                same error is raised inside `EMA.applied()`, where the parameters are
                averages.
        """
        groups = [group for group in self.evaluated() if group["train_mode"]]
        if groups:
            super().check_train_mode("eval()")
        self._versions.clear()
        if groups and self.in_cycle():
            raise RuntimeError(
                "eval() inside an accumulation cycle, whose gradients are those of the "
                "present parameters. End the cycle first, by its last backward or by "
                "handle.step()"
            )
        written: list[Tensor] = []
        try:
            for group in groups:
                for p, x in self.eval_params(group):
                    self.state[p][TRAIN_PARAM] = p.detach().clone()
                    written.append(p)
                    write_local(p, x)
        except BaseException:  # for example if memory runs out
            self._restore(written)
            raise
        reshard(written)
        for group in groups:
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Set the parameters back to the training weights, to continue training.

        If your code has written to elements of a parameter since `eval()`, these elements
        keep the written values, and their averages begin again at these values. A warning
        names the parameters.

        Raises:
            RuntimeError: The state was loaded in eval mode and does not contain the
                training weights. Nothing is written in this case.
        """
        groups = [group for group in self.evaluated() if not group["train_mode"]]
        for group in groups:
            for p in group["params"]:
                entry = self.state.get(p, {})
                if "step" in entry and entry.get(TRAIN_PARAM) is None:
                    raise RuntimeError(
                        f"train(): state{self.path_of(group, p)} has no {TRAIN_PARAM!r}, "
                        "which eval() put there, so the parameter to train is lost. Load "
                        "the whole state, or save it in train mode. If the parameter was "
                        "put into the group after eval(), nothing is lost: take it out, "
                        "call train(), and put it back"
                    )
        if names := [path for group in groups for path in self._keep_written(group)]:
            warn_user(
                f"train(): params{', '.join(names)} were written to in eval mode. What was "
                "written is kept, and the average of these elements begins there. To go on "
                "from a checkpoint, load the optimizer's state too"
            )
        # All that eval mode has set, because a parameter may have left its group since.
        self._restore([p for p, x in self.state.items() if _is_set(x)])
        for group in groups:
            group["train_mode"] = True
        self._versions.clear()  # else parameters that are replaced stay alive

    def _keep_written(self, group: Group) -> list[str]:
        """Train on from elements that were written in eval mode; return their names."""
        bound, names, storage = self.bound_of(group), list[str](), group_storage(group)
        coeffs, _ = bound.advance(1.0, bound.rule.running())
        for p, x in self.eval_params(group):
            if self._versions.get(p) == p._version:
                continue  # train() sets parameters that were not loaded with the state
            now, y = to_local([p.detach(), self.state[p][TRAIN_PARAM]])
            # A device, and a storage loaded into, may round x otherwise.
            near = (now - x).abs() <= 2 * torch.finfo(p.dtype).eps * (x.abs() + y.abs())
            mask = ~(near | (now == x) | now.isnan())
            if mask.any():
                names.append(str(self.path_of(group, p)))
                begin(bound, coeffs, p, storage, self.state[p], mask, moments=False)
                y.copy_(torch.where(mask, now, y))
        return names

    def _clear_caches(self) -> None:
        super()._clear_caches()
        # The versions of parameters when a state in eval mode was loaded.
        self._versions: dict[Tensor, int] = {}

    def note_loaded(self) -> None:
        """Show the running scalars, and note that groups in eval mode were loaded so."""
        super().note_loaded()
        groups = [group for group in self.evaluated() if not group["train_mode"]]
        self._versions = {p: p._version for group in groups for p in group["params"]}

    def _restore(self, params: list[Tensor]) -> None:
        for p in params:
            write_local(p, *to_local([self.state[p][TRAIN_PARAM]]))
            del self.state[p][TRAIN_PARAM]
        reshard(params)

    def check_train_mode(self, what: str) -> None:
        """Raise in eval mode. `what` is the caller's action, for the error."""
        super().check_train_mode(what)
        if not all(group.get("train_mode", True) for group in self.param_groups):
            raise RuntimeError(
                f"{what} in eval mode, in which the parameters are those to evaluate: "
                "call the optimizer's train() first"
            )

    def add_param_group(self, param_group: Group) -> None:
        """Add a group in the present mode: see `BaseOptimizer.add_param_group`."""
        mode = all(group["train_mode"] for group in self.evaluated())
        super().add_param_group(param_group)
        for group in self.evaluated():
            group["train_mode"] = mode

    @torch.no_grad()
    def init_state(self) -> None:
        """Make the state of every trainable parameter that has none.

        In eval mode, a copy of the parameter is stored as the training weights, as `eval()`
        does.
        """
        params = [
            p
            for group in self.evaluated()
            for p in group["params"]
            if not (group["train_mode"] or "step" in self.state.get(p, {}))
        ]
        super().init_state()
        for p in params:
            if "step" in self.state.get(p, {}):
                self.state[p][TRAIN_PARAM] = p.detach().clone()

    def evaluated(self) -> list[Group]:
        """Return the groups whose rule has an `eval_point`."""
        return [g for g in self.param_groups if self.rule_of(g).eval_point is not None]

    def eval_params(self, group: Group) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (p, x) for each parameter with state, x being its `eval_point`.

        It is that of the local shard of a DTensor, at least in float32.
        """
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

    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Return `Checkpoints.master_state_dict`, in eval mode of the parameters x."""
        weights = super().master_state_dict(model)
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        with torch.no_grad():
            for group in self.evaluated():
                points = [] if group["train_mode"] else self.eval_params(group)
                for p, x in points:
                    if p in names:
                        x = as_complex(x, p)
                        x = to(x, torch.promote_types(p.dtype, torch.float32))
                        weights[names[p]] = from_local(x, p)
        return weights


def _is_set(entry: object) -> bool:
    """Return True for the entry of a parameter that eval mode has set."""
    return isinstance(entry, dict) and isinstance(entry.get(TRAIN_PARAM), Tensor)


def write_local(p: Tensor, x: Tensor) -> None:
    """Write x, a local tensor, into p or its local shard."""
    (part,) = to_local([p.detach()])
    part.copy_(x)
    if is_distributed(p):
        # Writing a local shard does not count as a write of the DTensor for autograd.
        torch.autograd.graph.increment_version(p)
