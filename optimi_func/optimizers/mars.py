"""MARS (Yuan et al. 2024), as an option of other optimizers."""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar

from torch import Tensor

from optimi_func.classes.fields import FloatOrNone
from optimi_func.rules import Betas, Body, Float, root, where
from optimi_func.state.convert import Group


def refuse_mars(group: Group) -> Group:
    """Return no options for torch, or raise an error if a group uses MARS."""
    if group["mars"] is not None:
        raise ValueError(f"torch.optim cannot go on with mars={group['mars']!r}")
    return {}


class Corrected(Body):
    """Base class of optimizers with the `mars` option, which corrects each gradient.

    A subclass writes its rule in the methods `plain_direction` and `plain_accumulate`, as
    if gradients were never corrected. `direction` and `accumulate` are these two methods if
    `mars` is None. If `mars` is set, `direction` calls `plain_direction` with the corrected
    gradient. The optimizer then also has a `measure` method, stores prev_grad in its state,
    and has no `accumulate` method.
    """

    plain_direction: ClassVar[Callable[..., tuple[Tensor, Any]]]
    plain_accumulate: ClassVar[Callable[..., tuple[Tensor, Any]]]

    betas: Betas = Betas(0.9, 0.99)
    weight_decay: Float = Float(0.0)
    _: KW_ONLY
    mars: FloatOrNone = FloatOrNone(None, "mars", type(None), argument=float | None)

    @property
    def direction(self) -> Callable[..., Any]:
        """The direction method, which takes `length` only if gradients are corrected."""
        return self.plain_direction if self.mars is None else self.corrected_direction

    @property
    def accumulate(self) -> Callable[..., Any] | None:
        """None if gradients are corrected: micro-batches have no previous gradient."""
        return self.plain_accumulate if self.mars is None else None

    @property
    def measure(self) -> Callable[..., Any] | None:
        """The method that measures norms of corrected gradients, or None without `mars`."""
        return None if self.mars is None else self.lengths

    def lengths(
        self, mean: Callable[[Tensor], Tensor], numel: Tensor, g: Tensor, s: Any, t: float
    ):
        c = self.corrected(g, s, t)
        return {"length": root(mean(c * c) * numel).clamp_min(1.0)}

    def corrected_direction(self, g: Tensor, s: Any, t: float, length: Tensor):
        d, new = self.plain_direction(self.corrected(g, s, t) / length, s, t)
        return d, new._replace(prev_grad=g)

    def corrected(self, g: Tensor, s: Any, t: float) -> Tensor:
        assert self.mars is not None
        b1, _ = self.betas
        return g + where(t > 1, self.mars * b1 / (1 - b1), 0.0) * (g - s.prev_grad)
