"""The promise of a step in several processes: it is the step of one process.

`as_one_process` takes the same steps once in this process alone and once as `place` divides
or copies tensors among the processes, and compares what `look` returns of the two ends.
Every process compares its own shards, so that a comparison sends no messages.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import taken
from shards import EAGER, batch, flat_mesh, load, loss_of, placed
from stored import meant, same_bits
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from training import step_with

from optimi_func import clip_grad_norm_, prepare_for_gradient_release

Tensors = Mapping[str, Any]
Place = Callable[[Tensor], Any]


def local_of(x: Any) -> Tensor:
    return x.detach().to_local() if isinstance(x, DTensor) else x.detach()


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
        starts: What parameters were before training, by the same names. If they are given,
            one of them has to have moved. Without them, movements are from 0.
        tolerance: 0 compares bit for bit. Else tensors may differ by this part of the
            largest movement.
        about: Is added to the message.
    """
    assert list(ours) == list(theirs), (about, list(ours), list(theirs))
    whole = {name: x.detach() for name, x in theirs.items()}
    begun = starts or {}
    known = [k for k in whole if k in begun] or whole
    moves = [(whole[k] - begun.get(k, 0)).flatten() for k in known]
    largest = max([x.abs().max().item() for x in moves if x.numel()], default=0.0)
    assert largest > 0 or not begun, f"{about}: nothing moved"
    for name, x in ours.items():
        want, got = whole[name], x.detach()
        assert (x.dtype, x.shape) == (want.dtype, want.shape), (about, name)
        want, got = part_of(want, got), local_of(got)
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

    found: dict[str, Any] = {}
    for name, p in weights(end).items():
        state = {k: local_of(x) for k, x in end.optimizer.state[p].items()}
        x = meant(local_of(p), state)
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
    look = staticmethod(everything)

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
    make: "Steps | Training",
    place: Any,
    look: Callable[[Any], Tensors] | None = None,
    tolerance: float = 0.0,
    about: Any = "",
    than: Any = None,
    **options: Any,
) -> Any:
    """Raise unless the processes together end as one process does; return their end.

    Args:
        make: What is trained.
        place: How it is divided among the processes.
        look: Returns what is compared of an end, by default all of it.
        tolerance: How far movements may differ, as in `assert_alike`.
        about: Is added to the message.
        than: The end to compare with, by default that of one process.
        options: Are passed to `make.run`.
    """
    ours, theirs = make.run(place, **options), make.alone if than is None else than
    look = look or make.look
    assert_alike(look(ours), look(theirs), make.starts, tolerance, about)
    found, wanted = (list(map(float, getattr(end, "norms", []))) for end in (ours, theirs))
    near: dict[str, Any] = {"rtol": max(tolerance, 1e-9), "atol": 0.0, "equal_nan": True}
    if than is None or (found and wanted):
        torch.testing.assert_close(found, wanted, **near)
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


@dataclass(frozen=True)
class Among:
    """How a model and its data are divided among processes; by default not at all.

    Args:
        divide: Divides a model, and returns what is called in its place.
        share: Returns this process's share of a batch.
        release: Options that gradient release has only among processes.
    """

    divide: Callable[[Any], Any] = lambda model: model
    share: Callable[[Tensor], Tensor] = lambda x: x
    release: dict[str, Any] = field(default_factory=dict)


ALONE = Among()


def nth(rank: int, size: int) -> Callable[[Tensor], Tensor]:
    """Return a function that returns one of `size` shares of a batch."""
    return lambda x: x.chunk(size)[rank]


def by_rank() -> Callable[[Tensor], Tensor]:
    return nth(dist.get_rank(), dist.get_world_size())


def fully_sharded(mesh: Any = None, root: bool = True) -> Among:
    """Divide each child of a model and, if `root`, the rest of it by `fully_shard`."""
    mesh = flat_mesh() if mesh is None else mesh

    def divide(model: nn.Module) -> nn.Module:
        for part in (*model.children(), *[model] * root):
            fully_shard(part, mesh=mesh)
        return model

    return Among(divide, by_rank())


def replicated(group: Any = None, **release: Any) -> Among:
    """Copy the model to all processes of a group, whose gradients release averages."""
    group = dist.group.WORLD if group is None else group
    share = nth(group.rank(), group.size())
    return Among(share=share, release={"process_group": group, **release})


def by_ddp(**options: Any) -> Among:
    return Among(partial(DistributedDataParallel, **options), by_rank())


class Poison:
    """A NaN that only one process has, in its shard of one gradient at one step.

    One process leaves out the whole step or, if `alone`, only that parameter's update.
    """

    def __init__(self, name: str, rank: int, at: int = 1, alone: bool = False) -> None:
        self.name, self.rank, self.at, self.alone, self.now = name, rank, at, alone, -1

    def begin(self, model: nn.Module) -> None:
        model.get_parameter(self.name).register_post_accumulate_grad_hook(self)

    def __call__(self, p: Any) -> None:
        if self.now == self.at and dist.get_rank() == self.rank:
            local_of(p.grad).view(-1)[:1] = torch.nan


