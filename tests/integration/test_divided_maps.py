"""Maps of whole tensors that processes divide: one owner each, the same bits, on gloo."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mapped import Mapped, mapped
from measured import allocated_by
from shards import (
    EAGER,
    assert_close,
    by_rows,
    flat_mesh,
    full,
    loss_of,
    placed,
    snapshot,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
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


class Sent:
    """Messages and the elements that this process gets from others."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.elements = self.all = 0  # `all` are messages of any kind

    @contextmanager
    def counted(self) -> Iterator[None]:
        kept = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather")}

        def message(name: str, out: Any, given: Tensor, *args: Any, **how: Any) -> Any:
            self.names.append(name)
            own = args[0][dist.get_rank(how["group"])] if args else given.numel()
            self.elements += sum(x.numel() for x in out) - own
            return kept[name](out, given, *args, **how)

        for name in kept:
            setattr(dist, name, partial(message, name))
        try:
            with CommDebugMode() as messages:
                yield
            self.all += messages.get_total_counts()
        finally:
            for name, function in kept.items():
                setattr(dist, name, function)


def stepped(shapes: Shapes, place: Callable[[Tensor], Any], **options: Any) -> Any:
    """Return parameters after two steps, and the flops and messages of the second."""
    torch.manual_seed(3)
    params = [nn.Parameter(place(torch.randn(shape))) for shape in shapes]
    optimizer = Muon(params, lr=0.02, **options, **EAGER)
    sent, flops = Sent(), FlopCounterMode(display=False)
    for i in range(2):
        for p, shape in zip(params, shapes):
            p.grad = place(torch.randn(shape))
        if i == 0:
            optimizer.step()
            continue
        with flops, sent.counted():
            optimizer.step()
    found = [full(p).clone() for p in params]
    most = allocated_by(optimizer.step, tries=4)
    return found, flops.get_total_flops(), sent, most


