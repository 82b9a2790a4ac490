"""Maps of whole tensors that processes divide: one owner each, the same bits, on gloo."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mapped import Mapped, mapped
from measured import allocated_by
from one_process import Steps, Way, as_one_process, plane, states, ways
from shards import (
    EAGER,
    assert_close,
    by_rows,
    flat_mesh,
    loss_of,
    placed,
    snapshot,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode
from worlds import gathered, raises, world

from optimi_func import (
    Adafactor,
    Muon,
    MuonAdamW,
    NorMuon,
    adafactor,
    muon,
    normuon,
    prepare_for_gradient_release,
)
from optimi_func.core.distributed import to_local
from optimi_func.gradient_release import runner
from optimi_func.rules import Optimizer, Shaped

Shapes = list[tuple[int, ...]]
# A small transformer's; then odd ones, a stack and a convolution.
TRANSFORMER: Shapes = [(96, 32), (32, 32), (128, 32), (32, 128)] * 4
ODD: Shapes = [(7, 5), (3, 6, 4), (8, 2, 3, 3), (5, 9)]


class Seen:
    """The flops and messages of the last step, and the elements it got from others."""

    @contextmanager
    def step(self) -> Iterator[None]:
        self.names: list[str] = []
        self.elements = 0
        kept = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather")}

        def message(name: str, out: Any, given: Tensor, *args: Any, **how: Any) -> Any:
            self.names.append(name)
            own = args[0][dist.get_rank(how["group"])] if args else given.numel()
            self.elements += sum(x.numel() for x in out) - own
            return kept[name](out, given, *args, **how)

        for name in kept:
            setattr(dist, name, partial(message, name))
        try:
            with CommDebugMode() as messages, FlopCounterMode(display=False) as flops:
                yield
            # Those of any kind.
            self.messages, self.flops = messages.get_total_counts(), flops.get_total_flops()
        finally:
            for name, function in kept.items():
                setattr(dist, name, function)


@cache
def muons(*shapes: Any) -> Steps:
    return Steps(partial(Muon, lr=0.02, **EAGER), shapes, count=2)


@cache
def alone(*shapes: Any) -> tuple[Seen, int]:
    """Return what one process does, and the most bytes that it allocates at once."""
    seen = Seen()
    end = muons(*shapes).run(lambda x: x, seen.step)
    assert not seen.names
    return seen, allocated_by(end.optimizer.step, tries=4)


def divided(shapes: Shapes, way: Way) -> tuple[Seen, int]:
    """Return what this process does of a step, which is that of one process."""
    seen = Seen()
    steps, how = muons(*shapes), {"around": seen.step, **way.options}
    end = as_one_process(steps, way.place, about=way.name, **how)
    return seen, allocated_by(end.optimizer.step, tries=4)


class Normed(Optimizer):
    """Momentum of gradients over their norms: a number for each parameter."""

    class State(NamedTuple):
        exp_avg: Shaped
        square: Shaped

    def init(self, p: Tensor) -> Any:
        return self.State(None, ())  # type: ignore

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State):
        square = 0.9 * s.square + (d * d).sum()
        m = 0.9 * s.exp_avg + d / (square.sqrt() + 1e-6)
        return m, self.State(m, square)


@world(full=[2, 4])
def test_fields_of_a_map_and_the_parameters_that_it_reads_travel_too() -> None:
    """A map's own state and the parameters that it reads travel too, in as many messages.

    Bit for bit as in one process, also for low dtypes, saved and loaded again, in a tree
    and where every process maps all.
    """
    n = dist.get_world_size()
    there_and_back = ["all_to_all_single"] * 2
    messages = {name: there_and_back for name in ("rows", "columns", "copies of rows")}
    messages |= {"copies": ["all_gather"], "plain copies": ["all_gather"]}
    messages["rows and columns"] = []
    # What two have not shown.
    names = ("rows", "copies of rows", "rows and columns") if n == 4 else messages
    dtypes = (torch.float32,) if n == 4 else (torch.float32, torch.bfloat16)
    shapes = [*ODD, (0, 3), (9, 1)]
    even: Shapes = [(8, 5), (3, 6, 4), (8, 2, 3, 3), (2, 0)]
    factored = {"scale_parameter": True, "beta1": 0.9, "flatten": True}
    split = {"split": 2, "hyperball": True, "weight_decay": 0.0}
    rules: list[Any] = [
        (Mapped, mapped, {}, shapes),
        (Adafactor, adafactor, factored, shapes),
        (Normed, Normed.pure, {}, shapes),
        (NorMuon, normuon, {"split": 2}, even),
        (Muon, muon, {"element_beta": 0.9, "adjust_lr_fn": "nuclear"}, even),
        (NorMuon, normuon, {"split": {"columns": 2}, "transposed": True}, even),
        (Muon, muon, split, even),
    ]
    for (cls, factory, own, some), dtype in product(rules, dtypes):
        own, seen = {"lr": 0.1, "weight_decay": 0.01, **own}, Seen()
        make, value = partial(cls, **own, **EAGER), factory(**own)
        steps = Steps(make, some, dtype, 4, value=value, reloads=True)
        for way in ways(*names):
            about, how = (cls, way.name, dtype), {"around": seen.step, **way.options}
            end = as_one_process(steps, way.place, about=about, **how)
            wanted = messages[way.name]
            if "hyperball" in own:  # whose stack a second dimension divides
                wanted = wanted or there_and_back
            # The first tells that all have the same to do.
            assert seen.names == ["all_gather"] * bool(wanted) + wanted, about
            sides = [x for x in states(end).values() if x.shape == (3, 2)]
            for x in sides if way.name not in ("copies", "plain copies") else []:
                assert x.placements[-1] == Shard(0), about
    # Vectors and scalars, which only their first dimension or nothing cuts.
    (rows,) = ways("rows")

    def place(x: Tensor) -> Any:
        return rows.place(x) if x.dim() else placed(flat_mesh(), Replicate())(x)

    as_one_process(Steps(partial(Adafactor, lr=0.1, **EAGER), [(7,), ()]), place)


@world(full=[2, 4])
def test_each_matrix_has_one_owner_and_the_step_is_that_of_one_process() -> None:
    """The work of a process, its messages and bytes; the step is that of one process."""
    n = dist.get_world_size()
    # Each shard goes to its owner and comes back; each result goes to every copy.
    shards = ["all_to_all_single"] * 2, 1 / n, 2 * (n - 1) / n**2
    copies = ["all_gather"], 1 / n, (n - 1) / n
    known: dict[str, Any] = {"rows": shards, "columns": shards}
    known |= {"copies": copies, "plain copies": copies}
    known["copies of rows"] = shards[0], 1 / 2, 1 / 2
    if n == 4:
        # Two dimensions cut: every process gathers and maps all.
        few, (way,) = [(7, 5), (8, 2, 3, 3)], ways("rows and columns")
        seen, _ = divided(few, way)
        assert (seen.flops, seen.names) == (alone(*few)[0].flops, [])
    for shapes in (TRANSFORMER + ODD, ODD):
        whole, elements = alone(*shapes)[0].flops, sum(map(math.prod, shapes))
        for way in ways(*known):
            (seen, _), (names, work, received) = divided(shapes, way), known[way.name]
            # First, in a few bytes, that all have the same to do.
            assert seen.names == ["all_gather", *names], (way.name, seen.names)
            every = gathered((seen.flops, seen.elements))
            assert sum(x for x, _ in every) == n * work * whole, way.name
            for flops, count in every if shapes is not ODD else []:
                assert abs(flops / whole - work) < 2e-3, (way.name, flops / whole)
                assert abs(count / elements - received) < 0.02, (way.name, count / elements)


@world(full=[2, 4])
def test_fewer_matrices_than_processes_and_one_that_is_larger_than_all() -> None:
    n = dist.get_world_size()
    some: list[Shapes] = [[(64, 64), *[(8, 8)] * 6], [(5, 7)], [(0, 3), (4, 4)]]
    for way, shapes in product(ways("rows", "plain copies"), some):
        every = sorted(gathered(divided(shapes, way)[0].flops))
        largest = alone(shapes[0])[0].flops
        if len(shapes) == 7:  # its owner has nothing else
            assert every[-1] == largest
        if len(shapes) == 1:
            assert every == [0] * (n - 1) + [largest]


@world(full=[2, 4])
def test_experts_are_mapped_where_they_lie_or_divided_by_expert() -> None:
    """Messages, flops and bytes of each process; 5 experts leave one of 4 without any."""
    n = dist.get_world_size()
    copies, shards = ["all_gather"] * 2, ["all_gather", *["all_to_all_single"] * 2]
    deep = [Way("deep", placed(flat_mesh(), Shard(2)))]
    if n == 4:
        deep.append(Way("deep and rows", placed(plane(), Shard(2), Shard(0))))
    for count, cut in ((8, None), (5, [3, 2] if n == 2 else [2, 2, 1, 0])):
        parts = [count * (i + 1) // n - count * i // n for i in range(n)]
        quarters = [2, 2, 2, 2] if cut is None else [2, 1, 1, 1]
        known: dict[str, Any] = {
            "rows": ([], cut or parts),
            "copies": (copies, parts),
            "plain copies": (copies, parts),
            "deep": (shards, parts),
            "copies of rows": ([], [count // 2, count - count // 2] * 2),
            "rows of rows": ([], quarters),
            "rows and columns": (shards, quarters),
            "deep and rows": (shards, quarters),
        }
        (whole, most), shape = alone((count, 128, 64)), (count, 128, 64)
        for way in [x for x in (*ways(), *deep) if x.name in known]:
            (seen, held), (messages, experts) = divided([shape], way), known[way.name]
            about = way.name, seen.names, seen.messages
            assert seen.names == messages and (messages or not seen.messages), about
            every = sorted(gathered(seen.flops))
            assert every == [whole.flops * k // count for k in sorted(experts)], about
            # Copies have a whole direction, and gather results.
            share = max(experts) / count if not messages else 0.8
            assert held <= share * most + 2048, (about, held, most)
    # A process that has nothing else takes parts of two lengths of one bank.
    for way in ways("copies", "plain copies"):
        divided([(96, 96), (5, 8, 8)], way)


class Experts(nn.Module):
    """Eight experts, of which every one sees every row, in blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Parameter(torch.randn(8, 64, 96) / 8)
        self.down = nn.Parameter(torch.randn(8, 96, 64) / 80)

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.einsum("bi,eij->ebj", x, self.up).tanh() @ self.down).sum(0)


