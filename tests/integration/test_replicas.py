"""Gradient release on replicas, beside DistributedDataParallel and step(), on gloo.

Two processes add two numbers, in whichever order the same, so that all of this is equal
bit for bit. Four add in an order that depends on the place in the bucket.
"""

import contextlib
import copy
import ctypes
import gc
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_process import (
    Tensors,
    Trained,
    Training,
    as_one_process,
    assert_alike,
    by_ddp,
    kept,
    of,
    parameters,
    replicated,
)
from replicas import (
    CAP,
    STEPS,
    Net,
    adamw,
    assert_equal,
    assert_same_everywhere,
    batch,
    loss_of,
    net,
    prepare,
    whole_batch,
)
from shards import EAGER
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import counted, in_turn, raises, world

import optimi_func
from optimi_func import (
    AdamW,
    Lion,
    Muon,
    MuonAdamW,
    ScheduleFreeAdamW,
)

Skips = Callable[[int], int]


def training(
    kind: str = "plain", skips: Skips = lambda i: -1, low: Any = None, **how: Any
) -> Training:
    """Return steps of a model of which parts may be skipped in some batches."""

    def model() -> Net:
        return net(kind) if low is None else net(kind).to(low)

    def before(model: Net, i: int) -> None:
        model.skipped = skips(i)

    how = {"optimizer": adamw, "steps": STEPS, **how}
    return Training(model, batch=whole_batch, loss=loss_of, before=before, **how)


def weights(end: Trained) -> Tensors:
    return end.model.state_dict()


def as_ddp(
    made: Training, ways: Sequence[dict[str, Any]] = ({},), tolerance: float = 0.0
) -> list[Trained]:
    """Compare release on replicas with DistributedDataParallel and step().

    Args:
        made: What is trained by both.
        ways: Options of release, of which "sync" is `Training.sync`.
        tolerance: Of movements. Four processes are never compared bit for bit.
    """
    if dist.get_world_size() > 2:
        tolerance = max(tolerance, 1e-4)
    unused = {"find_unused_parameters": hasattr(made.model(), "never")}
    than, ends = made.run(by_ddp(bucket_cap_mb=CAP, **unused)), list[Trained]()
    for way in ways:
        release = {k: x for k, x in way.items() if k != "sync"}
        ours = replace(made, release=release, clip=None, sync=way.get("sync", True))
        among, look = replicated(bucket_cap_mb=CAP), weights if tolerance else all_of
        ends.append(as_one_process(ours, among, look, tolerance, way, than))
        assert_same_everywhere(nn.ParameterList(ends[-1].model.parameters()))
    return ends


def all_of(end: Trained) -> Tensors:
    return {**weights(end), **kept(parameters(end), end.optimizer)}


def as_whole_batches(made: Training, tolerance: float) -> Trained:
    """Compare release on replicas with release in one process."""
    among = replicated(bucket_cap_mb=CAP)
    return as_one_process(made, among, tolerance=tolerance, about=made.release)


@world(2, full=[4])
def test_plain_steps_a_pure_optimizer_and_what_is_sent() -> None:
    with counted() as sent:
        (end,) = as_ddp(training())
    ours, sizes = end.model, [x.nbytes for x in sent]
    gradients = sum(p.nbytes for p in ours.parameters())
    least = gradients / (CAP * 2**20)
    assert least <= len(sizes) / STEPS <= 2 * least + 2
    assert gradients <= sum(sizes) / STEPS <= 1.05 * gradients
    pure = net()
    handle = prepare(pure, optimi_func.adamw(lr=1e-2, weight_decay=0.1))
    for i in range(STEPS):
        loss_of(pure, batch(i)).backward()
    moved = {k: p.detach() for k, p in pure.named_parameters()}
    assert_alike(moved, parameters(end), training().starts, 1e-4)
    assert handle.state.step == STEPS


