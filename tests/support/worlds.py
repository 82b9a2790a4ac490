"""Worlds of processes for test_distributed.py, and what is checked inside them.

A world is started once and runs its checks in order; each process writes down how each
ended. What fails in one process ends it, and with it its world.
"""

import copy
import functools
import gc
import itertools
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import CLASSES, ELEMENTWISE, MATRICES, MEASURED, taken
from measured import peak_bytes
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import optimi_func
from optimi_func import (
    ASGD,
    AdamW,
    NAdam,
    Rprop,
    ScheduleFreeAdamW,
    StableAdamW,
    compiled,
    prepare_for_gradient_release,
)
from optimi_func.core import math
from optimi_func.execution import inductor

EAGER = {"compile": False}
# Beside the names of rules: AdamW with a mask, whose share is of the whole tensor.
CAUTIOUS = "cautious"
# Seconds after which a world is given up.
PATIENCE = 600.0


# Starting worlds


def start(checks: list[Callable[[Path], None]], size: int, folder: Path) -> dict[str, str]:
    """Run checks in `size` processes; how each ended: "" or what was raised.

    Args:
        checks: Module functions, run one after the other in all processes.
        size: How many processes.
        folder: Shared by all, also for what the checks keep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [forked.start(_run, checks, rank, size, folder) for rank in range(size)]
    end = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return {check.__name__: _ending(check.__name__, size, folder) for check in checks}


def _ending(name: str, size: int, folder: Path) -> str:
    found: list[str] = []
    for rank in range(size):
        path = folder / f"{name}.{rank}.txt"
        text = path.read_text() if path.exists() else "did not finish\n"
        found += [f"process {rank} of {size}: {text}"] if text else []
    return "\n".join(found)


def _run(checks: list[Callable[[Path], None]], rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    math.multiplies_bfloat16 = lambda: False  # as in conftest.py
    store = f"file://{folder}/store"
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=limit
    )
    for check in checks:
        path = folder / f"{check.__name__}.{rank}.txt"
        try:
            torch.manual_seed(0)
            check(folder)
            dist.barrier()
        except BaseException:
            path.write_text(traceback.format_exc())
            os._exit(1)
        path.write_text("")
    dist.destroy_process_group()


# What they work on


class Net(nn.Module):
    """Sizes that 2 and 4 processes divide (8), divide unevenly (7), or not at all (1)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 7)
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(nn.functional.gelu(self.first(x)))
        return self.last(nn.functional.gelu(x))


def plain() -> Net:
    torch.manual_seed(1)
    return Net().double()


def sharded(mesh: Any) -> Net:
    model = plain()
    for part in (model.first, model.second, model.last, model):
        fully_shard(part, mesh=mesh)
    return model


def flat_mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))


def batch(i: int) -> Tensor:
    """What all processes together learn from at a step."""
    source = torch.Generator().manual_seed(100 + i)
    return 3 * torch.randn(8, 5, dtype=torch.float64, generator=source)


def share(i: int, rank: int, size: int) -> Tensor:
    return batch(i).chunk(size)[rank]


def mine(i: int) -> Tensor:
    return share(i, dist.get_rank(), dist.get_world_size())


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(
    model: nn.Module, optimizer: Any, steps: range, data: Callable[[int], Tensor]
) -> None:
    for i in steps:
        loss_of(model, data(i)).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(x: Tensor) -> Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [full(p) for p in model.parameters()]


def assert_close(
    ours: list[Tensor], theirs: list[Tensor], start: list[Tensor], tolerance: float
) -> None:
    """Compare movements: of all parameters together, against the largest."""
    largest = max((b - s).abs().max().item() for b, s in zip(theirs, start))
    assert largest > 0
    for a, b in zip(ours, theirs):
        error = (a - b).abs().max().item() / largest
        assert error <= tolerance, error


@contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


@contextmanager
def in_turn() -> Iterator[None]:
    """Process 0 first: what it compiles, the others find in the cache."""
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


# The step, on tensors alone


def shapes() -> list[tuple[int, ...]]:
    """Even, uneven, with empty shards, and as large as a kernel wants them."""
    return [(8, 3), (5, 4), (1, 6), (3,), (3, 5000), (2, 1)]


