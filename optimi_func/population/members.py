"""The members: how a population is made of models, and taken apart into them."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.utils import _pytree as pytree

from optimi_func._bound import Optimizer, bind, check_optimizer
from optimi_func._math import scalar_dtype
from optimi_func._rule import PyTree, Storage
from optimi_func.population.axes import path, place

T = TypeVar("T")
Hyper: TypeAlias = Mapping[str, Any]

NO_NUMBERS: Hyper = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Population:
    """Models trained side by side: a pytree with the members along every first axis.

    `len(members)` is their number. `dataclasses.replace` exchanges a field.
    """

    params: PyTree
    state: Any
    hyper: dict[str, Any]
    buffers: dict[str, Tensor]

    def __len__(self) -> int:
        return pytree.tree_leaves(self.params)[0].shape[0]


pytree.register_dataclass(
    Population, serialized_type_name="optimi_func.population.Population"
)


def init(
    optimizer: Optimizer,
    source: Any,
    hyper: Hyper = NO_NUMBERS,
    *,
    n: int | None = None,
    kahan_sum: bool | None = None,
    state_dtype: torch.dtype | None = None,
    storage: Storage | str | None = None,
) -> Population:
    """A population of n copies of one model, or of the models of a list.

    Args:
        optimizer: A factory such as `adamw`; or, where no number differs by member, a
            value such as `adamw(lr=1e-3)`.
        source: With n, one module or one parameter tree, copied n times. Without, a list
            of modules of one class (`torch.func.stack_module_state`), or a parameter tree
            whose leaves have the members along their first axis, such as `stack` gives.
        hyper: The factory's numbers by name. A tensor of shape [n] has one for each
            member, a float or 0-d tensor one for all; betas are a tuple of them, lr and
            weight_decay may be prefixes of the parameter tree (a list is one, of a list of
            parameters: the numbers of the members are a tensor).
        n: How many copies.
        kahan_sum: As in the optimizer's own init.
        state_dtype: As in the optimizer's own init.
        storage: As in the optimizer's own init.

    Returns:
        Params, fresh state, hyper and (of modules) buffers, in memory of their own. All
        numbers are tensors of shape [n], so that `select` and its kin move them along and
        a new value is no new graph.

    Raises:
        ValueError: n < 1, a leaf with another number of members than the rest, a number
            that the factory refuses, or a module with a frozen parameter, which the members
            would train, or with none.
        TypeError: A source that is none of these, or a hyperparameter that is no number.

    >>> from optimi_func import adamw
    >>> members = init(adamw, {"w": torch.ones(3)}, {"lr": torch.tensor([0.1, 0.2])}, n=2)
    >>> members.params["w"].shape, members.hyper["lr"].shape, len(members)
    (torch.Size([2, 3]), torch.Size([2]), 2)
    """
    check_optimizer(optimizer, hyper)
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(f"Invalid number of members: n={n!r}: allowed are integers from 1")
    params, buffers = _members_of(source, n)
    if not pytree.tree_leaves(params):
        raise ValueError(f"source={source!r} has no parameters: there is nothing to train")
    n = place({"params": params, "buffers": buffers}, (0, 0)).n
    device = pytree.tree_leaves(params)[0].device
    given = {k: _per_member(f"hyper[{k!r}]", x, n, device) for k, x in hyper.items()}
    # Numbers out of range are refused as by the factory; in a tensor they would not be.
    bind(optimizer, _first(hyper))
    options = {"kahan_sum": kahan_sum, "state_dtype": state_dtype, "storage": storage}
    start = place({"params": params, "hyper": given}, (0, 0)).run(
        lambda p, h: _fresh_state(bind(optimizer, h), p, options), "error"
    )
    # What is the same for all members comes out of vmap as one number seen n times.
    state = pytree.tree_map_only(Tensor, Tensor.contiguous, start)
    return Population(params, state, given, buffers)


def _members_of(source: Any, n: int | None) -> tuple[PyTree, dict[str, Tensor]]:
    """Stacked params and buffers."""
    if isinstance(source, nn.Module):
        if n is None:
            raise ValueError(
                f"Invalid number of members: n=None with one {type(source).__name__}: "
                "give n, or a list of modules"
            )
        _check_trainable(source)
        trees: PyTree = (dict(source.named_parameters()), dict(source.named_buffers()))
        return _copies(trees, n)
    modules = isinstance(source, list | tuple) and bool(source)
    modules = modules and all(isinstance(m, nn.Module) for m in source)
    if modules and n is not None:
        raise ValueError(f"n={n} with a list of {len(source)} modules: give one of the two")
    if modules:
        for module in source:
            _check_trainable(module)
        params, buffers = stack_module_state(list(source))
        return pytree.tree_map(Tensor.detach, (params, buffers))
    leaves = pytree.tree_leaves(source)
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        kinds = sorted({type(x).__name__ for x in leaves}) or ["no tensor"]
        raise TypeError(
            f"source holds {', '.join(kinds)}: allowed are a module, a list of modules, "
            "and a tree of tensors"
        )
    return (_copies(source, n) if n is not None else pytree.tree_map(_own, source)), {}


def _check_trainable(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        if not p.requires_grad:
            raise ValueError(
                f"the parameter {name!r} of {type(module).__name__} is frozen, and a "
                "population trains what it holds: make it of a tree of the others, and "
                "let the loss have this one from the module; or unfreeze it, and leave it "
                "out by transforms.masked"
            )


def _copies(tree: T, n: int) -> T:
    return pytree.tree_map(lambda x: x.detach().expand(n, *x.shape).clone(), tree)


def _own(x: Tensor) -> Tensor:
    return x.detach().clone()


def _first(hyper: Hyper) -> dict[str, Any]:
    """The numbers of the first member."""
    return pytree.tree_map_only(Tensor, lambda x: x if x.dim() == 0 else x[0], dict(hyper))


def _per_member(path: str, number: PyTree, n: int, device: torch.device) -> PyTree:
    """A hyperparameter with every number in it a floating tensor of shape [n]."""

    def spread(x: Any) -> Tensor:
        if isinstance(x, Tensor):
            if x.dim() > 1:
                raise ValueError(
                    f"{path} has shape {tuple(x.shape)}, for {n} members: allowed are "
                    f"({n},) and 0-d tensors (betas are a tuple of them)"
                )
            if x.dtype == torch.bool or x.is_complex():
                raise TypeError(f"{path} has dtype {x.dtype}: allowed are real numbers")
            # Factors that integers are multiplied by would be rounded.
            wide = x if x.is_floating_point() else x.to(scalar_dtype(x.device))
            return (wide.expand(n) if x.dim() == 0 else wide).detach().clone()
        if isinstance(x, bool) or not isinstance(x, numbers.Real):
            raise TypeError(
                f"{path}={x!r}: allowed are numbers, and tensors with one for each member. "
                "What is no number (amsgrad=True, a schedule) belongs to the factory: "
                "functools.partial(adamw, amsgrad=True), or lambda lr: adamw(lr=lambda "
                "step: lr / (step + 1))"
            )
        return torch.full((n,), float(x), dtype=scalar_dtype(device), device=device)

    return pytree.tree_map(spread, number)


def _fresh_state(optimizer: Any, params: PyTree, options: dict[str, Any]) -> Any:
    # An optimizer of the user's own need not take any.
    given = {name: x for name, x in options.items() if x is not None}
    return optimizer.init(params, **given)


def stack(trees: Sequence[T]) -> T:
    """One tree with the members along every first axis, of a list of trees.

    Args:
        trees: Of one structure, with equal shapes.

    Raises:
        ValueError: No tree, or trees that differ in structure or in a leaf's shape.

    >>> stack([{"w": torch.zeros(3)}, {"w": torch.ones(3)}])["w"].shape
    torch.Size([2, 3])
    """
    if not trees:
        raise ValueError("trees=[]: allowed are lists of at least one tree")
    spec = pytree.tree_structure(trees[0])
    for i, tree in enumerate(trees):
        if pytree.tree_structure(tree) != spec:
            raise ValueError(f"trees[{i}] differs from trees[0] in structure")
        pairs = zip(pytree.tree_leaves(tree), pytree.tree_leaves(trees[0]))
        for j, (x, first) in enumerate(pairs):
            if x.shape != first.shape:
                raise ValueError(
                    f"{path(f'trees[{i}]', tree, j)} has shape {tuple(x.shape)}, that of "
                    f"trees[0] {tuple(first.shape)}"
                )
    return pytree.tree_map(lambda *xs: torch.stack(xs), *trees)


def unstack(tree: T) -> list[T]:
    """The members of a tree one by one, the reverse of `stack`, in memory of their own.

    Args:
        tree: A Population, its params, its state or any other tree of tensors with the
            members along every first axis.

    Raises:
        ValueError: Leaves with different numbers of members.

    >>> [p["w"] for p in unstack({"w": torch.tensor([1.0, 2.0])})]
    [tensor(1.), tensor(2.)]
    """
    n = place({"tree": tree}, (0,)).n
    return [pytree.tree_map(lambda x, i=i: x[i].clone(), tree) for i in range(n)]


def state_dicts(members: Population, module: nn.Module) -> list[dict[str, Any]]:
    """A state_dict for each member, that `module.load_state_dict` takes.

    Args:
        members: A population made of `module`, or of its named parameters.
        module: Says which names a state_dict has: tied parameters stand under all of
            theirs, buffers that are not persistent under none.

    Raises:
        ValueError: A parameter or buffer of the module that the population lacks.

    >>> from optimi_func import sgd
    >>> linear = nn.Linear(2, 1)
    >>> members = init(sgd, linear, {"lr": 0.1}, n=3)
    >>> linear.load_state_dict(state_dicts(members, linear)[2])
    <All keys matched successfully>
    """
    check_members(members)
    if not isinstance(members.params, Mapping):
        raise TypeError(
            f"the population's params are a {type(members.params).__name__}: allowed are "
            "those of a module, by name"
        )
    names = {id(x): name for name, x in module.named_parameters()}
    names |= {id(x): name for name, x in module.named_buffers()}
    own = {**members.params, **members.buffers}
    found: list[dict[str, Any]] = [{} for _ in range(len(members))]
    for name, x in module.state_dict(keep_vars=True).items():
        known = names.get(id(x))
        if known is not None and known not in own:
            raise ValueError(
                f"the population has no {known!r} of {type(module).__name__}: make it of "
                "the module itself"
            )
        for i, one in enumerate(found):
            # A module's extra state is no member's.
            one[name] = x if known is None else own[known][i].detach().clone()
    return found


def check_members(members: Any) -> None:
    """Refuse what is no population."""
    if not isinstance(members, Population):
        raise TypeError(f"members={members!r}: allowed is a Population, which init makes")
