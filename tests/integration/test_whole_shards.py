"""Rules that map whole tensors, on shards: they equal one process, on gloo."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import taken
from shards import (
    EAGER,
    assert_close,
    batch,
    flat_mesh,
    full,
    load,
    loss_of,
    mine,
    placed,
    plain,
    released,
    save,
    sharded,
    share,
    snapshot,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from worlds import world

from optimi_func import SOAP, Muon, compiled, muon, muon_init, muon_step, soap

# Convolutions, stacks, and matrices that processes divide unevenly or not at all.
SHAPES = [(8, 5), (5, 9), (1, 6), (7, 2, 3, 3), (3, 6, 4), (6, 1)]


def given(steps: int, dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(3)
    starts = [torch.randn(shape).to(dtype) for shape in SHAPES]
    return starts, [[torch.randn(s).to(dtype) for s in SHAPES] for _ in range(steps)]


def placers() -> list[Callable[[Tensor], Any]]:
    """Ways to divide a tensor among all processes."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    found = [placed(flat, Shard(0)), placed(flat, Shard(1))]
    if world == 4:
        plane = init_device_mesh("cpu", (2, 2))
        found += [placed(plane, Shard(0), Shard(1)), placed(plane, Replicate(), Shard(0))]
    return found


def moved(place: Callable[[Tensor], Any], dtype: torch.dtype, **way: Any) -> list[Any]:
    starts, grads = given(3, dtype)
    params: list[Any] = [nn.Parameter(place(x)) for x in starts]
    optimizer = Muon(params, lr=0.05, **way)
    for some in grads:
        for p, g in zip(params, some):
            p.grad = place(g)
        optimizer.step()
    return params


@world(full=[2], soak=[4])
def test_norms_and_scales_are_of_the_whole_bit_for_bit() -> None:
    ways: list[dict[str, Any]] = [
        {**EAGER},
        {"foreach": True, "ns_coefficients": "quintic"},
        {**EAGER, "capturable": True},
        {**EAGER, "storage": "compact"},
    ]
    for way in ways:
        dtypes = [torch.bfloat16] if "storage" in way else [torch.float32, torch.bfloat16]
        for dtype in dtypes:
            theirs = moved(lambda x: x, dtype, **way)
            for place in placers():
                ours = moved(place, dtype, **way)
                for p, q in zip(ours, theirs):
                    assert isinstance(p, DTensor)
                    assert torch.equal(full(p), q.detach()), way


@world(full=[2], soak=[4])
def test_the_pure_step_and_a_derivative_through_it() -> None:
    """The pure step, in place too, and a derivative through it."""
    starts, grads = given(3, torch.float64)
    for place in placers():
        whole = {str(i): x for i, x in enumerate(starts)}
        known = muon_init(whole)
        trees = {n: place(x) for n, x in whole.items()}
        state = muon_init(trees)
        twins, other = copy.deepcopy((trees, state))
        for some in grads:
            gs = {str(i): g for i, g in enumerate(some)}
            parts = {n: place(g) for n, g in gs.items()}
            whole, known = muon_step(whole, gs, known, lr=0.05)
            trees, state = muon_step(trees, parts, state, lr=0.05)
            step = muon(lr=0.05)
            twins, other = compiled.step_(step, twins, parts, other)
        for n, x in whole.items():
            assert torch.equal(full(trees[n]), x)
            assert torch.allclose(full(twins[n]), x, rtol=1e-12, atol=1e-12)
    # By autograd: of the whole update's inner product with something.
    for i in (0, 4):  # a matrix, and a stack, which is mapped where it lies
        weights = torch.randn(SHAPES[i], dtype=torch.float64)
        found = []
        for put in (lambda x: x, placers()[0]):
            p = put(starts[i].clone()).requires_grad_()
            new, _ = muon_step(p, put(grads[0][i]) * p, muon_init(p.detach()), lr=0.1)
            (new * put(weights)).sum().backward()
            found.append(full(p.grad))
        assert torch.allclose(*found, rtol=1e-9, atol=1e-12)


