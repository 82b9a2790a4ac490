"""Optimizers that are written as class bodies: fields, a State, a direction."""

import inspect
import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass, field, make_dataclass, replace
from functools import wraps
from itertools import chain
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
)

import torch
from torch import Tensor, optim
from torch.utils._pytree import tree_leaves

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.fields import EMPTY, Field, Params, made_field, read
from optimi_func.classes.groups import TORCHS
from optimi_func.core.checks import bind_call, is_on, shown, value_of
from optimi_func.core.philox import Noise
from optimi_func.core.rule import (
    DecayKind,
    Numbers,
    PyTree,
    Rates,
    Rule,
    Scalar,
    StorageLike,
    derived,
)
from optimi_func.core.storage import storage_of
from optimi_func.core.torch_private import constant_in_graphs
from optimi_func.execution.trees import step, step_
from optimi_func.pure.casts import PLAIN, resolve_tree
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import (
    FlatTree,
    Rewrite,
    TreeState,
    broadcast,
    init_tree,
    path_of,
)
from optimi_func.rules.helping import (
    example_of_value,
    help_of_init,
    help_of_step,
    help_of_value,
    named,
)
from optimi_func.rules.methods import NAMES, RATES, Methods, first_values, init_draws
from optimi_func.state.convert import Counterparts

P = ParamSpec("P")
T = TypeVar("T")
Decay: TypeAlias = Literal["decoupled", "l2", "proximal", "own"]
LrIs: TypeAlias = Literal["factor", "inside"]
# In place of a value for which methods are not traced, because it may be any number.
NUMBER = "any number"