def problem(dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(2)
    starts = [torch.randn(shape).to(dtype) for shape in shapes()]
    grads = [[torch.randn(shape).to(dtype) * 10**i for shape in shapes()] for i in range(4)]
    return starts, grads


def moved(optimizer_of: Callable[[list[Any]], Any], dtype: torch.dtype, place: Any) -> Any:
    """Parameters and optimizer after some given gradients, placed by `place`."""
    starts, grads = problem(dtype)
    params = [nn.Parameter(place(x.clone())) for x in starts]
    optimizer = optimizer_of(params)
    for step in grads:
        for p, g in zip(params, step):
            p.grad = place(g.clone())
        optimizer.step()
    return params, optimizer


def rule(name: str, foreach: bool) -> Callable[[list[Any]], Any]:
    """An optimizer that steps eagerly or by foreach."""
    way = {"foreach": True} if foreach else EAGER
    more: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    if name == CAUTIOUS:
        name, more = "adamw", {"cautious": True}
    if name == "soap":  # a basis of 5000 x 5000 takes minutes
        more = {"max_precond_dim": 1000}
    return lambda ps: CLASSES[name](ps, lr=1e-2, weight_decay=0.1, **more, **way)


def fitted(name: str, x: Tensor) -> Tensor:
    return x if name not in MATRICES or x.dim() > 1 else x[None]


@functools.cache
def moved_whole(name: str, dtype: torch.dtype, foreach: bool) -> Any:
    return moved(rule(name, foreach), dtype, lambda x: fitted(name, x))


def compare_rules(
    mesh: Any,
    placements: list[Any],
    ways: list[bool],
    names: Iterable[str] = (*CLASSES, CAUTIOUS),
) -> None:
    def place(x: Tensor) -> Tensor:
        fitting = [
            s if s.is_replicate() or s.dim < x.dim() else Replicate() for s in placements
        ]
        return distribute_tensor(x, mesh, fitting, src_data_rank=None)

    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            for foreach in ways:
                theirs, other = moved_whole(name, dtype, foreach)
                fit = functools.partial(fitted, name)
                ours, optimizer = moved(
                    rule(name, foreach), dtype, lambda x, fit=fit: place(fit(x))
                )
                for p, q in zip(ours, theirs):
                    # Each process looks at what it has.
                    compare_leaf(name, p.to_local(), place(q.detach()).to_local())
                    state, known = optimizer.state[p], other.state[q]
                    assert list(state) == list(known)
                    assert type(state["step"]) is Tensor and state["step"] == 4
                    its = other.rule_of(other.param_groups[0])
                    numbers = its.running._fields
                    near = functools.partial(torch.allclose, rtol=1e-5)
                    alike = near if name == "prodigy" else torch.equal
                    assert all([alike(state[k], known[k]) for k in numbers])
                    for field in set(state) - {"step", *numbers}:
                        x = state[field]
                        assert isinstance(x, DTensor)
                        if field in its.whole_fields:  # cut on its own
                            assert torch.equal(full(x), known[field]), field
                            continue
                        assert x.placements == p.placements, field
                        assert x.dtype == known[field].dtype
                        part, other_part = x.to_local(), place(known[field]).to_local()
                        exact = name not in (*MEASURED, CAUTIOUS) or field != "kahan_comp"
                        exact = exact and (name != "prodigy" or field == "p0")
                        assert not exact or torch.equal(part, other_part), field


def compare_leaf(name: str, ours: Tensor, theirs: Tensor) -> None:
    if name in (*MEASURED, CAUTIOUS):
        tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-2
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(ours, theirs), name


def rules(folder: Path) -> None:
    """Every rule, eagerly and by foreach, bit for bit as on whole tensors."""
    # Four processes step by foreach in `planes`.
    ways = [False, True] if dist.get_world_size() == 2 else [False]
    compare_rules(flat_mesh(), [Shard(0)], ways)


def some_rules(folder: Path) -> None:
    """Three rules: elementwise, with means over shards, and of whole matrices."""
    compare_rules(flat_mesh(), [Shard(0)], [False], ("adamw", "stableadamw", "muon"))


def planes(folder: Path) -> None:
    """Meshes of two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        compare_rules(mesh, placements, [True])


def kernels(folder: Path) -> None:
    """Compiled: a kernel takes this shard and a bucket that one, process by process."""
    mesh = flat_mesh()
    inductor.PRECOMPILE_HEADERS = True  # as for all tests

    def place(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    for cls in (AdamW, StableAdamW):

        def make(params: Any, cls: Any = cls) -> Any:
            return cls(params, lr=0.5, compile=True)

        starts, _ = problem(torch.float32)
        with in_turn():
            theirs, _ = moved(make, torch.float32, lambda x: x)
        ours, _ = moved(make, torch.float32, place)
        assert_close([full(p) for p in ours], [full(p) for p in theirs], starts, 1e-6)
    # The pure doors, compiled too.
    starts, grads = problem(torch.float32)
    tree = {str(i): place(x) for i, x in enumerate(starts)}
    for step in (
        compiled.stableadamw_step,
        optimi_func.stableadamw_step,
        compiled.stableadamw_step_,
    ):
        whole = {str(i): x.clone() for i, x in enumerate(starts)}
        params, state = copy.deepcopy(tree), optimi_func.stableadamw_init(tree)
        known = optimi_func.stableadamw_init(whole)
        with in_turn():  # compiles what the shards take, too
            first = {str(i): g for i, g in enumerate(grads[0])}
            step(copy.deepcopy(whole), first, copy.deepcopy(known), lr=0.5)
        for gs in grads:
            pieces = {str(i): place(g) for i, g in enumerate(gs)}
            params, state = step(params, pieces, state, lr=0.5)
            gs = {str(i): g for i, g in enumerate(gs)}
            whole, known = optimi_func.stableadamw_step(whole, gs, known, lr=0.5)
        ours = [full(p) for p in params.values()]
        assert_close(ours, list(whole.values()), starts, 1e-6)
        assert state.step == 4


def gradients(folder: Path) -> None:
    """Gradients that lie otherwise are brought to the parameter, or refused."""
    mesh, size = flat_mesh(), dist.get_world_size()
    start, g = torch.randn(5, 3), torch.randn(5, 3)
    whole = nn.Parameter(start.clone())
    whole.grad = g.clone()
    AdamW([whole], lr=0.1, **EAGER).step()
    addend = DTensor.from_local(g / size, mesh, [Partial()])
    for at in (Shard(0), Replicate()):
        for grad in (addend, distribute_tensor(g, mesh, [Replicate()])):
            p = nn.Parameter(distribute_tensor(start.clone(), mesh, [at]))
            p.grad = grad
            optimizer = AdamW([p], lr=0.1, **EAGER)
            optimizer.step()
            assert torch.allclose(p.full_tensor(), whole)
            assert p.grad is grad
            assert optimizer.state[p]["exp_avg"].placements == (at,)
    p = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    optimizer = AdamW([("w", p)], lr=0.1, **EAGER)
    optimizer.step()
    before = p.full_tensor()
    alone = nn.Parameter(start.clone())
    alone.grad = distribute_tensor(g, mesh, [Shard(0)])
    with raises(TypeError, "grads[0] is a DTensor, its parameter a Parameter"):
        AdamW([alone], lr=0.1, **EAGER).step()
    other = init_device_mesh("cpu", (1, size))
    p.grad = distribute_tensor(g, other, [Replicate(), Shard(0)])
    with raises(ValueError, "grads['w'] is on"):
        optimizer.step()
    assert torch.equal(before, p.full_tensor())
    part = nn.Parameter(DTensor.from_local(start, mesh, [Partial()]))
    part.grad = DTensor.from_local(g, mesh, [Partial()])
    with raises(ValueError, "allowed are Shard and Replicate"):
        AdamW([part], lr=0.1, **EAGER).step()
    # A state from before it was divided.
    p.grad = distribute_tensor(g, mesh, [Shard(0)])
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(5, 3)
    with raises(ValueError, "state['w']['exp_avg'] is not divided"):
        optimizer.step()
    # Autograd knows that the parameter was written.
    optimizer.state.clear()
    loss = (p * p).sum()
    optimizer.step()
    with raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()


def memory(folder: Path) -> None:
    """A shard that is put elsewhere between steps, as fully_shard may, is followed."""
    mesh = flat_mesh()
    for shape in ((5,), (5, 2)):
        ends = []
        for divided in (False, True):

            def place(x: Tensor, divided: bool = divided) -> Any:
                return distribute_tensor(x, mesh, [Shard(0)]) if divided else x

            params: list[Any] = [nn.Parameter(place(torch.ones(shape))) for _ in range(2)]
            optimizer = AdamW(params, lr=0.1, foreach=True)
            for i in range(4):
                if i == 3 and divided:
                    params[0]._local_tensor = 2 * params[0]._local_tensor
                elif i == 3:
                    params[0].data = 2 * params[0].data
                for p in params:
                    p.grad = place(torch.full(shape, i - 1.5))
                optimizer.step()
            ends.append([full(p) for p in params])
        assert all(torch.equal(a, b) for a, b in zip(*ends))


# Models


def models(folder: Path) -> None:
    """fully_shard equals one process, clip_grad_norm_ included."""
    compare_models(sharded(flat_mesh()), mine)


def compare_models(
    model: nn.Module, data: Callable[[int], Tensor], clipped: tuple[str, ...] = ("",)
) -> None:
    """As one process, with the gradients of some modules clipped together."""
    begin = copy.deepcopy(model.state_dict())
    ways: list[tuple[Any, dict[str, Any]]]
    ways = [(AdamW, EAGER), (StableAdamW, {"foreach": True}), (Rprop, EAGER)]
    ways += [(NAdam, EAGER), (ASGD, {"foreach": True, "t0": 1})]
    for cls, way in ways:
        model.load_state_dict(begin)
        single = plain()
        start = snapshot(single)
        found: list[list[Tensor]] = []
        for net, get in ((single, batch), (model, data)):
            optimizer = cls(net.parameters(), lr=1e-2, **way)
            found.append([])
            for i in range(4):
                loss_of(net, get(i)).backward()
                some = [p for n in clipped for p in net.get_submodule(n).parameters()]
                found[-1].append(full(nn.utils.clip_grad_norm_(some, 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        assert_close(found[1], found[0], [torch.zeros(())] * 4, 1e-9)
        assert_close(snapshot(model), snapshot(single), start, 1e-9)
    model.load_state_dict(begin)


RELEASES: list[dict[str, Any]] = [
    {},
    {"accumulation": "buffer", "accumulation_steps": 2},
    {"accumulation": "buffer", "grad_norm": True},
    {"accumulation": "states", "accumulation_steps": 2},
    {"clip_param_norm": 0.1, "grad_norm": True},
    {"clip_value": 0.01},
    {"clip_global_norm": 0.1},
    {"clip_global_norm": 0.1, "skip_nonfinite": True, "grad_norm": True},
    {
        "clip_global_norm": 0.1,
        "accumulation": "buffer",
        "accumulation_steps": 2,
        "skip_nonfinite": True,
    },
]


# With every kind of message.
FEW = RELEASES[-3:]


def releases(folder: Path) -> None:
    """Gradient release under fully_shard equals that of one process."""
    compare_releases(sharded(flat_mesh()), mine, RELEASES)


def compare_releases(
    model: nn.Module, data: Callable[[int], Tensor], ways: list[dict[str, Any]]
) -> None:
    begin = copy.deepcopy(model.state_dict())
    for i, options in enumerate(ways):
        # A rule that sends messages of its own in between, every second time.
        for cls in (AdamW, StableAdamW)[i % 2 :][:1]:
            model.load_state_dict(begin)
            single = plain()
            start = snapshot(single)
            expected = released(single, cls, options, batch)
            norms = released(model, cls, options, data)
            assert_close(snapshot(model), snapshot(single), start, 1e-9)
            for a, b in zip(norms, expected):
                assert (a is None) == (b is None)
                assert a is None or abs(a - b) <= 1e-9 * b, (options, norms, expected)
    model.load_state_dict(begin)


def released(
    model: nn.Module, cls: Any, options: dict[str, Any], data: Callable[[int], Tensor]
) -> list[float | None]:
    """The norms of some steps under release."""
    optimizer = cls(taken(cls, model), lr=1e-2, gradient_release=True, **EAGER)
    norms: list[float | None] = []
    with prepare_for_gradient_release(model, optimizer, **options) as handle:
        for i in range(4):

            def loss(i: int = i) -> Tensor:
                return loss_of(model, data(i))

            handle.backward(loss)
            assert all(p.grad is None for p in model.parameters())
            norms.append(None if handle.grad_norm is None else handle.grad_norm.item())
            if options.get("accumulation") is None or i % 2:
                optimizer.step()
                optimizer.zero_grad()
    return norms


def skips(folder: Path) -> None:
    """What is not finite in one process is skipped in all; a tree's optimizer too."""
    mesh, rank = flat_mesh(), dist.get_rank()
    bad: list[bool] = [False]

    def spoil(p: Any) -> None:
        part = p.grad.to_local()
        if bad[0] and rank == 0:
            part.view(-1)[:1] = float("nan")

    # With counts on the host, on the device, and a tree's.
    for kind in ("host", "device", "tree") if dist.get_world_size() == 2 else ("host",):
        functional = kind == "tree"
        model = sharded(mesh)
        model.second.weight.register_post_accumulate_grad_hook(spoil)
        way = {"gradient_release": True, "capturable": kind == "device", **EAGER}
        optimizer: Any = StableAdamW(model.parameters(), lr=1e-2, **way)
        if functional:
            optimizer = optimi_func.stableadamw(lr=1e-2)
        handle = prepare_for_gradient_release(
            model, optimizer, ignore_existing_hooks=True, skip_nonfinite=True
        )
        start = snapshot(model)
        single = plain()
        other = StableAdamW(single.parameters(), lr=1e-2, **EAGER)
        for i in range(3):
            bad[0] = i == 1
            handle.backward(lambda i=i, model=model: loss_of(model, mine(i)))
            loss_of(single, batch(i)).backward()
            if bad[0]:
                single.second.weight.grad = None
                if functional:
                    continue  # a tree has one step count, which goes on
            other.step()
            other.zero_grad()
            if not functional:
                assert_close(snapshot(model), snapshot(single), start, 1e-9)
        assert handle.skipped == {"second.weight": 1}
        assert all(x.isfinite().all() for x in snapshot(model))
        if not functional:
            assert optimizer.state[model.second.weight]["step"] == 2
            assert optimizer.state[model.second.bias]["step"] == 3
        handle.remove()


def trees(folder: Path) -> None:
    """A pure optimizer under release."""
    model, single = sharded(flat_mesh()), plain()
    start = snapshot(single)
    for net, get in ((model, mine), (single, batch)):
        optimizer = optimi_func.stableadamw(lr=1e-2)
        with prepare_for_gradient_release(net, optimizer, accumulation="buffer") as handle:
            for i in range(4):
                loss_of(net, get(i)).backward()
                if i % 2:
                    handle.step()
            assert handle.state.step == 2
            moment = handle.state.leaves["first.weight"].exp_avg
            assert isinstance(moment, DTensor) == (net is model)
    assert_close(snapshot(model), snapshot(single), start, 1e-9)


def handles(folder: Path) -> None:
    """The handle's own state, saved in an open cycle and loaded."""
    mesh = flat_mesh()
    options = {"accumulation": "buffer", "accumulation_steps": 3}
    ends = []
    for interrupted in (False, True):
        model = sharded(mesh)
        optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=True, **EAGER)
        handle = prepare_for_gradient_release(model, optimizer, **options)
        for i in range(6):
            loss_of(model, mine(i)).backward()
            if interrupted and i == 3:
                saved = copy.deepcopy(handle.state_dict())
                assert saved["position"] == 1
                assert all(isinstance(x, DTensor) for x in saved["buffer"].values())
                handle.remove()
                model.zero_grad()
                handle = prepare_for_gradient_release(model, optimizer, **options)
                handle.load_state_dict(saved)
        handle.remove()
        ends.append(snapshot(model))
    assert all(torch.equal(a, b) for a, b in zip(*ends))
    # Other parameters' gradients are not added twice by two passes.
    model = sharded(mesh)
    prompt = torch.ones(5, dtype=torch.float64, requires_grad=True)
    optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(model, optimizer, clip_global_norm=1e9)
    found = []
    for again in (False, True):
        prompt.grad = None
        handle.options = replace(handle.options, clip_global_norm=1e9 if again else None)
        model.load_state_dict(sharded(mesh).state_dict())
        handle.backward(lambda: loss_of(model, mine(0) * prompt))
        found.append(prompt.grad)
    assert torch.equal(*found)
    handle.remove()


