"""The promise of a step in several processes: it is the step of one process.

`as_one_process` takes the same steps once in this process alone and once as `place` divides
or copies tensors among the processes, and compares what `look` returns of the two ends.
Every process compares its own shards, so that a comparison sends no messages.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from shards import placed
from stored import meant, same_bits
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from training import step_with

Tensors = Mapping[str, Any]
Place = Callable[[Tensor], Any]


def part_of(whole: Tensor, like: Any) -> Tensor:
    """Return the shard of a whole tensor that this process has if `like` is divided."""
    if not isinstance(like, DTensor):
        return whole
    places = like.device_mesh, like.placements
    return distribute_tensor(whole, *places, src_data_rank=None).to_local()


def assert_alike(
    ours: Tensors,
    theirs: Tensors,
    starts: Tensors | None = None,
    tolerance: float = 0.0,
    about: Any = "",
) -> None:
    """Raise, and name the tensor, unless each of ours is this process's part of theirs.

    Args:
        ours: Shards, copies or plain tensors, by name.
        theirs: What one process has, by the same names.
        starts: What they were before training; 0 for names that are missing.
        tolerance: 0 compares bit for bit. Else movements may differ by this part of the
            largest movement of all.
        about: Is added to the message.
    """
    assert list(ours) == list(theirs), (about, list(ours), list(theirs))
    whole = {name: x.detach() for name, x in theirs.items()}
    begun = starts or {}
    moves = [
        (x - begun.get(k, 0)).abs().max().item() for k, x in whole.items() if x.numel()
    ]
    largest = max(moves, default=0.0) if tolerance else 0.0
    assert largest > 0 or not tolerance, f"{about}: nothing moved"
    for name, x in ours.items():
        want, got = whole[name], x.detach()
        assert (x.dtype, x.shape) == (want.dtype, want.shape), (about, name)
        want = part_of(want, got)
        got = got.to_local() if isinstance(got, DTensor) else got
        if not tolerance:
            assert same_bits(got, want), f"{about}: {name} differs"
        elif got.numel():
            error = (got - want).abs().max().item() / largest
            assert error <= tolerance, f"{about}: {name} differs by {error:.3g}"


class End(NamedTuple):
    """Parameters, their optimizer, and a tree that was stepped beside them by a value."""

    params: list[Any]
    optimizer: Any
    tree: list[Any]
    state: Any


Look = Callable[[End], Tensors]


def kept(params: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return the state by name, and check that it is divided as its parameters are."""
    names, found = {p: name for name, p in params.items()}, dict[str, Any]()
    for group in optimizer.param_groups:
        rule = optimizer.rule_of(group)
        numbers = {"step", *rule.running._fields}
        for p in group["params"]:
            for key, x in optimizer.state.get(p, {}).items():
                if isinstance(p, DTensor) and key not in {*numbers, *rule.whole_fields}:
                    assert isinstance(x, DTensor) and x.placements == p.placements, key
                assert key not in numbers or type(x) is Tensor, key
                found[f"{names[p]} {key}"] = x
    return found


def weights(end: End) -> Tensors:
    return dict(zip(map(str, range(len(end.params))), end.params))


def states(end: End) -> Tensors:
    return kept(weights(end), end.optimizer)


def trees(end: End) -> Tensors:
    return {f"tree {i}": x for i, x in enumerate(end.tree)}


def both(end: End) -> Tensors:
    """Return the parameters of the class, and of the tree beside it."""
    return {**weights(end), **trees(end)}


def everything(end: End) -> Tensors:
    found = [x for x in pytree.tree_leaves(end.state) if isinstance(x, Tensor)]
    of_tree = {f"tree state {i}": x for i, x in enumerate(found)}
    return {**both(end), **states(end), **of_tree}


