"""Constructors whose arguments are annotated fields, as those of dataclasses."""

import inspect
import math
from collections.abc import Callable, Iterable
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
from optimi_func.pure.functional import Number

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

    Methods of a rule read it of an instance that has values, or stand-ins while they are
    traced, in its `__dict__`, and in `_read` the names of those that they have read.

    Attributes:
        name: The argument.
        default: Its default, or EMPTY.
        argument: The annotation of the class's argument.
        value: The annotation of the pure optimizer's.
        number: True for numbers, which may be tensors and schedules.
        static: True if methods are traced for some of its values, and not for any number.
        keyword: True if it is passed by name alone.
        plain: True if it was written as an annotation and a default.
    """

    number: ClassVar[bool] = False
    static: bool = True
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

    def is_static(self, x: object) -> bool:
        """Return True if methods are traced for this value."""
        del x
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
        del i
        checks.check_number(self.name, self.name, x, **(self._bounds if bound else ANY))


class Betas(Floats[tuple[Scalar, Scalar], tuple[Number, Number]]):
    """A field for two numbers in [0, 1), the fractions of moments that each step keeps."""

    def check_item(self, i: int, x: object, bound: bool) -> None:
        """Raise unless the i-th is in [0, 1)."""
        del bound
        checks.check_number(f"beta{i + 1} parameter", f"betas[{i}]", x, below=1.0)


class ThreeBetas(Floats[tuple[Scalar, Scalar, Scalar], tuple[Number, Number, Number]]):
    """Three numbers in [0, 1)."""

    check_item = Betas.check_item


@dataclass_transform()
class Fields:
    """A base class for constructors: annotated fields of a class and its bases.

    `_: KW_ONLY` makes the fields after it keyword-only. A field is an argument and no
    attribute, which `InitVar` tells type checkers; its default is removed from the class,
    if it is no `Field`.
    """

    # Shared keyword-only fields that may also be passed by position, in this order.
    _positional: ClassVar[tuple[str, ...]] = ()
    _parameters: ClassVar[dict[str, Parameter]] = {}
    _declared: ClassVar[dict[str, Parameter]] = {}  # the class's own of them

    def __init_subclass__(cls) -> None:
        """Collect the parameters: positional ones first, then `_positional`."""
        super().__init_subclass__()
        if "_declared" not in vars(cls):
            cls._declared = _own_parameters(cls)
        every = [vars(base).get("_declared", {}) for base in reversed(cls.__mro__)]
        found = {name: p for own in every for name, p in own.items()}
        inherited = [x for base in cls.__bases__ for x in getattr(base, "_parameters", ())]
        parameters = {x: found[x] for x in [*inherited, *cls._declared]}

        def place(p: Parameter) -> tuple[int, int]:
            if p.name in cls._positional:
                return 1, cls._positional.index(p.name)
            only = p.kind is Parameter.KEYWORD_ONLY
            return (2, p.name in inherited) if only else (0, 0)

        cls._parameters = {p.name: p for p in sorted(parameters.values(), key=place)}

    @classmethod
    def _signature(cls) -> inspect.Signature:
        """Return the constructor's signature, without self."""
        kind = Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            p.replace(kind=kind) if p.name in cls._positional else p
            for p in cls._parameters.values()
        ]
        return inspect.Signature(parameters, return_annotation=None)


def _own_parameters(cls: "type[Fields]") -> dict[str, Parameter]:
    """Return the parameters for the fields of one class, and remove their defaults."""
    parameters: dict[str, Parameter] = {}
    kind = Parameter.POSITIONAL_OR_KEYWORD
    for name, annotation in inspect.get_annotations(cls).items():
        if annotation in (KW_ONLY, "KW_ONLY"):
            kind = Parameter.KEYWORD_ONLY
        elif "ClassVar" not in str(annotation) and not name.startswith("_"):
            default = cls.__dict__.get(name, EMPTY)
            if isinstance(default, Field):
                shared = cls._parameters.get(name)  # lr, which may be a tensor
                annotation = default.argument if shared is None else shared.annotation
                default = default.default
            elif name in cls.__dict__:
                delattr(cls, name)
            if annotation is Float:
                annotation = float | Tensor
            if isinstance(annotation, InitVar):
                annotation = annotation.type
            parameters[name] = Parameter(name, kind, default=default, annotation=annotation)
    return parameters


def made_field(name: str, annotation: object, default: Any) -> Field[Any, Any]:
    """Return the field of an annotation and a default, which may be one."""
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
    field.name, field.argument, field.plain = name, annotation, True
    return field
