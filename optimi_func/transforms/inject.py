"""`inject`: hyperparameters in the state, to read, set, batch and differentiate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, overload

from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import shown
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import PyTree
from optimi_func.pure.casts import resolve
from optimi_func.pure.functional import FunctionalOptimizer, Number
from optimi_func.pure.tree import tensor_of
from optimi_func.transforms._trees import Around, check_state, count_from
from optimi_func.transforms.around import Averaged
from optimi_func.transforms.gradients import GradientTransform, Grads, Rewritten, number_at


class InjectState(NamedTuple):
    """The state of `inject`."""

    hyper: dict[str, PyTree]  # by name, a 0-d tensor or a tree of them: the next step's
    inner: PyTree


@dataclass(frozen=True, eq=False)
class Injected(Around[InjectState], state=InjectState, name="inject"):
    """An optimizer whose hyperparameters are in its state: see `inject`."""

    optimizer: FunctionalOptimizer | Averaged

    @property
    def hands_out(self) -> bool:
        """True if a chain may rewrite the updates."""
        return isinstance(self.optimizer, FunctionalOptimizer)

    def _around(self, params: PyTree, inner: PyTree) -> InjectState:
        numbers = _numbers(self.optimizer)
        return _after(numbers, numbers, count_from(params), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: InjectState, **extras: PyTree
    ) -> tuple[PyTree, InjectState]:
        """Update with `state.hyper`; schedules then set those of the next step."""
        state = self.checked(state)
        numbers = _numbers(self.optimizer)
        _check_hyper(numbers, state.hyper)
        now = replace(self.optimizer, **state.hyper)
        params, inner = now.step(params, grads, state.inner, **extras)
        return params, _after(numbers, state.hyper, inner.step.detach(), inner)

    def eval_params(self, params: PyTree, state: InjectState) -> PyTree:
        """Return the optimizer's parameters, with the hyperparameters in the state."""
        state = self.checked(state)
        _check_hyper(_numbers(self.optimizer), state.hyper)
        return replace(self.optimizer, **state.hyper).eval_params(params, state.inner)


def _rewrite(
    transform: GradientTransform, grads: Grads, state: PyTree, step: Tensor, **given: object
) -> Rewritten:
    _check_hyper(transform.numbers, check_state(state, InjectState, "inject").hyper)
    now = {k: number_at(k, x, step) for k, x in state.hyper.items()}
    grads, inner = transform.rewrite(grads, state.inner, step, **given, **now)
    return grads, _after(transform.numbers, state.hyper, step + 1.0, inner)


def _init(transform: GradientTransform, params: PyTree) -> InjectState:
    numbers = transform.numbers
    return _after(numbers, numbers, count_from(params), transform.init(params))


def _after(
    numbers: Mapping[str, object], hyper: Mapping[str, object], step: Tensor, inner: PyTree
) -> InjectState:
    """Return the state before a step, given `numbers` or the state's values before."""
    now = {k: _next(k, x, hyper[k], step) for k, x in numbers.items()}
    return InjectState(now, inner)


