"""Unrolled training: a run of steps as one function that torch.func differentiates."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core import checks
from optimi_func.core.rule import PyTree
from optimi_func.core.torch_private import serializable
from optimi_func.core.tree import grads_and_value, step_of

T = TypeVar("T")


@serializable
class Unrolled(NamedTuple):
    """The result of a run of training steps."""

    params: PyTree
    state: PyTree
    losses: Tensor  # [steps]; each loss is taken before its step


def unroll(
    optimizer: checks.Optimizer,
    loss_fn: Callable[[PyTree, PyTree], Tensor],
    params: PyTree,
    state: PyTree,
    batches: object,
    *,
    steps: int | None = None,
    hyper: Mapping[str, object] | None = None,
) -> Unrolled:
    """Run several training steps as one pure function, which you can differentiate.

        g_t       = d loss_fn(p_t, batch_t) / d p
        p_(t+1), s_(t+1) = optimizer.step(p_t, g_t, s_t)

    `unroll` does not write to its arguments. If you differentiate in reverse mode
    (torch.func.grad, backward), the tensors of all steps are stored, so the memory grows
    with the number of steps. In forward mode (jvp, jacfwd), only the tensors of one step
    are stored, but each pass computes only one derivative. If neither mode is possible,
    call `unroll` for a few steps at a time, and call `detach` on the parameters and the
    state between these calls. This is truncated backpropagation, which is cheap but biased
    towards small learning rates (Wu et al., arXiv:1803.02021).

    Args:
        optimizer: A pure optimizer with `init` and `step`, such as `adamw(lr=lr)`. If you
            pass `hyper`, pass a factory instead, such as `adamw`.
        loss_fn: A function `(params, batch) -> loss`, where the loss is a 0-d tensor.
        params: The parameter tree at the start.
        state: The optimizer state at the start. None creates a new state.
        batches: An iterable with one batch per step, each a pytree of tensors. If the loss
            uses weights for the examples, make these weights part of the batch.
        steps: The number of steps, if `batches` is a single batch that every step uses.
        hyper: The hyperparameters for the factory by name, as a pytree of numbers and
            tensors.

    Returns:
        An `Unrolled` with the parameters and the state after the last step, and the losses
        of all steps.

    Raises:
        ValueError: steps is less than 1, there is no batch, or a loss is not a scalar.
        TypeError: batches is not iterable, or is an iterator although steps is given. The
            loss is not a floating-point tensor. hyper is not a mapping, or is given with an
            optimizer that already has its hyperparameters. optimizer is not a factory and
            has no `step`.

    References:
        Maclaurin, Duvenaud & Adams, "Gradient-based Hyperparameter Optimization through
        Reversible Learning", arXiv:1502.03492. Franceschi et al., "Forward and Reverse
        Gradient-Based Hyperparameter Optimization", arXiv:1703.01785.

    >>> from optimi_func import sgd
    >>> def end(lr):
    ...     loss_fn, hyper = lambda p, x: (p - x) ** 2, {"lr": lr}
    ...     run = unroll(sgd, loss_fn, p, None, [x, x], hyper=hyper)
    ...     return run.params
    >>> p, x = torch.tensor(1.0), torch.tensor(0.0)
    >>> lr = torch.tensor(0.25)
    >>> end(lr), torch.func.grad(end)(lr)  # (1 - 2 lr)^2
    (tensor(0.2500), tensor(-2.))
    """
    if hyper is not None and not isinstance(hyper, Mapping):
        raise TypeError(f"hyper={hyper!r}: allowed are numbers by name, and None")
    checks.check_optimizer(optimizer, hyper)
    losses: list[Tensor] = []
    bound = checks.bind(optimizer, dict(hyper or {}))
    if state is None:
        state = bound.init(params)

    def loss(params: PyTree, batch: PyTree) -> PyTree:
        return checks.scalar_loss(loss_fn(params, batch), False)

    for batch in _one_a_step(batches, steps):
        grads, value = grads_and_value(loss, False, params, batch)
        params, state = step_of("unroll", bound, params, grads, state)
        losses.append(value)
    if not losses:
        raise ValueError("batches is empty: there is nothing to unroll")
    return Unrolled(params, state, torch.stack(losses))


def _one_a_step(batches: object, steps: int | None) -> Iterable[object]:
    """Return an iterable with a batch for each step, or raise."""
    if steps is None:
        # The loop would iterate over the leaves of a single batch.
        single = isinstance(batches, Mapping | str) or (
            isinstance(batches, Tensor) and batches.dim() == 0
        )
        if single or not isinstance(batches, Iterable):
            text = repr(batches) if isinstance(batches, int | str) else type(batches)
            raise TypeError(
                f"batches={text}: allowed is an iterable with a batch for each step; "
                "steps=... takes one batch so many times"
            )
        return batches
    checks.check_whole("steps", steps, 1, none=True)
    if isinstance(batches, Iterator):
        raise TypeError(
            f"batches={batches!r} with steps={steps}: steps takes one batch so many times; "
            "to end an iterator after as many, pass itertools.islice(batches, steps) and "
            "no steps"
        )
    return repeat(batches, steps)


def detach(tree: T) -> T:
    """Detach the tensors of a tree, for use between the steps of an outer loop.

    The parameters and the state that `unroll` returns are part of the graph of that run. If
    you pass them to the next run without detaching them, derivatives of the next run also
    go through the first run.

    >>> w = torch.ones(2, requires_grad=True)
    >>> params, _ = detach(({"w": 2 * w}, None))
    >>> params["w"].requires_grad
    False
    """
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)
