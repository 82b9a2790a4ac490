"""FSDP2, HSDP, tensor parallelism and DDP, with gradient release, on gloo."""

import copy
import gc
import math
import resource
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from measured import peak_bytes
from one_process import (
    Among,
    Poison,
    Training,
    as_one_process,
    by_ddp,
    fully_sharded,
    nth,
    of,
)
from shards import (
    EAGER,
    assert_close,
    batch,
    flat_mesh,
    full,
    hybrid_mesh,
    loss_of,
    mine,
    placed,
    plain,
    sharded,
    snapshot,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from worlds import counted, raises, world

import optimi_func
from optimi_func import (
    ASGD,
    SGD,
    AdamW,
    Muon,
    NAdam,
    Rprop,
    StableAdamW,
    clip_grad_norm_,
    prepare_for_gradient_release,
)

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


RULES = [of(AdamW), of(StableAdamW, compile=None, foreach=True), of(Rprop), of(NAdam)]
RULES.append(of(ASGD, compile=None, foreach=True, t0=1))
CLIPPED = [Training(plain, rule, clip=0.5) for rule in RULES]
# A rule that sends messages of its own in between, every second time.
RELEASED = [
    Training(plain, of(cls), micro=1 + ("accumulation" in options), release=options)
    for options, cls in zip(RELEASES, cycle((AdamW, StableAdamW)))
]
# With every kind of message.
FEW = RELEASED[-3:]
OF_MAPS = {"clip_param_norm": 0.1, "accumulation": "buffer", "accumulation_steps": 2}
MUONS = [
    Training(plain, of(Muon), clip=0.5),
    Training(plain, of(Muon), micro=2, release=OF_MAPS),
]


def compare(among: Among, trainings: list[Training]) -> None:
    for i, training in enumerate(trainings):
        as_one_process(training, among, tolerance=1e-9, about=(i, training.release))


@world(full=[2])
def test_fully_shard_equals_one_process_with_and_without_release() -> None:
    compare(fully_sharded(), CLIPPED + RELEASED + MUONS)
    # Without the root, the last gradients come after the backward.
    compare(fully_sharded(root=False), FEW)


@world(2, soak=[4])
def test_what_is_not_finite_in_one_process_is_skipped_in_all() -> None:
    name, bad = "second.weight", Poison("second.weight", 0, alone=True)
    how: dict[str, Any] = {"steps": 3, "poison": bad}
    skips = {"skip_nonfinite": True}
    # With counts on the host and on the device.
    for on_device in (False, True)[: 2 if dist.get_world_size() == 2 else 1]:
        made = Training(plain, of(StableAdamW, capturable=on_device), **how)
        there, than = replace(made, release=skips), made.alone
        end = as_one_process(there, fully_sharded(), tolerance=1e-9, than=than)
        assert end.handle.skipped == {name: 1}
        assert end.optimizer.state[end.model.second.weight]["step"] == 2
        assert end.optimizer.state[end.model.second.bias]["step"] == 3
    # A tree has one step count, which goes on.
    end = Training(plain, tree, release=skips, **how).run(fully_sharded())
    assert end.handle.skipped == {name: 1}
    assert all(x.isfinite().all() for x in snapshot(end.model))


def tree(model: nn.Module, gradient_release: bool) -> Any:
    """Return a functional optimizer, which only gradient release can use."""
    assert gradient_release
    return optimi_func.stableadamw(lr=1e-2)


@world(full=[2])
def test_a_pure_optimizer_under_release() -> None:
    training = Training(plain, tree, micro=2, release={"accumulation": "buffer"})
    end = as_one_process(training, fully_sharded(), tolerance=1e-9)
    assert end.handle.state.step == 4
    assert isinstance(end.handle.state.leaves["first.weight"].exp_avg, DTensor)


@world(full=[2])
def test_a_handle_is_saved_in_an_open_cycle_and_loaded() -> None:
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


@world(full=[2])
def test_accumulation_of_fully_shard_is_one_update() -> None:
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


@world(full=[2])
def test_the_peak_of_a_backward_and_a_step_is_a_share_of_the_gradients() -> None:
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


@world(full=[4])
def test_replicated_and_sharded() -> None:
    compare(fully_sharded(hybrid_mesh()), CLIPPED + FEW)


@world(full=[2], soak=[4])
def test_tensor_parallel_among_four_under_fully_shard() -> None:
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    if (size := dist.get_world_size()) < 4:
        alone = init_device_mesh("cpu", (size,))
        parallel = Among(
            partial(parallelize_module, device_mesh=alone, parallelize_plan=plan)
        )
        compare(parallel, CLIPPED + FEW)
        return
    compare(fully_sharded(), MUONS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    sharding = fully_sharded(mesh["data"])

    def divide(model: nn.Module) -> nn.Module:
        return sharding.divide(parallelize_module(model, mesh["model"], plan))

    among = Among(divide, nth(mesh["data"].get_local_rank(), 2))
    compare(among, CLIPPED + FEW + MUONS)
    # Of three sets of groups of processes.
    end = FEW[0].run(among)
    FEW[0].loss(end.model, among.share(batch(0))).backward()
    with counted() as sent:
        clip_grad_norm_(end.model.parameters(), 1.0)
    assert len(sent) == 2


@world(2, full=[4])
def test_stages_of_a_pipeline_are_clipped_by_one_norm() -> None:
    """In a message for each dimension of all meshes, with gradients or without."""
    size = dist.get_world_size()
    whole = plain()
    loss_of(whole, batch(0)).backward()
    whole.last.weight.grad.zero_()
    begin = {n: p.grad.clone() for n, p in whole.named_parameters()}
    for _ in range(2):  # torch's caches give parameters the first of equal meshes
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "shards"))
        first, place = mesh.get_local_rank("pp") == 0, placed(mesh["shards"], Shard(0))
        names = [n for n in begin if n.startswith("first") == first]
        params = [nn.Parameter(place(whole.get_parameter(n).detach())) for n in names]
    if not first:
        names.append("buffer")  # a replica: every process of the stage has it
        params.append(nn.Parameter(torch.ones(2).double()))
        begin["buffer"] = params[-1].detach().clone()
    else:
        begin["buffer"] = torch.ones(2).double()
    whole.buffer = nn.Parameter(torch.ones(2).double())
    for order in (1.0, 2.0, 3.0, math.inf):
        for name, p in whole.named_parameters():
            p.grad = begin[name].clone()
        for name, p in zip(names, params):
            g = begin[name].clone()
            p.grad = place(g) if isinstance(p, DTensor) else g
            if name == "last.weight" and dist.get_rank() == size - 1:
                p.grad = None  # in one process alone, which has to send all the same
        wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.3, order)
        how = {"groups": [mesh["pp"].get_group()]}
        with counted() as sent:
            found = clip_grad_norm_(params, 0.3, order, **how)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)
        assert len(sent) == (2 if size == 4 else 1)
        for name, p in zip(names, params):
            if name != "last.weight":
                theirs = whole.get_parameter(name).grad
                torch.testing.assert_close(full(p.grad), theirs, rtol=1e-12, atol=0.0)
    p = nn.Parameter(distribute_tensor(torch.ones(2), mesh["pp"], [Replicate()]))
    p.grad = DTensor.from_local(torch.ones(2), mesh["pp"], [Partial()])
    params[0].grad = torch.ones_like(params[0])
    for given, how, text in (
        ([params[0], p], {}, "params[1].grad has placements (Partial(sum),)"),
        ([params[0]], {"norm_type": -1}, "norm_type=-1: allowed are"),
        ([params[0]], {"max_norm": -1.0}, "max_norm=-1.0"),
    ):
        with raises(ValueError, text):
            clip_grad_norm_(given, **{"max_norm": 1.0, **how})
    assert (full(params[0].grad) == 1.0).all()
    params[0].grad *= math.nan
    with raises(RuntimeError, "the norm of order 2.0 is"):
        clip_grad_norm_(params[:1], 1.0, error_if_nonfinite=True)


