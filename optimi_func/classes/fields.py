"""Constructors whose arguments are annotated fields, as those of dataclasses."""

import inspect
from collections.abc import Iterable
from dataclasses import KW_ONLY, InitVar
from inspect import Parameter
from typing import Any, ClassVar, TypeAlias, dataclass_transform

from torch import Tensor

Params: TypeAlias = (
    Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
)


@dataclass_transform()
class Fields:
    """A base class for constructors: annotated fields of a class and its bases.

    `_: KW_ONLY` makes the fields after it keyword-only. A field is an argument and no
    attribute, which `InitVar` tells type checkers; its default is removed from the class.
    """

    # Shared keyword-only fields that may also be passed by position, in this order.
    _positional: ClassVar[tuple[str, ...]] = ()
    _parameters: ClassVar[dict[str, Parameter]] = {}

    def __init_subclass__(cls) -> None:
        """Collect the parameters: positional ones first, then `_positional`."""
        super().__init_subclass__()
        inherited = cls._parameters
        found = {**inherited, **_own_parameters(cls)}

        def place(p: Parameter) -> tuple[int, int]:
            if p.name in cls._positional:
                return 1, cls._positional.index(p.name)
            only = p.kind is Parameter.KEYWORD_ONLY
            return (2, p.name in inherited) if only else (0, 0)

        cls._parameters = {p.name: p for p in sorted(found.values(), key=place)}

    @classmethod
    def _signature(cls) -> inspect.Signature:
        """Return the constructor's signature, without self."""
        kind = Parameter.POSITIONAL_OR_KEYWORD
        found = [
            p.replace(kind=kind) if p.name in cls._positional else p
            for p in cls._parameters.values()
        ]
        return inspect.Signature(found, return_annotation=None)


def _own_parameters(cls: type[Any]) -> dict[str, Parameter]:
    """Return the parameters for the fields of one class, and remove their defaults."""
    found: dict[str, Parameter] = {}
    kind = Parameter.POSITIONAL_OR_KEYWORD
    for name, annotation in inspect.get_annotations(cls).items():
        if annotation in (KW_ONLY, "KW_ONLY"):
            kind = Parameter.KEYWORD_ONLY
        elif "ClassVar" not in str(annotation) and not name.startswith("_"):
            default = cls.__dict__.get(name, Parameter.empty)
            if name in cls.__dict__:
                delattr(cls, name)
            if isinstance(annotation, InitVar):
                annotation = annotation.type
            found[name] = Parameter(name, kind, default=default, annotation=annotation)
    return found
