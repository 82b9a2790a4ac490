"""The options of every optimizer, in constructors that are written by hand."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core import checks
from optimi_func.core.rule import Options

P = ParamSpec("P")
T = TypeVar("T")


def with_options(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that takes and shows `Options` in the place of its `**options`."""
    options = [BaseOptimizer._arguments[name] for name in Options.__annotations__]
    defaults = {x.name: x.default for x in options}
    own = inspect.signature(function)
    shown = [x for x in own.parameters.values() if x.kind is not x.VAR_KEYWORD]
    shown += [x.parameter(keyword=True) for x in options]
    signature, name = own.replace(parameters=shown), function.__qualname__.split(".")[0]
    run: Callable[..., T] = function

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs.keys() - signature.parameters.keys():
            checks.bind_call(name, signature, args, kwargs)  # raises
        return run(*args, **{**defaults, **kwargs})

    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call
