"""Constructors whose arguments are annotated fields, as those of dataclasses.

A `Field` is the only description of an option. A class collects the fields of its body and
of its bases once. The constructor, its signature and the pure optimizer follow from them.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import KW_ONLY, InitVar
from functools import reduce
from inspect import Parameter
from operator import or_
from typing import (
    Any,
    ClassVar,
    Generic,
    Self,
    TypeAlias,
    TypeVar,
    dataclass_transform,
    overload,
)

from torch import Tensor

from optimi_func.core import checks
from optimi_func.core.rule import Scalar
from optimi_func.pure.functional import RATES, Number

Params: TypeAlias = (
    Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
)
Closure: TypeAlias = Callable[[], Any]  # returns the loss
EMPTY: Any = Parameter.empty
ANY = {"least": -math.inf, "most": math.inf}
Got = TypeVar("Got")
Given = TypeVar("Given")


def read(own: dict[str, Any], name: str) -> Any:
    """Return an item of an instance's `__dict__`. Note its name, if `_read` is there."""
    if "_read" in own:
        own["_read"].add(name)
    return own[name]


class Field(Generic[Got, Given]):
    """A hyperparameter or an option: an argument of the constructor, and no attribute.

    The methods of a class body read the value of a field from the `__dict__` of an instance
    that has been created for them. If the instance has a set `_read`, the name of the field
    is added to this set.

    Attributes:
        name: The name of the argument.
        default: Its default, or EMPTY.
        argument: The annotation of the constructor's argument.
        value: The annotation of the pure optimizer's argument.
        number: True for numbers, which may be tensors and schedules.
        static: True if methods may branch on some of its values, for which they are traced
            again.
        hyperparameter: True for hyperparameters of a rule, which its methods read and its
            pure optimizer takes. Other fields are arguments of the constructor alone.
        keyword: True if the argument is keyword-only.
        plain: True if it was written as an annotation and a default.
    """

    number: ClassVar[bool] = False
    static: bool = True
    hyperparameter: bool = False
    keyword: bool = False
    plain: bool = False

    def __init__(self, default: Any = EMPTY, argument: Any = Any, value: Any = Any) -> None:
        self.name, self.default = "", default
        self.argument, self.value = argument, value

    def __set_name__(self, owner: type[object], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type[object]) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[object]) -> Got: ...
    def __get__(self, instance: object, owner: type[object]) -> object:
        """Return the value of an instance that has one. Note that it was read."""
        if instance is None:
            return self
        if self.name not in instance.__dict__:
            raise AttributeError(
                f"{owner.__name__!r} object has no attribute {self.name!r}"
            )
        return read(instance.__dict__, self.name)

    def __set__(self, instance: object, x: Given) -> None:
        """Write an attribute of this name."""
        instance.__dict__[self.name] = x

    def parameter(self, keyword: bool) -> Parameter:
        """Return the argument as an item of a signature, keyword-only if `keyword`."""
        kind = Parameter.KEYWORD_ONLY if keyword else Parameter.POSITIONAL_OR_KEYWORD
        return Parameter(self.name, kind, default=self.default, annotation=self.argument)

    def is_static(self, x: object) -> bool:
        """Return True if methods are traced for this value."""
        return not self.number

    def check(self, x: object, bound: bool = True) -> None:
        """Raise for a value that is none of its kind or, if `bound`, out of range."""


class OneNumber(Field[Got, Given]):
    """A field for a number, a 0-d tensor or a schedule, within bounds (`check_number`).

    `label` names the hyperparameter in errors. Values whose types are in `static` are not
    numbers. Methods may branch on such values, and are traced for each of them.
    """

    number = True

    def __init__(
        self,
        default: float | None = EMPTY,
        label: str = "",
        *static: type,
        argument: object = float,
        **bounds: float,
    ) -> None:
        super().__init__(default, argument, reduce(or_, static, Number))
        self._label, self._static, self._bounds = label, static, bounds
        self.static = bool(static)

    def is_static(self, x: object) -> bool:
        """Return True for a value that is no number."""
        return isinstance(x, self._static)

    def check(self, x: object, bound: bool = True) -> None:
        """Raise for what is no number or, if `bound`, out of range."""
        if not isinstance(x, self._static):
            bounds = self._bounds if bound else ANY
            checks.check_number(self._label or self.name, self.name, x, **bounds)


class Float(OneNumber[Scalar, Number]):
    """A field for a number, a 0-d tensor or a schedule, within bounds: see `OneNumber`."""


class FloatOrNone(OneNumber[Scalar | None, Number | None]):
    """A number, or None, which is static."""


class Floats(Field[Got, Given]):
    """Several numbers, as many as the default has."""

    number, static = True, False

    def __init__(
        self,
        *default: float,
        argument: object = None,
        value: object = None,
        **bounds: float,
    ) -> None:
        kinds = [tuple[(kind,) * len(default)] for kind in (float, Number)]
        super().__init__(default, argument or kinds[0], value or kinds[1])
        self._bounds = bounds

    def check(self, x: object, bound: bool = True) -> None:
        """Raise unless there are as many numbers and, if `bound`, each is in range."""
        count = len(self.default)
        if not (isinstance(x, tuple | list) and len(x) == count):
            checks.check_no_tree(self.name, x)
            raise ValueError(
                f"Invalid {self.name}: {self.name}={x!r}: allowed are {count} numbers"
            )
        for i, y in enumerate(x):
            self.check_item(i, y, bound)

    def check_item(self, i: int, x: object, bound: bool) -> None:
        """Raise for the i-th number if it is none or, if `bound`, out of range."""
        checks.check_number(self.name, self.name, x, **(self._bounds if bound else ANY))