@world(2, full=[4])
def test_accumulation_by_steps_step_and_no_sync() -> None:
    """By steps, step() and no_sync(), with a block that only an earlier backward uses."""

    def skips(i: int) -> int:
        return 1 if i % 3 == 2 else -1

    how: list[dict[str, Any]] = [
        {"accumulation": "buffer", "accumulation_steps": 3},
        {"accumulation": "buffer"},
        {"sync": False},
        {"accumulation": "buffer", "accumulation_steps": 1, "sync": False},
    ]
    made, counts = training("unused", skips, micro=3), set[int]()
    for way in how:
        with counted() as sent:
            (end,) = as_ddp(made, [way])
        counts.add(len(sent))
        assert not end.handle.accumulating
    assert len(counts) == 1
    # A cycle of no_sync() goes on in another run, from what each process kept.
    model, twin = net(), net()
    ends: list[Net] = []
    for one in (model, twin):
        optimizer = adamw(one, True)
        handle = prepare(one, optimizer)
        with handle.no_sync():
            loss_of(one, batch(0)).backward()
        assert handle.accumulating
        if one is twin:
            kept = copy.deepcopy(handle.state_dict())
            handle.discard()
            assert not handle.accumulating
            handle.load_state_dict(kept)
        loss_of(one, batch(1)).backward()
        ends.append(one)
    assert_equal(*ends)
    assert_same_everywhere(model)
    with handle.no_sync():
        loss_of(twin, batch(0)).backward()
    with contextlib.suppress(UserWarning):
        handle.remove()
    assert twin.first.weight.grad is not None


@world(full=[2, 4])
def test_accumulation_in_the_state_is_that_of_whole_batches() -> None:
    """accumulation="states" takes averages, as one process does of whole batches."""
    options: dict[str, Any] = {"accumulation": "states", "accumulation_steps": 2}
    made = training(skips=lambda i: 1 if i % 2 else -1, micro=2, release=options)
    end = as_whole_batches(made, 1e-4)
    steps = [x["step"] for x in end.optimizer.state.values()]
    assert steps == [x["step"] for x in made.alone.optimizer.state.values()]
    # Ended by step(): nobody has a gradient then, so nothing is sent.
    model = net()
    optimizer = adamw(model, True)
    handle = prepare(model, optimizer, accumulation="states")
    loss_of(model, batch(0)).backward()
    before = copy.deepcopy(model)
    with counted() as sent:
        optimizer.step()
    assert not sent and not handle.accumulating
    assert not torch.equal(before.last.weight, model.last.weight)
    assert_same_everywhere(model)
    with raises(RuntimeError, "accumulation='states'"), handle.no_sync():
        pass


@world(full=[2])
def test_checkpointed_tied_frozen_and_mixed_models_and_buffers() -> None:
    for kind in ("checkpointed", "reentrant", "tied", "frozen", "mixed", "buffers"):
        (end,) = as_ddp(training(kind))
        assert not end.model._forward_pre_hooks
    as_ddp(training("buffers", micro=2), [{"sync": False}])
    among = replicated(bucket_cap_mb=CAP, broadcast_buffers=False)
    mean = training("buffers", release={}).run(among).model.norm.running_mean
    told = mean.clone()
    dist.broadcast(told, 0)
    assert dist.get_rank() == 0 or not torch.equal(told, mean)
    # A second forward before the backward overwrites nothing that the first one saved.
    ours = net("buffers")
    prepare(ours, adamw(ours, True))
    (loss_of(ours, batch(0)) + loss_of(ours, batch(1))).backward()
    assert_same_everywhere(ours.first)
    # A copy of the model sends nothing.
    if dist.get_rank() == 0:
        copy.deepcopy(ours)(batch(0))


@world(full=[2, 4])
def test_blocks_that_some_processes_do_without_in_some_steps() -> None:

    def skips(i: int) -> int:
        return (i + dist.get_rank()) % 2 if i % 3 else 2

    for micro in (1, 2):
        (end,) = as_ddp(training("unused", skips, micro=micro), [{"sync": False}])
        state = end.optimizer.state
        counts = {int(state[p]["step"]) if p in state else None for p in state}
        assert all(p not in state for p in end.model.never.parameters())
        assert micro > 1 or len(counts) > 1


