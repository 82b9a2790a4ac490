"""Optimizers that are written as class bodies: fields, a State, a direction."""

import inspect
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, field, fields, make_dataclass
from functools import wraps
from itertools import chain
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
)

import torch
from torch import optim
from torch.utils._python_dispatch import _disable_current_modes

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.fields import EMPTY, Field, Params, read
from optimi_func.core.checks import bind_call
from optimi_func.core.rule import PyTree, Rule, StorageLike
from optimi_func.core.storage import storage_of
from optimi_func.core.torch_private import constant_in_graphs
from optimi_func.core.tree import TreeState, init_tree
from optimi_func.execution.trees import step, step_
from optimi_func.hooks import cautious
from optimi_func.pure.functional import RATES, Decay, FunctionalOptimizer
from optimi_func.rules.helping import (
    example_of_value,
    help_of_init,
    help_of_step,
    help_of_value,
    named,
)
from optimi_func.rules.methods import NAMES, Methods, first_values, init_draws
from optimi_func.state.convert import TORCHS, Counterparts

P = ParamSpec("P")
T = TypeVar("T")
LrIs: TypeAlias = Literal["factor", "inside"]
# Stands for every number in the key of a rule, because methods do not branch on numbers.
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

    # With this method, Python calls `__get__` even if `__dict__` has the value.
    def __set__(self, instance: object, x: T) -> None:
        instance.__dict__[self.name] = x


@constant_in_graphs
def _trace(cls: "type[Body]", statics: tuple[object, ...]) -> bool:
    """Trace the methods, if they are new. A graph being compiled calls this at once."""
    # Without modes such as FakeTensorMode, in which the example tensors would be fake.
    with _disable_current_modes():
        cls.rule_for(statics)
    # Assigned only once, because an assignment empties Python's caches of the attributes.
    if not cls._used:
        cls._used = True
    return True


class PureOf:
    """The type of a class's `pure`, whose keywords are the constructor's."""

    def __get__(
        self, instance: object, owner: Callable[Concatenate[Params, P], object]
    ) -> Callable[P, FunctionalOptimizer]: ...


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
        if read:  # assigned by a decorator of the class
            Body.__init_subclass__.__func__(cls)  # pyright: ignore[reportFunctionMemberAccess]