class Betas(Floats[tuple[Scalar, Scalar], tuple[Number, Number]]):
    """A field for two numbers in [0, 1), the fractions of moments that each step keeps."""

    def check_item(self, i: int, x: object, bound: bool) -> None:
        """Raise unless the i-th is in [0, 1)."""
        checks.check_number(f"beta{i + 1} parameter", f"betas[{i}]", x, below=1.0)


class ThreeBetas(Floats[tuple[Scalar, Scalar, Scalar], tuple[Number, Number, Number]]):
    """Three numbers in [0, 1)."""

    check_item = Betas.check_item


@dataclass_transform()
class Fields:
    """A base class for constructors: annotated fields of a class and its bases.

    `_: KW_ONLY` makes the fields after it keyword-only. A field whose annotation is an
    `InitVar` is only an argument of the constructor, and no hyperparameter, except for lr
    and weight_decay.
    """

    # Shared keyword-only fields that may also be passed by position, in this order.
    _positional: ClassVar[tuple[str, ...]] = ()
    # True if fields are hyperparameters that methods read, and so stay in the class, unless
    # they are an InitVar. Otherwise a field is removed from the class.
    _reads_fields: ClassVar[bool] = False
    _arguments: ClassVar[dict[str, Field[Any, Any]]] = {}  # the constructor's, in order
    _declared: ClassVar[dict[str, Field[Any, Any]]] = {}  # the class's own of them

    def __init_subclass__(cls) -> None:
        """Collect the arguments: positional ones first, then `_positional`."""
        super().__init_subclass__()
        cls._declared = vars(cls).get("_declared", {}) | _declared_fields(cls)
        every = [vars(base).get("_declared", {}) for base in reversed(cls.__mro__)]
        found = {name: field for own in every for name, field in own.items()}
        inherited = [x for base in cls.__bases__ for x in getattr(base, "_arguments", ())]
        fields = {x: found[x] for x in [*inherited, *cls._declared]}

        def place(field: Field[Any, Any]) -> tuple[int, int]:
            if field.name in cls._positional:
                return 1, cls._positional.index(field.name)
            return (2, field.name in inherited) if field.keyword else (0, 0)

        cls._arguments = {x.name: x for x in sorted(fields.values(), key=place)}

    @classmethod
    def _signature(cls) -> inspect.Signature:
        """Return the constructor's signature, without self."""
        parameters = [
            x.parameter(x.keyword and x.name not in cls._positional)
            for x in cls._arguments.values()
        ]
        return inspect.Signature(parameters, return_annotation=None)


def _declared_fields(cls: type[Fields]) -> dict[str, Field[Any, Any]]:
    """Return the fields of one class body, and of its mixins that change a default."""
    before, own = vars(cls).get("_declared", {}), dict(vars(cls))
    annotations, keyword = dict(inspect.get_annotations(cls)), False
    if cls._reads_fields:
        pairs = [pair for base in reversed(cls.__mro__) for pair in vars(base).items()]
        inherited = {name: x for name, x in pairs if isinstance(x, Field)}
        for name, x in dict(pairs).items():
            if (
                name in {*RATES, *inherited}
                and name not in annotations
                and not hasattr(x, "__get__")
            ):
                shared = cls._arguments.get(name)
                annotations[name] = float if shared is None else shared.argument
                # Another default of the same field, which keeps its bounds.
                own[name] = _with_default(inherited.get(name), x)
    fields: dict[str, Field[Any, Any]] = {}
    for name, annotation in annotations.items():
        keyword = keyword or annotation in (KW_ONLY, "KW_ONLY")
        if name.startswith("_") or "ClassVar" in str(annotation):
            continue
        alone = isinstance(annotation, InitVar)
        default = own.get(name, before.get(name, EMPTY))
        field = made_field(name, annotation.type if alone else annotation, default)
        field.keyword, fields[name] = keyword, field
        if cls._reads_fields and (name in RATES or not alone):
            if name in cls._arguments:  # lr, which may be a tensor
                field.argument = cls._arguments[name].argument
            field.hyperparameter = True
            setattr(cls, name, field)
        elif name in vars(cls):
            delattr(cls, name)
    return fields


def _with_default(field: Field[Any, Any] | None, default: Any) -> Any:
    """Return a copy of a field of numbers with another default, or the default alone."""
    if isinstance(field, Floats):
        fits = isinstance(default, tuple) and len(default) == len(field.default)
    else:
        fits = isinstance(field, OneNumber) and type(default) in (float, int)
    if field is None or not fits:
        return default
    field = copy(field)
    field.default = default
    return field


def made_field(name: str, annotation: object, default: Any) -> Field[Any, Any]:
    """Return the field of an annotation and a default, which may already be a `Field`."""
    if isinstance(default, Field):
        default.name = name
        return default
    values = default if isinstance(default, tuple) else (default,)
    numbers = [x for x in values if isinstance(x, float | int)]
    floats = any([isinstance(x, float) for x in numbers])
    if not floats and ("float" not in str(annotation) or default is None):
        field = Field[object, object](default)
        field.value = bool if annotation == "bool" else annotation
    else:
        bounds = {"least": -math.inf} if min(numbers, default=0.0) < 0.0 else {}
        bounds |= {"most": math.inf} if math.inf in numbers else {}
        largest = max(numbers, default=1.0)
        bounds |= {"below": 1.0} if name == "betas" and largest < 1.0 else {}
        kind: Any = Floats if isinstance(default, tuple) and floats else Float
        field = kind(*values, **bounds)
    field.name, field.plain = name, True
    field.argument = float | Tensor if annotation is Float else annotation
    return field