@cache
def plane() -> Any:
    """Return one mesh, because DTensor's caches mix up equal ones and their groups."""
    return init_device_mesh("cpu", (2, 2))


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
    flat = init_device_mesh("cpu", (n,))
    ways: list[Any] = [
        (placed(flat, Shard(0)), {}, ["all_to_all_single"] * 2),
        (placed(flat, Shard(1)), {}, ["all_to_all_single"] * 2),
        (placed(flat, Replicate()), {}, ["all_gather"]),
        (lambda x: x, {"process_group": dist.group.WORLD}, ["all_gather"]),
    ]
    dtypes = torch.float32, torch.bfloat16
    if n == 4:  # what two have not shown
        ways, dtypes = ways[:1], dtypes[:1]
        ways.append((placed(plane(), Replicate(), Shard(0)), {}, ["all_to_all_single"] * 2))
        ways.append((placed(plane(), Shard(0), Shard(1)), {}, []))
    shapes = [*ODD, (0, 3), (9, 1)]
    factored = {"scale_parameter": True, "beta1": 0.9, "flatten": True}
    rules: list[Any] = [
        (Mapped, mapped, {}, shapes),
        (Adafactor, adafactor, factored, shapes),
        (Normed, Normed.pure, {}, shapes),
        (NorMuon, normuon, {"split": 2}, even := [(8, 5), (3, 6, 4), (8, 2, 3, 3), (2, 0)]),
        (Muon, muon, {"element_beta": 0.9, "adjust_lr_fn": "nuclear"}, even),
        (NorMuon, normuon, {"split": {"columns": 2}, "transposed": True}, even),
        (Muon, muon, {"split": 2, "hyperball": True, "weight_decay": 0.0}, even),
    ]

    def train(rule: Any, place: Any, dtype: torch.dtype, **how: Any) -> Any:
        cls, factory, own, shapes = rule
        own = {"lr": 0.1, "weight_decay": 0.01, **own}
        how |= {**own, **EAGER}
        value, sent = factory(**own), Sent()
        torch.manual_seed(3)
        params = [nn.Parameter(place(torch.randn(s).to(dtype))) for s in shapes]
        tree = [p.detach().clone() for p in params]
        state, optimizer = value.init(tree), cls(params, **how)
        for i in range(4):
            if i == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = cls(params, **how)
                optimizer.load_state_dict(saved)
            grads = [place(torch.randn(s).to(dtype)) for s in shapes]
            for p, g in zip(params, grads):
                p.grad = g
            with sent.counted():
                optimizer.step()
            tree, state = value.step(tree, grads, state)
        names = value.rule.state._fields
        leaves = [getattr(s, name) for s in state.leaves for name in names]
        kept = [optimizer.state[p][name] for p in params for name in names]
        found = [list(map(full, xs)) for xs in (params, kept, tree, leaves)]
        return kept, found, sent.names

    for rule, dtype in product(rules, dtypes):
        _, alone, _ = train(rule, lambda x: x, dtype)
        for place, options, messages in ways:
            kept, found, names = train(rule, place, dtype, **options)
            if "hyperball" in rule[2]:  # whose stack a second dimension divides
                messages = messages or ["all_to_all_single"] * 2
            for some, want in zip(found, alone):
                assert all(map(torch.equal, some, want)), (rule[0], messages, dtype)
            # The first tells that all have the same to do.
            assert names == (["all_gather"] * bool(messages) + messages) * 4, names
            sides = [x for x in kept if isinstance(x, DTensor) and x.shape == (3, 2)]
            cut = [x.placements[-1] for x in sides if x.placements[-1].is_shard()]
            assert all(x.dim == 0 for x in cut)
    # Vectors and scalars, which only their first dimension or nothing cuts.
    found: list[Any] = []
    for place in (lambda x: x, placed(flat, Shard(0))):
        torch.manual_seed(5)
        scalar = torch.randn(())
        params = [
            nn.Parameter(place(torch.randn(7))),
            nn.Parameter(placed(flat, Replicate())(scalar)),
        ]
        optimizer = Adafactor(params, lr=0.1, **EAGER)
        for _ in range(3):
            params[0].grad = place(torch.randn(7))
            params[1].grad = placed(flat, Replicate())(torch.randn(()))
            optimizer.step()
        kept = [optimizer.state[p]["variance"] for p in params]
        found.append([full(x) for x in (*params, *kept)])
    assert all(map(torch.equal, *found))


@world(full=[2, 4])
def test_each_matrix_has_one_owner_and_the_step_is_that_of_one_process() -> None:
    """The work of a process, its messages and bytes; the step is that of one process."""
    n = dist.get_world_size()
    flat = init_device_mesh("cpu", (n,))
    # Each shard goes to its owner and comes back; each result goes to every copy.
    shards = ["all_to_all_single"] * 2, 1 / n, 2 * (n - 1) / n**2
    copies = ["all_gather"], 1 / n, (n - 1) / n
    ways: list[Any] = [
        ("rows", placed(flat, Shard(0)), {}, *shards),
        ("columns", placed(flat, Shard(1)), {}, *shards),
        ("copies", placed(flat, Replicate()), {}, *copies),
        ("plain", lambda x: x, {"process_group": dist.group.WORLD}, *copies),
    ]
    if n == 4:
        half = shards[0], 1 / 2, 1 / 2
        ways.append(("copies of shards", placed(plane(), Replicate(), Shard(0)), {}, *half))
        # Two dimensions cut: every process gathers and maps all.
        few = [(7, 5), (8, 2, 3, 3)]
        alone, whole, *_ = stepped(few, lambda x: x)
        found, flops, sent, _ = stepped(few, placed(plane(), Shard(0), Shard(1)))
        assert all(map(torch.equal, found, alone))
        assert (flops, sent.names) == (whole, [])
    for shapes in (TRANSFORMER + ODD, ODD):
        alone, whole, sent, _ = stepped(shapes, lambda x: x)
        assert not sent.names
        elements = sum(x.numel() for x in alone)
        for name, place, options, names, work, received in ways:
            found, flops, sent, _ = stepped(shapes, place, **options)
            assert all(map(torch.equal, found, alone)), name
            # First, in a few bytes, that all have the same to do.
            assert sent.names == ["all_gather"] * bool(names) + names, (name, sent.names)
            every = gathered((flops, sent.elements))
            assert sum(x for x, _ in every) == n * work * whole, name
            for flops, count in every if shapes is not ODD else []:
                assert abs(flops / whole - work) < 2e-3, (name, flops / whole)
                assert abs(count / elements - received) < 0.02, (name, count / elements)


