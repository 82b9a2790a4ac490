"""The typed functions of an optimizer, made from its rule and its pure optimizer."""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

from optimi_func.core.checks import bind_call
from optimi_func.core.rule import PyTree, StorageLike
from optimi_func.execution.trees import step, step_
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import TreeState

P = ParamSpec("P")
T = TypeVar("T")


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


def step_function(factory: Callable[P, FunctionalOptimizer]) -> StepFunction[P]:
    """Make `lion_step`, for example, with the keywords of the factory."""
    owner: type[object] = cast(Any, factory).owner
    home = vars(sys.modules.get(factory.__module__, object))  # it may be imported by nobody
    items = [(x, f"{factory.__module__}.{name}") for name, x in home.items()]
    items += [(x, "") for cls in owner.__mro__ for x in vars(cls).values()]
    kinds = [x for x in items if isinstance(x[0], type) and issubclass(x[0], tuple)]
    for kind, name in kinds:
        if name and kind.__module__ == factory.__module__:
            # A class in a class is pickled by getattr, which weights_only refuses.
            kind.__qualname__ = name.rpartition(".")[2]
    torch.serialization.add_safe_globals([x if x[1] else x[0] for x in kinds])
    return _step_function(factory, _pure_step, f"{factory.__name__}_step")


def compiled_functions(
    factory: Callable[P, FunctionalOptimizer],
) -> tuple[StepFunction[P], StepFunction[P]]:
    """Make the compiled `lion_step`, for example, and `lion_step_`, which is in place."""
    name = f"compiled_{factory.__name__}_step"
    return _step_function(factory, step, name), _step_function(factory, step_, f"{name}_")


def check_calls(factory: Any) -> None:
    """Name the factory in errors of its calls, and the keyword that was meant."""
    original, names = factory.__init__, tuple(inspect.signature(factory).parameters)

    @wraps(original)
    def init(self: object, *args: object, **kwargs: object) -> None:
        if args or "lr" not in kwargs or not all([name in names for name in kwargs]):
            bind_call(factory.__name__, inspect.signature(factory), args, kwargs)  # raises
        original(self, **kwargs)

    factory.__init__ = init


def _pure_step(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """Step by operations that torch can trace: see `FunctionalOptimizer.step`."""
    return optimizer.step(params, grads, state)


def _step_function(
    factory: Callable[P, FunctionalOptimizer],
    run: Callable[..., tuple[PyTree, TreeState]],
    name: str,
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
    step.__signature__ = keywords.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[*trees, *keywords.parameters.values()],
        return_annotation=tuple[PyTree, TreeState],
    )
    step.__name__ = step.__qualname__ = name
    step.__module__ = factory.__module__
    step.__doc__ = f"{run.__doc__}\n\n{factory.__doc__}"
    return step
