"""Argument checks shared by `population` and `unroll`: the loss and the optimizer."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from optimi_func._rule import PureOptimizer, check_pure, has_init_and_step, is_pure

# A factory takes hyperparameters by name: adamw, a partial of it, the user's lambda.
Optimizer: TypeAlias = PureOptimizer | Callable[..., PureOptimizer]


def check_optimizer(optimizer: Any, hyper: Mapping[str, Any] | None) -> None:
    """Raise if it is no optimizer or factory, or if a bound one comes with `hyper`."""
    if not _is_factory(optimizer):
        check_pure("optimizer", optimizer, "factories such as optimi_func.adamw, ")
    if is_pure(optimizer) and hyper:
        raise TypeError(
            f"hyper has {list(hyper)}, but every hyperparameter of "
            f"{type(optimizer).__name__} is bound: pass its factory, adamw instead of "
            "adamw(lr=1e-3)"
        )


def bind(optimizer: Optimizer, hyper: Mapping[str, Any]) -> PureOptimizer:
    """Return the optimizer, or call the factory with these hyperparameters."""
    if is_pure(optimizer):
        return optimizer
    factory: Any = optimizer  # no cast: Dynamo loses the class in it
    return factory(**hyper)


def _is_factory(optimizer: Any) -> bool:
    """Return True if calling it may give an optimizer. A class must be a pure one's."""
    return (
        has_init_and_step(optimizer) if isinstance(optimizer, type) else callable(optimizer)
    )


def scalar_loss(result: Any, has_aux: bool) -> Any:
    """Return what a loss function returned. Raise if its loss is no scalar."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"loss_fn returned {type(result).__name__}: with has_aux=True it has to be "
            "(loss, aux)"
        )
    check_loss(result[0] if has_aux else result)
    return result


def check_loss(loss: Any) -> None:
    """Raise if the loss is not a floating 0-d tensor."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}: allowed is a 0-d tensor, or "
            "(loss, aux) with has_aux=True"
        )
    if loss.dim() != 0:
        raise ValueError(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}: allowed is a scalar, "
            "such as its mean"
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"loss_fn returned a loss of dtype {loss.dtype}: allowed are floating ones"
        )
