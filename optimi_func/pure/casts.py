"""The scalars of a pure step: hyperparameters at the step, cast for its leaves."""

import sys
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import shown, value_of
from optimi_func.core.leaf import leaf_dtype, leaf_sums
from optimi_func.core.math import scalar_dtype
from optimi_func.core.packed import Packed, flatten
from optimi_func.core.rule import Leaf, Named, PyTree, Rule, Scalar, Scalars
from optimi_func.core.torch_private import is_constant, is_unwatched
from optimi_func.core.tree import FlatTree, LeafState, running_tensors

T = TypeVar("T")

PLAIN = {float, int, bool, str, type(None)}


class Kept:
    """A base class whose instances of equal plain hyperparameters are made once."""

    _made: ClassVar[dict[object, Any]] = {}

    def __init_subclass__(cls) -> None:
        """Keep no values yet."""
        super().__init_subclass__()
        cls._made = {}

    @classmethod
    def kept(cls, **kwargs: object) -> Self:
        """Return `cls(**kwargs)`, made once for all lrs of equal other numbers.

        Tensors, schedules and trees may change, so values with these are not kept.
        """
        rest = dict(kwargs)
        lr, flat = rest.pop("lr", getattr(cls, "lr", None)), list[object]()
        for x in rest.values():
            flat += flatten(x) if type(x) is tuple else (x,)
        # 1, 1.0 and True are equal, but not equally allowed.
        kinds = tuple(map(type, flat))
        if type(lr) is not float or not PLAIN.issuperset(kinds):
            return cls(**kwargs)
        key = tuple(rest.items()), kinds
        if (value := cls._made.get(key)) is None:
            if len(cls._made) >= 64:
                cls._made.clear()
            # Another thread may have made an equal value meanwhile, and may clear them all.
            value = cls._made.setdefault(key, cls(**kwargs))
        return value if value.lr == lr else value.with_lr(lr)


class Casts:
    """Scalars as the arithmetic of leaves takes them: in its dtype, on its device.

    Each is converted once for a dtype and device, unless a derivative may pass through it,
    which would then be summed in another order. If the step runs at once, Python numbers
    become 0-d tensors, as in programs and kernels.
    """

    def __init__(self, rule: Rule, at_once: bool) -> None:
        self._rule, self._at_once = rule, at_once
        self._made: dict[object, Scalars] | None = {} if is_unwatched() else None

    def __call__(
        self, scalars: Scalars, dtype: torch.dtype, device: torch.device
    ) -> Scalars:
        """Return the scalars of a leaf."""
        cache = self._made
        if cache is None:
            out = pytree.tree_map_only(Tensor, lambda x: _cast(x, dtype, device), scalars)
            return _with_whole(out, scalars, device)
        key = id(scalars), dtype, device
        if key in cache:
            return cache[key]
        varying: list[Tensor] = []

        def cast(x: Scalar) -> Scalar:
            if not isinstance(x, Tensor):
                return x
            if not is_constant(x):
                varying.append(x)
            return _cast(x, dtype, device)

        packed = Packed(scalars) if self._at_once else None
        if packed is not None and packed.constant and not packed.mixes:
            out = packed.folded.filled(dtype, device)
        else:
            out = _each(cast, scalars)
        out = _with_whole(out, scalars, device)
        if not varying:
            cache[key] = out
        return out

    def joined(
        self,
        tree: FlatTree,
        states: list[LeafState],
        means: dict[int, list[Tensor]],
        scalars: list[Scalars],
        running: Named,
    ) -> list[LeafState]:
        """Return the states with the running scalars that the rule joins after a step."""
        rows: list[Tensor] = []
        for i, (p, s) in enumerate(zip(tree.leaves, tree.states)):
            leaf = Leaf(p, s.rule_state, s.kahan_comp)
            now = self(scalars[i], leaf_dtype(leaf, p), p.device)
            row = leaf_sums(self._rule, leaf, now.coeffs, means.get(i))
            rows.append(row.to(tree.state.step.device))
        sums: list[object] = [*torch.stack(rows).sum(0).unbind()]
        assert self._rule.join is not None
        after, device = self._rule.join(running, sums, scalars[0].coeffs), rows[0].device
        every = [running_tensors(after, device) for _ in states]
        return [LeafState(s.rule_state, s.kahan_comp, x) for s, x in zip(states, every)]


