"""Averages of an optimizer's parameters, with which to evaluate the model: `EMA`."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.evaluation import Evaluated, write_local
from optimi_func.classes.groups import names_of
from optimi_func.core.checks import check_number, check_source, warn_user
from optimi_func.core.codes import to
from optimi_func.core.distributed import distribute_like, to_local
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.torch_private import reshard
from optimi_func.pure.casts import resolve
from optimi_func.pure.functional import Number
from optimi_func.state.stored import master, weight_of


class EMA:
    """Exponential moving averages of an optimizer's parameters, for evaluation.

        a_t <- a_(t-1) + (1 - decay) / weight_t * (p_t - a_(t-1))

    `transforms.ema` computes the same averages. With debias=True, weight_t is 1 - decay^t.
    With debias=False, weight_t is 1, and a_0 is p_0. p_t is the parameter plus its Kahan
    compensation. For Schedule-Free optimizers, p_t is the point at which the model is
    evaluated. Averages are stored in float32, and averages of DTensors are stored as
    shards. (torch's AveragedModel stores averages in the dtype of the parameter. In
    bfloat16, such averages do not change, because rounding discards their small updates.)
    Call `update()` after each step.

    If you freeze a parameter, `update()` continues to average it, so its average approaches
    the frozen value. If you remove a parameter from the optimizer's param groups, its
    average is deleted at the next update, and the parameter is evaluated without averaging.

    Args:
        optimizer: An optimizer of this package. Each of its parameters is averaged from the
            first update at which the parameter requires a gradient.
        decay: The fraction of an average that each update keeps, in [0, 1): a number or a
            schedule.
        debias: True starts the averages at p_1. False starts the averages at the present
            values of the parameters.

    Raises:
        TypeError: optimizer is not an optimizer of this package.
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
        self.updates = torch.zeros((), dtype=torch.float64, device="cpu")
        first = 0.0 if debias else 1.0
        self.weight = torch.full((), first, dtype=torch.float64, device="cpu")
        self._averages: dict[Tensor, Tensor] = {}
        self._seen = -1, 0  # the optimizer's steps at the last update
        self._warned = False
        self._compensations()

    def _members(self) -> list[Tensor]:
        """Return the parameters that are in the optimizer's param groups now."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _compensations(self) -> dict[Tensor, Any]:
        """Return averaged parameters with their compensations, and create missing averages.

        The averages of parameters that are no longer in any param group are deleted, so
        this object does not keep these parameters alive.
        """
        entries, before = self.optimizer.state, self._averages
        params = [p for p in self._members() if p.requires_grad or p in before]
        every = {p: entries.get(p, {}).get("kahan_comp") for p in params}
        self._averages = {
            p: before[p] if p in before else master(p, comp) for p, comp in every.items()
        }
        return every

    def _present(self) -> dict[Tensor, Tensor]:
        """Return the averages of parameters that are in a param group now."""
        return {p: self._averages[p] for p in self._members() if p in self._averages}

    def _weights(self) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """Return parameters, local tensors and compensations.

        The average of each parameter is updated with the sum of its local tensor and its
        compensation.
        """
        optimizer, every = self.optimizer, self._compensations()
        points: dict[Tensor, Tensor] = {}
        if isinstance(optimizer, Evaluated):
            pairs = chain(*map(optimizer.eval_params, optimizer.evaluated()))
            points = {p: x for p, x in pairs if p in every}
        rest = [p for p in every if p not in points] if points else [*every]
        tensors = [*points.values(), *to_local(rest)]
        comps = [None] * len(points) + to_local([every[p] for p in rest])
        return [*points, *rest], tensors, comps

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the present values of the parameters.

        Call this method once after each step. If no step was taken since the last update,
        for example because you call this method after each micro-batch, a warning is
        emitted. The average of a parameter that you have added to the optimizer begins at
        the present value of the parameter.

        Raises:
            RuntimeError: The optimizer is in eval mode (Schedule-Free), or the call is
                inside `applied()`.
        """
        self.optimizer.check_train_mode("EMA.update()")
        self._check_stepped()
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

    def _check_stepped(self) -> None:
        """Warn once if the optimizer has taken no step since the last update."""
        skipped = self.optimizer.skipped_steps
        calls = self.optimizer.step_calls, skipped if isinstance(skipped, int) else 0
        if self._seen == calls and not self._warned:
            self._warned = True
            warn_user(
                "EMA.update() a second time since the optimizer's last step averages the "
                "same weights again, so that averages follow them faster than decay says. "
                "Call it once after each optimizer.step(), and not after each micro-batch"
            )
        self._seen = calls

    @contextmanager
    def applied(self) -> Generator[None]:
        """Return a context in which the parameters are set to their averages.

        Use this context to evaluate or publish the model: inside it, the model's state_dict
        contains the averages. You cannot take a step inside the context. At its end, the
        parameters are set back to their former values, bit for bit. The context needs
        memory for a copy of the parameters.
        """
        optimizer, averages = self.optimizer, self._present()
        optimizer.check_train_mode("EMA.applied()")
        weights = {p: p.detach().clone() for p in averages}
        try:
            optimizer.holds_averages = True
            self._set(averages)
            yield
        finally:
            self._set(weights)
            optimizer.holds_averages = False

    @torch.no_grad()
    def _set(self, values: Mapping[Tensor, Tensor]) -> None:
        for p, x in values.items():
            write_local(p, *to_local([x]))
        reshard([*values])

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages in a dict, which you can pass to `torch.func.functional_call`.

        The keys are the names of the parameters. A parameter without a name has the index
        of its param group and its index in the group as its key, such as "0.1".

        Raises:
            ValueError: A parameter has no name, but is in a param group that has names.
        """
        names = names_of(self.optimizer.named_groups())
        return {names[p]: x for p, x in self._present().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, the number of updates and the weight of the averages.

        These are the tensors of this object, so that torch.distributed.checkpoint can load
        into them.
        """
        return {"averages": self.averages, "updates": self.updates, "weight": self.weight}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict`, whose averages may be whole tensors or shards.

        Raises:
            ValueError: The names or shapes are different. Nothing is loaded in this case.
        """
        names = names_of(self.optimizer.named_groups())
        averages, present = state_dict.get("averages", {}), self._present()
        # One that was frozen in the other run has an average, and here it has none yet.
        new = [p for p in names if p not in present and names[p] in averages]
        shapes = {names[p]: tuple(p.shape) for p in [*present, *new]}
        saved_shapes = {k: tuple(getattr(x, "shape", ())) for k, x in averages.items()}
        if shapes != saved_shapes or not {"updates", "weight"} <= {*state_dict}:
            differ = sorted(dict(shapes.items() ^ saved_shapes.items()))
            raise ValueError(f"EMA's state has other names or shapes: {differ}")
        for p in [*present, *new]:
            check_source(f"EMA's average of {names[p]}", averages[names[p]], p)
        how: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        counts: dict[str, Tensor] = {}
        for name in ("updates", "weight"):
            x = state_dict[name]
            x = torch.tensor(x, **how) if isinstance(x, int | float) else x
            if not isinstance(x, Tensor) or x.numel() != 1 or x.is_complex():
                raise ValueError(f"EMA's {name} is {x!r:.80}: allowed is a number")
            counts[name] = x.detach()
        self._averages = present | {p: master(p, None) for p in new}
        for p, x in self._averages.items():
            x.copy_(distribute_like(x, averages[names[p]]))
        self.updates.copy_(counts["updates"].reshape(()))
        self.weight.copy_(counts["weight"].reshape(()))