class choice(Generic[T]):
    """A property that methods may branch on, because they are traced for each value.

    While methods are traced, a number such as a momentum is a placeholder, on which methods
    cannot branch. A choice is computed before the trace, from the actual values of the
    hyperparameters.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type[object], name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: object) -> T:
        """Return the value of an instance that has one, else compute it."""
        if instance is None:
            return cast(T, self)
        values = instance.__dict__
        return read(values, self.name) if self.name in values else self.make(instance)

    # Without this, an item of `__dict__` would be read unseen.
    def __set__(self, instance: object, x: T) -> None:
        instance.__dict__[self.name] = x


@dataclass(frozen=True, kw_only=True, repr=False)
class OwnRule(FunctionalOptimizer):
    """Base class of pure optimizers that are made from a class, such as `SignSGD.pure`."""

    owner: ClassVar[type["Body"]]

    @derived
    def rule(self) -> Rule:
        """The mathematics, a rule for each combination of static options."""
        owner, statics = self.owner, self.owner.statics_of(self)
        _trace(owner, statics)
        return owner._rules[key_of(statics)]

    @derived
    def decay(self) -> DecayKind:
        """The kind of weight decay."""
        return self._decay_kind(self.owner.with_values(self).usual_decay())

    def rates(self, lr: Scalar, weight_decay: Scalar, max_lr: Scalar | None) -> Rates:
        """Return the rates of a step; if max_lr is None, lr is the largest."""
        rates = super().rates(lr, weight_decay, max_lr)
        if self.owner._lr == "factor":
            return rates
        return rates._replace(lr=1.0, undecayed_lr=rates.undecayed_lr and (1.0,))

    def __post_init__(self) -> None:
        """Keep what a schedule's number at one step does not change."""
        super().__post_init__()
        if not torch.compiler.is_compiling():
            self.__dict__["chosen"] = self.chosen

    @derived
    def chosen(self) -> dict[str, object]:
        """The choices."""
        names = self.owner._choices
        instance = self.owner.bare(self._values) if names else None
        with self._naming_schedules("a choice"):
            found = {name: getattr(instance, name) for name in names}
        # Of a tensor: methods are traced for the value that it has at this step.
        return {k: _read(x) for k, x in found.items()}

    def __repr__(self) -> str:
        """Return the call that makes it, without defaults."""
        text = super().__repr__()
        return text if self.owner._name else text.replace("(", ".pure(", 1)

    def check(self) -> None:
        """Raise if a hyperparameter is out of range, or if the class's `check` raises."""
        where = type(self).__name__
        for name in self.choices:
            x, usual = getattr(self, name), getattr(type(self), name, callable)
            if isinstance(x, Tensor) or (callable(x) and not callable(usual)):
                raise TypeError(
                    f"{where}: {name}={shown(x)}, but {name} is static: a tensor or a "
                    "schedule needs a field whose default is a float"
                )
        if not torch.compiler.is_compiling():
            self.__dict__["rule"] = self.rule  # which is looked up once
        rule, means = self.rule, self.rule.means
        takes = means is not None and means.divides == "sum"
        parts = {"measure": rule.measure, "sums": rule.join, "divisor(decay)": takes}
        if self.cautious and (found := [name for name, x in parts.items() if x]):
            raise ValueError(f"{where}: cautious=True with {found[0]}: allowed is False")
        self._check_decay()
        super().check()
        # A class's `check` sets the bounds of fields that have none of their own.
        bound = not hasattr(self.owner, "check")
        for option in self.owner._own.values():
            if option.name not in RATES:  # checked before, and may be a prefix of the tree
                option.check(getattr(self, option.name), bound or not option.plain)
        if not bound:
            with self._naming_schedules("check"):
                self.owner.with_values(self).check()

    @contextmanager
    def _naming_schedules(self, what: str) -> Generator[None]:
        """Say which schedule a method has read that an error of Python comes from."""
        try:
            yield
        except TypeError as error:
            read = self.__dict__.get("_read", ())
            # Choices are read too, and are no hyperparameters of this value.
            found = [k for k in sorted(read) if callable(getattr(self, k, None))]
            if not found:
                raise
            raise TypeError(
                f"{type(self).__name__}: {what} reads {found[0]}, which is a schedule "
                f"({error}): allowed are numbers, as a class's param groups have them at "
                "each step, or to read it in `coeffs` or `direction`"
            ) from error

    def _check_decay(self) -> None:
        """Raise for options of decay, and cautious=True, that the move would not follow."""
        rule, own = self.rule, self.owner._usual == "own"
        reads = "weight_decay" in rule.numbers
        if not (rule.replaces or own or reads):
            return
        why = 'class line has decay="own"' if own else "methods read self.weight_decay"
        why = "`after` leaves out u" if rule.replaces else why
        names = ["decouple_lr", "corrected_decay", "cautious_decay"]
        names += ["cautious"] if rule.replaces else []
        found = [f"{name}=True" for name in names if getattr(self, name)]
        decays = any(map(is_on, tree_leaves(self.weight_decay)))
        if decays and not reads and self.decay != "l2":
            found.append(f"weight_decay={shown(self.weight_decay)}")
        if found:
            where = f"{type(self).__name__}: {found[0]}"
            raise ValueError(f"{where}, but its {why}: allowed is the default")

    @derived
    def init_numbers(self) -> Numbers:
        """The hyperparameters before the first step, or None if the class has no `init`."""
        if not hasattr(self.owner, "init"):
            return None
        # torch.compile cannot trace `has_numbers`, and a trace stores no numbers.
        plain = not torch.compiler.is_compiling() and self.has_numbers
        numbers = self.numbers
        if not self.owner._name:  # an own init may read rates that no other method reads
            rates: dict[str, Any] = {name: getattr(self, name) for name in RATES}
            numbers = rates | numbers
            plain = plain and PLAIN.issuperset(map(type, rates.values()))
        numbers = resolve_tree("a number", numbers, _double(0.0))
        # Each pure step checks its state by them. Tensors may belong to a transformation.
        if plain:
            self.__dict__["init_numbers"] = numbers
        return numbers

    def with_lr(self, lr: float) -> Self:
        """Return the optimizer with another learning rate.

        Where the class's `check`, choices or decay have read lr, they are asked again.
        """
        if "lr" in self.__dict__.get("_read", ()):
            return replace(self, lr=lr)
        changed = super().with_lr(lr)
        if "lr" in self.numbers or not self.owner._name:  # init may read it
            changed.__dict__.pop("init_numbers", None)
        return changed

    @property
    def _values(self) -> dict[str, object]:
        """The hyperparameters, and the names of those that methods have read of them."""
        own = self.__dict__
        values = {name: own[name] for name in self.__dataclass_fields__ if name in own}
        if not torch.compiler.is_compiling():
            values["_read"] = self.__dict__.setdefault("_read", set[str]())
        return values

    def likely_mistakes(self) -> list[str]:
        """Return warnings of options that are allowed, but probably a mistake."""
        texts = super().likely_mistakes()
        if hasattr(self.owner, "mistakes"):
            texts += self.owner.with_values(self).mistakes()
        return texts

    def step(
        self,
        params: T,
        grads: PyTree,
        state: TreeState,
        *,
        rewrite: Rewrite | None = None,
        **extras: PyTree,
    ) -> tuple[T, TreeState]:
        """Return the parameters and the state after one step.

        Args:
            params: A floating-point or complex tensor, or any pytree of such tensors.
            grads: The gradients: a pytree with the same structure as `params`. If a
                gradient is None, its parameter and the parameter's state are returned
                unchanged.
            state: The state that `init(params)` or the previous step returned.
            rewrite: A function that changes the updates before they are added to the
                parameters. `transforms.chain` passes it.
            **extras: The extra arguments of the rule's `direction`, by name. Each extra is
                a pytree with a tensor for each parameter, or one number for all parameters.

        Returns:
            (params, state): The updated parameters, and the state for the next step.

        Raises:
            TypeError: An extra is missing, `direction` has no argument with the name of an
                extra, a parameter is not a dense floating-point or complex tensor, or
                `state` is not a `TreeState`.
            ValueError: The trees differ in structure, or a gradient, a state or an extra
                does not fit its parameter.
        """
        if (extras or self.rule.extras) and self.rule.lacks(extras):
            raise TypeError(
                f"the step of {type(self).__name__} got the extras {sorted(extras)}: its "
                f"direction takes {sorted(self.rule.extras)} (extras are its arguments but "
                "g, s, t, x, z, r and c)"
            )
        tree = FlatTree.of(params, grads, state).check(self)
        if not self.rule.given:
            return self._step(tree, rewrite)
        leaf_extras: list[dict[str, Any]] = [{} for _ in tree.leaves]
        for i, p in enumerate(tree.leaves if "z" in self.rule.given else ()):
            leaf_extras[i]["z"] = Noise(cast(Any, self).seed, state.step, i, p)
        usual = {k: _double(x) for k, x in self.rule.usual.items()}
        for name, extra in {**usual, **extras}.items():
            rows, at = broadcast(name, extra, tree)
            for i, p in enumerate(tree.leaves):
                x = rows[at[i]]
                x = _double(x) if isinstance(x, float) else x
                leaf_extras[i][name] = x
                shapes = [(), *([] if name in self.rule.single else [tuple(p.shape)])]
                if isinstance(x, Tensor) and tuple(x.shape) not in shapes:
                    raise ValueError(
                        f"{name}{path_of(params, i)} has the shape {tuple(x.shape)}, and "
                        f"its parameter {tuple(p.shape)}: allowed are {shapes}"
                    )
        return self._step(tree, rewrite, leaf_extras)