@world(full=[2, 4])
def test_other_rules_storages_and_dtypes() -> None:

    low = torch.bfloat16
    rows: list[Any] = [
        (of(ScheduleFreeAdamW), None, 0.0),
        (lambda model, **o: MuonAdamW(model, lr=1e-2, **EAGER, **o), None, 0.0),
        (of(AdamW), low, 0.0),
        (of(AdamW, storage="compact"), low, 0.0),
        (of(AdamW, storage="exact"), low, 0.0),
        (of(AdamW, foreach=True, compile=None), None, 1e-4),
    ]
    for optimizer, dtype, tolerance in rows:
        made = training(low=dtype, optimizer=optimizer)
        if dtype is None or dist.get_world_size() == 2:
            (end,) = as_ddp(made, tolerance=tolerance)
        else:
            end = replace(made, release={}).run(replicated(bucket_cap_mb=CAP))
            assert_same_everywhere(end.model)


@world(full=[2])
def test_kernels_take_views_of_the_buckets() -> None:
    with in_turn():
        warm = net()
        optimizer = adamw(warm, compile=None)
        loss_of(warm, batch(0)).backward()
        optimizer.step()
    as_ddp(training(optimizer=partial(adamw, compile=None)))


@world(full=[2, 4])
def test_clipping_is_by_the_norm_of_the_averages() -> None:
    """By the norm of the averages, also of sums and of what only others have."""

    def skips(i: int) -> int:
        return 1 if i % 2 else (i // 2 + dist.get_rank()) % 3

    asked = {"clip_global_norm": 0.1, "grad_norm": True}
    ways: list[dict[str, Any]] = [{"sync": False}]
    ways.append({"accumulation": "buffer", "accumulation_steps": 2})
    ways.append({"accumulation": "buffer"})
    for made, some in (
        (training("unused", clip=0.1), ways[:1]),
        (training("unused", skips, clip=0.1, micro=2), ways),
    ):
        for end in as_ddp(made, [{**way, **asked} for way in some], 1e-4):
            assert len(end.norms) == STEPS and min(end.norms) > 0.1
    for clips in ({"clip_param_norm": 0.01}, {"clip_value": 1e-3}):
        as_whole_batches(training(release=clips), 1e-3)


@world(2, full=[4])
def test_all_processes_skip_what_is_infinite_in_one() -> None:
    model = net()
    handle = prepare(model, adamw(model, True), skip_nonfinite=True)
    for i in range(STEPS):
        x = batch(i)
        if i == 2 and dist.get_rank() == 1:
            x[0, 0] = float("inf")
        loss_of(model, x).backward()
    assert all(x.isfinite().all() for x in model.state_dict().values())
    assert_same_everywhere(model)
    assert set(handle.skipped.values()) == {1}


@world(full=[2])
def test_averages_of_bfloat16_gradients_in_float32() -> None:
    """Averages in float32 of bfloat16 gradients: those of one process's float32 sums."""
    low, size, among = torch.bfloat16, dist.get_world_size(), replicated(bucket_cap_mb=CAP)
    how: dict[str, Any] = {"accumulation": "buffer", "accumulation_steps": size}
    alone = training(low=low, release=how, micro=size)
    single = replace(alone, batch=lambda i: batch(i // size, i % size)).alone
    released = training(low=low, release={})
    narrow = released.run(among)
    among = replicated(bucket_cap_mb=CAP, reduce_dtype=torch.float32)
    wide = as_one_process(released, among, than=single)
    assert not torch.equal(wide.model.first.weight, narrow.model.first.weight)
    # Narrower than the parameters: their dtype comes back.
    end = training(release={}).run(replicated(bucket_cap_mb=CAP, reduce_dtype=low))
    assert end.optimizer.state[end.model.first.weight]["exp_avg"].dtype == torch.float32
    assert_same_everywhere(end.model)


@world(full=[2])
def test_parameters_and_buffers_become_the_first_processs() -> None:
    """Parameters and buffers become the first process's, also the state made of them."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Linear(5, 16))
        model[0].weight.requires_grad_(False)
        model[2].weight = nn.Parameter(torch.randn(5, 16).T)
        model.register_buffer("odd", torch.randn(3, 2).T)
        model.register_buffer("flag", torch.tensor(seed % 2 == 0))
        model.register_buffer("small", torch.full((3,), seed, dtype=torch.int16))
        return model

    model = make(dist.get_rank())
    handle = prepare(model, optimi_func.schedule_free_adamw(lr=1e-2))
    assert_equal(model, make(0))
    assert model[2].weight.stride() == (1, 16)
    for i in range(STEPS):
        loss_of(model, batch(i)).backward()
    assert handle.state.step == STEPS
    for name, p in model.named_parameters():
        told = p.detach().clone()
        dist.broadcast(told, 0)
        assert torch.equal(told, p), name


@world(full=[2])
def test_errors_come_in_all_processes_before_anything_is_written() -> None:
    rank = dist.get_rank()
    before = net().state_dict()

    def refused(kind: type[Exception], text: str, model: nn.Module, o: Any, **how: Any):
        kept = copy.deepcopy(model.state_dict())
        with raises(kind, text):
            prepare(model, o, **how)
        assert all(torch.equal(x, kept[k]) for k, x in model.state_dict().items())
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())

    other = net(width=32 + 8 * rank)
    refused(ValueError, "first.weight: process 1 of the group", other, adamw(other, True))
    model = net()
    refused(
        *(ValueError, "accumulation_steps: process 1 of the group has 3, process 0 has 2"),
        *(model, adamw(model, True)),
        **{"accumulation": "buffer", "accumulation_steps": 2 + rank},
    )
    refused(
        *(ValueError, "bucket_cap_mb: process 1", model, adamw(model, True)),
        bucket_cap_mb=1.0 + rank,
    )
    torch.manual_seed(rank)
    own = Net()
    optimizer = adamw(own, True)
    optimizer.init_state()
    refused(ValueError, "hashes of", own, optimizer)
    alone = net()
    optimizer = adamw(alone, True)
    if rank == 1:
        optimizer.init_state()
    told = "state of first.weight: process 1 of the group has ['exp_avg', 'exp_avg_sq', 's"
    refused(ValueError, told, alone, optimizer)
    some = AdamW(model.first.parameters(), lr=1e-2, gradient_release=True, **EAGER)
    refused(ValueError, "of another optimizer", model, some)
    refused(
        TypeError, "init_process_group()", model, adamw(model, True), process_group=None
    )
    for name, bad, kind in (
        ("bucket_cap_mb", 0.0, ValueError),
        ("bucket_cap_mb", "25", TypeError),
        ("reduce_dtype", torch.int32, ValueError),
        ("broadcast_buffers", "yes", TypeError),
    ):
        refused(kind, name, model, adamw(model, True), **{name: bad})
    with raises(ValueError, "need process_group"):
        prepare(model, adamw(model, True), process_group=False)
    theirs = model.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    with raises(ValueError, "averages gradients after they have run"):
        prepare(model, adamw(model, True), ignore_existing_hooks=True)
    theirs.remove()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = nn.Linear(16, 16)
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight, mesh, [Replicate()]))
    with raises(ValueError, "DTensor"):
        prepare(sharded, adamw(sharded, True))
    with raises(ValueError, "process_group=torch.distributed.group.WORLD"):
        prepare(DistributedDataParallel(net()), adamw(model, True))
    assert_equal(model, net())
    assert all(torch.equal(x, before[k]) for k, x in model.state_dict().items())


@world(2, full=[4])
def test_what_differs_by_process_is_named_at_once_or_later() -> None:
    rank = dist.get_rank()
    given: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "gradient_release": True}
    lr = "lr of param group 0: process 1 of the group has 0.02, process 0 has 0.01"
    of_class: list[tuple[str, dict[str, Any]]] = [
        (lr, {"lr": 0.01 * (1 + rank)}),
        ("betas of param group 0", {"betas": (0.9, 0.99 - 0.01 * rank)}),
        ("storage of param group 0", {"storage": ("compact", "exact")[rank % 2]}),
        ("state_dtype of param group 0", {"state_dtype": (None, torch.float32)[rank % 2]}),
    ]
    low = net().bfloat16()
    cases: list[tuple[str, Any]] = [
        (text, AdamW(low.parameters(), **{**given, **own, **EAGER}))
        for text, own in of_class
    ]
    betas = {**given, "betas": (0.9, 0.99), **EAGER}
    cases += [
        ("the optimizer's class", (AdamW, Lion)[rank % 2](low.parameters(), **betas)),
        ("optimizer: process 1", optimi_func.adamw(lr=0.01 + rank)),
        ("optimizer: process 1", (optimi_func.lion, optimi_func.adamw)[rank % 2](lr=1.0)),
    ]
    for text, optimizer in cases:
        kept = copy.deepcopy(low)
        with raises(ValueError, text):
            prepare(low, optimizer)
        assert_equal(low, kept)
        assert all(not p._post_accumulate_grad_hooks for p in low.parameters())
    # Schedules are equal everywhere, though their addresses differ.
    prepare(net(), optimi_func.adamw(lr=lambda i: 0.1 / (1 + i))).remove()
    # Later, by the messages that are sent anyway, in any dtype.
    for kind in (torch.float32, torch.bfloat16):
        model = net().to(kind)
        optimizer = adamw(model, True, lr=torch.tensor(0.01))
        handle = prepare(model, optimizer)
        for key, value in (("weight_decay", 0.3), ("betas", (0.8, 0.9))):
            optimizer.param_groups[0][key] = value  # in all
            with counted() as sent:
                loss_of(model, batch(0)).backward()
            assert len(sent) == len(handle._runner._buckets) > 1
        assert_same_everywhere(model)
        kept, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.param_groups[0]["lr"].mul_(1 + rank)
        with raises(ValueError, lr.split("0.02")[0]), counted() as sent:
            loss_of(model, batch(1)).backward()
        assert len(sent) <= len(handle._runner._buckets)
        assert all(
            torch.equal(x, kept.state_dict()[k]) for k, x in model.state_dict().items()
        )
        for i, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(x, state[i][k]) for k, x in entry.items())
        handle.remove()
    # And options of the handle.
    model = net()
    handle = prepare(model, adamw(model, True), clip_value=1.0)
    handle.options = replace(handle.options, clip_value=1.0 + rank)
    with raises(
        ValueError, "clip_value: process 1 of the group has 2.0, process 0 has 1.0"
    ):
        loss_of(model, batch(0)).backward()


@world(full=[2])
def test_mistakes_that_are_noticed_while_training() -> None:
    model, other = net(), net()
    optimizer, second = adamw(model, True), adamw(other, True)
    handle, twin = prepare(model, optimizer), prepare(other, second)
    with raises(RuntimeError, "two handles in one backward"):
        (loss_of(model, batch(0)) + loss_of(other, batch(0))).backward()
    gc.collect()
    assert_same_everywhere(model)
    twin.remove()
    # Its messages have a group of their own.
    twin = prepare(other, second, process_group=dist.new_group())
    (loss_of(model, batch(0)) + loss_of(other, batch(0))).backward()
    assert_same_everywhere(model)
    assert_same_everywhere(other)
    with handle.paused():
        loss_of(model, batch(0)).backward()
    before = copy.deepcopy(model)
    with raises(RuntimeError, "p.grad of first.weight, which is not averaged"):
        optimizer.step()
    assert_equal(model, before)
    optimizer.zero_grad()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise ValueError("here")

    hook = model.blocks[1].register_forward_hook(lambda m, a, y: Fails.apply(y))
    with raises(ValueError, "here"):
        loss_of(model, batch(0)).backward()
    hook.remove()
    gc.collect()
    kept = copy.deepcopy(model)
    # Others may wait for what it did not send. Buckets of the next would take its place.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the first had updated
        with raises(RuntimeError, "had sent messages, and other processes may wait"):
            loss_of(model, batch(1)).backward()
    with handle.no_sync(), raises(RuntimeError, "prepare again in all of them"):
        loss_of(model, batch(1)).backward()
    assert_equal(model, kept)
    handle.remove()
    handle = prepare(model, AdamW(model.parameters(), gradient_release=True, **EAGER))
    loss_of(model, batch(2)).backward()
    assert_same_everywhere(model)
    assert not torch.equal(model.first.weight, before.first.weight)


@world(full=[2])
def test_a_parameter_without_a_bucket_is_not_stepped_with_one_processs_gradient() -> None:
    for added in (False, True):
        model, more = net("frozen"), nn.Linear(16, 16)
        optimizer = adamw(model, True)
        prepare(model, optimizer)
        loss_of(model, batch(0)).backward()
        if added:
            optimizer.add_param_group({"params": list(more.named_parameters())})
            name = "a parameter of shape (16, 16)"
        else:
            model.blocks[0][1].weight.requires_grad_(True)
            name = "blocks.0.1.weight"
        kept = copy.deepcopy(model)
        with raises(RuntimeError, f"{name} is trained since the model was prepared"):
            loss_of(model, more(batch(1))).backward()
        assert_equal(model, kept)


@world(full=[2])
def test_of_a_process_that_ends_early_the_others_name_the_bucket() -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = net()
    handle = prepare(model, adamw(model, True), process_group=group)
    loss_of(model, batch(0)).backward()
    if dist.get_rank() == 0:
        text = "(?s)averaging bucket 1 of .* the same number of backwards"
        with pytest.raises(RuntimeError, match=text):
            loss_of(model, batch(1)).backward()
        with raises(RuntimeError, "prepare again in all of them"):
            loss_of(model, batch(1)).backward()
    handle.remove()


class Mallinfo(ctypes.Structure):
    """What glibc tells of all its memory."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def live_bytes() -> int:
    """The bytes that this process has allocated and not freed, in whichever thread."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


@world(full=[2])
def test_a_few_buckets_are_alive_above_model_and_state() -> None:
    """Above model and state, a few buckets are alive; DistributedDataParallel keeps all."""
    peaks: dict[str, list[float]] = {}
    # The first round is for what a process allocates once.
    for way in ("release", "ddp", "release", "ddp"):
        found: list[float] = []
        peaks[way] = found
        torch.manual_seed(0)
        gc.collect()
        before = live_bytes()
        model = Net(width=256, blocks=16)
        size = sum(p.nbytes for p in model.parameters())
        rest = before + 3 * size
        optimizer = adamw(model, way == "release", lr=1e-3)
        wrapped: nn.Module = model
        if way == "release":
            handle = prepare(model, optimizer, bucket_cap_mb=1)
        else:
            wrapped = DistributedDataParallel(model, bucket_cap_mb=1)

        def sample(*_: Any, found: list[float] = found, rest: int = rest) -> None:
            found.append(live_bytes() - rest)

        optimizer.init_state()
        for p in model.parameters():
            p.register_hook(sample)
        for _ in range(3):
            loss_of(wrapped, batch(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[:] = [x / size for x in found]
        del model, wrapped, optimizer, sample, p
    handle.remove()
    assert size > 16 * 2**20
    assert 0.1 < max(peaks["release"]) <= 0.3, max(peaks["release"])
    assert max(peaks["ddp"]) > 0.9, max(peaks["ddp"])


@world(full=[2])
def test_a_process_that_has_ended_is_named_first() -> None:
    model, group = net(), dist.group.WORLD
    prepare(model, adamw(model, True))
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"^a process of the group ended: averaging"):
            loss_of(model, batch(0)).backward()
        with pytest.raises(
            RuntimeError, match=r"^a process of the group ended: other proc"
        ):
            Muon([("w", p)], process_group=group, **EAGER).step()
    os._exit(0)
