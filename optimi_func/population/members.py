"""Populations: made from models, selected and copied."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.utils import _pytree as pytree

from optimi_func.core.checks import Optimizer, bind, check_optimizer, check_whole
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import InitOptions, PyTree
from optimi_func.core.storage import seed_in
from optimi_func.core.torch_private import level_of
from optimi_func.core.tree import LeafState, without_none
from optimi_func.population.axes import place

T = TypeVar("T")
Hyper: TypeAlias = Mapping[str, PyTree]

NO_HYPER: Hyper = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Population:
    """Models that are trained together, as a pytree whose first axes index the members.

    `len(members)` is the number of members. `dataclasses.replace` returns a population with
    another value of a field. You can save a population with `torch.save`, and load it with
    `torch.load`.
    """

    params: PyTree
    state: PyTree
    hyper: dict[str, PyTree]
    buffers: dict[str, Tensor]

    def __len__(self) -> int:
        return first_tensor(self.params).shape[0]


pytree.register_dataclass(
    Population, serialized_type_name="optimi_func.population.Population"
)
torch.serialization.add_safe_globals([Population])  # for weights_only=True


def _own(x: Tensor) -> Tensor:
    """Return a contiguous tensor, as views without elements seem to be in any case."""
    return x.contiguous() if x.numel() else x.new_empty(x.shape)


def init(
    optimizer: Optimizer,
    source: object,
    hyper: Hyper = NO_HYPER,
    *,
    n: int | None = None,
    **options: Unpack[InitOptions],
) -> Population:
    """Create a population from n copies of one model, or from a list of models.

    Args:
        optimizer: A factory such as `adamw`. If all members have the same hyperparameters,
            it can also be a pure optimizer such as `adamw(lr=1e-3)`.
        source: With n, one module or one parameter tree, which is copied n times. Without
            n, a list of modules of one class (`torch.func.stack_module_state`), or a
            parameter tree in whose leaves the first axis indexes the members.
        hyper: The hyperparameters for the factory, by name. A tensor of shape [n] contains
            a value for each member. A float or 0-d tensor is the value for all members.
            betas are a tuple of such values. lr and weight_decay may also be trees with a
            value for each part of the parameter tree. A list is such a tree, for a list of
            parameters, so use a tensor and not a list for the values of the members.
            Tensors keep their dtype, so a seed for each member is torch.arange(n).
        n: The number of copies.
        **options: Options that are passed to the optimizer's own init, such as `storage`.

    Returns:
        A population with the parameters, a new state, the hyperparameters and the buffers
        of modules, which share no memory with the arguments. All hyperparameters are
        tensors of shape [n], so that `select` and `clone` can index them, and new values
        need no new graph.

    Raises:
        ValueError: n is less than 1, leaves have different numbers of members, the factory
            does not accept a hyperparameter, or a module has no parameters or has frozen
            parameters (which the population would train).
        TypeError: source is not one of these kinds, or a hyperparameter is not a number.

    >>> from optimi_func import adamw
    >>> rates = {"lr": torch.tensor([0.1, 0.2])}
    >>> members = init(adamw, {"w": torch.ones(3)}, rates, n=2)
    >>> members.params["w"].shape, members.hyper["lr"].shape, len(members)
    (torch.Size([2, 3]), torch.Size([2]), 2)
    """
    check_optimizer(optimizer, hyper)
    check_whole("n", n, 1, none=True)
    params, buffers = _members_of(source, n)
    if not pytree.tree_leaves(params):
        raise ValueError(f"source={source!r} has no parameters to train")
    n = place({"params": params, "buffers": buffers}, (0, 0)).n
    device = first_tensor(params).device
    numbers = {k: _per_member(f"hyper[{k!r}]", x, n, device) for k, x in hyper.items()}
    placed = place({"params": params, "hyper": numbers}, (0, 0))
    # Under vmap the factory could not read the values that it checks.
    read = pytree.tree_map(Tensor.cpu, numbers)
    for i in range(n):
        bind(optimizer, pytree.tree_map(lambda x, i=i: x[i], read))
    start = placed.run(lambda p, h: bind(optimizer, h).init(p, **options), "error")
    # vmap returns state that all members share as an expanded view.
    state = pytree.tree_map_only(Tensor, _own, start)
    for leaf in pytree.tree_leaves(state, lambda x: isinstance(x, LeafState)):
        if isinstance(leaf, LeafState) and (seed := seed_in(leaf.kahan_comp)) is not None:
            # Each draws its own numbers.
            seed += torch.arange(n, dtype=torch.int64, device=seed.device)
    return Population(params, state, numbers, buffers)


def _members_of(source: Any, n: int | None) -> tuple[PyTree, dict[str, Tensor]]:
    if isinstance(source, nn.Module):
        if n is None:
            one = type(source).__name__
            raise ValueError(f"n=None with one {one}: give n, or a list of modules")
        _check_trainable(source)
        trees: PyTree = (dict(source.named_parameters()), dict(source.named_buffers()))
        return _copies(trees, n)
    modules = isinstance(source, list | tuple) and bool(source)
    if modules and all(isinstance(m, nn.Module) for m in source):
        if n is not None:
            raise ValueError(
                f"n={n} with a list of {len(source)} modules: give one of the two"
            )
        for module in source:
            _check_trainable(module)
        params, buffers = stack_module_state(list(source))
        return pytree.tree_map(Tensor.detach, (params, buffers))
    leaves = pytree.tree_leaves(without_none(source))
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        kinds = sorted({type(x).__name__ for x in leaves}) or ["no tensor"]
        raise TypeError(
            f"source holds {', '.join(kinds)}: allowed are a module, a list of modules, "
            "and a tree of tensors"
        )
    return _copies(source, n), {}


def _check_trainable(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        if not p.requires_grad:
            raise ValueError(
                f"the parameter {name!r} of {type(module).__name__} is frozen, and a "
                "population trains all of its parameters: pass a tree of the others, and "
                "let the loss take this one from the module. Or unfreeze it, and exclude "
                "it with transforms.masked"
            )


def _copies(tree: T, n: int | None) -> T:
    def copy(x: Tensor) -> Tensor:
        # Within a transformation detach would make its derivative 0.
        x = x.detach() if level_of(x) == -1 else x
        return (x if n is None else x.expand(n, *x.shape)).clone()

    return pytree.tree_map_only(Tensor, copy, tree)


def _per_member(path: str, number: PyTree, n: int, device: torch.device) -> PyTree:
    """Convert every number in a hyperparameter to a tensor of shape [n]."""

    def spread(x: object) -> Tensor:
        if isinstance(x, Tensor):
            if x.dim() > 1:
                raise ValueError(
                    f"{path} has shape {tuple(x.shape)}, for {n} members: allowed are "
                    f"({n},) and 0-d tensors (betas are a tuple of them)"
                )
            if x.dtype == torch.bool or x.is_complex():
                raise TypeError(f"{path} has dtype {x.dtype}: allowed are real numbers")
            return (x.expand(n) if x.dim() == 0 else x).clone()
        if isinstance(x, bool) or not isinstance(x, numbers.Real):
            raise TypeError(
                f"{path}={x!r}: allowed are numbers, and tensors with one for each member. "
                "Anything else (amsgrad=True, a schedule) belongs to the factory: "
                "functools.partial(adamw, amsgrad=True), or lambda lr: adamw(lr=lambda "
                "step: lr / (step + 1))"
            )
        return torch.full((n,), float(x), dtype=scalar_dtype(device), device=device)

    return pytree.tree_map(spread, number)


def first_tensor(tree: object) -> Tensor:
    """Return the first leaf of a tree that is not None."""
    return pytree.tree_leaves(without_none(tree))[0]


def check_members(members: object) -> None:
    """Raise an error if members is not a Population."""
    if not isinstance(members, Population):
        raise TypeError(f"members={members!r}: allowed is a Population, which init makes")


# For population-based training.


def select(tree: T, index: Sequence[int] | Tensor) -> T:
    """Return the members at `index`, in the order of `index` and as often as it lists them.

    The parameters, optimizer state, hyperparameters and buffers of a member stay together.

    Args:
        tree: A Population, or any tree whose first axes index the members.
        index: Indices of members, starting at 0, or a bool for each member.

    Raises:
        IndexError: An index is out of range, or the number of bools is not the number of
            members.

    >>> select({"w": torch.tensor([1.0, 2.0, 3.0])}, [2, 0, 0])["w"]
    tensor([3., 1., 1.])
    """
    at = _index("index", index, tree)
    return pytree.tree_map_only(Tensor, lambda x: x[at.to(x.device)], tree)


def clone(tree: T, source: Sequence[int] | Tensor, into: Sequence[int] | Tensor) -> T:
    """Replace the members at `into` by copies of the members at `source`.

    Population-based training calls this exploitation (Jaderberg et al., "Population Based
    Training of Neural Networks", arXiv:1711.09846).

    Args:
        tree: A Population, or any tree whose first axes index the members.
        source: Indices of the members to copy.
        into: Indices of the members to replace, as many as in `source`.

    Raises:
        IndexError: An index is out of range.
        ValueError: The lists differ in length, or `into` contains an index twice.

    >>> clone({"w": torch.tensor([1.0, 2.0, 3.0])}, [2], [0])["w"]
    tensor([3., 2., 3.])
    """
    origin, target = _index("source", source, tree), _index("into", into, tree, once=True)
    if len(origin) != len(target):
        raise ValueError(f"source has {len(origin)} members, into {len(target)}")
    n = place({"tree": tree}, (0,)).n
    places = torch.arange(n, dtype=torch.int64, device=target.device)
    return select(tree, places.index_copy(0, target, origin))


def put(tree: T, some: T, index: Sequence[int] | Tensor) -> T:
    """Return a tree with its members at `index`, each named once, from another tree."""
    at = _index("index", index, tree, once=True)
    return pytree.tree_map(lambda x, y: x.index_copy(0, at.to(x.device), y), tree, some)


def _index(
    name: str, index: Sequence[int] | Tensor, tree: object, once: bool = False
) -> Tensor:
    """Convert indices or bools of a tree's members to a checked 1-D tensor of indices."""
    n, device = place({"tree": tree}, (0,)).n, first_tensor(tree).device
    if isinstance(index, str) or not isinstance(index, Iterable):
        raise TypeError(f"{name}={index!r}: allowed are lists of indices of members")
    at = torch.as_tensor(index if isinstance(index, Tensor) else list(index), device=device)
    if at.dtype == torch.bool:
        if at.shape != (n,):
            raise IndexError(
                f"{name} has {tuple(at.shape)} bools, the population {n} members"
            )
        return at.nonzero()[:, 0]
    if at.numel() == 0:
        at = at.long()
    if at.dim() != 1 or at.is_floating_point() or at.is_complex():
        raise IndexError(f"{name}={index!r}: allowed are lists of indices of members")
    if torch.compiler.is_compiling():
        return at  # its values are unknown while a graph is traced
    wrong = [i for i in at.tolist() if not 0 <= i < n]
    if wrong:
        raise IndexError(f"{name} has {wrong[0]}: allowed are members 0 to {n - 1}")
    if once and len(at.unique()) != len(at):
        raise ValueError(f"{name}={at.tolist()} names a member twice")
    return at.long()
