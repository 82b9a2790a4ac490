"""A Griffe extension: signatures that the package makes when it is imported.

Constructors of optimizers are made of their fields, which the source does not show.
"""

import inspect
import math
from typing import Any

import griffe

import optimi_func
from optimi_func import optimizers, rules
from optimi_func.compiled.train_step import ClassStep, PureStep

# Functions make the first three, and subclasses stand for the others.
NOT_CALLED = (
    *(optimi_func.GradientRelease, PureStep, ClassStep),
    *(optimizers.BaseOptimizer, rules.Evaluated),
)


def written(default: Any) -> str | None:
    """Return a default as a user writes it."""
    if default is inspect.Parameter.empty:
        return None
    return "math.inf" if default is math.inf else repr(default)


def parameters(made: Any) -> list[griffe.Parameter]:
    """Return those of a class or a function."""
    return [
        griffe.Parameter(
            p.name,
            kind=griffe.ParameterKind(p.kind.description),
            default=written(p.default),
        )
        for p in inspect.signature(made).parameters.values()
    ]


class Signatures(griffe.Extension):
    """Writes them over those of the source."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Change what was collected."""
        if pkg.path != "optimi_func":
            return

        def collected(made: Any) -> Any:
            return pkg[
                f"{made.__module__}.{made.__qualname__}".removeprefix("optimi_func.")
            ]

        made_of_fields = [*vars(optimi_func).values(), rules.Optimizer]
        for made in made_of_fields:
            if isinstance(made, type) and issubclass(made, optimizers.BaseOptimizer):
                found = collected(made)
                if "__init__" not in found.members:
                    me = griffe.Parameter(
                        "self", kind=griffe.ParameterKind.positional_or_keyword
                    )
                    found.set_member(
                        "__init__",
                        griffe.Function(
                            "__init__", parameters=griffe.Parameters(me, *parameters(made))
                        ),
                    )
        # The others name constants of their modules.
        for made in (optimi_func.MuonAdamW, optimi_func.NorMuonAdamW):
            shown = {p.name: p for p in collected(made).parameters}
            for p in parameters(made):
                if p.name in shown:
                    shown[p.name].default = p.default
        for made in NOT_CALLED:
            found = collected(made)
            if "__init__" in found.members:
                found.del_member("__init__")