@world(2)
def test_a_release_of_stages_has_one_norm_and_one_skip() -> None:
    stage, groups = dist.get_rank(), [dist.group.WORLD]
    # Each row is a stage's, and the gradients of the third step are not finite in one.
    rows = torch.tensor([[3.0, 4.0], [1.0, 2.0]]).double()
    grads = [rows, 2 * rows, torch.tensor([[math.nan, 1.0], [1.0, 1.0]]).double(), rows]
    ways: list[dict[str, Any]] = [{}, {"accumulation": "buffer"}]
    for how in ways:
        whole = nn.Parameter(torch.ones(2, 2).double())
        single, skips = SGD([whole], lr=1.0, **EAGER), 0
        model = nn.ParameterList([torch.ones(2).double()])
        optimizer = SGD(model.parameters(), lr=1.0, gradient_release=True, **EAGER)
        limits: dict[str, Any] = {"clip_global_norm": 0.5, "skip_nonfinite": "step"}
        asked = {**how, **limits, "grad_norm": True, "groups": groups}
        handle = prepare_for_gradient_release(model, optimizer, **asked)
        for g in grads:
            whole.grad = g.clone()
            norm = nn.utils.clip_grad_norm_([whole], 0.5)
            loss = partial(lambda p, g: (p * g).sum(), model[0], g[stage])
            if how:
                loss().backward()
            else:
                handle.backward(loss)
            optimizer.step()
            if norm.isfinite():
                single.step()
                torch.testing.assert_close(handle.grad_norm, norm, rtol=1e-12, atol=0.0)
            else:
                skips += 1
            wanted = whole.detach()[stage]
            torch.testing.assert_close(model[0].detach(), wanted, rtol=1e-12, atol=0.0)
            assert sum(handle.skipped.values()) == skips, how
        handle.remove()
        with raises(ValueError, "they need clip_global_norm, grad_norm or skip_nonfinite"):
            prepare_for_gradient_release(model, optimizer, groups=groups)


@world(full=[2])
def test_ddp_takes_the_ordinary_step_and_no_release() -> None:
    as_one_process(Training(plain, of(AdamW)), by_ddp(), tolerance=1e-9)
    inner = plain()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = AdamW(inner.parameters(), lr=1e-2, gradient_release=True, **EAGER)
    with raises(ValueError, "FSDP2"):
        prepare_for_gradient_release(model, optimizer)
    handle = prepare_for_gradient_release(inner, optimizer)
    # Known by what it does, at the end of its first backward.
    with raises(RuntimeError, "FSDP2"):
        loss_of(model, mine(0)).backward()
    handle.remove()


@world(full=[2])
def test_a_thousand_steps_leave_nothing_behind() -> None:
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
