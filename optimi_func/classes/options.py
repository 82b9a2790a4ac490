"""The options of every optimizer, in constructors that are written by hand."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Literal, ParamSpec, TypedDict, TypeVar

import torch

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core import checks
from optimi_func.core.rule import StorageLike

P = ParamSpec("P")
T = TypeVar("T")


class Options(TypedDict, total=False):
    """The options of every optimizer that concern how it runs, not its rule."""

    kahan_sum: bool | None
    foreach: bool | None
    triton: bool | None
    gradient_release: bool
    compile: bool | None
    capturable: bool
    state_dtype: torch.dtype | str | None
    storage: StorageLike | None
    skip_nonfinite: Literal["step", False]
    process_group: "torch.distributed.ProcessGroup | None"


def with_options(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that takes and shows `Options` in the place of its `**options`."""
    options = [BaseOptimizer._parameters[name] for name in Options.__annotations__]
    defaults = {x.name: x.default for x in options}
    own = inspect.signature(function)
    shown = [x for x in own.parameters.values() if x.kind is not x.VAR_KEYWORD]
    shown += [x.replace(kind=x.KEYWORD_ONLY) for x in options]
    signature, name = own.replace(parameters=shown), function.__qualname__.split(".")[0]
    run: Callable[..., T] = function

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs.keys() - signature.parameters.keys():
            checks.bind_call(name, signature, args, kwargs)  # raises
        return run(*args, **{**defaults, **kwargs})

    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call