def roots(folder: Path) -> None:
    """Modules sharded each by itself: their last gradients come after the backward."""
    model = plain()
    for part in (model.first, model.second, model.last):
        fully_shard(part, mesh=flat_mesh())
    compare_releases(model, mine, FEW)
    # fully_shard's own accumulation: one reduction, and one update.
    single, start = plain(), snapshot(plain())
    model = sharded(flat_mesh())
    way = {"lr": 1e-2, "gradient_release": True, **EAGER}
    prepare_for_gradient_release(model, AdamW(model.parameters(), **way))
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        loss_of(model, mine(last)).backward()
        loss_of(single, batch(last)).backward()
    AdamW(single.parameters(), lr=1e-2, **EAGER).step()
    assert_close(snapshot(model), snapshot(single), start, 1e-9)


def live_bytes(folder: Path) -> None:
    """The peak of a backward and a step beside the shards, of all gradients' bytes."""
    shares: dict[bool, float] = {}
    for release in (False, True):

        def make(release: bool = release) -> Any:
            blocks = [
                nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)) for _ in range(12)
            ]
            model = nn.Sequential(*blocks)
            for part in (*model, model):
                fully_shard(part, mesh=flat_mesh())
            optimizer = AdamW(model.parameters(), gradient_release=release, **EAGER)
            if release:
                prepare_for_gradient_release(model, optimizer)
            losses: list[Tensor] = []

            def step() -> None:
                losses.pop().backward()
                optimizer.step()
                optimizer.zero_grad()

            return lambda: losses.append(model(torch.ones(1, 256)).sum()), step

        whole = 12 * 4 * (256 * 256 + 3 * 256)
        # The least of some runs, because a process that is ahead holds messages for longer.
        shares[release] = min([peak_bytes(make, 3) for _ in range(6)]) / whole
    # Two processes: the shards of all gradients are a half.
    assert shares[False] > 0.6 >= shares[True], shares