def _with_whole(found: Scalars, scalars: Scalars, device: torch.device) -> Scalars:
    """Return scalars with those of `Rule.whole` in double precision: it computes more."""
    if not hasattr(found.coeffs, "whole"):
        return found
    wide = scalar_dtype(device)
    whole = _each(
        lambda x: _cast(x, wide, device) if isinstance(x, Tensor) else x,
        scalars.coeffs.whole,
    )
    return found._replace(coeffs=found.coeffs._replace(whole=whole))


def _each(fn: Callable[[Any], Any], x: tuple[Any, ...]) -> Any:
    """Return nested tuples with fn of each item."""
    items = [_each(fn, y) if isinstance(y, tuple) else fn(y) for y in x]
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


def _cast(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert a tensor among the scalars to a leaf's device and dtype of arithmetic."""
    x = x.to(device, dtype)
    # The strided view makes Inductor store the scalar; without it, it would compute the
    # powers of betas again for every few elements of a parameter.
    return x.as_strided((), ()) if torch.compiler.is_compiling() else x


def called(optimizer: Any, t: Scalar) -> dict[str, Any]:
    """Return an optimizer's numbers at step t (1-based), with schedules called."""
    numbers = optimizer.numbers
    flat = [y for x in numbers.values() for y in (x if type(x) is tuple else (x,))]
    if not any(map(callable, flat)):
        return numbers
    values = at_step(numbers, t)
    now = object.__new__(type(optimizer))
    now.__dict__.update(optimizer.__dict__, **values)
    now.check()  # the values that schedules have at this step
    return values


def at_step(numbers: T, t: Scalar) -> T:
    """Return a tree of numbers at step t (1-based), with schedules called."""
    return pytree.tree_map(lambda x: x(t - 1.0) if callable(x) else x, numbers)


def resolve_tree(name: str, numbers: PyTree, step: Tensor) -> PyTree:
    """Return a number or a tuple of numbers at a step, whose bounds `check` has."""
    return pytree.tree_map(lambda x: resolve(name, x, step, bounded=False), numbers)


def resolve(
    name: str,
    number: Scalar | Callable[[Tensor], Scalar],
    step: Tensor,
    bounded: bool = True,
    most: float = sys.float_info.max,
) -> Scalar:
    """Return a hyperparameter at a step: schedules are called, tensors made float64.

    bounded=False leaves the bounds of a schedule's values to the caller. `most` is inf for
    a limit, which may be inf for some steps. An lr of inf would fill the parameters with
    NaN.
    """
    if callable(number):
        # In float32 1 - 0.9999**step would be off by 2e-4 of itself.
        number = _call(name, number, step.to(scalar_dtype(step.device)))
        _check_scheduled(name, number, bounded, most)
    if not isinstance(number, Tensor):
        return number
    if number.dim() != 0:
        raise ValueError(
            f"a hyperparameter of shape {tuple(number.shape)} reached the step, which "
            "takes numbers and 0-d tensors. Under vmap, keyword arguments are not "
            "batched. Pass it positionally, as in vmap(lambda p, g, s, lr: "
            "adamw_step(p, g, s, lr=lr))"
        )
    return number.to(scalar_dtype(number.device))


def _check_scheduled(name: str, number: Scalar, bounded: bool, most: float) -> None:
    """Raise if a schedule returned no number from 0, as far as that can be read."""
    value = number
    if isinstance(number, Tensor) and number.dim() == 0:
        if (value := value_of(number)) is None:
            return
    fits = isinstance(value, Real) and not isinstance(value, bool)
    if fits and (not bounded or 0.0 <= float(value) <= most):
        return
    raise (ValueError if fits or isinstance(number, Tensor) else TypeError)(
        f"{name} is a schedule that returned {shown(value)}: allowed are numbers from 0 "
        "(below inf, if not a limit) and 0-d tensors of them"
    )


def _call(name: str, schedule: Callable[[Tensor], Scalar], step: Tensor) -> Scalar:
    """Call a schedule; raise if its number is no tensor in a graph or under vmap."""
    help = (
        f"{name} is a schedule that turns the 0-d tensor step into a host number, which "
        "a graph would keep for all steps and vmap for all members. Compute it by torch "
        "operations on the step (no .item(), int(), float(), math or if), or pass the "
        "number itself"
    )
    if torch.compiler.is_compiling():
        value = schedule(step)
        if not isinstance(value, Tensor):
            raise ValueError(help)
        return value
    try:
        return schedule(step)
    except RuntimeError as error:
        if ".item()" in str(error) or "data-dependent control flow" in str(error):
            raise ValueError(help) from error
        raise