class Body(BaseOptimizer, metaclass=BodyType):
    """Base class of optimizers that are written as class bodies: see `Optimizer`.

    The optimizers of the package pass `name`, the name of the pure optimizer. Their methods
    are traced at the first use, and without the trial on tensors, which the tests make.
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
    _reads_fields = True
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
            _check_names(cls)
            super().__init_subclass__()
            cls._define()
        else:
            super().__init_subclass__()
        cls._used = False

    @classmethod
    def _define(cls) -> None:
        if any([inspect.isfunction(vars(cls).get(x)) for x in ("divisor", "means")]):
            now = "return a scaled u from after(self, mean, x, u)"
            raise TypeError(f"{cls.__name__}: divisor was removed: {now}")
        bases = [vars(base) for base in reversed(cls.__mro__)]
        every = [pair for own in bases for pair in own.get("_declared", {}).items()]
        cls._own = {k: x for k, x in every if x.hyperparameter}
        for option in cls._own.values():
            if type(option.default).__hash__ is None:
                where = f"{cls.__name__}.{option.name} = {option.default!r}"
                raise TypeError(f"{where} may change: write a tuple")
        written = {name: x for own in bases for name, x in own.items()}
        cls._choices = tuple(sorted(k for k, x in written.items() if isinstance(x, choice)))
        cls._rules, cls._known, traced = {}, [], hasattr(cls, "direction")
        made: Any = _pure(cls) if traced else _lacks_direction(cls)
        cls.factory = cls.pure = made
        cls._make_constructor()
        defaults = {option.name: option.default for option in cls._own.values()}
        if traced and cls.at_definition and EMPTY not in defaults.values():
            # Choices may read lr and weight_decay, also where these have no default.
            tried = dict.fromkeys(RATES, 0.1) | defaults
            cls.rule_for(cls.statics_of(cls.bare(tried)))

    def usual_decay(self) -> Decay:
        """Return the kind of decay without decouple_lr and corrected_decay."""
        return self._usual

    def own_hooks(self) -> tuple[Any, ...]:
        """Return the hooks that come before those of the option `hooks`."""
        return (cautious(),) if self.__dict__.get("cautious") else ()

    @classmethod
    def bare(cls, values: Mapping[str, object]) -> Any:
        """Return an instance with hyperparameters as attributes, and nothing else."""
        instance: Any = object.__new__(cls)
        instance.__dict__.update(values)
        return instance

    @classmethod
    def with_values(cls, value: FunctionalOptimizer) -> Any:
        """Return an instance with the hyperparameters of a value as attributes."""
        return cls.bare(value._values | value.chosen)

    @classmethod
    def _rule_with(cls, value: FunctionalOptimizer) -> Rule:
        """Return the rule for the static options of a value."""
        if not hasattr(cls, "direction"):
            text = f"{cls.__name__} has no direction(self, g, s): write this method"
            raise TypeError(text)
        statics = cls.statics_of(value)
        _trace(cls, statics)
        return cls._rules[key_of(statics)]

    @classmethod
    def statics_of(cls, value: "FunctionalOptimizer | Body") -> tuple[object, ...]:
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
        # The map `whole` of a class of the package may be compiled and stored on disk,
        # because the keys of the store contain a hash of the package's sources.
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
    # lr of an instance that has values, where the class declares no field for it.
    Body.lr = Body._arguments["lr"]


def key_of(statics: tuple[object, ...]) -> tuple[object, ...]:
    """Return a key: 1, 1.0 and True are equal, but not the same."""
    return statics, repr(statics)


def _hashable(x: Any) -> Any:
    """Return tuples for lists and dicts."""
    if type(x) is dict:
        return tuple([(key, _hashable(y)) for key, y in x.items()])
    return tuple(map(_hashable, x)) if type(x) in (tuple, list) else x


# Names that methods of a rule do not read.
_UNREAD = {*dir(Body), "_used", "pure", "factory", "keywords"}.difference(
    ("lr", "own_hooks", "usual_decay", "compiles_whole", "maps_matrices")
)


def _new_names(cls: type, base: type) -> set[str]:
    """Return the names that methods may read, and that cls does not inherit from base."""
    new = [x for x in cls.__mro__ if x not in base.__mro__]
    names = {*chain(*[(*vars(x), *inspect.get_annotations(x)) for x in new])} - _UNREAD
    return {name for name in names if name[:2] != "__"}


def _check_names(cls: type[Body]) -> None:
    """Raise if a field or a method has a name that is taken."""
    annotations = inspect.get_annotations(cls)
    reserved = {*dir(Body), *TORCHS, "pure", "factory", "keywords", *Body._arguments}
    if cls._name:
        reserved = {*Body._arguments}
    fields = reserved | {*dir(FunctionalOptimizer)} | (set() if cls._name else NAMES)
    # Methods may extend torch's, such as step. A class that is defined again, because a
    # decorator wrote to it, has the names that this package gave to it.
    methods = reserved - {*dir(optim.Optimizer)}
    methods = set() if cls._name or "keywords" in vars(cls) else methods
    for name in (*annotations, *vars(cls)):
        refused = fields if name in annotations else methods
        if name.startswith("_") or "ClassVar" in str(annotations.get(name)):
            continue
        if name in refused - {*RATES, "own_hooks", "usual_decay"}:
            raise TypeError(
                f"{cls.__name__}.{name} is an option or a method of every optimizer, or an "
                "argument of its methods: choose another name"
            )


def _lacks_direction(cls: type[Body]) -> type[FunctionalOptimizer]:
    """Return the `pure` of a base without a direction, whose values cannot be created."""
    namespace = {"owner": cls, "keywords": ("lr",), "__module__": cls.__module__}
    return type(cls.__name__, (FunctionalOptimizer,), namespace)


def _pure(cls: type[Body]) -> type[FunctionalOptimizer]:
    """Return the dataclass of the hyperparameters of a class."""
    coupled = {"decouple_wd": False} if cls._usual == "l2" else {}  # saved groups lack it
    counterparts = getattr(cls, "counterparts", None) or Counterparts(
        our_options=lambda group: coupled if "decouple_lr" in group else {}
    )
    options = sorted(cls._own.values(), key=lambda x: x.keyword)
    name = cls._name
    written = chain(*[vars(base).values() for base in cls.__mro__])
    value: Any = make_dataclass(
        name or cls.__name__,
        [
            (x.name, x.value, field() if x.default is EMPTY else field(default=x.default))
            for x in options
        ],
        bases=(FunctionalOptimizer,),
        namespace={
            "owner": cls,
            "entry_fields": frozenset(chain(*[getattr(x, "_fields", ()) for x in written])),
            "choices": ("hooks", *[x.name for x in options if not x.number]),
            "counterparts": counterparts,
            "__doc__": None,
            "__module__": cls.__module__,
            "__qualname__": name or f"{cls.__qualname__}.pure",
        },
        frozen=True,
        kw_only=True,
        repr=False,
    )
    value.keywords = tuple([x.name for x in fields(value)])
    value.number_defaults = {
        x.name: x.default
        for x in fields(value)
        if x.type is not bool and x.name not in value.choices
    }
    check_calls(value)
    signature = inspect.signature(value).replace(return_annotation=FunctionalOptimizer)
    value.__signature__ = named(signature)
    value.__doc__ = help_of_value(cls, [*value.keywords])
    return value


def check_calls(factory: Any) -> None:
    """Name the factory in errors of its calls, and the keyword that was meant."""
    original, names = factory.__init__, factory.keywords

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
) -> tuple[Callable[P, FunctionalOptimizer], InitFunction, StepFunction[P]]:
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


def _init_function(value: Any) -> InitFunction:
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
    name = f"{factory.__name__}_step"
    return _step_function(factory, FunctionalOptimizer.step, name, "pure")


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
