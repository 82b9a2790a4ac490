"""Your own optimizer: a class body with the update of one tensor.

`Optimizer` makes of it a class with param groups, the pure step, compiled kernels, gradient
release and all storages.
"""

import inspect
import math
from collections.abc import Callable
from copy import copy
from dataclasses import KW_ONLY, MISSING, InitVar, dataclass, field, fields, make_dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from torch import Tensor, optim

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.forms import check_calls
from optimi_func.core.checks import check_number, shown
from optimi_func.core.math import moment, second_moment, slow_moment
from optimi_func.core.rule import PyTree, Rule
from optimi_func.pure.casts import resolve_tree
from optimi_func.pure.functional import FunctionalOptimizer, derived
from optimi_func.pure.tree import FlatTree, Rewrite, TreeState, broadcast, path_of
from optimi_func.rules.making import NAMES, RATES, Making
from optimi_func.state.convert import Counterparts

__all__ = ["Moment", "Optimizer", "OwnRule", "SecondMoment", "Wide", "check_number"]

T = TypeVar("T")
Decay: TypeAlias = Literal["decoupled", "l2", "proximal"]


# The storage of a State's fields. A Tensor is a Moment.
Moment: TypeAlias = Annotated[Tensor, moment]
SecondMoment: TypeAlias = Annotated[Tensor, second_moment]
Wide: TypeAlias = Annotated[Tensor, slow_moment]


@dataclass(frozen=True, kw_only=True, repr=False)
class OwnRule(FunctionalOptimizer):
    """Base class of the `pure` of an `Optimizer`: its rule with hyperparameters."""

    owner: ClassVar[type["Optimizer"]]
    usual: ClassVar[Decay] = "decoupled"

    @derived
    def rule(self) -> Rule[Any, Any]:
        """The mathematics, a rule for each combination of static options."""
        return self.owner.rule_for(tuple([getattr(self, name) for name in self.choices]))

    @derived
    def decay(self) -> Any:
        """The kind of weight decay."""
        return self._decay_kind(self.usual)

    def __repr__(self) -> str:
        """Return the call that makes it, without defaults."""
        return super().__repr__().replace("(", ".pure(", 1)

    def check(self) -> None:
        """Raise if a hyperparameter is out of range, also by the class's own `check`."""
        where = type(self).__name__
        for name in self.choices:
            x, usual = getattr(self, name), getattr(type(self), name, callable)
            if isinstance(x, Tensor) or (callable(x) and not callable(usual)):
                raise TypeError(
                    f"{where}: {name}={shown(x)}, but {name} is static: a tensor or a "
                    "schedule needs a field whose default is a float"
                )
        means = self.rule.means
        if self.cautious and means is not None and means.divides == "sum":
            raise ValueError(
                f"{where}: cautious=True with means that take decay: allowed is False"
            )
        super().check()
        # A class's `check` sets all bounds, else the defaults do.
        bound = not hasattr(self.owner, "check")
        for name in self.rule.numbers:
            if name in RATES:
                continue  # checked before, and may be a prefix of the tree
            usual: Any = getattr(type(self), name, None)
            given = getattr(self, name)
            count = len(usual) if isinstance(usual, tuple) else 0
            if count and not (isinstance(given, tuple | list) and len(given) == count):
                text = f"Invalid {name}: {name}={given!r}: allowed are {count} numbers"
                raise ValueError(text)
            some = usual if count else (usual,)
            some = [0.0, *[x for x in some if isinstance(x, float | int)]]
            least = 0.0 if bound and min(some) >= 0.0 else -math.inf
            most = None if bound and math.inf not in some else math.inf
            below = 1.0 if bound and name == "betas" and max(some) < 1.0 else None
            for x in given if count else (given,):
                check_number(name, name, x, below, least, most)
        if not bound:
            self.owner.bare({f.name: getattr(self, f.name) for f in fields(self)}).check()

    @property
    def starting_rule(self) -> Rule[Any, Any]:
        """The rule, with the class's `init` of these hyperparameters."""
        if not hasattr(self.owner, "init"):
            return self.rule
        rule, own = copy(self.rule), cast(Any, self.rule.init)
        numbers = resolve_tree("a number", self.numbers, torch.zeros(()), False)
        object.__setattr__(rule, "init", partial(own, numbers=numbers))
        return rule

    def step(
        self,
        params: T,
        grads: PyTree,
        state: TreeState,
        *,
        rewrite: Rewrite | None = None,
        **extras: Any,
    ) -> tuple[T, TreeState]:
        """Return the parameters and the state: see `FunctionalOptimizer.step`.

        Extras are what `direction` takes besides, by name: trees with a tensor for each
        parameter, or prefixes of them.

        Raises:
            TypeError: An extra that `direction` lacks, or does not take.
        """
        if {*self.rule.extras} != {*extras}:
            raise TypeError(
                f"{type(self).__name__}.pure(...).step got the extras {sorted(extras)}: "
                f"its direction takes {sorted(self.rule.extras)}"
            )
        tree = FlatTree.of(params, grads, state).check(self.rule)
        own: list[dict[str, Any]] = [{} for _ in tree.leaves]
        for name, given in extras.items():
            found, at = broadcast(name, given, tree)
            for i, p in enumerate(tree.leaves):
                own[i][name] = x = found[at[i]]
                if isinstance(x, Tensor) and x.shape not in (p.shape, ()):
                    raise ValueError(
                        f"{name}{path_of(params, i)} has the shape {tuple(x.shape)}, and "
                        f"its parameter {tuple(p.shape)}: allowed are that and ()"
                    )
        return self._step(tree, rewrite, own)