@constant_in_graphs
def _trace(cls: "type[Body]", statics: tuple[object, ...]) -> bool:
    """Trace the methods, if they are new. A graph being compiled calls this at once."""
    cls.rule_for(statics)
    if not cls._used:  # written once, because it empties the caches of attributes
        cls._used = True
    return True


class _Rate:
    """lr of an instance that has values, where the class declares no field for it."""

    def __get__(self, instance: Any, owner: object) -> Any:
        if instance is None:
            return self
        if "lr" not in instance.__dict__:
            raise AttributeError(
                f"{type(instance).__name__!r} object has no attribute 'lr'"
            )
        return read(instance.__dict__, "lr")

    # Without this, an item of `__dict__` would be read unseen.
    def __set__(self, instance: Any, x: object) -> None:
        instance.__dict__["lr"] = x


class PureOf:
    """The type of a class's `pure`, whose keywords are the constructor's."""

    def __get__(
        self, instance: object, owner: Callable[Concatenate[Params, P], object]
    ) -> Callable[P, OwnRule]: ...


class BodyType(ABCMeta):
    """The type of class bodies, whose rules are traced and see no later assignment."""

    def __setattr__(cls, name: str, x: object) -> None:
        """Assign, and make the rule anew if methods may read this. Raise if it was used."""
        own = vars(cls)
        read = own.get("_used") is not None and name[:2] != "__" and name not in _UNREAD
        if read and (own["_used"] or own.get("_name") or cls.__subclasses__()):
            raise TypeError(
                f"{cls.__name__}.{name} = ... after the class was used or has a subclass, "
                "which are traced as they were: allowed is a subclass with another"
            )
        super().__setattr__(name, x)
        if read:  # a decorator
            Body.__init_subclass__.__func__(cls)  # pyright: ignore[reportFunctionMemberAccess]


