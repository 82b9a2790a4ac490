"""What several processes check of a state that they divide: one owner each, same bits."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import CLASSES, MATRICES
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import EAGER, flat_mesh, raises

from optimi_func import (
    EMA,
    SGD,
    AdamW,
    Lion,
    Mixed,
    MuonAdamW,
    Prodigy,
    ScheduleFreeAdamW,
    Storage,
    adamw,
    compiled,
    lion,
    memory,
    prepare_for_gradient_release,
)
from optimi_func.execution.plans import ClassPlan

MESSAGES = ("all_gather", "broadcast", "all_reduce", "reduce", "broadcast_object_list")


def divided() -> dict[str, Any]:
    return {"process_group": dist.group.WORLD, "divide_state": True}


@contextmanager
def counted() -> Iterator[list[str]]:
    """Note the names of the messages that are sent."""
    kept, names = {name: getattr(dist, name) for name in MESSAGES}, list[str]()

    def message(name: str) -> Any:
        def send(*args: Any, **how: Any) -> Any:
            names.append(name)
            return kept[name](*args, **how)

        return send

    for name in MESSAGES:
        setattr(dist, name, message(name))
    try:
        yield names
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


class Net(nn.Module):
    """Blocks of matrices and norms: none is larger than a share."""

    def __init__(self, width: int = 24, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Tied(Net):
    """A table that is its head too, and larger than a share, as a GPT-2's of 124M."""

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = 1003) -> None:
        super().__init__(64, 2)
        self.table = nn.Embedding(rows, 64)
        self.head = nn.Linear(64, rows, bias=False)
        self.head.weight = self.table.weight
        self.to(dtype)


def net(dtype: torch.dtype = torch.float32) -> Net:
    return Net().to(dtype)