def hybrid(folder: Path) -> None:
    """Replicated and sharded (HSDP)."""
    compare_models(sharded(hybrid_mesh()), mine)
    compare_releases(sharded(hybrid_mesh()), mine, FEW)


def tensor_parallel(folder: Path) -> None:
    """Tensor parallel, among four under fully_shard."""
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    size = dist.get_world_size()
    alone = init_device_mesh("cpu", (size,))
    # torch clips no DTensor together with another mesh's, or with a plain tensor.
    clipped = ("first", "second")
    if size < 4:
        compare_models(parallelize_module(plain(), alone, plan), batch, clipped)
        compare_releases(parallelize_module(plain(), alone, plan), batch, FEW)
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = parallelize_module(plain(), mesh["model"], plan)
    for part in (model.first, model.second, model.last, model):
        fully_shard(part, mesh=mesh["data"])

    def data(i: int) -> Tensor:
        return share(i, mesh["data"].get_local_rank(), 2)

    compare_models(model, data, clipped)
    compare_releases(model, data, FEW)


def replicas(folder: Path) -> None:
    """DistributedDataParallel: the ordinary step, and no release."""
    single, inner = plain(), plain()
    start = snapshot(single)
    model = nn.parallel.DistributedDataParallel(inner)
    for net, get in ((single, batch), (model, mine)):
        train(net, AdamW(net.parameters(), lr=1e-2, **EAGER), range(4), get)
    assert_close(snapshot(model), snapshot(single), start, 1e-9)
    optimizer = AdamW(inner.parameters(), lr=1e-2, gradient_release=True, **EAGER)
    with raises(ValueError, "FSDP2"):
        prepare_for_gradient_release(model, optimizer)
    handle = prepare_for_gradient_release(inner, optimizer)
    # Known by what it does, at the end of its first backward.
    with raises(RuntimeError, "FSDP2"):
        loss_of(model, mine(0)).backward()
    handle.remove()


