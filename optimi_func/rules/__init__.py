"""Your own optimizer: a class body with the update of one tensor.

`Optimizer` makes of it the class with param groups and schedulers, the pure step, compiled
kernels, gradient release, and all storages.
"""

import inspect
from collections.abc import Callable
from dataclasses import (
    KW_ONLY,
    MISSING,
    InitVar,
    dataclass,
    field,
    fields,
    make_dataclass,
)
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    TypeVar,
)

from torch import Tensor

from optimi_func.core.checks import check_needs_no_extras
from optimi_func.core.checks import check_number as check_number
from optimi_func.core.math import moment, second_moment, slow_moment
from optimi_func.core.rule import PyTree, Rule
from optimi_func.optimizers._forms import check_calls
from optimi_func.optimizers.base import BaseOptimizer
from optimi_func.pure.functional import FunctionalOptimizer, derived
from optimi_func.pure.tree import FlatTree, Rewrite, TreeState, broadcast
from optimi_func.rules.making import Making

__all__ = ["Moment", "Optimizer", "OwnRule", "SecondMoment", "Wide", "check_number"]

T = TypeVar("T")
Decay: TypeAlias = Literal["decoupled", "l2", "proximal"]


def _wide(p: Tensor, kept: Any) -> Tensor:
    del kept
    return slow_moment(p)


# The storage of a State's fields. A Tensor is a Moment.
Moment: TypeAlias = Annotated[Tensor, moment]
SecondMoment: TypeAlias = Annotated[Tensor, second_moment]
Wide: TypeAlias = Annotated[Tensor, _wide]


@dataclass(frozen=True, kw_only=True, repr=False)
class OwnRule(FunctionalOptimizer):
    """Base class of `pure` of an `Optimizer`: its rule with hyperparameters, as a value."""

    owner: ClassVar[type["Optimizer"]]
    usual: ClassVar[Decay] = "decoupled"

    @derived
    def rule(self) -> Rule[Any, Any]:
        """The mathematics, one rule for each combination of the static options."""
        return self.owner.rule_for(tuple(getattr(self, name) for name in self.choices))

    decay = derived[Any](lambda self: self._decay_kind(self.usual))

    def __repr__(self) -> str:
        """Return the call that makes it, without defaults."""
        return super().__repr__().replace("(", ".pure(", 1)

    def check(self) -> None:
        """Raise if a hyperparameter is out of range, also by the class's own `check`."""
        super().check()
        for name in self.rule.numbers:
            given = getattr(self, name)
            many = isinstance(getattr(type(self), name, None), tuple)
            if many and not isinstance(given, tuple | list):
                raise TypeError(f"Invalid {name}: {name}={given!r}: allowed is a tuple")
            for x in given if many else (given,):
                if name not in ("lr", "weight_decay"):
                    check_number(name, name, x)
        if hasattr(self.owner, "check"):
            values = {f.name: getattr(self, f.name) for f in fields(self)}
            self.owner.bare(values).check()

    def advance(self, t: Any, running: Any) -> tuple[Any, Any]:
        """Return the rule's coefficients; raise if its step has to be given tensors."""
        check_needs_no_extras(self.rule)
        return super().advance(t, running)

    def step(
        self,
        params: T,
        grads: PyTree,
        state: TreeState,
        *,
        rewrite: Rewrite | None = None,
        **extras: Any,
    ) -> tuple[T, TreeState]:
        """Return the parameters and the state after one update.

        Args:
            params: Parameter tree.
            grads: Its gradients; a parameter whose gradient is None does not change.
            state: From `init` or the step before.
            rewrite: Changes the updates before they are added: see `transforms.chain`.
            extras: What `direction` takes besides: each a tree with a tensor for each
                parameter, or a prefix of it, as a loss for all.

        Raises:
            TypeError: An extra that `direction` does not take, or one that it lacks.
        """
        names = self.rule.extras
        if {*names} != {*extras}:
            raise TypeError(
                f"{type(self).__name__}.pure.step got the extras {sorted(extras)}: its "
                f"direction takes {sorted(names)}"
            )
        leaves = FlatTree.check(self.rule, params, grads, state)
        given = {name: broadcast(name, extras[name], leaves) for name in names}

        def more(i: int, coeffs: Any) -> Any:
            own = {name: found[at[i]] for name, (found, at) in given.items()}
            shape = leaves.leaves[i].p.shape
            for name, x in own.items():
                if isinstance(x, Tensor) and x.shape not in (shape, ()):
                    raise ValueError(
                        f"{name}{leaves.paths[i]} has the shape {tuple(x.shape)}, but its "
                        f"parameter {tuple(shape)}: allowed are that and ()"
                    )
            return coeffs._replace(**own)

        return self._step(leaves, rewrite, more if names else None)


