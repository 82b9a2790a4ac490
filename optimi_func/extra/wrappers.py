"""Optimizers around another: `SAM` and `Lookahead`."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.fields import Closure
from optimi_func.core.checks import check_whole, shown
from optimi_func.core.rule import Rule, Scalar
from optimi_func.core.torch_private import reshard
from optimi_func.state.entry import wants_state_alone
from optimi_func.state.stored import master, set_master
from optimi_func.transforms.ascent import ascent_moves, check_ascent, check_constant

_SLOW, _STEP = "lookahead_slow_buff", "lookahead_step"  # as timm's Lookahead


class Wrapper(torch.optim.Optimizer):
    """Base class of optimizers around another.

    Param groups, state, checkpoints and all methods but `step` are those of `optimizer`,
    any torch.optim.Optimizer. Wrappers may be nested.
    """

    _around_a_value: ClassVar[str]

    def __init__(self, optimizer: torch.optim.Optimizer, **options: object) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{type(self).__name__} got {optimizer!r:.80}: allowed are "
                "torch.optim.Optimizers. Around a value, as adamw(...), is "
                f"{self._around_a_value}"
            )
        state = {"optimizer": optimizer, "defaults": {**optimizer.defaults}}
        self.__setstate__({**state, "_options": (*options,), **options})
        self._check()

    def _check(self) -> list[Rule]:
        """Raise for what a step could not honour, and return the optimizer's rules."""
        name, inner = type(self).__name__, self.optimizer
        while isinstance(inner, Wrapper):
            inner = inner.optimizer
        if isinstance(inner, BaseOptimizer):
            inner.check_train_mode(f"{name}.step()")
            if inner.defaults["gradient_release"]:
                raise ValueError(
                    f"{name} with gradient_release=True, by which parameters move in "
                    "backward, before step(): allowed is an optimizer without it"
                )
            return inner.rules()
        return []

    def _params(self, closure: Closure | None) -> list[Tensor]:
        """Return all parameters, or none for a step that only makes state."""
        if closure is None and wants_state_alone(self.state):
            return []
        return [p for group in self.param_groups for p in group["params"]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy or pickle has: no hooks."""
        names = "optimizer", "defaults", "_options", *self._options
        return {name: self.__dict__[name] for name in names}


def _forwarded(name: str) -> Callable[..., object]:
    def method(self: Wrapper, *args: object, **kwargs: object) -> object:
        return getattr(self.optimizer, name)(*args, **kwargs)

    return method


for _name in ("state_dict", "load_state_dict"):
    for _when in ("pre", "post"):
        _hook = f"register_{_name}_{_when}_hook"
        setattr(Wrapper, _hook, _forwarded(_hook))
for _name in ("state_dict", "load_state_dict", "zero_grad", "add_param_group", "__repr__"):
    setattr(Wrapper, _name, _forwarded(_name))


class SAM(Wrapper):
    """Sharpness-aware minimization: step along the gradient at the worst point nearby.

        e = rho * g / |g|,   or with adaptive  rho * T^2 g / |T g|,  T = |p| + 0.01
        p <- the optimizer's step from p, along the gradient at p + e

    `step(closure)` calls the closure twice, and returns the first loss. In between and if
    the closure raises the parameters are put back, bit for bit, from a copy.

    Args:
        optimizer: Any torch.optim.Optimizer whose step needs no closure.
        rho: The distance of that point, from 0.
        adaptive: Measure it by |p|, with a rho some ten times as large.

    Raises:
        ValueError: rho is negative; maximize; gradient release.

    References:
        See `optimi_func.transforms.ascent`.

    >>> from optimi_func import SGD
    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> optimizer = SAM(SGD([w], lr=0.25, compile=False), rho=1.0)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (w * w).sum() / 2
    ...     loss.backward()
    ...     return loss.item()
    >>> optimizer.step(closure), w.detach()  # w - 0.25 (w + w / 5)
    (12.5, tensor([2.1000, 2.8000]))
    """

    _around_a_value = "transforms.ascent"

    def __init__(
        self, optimizer: torch.optim.Optimizer, rho: Scalar = 0.05, adaptive: bool = False
    ) -> None:
        super().__init__(optimizer, rho=rho, adaptive=adaptive)

    def _check(self) -> list[Rule]:
        rules = super()._check()
        check_ascent(self.rho, self.adaptive)
        if any([group.get("maximize") for group in self.param_groups]):
            raise ValueError("SAM with maximize=True: let the loss be its negative")
        return rules

    @torch.no_grad()
    def step(self, closure: Closure | None = None, **extras: object) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step, and return the first loss; extras are the optimizer's."""
        if not (params := self._params(closure)):
            return self.optimizer.step(**extras)
        self._check()
        if not callable(closure):
            raise TypeError(
                f"SAM.step: closure={shown(closure)}: allowed is a function that clears "
                "the gradients, computes the loss, calls backward on it and returns it. A "
                "GradScaler passes none"
            )
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        copies = [(p, p.clone()) for p in params if p.grad is not None]
        grads = [p.grad for p, _ in copies]
        try:
            ups = ascent_moves([x for _, x in copies], grads, self.rho, self.adaptive)
            for (p, _), up in zip(copies, ups):
                p.add_(up)
            reshard(params)
            evaluate()
        finally:
            for p, x in copies:
                p.copy_(x)
            reshard(params)
        self.optimizer.step(**extras)
        return loss


class Lookahead(Wrapper):
    """Lookahead: after every k steps go back a part of the way to where they began.

        slow <- slow + alpha * (p - slow),   p <- slow

    The slow parameters are float32 or wider, `lookahead_slow_buff` in the state.

    Args:
        optimizer: Any torch.optim.Optimizer.
        k: Its steps between two moves of the slow parameters, at least 1.
        alpha: How much of the way these go, in (0, 1].

    Raises:
        ValueError: A number out of its range; an optimizer with train() and eval(), or
            gradient release.

    References:
        Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back",
        arXiv:1907.08610.
    """

    _around_a_value = "torch.lerp every k steps"

    def __init__(
        self, optimizer: torch.optim.Optimizer, k: int = 5, alpha: Scalar = 0.5
    ) -> None:
        super().__init__(optimizer, k=k, alpha=alpha)

    def _check(self) -> list[Rule]:
        check_whole("k", self.k, 1)
        check_constant("alpha", self.alpha, above=0.0, most=1.0)
        for rule in (rules := super()._check()):
            if rule.eval_point:
                raise ValueError(
                    "Lookahead writes parameters, and the point that "
                    f"{rule.name} evaluates at would not follow: allowed are "
                    "optimizers without train() and eval()"
                )
        return rules

    def _rest(self, p: Tensor) -> Tensor | None:
        return self.state.get(p, {}).get("kahan_comp")

    @torch.no_grad()
    def step(self, closure: Closure | None = None, **extras: object) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step of the optimizer, and return what it returns."""
        self._check()
        params = [p for p in self._params(closure) if p.requires_grad]
        fresh = [p for p in params if _SLOW not in self.state.get(p, {})]
        first = [master(p, self._rest(p)) for p in fresh]
        loss = self.optimizer.step(closure, **extras)
        for p, x in zip(fresh, first):
            self.state[p][_SLOW] = x
        count = self.param_groups[0].get(_STEP, 0) + bool(params)
        for group in self.param_groups:
            group[_STEP] = count
        for p in params if count % self.k == 0 else ():
            slow, rest = self.state[p][_SLOW], self._rest(p)
            slow.add_(self.alpha * (master(p, rest) - slow))
            p.copy_(slow) if rest is None else set_master(p, rest, slow)
        reshard(params if count % self.k == 0 else ())
        return loss