def growth(folder: Path) -> None:
    """A thousand steps leave nothing behind."""
    mesh = flat_mesh()
    for cls in (AdamW, StableAdamW):
        params = [
            nn.Parameter(distribute_tensor(torch.ones(n, 3), mesh, [Shard(0)]))
            for n in (1, 5)
        ]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = cls(params, lr=1e-3, foreach=True)
        counts, peaks = [], []
        for i in range(500):
            optimizer.step()
            if i in (249, 499):
                gc.collect()
                counts.append(len(gc.get_objects()))
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert counts[1] <= counts[0] + 20, counts
        # In kB; an allocator settles, 2 kB a step would be a leak.
        assert peaks[1] <= peaks[0] + 500, peaks
    model = sharded(mesh)
    optimizer = AdamW(model.parameters(), lr=1e-3, gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(
        model, optimizer, clip_param_norm=1.0, grad_norm=True, skip_nonfinite=True
    )
    counts = []
    for i in range(60):
        loss_of(model, mine(0)).backward()
        if i in (9, 59):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] <= counts[0] + 20, counts
    handle.remove()


# Checkpoints


def fresh_pair(model: nn.Module, release: bool = False) -> tuple[nn.Module, Any]:
    """With float32 state; without release it lies in buckets from the second step on."""
    way = {"gradient_release": True, **EAGER} if release else {"foreach": True}
    options = {"lr": 1e-2, "weight_decay": 0.1, "state_dtype": torch.float32, **way}
    return model, AdamW(model.parameters(), **options)