def loss(model: nn.Module, i: int) -> Tensor:
    x = torch.randint(20, (6,), generator=torch.Generator().manual_seed(i))
    return model(x).float().square().mean()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for i in steps:
        loss(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()


def matrices(model: nn.Module) -> list[Any]:
    return [(name, p) for name, p in model.named_parameters() if p.dim() > 1]


def made(name: str, model: nn.Module, **options: Any) -> Any:
    """An optimizer, of matrices alone where it takes no others."""
    more: dict[str, Any] = {"sgd": {"momentum": 0.9}}.get(name, {})
    given = matrices(model) if name in MATRICES else model.named_parameters()
    return CLASSES[name](given, lr=1e-2, weight_decay=0.1, **more, **options, **EAGER)


def nbytes(optimizer: Any) -> int:
    """The live bytes of the state of this process."""
    tensors = [x for entry in optimizer.state.values() for x in entry.values()]
    return sum(x.untyped_storage().nbytes() for x in tensors)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == []


def assert_same_state(ours: Any, theirs: Any) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for i, entry in theirs["state"].items():
        assert ours["state"][i].keys() == entry.keys()
        for k, x in entry.items():
            y = ours["state"][i][k]
            assert torch.equal(x, y) and x.dtype == y.dtype, (i, k)


def compare(pairs: list[tuple[nn.Module, Any]], steps: range = range(3)) -> None:
    """Train an undivided and a divided one: parameters, state dicts and bytes."""
    for model, optimizer in pairs:
        train(model, optimizer, steps)
    (one, alone), (model, optimizer) = pairs
    assert_equal(one, model)
    assert nbytes(optimizer) <= nbytes(alone) * (1 / dist.get_world_size() + 0.05)
    assert_same_state(optimizer.state_dict(), alone.state_dict())


def some_rules(folder: Path) -> None:
    """Rules of each form, storages and compensations: the bits, the state, its bytes."""
    for name in ("adamw", "lion", "sgd", "muon", "schedule_free_adamw"):
        pairs = [(m := net(), made(name, m, **how)) for how in ({}, divided())]
        compare(pairs)
    for storage in (None, "compact", "exact", Storage("kahan", "8bit")):
        pairs = [
            (m := Net(64, 4).bfloat16(), made("adamw", m, storage=storage, **how))
            for how in ({}, divided())
        ]
        compare(pairs)
        kept = {name for entry in pairs[1][1].state.values() for name in entry}
        coded = storage not in (None, "exact")
        assert ("exp_avg_q" in kept) == coded and "kahan_comp" in kept, kept
    pairs = [(m := net(), MuonAdamW(m, lr=1e-2, **how, **EAGER)) for how in ({}, divided())]
    compare(pairs)


def cut(folder: Path) -> None:
    """A table that is larger than a share: each process has the state of some rows."""
    n, rank = dist.get_world_size(), dist.get_rank()
    storages = ("compact", "exact", Storage("kahan", "8bit"))
    ways: list[Any] = [("adamw", torch.bfloat16, {"storage": x}) for x in storages]
    ways += [(name, torch.float32, {}) for name in ("adamw", "sgd")]
    ways += [("schedule_free_adamw", torch.bfloat16, {})]
    ways = ways[::5] if n == 2 else ways  # of all with more processes
    for name, dtype, own in ways:
        given = {"lr": 1e-2, "weight_decay": 0.1, **own, **EAGER}
        given |= {"momentum": 0.9} if name == "sgd" else {}
        pairs = [
            (m := Tied(dtype), CLASSES[name](m.named_parameters(), **given, **how))
            for how in ({}, divided())
        ]
        compare(pairs)
        (_, alone), (model, optimizer) = pairs
        table = model.table.weight
        entry, part = optimizer.state[table], optimizer.part_of(table)
        assert optimizer.owns(table) and len(part) in (1003 // n, 1003 // n + 1)
        start = 64 * table.itemsize * (1003 * rank // n)
        assert part.data_ptr() == table.data_ptr() + start
        kept = [x for x in entry.values() if x.dim()]
        assert kept and {len(x) for x in kept} == {len(part)}
        # Loading, on the other side too, and rows that begin anew.
        states = [copy.deepcopy(x.state_dict()) for _, x in pairs]
        assert alone.describe() != optimizer.describe()
        for (m, x), state in zip(pairs, reversed(states)):
            x.load_state_dict(state)
            x.reset(m.table.weight, rows=[0, 500, 1002])
            if name == "schedule_free_adamw":
                x.eval()
        assert_equal(*[m for m, _ in pairs])
        for _, x in pairs if name == "schedule_free_adamw" else ():
            x.load_state_dict(copy.deepcopy(x.state_dict()))
            x.train()
        compare(pairs, range(3, 5))
    pairs = [
        (m := Tied(), MuonAdamW(m, lr=1e-2, **how, **EAGER)) for how in ({}, divided())
    ]
    for _, x in pairs:
        x.track()
    compare(pairs)
    first, other = [x.stats("parameter") for _, x in pairs]
    for key, row in first.items():
        for name, x in row.items():
            assert abs(x - other[key][name]) <= 1e-6 * abs(x), (key, name)
    # What is not elementwise is not cut, and neither is what has fewer rows.
    for how in ({"cautious": True}, {}):
        p = nn.Parameter(torch.ones(1000, 64) if how else torch.ones(1, 64000))
        optimizer = AdamW([p], lr=0.1, **how, **divided(), **EAGER)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.part_of(p) is p
    # One vector, cut at multiples of groups of codes.
    for how in ({}, divided()):
        p = nn.Parameter(torch.linspace(-1, 1, 40001).bfloat16())
        optimizer = AdamW([("p", p)], lr=0.1, storage="compact", **how, **EAGER)
        for _ in range(2):
            p.grad = p.detach().clone()
            optimizer.step()
        pairs.append((p, optimizer))
    (one, alone), (p, optimizer) = pairs[-2:]
    assert torch.equal(one, p)
    assert_same_state(optimizer.state_dict(), alone.state_dict())
    alone.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(alone.state_dict())
    assert_same_state(optimizer.state_dict(), alone.state_dict())


def planned(folder: Path) -> None:
    """memory.plan counts the state of the largest owner, as it is alive."""
    n = dist.get_world_size()
    for cls, own, net_of in (
        (AdamW, {}, Tied),
        (AdamW, {}, net),
        (MuonAdamW, {}, Tied),
        (SGD, {"momentum": 0.9}, Tied),
    ):
        given: Any = {"device": "cpu", "divide_state": True, **own}
        plan = memory.plan(net_of(), cls, "1GB", ranks=n, **given)
        for recipe in plan.recipes[::3]:
            how: Any = {"lr": 1e-2, "process_group": dist.group.WORLD, **EAGER}
            optimizer, release = recipe.apply(model := net_of(), **how)
            assert release is None and optimizer.divides
            optimizer.init_state()
            found = torch.tensor(nbytes(optimizer))
            dist.all_reduce(found, dist.ReduceOp.MAX)
            assert found == recipe.state, (cls, recipe.name)
            assert recipe.parameters == sum(p.nbytes for p in model.parameters())
    assert f"state divided among {n} ranks" in str(plan)
    with raises(ValueError, "divide_state=True with prodigy"):
        memory.plan(net(), Prodigy, "1GB", ranks=n, divide_state=True)
    with raises(ValueError, "divide_state=True with ranks=1"):
        memory.plan(net(), AdamW, "1GB", divide_state=True)


def all_rules(folder: Path) -> None:
    """Every rule, also in bfloat16, and in a table by name."""
    for name, dtype in itertools.product(CLASSES, (torch.float32, torch.bfloat16)):
        if name != "prodigy":
            compare([(m := net(dtype), made(name, m, **how)) for how in ({}, divided())])
    parts = ("blocks.*", lion(lr=1e-3)), ("*", adamw(lr=1e-2))
    pairs = [
        (m := net(), Mixed(m.named_parameters(), *parts, **how, **EAGER))
        for how in ({}, divided())
    ]
    compare(pairs)


def loops(folder: Path) -> None:
    """Accumulation, clipping, skipped steps, schedules, sleeping parameters."""
    model_pairs = [
        (m := net(), AdamW(m.parameters(), lr=1e-2, **how, **EAGER))
        for how in ({"skip_nonfinite": "step"}, divided() | {"skip_nonfinite": "step"})
    ]
    for model, optimizer in model_pairs:
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        for i in range(6):
            for part in range(2):
                loss(model, 2 * i + part).backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            if i == 2 and (dist.get_rank() == 1 or not optimizer.divides):
                model.head.weight.grad[0, 0] = float("nan")
            if i == 3:  # in no process
                model.norm.weight.grad = None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == 1
    assert_equal(*[model for model, _ in model_pairs])
    pairs = [
        (m := net(), AdamW(m.parameters(), lr=1e-2, **how, **EAGER))
        for how in ({}, divided())
    ]
    for model, optimizer in pairs:
        for i in range(4):  # optimi's accumulation
            optimizer.optimizer_accumulation = i % 2 == 0
            loss(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(*[model for model, _ in pairs])


def groups(folder: Path) -> None:
    """Frozen ones, ones that train later, and groups that come later; owners stay."""
    pairs: list[Any] = []
    for how in ({}, divided()):
        model = net()
        model.blocks[0].requires_grad_(False)
        first = [*model.blocks.named_parameters()]
        optimizer = AdamW(first, lr=1e-2, **how, **EAGER)
        train(model, optimizer, range(2))
        kept = dict(optimizer.owners()) if how else {}
        model.blocks[0].requires_grad_(True)
        rest = [(k, p) for k, p in model.named_parameters() if not k.startswith("blocks")]
        optimizer.add_param_group({"params": rest, "lr": 3e-2})
        train(model, optimizer, range(2, 4))
        if how:
            owners = optimizer.owners()
            assert len(owners) == len([*model.parameters()]) > len(kept)
            assert all(owners[p] == owner for p, owner in kept.items())
        pairs.append((model, optimizer))
    compare(pairs, range(4, 5))
    # More processes than parameters.
    for how in ({}, divided()):
        p = nn.Parameter(torch.ones(3))
        optimizer = Lion([p], lr=0.1, **how, **EAGER)
        for lr in (0.0, 0.1):  # a true step with zeros, and one that moves
            optimizer.param_groups[0]["lr"] = lr
            p.grad = torch.full((3,), lr)
            optimizer.step()
        pairs.append(p.detach())
    assert torch.equal(pairs[-1], pairs[-2])


def messages(folder: Path) -> None:
    """Two small messages, and few that are full, whatever the number of parameters."""
    n = dist.get_world_size()
    for blocks, dtype in ((2, torch.float32), (12, torch.bfloat16)):
        model = Net(24, blocks).to(dtype)
        model.norm.float()
        model.norm.forward = lambda x, f=model.norm.forward, d=dtype: f(x.float()).to(d)
        groups = [{"params": [p], "lr": 1e-2} for p in model.parameters()]
        optimizer = AdamW(groups, **divided(), **EAGER)
        train(model, optimizer, range(2))
        loss(model, 0).backward()
        with counted() as names:
            optimizer.step()
        assert names == ["all_gather", *["broadcast"] * n, "all_gather"], names
        with counted() as names:
            optimizer.state_dict()
        gathers = [name for name in names if name == "broadcast_object_list"]
        assert len(gathers) == n
    # Those that are larger than a message, in one each, in place.
    params = [nn.Parameter(torch.ones(1 << 22)) for _ in range(2 * n)]
    optimizer = SGD(params, lr=0.5, **divided(), **EAGER)
    for p in params:
        p.grad = torch.ones_like(p)
    versions = [p._version for p in params]
    with counted() as names:
        optimizer.step()
    assert names == ["all_gather", *["broadcast"] * 2 * n, "all_gather"], names
    assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in params)
    assert all(p._version > v for p, v in zip(params, versions))


def differ(folder: Path) -> None:
    """What differs by process is an error in all of them, before anything is written."""
    rank = dist.get_rank()
    model = net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, **divided(), **EAGER)
    train(model, optimizer, range(2))
    names = dict(model.named_parameters())
    lead = next(p for p, owner in optimizer.owners().items() if owner == 1)

    def refused(text: str, kind: type[Exception] = ValueError) -> None:
        before = copy.deepcopy(model.state_dict())
        state = {
            p: {k: x.clone() for k, x in e.items()} for p, e in optimizer.state.items()
        }
        with raises(kind, text):
            optimizer.step()
        assert all(torch.equal(x, before[k]) for k, x in model.state_dict().items())
        for p, entry in state.items():
            assert all(torch.equal(x, optimizer.state[p][k]) for k, x in entry.items())

    for lacks in (["head.bias"], ["table.weight", "norm.bias"], [*names]):
        loss(model, 3).backward()
        for name in lacks if rank == 1 else []:
            names[name].grad = None
        refused(
            f"without a gradient in param group 0: process 1 of the group has ['{lacks[0]}'"
        )
    loss(model, 3).backward()
    optimizer.param_groups[0]["lr"] = 1e-2 * (1 + rank)
    refused("lr of param group 0: process 1 of the group has 0.02")
    optimizer.param_groups[0]["lr"] = 1e-2
    # An error of one process, the owner: the others hear of it.
    kept, optimizer.state[lead]["exp_avg"] = (
        optimizer.state[lead].get("exp_avg"),
        torch.ones(1),
    )
    if rank != 1:
        del optimizer.state[lead]
    refused(
        "has shape (1,)" if rank == 1 else "an error: process 1 of the group has ValueError"
    )
    if rank == 1:
        optimizer.state[lead]["exp_avg"] = kept
    # A checkpoint that one process alone makes.
    with raises(ValueError, "the call: process 1 of the group has a step"):
        optimizer.state_dict() if rank == 0 else optimizer.step()
    optimizer.step()
    other = net()
    if rank:
        other.head.bias.data += 1
    fresh = AdamW(other.parameters(), lr=1e-2, **divided(), **EAGER)
    loss(other, 0).backward()
    with raises(ValueError, "hashes of parameters"):
        fresh.step()
    assert not fresh.state
    # A process that takes no step at all ends the others' wait when the group's time is up.
    group = dist.new_group(timeout=timedelta(seconds=2))
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    if rank == 0:
        own = {"process_group": group, "divide_state": True}
        with raises(RuntimeError, "other processes do not do the same"):
            AdamW([("w", p)], lr=0.1, **own, **EAGER).step()
        assert torch.equal(p, torch.ones(4, 4))
    dist.barrier()


def failures(folder: Path) -> None:
    """An owner that fails while others wait for its parameters: all raise, at once."""
    rank = dist.get_rank()
    said = "an error: process 1 of the group has "
    for release in (False, True):
        model = net()
        own = {"lr": 1e-2, "gradient_release": release, **divided(), **EAGER}
        optimizer = AdamW(model.named_parameters(), **own)
        given = {"process_group": dist.group.WORLD, "bucket_cap_mb": 0.02}
        handle = (
            prepare_for_gradient_release(model, optimizer, **given) if release else None
        )
        assert handle is None or optimizer.releases

        def one(i: int, model: Any = model, optimizer: Any = optimizer) -> None:
            loss(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()

        one(0)
        lead = next(p for p, owner in optimizer.owners().items() if owner == 1)
        if release:  # what is checked before a bucket is written
            if rank == 1:
                kept = optimizer.state[lead]["exp_avg"]
                optimizer.state[lead]["exp_avg"] = torch.ones(1)
            with raises(ValueError, said + "ValueError: state['"):
                one(1)
            if rank == 1:
                optimizer.state[lead]["exp_avg"] = kept
        run = ClassPlan.run
        if rank == 1:  # while it writes

            def fails(*args: Any, **how: Any) -> Any:
                raise MemoryError("too little")

            ClassPlan.run = fails
        try:
            with raises(ValueError, said + "MemoryError: too little"):
                one(2)
        finally:
            ClassPlan.run = run
        # What all processes share is equal still, and they go on.
        for p in model.parameters():
            p.grad = None
        one(3)
        for p in model.parameters():
            told = p.detach().clone()
            dist.broadcast(told, 0)
            assert torch.equal(told, p)


def options(folder: Path) -> None:
    """What cannot be divided is refused by name; what is asked of a share too."""
    w = [nn.Parameter(torch.ones(4, 4))]
    with raises(ValueError, "divide_state=True without process_group"):
        AdamW(w, lr=0.1, divide_state=True)
    with raises(TypeError, "divide_state='yes'"):
        AdamW(w, lr=0.1, process_group=dist.group.WORLD, divide_state="yes")
    with raises(ValueError, "process_group= with adamw, which maps no matrices"):
        AdamW(w, lr=0.1, process_group=dist.group.WORLD)
    shard = nn.Parameter(distribute_tensor(torch.ones(4, 4), flat_mesh(), [Shard(0)]))
    for cls, given, more, text in (
        (AdamW, [shard], {}, "a DTensor"),
        (Prodigy, w, {}, "prodigy, which joins sums"),
    ):
        with raises(ValueError, f"divide_state=True with {text}"):
            cls(given, lr=0.1, **more, **divided())
    optimizer = AdamW(w, lr=0.1, **divided())
    with raises(ValueError, "divide_state=True with a DTensor"):
        optimizer.add_param_group({"params": [shard]})
    assert len(optimizer.param_groups) == 1
    model = net()
    optimizer = AdamW(model.named_parameters(), lr=0.1, **divided(), **EAGER)
    pure, state = AdamW(net().named_parameters(), lr=0.1, **EAGER).functional()
    del pure
    for call in (
        lambda: copy.deepcopy(optimizer),
        lambda: optimizer.functional(),
        lambda: optimizer.load_functional(state),
        lambda: optimizer.master_state_dict(model),
        lambda: EMA(optimizer).averages,
        lambda: optimizer.load_master_state_dict(model, model.state_dict()),
        lambda: compiled.train_step(
            model, nn.functional.mse_loss, AdamW(model.parameters(), lr=0.1, **divided())
        ),
    ):
        with raises(ValueError, "divide_state=True: "):
            call()
    text = optimizer.describe()
    train(model, optimizer, range(1))
    assert optimizer.describe() == text  # of the share, before and after it is made
    assert "divide_state" not in str(optimizer.state_dict()) + repr(optimizer)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    optimizer = AdamW(w, lr=0.1, process_group=alone, divide_state=True, **EAGER)
    assert not optimizer.divides


def tracked(folder: Path) -> None:
    """stats() are those of the undivided steps, in all processes."""
    for skips in ({}, {"skip_nonfinite": "step"}):
        found: list[Any] = []
        for how in ({}, divided()):
            model = net()
            groups = [{"params": [x]} for x in model.named_parameters()][1:]
            optimizer = AdamW(groups, lr=1e-2, **how, **skips, **EAGER)
            optimizer.param_groups[2]["lr"] = 0.5
            optimizer.track()
            train(model, optimizer, range(2))
            if skips:
                loss(model, 2).mul(torch.nan).backward()
                optimizer.step()
                optimizer.zero_grad()
            ways = "group", "parameter", ["blocks.0.*", "head.*"]
            found.append([optimizer.stats(by) for by in ways])
        for one, other in zip(*found):
            assert one.keys() == other.keys()
            for key, row in one.items():
                assert row.keys() == other[key].keys()
                for name, x in row.items():
                    assert abs(x - other[key][name]) <= 1e-12 * abs(x), (key, name)
        assert found[0][0]["all"]["skipped"] == (1 / 3 if skips else 0.0)
        assert found[1][0]["2"]["lr"] == 0.5


def averages(folder: Path) -> None:
    """eval() and train() of Schedule-Free reach all processes; reset() each its own."""
    pairs = [
        (m := net(), ScheduleFreeAdamW(m.named_parameters(), lr=1e-2, **how, **EAGER))
        for how in ({}, divided())
    ]
    for model, optimizer in pairs:
        train(model, optimizer, range(3))
        optimizer.eval()
    assert_equal(*[model for model, _ in pairs])
    # A checkpoint in eval mode, into the other one.
    (one, alone), (model, optimizer) = pairs
    states = [copy.deepcopy(x.state_dict()) for x in (alone, optimizer)]
    alone.load_state_dict(states[1])
    optimizer.load_state_dict(states[0])
    for x in (alone, optimizer):
        x.train()
        x.reset(
            dict(one.named_parameters() if x is alone else model.named_parameters())[
                "head.weight"
            ]
        )
    assert_equal(one, model)
    compare(pairs, range(3, 5))


def emas(folder: Path) -> None:
    """EMA: an owner's averages, swapped in and out everywhere, saved whole and loaded."""
    ways: list[Any] = [
        lambda **how: (m := net(), AdamW(m.named_parameters(), lr=1e-2, **how)),
        lambda **how: (m := Tied(torch.bfloat16), AdamW(m.parameters(), lr=1e-2, **how)),
        lambda **how: (m := net(), ScheduleFreeAdamW(m.parameters(), lr=1e-2, **how)),
    ]
    for made in ways:
        pairs, states, kept = list[Any](), list[Any](), list[Any]()
        for how in ({}, divided(), divided()):
            model, optimizer = made(**how, **EAGER)
            average = EMA(optimizer, 0.9)
            if len(pairs) == 2:  # it goes on from the undivided one
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
                average.load_state_dict(kept[2])
            for i in range(3, 5) if len(pairs) == 2 else range(5):
                if i == 3 and not how:
                    parts = model, optimizer, average
                    kept = [copy.deepcopy(x.state_dict()) for x in parts]
                train(model, optimizer, range(i, i + 1))
                average.update()
            before = copy.deepcopy(model.state_dict())
            with average.applied():
                states.append(copy.deepcopy(model.state_dict()))
                with raises(RuntimeError, "inside of EMA.applied()"):
                    optimizer.step()
            for name, x in model.state_dict().items():
                assert torch.equal(x, before[name])
                assert x.dim() < 2 or not torch.equal(x, states[-1][name]), name
            pairs.append((average.state_dict(), average))
        (want, alone), *others = pairs
        sizes = [sum(x.nbytes for x in e._averages.values()) for _, e in pairs]
        for (state, _), size in zip(others, sizes[1:]):
            assert size <= sizes[0] * (1 / dist.get_world_size() + 0.06)
            assert [*state["averages"]] == [*want["averages"]]
            for name, x in want["averages"].items():
                assert torch.equal(x, state["averages"][name]), name
            assert state["updates"] == 5 and state["weight"] == want["weight"]
        for state in states[1:]:
            assert all(torch.equal(x, state[name]) for name, x in states[0].items())
        alone.load_state_dict(others[0][0])
        with raises(ValueError, "the call: process 1 of the group has state_dict()"):
            if dist.get_rank() == 1:
                others[0][1].optimizer.state_dict()
            others[0][1].applied().__enter__()


def released(folder: Path) -> None:
    """Release on replicas: a gradient is summed at its owner, which updates and sends."""
    n, rank = dist.get_world_size(), dist.get_rank()
    buffer = {"accumulation": "buffer", "accumulation_steps": 2}
    makers: list[Any] = [
        lambda m, **how: AdamW(m.named_parameters(), lr=1e-2, **how, **EAGER),
        lambda m, **how: MuonAdamW(m, lr=1e-2, **how, **EAGER),
        lambda m, **how: AdamW(m.parameters(), lr=1e-2, storage="compact", **how, **EAGER),
    ]
    ways: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"clip_value": 1e-3}, True),
        (buffer, True),
        ({"accumulation": "states", "accumulation_steps": 2}, True),
        ({"clip_param_norm": 0.01}, False),
        ({"clip_global_norm": 0.1, "grad_norm": True}, False),
        ({"skip_nonfinite": True}, False),
        ({**buffer, "accumulation_steps": None, "skip_nonfinite": "step"}, False),
    ]
    measured = {}, {"skip_nonfinite": True}, {"clip_param_norm": 0.01}
    for make, (options, reduces) in itertools.product(makers, ways):
        if make is not makers[0] and options not in ({}, buffer):
            continue
        pairs: list[Any] = []
        for how in ({}, divided()):
            dtype = torch.bfloat16 if make is makers[2] else torch.float32
            model = Net(24, 3).to(dtype)
            optimizer = make(model, gradient_release=True, **how)
            given = {"process_group": dist.group.WORLD, "bucket_cap_mb": 0.02, **options}
            handle = prepare_for_gradient_release(model, optimizer, **given)
            if options in measured:
                optimizer.track()
            for i in range(4):
                with counted() as names:
                    handle.backward(lambda i=i, m=model: loss(m, n * i + rank))
                    if i % 2 or "accumulation" not in options:
                        optimizer.step()
                        optimizer.zero_grad()
            assert ("reduce" in names) == (bool(how) and reduces), (options, names)
            if how and not options:  # a bucket's gradients and their numbers; parameters
                assert names.count("reduce") == names.count("broadcast") >= n, names
                assert names.count("all_reduce") == names.count("reduce")
                assert names.count("all_gather") == 2  # of step(), which finds no gradient
            whole = copy.deepcopy(optimizer.state_dict())
            pairs.append((model, optimizer, handle, whole))
        (one, alone, first, kept), (model, optimizer, handle, whole) = pairs
        assert nbytes(optimizer) <= nbytes(alone) * (1 / n + 0.06)
        assert first.skipped == handle.skipped
        if options in measured:
            both = [x.stats("parameter") for x in (alone, optimizer)]
            for key, row in both[0].items():
                for name, x in row.items():
                    assert abs(x - both[1][key][name]) <= 1e-2 * abs(x), (key, name)
        # More add in an order that depends on the place in the bucket, as norms do.
        if n == 2 and "clip_global_norm" not in options:
            assert_equal(one, model)
            assert_same_state(whole, kept)
        for p, q in zip(one.parameters(), model.parameters()):
            near = 3e-2 if p.dtype == torch.bfloat16 else 1e-3
            assert torch.allclose(p.float(), q.float(), rtol=near, atol=near)
        told = [x.detach().clone() for x in model.parameters()]
        for x, p in zip(told, model.parameters()):
            dist.broadcast(x, 0)
            assert torch.equal(x, p)
        handle.remove()
        # It goes on from the undivided one's state, and without release.
        model.load_state_dict(one.state_dict())
        optimizer.load_state_dict(kept)
        first.remove()
        for x, its in ((one, alone), (model, optimizer)):
            loss(x, 9).backward()
            its.step()
        assert_equal(one, model)
    model = Net(24, 3)
    optimizer = makers[0](model, gradient_release=True, **divided())
    other = dist.new_group([*range(n)])
    for given in ({}, {"process_group": other}):
        with raises(ValueError, "divide_state=True of the optimizer, whose process_group"):
            prepare_for_gradient_release(model, optimizer, **given)
    loss(model, 0).backward()
    with raises(ValueError, "divide_state=True with step(param=...)"):
        optimizer.step(param=model.head.weight)