def masters(end: End) -> Tensors:
    """Return parameters with what is stored beside them, as this process has it."""

    def local(x: Any) -> Tensor:
        return x.detach().to_local() if isinstance(x, DTensor) else x

    found: dict[str, Any] = {}
    for name, p in weights(end).items():
        state = {k: local(x) for k, x in end.optimizer.state[p].items()}
        x = meant(local(p), state)
        if isinstance(p, DTensor):
            where = p.device_mesh, p.placements
            x = DTensor.from_local(x, *where, shape=p.shape, stride=p.stride())
        found[name] = x
    return found


@dataclass(frozen=True)
class Steps:
    """Steps of some parameters with random gradients that are the same in all processes.

    Args:
        make: Makes an optimizer of a list of parameters and further options.
        shapes: The shapes of the parameters.
        dtype: Their dtype.
        count: How many steps there are.
        growth: The factor between the sizes of two steps' gradients.
        value: A functional optimizer, which steps a tree beside the class.
        reloads: Whether a new optimizer continues from the first one's state dict after two
            steps.
    """

    make: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype = torch.float32
    count: int = 3
    growth: float = 1.0
    value: Any = None
    reloads: bool = False

    @cached_property
    def given(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The parameters and each step's gradients."""
        torch.manual_seed(3)

        def draw(scale: float) -> list[Tensor]:
            return [torch.randn(s).to(self.dtype) * scale for s in self.shapes]

        return draw(1.0), [draw(self.growth**i) for i in range(self.count)]

    @cached_property
    def starts(self) -> Tensors:
        pairs = list(enumerate(self.given[0]))
        return {f"{tree}{i}": x for tree in ("", "tree ") for i, x in pairs}

    @cached_property
    def alone(self) -> End:
        """What one process ends with."""
        return self.run(lambda x: x)

    def run(
        self,
        place: Place,
        around: Callable[[], Any] = contextlib.nullcontext,
        **options: Any,
    ) -> End:
        """Take the steps; each call of step() is in a context that `around` returns."""
        starts, grads = self.given
        params: list[Any] = [nn.Parameter(place(x.clone())) for x in starts]
        optimizer, tree, state = self.make(params, **options), list[Any](), None
        if self.value is not None:
            tree = [p.detach().clone() for p in params]
            state = self.value.init(tree)
        for i, some in enumerate(grads):
            if self.reloads and i == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = self.make(params, **options)
                optimizer.load_state_dict(saved)
            parts = [place(g.clone()) for g in some]
            with around():
                step_with(optimizer, params, parts)
            if self.value is not None:
                tree, state = self.value.step(tree, parts, state)
        return End(params, optimizer, tree, state)


def as_one_process(
    make: Steps,
    place: Place,
    look: Look = everything,
    tolerance: float = 0.0,
    about: Any = "",
    **options: Any,
) -> End:
    """Raise unless the processes together end as one process does; return their end."""
    ours = make.run(place, **options)
    assert_alike(look(ours), look(make.alone), make.starts, tolerance, about)
    return ours


@dataclass(frozen=True)
class Way:
    """How tensors are divided among the processes."""

    name: str
    place: Place
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer


@cache
def plane() -> Any:
    """Return one mesh, because DTensor's caches mix up equal ones and their groups."""
    return init_device_mesh("cpu", (2, 2))


def ways(*names: str) -> list[Way]:
    """Return the ways of these names, or all; four processes have further ones."""
    flat, row = init_device_mesh("cpu", (dist.get_world_size(),)), Shard(0)
    found = [
        Way("rows", placed(flat, row)),
        Way("columns", placed(flat, Shard(1))),
        Way("copies", placed(flat, Replicate())),
        Way("plain copies", lambda x: x, {"process_group": dist.group.WORLD}),
    ]
    if dist.get_world_size() == 4:
        mesh = plane()
        found += [
            Way("copies of rows", placed(mesh, Replicate(), row)),
            Way("rows and columns", placed(mesh, row, Shard(1))),
            Way("rows of rows", placed(mesh, row, row)),
        ]
    return [way for way in found if way.name in names or not names]