def passed_to(transfer: Any, model: nn.Module, optimizer: Any, path: Path) -> Any:
    """The state of both, once dcp.save or dcp.load has had it."""
    weights, state = sd.get_state_dict(model, optimizer)
    kept = {"model": weights, "optimizer": state}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        transfer(kept, checkpoint_id=path)
    return kept


def save(model: nn.Module, optimizer: Any, path: Path) -> None:
    passed_to(dcp.save, model, optimizer, path)


def load(model: nn.Module, optimizer: Any, path: Path) -> None:
    kept = passed_to(dcp.load, model, optimizer, path)
    sd.set_state_dict(
        model,
        optimizer,
        model_state_dict=kept["model"],
        optim_state_dict=kept["optimizer"],
    )


def resume(folder: Path) -> None:
    """10 steps are 5, saved and loaded, and 5, bit for bit; also under release."""
    mesh, size = flat_mesh(), dist.get_world_size()
    for release in (False, True):
        path = folder.parent / f"from {size}" if not release else folder / "released"
        ends = []
        for stop in (False, True):
            model, optimizer = fresh_pair(sharded(mesh), release)
            if release:
                prepare_for_gradient_release(model, optimizer)
            train(model, optimizer, range(5), mine)
            if stop:
                save(model, optimizer, path)
                model, optimizer = fresh_pair(sharded(mesh), release)
                if release:
                    prepare_for_gradient_release(model, optimizer)
                load(model, optimizer, path)
                for p in model.parameters():
                    assert optimizer.state[p]["step"] == 5
                    assert optimizer.state[p]["exp_avg"].placements == p.placements
            train(model, optimizer, range(5, 10), mine)
            ends.append(snapshot(model))
        assert all(torch.equal(a, b) for a, b in zip(*ends))


