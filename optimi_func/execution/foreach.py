"""The foreach step: `leaf_step` on lists of tensors through torch._foreach_*.

`Many` is a list of tensors that `leaf_step` computes with like with one tensor. Each
operation is one call for the list.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.leaf import compute_dtype, leaf_round, leaf_step, taking
from optimi_func.core.lists import chunks
from optimi_func.core.rule import Leaf, Rule, Scalars
from optimi_func.execution.kernels import fill
from optimi_func.execution.launches import (
    LEAST,
    TEMPORARIES,
    Launch,
    plan_eager,
)
from optimi_func.execution.slots import Step, Update, split_twins
from optimi_func.execution.tensors import leaf_of

T = TypeVar("T")

# Elements that are updated together, at most. They are as many as keep the temporaries
# smaller than the parameters, but not fewer than LEAST.
CHUNK = 1 << 18

_LISTED = {"add", "sub", "mul", "div", "maximum", "clamp_min", "clamp_max"}
_ALONE = {"neg", "reciprocal", "sign", "sqrt", "abs"}
_SPELLED = {
    **{"__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul"},
    **{"__rmul__": "mul", "__truediv__": "div", "__neg__": "neg"},
}
_REFLECTED = {"__rsub__": "sub", "__rtruediv__": "div"}
# torch has no operation of a number and a list.
_TURNED = {"sub": ("neg", "add"), "div": ("reciprocal", "mul")}


class Many:
    """Tensors of one dtype that are computed with like one tensor."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all."""
        return self.tensors[0].dtype

    def is_floating_point(self) -> bool:
        """Return True for a floating dtype."""
        return self.dtype.is_floating_point

    def to(self, dtype: torch.dtype) -> "Many":
        """Cast each tensor."""
        casted = [torch.empty_like(x, dtype=dtype) for x in self.tensors]
        torch._foreach_copy_(casted, self.tensors)
        return Many(casted)

    def __getattr__(self, name: str) -> "Callable[..., Many]":
        """Return a method of Tensor for all tensors."""
        func = getattr(Tensor, name)
        return lambda *more, **named: _call(name, func, [self, *more], named)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tensor],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> "Many":
        return _call(func.__name__, func, list(args), kwargs or {})


def _operator(name: str) -> Callable[..., Many]:
    return lambda *args: _call(name, getattr(Tensor, name), list(args), {})


_OTHERS = (
    "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __invert__ __abs__ __pos__ __pow__ __rpow__ "
    "__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __mod__ __rmod__"
)
for _name in (*_SPELLED, *_REFLECTED, *_OTHERS.split()):
    setattr(Many, _name, _operator(_name))


def _call(
    name: str, func: Callable[..., Tensor], args: list[Any], named: dict[str, object]
) -> Many:
    if name in _REFLECTED and not named:
        name, args = _REFLECTED[name], args[::-1]
    # The operations on lists would not see keywords.
    name = "" if named else _SPELLED.get(name, name)
    first, *more = args or [None]
    if name in _TURNED and not isinstance(first, Many):
        turn, name = _TURNED[name]
        turned = getattr(torch, f"_foreach_{turn}")(more[0].tensors)
        first, *more = Many(list(turned)), first
    if name in ("add", "mul") and not isinstance(first, Many):
        first, *more = more[0], first
    if isinstance(first, Many) and (name in _LISTED or name in _ALONE):
        # torch._foreach_* takes lists of 0-d tensors, but not always one 0-d tensor.
        count = len(first.tensors)
        others = [x.tensors if isinstance(x, Many) else x for x in more]
        others = [[x] * count if isinstance(x, Tensor) else x for x in others]
        return Many(list(getattr(torch, f"_foreach_{name}")(first.tensors, *others)))
    values = [*args, *named.values()]
    count = next(len(x.tensors) for x in values if isinstance(x, Many))
    rows = zip(*[x.tensors if isinstance(x, Many) else [x] * count for x in values])
    n = len(args)
    return Many([func(*row[:n], **dict(zip(named, row[n:]))) for row in rows])


def plan_foreach(rule: Rule, updates: list[Update], write: bool) -> list[Launch]:
    """Plan updates of one kind, in chunks."""
    first = updates[0]
    if first.slot.coded:
        return plan_eager(rule, updates, write)
    wide = compute_dtype(first.g.dtype, *first.slot.dtypes)
    room = sum(u.p.nbytes for u in updates) // (TEMPORARIES * wide.itemsize)
    size = min(CHUNK, max(LEAST, room))
    launches: list[Launch] = []
    for batch in split_twins(updates):
        listed = [u for u in batch if u.slot.numel <= size or not u.can_be_cut]
        lists = chunks(listed, size, lambda u: u.slot.numel) if listed else ()
        launches += [ForeachLaunch(rule, chunk, write) for chunk in lists]
        large = [u for u in batch if u.slot.numel > size and u.can_be_cut]
        launches += plan_eager(rule, large, write, size)
    return launches


class ForeachLaunch(Launch):
    """A chunk of parameters, which is updated by operations on lists."""

    def __init__(self, rule: Rule, updates: list[Update], write: bool) -> None:
        super().__init__(rule, updates, write)
        if not self.shards:
            self.rounds = ()  # `run` takes them

    def _given(self, step: Step) -> tuple[Leaf, Any, Scalars]:
        columns = step.columns
        lists: list[Any] = list(map(Many, self.read(columns.own)))
        own = step.packed[self._at]
        scalars = own.scalars
        if not own.on_host:
            values = own.tensor(self.dtype, lists[0].tensors[0].device).unbind()
            scalars = fill(own.statics, pytree.tree_structure(scalars), values)
        g: Any = Many(self.pick(columns.grads))
        return leaf_of(self._rule, self._codes, lists), g, scalars

    def measure(self, step: Step, known: Tensor | None) -> Tensor:
        """Return the means, a row for each parameter."""
        given = self._given(step)
        tensors: Any = leaf_round(self._rule, *given, _columns(known))
        return torch.stack([torch.stack(_mean(x).tensors) for x in tensors], dim=1)

    def run(self, step: Step, known: Tensor | None) -> Tensor | None:
        """Update the parameters."""
        taken: list[Many] = []

        def mean(tensors: list[Many]) -> list[Many]:
            taken[:] = map(_mean, tensors)
            return taken

        leaf, g, scalars = self._given(step)
        take = taking(self._rule, _columns(known), mean)
        new: Any = leaf_step(self._rule, leaf, g, scalars, self._write, take)
        rows = zip(self.read(step.columns.into), _listed(leaf), _listed(new))
        for target, old, result in rows:
            if result is not old:
                torch._foreach_copy_(target, result.tensors)
        if self._rule.join is None or not taken:
            return None
        return torch.stack([torch.stack(x.tensors) for x in taken], dim=1)


def _mean(x: Many) -> Many:
    return Many([y.mean() for y in x.tensors])


def _columns(known: Tensor | None) -> Any:
    return [] if known is None else [Many(list(x.unbind())) for x in known.unbind(1)]


def _listed(leaf: Leaf) -> list[Any]:
    return [x for x in (leaf.p, *leaf.state, leaf.comp) if x is not None]
