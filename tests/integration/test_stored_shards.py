"""Parameters and moments in codes, on shards: the codes of one process, on gloo."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CLASSES, MEASURED, NO_CODES
from shards import EAGER, by_rows, fitted, flat_mesh, full, hybrid_mesh, load, placed, save
from stored import BF16, same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from worlds import hand_over, raises, world

from optimi_func import (
    AdamW,
    Ranger,
    ScheduleFreeAdamW,
    adamw_init,
    adamw_step,
    compiled,
    prepare_for_gradient_release,
)
from optimi_func.core import codes
from optimi_func.core.rule import Storage

EXACT8 = Storage("exact", "8bit")
STORAGES = ["compact", EXACT8, Storage("kahan", "8bit"), "exact"]
STORAGES += [Storage("stochastic", "8bit", 3)]
# Uneven shards, empty ones, one dimension, and groups that span two; and too small.
SHAPES = [(130, 64), (2, 4096), (8192,), (129, 64, 32), (5, 7), (3,)]


def given(steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(2)
    starts = [torch.randn(shape).to(BF16) for shape in SHAPES]
    return starts, [[torch.randn(s).to(BF16) for s in SHAPES] for _ in range(steps)]


def moved(make: Callable[[Any], Any], place: Callable[[Tensor], Any], steps: int) -> Any:
    starts, grads = given(steps)
    params: list[Any] = [nn.Parameter(place(x)) for x in starts]
    optimizer = make(params)
    for some in grads:
        for p, g in zip(params, some):
            p.grad = place(g)
        optimizer.step()
    return params, optimizer


def compare(
    ours: Any, optimizer: Any, theirs: Any, other: Any, place: Callable[[Tensor], Any]
) -> int:
    """Bit for bit what one process has; how many are in codes."""
    count = 0
    for p, q in zip(ours, theirs):
        assert torch.equal(p.detach().to_local(), place(q.detach()).to_local())
        state, known = optimizer.state[p], other.state[q]
        assert list(state) == list(known), (tuple(p.shape), list(state), list(known))
        count += any(name.endswith("_q") for name in state)
        numbers = optimizer.rule_of(optimizer.param_groups[0]).running._fields
        assert all(state[name] == known[name] for name in numbers)
        for name in set(state) - {"step", *numbers}:
            x = state[name]
            assert isinstance(x, DTensor) and x.placements == p.placements, name
            assert x.dtype == known[name].dtype and x.shape == known[name].shape
            assert same_bits(x.to_local(), place(known[name]).to_local()), name
        assert state["step"] == known["step"]
    return count


@world(full=[2], soak=[4])
def test_every_rule_has_the_codes_of_one_process() -> None:
    place = by_rows()
    for name, cls in CLASSES.items():
        if name in NO_CODES and name != "sgd":  # of which nothing is kept in codes
            continue
        for storage in STORAGES if name == "adamw" else STORAGES[:1]:

            def make(params: Any, cls: Any = cls, storage: Any = storage) -> Any:
                more = {"momentum": 0.9} if cls.__name__ == "SGD" else {}
                return cls(params, lr=0.01, storage=storage, **more, **EAGER)

            def fit(x: Tensor, name: str = name) -> Tensor:
                return fitted(name, x)

            theirs, other = moved(make, lambda x, fit=fit: fit(x).clone(), 3)
            ours, optimizer = moved(make, lambda x, fit=fit: place(fit(x)), 3)
            if name in MEASURED:
                # Its means are sums of sums, and a last bit of one may turn a code.
                for p, q, start in zip(ours, theirs, given(0)[0]):
                    pair = [
                        codes.widen(part, rest, torch.float32)[1].double()
                        for part, rest in (
                            (full(p), full(optimizer.state[p]["kahan_comp"])),
                            (q.detach(), other.state[q]["kahan_comp"]),
                        )
                    ]
                    got, want = (x - fit(start).double() for x in pair)
                    assert want.norm() > 0
                    assert (got - want).norm() <= 1e-2 * want.norm()
                    assert list(optimizer.state[p]) == list(other.state[q])
                continue
            found = compare(ours, optimizer, theirs, other, place)
            assert found == (0 if storage == "exact" else 4)


@world(full=[2])
def test_reset_of_rows_of_parameters_and_of_all() -> None:
    place = by_rows()
    for cls in (AdamW, Ranger, ScheduleFreeAdamW):
        for storage in (None, *STORAGES):

            def make(params: Any, cls: Any = cls, storage: Any = storage) -> Any:
                return cls(params, lr=0.01, storage=storage, **EAGER)

            pairs = moved(make, Tensor.clone, 3), moved(make, place, 3)
            (theirs, other), (ours, optimizer) = pairs
            # Rows of both processes, single elements of groups, and parameters.
            for at, rows in (
                (0, [0, 100, -1]),
                (2, [4097]),
                (5, [2]),
                (1, None),
                (4, None),
            ):
                before = {k: x.clone() for k, x in other.state[theirs[at]].items()}
                for params, its in pairs:
                    its.reset(params[at], rows)
                after = other.state[theirs[at]]
                assert not all(same_bits(after[k], x) for k, x in before.items())
            for last in (False, True):
                compare(ours, optimizer, theirs, other, place)
                for p, q, g in zip(ours, theirs, given(4)[1][3]):
                    p.grad, q.grad = place(g), g
                for _, its in pairs:
                    its.step()
                compare(ours, optimizer, theirs, other, place)
                for _, its in pairs if not last else ():
                    its.reset()
                assert last or other.state[theirs[0]]["step"] == 0


@world(full=[4])
def test_cut_along_two_dimensions_and_in_the_midst_of_groups() -> None:
    """Cut along two dimensions; and in the midst of groups, where moments stay wide."""
    mesh = init_device_mesh("cpu", (2, 2))

    def make(params: Any) -> Any:
        return AdamW(params, lr=0.01, storage="compact", **EAGER)

    for shape, places, coded in (
        ((66, 256), [Shard(0), Shard(1)], True),
        ((65, 256), [Shard(0), Shard(0)], True),
        ((130, 64), [Shard(0), Shard(1)], False),
        ((8256,), [Shard(0), Shard(0)], False),
    ):
        start, g = torch.randn(shape).to(BF16), torch.randn(shape).to(BF16)
        p: Any = nn.Parameter(distribute_tensor(start, mesh, places))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer = make([p])
        said = [str(w.message) for w in found if "cut groups" in str(w.message)]
        assert len(said) == (not coded), said
        assert coded or str(shape) in said[0]
        whole = nn.Parameter(start.clone())
        other = make([whole])
        for _ in range(3):
            p.grad, whole.grad = distribute_tensor(g, mesh, places), g.clone()
            optimizer.step()
            other.step()
        if coded:
            place = placed(mesh, *places)
            assert compare([p], optimizer, [whole], other, place) == 1
        else:
            assert "exp_avg" in optimizer.state[p]


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


@world(full=[2])
def test_the_pure_functions_eagerly_and_compiled() -> None:
    """The pure functions, eagerly and compiled (which steps codes by single operations)."""
    place = by_rows()
    starts, grads = given(2)
    for step in (adamw_step, compiled.adamw_step):
        whole, tree = starts[:1], [place(x) for x in starts[:1]]
        known, state = adamw_init(whole, storage=EXACT8), adamw_init(tree, storage=EXACT8)
        for some in grads:
            whole, known = adamw_step(whole, some[:1], known, lr=0.01)
            tree, state = step(tree, [place(some[0])], state, lr=0.01)
        # Compiled, the numbers are the host's, and may differ in float32's last bit.
        apart = (full(tree[0]).float() - whole[0].float()).abs()
        assert (apart > 0).float().mean() < 1e-2, step
        mine, theirs = state.leaves[0].exp_avg_sq, known.leaves[0].exp_avg_sq
        assert mine.q.placements == mine.scale.placements == (Shard(0),), step
        apart = (full(mine.q).int() - theirs.q.int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-2, step
        scale = full(mine.scale)
        assert torch.allclose(scale, theirs.scale, rtol=1e-5, atol=0.0)


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