@world(full=[2], soak=[4])
def test_soaps_bases_factors_and_moments_are_those_of_one_process() -> None:
    ways: list[tuple[Any, dict[str, Any]]] = [(place, {}) for place in placers()]
    ways.append((lambda x: x, {"process_group": dist.group.WORLD}))
    shapes = [*SHAPES, (9,), (0, 3)]
    options: dict[str, Any] = {"lr": 0.05, "precondition_frequency": 2}
    options["max_precond_dim"] = 8  # of (5, 9) one side

    def run(place: Any, dtype: torch.dtype, **way: Any) -> list[list[Tensor]]:
        torch.manual_seed(3)
        params: list[Any] = [nn.Parameter(place(torch.randn(s).to(dtype))) for s in shapes]
        tree: Any = [p.detach().clone() for p in params]
        value, optimizer = soap(**options), SOAP(params, **options, **way, **EAGER)
        state = value.init(tree)
        for _ in range(6):
            grads = [place(torch.randn(s).to(dtype)) for s in shapes]
            for p, g in zip(params, grads):
                p.grad = g
            optimizer.step()
            tree, state = value.step(tree, grads, state)
        assert {x.dtype for s in state.leaves for x in s.rule_state} == {torch.float32}
        kept = [x for p in params for x in optimizer.state[p].values()]
        leaves = [x for s in state.leaves for x in s.rule_state]
        return [list(map(full, some)) for some in (params, tree, kept, leaves)]

    for dtype in (torch.float32, torch.bfloat16):
        alone = run(lambda x: x, dtype)
        for place, way in ways:
            for found, want in zip(run(place, dtype, **way), alone):
                assert all(map(torch.equal, found, want)), dtype


@world(full=[2], soak=[4])
def test_soap_is_saved_and_loaded_and_goes_on(tmp_path: Path) -> None:
    """Saved by DCP or as a full state dict and loaded, a run is the one without a stop."""
    options: dict[str, Any] = {"lr": 0.05, "precondition_frequency": 2, **EAGER}
    ends: list[list[Tensor]] = []
    for way in ("none", "dcp", "full"):
        model = sharded(flat_mesh())
        optimizer: Any = SOAP(model.parameters(), **options)
        for i in range(8):
            if i == 3 and way != "none":
                before = model, optimizer
                model = sharded(flat_mesh())
                optimizer = SOAP(model.parameters(), **options)
                if way == "dcp":
                    save(*before, tmp_path / "rotated")
                    load(model, optimizer, tmp_path / "rotated")
                else:
                    how = sd.StateDictOptions(full_state_dict=True)
                    weights, state = sd.get_state_dict(*before, options=how)
                    for x in state["state"].values():
                        assert not isinstance(x["bases"], DTensor)
                    sd.set_state_dict(
                        model,
                        optimizer,
                        model_state_dict=weights,
                        optim_state_dict=state,
                        options=how,
                    )
            loss_of(model, mine(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(snapshot(model))
    assert all(map(torch.equal, *ends[:2])) and all(map(torch.equal, *ends[1:]))


def train(model: nn.Module, data: Callable[[int], Tensor], release: bool) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "gradient_release": release, **EAGER}
    if release:
        modes = {"clip_param_norm": 0.1, "accumulation": "buffer", "accumulation_steps": 2}
        released(model, Muon, modes, data)
        return
    optimizer = Muon(taken(Muon, model), **options)
    for i in range(4):
        loss_of(model, data(i)).backward()
        nn.utils.clip_grad_norm_(taken(Muon, model), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


def models() -> list[tuple[nn.Module, Callable[[int], Tensor]]]:
    """Models, and what each process has of the data."""
    found: list[Any] = [(sharded(flat_mesh()), mine)]
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        model = parallelize_module(plain(), mesh["model"], plan)
        # What is not parallel is sharded along the same mesh by fully_shard alone.
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh["data"])
        rank = mesh["data"].get_local_rank()
        found.append((model, lambda i: share(i, rank, 2)))
    return found


@world(full=[2], soak=[4])
def test_muon_under_fully_shard_and_tensor_parallelism() -> None:
    for release in (False, True):
        for model, data in models():
            parallel = model.first.weight.device_mesh.ndim > 1
            single = plain()
            start = snapshot(single)
            if parallel and not release:
                continue  # torch clips no DTensors of two meshes together
            train(single, batch, release)
            train(model, data, release)
            assert_close(snapshot(model), snapshot(single), start, 1e-9)
