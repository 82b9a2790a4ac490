"""Distributed checkpoints, which another number of processes may go on from, on gloo."""

import copy
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CLASSES, ELEMENTWISE
from one_process import (
    ALONE,
    Among,
    Training,
    as_one_process,
    assert_alike,
    fully_sharded,
    kept,
    local_of,
    of,
    parameters,
    parameters_and_state,
)
from shards import (
    EAGER,
    ComplexNet,
    Net,
    batch,
    drawn,
    flat_mesh,
    fresh_pair,
    full,
    hybrid_mesh,
    load,
    plain,
    save,
    sharded,
    snapshot,
    train,
)
from stored import same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from worlds import hand_over, raises, world

from optimi_func import (
    LAMB,
    SOAP,
    AdamW,
    MuonAdamW,
    ScheduleFreeAdamW,
    Storage,
    hidden_matrices,
    join_modules,
)
from optimi_func.core.distributed import distribute_like


class Coded(nn.Module):
    """A weight in codes that 2 and 4 processes divide unevenly, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(64, 130), nn.Linear(130, 3)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.first(x)))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def coded(storage: Any, **how: Any) -> Training:
    batch = partial(drawn, 64, torch.bfloat16)
    return Training(Coded, of(AdamW, storage=storage), batch, mean_square, **how)


COMPLEX = partial(drawn, 64, torch.complex64)
# In buckets from the second step on, with float32's state of float64 parameters.
WIDE = {"weight_decay": 0.1, "state_dtype": torch.float32}
BUCKETS = of(AdamW, compile=None, foreach=True, **WIDE)
EXACT8 = Storage("exact", "8bit")
# What is trained, and how far it may be from one process. Codes are bit for bit the same,
# and so is all that has only this process's data.
ROWS: dict[str, tuple[Training, float]] = {
    "buckets": (Training(plain, BUCKETS), 1e-6),
    "release": (Training(plain, of(AdamW, **WIDE), release={}), 1e-6),
    "soap": (Training(plain, of(SOAP, lr=0.05, precondition_frequency=2)), 0.0),
    "compact": (coded("compact"), 0.0),
    "exact": (coded(EXACT8), 0.0),
    "released codes": (coded(EXACT8, release={}), 0.0),
    "complex": (Training(ComplexNet, of(AdamW), COMPLEX), 1e-5),
    "lamb": (Training(ComplexNet, of(LAMB), COMPLEX), 1e-5),
}
HALF, END = range(5), range(10)


def divided(tolerance: float, mesh: Any = None) -> Among:
    """Where a comparison is bit for bit, all processes have all of the data."""
    if not dist.is_initialized():
        return ALONE
    among = fully_sharded(mesh)
    return among if tolerance == 1e-6 else replace(among, share=lambda x: x)


def saves(folder: Path) -> None:
    for name, (training, tolerance) in ROWS.items():
        end = training.run(divided(tolerance), HALF)
        save(end.model, end.optimizer, folder / name)
    size = dist.get_world_size() if dist.is_initialized() else 1
    (folder / "size").write_text(f"{size}")


def goes_on(folder: Path) -> None:
    """As a run that was not saved: in one process, and bit for bit in as many."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    for name, (training, tolerance) in ROWS.items():
        among, how = divided(tolerance), {"steps": END[5:], "path": folder / name}
        than = training.run(ALONE, END)
        look = parameters if tolerance else parameters_and_state
        end = as_one_process(training, among, look, tolerance, name, than, **how)
        if int((folder / "size").read_text()) == size:
            ours, theirs = end, training.run(among, END)
            pairs = zip(*[map(local_of, look(x).values()) for x in (ours, theirs)])
            assert all(same_bits(x, y) for x, y in pairs), name


SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]