class Optimizer(BaseOptimizer):
    """Base class of an optimizer that its user writes: `direction`, for one tensor.

        class SignSGD(Optimizer):
            momentum: float = 0.9

            class State(NamedTuple):
                exp_avg: Tensor

            def direction(self, g: Tensor, s: State):
                m = self.momentum * s.exp_avg + (1 - self.momentum) * g
                return m.sign(), self.State(m)

    The parameter moves by -lr times the direction; decay, precision and storage are not its
    business. Fields are the constructor's arguments. Floats and tuples of floats are
    hyperparameters, which may be scheduled. Others (bools, strings, ints) are static, so
    that methods may branch on them. `SignSGD.pure(lr=1e-3)` is the same as a value, with
    `init` and `step`. Methods are traced once, at the definition, and read globals then.
    Only `direction` is needed. Arguments go by name (direction's g and s are the first two,
    whatever their names): t is the 1-based step, x the parameter.

    - `direction(self, g, s, ...) -> (d, State)` may take t, x, and extras under other
      names. With a `Running` of floats it takes r, and returns one as third result.
    - `accumulate(self, g, s, ...) -> (d, State)`: for a further part of a step's gradient.
    - `after(self, x, u, s, t) -> (u, State)` rewrites the finished delta u.
    - `means(self, mean, g, s, x, d, t)` returns what d is divided by. If it takes `decay`,
      what decay adds to d, it divides their sum. s is the new state.
    - `whole(self, d, t) -> d` maps the direction of a whole tensor, as Muon does.
      `refuses(self, p)` returns why it does not take a parameter, or None.
    - `eval_point(self, x, s, t) -> x` returns the parameter to evaluate with.
    - `coeffs(self, t, r, lr, weight_decay)` returns scalars at every step, c for others.
    - `init(self, p) -> State` returns the first values, and None for zeros.
    - `check(self)` raises for hyperparameters out of range, and sets all bounds.

    The class line takes `decay`: "decoupled", "l2" (it joins the gradient) or "proximal".

    Args:
        params: Parameters, named parameters, or param groups.
        weight_decay: Decay coefficient.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    Raises:
        TypeError: At the definition of the class: a method that cannot be traced or is not
            elementwise, other results, a field that has the name of an option. At the
            construction: a direction that takes extras.

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
    _own: ClassVar[dict[str, tuple[Any, Any]]] = {}  # annotations and defaults
    _statics: ClassVar[tuple[str, ...]] = ()
    _rules: ClassVar[dict[Any, Rule[Any, Any]]] = {}
    _usual: ClassVar[Decay] = "decoupled"
    _positional = ()

    _: KW_ONLY
    weight_decay: InitVar[float] = 0.0

    def __init_subclass__(cls, decay: Decay | None = None) -> None:
        """Make `pure` and the constructor, and trace the methods."""
        cls._own = {**cls._own, **_own_fields(cls)}
        cls._statics = tuple([n for n, x in cls._own.items() if not _is_number(*x)])
        cls._rules, traced = {}, hasattr(cls, "direction")
        cls._usual = decay or cls._usual
        cls.pure = _lacks_direction(cls)
        if traced:
            cls.factory = cls.pure = _pure(cls)
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
        key = statics, repr(statics)  # 1, 1.0 and True are equal, but not the same
        if key not in cls._rules:  # Dynamo does not trace into functools.cache
            given = dict(zip(cls._statics, statics))
            own = {n: x for n, (_, x) in cls._own.items() if n not in given}
            numbers = {n: 0.5 if x is MISSING else x for n, x in own.items()}
            rule, again = (Making(cls, numbers, given).rule() for _ in range(2))
            if rule.digest != again.digest:
                raise TypeError(
                    f"{cls.__name__} computes something else each time that it is traced, "
                    "as with Python's random numbers: leave them out"
                )
            cls._rules[key] = rule
        return cls._rules[key]


def _own_fields(cls: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and the default of each field of a class body."""
    found: dict[str, tuple[Any, Any]] = {}
    annotations = inspect.get_annotations(cls)
    for name, x in vars(cls).items():
        if name in {*cls._own, *RATES} - {*annotations} and not hasattr(x, "__get__"):
            annotations[name] = cls._own.get(name, (float,))[0]  # another default
    cls.__annotations__ = annotations
    taken = {*dir(Optimizer), *Optimizer._parameters, "pure", "factory", "keywords"}
    for name in [*annotations, *vars(cls)]:
        if name.startswith("_") or "ClassVar" in str(annotations.get(name)):
            continue
        if name in annotations:
            refused = taken | {*dir(OwnRule)} | NAMES
        else:
            refused = taken - {*dir(optim.Optimizer)}  # methods may extend step
        if name in refused - {*RATES}:
            raise TypeError(
                f"{cls.__name__}.{name} is an option or a method of every optimizer, or an "
                "argument of its methods: choose another name"
            )
        if name in annotations:
            found[name] = annotations[name], (usual := cls.__dict__.get(name, MISSING))
            if type(usual).__hash__ is None:
                raise TypeError(
                    f"{cls.__name__}.{name} = {usual!r} may change: write a tuple"
                )
    return found


