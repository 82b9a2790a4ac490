"""The same rule through torch._foreach_*: many tensors an operation, and no compiler.

The pipeline runs on lists of tensors in place of tensors: `Many` turns each of its operations
into one call for the whole list. No formula stands here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func._leaf import compute_dtype, count_means, leaf_means, leaf_step
from optimi_func._rule import Leaf, Rule, Scalars
from optimi_func.execution.kernels import fill
from optimi_func.execution.launches import (
    EagerLaunch,
    Launch,
    StepInputs,
    Update,
    alike,
    leaf_of,
)
from optimi_func.execution.tensors import chunks, flat_leaf, foreach_copy_

# float32 (float64) numbers an element that are alive at once, at most: those of Adan with a
# compensation.
TEMPORARIES = 18
# Elements that are updated together, at most and at least: between the two, as many as
# leave the temporaries smaller than the parameters.
CHUNK = 1 << 18
LEAST = 1 << 12

_LISTED = {"add", "sub", "mul", "div", "maximum", "clamp_min", "clamp_max"}
_ALONE = {"neg", "reciprocal", "sign", "sqrt", "abs"}
_SPELLED = {"__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul"}
_SPELLED |= {"__rmul__": "mul", "__truediv__": "div", "__neg__": "neg"}
_TURNED = {"__rsub__": ("neg", "add"), "__rtruediv__": ("reciprocal", "mul")}


class Many:
    """Tensors of one dtype, computed with as with one."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, dtype: torch.dtype) -> "Many":
        casted = [torch.empty_like(x, dtype=dtype) for x in self.tensors]
        foreach_copy_(casted, self.tensors)
        return Many(casted)

    def __getattr__(self, name: str) -> Any:
        """A method of Tensor's, on each, or on all at once."""
        return lambda *more: _call(name, getattr(Tensor, name), [self, *more])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(func.__name__, func, list(args))


def _operator(name: str) -> Callable[..., Many]:
    return lambda *args: _call(name, getattr(Tensor, name), list(args))


for _name in (*_SPELLED, *_TURNED, "__lt__"):
    setattr(Many, _name, _operator(_name))


def _call(name: str, func: Callable[..., Tensor], args: list[Any]) -> Many:
    first, *more = args
    if name in _TURNED and isinstance(first, Many):
        turn, then = _TURNED[name]
        turned = getattr(torch, f"_foreach_{turn}")(first.tensors)
        return _call(then, func, [Many(list(turned)), *more])
    name = _SPELLED.get(name, name)
    if name in ("add", "mul") and not isinstance(first, Many):
        (first, *more) = more[0], first
    if isinstance(first, Many) and (name in _LISTED or name in _ALONE):
        # torch takes a list of numbers where it does not take a number on the device.
        count = len(first.tensors)
        others = [x.tensors if isinstance(x, Many) else x for x in more]
        others = [[x] * count if isinstance(x, Tensor) else x for x in others]
        return Many(list(getattr(torch, f"_foreach_{name}")(first.tensors, *others)))
    count = next(len(x.tensors) for x in args if isinstance(x, Many))
    rows = [x.tensors if isinstance(x, Many) else [x] * count for x in args]
    return Many([func(*row) for row in zip(*rows)])


class _Slice(NamedTuple):
    """A parameter, or a stretch of one: what a large one is cut into."""

    update: Update
    numel: int
    start: int | None  # of a stretch; None takes the tensors as they are


def plan_foreach(rule: Rule[Any, Any], updates: list[Update], write: bool) -> list[Launch]:
    """Launches of chunks of updates that share dtypes and numbers."""
    launches: list[Launch] = []
    for some in alike(updates):
        first = some[0]
        if first.slot.coded:
            launches += [EagerLaunch(rule, u, write) for u in some]
            continue
        measures = write and count_means(rule, first.scalars.scalars.rates) > 0
        wide = compute_dtype(first.g.dtype, *first.slot.dtypes)
        room = sum(u.p.nbytes for u in some) // (TEMPORARIES * wide.itemsize)
        size = min(CHUNK, max(LEAST, room))
        slices = [s for u in some for s in _slices(u, size, measures)]
        for chunk in chunks(slices, size, lambda s: s.numel):
            launches.append(ForeachLaunch(rule, chunk, write))
    return launches


def _slices(u: Update, size: int, measures: bool) -> list[_Slice]:
    count = u.slot.numel
    if count <= size or measures or not (u.dense and u.aligned):
        return [_Slice(u, count, None)]
    starts = range(0, count, size)
    return [_Slice(u, min(size, count - start), start) for start in starts]


class ForeachLaunch(Launch):
    """The pipeline on lists of tensors."""

    def __init__(self, rule: Rule[Any, Any], slices: list[_Slice], write: bool) -> None:
        super().__init__([s.update for s in slices])
        self._rule, self._write = rule, write
        self._stretches = [(s.start, s.numel) for s in slices]

    def _take(self, role: list[Tensor]) -> list[Tensor]:
        return [
            role[i] if start is None else _stretch(role[i], start, numel)
            for i, (start, numel) in zip(self.places, self._stretches)
        ]

    def _given(self, inputs: StepInputs) -> tuple[Leaf, Any, Scalars]:
        kept: list[Any] = [Many(self._take(inputs.roles[i])) for i in self._roles]
        packed = self.scalars(inputs)
        scalars = packed.scalars
        if not packed.on_host:
            device = kept[0].tensors[0].device
            values: Any = packed.values(self.dtype, device)
            scalars = fill(packed.statics, pytree.tree_structure(scalars), values)
        g: Any = Many(self._take(inputs.grads))
        return leaf_of(self._rule, self._codes, kept), g, scalars

    def measure(self, inputs: StepInputs) -> Tensor:
        found: Any = leaf_means(self._rule, *self._given(inputs))
        return torch.stack([torch.stack(x.tensors) for x in found], dim=1)

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        known = [] if means is None else [Many(list(x.unbind())) for x in means.unbind(1)]

        def take(measured: list[Any]) -> list[Any]:
            taken = known or [Many([y.mean() for y in x.tensors]) for x in measured]
            return [x.to(measured[0].dtype) for x in taken]

        leaf, g, scalars = self._given(inputs)
        new: Any = leaf_step(self._rule, leaf, g, scalars, self._write, take)
        finite = self.finite(inputs)
        for i, old, result in zip(self._roles, _listed(leaf), _listed(new)):
            if result is not old:
                target, made = self._take(inputs.targets[i]), result.tensors
                if finite is not None:
                    made = [torch.where(finite, r, t) for r, t in zip(made, target)]
                foreach_copy_(target, made)


def _listed(leaf: Leaf) -> list[Any]:
    return [x for x in (leaf.p, *leaf.state, leaf.comp) if x is not None]


def _stretch(x: Tensor, start: int, numel: int) -> Tensor:
    return x.as_strided((x.numel(),), (1,)).narrow(0, start, numel)