class Optimizer(BaseOptimizer):
    """Base class of an optimizer that its user writes: `direction`, for one tensor.

        class SignSGD(Optimizer):
            momentum: float = 0.9

            class State(NamedTuple):
                exp_avg: Tensor

            def direction(self, g: Tensor, s: State):
                m = self.momentum * s.exp_avg + (1 - self.momentum) * g
                return m.sign(), self.State(m)

    Decay, low precision, storage and kernels are not its business. The parameter moves by
    -lr times the direction. Fields are arguments of the constructor: floats and tuples of
    floats are hyperparameters, which may be scheduled, and others (bools, strings, ints)
    are static, so that methods may branch on them. Methods are traced once, when the class
    is defined. They read globals and closures then.

    Args:
        params: Parameters, named parameters, or param groups.
        lr: Learning rate.
        weight_decay: Decay coefficient; `decay` of the class line is its kind.

    The class line takes `decay`: "decoupled" (default), "l2" (it joins the gradient) or
    "proximal". `pure` is the same rule as a value: `SignSGD.pure(lr=1e-3)` has `init` and
    `step`. Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    Methods, of which only `direction` is needed. Arguments go by name: `t` is the 1-based
    step, `x` the parameter.

    - `direction(self, g, s, ...) -> (d, State)`: may take `t`, `x`, and other names, which
      `pure(...).step` is then given as trees; with `class Running(NamedTuple)` of floats
      also `r`, and it returns a third result, the Running of the next step.
    - `accumulate(self, g, s, ...) -> (d, State)`: the direction for a further part of a
      step's gradient, for gradient release with accumulation="states".
    - `after(self, x, u, s, t) -> (u, State)`: rewrites the finished delta u.
    - `means(self, mean, g, s, x, d, t) -> divisor` of the move, where `mean(tensor)` is the
      mean over the whole parameter, and s the new state.
    - `whole(self, d, t) -> d`: maps the direction of a whole tensor, as Muon does.
      `refuses(self, p)` returns why it does not take a parameter, or None.
    - `eval_point(self, x, s, t) -> x`: the parameter to evaluate with.
    - `init(self, p) -> State`: values to begin with, None for zeros.
    - `check(self)`: raises for hyperparameters out of range, see `check_number`.

    Raises:
        TypeError: At the definition of the class: a method that cannot be traced, that is
            not elementwise, or returns something else; a field that has the name of an
            option. At a step: extras that it lacks.

    >>> class SignSGD(Optimizer):
    ...     def direction(self, g: Tensor):
    ...         return g.sign()
    >>> w = torch.ones(2, requires_grad=True)
    >>> SignSGD([w], lr=0.1, compile=False).step((3 * w).sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    >>> SignSGD.pure(lr=0.1, weight_decay=0.5)
    SignSGD.pure(lr=0.1, weight_decay=0.5)
    """

    pure: ClassVar[Callable[..., OwnRule]]
    _own: ClassVar[dict[str, tuple[Any, Any]]] = {}
    _statics: ClassVar[tuple[str, ...]] = ()
    _rules: ClassVar[dict[Any, Rule[Any, Any]]] = {}
    _positional = ()

    _: KW_ONLY
    weight_decay: InitVar[float] = 0.0

    def __init_subclass__(cls, decay: Decay | None = None) -> None:
        """Make `pure` and the constructor, and trace the methods."""
        cls._own = {**cls._own, **_own_fields(cls)}
        cls._statics = tuple([n for n, x in cls._own.items() if not _is_number(*x)])
        cls._rules, traced = {}, hasattr(cls, "direction")
        if traced:
            cls.factory = cls.pure = _pure(cls, decay)
        super().__init_subclass__()
        defaults = tuple([cls._own[name][1] for name in cls._statics])
        if traced and MISSING not in defaults:
            cls.rule_for(defaults)

    @classmethod
    def bare(cls, values: dict[str, Any]) -> Any:
        """Return an instance with hyperparameters as attributes, and nothing else."""
        made: Any = object.__new__(cls)
        made.__dict__.update(values)
        return made

    @classmethod
    def rule_for(cls, statics: tuple[Any, ...]) -> Rule[Any, Any]:
        """Return the rule of a combination of the static options."""
        if statics not in cls._rules:  # Dynamo does not trace into functools.cache
            given = dict(zip(cls._statics, statics))
            rates = ("lr", "weight_decay")
            own = {n: x for n, (_, x) in cls._own.items() if n not in (*rates, *given)}
            numbers = {n: 0.5 if x is MISSING else x for n, x in own.items()}
            cls._rules[statics] = Making(cls, numbers, given).rule()
        return cls._rules[statics]


def _own_fields(cls: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the annotations and defaults of the fields of a class body."""
    options = {*Optimizer._parameters} - {"lr", "weight_decay"}
    found: dict[str, tuple[Any, Any]] = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if name.startswith("_") or "ClassVar" in str(annotation):
            continue
        taken = hasattr(BaseOptimizer, name) or hasattr(OwnRule, name)
        if name in options or (taken and name != "weight_decay"):
            raise TypeError(
                f"{cls.__name__}.{name} is an option or a method of every optimizer: give "
                "the hyperparameter another name"
            )
        default = cls.__dict__.get(name, MISSING)
        found[name] = annotation, default
    return found


def _is_number(annotation: Any, default: Any) -> bool:
    """Return True for a float or a tuple of floats, which is no static option."""
    if isinstance(default, float):
        return True
    text = (
        annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    )
    return "float" in text


def _pure(cls: type[Optimizer], decay: Decay | None) -> type[OwnRule]:
    """Return the class's rule as a value: a dataclass of its hyperparameters."""
    base: Any = getattr(cls, "pure", OwnRule)
    own = {**cls._own}
    made = make_dataclass(
        cls.__name__,
        [
            (name, bool if x in (bool, "bool") else Any, field(default=y))
            for name, (x, y) in own.items()
        ],
        bases=(OwnRule,),
        frozen=True,
        kw_only=True,
        repr=False,
        namespace={
            "owner": cls,
            "choices": cls._statics,
            "usual": decay or base.usual,
            "__doc__": f"The rule of `{cls.__name__}`, with `init` and `step` over trees.",
            "__module__": cls.__module__,
            "__qualname__": f"{cls.__qualname__}.pure",
        },
    )
    check_calls(made)
    return made