@pytest.mark.full
@pytest.mark.parametrize("sizes", SIZES)
def test_another_number_of_processes_goes_on(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    hand_over(saves, goes_on, sizes, tmp_path)


@world(full=[2], soak=[4])
def test_codes_under_fully_shard_with_and_without_release() -> None:
    mesh = hybrid_mesh() if dist.get_world_size() == 4 else flat_mesh()
    for name in ("compact", "exact"):
        for release in (None, {"skip_nonfinite": True, "grad_norm": True}):
            training, among = ROWS[name][0], divided(0.0, mesh)
            than, here = training.alone, replace(training, release=release)
            look = parameters_and_state
            end = as_one_process(here, among, look, about=(name, release), than=than)
            found = ["exp_avg_q" in end.optimizer.state[p] for p in end.model.parameters()]
            assert found == [True, False, False, False]


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


@world(full=[2, 4])
def test_codes_go_on_from_a_whole_state_and_in_another_storage() -> None:
    for storage in ("compact", EXACT8):
        single, end = coded(storage).run(ALONE, HALF), coded(storage).begun(divided(0.0))
        for p, q in zip(end.model.parameters(), single.model.parameters()):
            p.data.copy_(distribute_like(p, q.data))
        end.optimizer.load_state_dict(single.optimizer.state_dict())
        assert_alike(parameters_and_state(end), parameters_and_state(single))
        # Into another storage, and back into this one.
        wide, again = (coded(x).begun(divided(0.0)) for x in (None, storage))
        wide.optimizer.load_state_dict(single.optimizer.state_dict())
        moment = wide.optimizer.state[wide.model.first.weight]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.dtype == torch.bfloat16
        again.optimizer.load_state_dict(wide.optimizer.state_dict())
        found, wanted = (
            full(x.optimizer.state[x.model.first.weight]["exp_avg_q"]).int()
            for x in (again, single)
        )
        assert (found - wanted).abs().max() <= 2


@world(full=[2])
def test_the_decoded_state_can_be_sent_whole_and_loaded() -> None:
    """The decoded state can be sent whole, as docs/distributed.md says, and loaded."""
    how = sd.StateDictOptions(full_state_dict=True)
    for storage in ("exact", EXACT8):
        end, single = coded(storage).run(divided(0.0), HALF), coded(storage).begun()
        with raises(RuntimeError, "Invalid scalar type"):  # else say so there
            sd.get_optimizer_state_dict(end.model, end.optimizer, options=how)
        single.model.load_state_dict(pytree.tree_map(full, end.model.state_dict()))
        state = pytree.tree_map_only(DTensor, full, end.optimizer.decoded_state_dict())
        single.optimizer.load_state_dict(state)
        entry = single.optimizer.state[single.model.first.weight]
        assert entry["kahan_comp"].dtype == torch.int16 and entry["kahan_comp"].any()
        masters = [x.optimizer.master_state_dict(x.model) for x in (end, single)]
        for x, y in zip(*map(dict.values, masters)):
            assert torch.equal(full(x), y)
        coded(storage).train(single, END[5:])
        if storage == "exact":  # with moments in codes the decoded ones are rounded again
            wanted = coded(storage).run(ALONE, END)
            assert_alike(parameters_and_state(single), parameters_and_state(wanted))


@world(full=[2])
def test_flattened_whole_and_broadcast_state_dicts_are_loaded() -> None:
    among, flat = fully_sharded(), sd.StateDictOptions(flatten_optimizer_state_dict=True)
    whole = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    told = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for choice, name in product((flat, whole, told), ("buckets", "soap")):
        training = ROWS[name][0]
        end, other = training.run(among, HALF), training.begun(among)
        pair = end.model, end.optimizer
        state = copy.deepcopy(sd.get_optimizer_state_dict(*pair, options=choice))
        other.model.load_state_dict(copy.deepcopy(end.model.state_dict()))
        if choice is whole:
            assert bool(state) == (dist.get_rank() == 0)
            choice = replace(choice, broadcast_from_rank0=True)
        sd.set_optimizer_state_dict(other.model, other.optimizer, state, options=choice)
        moment = other.optimizer.state[other.model.first.weight]["exp_avg"]
        assert moment.dtype == (torch.float32 if name == "buckets" else torch.float64)
        for each in (end, other):
            training.train(each, END[5:])
        ours, theirs = (
            [*map(local_of, parameters_and_state(x).values())] for x in (end, other)
        )
        assert all(map(torch.equal, ours, theirs)), (name, choice)
    # A whole state, without torch's help.
    training = ROWS["buckets"][0]
    single, end = training.run(ALONE, HALF), training.begun(among)
    end.optimizer.load_state_dict(single.optimizer.state_dict())
    ours, theirs = (kept(parameters(x), x.optimizer) for x in (end, single))
    assert_alike(ours, theirs)