def averages(folder: Path) -> None:
    """What is evaluated of shards is that of the whole; a checkpoint holds either mode."""

    def make(model: nn.Module) -> tuple[nn.Module, ScheduleFreeAdamW]:
        return model, ScheduleFreeAdamW(model.parameters(), lr=1e-2, **EAGER)

    def fresh() -> tuple[nn.Module, ScheduleFreeAdamW]:
        return make(sharded(flat_mesh()).to(torch.bfloat16))

    def shared(i: int) -> Tensor:
        return batch(i).to(torch.bfloat16)

    model, optimizer = fresh()
    train(model, optimizer, range(5), shared)
    trained = snapshot(model)
    masters = {k: full(x) for k, x in optimizer.master_state_dict(model).items()}
    z = {k: full(optimizer.state[p]["z"]) for k, p in model.named_parameters()}
    optimizer.eval()
    shown = snapshot(model)
    now = {k: full(x) for k, x in optimizer.master_state_dict(model).items()}
    for x, (k, y) in zip(shown, masters.items()):
        assert torch.allclose(now[k], (y - 0.1 * z[k]) / 0.9, rtol=1e-5, atol=1e-6)
        assert torch.equal(x, now[k].to(torch.bfloat16))
    save(model, optimizer, folder / "averages")
    optimizer.train()
    assert all(map(torch.equal, snapshot(model), trained))
    assert not all(map(torch.equal, shown, trained))
    train(model, optimizer, range(5, 8), shared)
    # It is loaded into the tensors that are there: in eval mode there are all.
    twin, other = fresh()
    other.init_state()
    other.eval()
    load(twin, other, folder / "averages")
    assert all(map(torch.equal, snapshot(twin), shown))
    other.train()
    assert all(map(torch.equal, snapshot(twin), trained))
    train(twin, other, range(5, 8), shared)
    assert all(map(torch.equal, snapshot(twin), snapshot(model)))
    # In train mode there is no place for what the parameters were, which is told.
    twin, other = fresh()
    load(twin, other, folder / "averages")
    with raises(RuntimeError, "no 'train_param'"):
        other.train()


def made_state(folder: Path) -> None:
    """The state that torch makes by a step of zeros costs no step and moves nothing."""
    check_made_state(lambda: sharded(flat_mesh()))
    # Not if any process has a gradient.
    mesh = flat_mesh()
    p = nn.Parameter(distribute_tensor(torch.ones(4, 1), mesh, [Shard(0)]))
    g = torch.zeros(4, 1)
    g[0] = 1.0
    p.grad = distribute_tensor(g, mesh, [Shard(0)])
    optimizer = AdamW([p], lr=0.0, **EAGER)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def check_made_state(make: Callable[[], nn.Module]) -> None:
    for name in ELEMENTWISE:
        cls = CLASSES[name]
        l2 = {"decouple_wd": False} if name in ("sgd", "adam", "radam", "ranger") else {}
        for lr in (1e-2, torch.tensor(1e-2)):
            model = make()
            start = snapshot(model)
            optimizer = cls(model.parameters(), lr=lr, weight_decay=0.5, **l2, **EAGER)
            state = sd.get_optimizer_state_dict(model, optimizer)["state"]
            assert set(state) == {n for n, _ in model.named_parameters()}
            assert all(torch.equal(a, b) for a, b in zip(start, snapshot(model)))
            assert all(p.grad is None for p in model.parameters())
            assert optimizer.param_groups[0]["lr"] == 1e-2
            for p in model.parameters():
                kept = optimizer.state[p]
                assert kept["step"] == 0
                begun = optimizer.rule_of(optimizer.param_groups[0]).running._fields
                for field in {*kept} - {"step", "slow_param", "p0", *begun}:
                    assert full(kept[field]).count_nonzero() == 0


