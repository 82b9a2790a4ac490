"""Parameters and moments in codes, on shards: the codes of one process, on gloo."""

import warnings
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_process import End, Steps, assert_alike, everything, ways
from shards import EAGER, flat_mesh, full, hybrid_mesh, load, save
from stored import BF16, same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree
from worlds import hand_over, raises, world

from optimi_func import (
    AdamW,
    Ranger,
    ScheduleFreeAdamW,
    prepare_for_gradient_release,
)
from optimi_func.core.rule import Storage

EXACT8 = Storage("exact", "8bit")
STORAGES = [None, "compact", EXACT8, Storage("kahan", "8bit"), "exact"]
STORAGES += [Storage("stochastic", "8bit", 3)]
SHAPES = [(130, 64), (2, 4096), (8192,), (129, 64, 32), (5, 7), (3,)]


@world(full=[2])
def test_reset_of_rows_of_parameters_and_of_all() -> None:
    (rows,) = ways("rows")
    for cls, storage in product((AdamW, Ranger, ScheduleFreeAdamW), STORAGES):
        make = partial(cls, lr=0.01, storage=storage, **EAGER)
        steps = Steps(make, SHAPES, BF16)
        ours, theirs = pair = steps.run(rows.place), steps.run(Tensor.clone)

        def compare(ours: End = ours, theirs: End = theirs) -> None:
            assert_alike(everything(ours), everything(theirs))

        # Rows of both processes, single elements of groups, and parameters.
        for at, some in ((0, [0, 100, -1]), (2, [4097]), (5, [2]), (1, None), (4, None)):
            entry = theirs.optimizer.state[theirs.params[at]]
            before = {k: x.clone() for k, x in entry.items()}
            for end in pair:
                end.optimizer.reset(end.params[at], some)
            after = theirs.optimizer.state[theirs.params[at]]
            assert not all(same_bits(after[k], x) for k, x in before.items())
        for last in (False, True):
            compare()
            for end in pair:
                end.optimizer.step()
            compare()
            for end in pair if not last else ():
                end.optimizer.reset()
            assert last or theirs.optimizer.state[theirs.params[0]]["step"] == 0


@world(full=[4])
def test_cut_along_two_dimensions_and_in_the_midst_of_groups() -> None:
    """Cut along two dimensions; and in the midst of groups, where moments stay wide."""
    for shape, name, coded in (
        ((66, 256), "rows and columns", True),
        ((65, 256), "rows of rows", True),
        ((130, 64), "rows and columns", False),
        ((8256,), "rows of rows", False),
    ):
        steps = Steps(partial(AdamW, lr=0.01, storage="compact", **EAGER), [shape], BF16)
        (way,) = ways(name)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            end = steps.run(way.place)
        said = [str(w.message) for w in found if "cut groups" in str(w.message)]
        assert len(said) == (not coded), said
        assert coded or str(shape) in said[0]
        if coded:
            assert_alike(everything(end), everything(steps.alone), about=name)
        assert ("exp_avg_q" if coded else "exp_avg") in end.optimizer.state[end.params[0]]


class Net(nn.Module):
    """A weight in codes that 2 and 4 processes divide unevenly, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 130)
        self.last = nn.Linear(130, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.first(x)))


def plain() -> Net:
    torch.manual_seed(1)
    return Net().to(BF16)


def sharded(mesh: Any) -> Net:
    model = plain()
    for part in (model.first, model.last, model):
        fully_shard(part, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """On the same in all processes: the mean of their gradients is each one's."""
    for i in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(i)).to(BF16)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def pair(model: nn.Module, storage: Any, release: bool = False) -> tuple[Any, Any]:
    way = {"gradient_release": True, **EAGER} if release else EAGER
    return model, AdamW(model.parameters(), lr=0.01, storage=storage, **way)


def compare_pairs(ours: Any, theirs: Any) -> None:
    (model, optimizer), (single, other) = ours, theirs

    def compare_whole(x: Any, y: Tensor) -> None:
        # Part by part: neither gloo nor NCCL sends int16.
        x, y = x.detach(), y.detach()
        if isinstance(x, DTensor):
            places = x.device_mesh, x.placements
            y = distribute_tensor(y, *places, src_data_rank=None).to_local()
            x = x.to_local()
        assert same_bits(x, y)

    for p, q in zip(model.parameters(), single.parameters()):
        compare_whole(p, q)
        state, known = optimizer.state[p], other.state[q]
        assert list(state) == list(known)
        for name, x in state.items():
            compare_whole(x, known[name])
    coded = "exp_avg_q" in optimizer.state[model.first.weight]
    assert coded and "exp_avg_q" not in optimizer.state[model.last.weight]