def cut_released(folder: Path) -> None:
    """Release: of the gradient of what is cut each owner sums its rows alone."""
    n, rank = dist.get_world_size(), dist.get_rank()
    states = {"accumulation": "states", "accumulation_steps": 2}
    for dtype, storage, options in (
        (torch.float32, None, {}),
        (torch.bfloat16, "compact", states),
        (torch.float32, None, {"clip_param_norm": 0.01}),
    ):
        pairs: list[Any] = []
        for how in ({}, divided()):
            model = Tied(dtype)
            own = {"gradient_release": True, "storage": storage, **how, **EAGER}
            optimizer = AdamW(model.named_parameters(), lr=1e-2, **own)
            given = {"process_group": dist.group.WORLD, "bucket_cap_mb": 0.1, **options}
            handle = prepare_for_gradient_release(model, optimizer, **given)
            if not states.items() <= options.items():
                optimizer.track()
            for i in range(4):
                with counted() as names:
                    handle.backward(lambda i=i, m=model: loss(m, n * i + rank))
            if how and not options:
                assert names.count("reduce") == names.count("broadcast")
                assert names.count("reduce") >= names.count("all_reduce") + n - 1
            whole = copy.deepcopy(optimizer.state_dict())
            pairs.append((model, optimizer, whole))
        (one, alone, kept), (model, optimizer, whole) = pairs
        assert len(optimizer.part_of(model.table.weight)) < 1003
        assert nbytes(optimizer) <= nbytes(alone) * (1 / n + 0.05)
        if n == 2:
            assert_equal(one, model)
            assert_same_state(whole, kept)
        for p, q in zip(one.parameters(), model.parameters()):
            near = 3e-2 if p.dtype == torch.bfloat16 else 1e-3
            assert torch.allclose(p.float(), q.float(), rtol=near, atol=near)
        for p in model.parameters():
            told = p.detach().clone()
            dist.broadcast(told, 0)
            assert torch.equal(told, p)


