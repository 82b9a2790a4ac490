"""Parameters to evaluate: Schedule-Free's `train()` and `eval()`, and `EMA`.

In eval mode a parameter is its `eval_point`, the average x in the place of y, and
`state[p]["train_param"]` is the parameter of train mode, so that it is saved, loaded,
copied and moved with the state.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.groups import Group, path_of
from optimi_func.classes.stats import names_of
from optimi_func.core.checks import check_number, warn_user
from optimi_func.core.codes import to
from optimi_func.core.distributed import (
    distribute_like,
    from_local,
    is_distributed,
    leaf_to_local,
    to_local,
)
from optimi_func.core.leaf import compute_dtype, leaf_eval_point
from optimi_func.core.pairs import as_complex
from optimi_func.core.rule import (
    Leaf,
)
from optimi_func.core.storage import group_storage, state_in
from optimi_func.core.torch_private import reshard
from optimi_func.execution.kernels import kernel_context
from optimi_func.pure.casts import resolve
from optimi_func.pure.functional import Number
from optimi_func.state.convert import TRAIN_PARAM
from optimi_func.state.stored import begin, master, weight_of


class Evaluated(BaseOptimizer):
    """Base class of optimizers with `train()` and `eval()`: rules with an `eval_point`."""

    @torch.no_grad()
    def eval(self) -> None:
        """Set the parameters to those for evaluating, and publishing, the model.

        `train()` restores the former ones bit for bit. Until then no step can be taken. A
        second call changes nothing.

        A checkpoint may be made in either mode. In eval mode, the model's state_dict holds
        the parameters for evaluation, and the optimizer's holds the mode and the parameters
        of train mode. An optimizer that loads it is in eval mode too, and continues exactly
        after `train()`.

        Raises:
            RuntimeError: A step has taken only a part of its gradients: within an
                accumulation cycle of gradient release, or with `optimizer_accumulation`.
        """
        groups = [group for group in self._evaluated() if group["train_mode"]]
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
                for p, x in self._eval_params(group):
                    self.state[p][TRAIN_PARAM] = p.detach().clone()
                    written.append(p)
                    _write(p, x)
        except BaseException:  # for example if memory runs out
            self._restore(written)
            raise
        reshard(written)
        for group in groups:
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Set the parameters to what they were before `eval()`, to continue training.

        Elements that somebody has written to since then keep what was written, and their
        average begins there; a warning names the parameters.

        Raises:
            RuntimeError: A state that was loaded in eval mode without the parameters of
                train mode; nothing is written then.
        """
        groups = [group for group in self._evaluated() if not group["train_mode"]]
        for group in groups:
            for p in group["params"]:
                entry = self.state.get(p, {})
                if "step" in entry and entry.get(TRAIN_PARAM) is None:
                    raise RuntimeError(
                        f"train(): state{path_of(group, p)} has no {TRAIN_PARAM!r}, which "
                        "eval() put there, so the parameter to train is lost. Load the "
                        "whole state, or save it in train mode"
                    )
        if names := [path for group in groups for path in self._keep_written(group)]:
            warn_user(
                f"train(): params{', '.join(names)} were written to in eval mode. What was "
                "written is kept, and the average of these elements begins there. To go on "
                "from a checkpoint, load the optimizer's state too"
            )
        for group in groups:
            self._restore([p for p in group["params"] if "step" in self.state.get(p, {})])
            group["train_mode"] = True

    def _keep_written(self, group: Group) -> list[str]:
        """Train on from elements that were written in eval mode; return their names."""
        bound, names, storage = self.bound_of(group), list[str](), group_storage(group)
        coeffs, _ = bound.advance(1.0, bound.rule.running())
        for p, x in self._eval_params(group):
            if self._versions.get(p) == p._version:
                continue  # train() sets parameters that were not loaded with the state
            now, y = to_local([p.detach(), self.state[p][TRAIN_PARAM]])
            # A device, and a storage loaded into, may round x otherwise.
            near = (now - x).abs() <= 2 * torch.finfo(p.dtype).eps * (x.abs() + y.abs())
            mask = ~(near | (now == x) | now.isnan())
            if mask.any():
                names.append(str(path_of(group, p)))
                begin(bound.rule, coeffs, p, storage, self.state[p], mask, moments=False)
                y.copy_(torch.where(mask, now, y))
        return names

    def _clear_caches(self) -> None:
        super()._clear_caches()
        # The versions of parameters when a state in eval mode was loaded.
        self._versions: dict[Tensor, int] = {}

    def _join_loaded(self) -> None:
        super()._join_loaded()
        groups = [group for group in self._evaluated() if not group["train_mode"]]
        self._versions = {p: p._version for group in groups for p in group["params"]}

    def _restore(self, params: list[Tensor]) -> None:
        for p in params:
            _write(p, *to_local([self.state[p][TRAIN_PARAM]]))
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
        """Add a group in the mode of the others: see `BaseOptimizer.add_param_group`."""
        mode = all(group["train_mode"] for group in self._evaluated())
        super().add_param_group(param_group)
        for group in self._evaluated():
            group["train_mode"] = mode

    @torch.no_grad()
    def init_state(self) -> None:
        """Make the state of every trainable parameter that has none.

        In eval mode the parameter is kept as that of train mode, as after `eval()`.
        """
        params = [
            p
            for group in self._evaluated()
            for p in group["params"]
            if not (group["train_mode"] or "step" in self.state.get(p, {}))
        ]
        super().init_state()
        for p in params:
            if "step" in self.state.get(p, {}):
                self.state[p][TRAIN_PARAM] = p.detach().clone()

    def _evaluated(self) -> list[Group]:
        """Return the groups whose rule has an `eval_point`."""
        return [g for g in self.param_groups if self.rule_of(g).eval_point is not None]

    def _eval_params(self, group: Group) -> Iterator[tuple[Tensor, Tensor]]:
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
            for group in self._evaluated():
                points = [] if group["train_mode"] else self._eval_params(group)
                for p, x in points:
                    if p in names:
                        x = as_complex(x, p)
                        x = to(x, torch.promote_types(p.dtype, torch.float32))
                        weights[names[p]] = from_local(x, p)
        return weights


