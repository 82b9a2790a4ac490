"""Hooks that change directions: over whole tensors in rounds of means, or within a map.

A hook is a NamedTuple of numbers that `hook` decorates. It has one of two methods:

- `scale(n, lr)` returns a, or (a, b): the new direction is a * d + b * x. It computes these
  from the means n of x * x, x * d and d * d (`Norms`). The means of the new direction can
  be computed from those of d, so one round of means is enough for all hooks in a row that
  scale.
- `update(d, g, x)` is a generator. It may yield a list of tensors, to receive their means.
  The last that it yields is the new direction.

`bounds` has the range of a number by its name, as keywords of `check_number`.
With sized = True, `scale` finds the number of elements in n.numel, and `update` receives it
behind the means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_number
from optimi_func.core.math import plus
from optimi_func.core.rule import Rates, Rule, Scalar, Whole

T = TypeVar("T")

# A NamedTuple of numbers that `hook` decorates.
Hook: TypeAlias = tuple[Any, ...]
# A hook, and before it the text that tells its kind apart in the keys of kernels.
Keyed: TypeAlias = tuple[str, Any]


@dataclass(frozen=True)
class Reduction:
    """The part that means are taken over: a whole tensor, each matrix, or each row.

    A parameter with three dimensions is a stack of matrices. The matrix of a convolution
    has a row for each output channel. Muon's option `split` cuts a parameter into several
    matrices. A vector is one row.
    """

    over: Literal["tensor", "matrix", "row"] = "tensor"

    def __post_init__(self) -> None:
        """Raise for any other name."""
        if self.over not in ("tensor", "matrix", "row"):
            raise ValueError(
                f"over={self.over!r}: allowed are 'tensor', 'matrix' and 'row'"
            )

    def __repr__(self) -> str:
        """Return the name, as in the call of a hook."""
        return repr(self.over)

    def scaled(self, hook: Any, d: Tensor, x: Tensor, lr: Scalar, layout: Any) -> Tensor:
        """Return the direction that a hook makes of d, which is not sharded."""
        if self == TENSOR:
            return _scaled(hook, d, x, lr, [*range(d.dim())])
        d2, x2 = (y.reshape(1, -1) if y.dim() < 2 else y for y in (d, x))
        dims = [-1] if self.over == "row" else [-2, -1]
        pairs = zip(layout.matrices(d2), layout.matrices(x2))
        return layout.joined([_scaled(hook, y, z, lr, dims) for y, z in pairs], d)


# The options of a hook are its numbers: no pytree, and so no transform, looks into this.
pytree.register_constant(Reduction)
TENSOR = Reduction()
# The keys of hooks that are not the package's begin with this. Kernels with them are not
# stored on disk, where a later program could find them although its hook is another one.
OWN = "own hook "
_count = count()
KINDS: dict[str, Any] = {}  # by the name that state dicts contain


class Norms(NamedTuple):
    """The means of x * x, x * d and d * d, for a parameter x and its direction d.

    `numel` is the number of elements that they are means of, for a hook with sized = True.
    """

    xx: Tensor
    xd: Tensor
    dd: Tensor
    numel: Any = None


def hook(cls: type[T]) -> type[T]:
    """Make a hook of a NamedTuple class of numbers, which has `scale` or `update`.

    State dicts contain the name of the class and the numbers, so a program that loads them
    has to import the class first. A hook is not equal to hooks of another class, as tuples
    with equal items would be.

    Raises:
        TypeError: The class is no NamedTuple, or has neither or both of the methods.
    """
    kind: Any = cls
    methods = [x for x in ("scale", "update") if hasattr(cls, x)]
    if not hasattr(cls, "_fields") or len(methods) != 1:
        raise TypeError(
            f"{kind.__name__} is no hook: allowed is a NamedTuple of numbers with one of "
            "the methods scale(self, n, lr) and update(self, d, g, x)"
        )
    kind.__eq__ = lambda a, b: type(a) is type(b) and tuple.__eq__(a, b)
    kind.__ne__ = lambda a, b: not a == b
    kind.__hash__ = lambda a: hash((cls, *a))
    kind.scales, kind.decorated = methods == ["scale"], kind
    usual = {"sized": False, "keeps_norms": False, "over": TENSOR}
    usual |= {"bounds": {}, "reads_gradient": not kind.scales}
    for name, x in usual.items():
        if not hasattr(cls, name):
            setattr(cls, name, x)
    # A class that is defined again may compute something else, also with the same code.
    ours = cls.__module__.startswith("optimi_func.")
    kind.key = kind.__qualname__ if ours else f"{OWN}{next(_count)}"
    if "over" in kind._fields:
        make = kind.__new__

        def new(own: Any, *args: Any, **kwargs: Any) -> Any:
            x = make(own, *args, **kwargs)
            known = isinstance(x.over, Reduction)
            return x if known else x._replace(over=Reduction(x.over))

        kind.__new__ = new
        kind._replace = lambda own, **more: type(own)(**(own._asdict() | more))
    KINDS[f"{cls.__module__}.{kind.__qualname__}"] = kind
    return cls


def is_hook(x: object) -> bool:
    """Return True for an instance of a class that `hook` decorates, not of a subclass."""
    return isinstance(x, tuple) and getattr(x, "decorated", None) is type(x)


def plain(x: Any) -> tuple[Any, ...]:
    """Return a hook as the name of its class and its numbers, for state dicts."""
    options = [y.over if isinstance(y, Reduction) else y for y in x]
    return (f"{type(x).__module__}.{type(x).__qualname__}", *options)


def restored(x: Any) -> Any:
    """Return the hook that `plain` has returned as x, and anything else as it is."""
    if is_hook(x) or not (isinstance(x, tuple | list) and x and isinstance(x[0], str)):
        return x
    if x[0] not in KINDS:
        raise ValueError(
            f"a state dict has the hook {x[0]!r}, which is not defined in this program: "
            "import the module that defines it before"
        )
    return KINDS[x[0]](*x[1:])


def checked(owner: str, hooks: Any) -> Sequence[Any]:
    """Return hooks, also those of a state dict; raise for anything else."""
    hooks = tuple(map(restored, hooks)) if isinstance(hooks, tuple | list) else hooks
    if not isinstance(hooks, tuple) or not all(map(is_hook, hooks)):
        raise TypeError(
            f"{owner} got hooks={hooks!r}: allowed is a list of hooks, such as "
            "[optimi_func.hooks.floor(0.35)], whose classes are decorated by hooks.hook"
        )
    return hooks


def check_hooks(owner: str, rule: Rule, hooks: Sequence[Any], moves: bool = False) -> None:
    """Raise for hooks that do not go with a rule, and for numbers out of range.

    `moves` is True if the direction of the rule is the whole move, which contains lr.
    """
    mapped = rule.whole is not None or count_mapped(hooks) > 0
    for x in hooks:
        for name, number in x._asdict().items():
            if not isinstance(number, Reduction):
                bounds = {"least": -math.inf} | x.bounds.get(name, {})
                check_number(type(x).__name__, name, number, **bounds)
        why = ""
        if rule.join is not None:
            why = "its direction has sums over all parameters"
        elif rule.replaces:
            why = "its `after` leaves out the direction"
        elif x.reads_gradient and mapped:
            why = "its direction, or another hook, mixes the elements of a matrix"
        elif x.keeps_norms and rule.after is not None:
            why = "its `after` changes the move, and so norms"
        elif x.scales and moves:
            why = "its direction contains lr"
        elif x.over != TENSOR and rule.measure is not None:
            why = "a rule with `measure` maps no matrices: allowed is over='tensor'"
        if why:
            raise ValueError(f"{owner} does not go with the hook {x}: {why}")


def keyed(hooks: Sequence[Any]) -> tuple[Keyed, ...]:
    """Return hooks with their keys, as `Rates.hooks` has them."""
    return tuple([(x.key, x) for x in hooks])


def count_mapped(hooks: Sequence[Any]) -> int:
    """Return how many of the hooks are part of a map: all up to the last over a part."""
    parts = [i for i, x in enumerate(hooks) if x.over != TENSOR]
    return parts[-1] + 1 if parts else 0


def scaled_by(
    hook: Any, d: Tensor, x: Tensor, norms: Norms, lr: Scalar
) -> tuple[Tensor, Norms]:
    """Return the direction that a hook makes of d by factors, and its norms."""
    found = hook.scale(norms, lr)
    a, b = found if isinstance(found, tuple) else (found, None)
    xx, xd, dd, numel = norms
    if b is None:
        return a * d, Norms(xx, a * xd, a * a * dd, numel)
    dd = a * a * dd + 2.0 * a * b * xd + b * b * xx
    return plus(a * d, b, x), Norms(xx, a * xd + b * xx, dd.clamp_min(0.0), numel)


def _scaled(hook: Any, d: Tensor, x: Tensor, lr: Scalar, dims: list[int]) -> Tensor:
    """Return the direction that a hook makes of d, with means over these dimensions."""
    means = [y.mean(dims, keepdim=True) for y in (x * x, x * d, d * d)]
    count = d.numel() // max(1, means[0].numel())
    numel = torch.full((), count, dtype=d.dtype, device=d.device)
    return scaled_by(hook, d, x, Norms(*means, numel=numel), lr)[0]


def with_hooks(rule: Rule, first: Sequence[Any]) -> Rule:
    """Return a rule whose map also applies its first hooks, of which some are over parts.

    The hooks themselves arrive in the `Rates` of a step, so that all rules with as many
    hooks are one, and steps share kernels. While torch.compile traces, which warns of
    caches, each call returns another rule.
    """
    make = _with_hooks if torch.compiler.is_compiling() else _kept
    return make(rule, len(first), TENSOR in [x.over for x in first])


def _with_hooks(rule: Rule, count: int, joins: bool) -> Rule:
    inner = rule.whole or Whole(lambda d, read, fields, c, r: (d, fields), by_matrix=True)
    reads = inner.reads if "x" in inner.reads else (*inner.reads, "x")

    def mapped(
        d: Tensor, read: tuple[Tensor, ...], fields: tuple[Tensor, ...], c: Any, r: Rates
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        d, fields = inner.map(d, read[: len(inner.reads)], fields, c, r)
        for _, now in r.hooks[:count]:
            d = now.over.scaled(now, d, read[reads.index("x")], r.lr, inner.layout)
        return d, fields

    alone = inner.by_matrix and not joins  # a norm of the tensor needs all its matrices
    how = {"digest": "", "reads": reads, "by_matrix": alone, "hooks": count}
    return replace(rule, whole=inner._replace(map=mapped, **how))


_kept = lru_cache(64)(_with_hooks)