@dataclass
class Trained:
    """A model, its optimizer, its handle, and the norms of gradients so far.

    `net` is called for the loss, and `among` says how both are divided.
    """

    model: Any
    optimizer: Any
    handle: Any = None
    norms: list[Any] = field(default_factory=list)
    net: Any = None
    among: Among = ALONE


def of(cls: Any, **options: Any) -> Callable[..., Any]:
    """Return a function that makes an optimizer of what a class accepts of a model."""
    options = {"lr": 1e-2, **EAGER, **options}
    return lambda model, **more: cls(taken(cls, model), **options, **more)


def parameters(end: Trained) -> Tensors:
    return dict(end.model.named_parameters())


def parameters_and_state(end: Trained) -> Tensors:
    return {**parameters(end), **kept(parameters(end), end.optimizer)}


@dataclass(frozen=True)
class Training:
    """A model that is trained on batches.

    Args:
        model: Makes the model, the same in all processes.
        optimizer: Makes an optimizer of a model and further options.
        batch: Returns the batch that all processes share, by its number.
        loss: The loss of a model and a batch.
        steps: How many steps there are.
        micro: How many batches each step has.
        clip: The norm to which gradients are clipped before step().
        release: Options of gradient release, or None for ordinary steps.
        sync: Whether replicas average the gradients of all batches of a step, or only
            their sums, at the last one.
        before: Is called before each batch with the model and the batch's number.
        poison: Puts a NaN into one process's gradient, if there are several.
    """

    model: Callable[[], Any]
    optimizer: Callable[..., Any]
    batch: Callable[[int], Tensor] = batch
    loss: Callable[[Any, Any], Tensor] = loss_of
    steps: int = 4
    micro: int = 1
    clip: float | None = None
    release: dict[str, Any] | None = None
    sync: bool = True
    before: Callable[[Any, int], None] = lambda model, i: None
    poison: Poison | None = None
    look = staticmethod(parameters)

    @cached_property
    def starts(self) -> Tensors:
        return {k: p.detach() for k, p in self.model().named_parameters()}

    @cached_property
    def alone(self) -> Trained:
        """What one process ends with."""
        return self.run(ALONE)

    def begun(self, among: Among = ALONE) -> Trained:
        """Return what is to be trained."""
        model = self.model()
        net = among.divide(model)
        if self.poison is not None and among is not ALONE:
            self.poison.begin(model)
        if self.release is None:
            return Trained(model, self.optimizer(model), net=net, among=among)
        optimizer = self.optimizer(model, gradient_release=True)
        how = {"ignore_existing_hooks": self.poison is not None, **self.release}
        how |= among.release
        handle = prepare_for_gradient_release(model, optimizer, **how)
        return Trained(model, optimizer, handle, net=net, among=among)

    def run(
        self, among: Among = ALONE, steps: range | None = None, path: Path | None = None
    ) -> Trained:
        """Train, from a checkpoint if there is a path."""
        end = self.begun(among)
        if path is not None:
            load(end.model, end.optimizer, path)
        self.train(end, range(self.steps) if steps is None else steps)
        if end.handle is not None:
            end.handle.remove()
        return end

    def train(self, end: Trained, steps: range) -> None:
        """Take steps."""
        for i in steps:
            for j in range(self.micro * i, self.micro * (i + 1)):
                self._backward(end, j)
            if self.clip is not None:
                params = list(end.model.parameters())
                # torch's does not know tensors of several meshes.
                is_plain = not any(isinstance(p, DTensor) for p in params)
                clip = nn.utils.clip_grad_norm_ if is_plain else clip_grad_norm_
                end.norms.append(clip(params, self.clip))
            bad = self.poison
            is_bad = bad is not None and end.among is ALONE and i == bad.at
            if is_bad and bad.alone:
                end.model.get_parameter(bad.name).grad = None
            elif is_bad:
                end.norms[-1:] = [torch.nan] * len(end.norms[-1:])
            if not is_bad or bad.alone:
                # A functional optimizer has no step() without arguments.
                is_class = hasattr(end.optimizer, "param_groups")
                (end.optimizer if is_class else end.handle).step()
            # Sums that step() ends are averaged, and so measured, there.
            if end.handle is not None and end.handle.grad_norm is not None:
                end.norms.append(end.handle.grad_norm.clone())
            end.model.zero_grad()

    def _backward(self, end: Trained, j: int) -> None:
        self.before(end.model, j)
        if self.poison is not None:
            self.poison.now = j // self.micro
        x, last, net = end.among.share(self.batch(j)), (j + 1) % self.micro == 0, end.net
        other = net if isinstance(net, DistributedDataParallel) else end.handle
        quiet = not last and other is not None and (other is net or not self.sync)
        with other.no_sync() if quiet else contextlib.nullcontext():
            if end.handle is None:
                (self.loss(net, x) / self.micro).backward()
            else:
                end.handle.backward(lambda: self.loss(net, x) / self.micro)
