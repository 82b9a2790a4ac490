"""What follows from an optimizer's value and rule: its functions and its constructor.

Made here, typed, so that the file of an optimizer says only what is its own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch

from optimi_func._functional import FunctionalOptimizer
from optimi_func._rule import PyTree, Rule
from optimi_func._tree import TreeState, init_tree
from optimi_func.execution.trees import step, step_
from optimi_func.optimizers._groups import check_torchs_own
from optimi_func.optimizers.base import BaseOptimizer, Params

P = ParamSpec("P")
Constructor = TypeVar("Constructor", bound=Callable[..., None])
TreeStep: TypeAlias = Callable[
    Concatenate[PyTree, PyTree, TreeState, P], tuple[PyTree, TreeState]
]
Run: TypeAlias = Callable[
    [FunctionalOptimizer, PyTree, PyTree, TreeState], tuple[PyTree, TreeState]
]


class TreeInit(Protocol):
    """`(params, *, kahan_sum, state_dtype) -> TreeState`."""

    def __call__(
        self,
        params: PyTree,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> TreeState:
        """Fresh state, as `FunctionalOptimizer.init`."""
        ...


def init_function(rule: Rule[Any, Any], name: str) -> TreeInit:
    """`name_init`, for a rule that no option chooses."""

    def init(
        params: PyTree,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> TreeState:
        return init_tree(rule, params, kahan_sum, state_dtype)

    init.__name__ = init.__qualname__ = f"{name}_init"
    init.__module__ = rule.init.__module__
    init.__doc__ = f"Fresh {name} state for params: see `FunctionalOptimizer.init`."
    return init


def step_functions(
    factory: Callable[P, FunctionalOptimizer], name: str
) -> tuple[TreeStep[P], TreeStep[P], TreeStep[P]]:
    """`name_step`, `compiled_name_step` and `compiled_name_step_`, in place.

    Args:
        factory: Makes the value; its keywords are the functions' too.
        name: Of the optimizer.
    """
    return (
        _step_function(factory, _pure_step, f"{name}_step"),
        _step_function(factory, step, f"compiled_{name}_step"),
        _step_function(factory, step_, f"compiled_{name}_step_"),
    )


def _pure_step(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """The step as the bare pipeline: traceable by every transformation of torch."""
    return optimizer.step(params, grads, state)


def _step_function(
    factory: Callable[P, FunctionalOptimizer], run: Run, name: str
) -> TreeStep[P]:
    # The only place that forwards **kwargs: their types are the factory's, checked.
    def step(
        params: PyTree,
        grads: PyTree,
        state: TreeState,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[PyTree, TreeState]:
        return run(factory(*args, **kwargs), params, grads, state)

    # A code object of its own: torch.compile counts recompilations per code object.
    step.__code__ = step.__code__.replace(co_name=name)
    keywords = inspect.signature(factory)
    own = list(inspect.signature(step).parameters.values())[:3]
    step.__signature__ = keywords.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[*own, *keywords.parameters.values()],
        return_annotation=tuple[PyTree, TreeState],
    )
    step.__name__ = step.__qualname__ = name
    step.__module__ = factory.__module__
    step.__doc__ = f"{run.__doc__}\n\n    {factory.__doc__}"
    return step


def group_defaults(init: Constructor) -> Constructor:
    """A constructor without a body: each argument is the groups' default of its name."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def construct(self: BaseOptimizer, params: Params, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, params, *args, **kwargs)
        given.apply_defaults()
        _, _, *items = given.arguments.items()
        defaults = dict(items)
        # Torch's, which its users pass as what they are there by default.
        check_torchs_own(defaults.pop("fused", None), defaults.pop("differentiable", False))
        BaseOptimizer.__init__(self, params, defaults)

    return cast(Constructor, construct)