class Body(BaseOptimizer, metaclass=BodyType):
    """Base class of optimizers that are written as class bodies: see `Optimizer`.

    The package's have a `name`, that of their value. Their methods are traced when they are
    first used, and tests try what `Optimizer` does at the definition.
    """

    pure: ClassVar[PureOf]
    at_definition: ClassVar[bool] = False
    # "inside": the direction is the whole move, which lr does not multiply.
    _lr: ClassVar[LrIs] = "factor"
    # True: `whole` is sums over dimensions and elementwise operations, and is compiled.
    compiles_whole: ClassVar[bool] = False
    # True: `whole` maps each matrix of a stack by itself.
    maps_matrices: ClassVar[bool] = False
    _name: ClassVar[str] = ""
    _own: ClassVar[dict[str, Field[object, object]]] = {}
    _choices: ClassVar[tuple[str, ...]] = ()
    _rules: ClassVar[dict[tuple[object, ...], Rule]] = {}
    # Traced rules with the choices that their methods have read.
    _known: ClassVar[list[tuple[dict[str, object], Rule]]] = []
    _usual: ClassVar[Decay] = "decoupled"
    # True if values have been made of it, None while it is defined.
    _used: ClassVar[bool | None]

    def __init_subclass__(
        cls, decay: Decay = EMPTY, name: str = "", lr: LrIs = EMPTY
    ) -> None:
        """Make `pure` and the constructor, and trace the methods."""
        cls._used = None
        for option, x, kind in ("decay", decay, Decay), ("lr", lr, LrIs):
            if x not in (EMPTY, *get_args(kind)):
                where = f"class {cls.__name__}(..., {option}={x!r})"
                raise TypeError(f"{where}: allowed are {get_args(kind)}")
        base = next(x for x in cls.__mro__[1:] if isinstance(x, BodyType))
        if name or {decay, lr} != {EMPTY} or _new_names(cls, base):
            cls._name, cls._lr = name, cls._lr if lr is EMPTY else lr
            cls._usual = cls._usual if decay is EMPTY else decay
            cls._define()
        else:
            super().__init_subclass__()
        cls._used = False

    @classmethod
    def _define(cls) -> None:
        if inspect.isfunction(former := vars(cls).get("means")):
            text = f"{cls.__name__}.means is called divisor now, and means until 0.3"
            warnings.warn(text, DeprecationWarning, stacklevel=4)
            cls.divisor = former
        every = [pair for base in reversed(cls.__mro__) for pair in vars(base).items()]
        written, own = dict(every), {k: x for k, x in every if isinstance(x, Field)}
        for name in own.keys() - vars(cls).keys():
            if not hasattr(written[name], "__get__"):
                setattr(cls, name, written[name])  # another default, of a mixin
        cls._own = own
        cls._own = {**own, **_own_fields(cls)}
        cls._choices = tuple(sorted(k for k, x in written.items() if isinstance(x, choice)))
        cls._rules, cls._known, traced = {}, [], hasattr(cls, "direction")
        made: Any = _pure(cls) if traced else _lacks_direction(cls)
        cls.factory = cls.pure = made
        super().__init_subclass__()
        defaults = {option.name: option.default for option in cls._own.values()}
        if traced and cls.at_definition and EMPTY not in defaults.values():
            # Choices may read lr and weight_decay, also where these have no default.
            tried = dict.fromkeys(RATES, 0.1) | defaults
            cls.rule_for(cls.statics_of(cls.bare(tried)))

    def usual_decay(self) -> Decay:
        """Return the kind of decay without decouple_lr and corrected_decay."""
        return self._usual

    @classmethod
    def bare(cls, values: Mapping[str, object]) -> Any:
        """Return an instance with hyperparameters as attributes, and nothing else."""
        instance: Any = object.__new__(cls)
        instance.__dict__.update(values)
        return instance

    @classmethod
    def with_values(cls, value: OwnRule) -> Any:
        """Return an instance with the hyperparameters of a value as attributes."""
        return cls.bare(value._values | value.chosen)

    @classmethod
    def statics_of(cls, value: "OwnRule | Body") -> tuple[object, ...]:
        """Return what methods may branch on: static options, and choices."""
        statics: list[object] = []
        for option in cls._own.values():
            if option.static:
                x = getattr(value, option.name)
                statics.append(_hashable(x) if option.is_static(x) else NUMBER)
        if cls._choices:
            source = value if isinstance(value, Body) else cls.with_values(value)
            statics += [getattr(source, name) for name in cls._choices]
        return tuple(statics)

    @classmethod
    def shaping(cls) -> list[str]:
        """Return the names of the hyperparameters that State depends on."""
        names: set[str] = set()
        usual = {option.name: option.default for option in cls._own.values()}
        me, other = cls.bare({**usual, "_read": names}), cls.bare(usual)
        getattr(me, "State", None)
        for shape in ((2, 2, 2), (2,)) if hasattr(cls, "init") else ():
            p = torch.empty(shape, dtype=torch.float32, device="cpu")
            if not hasattr(cls, "refuses") or other.refuses(p) is None:
                first_values(me, p, init_draws(cls))
        return [option.name for option in cls._own.values() if option.name in names]

    @classmethod
    def rule_for(cls, statics: tuple[object, ...]) -> Rule:
        """Return the rule of a combination of what methods may branch on."""
        if key_of(statics) in cls._rules:
            return cls._rules[key_of(statics)]
        names = [own.name for own in cls._own.values() if own.static]
        given = dict(zip((*names, *cls._choices), statics))
        fixed = {name: x for name, x in given.items() if x is not NUMBER}
        for reads, rule in cls._known:
            if all([repr(given[k]) == repr(x) and given[k] == x for k, x in reads.items()]):
                cls._rules[key_of(statics)] = rule
                return rule
        own = {own.name: own.default for own in cls._own.values()}
        numbers = {name: x for name, x in own.items() if name not in fixed}
        odd = bool, type(None), type
        numbers = {k: 0.5 if isinstance(x, odd) else x for k, x in numbers.items()}
        methods = Methods(cls, numbers, fixed)
        tried = cls.at_definition or not cls._name
        # The package's sources are in the keys of the store.
        home = next(x for x in cls.__mro__ if x.__module__.startswith("optimi_func."))
        same = _new_names(cls, home).isdisjoint(dir(home))
        compiles = same and getattr(home, "compiles_whole", False)
        compiled = f"{home.__module__}.{home.__qualname__}" if compiles else ""
        by_matrix = same and getattr(home, "maps_matrices", False)
        rule = methods.rule(tried, compiled, by_matrix)
        if tried:
            again = Methods(cls, numbers, fixed)
            again.rule(tried=False)
            if methods.trace.code != again.trace.code:
                raise TypeError(
                    f"{cls.__name__} computes something else each time that it is traced, "
                    "as with Python's random numbers: leave them out"
                )
        names = {*given} if methods.untraced else methods.read
        # Another thread may have traced it meanwhile, and all values take one rule.
        rule = cls._rules.setdefault(key_of(statics), rule)
        cls._known.append(({k: x for k, x in given.items() if k in names}, rule))
        return rule


