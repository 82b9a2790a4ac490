"""Steps and losses of all members, each in one vmapped call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from optimi_func.core.checks import Optimizer, bind, check_optimizer, scalar_loss
from optimi_func.core.rule import PyTree
from optimi_func.core.tree import grads_and_value, step_of, without_none
from optimi_func.population.axes import Randomness, place
from optimi_func.population.members import (
    NO_HYPER,
    Hyper,
    Population,
    check_members,
    put,
    select,
)


def vmap_step(
    optimizer: Optimizer,
    in_axes: tuple[object, object, object, object] = (0, 0, 0, 0),
    *,
    randomness: Randomness = "error",
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return a step for all members, `(params, grads, state, hyper) -> (params, state)`.

    Pass these arguments by position, because vmap does not batch keyword arguments. Pass
    the extras of a rule or a chain by name. The first axis of an extra indexes the members,
    and a 0-d tensor is shared by all members. The first axis of each result indexes the
    members too. The returned function is pure, compiles to one graph, and can be
    differentiated.

    Args:
        optimizer: A factory such as `adamw`, which is called with `hyper`, or a pure
            optimizer with `init` and `step`, for which you leave out `hyper`.
        in_axes: The axes that index the members in params, grads, state and hyper, as in
            torch.vmap. For each of these four arguments, pass an axis, None if all members
            share the argument, or a prefix tree of such values. Numbers and 0-d tensors in
            hyper are always shared.
        randomness: The same as in torch.vmap, for transformed optimizers that draw noise.

    Raises:
        ValueError: Leaves have different numbers of members. The error is raised in the
            call of the step, and names the leaves.
        TypeError: The optimizer is not a factory and has no `init` and `step`, or hyper is
            passed although the optimizer already has its hyperparameters.

    >>> from torch.func import vmap
    >>> from optimi_func import sgd, sgd_init
    >>> p, lrs = torch.zeros(2), torch.tensor([1.0, 2.0])
    >>> state = vmap(sgd_init)(p)
    >>> p, state = vmap_step(sgd)(p, torch.ones(2), state, {"lr": lrs})
    >>> p
    tensor([-1., -2.])
    """
    check_optimizer(optimizer, None)
    if not isinstance(in_axes, tuple) or len(in_axes) != 4:
        raise ValueError(
            f"in_axes={in_axes!r}: allowed are four, for params, grads, state and hyper"
        )

    def step(
        params: PyTree,
        grads: PyTree,
        state: PyTree,
        hyper: Hyper = NO_HYPER,
        **extras: PyTree,
    ) -> tuple[PyTree, PyTree]:
        check_optimizer(optimizer, hyper)
        args = {"params": params, "grads": grads, "state": state, "hyper": dict(hyper)}
        axes = in_axes + (0,) * len(extras)

        def member(p: PyTree, g: PyTree, s: PyTree, h: Hyper, *given: PyTree) -> object:
            by_name = dict(zip(extras, given))
            return step_of("population", bind(optimizer, h), p, g, s, **by_name)

        return place(args | extras, axes, {"hyper", *extras}).run(member, randomness)

    return step


def step(
    optimizer: Optimizer,
    members: Population,
    grads: PyTree,
    *,
    index: Sequence[int] | Tensor | None = None,
    randomness: Randomness = "error",
    **extras: PyTree,
) -> Population:
    """Update every member with its own hyperparameters: `vmap_step` on a Population.

    Args:
        optimizer: The optimizer that you passed to `init`.
        members: The population.
        grads: The gradients of the population's parameters. If a gradient is None, its
            parameter is not updated in any member.
        index: The members to update, in the form that `select` accepts, but each member
            only once. All other members are unchanged, including their step counts. If you
            pass index, `grads` and the extras have to be those of `select(members, index)`.
            None updates all members.
        randomness: The same as in torch.vmap, for transformed optimizers that draw noise.
        **extras: The extra arguments of the step: see `vmap_step`.

    Raises:
        ValueError: Gradients or extras have a different number of members, or `index`
            contains an index twice.
        IndexError: An index is out of range.

    >>> from optimi_func import sgd
    >>> from optimi_func.population import init
    >>> rates = {"lr": torch.tensor([0.1, 0.2])}
    >>> members = init(sgd, {"w": torch.zeros(3)}, rates, n=2)
    >>> step(sgd, members, {"w": torch.ones(2, 3)}).params["w"][:, 0]
    tensor([-0.1000, -0.2000])
    >>> step(sgd, members, {"w": torch.ones(1, 3)}, index=[1]).params["w"][:, 0]
    tensor([ 0.0000, -0.2000])
    """
    check_members(members)
    stepped = members if index is None else select(members, index)
    update = vmap_step(optimizer, randomness=randomness)
    params, state = update(stepped.params, grads, stepped.state, stepped.hyper, **extras)
    if index is not None:
        before = without_none((members.params, members.state))
        params, state = put(before, without_none((params, state)), index)
    return replace(members, params=params, state=state)