def _is_number(annotation: Any, default: Any) -> bool:
    """Return True for a float and for a tuple of floats, which are not static."""
    given = default if isinstance(default, tuple) else (default,)
    return any([isinstance(x, float) for x in given]) or (
        "float" in str(annotation) and default is not None
    )


def _lacks_direction(cls: type[Any]) -> Any:
    """Make the constructor of a base raise, and return what raises, for its `pure`."""

    def raises(*args: Any, **kwargs: Any) -> None:
        raise TypeError(f"{cls.__name__} has no direction(self, g, s): write this method")

    type.__setattr__(cls, "__init__", raises)  # type checkers keep the one of the fields
    return raises


def _pure(cls: Any) -> type[OwnRule]:
    """Return the dataclass of the hyperparameters of a class."""
    if (usual := cls._usual) not in get_args(Decay):
        raise ValueError(f"{cls.__name__}: decay={usual!r}: allowed are {get_args(Decay)}")
    coupled = {"decouple_wd": False} if usual == "l2" else {}  # saved groups lack it
    made = make_dataclass(
        cls.__name__,
        [
            (name, bool if kind in (bool, "bool") else Any, field(default=default))
            for name, (kind, default) in cls._own.items()
        ],
        bases=(OwnRule,),
        namespace={
            "owner": cls,
            "choices": cls._statics,
            "counterparts": Counterparts(
                our_options=lambda group: coupled if "decouple_lr" in group else {}
            ),
            "usual": usual,
            "__doc__": f"The rule of `{cls.__name__}`, with `init` and `step` over trees.",
            "__module__": cls.__module__,
            "__qualname__": f"{cls.__qualname__}.pure",
        },
        frozen=True,
        kw_only=True,
        repr=False,
    )
    check_calls(made)
    return made