def _write(p: Tensor, x: Tensor) -> None:
    """Write x, a local tensor, into p or its local shard."""
    (part,) = to_local([p.detach()])
    part.copy_(x)
    if is_distributed(p):
        # Writing a local shard does not count as a write of the DTensor for autograd.
        torch.autograd.graph.increment_version(p)


class EMA:
    """Exponential moving averages of an optimizer's parameters, to evaluate with.

        a_t <- a_(t-1) + (1 - decay) / weight_t * (p_t - a_(t-1))

    as `transforms.ema` computes them: weight_t = 1 - decay^t (debias), or 1 with a_0 = p_0.
    p_t is the parameter with its compensation, of Schedule-Free's the point to evaluate at.
    Averages are float32, of DTensors as shards: torch's AveragedModel has averages of the
    parameter's dtype, which in bfloat16 stand still. Call `update()` after each step.

    Args:
        optimizer: A class of this package. Its trainable parameters are averaged.
        decay: In [0, 1): how much of an average an update keeps; a number or a schedule.
        debias: Begin with p_1. False begins with the parameters of now.

    Raises:
        TypeError: Another optimizer.
        ValueError: decay is out of its range.

    References:
        See `optimi_func.transforms.ema`.

    >>> from optimi_func import SGD
    >>> w = torch.nn.Parameter(torch.tensor(0.0))
    >>> optimizer = SGD([("w", w)], lr=1.0, compile=False)
    >>> average = EMA(optimizer, 0.5)
    >>> for _ in range(2):
    ...     w.grad = torch.tensor(-1.0)
    ...     optimizer.step()
    ...     average.update()
    >>> with average.applied():  # (0.25 * 1 + 0.5 * 2) / 0.75
    ...     print(w.item())
    1.6666667461395264
    """

    def __init__(
        self, optimizer: BaseOptimizer, decay: Number = 0.999, *, debias: bool = True
    ) -> None:
        if not isinstance(optimizer, BaseOptimizer):
            raise TypeError(
                f"EMA got {optimizer!r:.80}: allowed are this package's classes"
            )
        check_number("averaging decay", "decay", decay, below=1.0)
        self.optimizer, self.decay = optimizer, decay
        self.updates = torch.zeros((), dtype=torch.float64)
        self.weight = torch.full((), 0.0 if debias else 1.0, dtype=torch.float64)
        self._averages: dict[Tensor, Tensor] = {}
        self._compensations()

    def _compensations(self) -> dict[Tensor, Any]:
        """Return trainable parameters with their compensations; new ones get averages."""
        optimizer, entries = self.optimizer, self.optimizer.state
        params = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in params if p.requires_grad]
        every = {p: entries.get(p, {}).get("kahan_comp") for p in trained}
        new = {p: comp for p, comp in every.items() if p not in self._averages}
        self._averages |= {p: master(p, comp) for p, comp in new.items()}
        return every

    def _weights(self) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """Return parameters, and the local tensors whose sums join their averages."""
        optimizer, every = self.optimizer, self._compensations()
        points: dict[Tensor, Tensor] = {}
        if isinstance(optimizer, Evaluated):
            pairs = chain(*map(optimizer._eval_params, optimizer._evaluated()))
            points = {p: x for p, x in pairs if p in every}
        rest = [p for p in every if p not in points] if points else [*every]
        tensors = [*points.values(), *to_local(rest)]
        comps = [None] * len(points) + to_local([every[p] for p in rest])
        return [*points, *rest], tensors, comps

    @torch.no_grad()
    def update(self) -> None:
        """Let the parameters of now join the averages; one added later begins as it is.

        Raises:
            RuntimeError: In eval mode (Schedule-Free), or inside of `applied()`.
        """
        self.optimizer.check_train_mode("EMA.update()")
        decay = resolve("decay", self.decay, self.updates.clone())
        check_number("averaging decay", "decay", decay, below=1.0)
        self.weight.mul_(decay).add_(1.0 - decay)
        share = float((1.0 - decay) / self.weight)
        params, parts, comps = self._weights()
        averages = to_local([self._averages[p] for p in params])
        for p, average, part, comp in zip(params, averages, parts, comps):
            x = weight_of(part, comp, compute_dtype(p.dtype))
            average.lerp_(to(x, average.dtype), share)
        self.updates += 1

    @contextmanager
    def applied(self) -> Generator[None]:
        """Set the parameters to their averages inside, and then back, bit for bit.

        Inside the model is to evaluate and to publish: its state_dict has the averages. No
        step can be taken. It takes the memory of a copy of the parameters.
        """
        optimizer, averages = self.optimizer, dict(self._averages)
        optimizer.check_train_mode("EMA.applied()")
        weights = {p: p.detach().clone() for p in averages}
        optimizer.holds_averages = True
        try:
            self._set(averages)
            yield
        finally:
            self._set(weights)
            optimizer.holds_averages = False

    @torch.no_grad()
    def _set(self, values: Mapping[Tensor, Tensor]) -> None:
        for p, x in values.items():
            _write(p, *to_local([x]))
        reshard([*values])

    def _names(self) -> dict[Tensor, str]:
        """Return the name, or place, of each parameter."""
        names: dict[Tensor, str] = {}
        for i, group in enumerate(self.optimizer.param_groups):
            names.update(zip(group["params"], names_of(i, group)))
        return names

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages by name, or place, of the parameter: for `functional_call`."""
        names = self._names()
        return {names[p]: x for p, x in self._averages.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return averages and counts, in tensors that torch's dcp can load into."""
        return {"averages": self.averages, "updates": self.updates, "weight": self.weight}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load averages and counts, whole tensors or shards.

        Raises:
            ValueError: Other names or shapes; nothing is loaded then.
        """
        names, averages = self._names(), state_dict.get("averages", {})
        shapes = {names[p]: tuple(p.shape) for p in self._averages}
        saved_shapes = {name: tuple(x.shape) for name, x in averages.items()}
        if shapes != saved_shapes or not {"updates", "weight"} <= {*state_dict}:
            differ = sorted(dict(shapes.items() ^ saved_shapes.items()))
            raise ValueError(f"EMA's state has other names or shapes: {differ}")
        for p, x in self._averages.items():
            x.copy_(distribute_like(x, averages[names[p]]))
        self.updates.copy_(state_dict["updates"])
        self.weight.copy_(state_dict["weight"])