@world(full=[2, 4])
def test_fewer_matrices_than_processes_and_one_that_is_larger_than_all() -> None:
    n = dist.get_world_size()
    for place, options in (
        (by_rows(), {}),
        (lambda x: x, {"process_group": dist.group.WORLD}),
    ):
        for shapes in ([(64, 64), *[(8, 8)] * 6], [(5, 7)], [(0, 3), (4, 4)]):
            alone, *_ = stepped(shapes, lambda x: x)
            found, flops, *_ = stepped(shapes, place, **options)
            assert all(map(torch.equal, found, alone))
            _, largest, *_ = stepped(shapes[:1], lambda x: x)
            every = sorted(gathered(flops))
            if len(shapes) == 7:  # its owner has nothing else
                assert every[-1] == largest
            if len(shapes) == 1:
                assert every == [0] * (n - 1) + [largest]


@world(full=[2, 4])
def test_experts_are_mapped_where_they_lie_or_divided_by_expert() -> None:
    """Messages, flops and bytes of each process; 5 experts leave one of 4 without any."""
    n, flat = dist.get_world_size(), flat_mesh()
    group = {"process_group": dist.group.WORLD}
    copies, shards = ["all_gather"] * 2, ["all_gather", *["all_to_all_single"] * 2]
    for count, cut in ((8, None), (5, [3, 2] if n == 2 else [2, 2, 1, 0])):
        parts = [count * (i + 1) // n - count * i // n for i in range(n)]
        ways: list[Any] = [
            (placed(flat, Shard(0)), {}, [], cut or parts),
            (placed(flat, Replicate()), {}, copies, parts),
            (lambda x: x, group, copies, parts),
            (placed(flat, Shard(2)), {}, shards, parts),
        ]
        if n == 4:
            half = [count // 2, count - count // 2] * 2
            ways += [(placed(plane(), Replicate(), Shard(0)), {}, [], half)]
            quarters = [2, 2, 2, 2] if cut is None else [2, 1, 1, 1]
            ways += [(placed(plane(), Shard(0), Shard(0)), {}, [], quarters)]
            ways += [(placed(plane(), Shard(0), Shard(1)), {}, shards, quarters)]
            ways += [(placed(plane(), Shard(2), Shard(0)), {}, shards, quarters)]
        alone, whole, _, most = stepped([(count, 128, 64)], lambda x: x)
        for i, (place, options, messages, experts) in enumerate(ways):
            found, flops, sent, held = stepped([(count, 128, 64)], place, **options)
            assert all(map(torch.equal, found, alone)), i
            assert sent.names == messages and (messages or not sent.all), (i, sent.names)
            every = sorted(gathered(flops))
            assert every == [whole * k // count for k in sorted(experts)], (i, every)
            # Copies have a whole direction, and gather results.
            share = max(experts) / count if not messages else 0.8
            assert held <= share * most + 2048, (i, held, most)
    # A process that has nothing else takes parts of two lengths of one bank.
    for place, options, *_ in ways[1:3]:
        alone, *_ = stepped(shapes := [(96, 96), (5, 8, 8)], lambda x: x)
        found, *_ = stepped(shapes, place, **options)
        assert all(map(torch.equal, found, alone))


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
        optimizer = MuonAdamW(model, lr=0.1, process_group=group, **EAGER)
        kept = copy.deepcopy(model.state_dict())

        def step(model: Any = model, optimizer: Any = optimizer) -> list[str]:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            sent = Sent()
            with sent.counted():
                optimizer.step()
            return sent.names

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
