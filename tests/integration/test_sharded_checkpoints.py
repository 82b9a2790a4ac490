"""Distributed checkpoints, which another number of processes may go on from, on gloo."""

import copy
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CLASSES, ELEMENTWISE
from shards import (
    EAGER,
    Net,
    assert_close,
    batch,
    flat_mesh,
    fresh_pair,
    full,
    load,
    mine,
    plain,
    save,
    sharded,
    snapshot,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import hand_over, raises, world

from optimi_func import (
    AdamW,
    MuonAdamW,
    ScheduleFreeAdamW,
    hidden_matrices,
    join_modules,
    prepare_for_gradient_release,
)
from optimi_func.core.distributed import distribute_like


@world(full=[2, 4])
def test_a_resumed_run_of_shards_is_the_run(tmp_path: Path) -> None:
    """10 steps are 5, saved and loaded, and 5, bit for bit; also under release."""
    mesh = flat_mesh()
    for release in (False, True):
        ends = []
        for stop in (False, True):
            model, optimizer = fresh_pair(sharded(mesh), release)
            if release:
                prepare_for_gradient_release(model, optimizer)
            train(model, optimizer, range(5), mine)
            if stop:
                save(model, optimizer, tmp_path / str(release))
                model, optimizer = fresh_pair(sharded(mesh), release)
                if release:
                    prepare_for_gradient_release(model, optimizer)
                load(model, optimizer, tmp_path / str(release))
                for p in model.parameters():
                    assert optimizer.state[p]["step"] == 5
                    assert optimizer.state[p]["exp_avg"].placements == p.placements
            train(model, optimizer, range(5, 10), mine)
            ends.append(snapshot(model))
        assert all(torch.equal(a, b) for a, b in zip(*ends))


def here() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A model of one process or of all, and what this one has of the data."""
    return (sharded(flat_mesh()), mine) if dist.is_initialized() else (plain(), batch)


def saves(folder: Path) -> None:
    whole, data = here()
    model, optimizer = fresh_pair(whole)
    train(model, optimizer, range(5), data)
    save(model, optimizer, folder)


def goes_on(folder: Path) -> None:
    single, (whole, data) = plain(), here()
    start = snapshot(single)
    train(*fresh_pair(single), range(10), batch)
    model, optimizer = fresh_pair(whole)
    load(model, optimizer, folder)
    train(model, optimizer, range(5, 10), data)
    # The state is float32.
    assert_close(snapshot(model), snapshot(single), start, 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_another_number_of_processes_goes_on(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    hand_over(saves, goes_on, sizes, tmp_path / "saved")


FLAT = sd.StateDictOptions(flatten_optimizer_state_dict=True)


def staged() -> tuple[nn.Module, Any]:
    """Stages of a pipeline: one of each two processes, or both in one optimizer."""
    parts = [plain(), plain()]
    for part, others in zip(parts, (("second", "last"), ("first",))):
        for name in others:
            setattr(part, name, None)
    if dist.is_initialized():
        shape = 2, dist.get_world_size() // 2
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "shards"))
        model = parts[mesh.get_local_rank("pp")]
        for layer in model.children() if shape[1] > 1 else ():
            fully_shard(layer, mesh=mesh["shards"])
    else:
        model = join_modules(parts)
    with torch.device("meta"):
        choice = hidden_matrices(Net())
    how = {"lr_multipliers": {"last.*": 0.5}, "ns_dtype": "float64", **EAGER}
    return model, MuonAdamW(model, 1e-2, hidden=choice, **how)


def step_by_name(model: nn.Module, optimizer: Any, steps: range) -> None:
    """With gradients that parameters of one name have in every world."""
    for t in steps:
        for name, p in model.named_parameters():
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()) + t)
            g = torch.randn(p.shape, generator=seed, dtype=p.dtype)
            p.grad = distribute_like(p, g)
        optimizer.step()


def stages_save(folder: Path) -> None:
    model, optimizer = staged()
    step_by_name(model, optimizer, range(3))
    save(model, optimizer, folder, FLAT)


def stages_go_on(folder: Path) -> None:
    whole = plain()
    how = {"lr_multipliers": {"last.*": 0.5}, "ns_dtype": "float64", **EAGER}
    step_by_name(whole, MuonAdamW(whole, 1e-2, **how), range(6))
    model, optimizer = staged()
    load(model, optimizer, folder, FLAT)
    step_by_name(model, optimizer, range(3, 6))
    for name, p in model.named_parameters():
        assert torch.equal(full(p), whole.get_parameter(name)), name


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:param_groups")
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 4)])
def test_stages_of_a_pipeline_go_on_as_others(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    hand_over(stages_save, stages_go_on, sizes, tmp_path / "saved")


@world(full=[2])
def test_what_is_evaluated_of_shards_is_that_of_the_whole(tmp_path: Path) -> None:
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
    save(model, optimizer, tmp_path / "averages")
    optimizer.train()
    assert all(map(torch.equal, snapshot(model), trained))
    assert not all(map(torch.equal, shown, trained))
    train(model, optimizer, range(5, 8), shared)
    # It is loaded into the tensors that are there: in eval mode there are all.
    twin, other = fresh()
    other.init_state()
    other.eval()
    load(twin, other, tmp_path / "averages")
    assert all(map(torch.equal, snapshot(twin), shown))
    other.train()
    assert all(map(torch.equal, snapshot(twin), trained))
    train(twin, other, range(5, 8), shared)
    assert all(map(torch.equal, snapshot(twin), snapshot(model)))
    # In train mode there is no place for what the parameters were, which is told.
    twin, other = fresh()
    load(twin, other, tmp_path / "averages")
    with raises(RuntimeError, "no 'train_param'"):
        other.train()


@world(full=[2])
def test_the_state_that_torch_makes_by_a_step_of_zeros_moves_nothing() -> None:
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


def test_state_of_plain_models_is_made_without_a_step() -> None:
    check_made_state(plain)
    model, optimizer = fresh_pair(plain())
    model.first.bias.requires_grad_(False)
    train(model, optimizer, range(2), batch)
    model.first.bias.requires_grad_(True)
    before = optimizer.state[model.first.weight]
    optimizer.init_state()
    assert optimizer.state[model.first.weight] is before
    assert optimizer.state[model.first.bias]["step"] == 0
    # A gradient makes it a step like any other, whatever lr is.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.state.clear()
    train(model, optimizer, range(1), batch)
    assert optimizer.state[model.first.bias]["step"] == 1


@world(full=[2])
def test_flattened_whole_and_broadcast_state_dicts_are_loaded() -> None:
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