def checkpoints(folder: Path) -> None:
    """Whole state dicts and torch's, between undivided ones and two groups of processes."""
    n, rank = dist.get_world_size(), dist.get_rank()
    halves = [dist.new_group([*range(k, k + n // 2)]) for k in (0, n // 2)]
    half = {"process_group": halves[rank >= n // 2], "divide_state": True}
    ways = {"alone": {}, "half": half, "all": divided()}
    flat = sd.StateDictOptions(flatten_optimizer_state_dict=True)

    def make(how: Any) -> tuple[Any, Any]:
        model = Tied(torch.bfloat16)  # whose table is cut
        own = {"lr": 1e-2, "storage": "compact", **how, **EAGER}
        return model, MuonAdamW(model, **own)

    want, optimizer = make({})
    train(want, optimizer, range(2))
    middle = copy.deepcopy(want.state_dict())
    train(want, optimizer, range(2, 4))
    for name, how in ways.items():
        model, optimizer = make(how)
        train(model, optimizer, range(2))
        whole = copy.deepcopy(optimizer.state_dict())
        for form, choice in (("by name", None), ("flat", flat)):
            state = sd.get_optimizer_state_dict(model, optimizer, options=choice)
            dcp.save(state, checkpoint_id=folder / f"{name} {form}")
        dcp.save({"optimizer": whole}, checkpoint_id=folder / f"{name} whole")
        for other in ways.values():
            resumed, its = make(other)
            resumed.load_state_dict(middle)
            its.load_state_dict(whole)
            assert all(its.owns(p) for p in its.state)
            train(resumed, its, range(2, 4))
            assert_equal(resumed, want)
            for form, choice in (("by name", None), ("flat", flat)):
                resumed, its = make(other)
                resumed.load_state_dict(middle)
                state = sd.get_optimizer_state_dict(resumed, its, options=choice)
                dcp.load(state, checkpoint_id=folder / f"{name} {form}")
                sd.set_optimizer_state_dict(resumed, its, state, options=choice)
                train(resumed, its, range(2, 4))
                assert_equal(resumed, want)
            resumed, its = make(other)
            resumed.load_state_dict(middle)
            its.init_state()
            state = {"optimizer": its.state_dict()}
            dcp.load(state, checkpoint_id=folder / f"{name} whole")
            its.load_state_dict(state["optimizer"])
            train(resumed, its, range(2, 4))
            assert_equal(resumed, want)