def forms(folder: Path) -> None:
    """Flattened, whole on the host, and broadcast state_dicts."""
    mesh = flat_mesh()
    for choice in (
        sd.StateDictOptions(flatten_optimizer_state_dict=True),
        sd.StateDictOptions(full_state_dict=True, cpu_offload=True),
        sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ):
        model, optimizer = fresh_pair(sharded(mesh))
        train(model, optimizer, range(3), mine)
        kept = copy.deepcopy(sd.get_optimizer_state_dict(model, optimizer, options=choice))
        weights = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(3, 5), mine)
        if choice.full_state_dict and dist.get_rank() > 0 and choice.cpu_offload:
            assert not kept
            choice = replace(choice, broadcast_from_rank0=True)
        elif choice.cpu_offload:
            choice = replace(choice, broadcast_from_rank0=True)
        other, resumed = fresh_pair(sharded(mesh))
        other.load_state_dict(weights)
        sd.set_optimizer_state_dict(other, resumed, kept, options=choice)
        assert resumed.state[other.first.weight]["exp_avg"].dtype == torch.float32
        train(other, resumed, range(3, 5), mine)
        assert all(torch.equal(a, b) for a, b in zip(snapshot(model), snapshot(other)))
    # A whole state, without torch's help.
    single, known = fresh_pair(plain())
    train(single, known, range(3), batch)
    model, optimizer = fresh_pair(sharded(mesh))
    optimizer.load_state_dict(known.state_dict())
    for p, q in zip(model.parameters(), single.parameters()):
        assert optimizer.state[p]["exp_avg"].placements == p.placements
        assert torch.equal(full(optimizer.state[p]["exp_avg"]), known.state[q]["exp_avg"])


def loads_from(
    path: Path, make: Callable[[], nn.Module], data: Callable[[int], Tensor]
) -> None:
    """What was saved after 5 steps goes on as one process would, whoever saved it."""
    single = plain()
    start = snapshot(single)
    train(*fresh_pair(single), range(10), batch)
    model, optimizer = fresh_pair(make())
    load(model, optimizer, path)
    train(model, optimizer, range(5, 10), data)
    # The state is float32.
    assert_close(snapshot(model), snapshot(single), start, 1e-6)


def from_one(folder: Path) -> None:
    loads_from(folder.parent / "from 1", lambda: sharded(flat_mesh()), mine)


def from_two(folder: Path) -> None:
    loads_from(folder.parent / "from 2", lambda: sharded(flat_mesh()), mine)


def from_four(folder: Path) -> None:
    loads_from(folder.parent / "from 4", lambda: sharded(flat_mesh()), mine)


# Sums over all parameters


def joined(folder: Path) -> None:
    """Prodigy's two sums of all groups are one message a step, also under release."""
    sent: list[int] = []
    reduce = dist.all_reduce

    def counted(x: Tensor, *given: Any, **how: Any) -> Any:
        sent.append(x.numel())
        return reduce(x, *given, **how)

    def stepping(mesh: Any, release: bool, share: bool) -> tuple[Any, Any, Any]:
        model = sharded(mesh)
        named = list(model.named_parameters())
        groups = [{"params": named[:2]}, {"params": named[2:]}]
        options = {"share_d": share, "gradient_release": release, **EAGER}
        optimizer = optimi_func.Prodigy(groups, **options)
        return model, optimizer, release and prepare_for_gradient_release(model, optimizer)

    four = dist.get_world_size() == 4
    meshes = [flat_mesh(), *[hybrid_mesh() for _ in range(four)]]
    for mesh, share in itertools.product(meshes, (False, True)):
        model = plain()
        named = list(model.named_parameters())
        groups = [{"params": named[:2]}, {"params": named[2:]}]
        other = optimi_func.Prodigy(groups, share_d=share, **EAGER)
        train(model, other, range(8), batch)
        runs = [stepping(mesh, release, share) for release in (False, True)]
        for ours, optimizer, _ in runs:
            for i in range(8):
                sent.clear()
                dist.all_reduce = counted
                try:
                    train(ours, optimizer, range(i, i + 1), mine)
                finally:
                    dist.all_reduce = reduce
                messages = [n for n in sent if n in (2, 4)]
                assert messages == [2 if share else 4], sent
            for mine_, theirs in zip(optimizer.param_groups, other.param_groups):
                error = abs(mine_["d"] / theirs["d"] - 1.0)
                assert error < 1e-3 and theirs["d"] > 1e-6, (mine_["d"], theirs["d"])
        (one, first, _), (two, second, handle) = runs
        for p, q in zip(one.parameters(), two.parameters()):
            assert torch.equal(p.to_local(), q.to_local())
        ds = [[group["d"] for group in x.param_groups] for x in (first, second)]
        assert ds[0] == ds[1]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, ds)
        assert all(x == ds for x in every)
        handle.remove()