@overload
def inject(optimizer: GradientTransform) -> GradientTransform: ...
@overload
def inject(optimizer: FunctionalOptimizer | Averaged) -> Injected: ...
def inject(
    optimizer: FunctionalOptimizer | Averaged | GradientTransform,
) -> Injected | GradientTransform:
    """Keep every hyperparameter in the state, as 0-d tensors in float64.

    `state.hyper["lr"]` is the learning rate of the next step. All numbers that the rule
    uses are there: "lr", "weight_decay", "betas", "eps", "momentum" and so on, and "max_lr"
    if decay is fully decoupled (with max_lr=None: the lr that it began with). Trees of
    numbers stay trees. Choices (nesterov, maximize, the kind of decay) are not in it.

    To set one, replace it by another 0-d tensor of that dtype, or write into it:

        state = state._replace(hyper={**state.hyper, "lr": torch.tensor(0.1).double()})
        state.hyper["lr"].fill_(0.1)

    A graph does not recompile for it. The value of a schedule can be set too, for one
    step, after which the schedule continues.

    A gradient transform keeps its numbers in its part of a chain's state, and `ema` its
    decay. The numbers of an optimizer within are not among them:

        opt = chain(inject(clip_global_norm(1.0)), inject(adamw(lr=0.1)))
        state.transforms[0].hyper["max_norm"], state.inner.hyper["lr"]

    Args:
        optimizer: Made by a factory (`adamw(lr=...)`), a gradient transform with numbers,
            or `ema(...)`.

    Raises:
        TypeError: optimizer is another, or a gradient transform without numbers.
        ValueError: lr is a tree, decay is fully decoupled and max_lr is None.

    >>> import torch
    >>> from optimi_func import sgd
    >>> opt = inject(sgd(lr=0.1))
    >>> p = torch.ones(1)
    >>> state = opt.init(p)
    >>> state.hyper["lr"]
    tensor(0.1000, dtype=torch.float64)
    >>> _ = state.hyper["lr"].fill_(0.5)
    >>> p, state = opt.step(p, torch.ones(1), state)
    >>> p
    tensor([0.5000])
    """
    if isinstance(optimizer, GradientTransform) and optimizer.numbers:
        numbers = optimizer.numbers
        takes = {name: x for name, x in optimizer.takes.items() if name not in numbers}
        functions = partial(_init, optimizer), partial(_rewrite, optimizer)
        return GradientTransform(*functions, takes=takes)
    if not isinstance(optimizer, FunctionalOptimizer | Averaged):
        raise TypeError(
            f"inject got a {type(optimizer).__name__}: allowed are a FunctionalOptimizer, "
            "ema, and a gradient transform with numbers. Other transforms go around it, as "
            "in chain(inject(clip_value(1.0)), inject(adamw(lr=0.1))). An optimizer of "
            "your own can keep its hyperparameters in its own state"
        )
    if isinstance(optimizer, Averaged):
        return Injected(optimizer)
    several = not isinstance(optimizer.lr, float | int)
    if optimizer.needs_max_lr and optimizer.max_lr is None and several:
        option = "decouple_lr" if optimizer.decouple_lr else "corrected_decay"
        raise ValueError(
            f"inject got lr={optimizer.lr!r} with {option}=True and max_lr=None: the "
            "largest of several learning rates is not known, give max_lr"
        )
    return Injected(optimizer)


def _numbers(optimizer: FunctionalOptimizer | Averaged) -> dict[str, object]:
    """Return the hyperparameters that are numbers and have an effect, by name."""
    if isinstance(optimizer, Averaged):
        return {"decay": optimizer.decay}
    numbers: dict[str, object] = {
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
    }
    if optimizer.needs_max_lr:
        numbers["max_lr"] = optimizer.lr if optimizer.max_lr is None else optimizer.max_lr
    for name, x in optimizer.numbers.items():
        if not isinstance(x, bool | None) and not (isinstance(x, tuple) and None in x):
            numbers[name] = x
    return numbers


def _next(name: str, numbers: PyTree, values: PyTree, step: Tensor) -> PyTree:
    def after(number: Number, value: Tensor) -> Tensor:
        if value is not number and not callable(number):
            return value.clone()
        now = resolve(name, number, step.clone(), used=False)
        return tensor_of(now, scalar_dtype(step.device), step.device)

    return pytree.tree_map(after, numbers, values)


def _check_hyper(numbers: Mapping[str, object], hyper: dict[str, object]) -> None:
    if numbers.keys() != hyper.keys():
        raise ValueError(
            f"state.hyper holds {list(hyper)}, but inject's optimizer has {list(numbers)}: "
            "make the state with this optimizer's init"
        )
    for name, value in hyper.items():
        if pytree.tree_structure(value) != pytree.tree_structure(numbers[name]):
            raise ValueError(
                f"state.hyper[{name!r}] is {shown(value)} without the structure of the "
                f"optimizer's {name}={numbers[name]!r}: set the numbers in it one by one"
            )
        for x in pytree.tree_leaves(value):
            if not isinstance(x, Tensor) or x.dim() != 0:
                raise TypeError(
                    f"state.hyper[{name!r}] holds {shown(x)}: allowed are 0-d tensors (a "
                    "host number would be another graph)"
                )