@world(full=[2, 4])
def test_a_bank_of_experts_waits_for_no_other_under_release() -> None:
    n, group = dist.get_world_size(), dist.group.WORLD
    for is_sharded, release in product((True, False), (False, True)):
        model = nn.Sequential(Experts(), Experts())
        for part in (*model, model) if is_sharded else ():
            fully_shard(part, mesh=flat_mesh())
        start, how = snapshot(model), {} if is_sharded else {"process_group": group}
        how |= {"gradient_release": release, **EAGER}
        optimizer = Muon(model.named_parameters(), lr=1e-2, **how)
        flops, counts = watched(optimizer)
        if release:
            prepare_for_gradient_release(model, optimizer)
        for i in range(2):
            torch.manual_seed(i)  # the same in all processes
            loss_of(model, torch.randn(3, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not release:
            ends = snapshot(model)
        assert_close(snapshot(model), ends, start, 1e-6)
        assert all(x == sum(flops) for x in gathered(sum(flops)))
        if release:
            assert [x for x in counts if x] == [1] * 8, counts
    alone = nn.Sequential(Experts(), Experts())
    optimizer = Muon(alone.named_parameters(), lr=1e-2, **EAGER)
    whole, _ = watched(optimizer)
    for i in range(2):
        torch.manual_seed(i)
        loss_of(alone, torch.randn(3, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(ends, snapshot(alone), start, 1e-5)
    assert n * sum(flops) == sum(whole)


class Blocks(nn.Module):
    """Equal blocks of two matrices with biases."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
            for _ in range(count)
        )
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def watched(optimizer: Any) -> tuple[list[int], list[int]]:
    """Note the flops of steps from now on, and how many matrices a released update has."""
    flops: list[int] = []
    counts: list[int] = []
    name = "update" if optimizer.defaults["gradient_release"] else "step"
    run = getattr(optimizer, name)

    def noted(*given: Any, **more: Any) -> Any:
        counts.extend([sum(p.dim() > 1 for p in params) for params in given[:1]])
        with FlopCounterMode(display=False) as counter:
            result = run(*given, **more)
        flops.append(counter.get_total_flops())
        return result

    setattr(optimizer, name, noted)
    return flops, counts


@world(full=[2, 4])
def test_matrices_wait_for_each_other_under_release() -> None:
    """Under release matrices wait for each other: else one owner would have them all."""
    n = dist.get_world_size()
    ends: list[list[Tensor]] = []
    for release, pending in ((False, 0), (True, 0), (True, runner.PENDING_BYTES)):
        model = Blocks(n)
        for block in (*model.blocks, model):
            fully_shard(block, mesh=flat_mesh())
        optimizer = MuonAdamW(model, lr=1e-2, gradient_release=release, **EAGER)
        flops, counts = watched(optimizer)
        runner.PENDING_BYTES = pending
        if release:
            prepare_for_gradient_release(model, optimizer)
        for i in range(2):
            torch.manual_seed(10 * i + dist.get_rank())
            loss_of(model, torch.randn(3, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(snapshot(model))
        assert all(map(torch.equal, ends[-1], ends[0]))
        every = gathered(sum(flops))
        assert all(abs(x / sum(every) - 1 / n) < 0.02 for x in every), (pending, every)
        # As many wait as there are processes, or all that are small; the head is AdamW's.
        if release:
            assert sum(counts) == 2 * (2 * n + 1)
            assert max(counts) in ((n, n + 1) if pending == 0 else (2 * n + 1,)), counts


@world(full=[2, 4])
def test_processes_that_lack_a_gradient_are_told_before_any_write() -> None:
    rank = dist.get_rank()
    for place, options in (
        (by_rows(), {}),
        (lambda x: x, {"process_group": dist.group.WORLD}),
    ):
        params = [(name, nn.Parameter(place(torch.ones(4, 4)))) for name in "abc"]
        optimizer = Muon(params, lr=0.1, **options, **EAGER)
        for lacks in ("", "a", "c", "abc"):
            for name, p in params:
                absent = rank == 1 and name in lacks
                p.grad = None if absent else place(torch.randn(4, 4))
            before = [to_local([p.detach()])[0].clone() for _, p in params]
            moments = copy.deepcopy(optimizer.state_dict())
            if lacks:
                with raises(RuntimeError, "each needs a gradient in all that"):
                    optimizer.step()
            else:
                optimizer.step()
            for (_, p), x in zip(params, before):
                assert torch.equal(to_local([p.detach()])[0], x) == bool(lacks)
            for i, entry in optimizer.state_dict()["state"].items() if lacks else []:
                for k, x in entry.items():
                    assert torch.equal(*to_local([x, moments["state"][i][k]]))
        for _, p in params:  # in none
            p.grad = None
        optimizer.step()
    # A process that takes no step at all ends the others' wait when the group's time is up.
    group = dist.new_group(timeout=timedelta(seconds=2))
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    if rank == 0:
        with raises(RuntimeError, "do not step the 1 parameters that this one does"):
            Muon([("w", p)], process_group=group, **EAGER).step()
    dist.barrier()


@world(full=[2, 4])
def test_weights_or_hyperparameters_that_differ_are_named_before_any_write() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(rank)
    own = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    torch.manual_seed(0)
    equal = copy.deepcopy(own)
    for p in equal.parameters():
        dist.broadcast(p.data, 0)
    for model in (own, equal):
        optimizer, seen = MuonAdamW(model, lr=0.1, process_group=group, **EAGER), Seen()
        kept = copy.deepcopy(model.state_dict())

        def step(model: Any = model, optimizer: Any = optimizer, seen: Any = seen) -> Any:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            with seen.step():
                optimizer.step()
            return seen.names

        if model is own:
            with raises(ValueError, "hashes of parameters, which process_group= says are"):
                step()
            assert not optimizer.state
        else:
            # One of them tells that all agree.
            assert step() == step() == ["all_gather"] * 2
            optimizer.load_state_dict(optimizer.state_dict())
            step()
            kept = copy.deepcopy(model.state_dict())
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
            with raises(ValueError, "lr of param group 0: process 1 of the group has 0.2"):
                step()
            # AdamW's part, which no message divides, is compared by the same one.
            optimizer.param_groups[0]["lr"] = 0.1
            bias = optimizer.param_groups[-1]
            bias["weight_decay"] = 0.01 * rank
            with raises(ValueError, "weight_decay of param group 2: process 1 of the"):
                step()
            bias["weight_decay"] = 0.0
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            model[0].bias.grad = None if rank else model[0].bias.grad
            with raises(ValueError, "parameters with gradients of param group 2: process"):
                optimizer.step()
        assert all(torch.equal(x, kept[k]) for k, x in model.state_dict().items())
    # Sharded ones too, which have other weights in each process.
    p = nn.Parameter(by_rows()(torch.randn(4, 4)))
    optimizer = Muon([("w", p)], lr=0.1, **EAGER)
    for i in range(2):
        p.grad = by_rows()(torch.randn(4, 4))
        if i:
            optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * rank
            with raises(ValueError, "momentum of param group 0: process 1"):
                optimizer.step()
        else:
            optimizer.step()


@world(full=[2])
def test_a_parameter_that_thaws_later_is_compared_and_steps_in_both_parts() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    model: Any = nn.Sequential(*layers)
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    how: dict[str, Any] = {"lr": 0.1, "adamw_lr": 0.01, **EAGER}
    optimizer = MuonAdamW(model, process_group=group, **how)
    other = MuonAdamW(alone, **how)

    def fill(net: Any, thawed: str, lacks: str = "") -> None:
        for name, p in net.named_parameters():
            p.requires_grad_(name[0] != "0" or thawed in (name, "all"))
            has = p.requires_grad and name != lacks
            p.grad = torch.full_like(p, 0.5) if has else None

    def both(thawed: str = "") -> None:
        for net, one in ((model, optimizer), (alone, other)):
            fill(net, thawed)
            one.step()
        for p, q in zip(model.parameters(), alone.parameters()):
            ours, theirs = optimizer.state[p], other.state[q]
            assert torch.equal(p, q) and ours.keys() == theirs.keys()
            assert all(torch.equal(x, theirs[k]) for k, x in ours.items())

    lacking = "parameters with gradients of param group"
    both()
    for thawed, lacks, lr, text in (
        ("0.weight", "", 0.01, "other processes do not step the"),
        ("0.bias", "", 0.01, lacking),
        ("", "4.weight", 0.01, lacking),
        ("", "4.bias", 0.01, lacking),
        ("", "", 0.02, "lr of param group 2: process 1 of the group has 0.02"),
    ):
        if rank:
            optimizer.param_groups[2]["lr"] = lr
        fill(model, thawed if rank else "", lacks if rank else "")
        with raises(Exception, text):
            optimizer.step()
        optimizer.param_groups[2]["lr"] = 0.01
        both()
    for _ in range(2):
        both("all")
    assert [optimizer.state[p]["step"].item() for p in model[0].parameters()] == [2, 2]


@world(full=[2])
def test_what_process_group_takes_and_that_no_state_or_copy_has_it() -> None:
    group = dist.group.WORLD
    for given in (0, "WORLD", dist.GroupMember.NON_GROUP_MEMBER):
        with raises(TypeError, "allowed are None and a group of torch.distributed"):
            Muon([nn.Parameter(torch.ones(2, 2))], process_group=given)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    with raises(TypeError, "process_group=0"):
        MuonAdamW(model, process_group=0)
    for optimizer in (
        MuonAdamW(model, process_group=group),
        Muon([model[0].weight], process_group=group),
    ):
        assert optimizer.process_group is group
        assert "process_group" not in str(optimizer.state_dict()) + repr(optimizer)
        assert copy.deepcopy(optimizer).process_group is None
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.process_group is group


@world(full=[2, 4])
def test_what_ends_a_step_without_a_gradient_is_in_one_order_everywhere() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(8)])
    # The order of a set of parameters depends on their addresses.
    held = [
        nn.Parameter(p.detach()) for p in model.parameters() for _ in range(dist.get_rank())
    ]
    for part in (*model, model):
        fully_shard(part, mesh=flat_mesh())
    assert len(held) == 8 * dist.get_rank()
    optimizer = Muon(model.parameters(), lr=0.1, gradient_release=True, **EAGER)
    prepare_for_gradient_release(model, optimizer, accumulation="states")
    for _ in range(3):
        x = torch.randn(4, 8)
        model(x).sum().backward()
        model[0](x).sum().backward()
        optimizer.step()
    assert all(optimizer.state[p]["step"] == 3 for p in model.parameters())