def loss_and_grad(
    loss_fn: Callable[..., object],
    members: Population,
    *data: PyTree,
    in_axes: PyTree = None,
    has_aux: bool = False,
    randomness: Randomness = "error",
) -> tuple[PyTree, PyTree]:
    """Compute each member's loss and the gradient of its parameters.

    Args:
        loss_fn: A function `(params, *data) -> loss` for one member, or `(params, buffers,
            *data) -> loss` if the population has buffers. The loss is a scalar. If a module
            changes its buffers, use `call_module` in loss_fn.
        members: The population.
        *data: Data that all members share, or data in which an axis indexes the members.
        in_axes: The axes that index the members in data. None means that all members share
            the data. Pass one axis or None for all data, or a tuple that contains, for each
            data argument, an axis, None, or a prefix tree of these.
        has_aux: True if loss_fn returns (loss, aux), where aux contains metrics or new
            buffers.
        randomness: The same as in torch.vmap. "different" gives each member its own dropout
            mask.

    Returns:
        The losses in a tensor of shape [n], and the gradients. With has_aux, the first
        result is (losses, aux) instead.

    Raises:
        ValueError: The loss is not a scalar, or data has a different number of members.
        TypeError: The loss is not a floating-point tensor, or members is not a Population.
        RuntimeError: The loss writes to a tensor that all members share, such as a buffer.

    >>> from optimi_func import sgd
    >>> from optimi_func.population import init
    >>> members = init(sgd, {"w": torch.ones(3)}, {"lr": 0.1}, n=2)
    >>> loss_fn = lambda p, x: (p["w"] * x).sum()
    >>> loss_and_grad(loss_fn, members, torch.ones(3))[0]
    tensor([3., 3.])
    """

    def checked(*args: object) -> object:
        return scalar_loss(loss_fn(*args), has_aux)

    compute = partial(grads_and_value, checked, has_aux)
    grads, losses = _over_members(compute, members, data, in_axes, randomness)
    return losses, grads


def _over_members(
    fn: Callable[..., object],
    members: Population,
    data: tuple[PyTree, ...],
    in_axes: object,
    randomness: Randomness,
) -> PyTree:
    check_members(members)
    args: dict[str, PyTree] = {"params": members.params}
    if members.buffers:
        args["buffers"] = members.buffers
    if not isinstance(in_axes, tuple):
        in_axes = (in_axes,) * len(data)
    if len(in_axes) != len(data):
        raise ValueError(
            f"in_axes={in_axes!r} has {len(in_axes)} entries: allowed are one for all, or "
            f"one for each of {len(data)} data"
        )
    axes = (0,) * len(args) + in_axes
    args |= {f"data[{i}]": x for i, x in enumerate(data)}
    placed = place(args, axes)
    if torch.compiler.is_compiling():
        return placed.run(fn, randomness)
    try:
        return placed.run(fn, randomness)
    except RuntimeError as error:
        if not any(text in str(error) for text in _SHARED_WRITES):
            raise
        raise RuntimeError(
            f"{error} All members share the tensor that is written here, but each member "
            "needs its own: make the population from the module, and run that with "
            "call_module(module, params, buffers, ...), which returns new buffers"
        ) from error


# How torch.vmap refuses to write the results of several members to one tensor.
_SHARED_WRITES = (
    "Batch norm got a batched tensor",
    "vmap: inplace arithmetic",
    "would mutate a captured Tensor",
)


def call_module(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *args: object,
) -> tuple[PyTree, dict[str, Tensor]]:
    """Run a module with other parameters and buffers; return its output and new buffers.

    Use this function in the loss if the buffers of the module change, as in BatchNorm in
    training mode, and return the new buffers as aux. This function does not write to its
    arguments or to the module.

    Args:
        module: The module to run. Parameters that `params` does not contain, such as frozen
            parameters, are taken from the module.
        params: The parameters of one member, by name.
        buffers: All buffers of the module, by name.
        *args: The inputs of the module.

    Raises:
        ValueError: A buffer of the module is missing, or the module does not have a
            parameter or buffer that is passed.

    >>> norm = nn.BatchNorm1d(2)
    >>> before = dict(norm.named_buffers())
    >>> _, after = call_module(norm, {}, before, torch.ones(4, 2))
    >>> after["num_batches_tracked"], norm.num_batches_tracked
    (tensor(1), tensor(0))
    """
    names = [name for name, _ in module.named_buffers()]
    for name in names:
        if name not in buffers:
            raise ValueError(
                f"buffers lack {name!r} of {type(module).__name__}: a population made "
                "from the module has it, and its losses take (params, buffers, *data)"
            )
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for kind, tensors, own in (("buffer", buffers, names), ("parameter", params, known)):
        for name in tensors:
            if name not in own:
                raise ValueError(f"{type(module).__name__} has no {kind} {name!r}")
    own = {name: x.clone() for name, x in buffers.items()}
    return functional_call(module, {**params, **own}, args), own
