"""Averages of an optimizer's parameters, to evaluate with: `EMA`."""

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
    """Exponential moving averages of an optimizer's parameters, to evaluate with.

        a_t <- a_(t-1) + (1 - decay) / weight_t * (p_t - a_(t-1))

    as `transforms.ema` computes them: weight_t = 1 - decay^t (debias), or 1 with a_0 = p_0.
    p_t is the parameter with its compensation, of Schedule-Free's the point to evaluate at.
    Averages are float32, of DTensors as shards: torch's AveragedModel has averages of the
    parameter's dtype, which in bfloat16 stand still. Call `update()` after each step.

    A parameter that gets frozen keeps its average, which tends to it with each update. One
    that is taken out of the optimizer's groups loses its average at the next update, and
    is evaluated as it is.

    Args:
        optimizer: A class of this package. Its parameters are averaged from the first
            update at which they require a gradient.
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
        self.updates = torch.zeros((), dtype=torch.float64, device="cpu")
        first = 0.0 if debias else 1.0
        self.weight = torch.full((), first, dtype=torch.float64, device="cpu")
        self._averages: dict[Tensor, Tensor] = {}
        self._seen, self._warned = (
            (-1, 0),
            False,
        )  # the optimizer's steps at the last update
        self._compensations()

    def _members(self) -> list[Tensor]:
        """Return the parameters that the optimizer has now."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _compensations(self) -> dict[Tensor, Any]:
        """Return averaged parameters with their compensations; new ones get averages.

        Those that no group has any more lose theirs, and are not kept alive by it.
        """
        entries, before = self.optimizer.state, self._averages
        params = [p for p in self._members() if p.requires_grad or p in before]
        every = {p: entries.get(p, {}).get("kahan_comp") for p in params}
        self._averages = {
            p: before[p] if p in before else master(p, comp) for p, comp in every.items()
        }
        return every

    def _present(self) -> dict[Tensor, Tensor]:
        """Return the averages of parameters that the optimizer has now."""
        return {p: self._averages[p] for p in self._members() if p in self._averages}

    def _weights(self) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """Return parameters, and the local tensors whose sums join their averages."""
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
        """Let the parameters of now join the averages; one added later begins as it is.

        Call it once after each step. It warns if no step was taken since the last update,
        as with a call for each micro-batch.

        Raises:
            RuntimeError: In eval mode (Schedule-Free), or inside of `applied()`.
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
        """Set the parameters to their averages inside, and then back, bit for bit.

        Inside the model is to evaluate and to publish: its state_dict has the averages. No
        step can be taken. It takes the memory of a copy of the parameters.
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
        """The averages by name, or place, of the parameter: for `functional_call`.

        Raises:
            ValueError: A parameter without a name in a group that has names.
        """
        names = names_of(self.optimizer.named_groups())
        return {names[p]: x for p, x in self._present().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return averages and counts, in tensors that torch's dcp can load into."""
        return {"averages": self.averages, "updates": self.updates, "weight": self.weight}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load averages and counts, whole tensors or shards.

        Raises:
            ValueError: Other names or shapes; nothing is loaded then.
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