def compare_models(mesh: Any) -> None:
    for storage in ("compact", EXACT8):
        for release in (False, True):
            single = pair(plain(), storage)
            train(*single, range(4))
            model, optimizer = pair(sharded(mesh), storage, release)
            if release:
                handle = prepare_for_gradient_release(
                    model, optimizer, skip_nonfinite=True, grad_norm=True
                )
            train(model, optimizer, range(4))
            if release:
                handle.remove()
            compare_pairs((model, optimizer), single)


@world(full=[2])
def test_fully_shard_with_and_without_release() -> None:
    compare_models(flat_mesh())


@world(soak=[4])
def test_replicated_and_sharded() -> None:
    compare_models(hybrid_mesh())


def here() -> nn.Module:
    return sharded(flat_mesh()) if dist.is_initialized() else plain()


def saves(folder: Path) -> None:
    for i, storage in enumerate(("compact", EXACT8)):
        model, optimizer = pair(here(), storage)
        train(model, optimizer, range(3))
        save(model, optimizer, folder / str(i))


def goes_on(folder: Path) -> None:
    """Bit for bit as one process that was not saved."""
    for i, storage in enumerate(("compact", EXACT8)):
        single = pair(plain(), storage)
        train(*single, range(6))
        model, optimizer = pair(here(), storage)
        load(model, optimizer, folder / str(i))
        assert optimizer.param_groups[0]["storage"] == storage
        train(model, optimizer, range(3, 6))
        compare_pairs((model, optimizer), single)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]
)
def test_another_number_of_processes_goes_on(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    hand_over(saves, goes_on, sizes, tmp_path)


@world(full=[2, 4])
def test_codes_go_on_from_a_whole_state_and_in_another_storage() -> None:
    for storage in ("compact", EXACT8):
        single = pair(plain(), storage)
        train(*single, range(3))
        model, optimizer = pair(sharded(flat_mesh()), storage)
        for p, q in zip(model.parameters(), single[0].parameters()):
            p.data.copy_(distribute_tensor(q.data, p.device_mesh, p.placements))
        optimizer.load_state_dict(single[1].state_dict())
        compare_pairs((model, optimizer), single)
        # Into another storage, and back into float32's.
        _, wide = pair(sharded(flat_mesh()), None)
        wide.load_state_dict(single[1].state_dict())
        mine = wide.state[wide.param_groups[0]["params"][0]]["exp_avg"]
        assert isinstance(mine, DTensor) and mine.dtype == BF16
        _, coded = pair(sharded(flat_mesh()), storage)
        coded.load_state_dict(wide.state_dict())
        entry = coded.state[coded.param_groups[0]["params"][0]]
        assert isinstance(entry["exp_avg_q"], DTensor)
        error = (
            full(entry["exp_avg_q"]).int()
            - full(single[1].state[single[0].first.weight]["exp_avg_q"]).int()
        ).abs()
        assert error.max() <= 2


@world(full=[2])
def test_the_decoded_state_can_be_sent_whole_and_loaded() -> None:
    """The decoded state can be sent whole, as docs/distributed.md says, and loaded."""
    how = sd.StateDictOptions(full_state_dict=True)
    for storage in ("exact", EXACT8):
        model, optimizer = pair(sharded(flat_mesh()), storage)
        train(model, optimizer, range(3))
        with raises(RuntimeError, "Invalid scalar type"):  # else say so there
            sd.get_optimizer_state_dict(model, optimizer, options=how)
        whole = pytree.tree_map(full, model.state_dict())
        state = pytree.tree_map_only(DTensor, full, optimizer.decoded_state_dict())
        kept = pytree.tree_map(full, optimizer.master_state_dict(model))
        model, optimizer = pair(plain(), storage)
        model.load_state_dict(whole)
        optimizer.load_state_dict(state)
        entry = optimizer.state[model.first.weight]
        assert entry["kahan_comp"].dtype == torch.int16 and entry["kahan_comp"].any()
        for name, x in optimizer.master_state_dict(model).items():
            assert torch.equal(x, kept[name]), name
        single = pair(plain(), storage)
        train(*single, range(3))
        train(model, optimizer, range(3, 5))
        train(*single, range(3, 5))
        if storage == "exact":  # with moments in codes the decoded ones are rounded again
            for p, q in zip(model.parameters(), single[0].parameters()):
                assert torch.equal(p, q)
                mine, known = optimizer.state[p], single[1].state[q]
                assert all(same_bits(mine[k], x) for k, x in known.items())