if not TYPE_CHECKING:
    Body.lr = _Rate()


def key_of(statics: tuple[object, ...]) -> tuple[object, ...]:
    """Return a key: 1, 1.0 and True are equal, but not the same."""
    return statics, repr(statics)


def _read(x: object) -> object:
    return x.item() if isinstance(x, Tensor) and value_of(x) is not None else x


def _double(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def _hashable(x: Any) -> Any:
    """Return tuples for lists and dicts."""
    if type(x) is dict:
        return tuple([(key, _hashable(y)) for key, y in x.items()])
    return tuple(map(_hashable, x)) if type(x) in (tuple, list) else x


# Names that methods of a rule do not read.
_UNREAD = {*dir(Body), "_used", "pure", "factory", "keywords"}.difference(
    ("usual_decay", "compiles_whole", "maps_matrices")
)


def _new_names(cls: type, base: type) -> set[str]:
    """Return the names that methods may read, and that a class has not of a base."""
    new = [x for x in cls.__mro__ if x not in base.__mro__]
    names = {*chain(*[(*vars(x), *inspect.get_annotations(x)) for x in new])} - _UNREAD
    return {name for name in names if name[:2] != "__"}


def _own_fields(cls: type[Body]) -> dict[str, Field[object, object]]:
    """Return the fields of a class body, and put them in the place of defaults."""
    options: dict[str, Field[object, object]] = {}
    annotations, keyword = inspect.get_annotations(cls), False
    for name, x in vars(cls).items():
        if name in {*cls._own, *RATES} - {*annotations} and not hasattr(x, "__get__"):
            option = cls._own.get(name)  # another default
            annotations[name] = float if option is None else option.argument
    cls.__annotations__ = annotations
    reserved = {*dir(Body), *Body._parameters, *TORCHS, "pure", "factory", "keywords"}
    reserved -= {*RATES, "usual_decay"}
    if cls._name:
        reserved = {*Body._parameters} - {*RATES}
    for name in [*annotations, *(() if "keywords" in vars(cls) else vars(cls))]:
        kind = annotations.get(name)
        keyword = keyword or kind in (KW_ONLY, "KW_ONLY")
        if name.startswith("_") or "ClassVar" in str(kind) or name in options:
            continue
        if name not in annotations:
            refused = reserved - {*dir(optim.Optimizer)}  # methods may extend step
        else:
            refused = reserved | {*dir(OwnRule)} | (set() if cls._name else NAMES)
        if name in refused - {*RATES} and not (cls._name and name not in annotations):
            raise TypeError(
                f"{cls.__name__}.{name} is an option or a method of every optimizer, or an "
                "argument of its methods: choose another name"
            )
        if name not in annotations:
            continue
        if isinstance(kind, InitVar):
            if name not in RATES:
                continue  # of the class alone
            kind = kind.type
        options[name] = option = made_field(name, kind, cls.__dict__.get(name, EMPTY))
        option.keyword = keyword
        if type(option.default).__hash__ is None:
            raise TypeError(
                f"{cls.__name__}.{name} = {option.default!r} may change: write a tuple"
            )
        setattr(cls, name, option)
    return options


def _lacks_direction(cls: type[Body]) -> Callable[..., NoReturn]:
    """Return the `pure` of a base, which raises."""

    def raises(lr: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} has no direction(self, g, s): write this method")

    raises.__signature__ = inspect.signature(lambda lr: None)  # pyright: ignore[reportFunctionMemberAccess]
    return raises


def _pure(cls: type[Body]) -> type[OwnRule]:
    """Return the dataclass of the hyperparameters of a class."""
    coupled = {"decouple_wd": False} if cls._usual == "l2" else {}  # saved groups lack it
    counterparts = getattr(cls, "counterparts", None) or Counterparts(
        our_options=lambda group: coupled if "decouple_lr" in group else {}
    )
    options = sorted(cls._own.values(), key=lambda x: x.keyword)
    name = cls._name
    written = chain(*[vars(base).values() for base in cls.__mro__])
    value = make_dataclass(
        name or cls.__name__,
        [
            (x.name, x.value, field() if x.default is EMPTY else field(default=x.default))
            for x in options
        ],
        bases=(OwnRule,),
        namespace={
            "owner": cls,
            "entry_fields": frozenset(chain(*[getattr(x, "_fields", ()) for x in written])),
            "choices": tuple([x.name for x in options if not x.number]),
            "counterparts": counterparts,
            "__doc__": None,
            "__module__": cls.__module__,
            "__qualname__": name or f"{cls.__qualname__}.pure",
        },
        frozen=True,
        kw_only=True,
        repr=False,
    )
    check_calls(value)
    signature = inspect.signature(value).replace(return_annotation=FunctionalOptimizer)
    value.__signature__ = signature = named(signature)
    value.__doc__ = help_of_value(cls, [*signature.parameters])
    return value


def check_calls(factory: Any) -> None:
    """Name the factory in errors of its calls, and the keyword that was meant."""
    original, names = factory.__init__, tuple(inspect.signature(factory).parameters)

    @wraps(original)
    def init(self: object, *args: object, **kwargs: object) -> None:
        if args or "lr" not in kwargs or not all([name in names for name in kwargs]):
            bind_call(factory.__name__, inspect.signature(factory), args, kwargs)  # raises
        original(self, **kwargs)

    factory.__init__ = init


class StepFunction(Protocol[P]):
    """`(params, grads, state, *, <hyperparameters>) -> (params, state)`."""

    def __call__(  # noqa: D102
        self, params: T, grads: PyTree, state: TreeState, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, TreeState]: ...


class InitFunction(Protocol):
    """`(params, *, <options that the state depends on>, kahan_sum, ...) -> TreeState`."""

    def __call__(  # noqa: D102
        self,
        params: PyTree,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
        storage: StorageLike | None = None,
        **own: object,
    ) -> TreeState: ...


def functions(
    cls: Callable[Concatenate[Params, P], Body],
) -> tuple[Callable[P, OwnRule], InitFunction, StepFunction[P]]:
    """Return the pure functions of a class, such as `lion`, `lion_init` and `lion_step`.

    `lion_init` has an argument for each option on which the state depends. The help text of
    each function is generated from the docstring of the class.

    Args:
        cls: An optimizer class with a method `direction`.

    Returns:
        (lion, lion_init, lion_step): The function that creates a `FunctionalOptimizer`, the
            function that creates the initial state, and the function that takes a step.
    """
    value: Any = cast(Any, cls).pure
    value.__doc__ += example_of_value(value.owner, value.__name__)
    return value, _init_function(value), step_function(value)


def _init_function(value: type[OwnRule]) -> InitFunction:
    names, own = value.owner.shaping(), inspect.signature(value).parameters

    def init(params: PyTree, **options: Any) -> TreeState:
        if not known.issuperset(options):
            bind_call(init.__name__, inspect.signature(init), (params,), options)  # raises
        shaping = {name: options.pop(name) for name in names if name in options}
        return init_tree(value(lr=0.0, **shaping), params, storage_of(**options))

    shown = inspect.signature(init)
    first, _ = shown.parameters.values()
    _, _, *more = inspect.signature(FunctionalOptimizer.init).parameters.values()
    shown = shown.replace(parameters=[first, *[own[name] for name in names], *more])
    init.__signature__ = named(shown)  # pyright: ignore[reportFunctionMemberAccess]
    init.__name__ = init.__qualname__ = f"{value.__name__}_init"
    init.__module__ = value.__module__
    init.__doc__ = help_of_init(value.owner, value.__name__, names)
    known = {*shown.parameters}
    return init


def step_function(factory: Callable[P, FunctionalOptimizer]) -> StepFunction[P]:
    """Make `lion_step`, for example, with the keywords of the factory."""
    owner: type[object] = cast(Any, factory).owner
    module = sys.modules.get(factory.__module__)  # None if nobody has imported it
    home = {} if module is None else vars(module)
    nested = [x for cls in owner.__mro__ for x in vars(cls).values() if _is_record(x)]
    for kind in nested:
        # torch.load(weights_only=True) looks a State up in its module, under its name.
        if kind.__module__ == factory.__module__ and kind not in home.values():
            home.setdefault(kind.__name__, kind)
    items = [(x, f"{factory.__module__}.{name}") for name, x in home.items()]
    kinds = [x for x in items if _is_record(x[0])] + [(x, "") for x in nested]
    for kind, name in kinds:
        if name and kind.__module__ == factory.__module__:
            # A class in a class is pickled by getattr, which weights_only refuses.
            kind.__qualname__ = name.rpartition(".")[2]
    torch.serialization.add_safe_globals([x if x[1] else x[0] for x in kinds])
    return _step_function(factory, _pure_step, f"{factory.__name__}_step", "pure")


def _is_record(x: object) -> bool:
    """Return True for a NamedTuple's class, such as a State."""
    return isinstance(x, type) and issubclass(x, tuple)


def compiled_functions(
    factory: Callable[P, FunctionalOptimizer],
) -> tuple[StepFunction[P], StepFunction[P]]:
    """Make the compiled `lion_step`, for example, and `lion_step_`, which is in place."""
    name = f"compiled_{factory.__name__}_step"
    pure = _step_function(factory, step, name, "compiled")
    return pure, _step_function(factory, step_, f"{name}_", "in place")


def _pure_step(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    return optimizer.step(params, grads, state)


def _step_function(
    factory: Callable[P, FunctionalOptimizer],
    run: Callable[..., tuple[PyTree, TreeState]],
    name: str,
    kind: str,
) -> StepFunction[P]:
    make = cast(type[FunctionalOptimizer], factory).kept

    def step(
        params: T, grads: PyTree, state: TreeState, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, TreeState]:
        if torch.compiler.is_compiling() or args:
            return run(factory(*args, **kwargs), params, grads, state)
        return run(make(**kwargs), params, grads, state)

    # torch.compile limits recompilations per code object, so each step has its own.
    step.__code__ = step.__code__.replace(co_name=name)
    keywords = inspect.signature(factory)
    trees = list(inspect.signature(step).parameters.values())[:3]
    shown = keywords.replace(
        parameters=[*trees, *keywords.parameters.values()],
        return_annotation=tuple[PyTree, TreeState],
    )
    step.__signature__ = named(shown)  # pyright: ignore[reportFunctionMemberAccess]
    step.__name__ = step.__qualname__ = name
    step.__module__ = factory.__module__
    owner: type[object] = cast(Any, factory).owner
    step.__doc__ = help_of_step(owner, factory.__name__, kind, [*keywords.parameters])
    return step


class Coupled(Body):
    """Base class of optimizers that add weight decay to the gradient by default."""

    _: KW_ONLY
    decouple_wd: bool = False

    def usual_decay(self) -> Decay:
        """Return "l2", or "decoupled" with decouple_wd."""
        return "decoupled" if self.decouple_wd else "l2"
