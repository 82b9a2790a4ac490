"""Populations: many models trained at once, each with numbers of its own.

A `Population` is a pytree whose every leaf has the members along its first axis: their
parameters, their optimizers' states, their hyperparameters and their buffers. One vmapped
step updates all of them, torch.compile makes it one graph, and what population-based
training does between steps is indexing: `select`, `clone`, `perturb`.

    members = init(adamw, model, {"lr": lrs, "weight_decay": 1e-2}, n=64)
    losses, grads = loss_and_grad(loss_fn, members, x, y)
    members = step(adamw, members, grads)

An optimizer is given as its factory (`adamw`, not `adamw(lr=...)`) wherever members have
numbers of their own, because vmap batches no keyword arguments: the numbers travel as a
pytree beside params and state, and each member binds its own. What is no number is the same
for all and part of the factory: `functools.partial(adamw, amsgrad=True)`.
"""

import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.utils import _pytree as pytree

from optimi_func._bound import Optimizer, bind, check_optimizer, scalar_loss
from optimi_func._math import scalar_dtype
from optimi_func._rule import PyTree

T = TypeVar("T")
Randomness: TypeAlias = Literal["error", "same", "different"]
Hyper: TypeAlias = Mapping[str, Any]

_NO_NUMBERS: Hyper = MappingProxyType({})
# What has to stay below 1: its distance from 1 is what a factor means.
_BELOW_ONE = ("betas", "momentum")


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
    hyper: Hyper = _NO_NUMBERS,
    *,
    n: int | None = None,
    kahan_sum: bool | None = None,
    state_dtype: torch.dtype | None = None,
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
            weight_decay may be prefixes of the parameter tree.
        n: How many copies.
        kahan_sum: As in the optimizer's own init.
        state_dtype: As in the optimizer's own init.

    Returns:
        Params, fresh state, hyper and (of modules) buffers, in memory of their own. All
        numbers are tensors of shape [n], so that `select` and its kin move them along and
        a new value is no new graph.

    Raises:
        ValueError: n < 1, a leaf with another number of members than the rest, or a module
            with a frozen parameter, which the members would train.
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
    n = _place({"params": params, "buffers": buffers}, (0, 0)).n
    device = pytree.tree_leaves(params)[0].device
    given = {k: _per_member(f"hyper[{k!r}]", x, n, device) for k, x in hyper.items()}
    start = _place({"params": params, "hyper": given}, (0, 0)).run(
        lambda p, h: _fresh_state(bind(optimizer, h), p, kahan_sum, state_dtype), "error"
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


def _per_member(path: str, number: PyTree, n: int, device: torch.device) -> PyTree:
    """A hyperparameter with every number in it a tensor of shape [n]."""

    def spread(x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return (x.expand(n) if x.dim() == 0 else x).detach().clone()
        if isinstance(x, bool) or not isinstance(x, numbers.Real):
            raise TypeError(
                f"{path}={x!r} is no number: what is the same for all members belongs to "
                "the factory, functools.partial(adamw, amsgrad=True)"
            )
        return torch.full((n,), float(x), dtype=scalar_dtype(device), device=device)

    return pytree.tree_map(spread, number)


def _fresh_state(
    optimizer: Any, params: PyTree, kahan_sum: bool | None, dtype: torch.dtype | None
) -> Any:
    if kahan_sum is None and dtype is None:
        return optimizer.init(params)
    return optimizer.init(params, kahan_sum=kahan_sum, state_dtype=dtype)


def vmap_step(
    optimizer: Optimizer,
    in_axes: tuple[Any, Any, Any, Any] = (0, 0, 0, 0),
    *,
    randomness: Randomness = "error",
) -> Callable[..., tuple[PyTree, Any]]:
    """The step over members: a function `(params, grads, state, hyper) -> (params, state)`.

    Everything travels by position, because vmap batches no keyword arguments. It is pure,
    compiles to one graph, and can be differentiated.

    Args:
        optimizer: A factory such as `adamw`, called with `hyper`; or a value with `init`
            and `step`, and then `hyper` is left out.
        in_axes: Where params, grads, state and hyper have their members: an axis, None for
            one of all members, or a prefix tree of these, as in torch.vmap. In hyper,
            numbers and 0-d tensors are one for all in any case.
        randomness: As in torch.vmap, for transformed optimizers that draw noise.

    Returns:
        A function whose results have the members along their first axis.

    Raises:
        ValueError: When called: leaves with different numbers of members, each named.
        TypeError: An optimizer that is no factory and has no `init` and `step`, or hyper
            beside an optimizer whose numbers are bound.

    >>> from optimi_func import sgd, sgd_init
    >>> p, lrs = torch.zeros(2), torch.tensor([1.0, 2.0])
    >>> p, state = vmap_step(sgd)(p, torch.ones(2), vmap(sgd_init)(p), {"lr": lrs})
    >>> p
    tensor([-1., -2.])
    """
    check_optimizer(optimizer, None)
    if not isinstance(in_axes, tuple) or len(in_axes) != 4:
        raise ValueError(
            f"in_axes={in_axes!r}: allowed are four, of params, grads, state and hyper"
        )

    def step(
        params: PyTree, grads: PyTree, state: Any, hyper: Hyper = _NO_NUMBERS
    ) -> tuple[PyTree, Any]:
        check_optimizer(optimizer, hyper)
        args = {"params": params, "grads": grads, "state": state, "hyper": dict(hyper)}
        return _place(args, in_axes).run(
            lambda p, g, s, h: bind(optimizer, h).step(p, g, s), randomness
        )

    return step


def step(
    optimizer: Optimizer,
    members: Population,
    grads: PyTree,
    *,
    randomness: Randomness = "error",
) -> Population:
    """One update of every member, with its own numbers: `vmap_step` on a Population.

    Args:
        optimizer: As `init` had it.
        members: The population.
        grads: Gradients of its params; None leaves a parameter alone, of all members.
        randomness: As in torch.vmap, for transformed optimizers that draw noise.

    Raises:
        ValueError: Gradients of another number of members.

    >>> from optimi_func import sgd
    >>> members = init(sgd, {"w": torch.zeros(3)}, {"lr": torch.tensor([0.1, 0.2])}, n=2)
    >>> step(sgd, members, {"w": torch.ones(2, 3)}).params["w"][:, 0]
    tensor([-0.1000, -0.2000])
    """
    _check_members(members)
    update = vmap_step(optimizer, randomness=randomness)
    params, state = update(members.params, grads, members.state, members.hyper)
    return replace(members, params=params, state=state)


def loss_and_grad(
    loss_fn: Callable[..., Any],
    members: Population,
    *data: PyTree,
    in_axes: Any = None,
    has_aux: bool = False,
    randomness: Randomness = "error",
) -> tuple[Any, PyTree]:
    """Each member's loss and the gradient of its parameters.

    Args:
        loss_fn: `(params, *data) -> loss` of one member, or `(params, buffers, *data)`
            where the population has buffers; the loss is a scalar. A module whose buffers
            change runs through `call_module`.
        members: The population.
        *data: What all members see, or what each has of its own.
        in_axes: Where data has its members: None (all see the same), an axis, or a tuple
            with one of these, or a prefix tree of them, for each argument.
        has_aux: loss_fn returns (loss, aux): metrics, or new buffers.
        randomness: As in torch.vmap: "different" gives each member its own dropout.

    Returns:
        Losses of shape [n], or (losses, aux) with has_aux; and the gradients.

    Raises:
        ValueError: A loss that is no scalar; data of another number of members.
        TypeError: A loss that is no floating tensor; members that are no Population.
        RuntimeError: The loss writes to a tensor that all members share.

    >>> from optimi_func import sgd
    >>> members = init(sgd, {"w": torch.ones(3)}, {"lr": 0.1}, n=2)
    >>> loss_and_grad(lambda p, x: (p["w"] * x).sum(), members, torch.ones(3))[0]
    tensor([3., 3.])
    """

    def checked(*args: Any) -> Any:
        return scalar_loss(loss_fn(*args), has_aux)

    both = grad_and_value(checked, has_aux=has_aux)
    grads, losses = _over_members(both, members, data, in_axes, randomness)
    return losses, grads


def evaluate(
    metric: Callable[..., T],
    members: Population,
    *data: PyTree,
    in_axes: Any = None,
    randomness: Randomness = "error",
) -> T:
    """A metric of each member: whatever `metric` returns, with the members first.

    Args:
        metric: `(params, *data)`, or `(params, buffers, *data)` where the population has
            buffers, of one member; returns a tree of tensors.
        members: The population.
        *data: What all members see, or what each has of its own.
        in_axes: As in `loss_and_grad`.
        randomness: As in torch.vmap.

    Raises:
        ValueError: Data of another number of members.
        RuntimeError: The metric writes to a tensor that all members share.

    >>> from optimi_func import sgd
    >>> members = init(sgd, stack([torch.ones(3), torch.zeros(3)]), {"lr": 0.1})
    >>> evaluate(lambda p: p.sum(), members)
    tensor([3., 0.])
    """
    with torch.no_grad():
        return _over_members(metric, members, data, in_axes, randomness)


def _over_members(
    fn: Callable[..., Any],
    members: Population,
    data: tuple[PyTree, ...],
    in_axes: Any,
    randomness: Randomness,
) -> Any:
    _check_members(members)
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
    axes = (*(0 for _ in args), *in_axes)
    args |= {f"data[{i}]": x for i, x in enumerate(data)}
    placed = _place(args, axes)
    if torch.compiler.is_compiling():
        return placed.run(fn, randomness)
    try:
        return placed.run(fn, randomness)
    except RuntimeError as error:
        if not any(text in str(error) for text in _SHARED_WRITES):
            raise
        raise RuntimeError(
            f"{_module_in(error)} writes to a tensor that all members share, where each "
            "needs its own: make the population of the module, and run that with "
            "call_module(module, params, buffers, ...), which gives new buffers back"
        ) from error


# How torch says it.
_SHARED_WRITES = (
    "Batch norm got a batched tensor",
    "vmap: inplace arithmetic",
    "would mutate a captured Tensor",
)


def _module_in(error: BaseException) -> str:
    """The innermost module that was running, and its buffers."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            names = ", ".join(name for name, _ in module.named_buffers()) or "none"
            return f"{module} (buffers: {names})"
    return "the function"


def call_module(
    module: nn.Module, params: PyTree, buffers: Mapping[str, Tensor], *args: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Run a module as a function of its parameters and buffers, and return new buffers.

    For losses of modules whose buffers change, such as BatchNorm in training mode; as aux,
    the buffers of all members come back. Nothing passed in is written, nor the module.

    Args:
        module: Gives the code; its own parameters and buffers are not used.
        params: By name, of one member.
        buffers: By name, all that the module has.
        *args: The module's inputs.

    Returns:
        Its output, and the buffers after it.

    Raises:
        ValueError: A buffer of the module that is not given, or one that it has not.

    >>> norm = nn.BatchNorm1d(2)
    >>> _, after = call_module(norm, {}, dict(norm.named_buffers()), torch.ones(4, 2))
    >>> after["num_batches_tracked"], norm.num_batches_tracked
    (tensor(1), tensor(0))
    """
    names = [name for name, _ in module.named_buffers()]
    for name in names:
        if name not in buffers:
            raise ValueError(
                f"buffers lack {name!r} of {type(module).__name__}: a population made of "
                "the module has them, and its losses take (params, buffers, *data)"
            )
    for name in buffers:
        if name not in names:
            raise ValueError(f"{type(module).__name__} has no buffer {name!r}")
    own = {name: x.clone() for name, x in buffers.items()}
    return functional_call(module, (params, own), args), own


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
                    f"{_path(f'trees[{i}]', tree, j)} has shape {tuple(x.shape)}, that of "
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
    n = _place({"tree": tree}, (0,)).n
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
    _check_members(members)
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


def select(tree: T, index: Sequence[int] | Tensor) -> T:
    """The members at `index`, in its order; one that stands there twice comes twice.

    What population-based training is made of: parameters, optimizer state and
    hyperparameters go along together.

    Args:
        tree: A Population or any tree with the members along every first axis.
        index: Numbers of members from 0, or a bool for each member.

    Raises:
        IndexError: A number that no member has, or bools of another number than members.

    >>> select({"w": torch.tensor([1.0, 2.0, 3.0])}, [2, 0, 0])["w"]
    tensor([3., 1., 1.])
    """
    n = _place({"tree": tree}, (0,)).n
    device = pytree.tree_leaves(tree)[0].device
    at = _index("index", index, n, device)
    return pytree.tree_map(lambda x: x[at.to(x.device)], tree)


def clone(tree: T, source: Sequence[int] | Tensor, into: Sequence[int] | Tensor) -> T:
    """The population with copies of the members `source` in the places `into`.

    Exploitation, in the words of population-based training (Jaderberg et al., "Population
    Based Training of Neural Networks", arXiv:1711.09846).

    Args:
        tree: A Population or any tree with the members along every first axis.
        source: Numbers of the members to copy.
        into: As many places; what stood there is gone.

    Raises:
        IndexError: A number that no member has.
        ValueError: Lists of different lengths, or a place that is named twice.

    >>> clone({"w": torch.tensor([1.0, 2.0, 3.0])}, [2], [0])["w"]
    tensor([3., 2., 3.])
    """
    n = _place({"tree": tree}, (0,)).n
    device = pytree.tree_leaves(tree)[0].device
    origin, place = _index("source", source, n, device), _index("into", into, n, device)
    if len(origin) != len(place):
        raise ValueError(f"source has {len(origin)} members, into {len(place)}")
    if len(place.unique()) != len(place):
        raise ValueError(f"into={place.tolist()} names a place twice")
    return select(tree, torch.arange(n, device=device).index_copy(0, place, origin))


def perturb(
    members: Population,
    *,
    factors: Mapping[str, Sequence[float]] = MappingProxyType({}),
    noise: float = 0.0,
    at: Sequence[int] | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Population:
    """Move hyperparameters by random factors, and parameters by Gaussian noise.

    Exploration, in the words of population-based training (arXiv:1711.09846):

        h <- h * f,  f drawn from `factors`        p <- p + noise * N(0, 1)

    betas and momentum stay below 1: a factor multiplies their distance from 1, and 1 / f
    thus the number of steps over which they average.

    Args:
        members: The population.
        factors: By hyperparameter, the factors to draw from, with equal chances.
        noise: Standard deviation, in the units of the parameters.
        at: Numbers of the members to move; None moves all.
        generator: Where randomness comes from, on the population's device.

    Raises:
        ValueError: A hyperparameter that the population has not, no factors for one, a
            factor that is not positive and finite, or noise that is not from 0.
        IndexError: A number that no member has.

    >>> from optimi_func import sgd
    >>> members = init(sgd, torch.zeros(3), {"lr": 0.1}, n=2)
    >>> perturb(members, factors={"lr": [2.0]}, at=[1]).hyper["lr"]
    tensor([0.1000, 0.2000], dtype=torch.float64)
    """
    _check_members(members)
    if isinstance(noise, bool) or not isinstance(noise, numbers.Real):
        raise TypeError(f"Invalid noise: noise={noise!r}: allowed are numbers from 0")
    if not 0.0 <= noise < math.inf:
        raise ValueError(f"Invalid noise: noise={noise}: allowed are numbers from 0")
    n = len(members)
    device = pytree.tree_leaves(members)[0].device
    at = _index("at", range(n) if at is None else at, n, device)
    for name, some in factors.items():
        if name not in members.hyper:
            raise ValueError(
                f"the population has no hyperparameter {name!r}: it has "
                f"{list(members.hyper)}"
            )
        listed = isinstance(some, Sequence) and bool(some)
        if not listed or not all(_is_factor(f) for f in some):
            raise ValueError(
                f"Invalid factors: factors[{name!r}]={some!r}: allowed are lists of "
                "positive numbers, at least one"
            )

    def scale(x: Tensor, some: Sequence[float], below_one: bool) -> Tensor:
        drawn = torch.randint(len(some), (len(at),), generator=generator, device=device)
        f = torch.tensor(some, dtype=x.dtype, device=device)[drawn]
        old = x[at]
        new = (1.0 - (1.0 - old) * f).clamp_min(0.0) if below_one else old * f
        return x.index_copy(0, at, new)

    def shake(p: Tensor) -> Tensor:
        old = p[at]
        drawn = torch.randn(old.shape, generator=generator, device=device, dtype=old.dtype)
        return p.index_copy(0, at, old + noise * drawn)

    hyper = dict(members.hyper)
    for name, some in factors.items():
        below = name in _BELOW_ONE
        hyper[name] = pytree.tree_map(
            lambda x, some=some, below=below: scale(x, some, below), hyper[name]
        )
    params = pytree.tree_map(shake, members.params) if noise else members.params
    return replace(members, params=params, hyper=hyper)


def _is_factor(f: object) -> bool:
    return isinstance(f, numbers.Real) and 0.0 < float(f) < math.inf


def _check_members(members: Any) -> None:
    if not isinstance(members, Population):
        raise TypeError(f"members={members!r}: allowed is a Population, which init makes")


def _index(
    name: str, index: Sequence[int] | Tensor, n: int, device: torch.device
) -> Tensor:
    """Numbers of members as a checked 1-D tensor."""
    if isinstance(index, str) or not isinstance(index, Iterable):
        raise TypeError(f"{name}={index!r}: allowed are lists of numbers of members")
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
        raise IndexError(f"{name}={index!r}: allowed are a list of numbers of members")
    if torch.compiler.is_compiling():
        return at  # the host does not know its values
    wrong = [i for i in at.tolist() if not 0 <= i < n]
    if wrong:
        raise IndexError(f"{name} has {wrong[0]}: allowed are members 0 to {n - 1}")
    return at.long()


class _Placed(NamedTuple):
    """Arguments of a vmapped function, flat, and where each leaf has the members."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    axes: list[int | None]
    n: int

    def run(self, fn: Callable[..., Any], randomness: Randomness) -> Any:
        """Call fn with each member's arguments; its results have the members first."""
        moving = [i for i, axis in enumerate(self.axes) if axis is not None]

        # What has no members may be a number, None or a schedule, which vmap refuses.
        def member(*tensors: Tensor) -> Any:
            leaves = list(self.leaves)
            for i, x in zip(moving, tensors):
                leaves[i] = x
            return fn(*pytree.tree_unflatten(leaves, self.spec))

        in_dims = tuple(self.axes[i] for i in moving)
        tensors = [self.leaves[i] for i in moving]
        return vmap(member, in_dims=in_dims, randomness=randomness)(*tensors)


def _place(args: Mapping[str, PyTree], in_axes: Sequence[Any]) -> _Placed:
    """Find the members of every leaf, refusing arguments with different numbers of them."""
    places: list[int | None] = []
    n, first = 0, ""
    for (name, tree), prefix in zip(args.items(), in_axes):
        for i, (x, axis) in enumerate(zip(*_with_axes(name, tree, prefix))):
            # One number is one for all.
            shared = name == "hyper" and isinstance(x, Tensor) and x.dim() == 0
            if axis is None or shared or not isinstance(x, Tensor):
                places.append(None)
                continue
            if not -x.dim() <= axis < x.dim():
                raise ValueError(
                    f"{_path(name, tree, i)} has shape {tuple(x.shape)}: no axis {axis} "
                    "for its members"
                )
            if not first:
                n, first = x.shape[axis], _path(name, tree, i)
            if x.shape[axis] != n or n == 0:
                raise ValueError(
                    f"{_path(name, tree, i)} has {x.shape[axis]} members along axis {axis} "
                    f"of {tuple(x.shape)}, {first} has {n}"
                )
            places.append(axis)
    if not first:
        raise ValueError(f"no leaf of {', '.join(args)} has members: in_axes={in_axes!r}")
    return _Placed(*pytree.tree_flatten(tuple(args.values())), places, n)


def _with_axes(name: str, tree: PyTree, prefix: Any) -> tuple[list[Any], list[Any]]:
    """The leaves of a tree and the axis that a prefix of it has for each."""
    axes, spec = pytree.tree_flatten(prefix)
    try:
        subtrees = spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"in_axes: {prefix!r} is no prefix of {name}: {error}") from error
    for axis in axes:
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise TypeError(f"in_axes has {axis!r} for {name}: allowed are axes and None")
    counts = [len(pytree.tree_leaves(subtree)) for subtree in subtrees]
    return pytree.tree_leaves(tree), [a for a, k in zip(axes, counts) for _ in range(k)]


def _path(name: str, tree: PyTree, i: int) -> str:
    """What leaf i of a tree is called."""
    if not torch.compiler.is_compiling():
        try:
            keyed, _ = pytree.tree_flatten_with_path(tree)
            return name + pytree.keystr(keyed[i][0])
        except ValueError:
            pass  # a node registered without names for its children
    return f"{name}<leaf {i}>"
