"""The step in backward: equal to the ordinary one, and never silently something else."""

import contextlib
import copy
import dataclasses
import gc
import json
import weakref

import pytest
import torch
from cases import CLASSES
from released import EAGER, Net, assert_same, batch, make, train
from torch import nn
from torch.optim import lr_scheduler
from torch.profiler import profile, record_function
from torch.utils.checkpoint import checkpoint

import optimi_func
from optimi_func import (
    SGD,
    AdamW,
    adamw,
    prepare_for_gradient_release,
    remove_gradient_release,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", CLASSES.values())
def test_release_is_the_ordinary_step_bit_for_bit(cls, dtype) -> None:
    pair = []
    for release in (False, True):
        model, optimizer = make(cls, dtype, release)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: 0.9**i)
        if release:
            prepare_for_gradient_release(model, optimizer)
        train(model, optimizer, 20, scheduler=scheduler)
        pair.append((model, optimizer))
    assert_same(*pair)


@pytest.mark.kernels
@pytest.mark.parametrize("options", [EAGER, {"compile": True}], ids=str)
def test_small_gradients_keep_their_memory_order(options) -> None:
    """A mean over a channels_last gradient is summed in its order, also while it waits."""
    ends = []
    for release in (False, True):
        torch.manual_seed(0)
        conv = nn.Conv2d(4, 16, 3).to(memory_format=torch.channels_last)
        optimizer = optimi_func.StableAdamW(
            conv.parameters(), lr=0.1, gradient_release=release, **options
        )
        if release:
            prepare_for_gradient_release(conv, optimizer)
        for i in range(6):
            x = 3.0**i * torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
            conv(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach().clone() for p in conv.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["adamw", "stableadamw"])
def test_compiled_release_makes_no_further_graph(name: str, graphs) -> None:
    pair = []
    for release in (False, True):
        model, optimizer = make(CLASSES[name], release=release, compile=True)
        if release:
            made = graphs()
            prepare_for_gradient_release(model, optimizer)
        train(model, optimizer, 6)
        pair.append((model, optimizer))
    assert_same(*pair)
    assert graphs() == made


def test_gradients_are_gone_and_the_hooks_can_be() -> None:
    model, optimizer = make()
    handle = prepare_for_gradient_release(model, optimizer)
    model(batch(0)).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    before = copy.deepcopy(model.state_dict())
    model(batch(1)).mean().backward()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    optimizer.step()
    assert not torch.equal(model.first.weight, before["first.weight"])
    remove_gradient_release(model)  # finds none
    with prepare_for_gradient_release(model, optimizer):
        pass
    prepare_for_gradient_release(model, optimizer)
    remove_gradient_release(model)
    assert not model.first.weight._post_accumulate_grad_hooks


def test_a_copied_model_has_no_hooks() -> None:
    model, optimizer = make()
    prepare_for_gradient_release(model, optimizer)
    twin = copy.deepcopy(model)
    other = AdamW(twin.parameters(), lr=1e-2, **EAGER)
    twin(batch(0)).mean().backward()
    assert all(p.grad is not None for p in twin.parameters())
    other.step()
    model(batch(0)).mean().backward()
    assert torch.equal(model.last.weight, twin.last.weight)


def test_what_is_refused() -> None:
    model, optimizer = make()
    # Many classes here have the names of torch's.
    with pytest.raises(TypeError, match=r"optimizer=<class 'torch.optim.sgd.SGD'> is not"):
        prepare_for_gradient_release(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="gradient_release=True"):
        prepare_for_gradient_release(*make(release=False))
    theirs = model.norm.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="1 parameters have post-accumulate"):
        prepare_for_gradient_release(model, optimizer)
    assert not model.first.weight._post_accumulate_grad_hooks
    handle = prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True)
    handle.remove()
    theirs.remove()
    with prepare_for_gradient_release(model, optimizer):
        with pytest.raises(ValueError, match="released already"):
            prepare_for_gradient_release(model, optimizer)
        with pytest.raises(RuntimeError, match=r"last\.weight.*create_graph=True"):
            model(batch(0)).mean().backward(create_graph=True)


def test_ddp_is_refused_by_name(tmp_path) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model, optimizer = make()
        with pytest.raises(ValueError, match="FSDP2"):
            prepare_for_gradient_release(
                nn.parallel.DistributedDataParallel(model), optimizer
            )
    finally:
        dist.destroy_process_group()


def test_ddp_wrapped_later_is_refused_in_its_first_backward(tmp_path) -> None:
    import torch.distributed as dist

    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model, optimizer = make()
        prepare_for_gradient_release(model, optimizer)
        wrapped = nn.parallel.DistributedDataParallel(model)
        for i in range(2):
            with pytest.raises(RuntimeError, match=r"got its gradient back.*FSDP2"):
                wrapped(batch(i)).mean().backward()
            model.zero_grad()
        # Where gradients are only summed up, it comes before any write.
        model, optimizer = make()
        policy = {"accumulation": "buffer", "accumulation_steps": 2}
        prepare_for_gradient_release(model, optimizer, **policy)
        wrapped = nn.parallel.DistributedDataParallel(model)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=r"got its gradient back.*FSDP2"):
            wrapped(batch(0)).mean().backward()
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        twin = nn.Sequential(nn.parallel.DistributedDataParallel(Net()))
        other = AdamW(twin.parameters(), lr=1e-2, gradient_release=True, **EAGER)
        with pytest.raises(ValueError, match="FSDP2"):
            prepare_for_gradient_release(twin, other)
        # With a process group but no wrapper all is well.
        model, optimizer = make()
        prepare_for_gradient_release(model, optimizer)
        train(model, optimizer, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ask", ["step", "unscale_", "paused"])
def test_a_scaler_is_refused_at_its_step(ask: str) -> None:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with prepare_for_gradient_release(model, optimizer):
        scaler.scale(model(batch(0)).mean()).backward()
        scaler.step(optimizer)
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    with prepare_for_gradient_release(model, optimizer) as handle:
        # Nothing leads from a loss to what has scaled it.
        with handle.paused() if ask == "paused" else contextlib.nullcontext():
            scaler.scale(model(batch(0)).mean()).backward()
        if ask == "unscale_":
            scaler.unscale_(optimizer)  # finds no gradients, and does nothing
        words = r"except in handle\.paused.*GradScaler to unscale.*remove\(\).*bfloat16"
        with pytest.raises(RuntimeError, match=words):
            scaler.step(optimizer)
    # Without the hooks it is welcome.
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[model.last.weight]["step"] == (1 if ask == "paused" else 2)


def test_what_a_loop_gets_wrong_is_said_once() -> None:
    model, optimizer = make()
    prepare_for_gradient_release(model, optimizer)
    model(batch(0)).mean().backward()
    model(batch(1)).mean().backward()
    with pytest.warns(UserWarning, match="2 backwards since.*accumulation='buffer'"):
        optimizer.step()
    train(model, optimizer, 1)
    # As fully_shard does, after prepare: other parameters in their place.
    model, optimizer = make()
    prepare_for_gradient_release(model, optimizer)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    model(batch(0)).mean().backward()
    optimizer.step()  # the first may be a scheduler's dummy
    with pytest.warns(UserWarning, match="before any hook has run"):
        optimizer.step()
    with pytest.raises(ValueError, match="none of the model's trainable parameters"):
        prepare_for_gradient_release(model, optimizer)


@pytest.mark.full
def test_a_compiled_training_step_runs_the_hooks_as_they_are() -> None:
    pair = []
    for release in (False, True):
        model, optimizer = make(release=release)
        if release:
            prepare_for_gradient_release(model, optimizer)

        @torch.compile(backend="aot_eager")
        def one(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for i in range(3):
            one(batch(i))
        pair.append((model, optimizer))
    assert_same(*pair)


def test_compiled_autograd_is_refused() -> None:
    model, optimizer = make()
    prepare_for_gradient_release(model, optimizer)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(RuntimeError, match="compiled autograd"):
            torch.compile(lambda x: compiled(x).mean().backward(), backend="eager")(
                batch(0)
            )


def blocks(count=3):
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(count)]
    )


def checkpointed(model, x, reentrant):
    for block in model:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_checkpointing_block_by_block(reentrant: bool, head: bool) -> None:
    """A head outside of the blocks shows the hooks the outer backward; else none does."""
    pair = []
    for release in (False, True):
        model = nn.ModuleList([blocks(), nn.Linear(128, 2) if head else nn.Identity()])
        optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=release, **EAGER)
        if release:
            prepare_for_gradient_release(model, optimizer)
        for i in range(4):
            torch.manual_seed(i)
            x = torch.randn(4, 128, requires_grad=True)
            model[1](checkpointed(model[0], x, reentrant)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.append((model, optimizer))
    assert_same(*pair)


def test_a_second_gradient_in_one_backward_is_refused() -> None:
    block = blocks(1)
    model = nn.ModuleList([block, nn.Linear(128, 2)])
    optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=True, **EAGER)
    prepare_for_gradient_release(model, optimizer)
    shared = nn.ModuleList([block, block])
    x = torch.randn(4, 128, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"second gradient.*use_reentrant=False"):
        model[1](checkpointed(shared, x, True)).sum().backward()
    with pytest.warns(UserWarning, match="did not finish"):
        model[1](checkpointed([block], x, True)).sum().backward()
    # Without reentrance a shared block fires once.
    model[1](checkpointed(shared, x, False)).sum().backward()
    assert optimizer.state[block[0][0].weight]["step"] == 3


def test_backwards_of_blocks_alone_are_backwards_each() -> None:
    """No released parameter outside of reentrant blocks shows the outer backward."""
    block = blocks(1)
    optimizer = AdamW(block.parameters(), lr=1e-2, gradient_release=True, **EAGER)
    prepare_for_gradient_release(block, optimizer)
    x = torch.randn(4, 128, requires_grad=True)
    checkpointed(nn.ModuleList([block, block]), x, True).sum().backward()
    assert optimizer.state[block[0][0].weight]["step"] == 2
    with pytest.warns(UserWarning, match="2 backwards since.*the same parameters"):
        optimizer.step()


@pytest.mark.parametrize("head", [False, True])
def test_reentrance_and_what_a_whole_backward_is_needed_for(head: bool) -> None:
    pair = []
    for reentrant in (False, True):
        model = nn.ModuleList([blocks(), nn.Linear(128, 2) if head else nn.Identity()])
        optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=True, **EAGER)
        handle = prepare_for_gradient_release(
            model, optimizer, grad_norm=True, clip_param_norm=1e-3
        )
        for i in range(3):
            torch.manual_seed(i)
            x = torch.randn(4, 128, requires_grad=True)
            model[1](checkpointed(model[0], x, reentrant)).sum().backward()
            if head or not reentrant:
                optimizer.step()
            elif i == 0:
                with pytest.warns(UserWarning, match="3 backwards.*use_reentrant=False"):
                    optimizer.step()
        pair.append((model, handle.grad_norm))
    (plain, norm), (nested, other) = pair
    if head:
        # The head's gradients come first: the backwards of blocks belong to theirs.
        torch.testing.assert_close(other, norm)
        for p, q in zip(plain.parameters(), nested.parameters()):
            torch.testing.assert_close(q, p)


def test_an_error_at_the_end_of_a_backward_ends_it() -> None:
    model, optimizer = make()
    handle = prepare_for_gradient_release(model, optimizer)

    def fail(*arguments: object) -> None:
        raise ValueError("no update")

    update, handle._runner.update = handle._runner.update, fail
    with pytest.raises(RuntimeError, match="no update") as kept:
        model(batch(0)).mean().backward()
    handle._runner.update = update
    # The traceback, kept alive, holds the backward that failed: this is another one.
    with pytest.warns(UserWarning, match="did not finish"):
        model(batch(0)).mean().backward()
    assert kept.value.__traceback__ is not None
    assert optimizer.state[model.last.weight]["step"] == 1


def test_a_backward_started_by_a_hook_keeps_what_waits_apart() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    optimizer = SGD(model.parameters(), lr=1.0, gradient_release=True, **EAGER)
    prepare_for_gradient_release(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    x = torch.ones(1, 2)
    y = model[0](x)
    inner = (model[2](x) * 1000).sum()
    y.register_hook(lambda g: inner.backward())
    expected = y.detach().clone()
    model[1](y).sum().backward()
    moved = before["1.weight"] - model[1].weight
    assert torch.allclose(moved, expected.expand(2, 2))
    assert torch.allclose(before["2.weight"] - model[2].weight, torch.full((2, 2), 1e3))


@pytest.mark.kernels
@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_everything_is_let_go(pure: bool, removed: bool) -> None:
    """Removed hooks keep nothing alive, and neither does a model that is dropped."""
    model = nn.Linear(100, 100)
    optimizer = optimi_func.adamw(lr=0.1)
    if not pure:
        optimizer = AdamW(model.parameters(), lr=0.1, gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(model, optimizer)
    model(torch.ones(1, 100)).mean().backward()
    gone = [weakref.ref(handle._runner)]
    if removed:
        handle.remove()
    else:
        gone += [weakref.ref(model.weight), weakref.ref(model)]
        del model
    del handle, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_the_hooks_outlive_a_handle_that_nobody_keeps() -> None:
    model, optimizer = make()
    prepare_for_gradient_release(model, optimizer)
    gc.collect()
    train(model, optimizer, 1)
    assert optimizer.state[model.last.weight]["step"] == 1
    layer = nn.Linear(2, 1)
    pure = prepare_for_gradient_release(nn.ModuleList([layer]), adamw(lr=0.1))
    del pure
    gc.collect()
    with pytest.raises(RuntimeError, match="keep a reference"):
        layer(torch.ones(1, 2)).mean().backward()


def test_an_inner_loop_with_steps_of_its_own() -> None:
    inner = nn.Linear(2, 1, bias=False)
    optimizer = SGD(inner.parameters(), lr=1.0, gradient_release=True, **EAGER)
    prepare_for_gradient_release(inner, optimizer)
    before = inner.weight.detach().clone()

    @torch.enable_grad()
    def loop(g) -> None:
        for _ in range(2):
            inner(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(loop)
    y.sum().backward()
    assert torch.allclose(before - inner.weight, torch.full((1, 2), 2.0))


def test_sharded_parameters(tmp_path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        straight = make(release=False)
        train(*straight, 3)
        torch.manual_seed(0)
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=True, **EAGER)
        prepare_for_gradient_release(model, optimizer)
        train(model, optimizer, 3)
        for p, q in zip(straight[0].parameters(), model.parameters()):
            assert torch.equal(p, q.full_tensor())
        handle = optimizer.releases[0]
        handle.options = dataclasses.replace(handle.options, grad_norm=True)
        model(batch(3)).mean().backward()
        straight[0](batch(3)).mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in straight[0].parameters()])
        assert torch.allclose(handle.grad_norm, norm)
    finally:
        dist.destroy_process_group()


def test_gradients_that_waited_are_freed_when_a_backward_fails() -> None:
    model, optimizer = make()
    waiting = []

    def on_gradient(p) -> None:
        waiting.append(weakref.ref(p.grad))

    model.last.weight.register_post_accumulate_grad_hook(on_gradient)
    prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True)
    hidden = Bad.apply(model.first(batch(0)).relu())
    with pytest.raises(ZeroDivisionError):
        model.last(model.norm(model.middle(hidden))).mean().backward()
    assert len(waiting) == 1 and waiting[0]() is None
    assert all(p.grad is None for p in model.parameters())
    with pytest.warns(UserWarning, match="did not finish"):
        train(model, optimizer, 1)


def test_other_peoples_gradient_hooks_and_frozen_layers() -> None:
    pair = []
    for release in (False, True):
        model, optimizer = make(SGD, release=release)
        model.first.requires_grad_(False)
        model.last.weight.register_hook(lambda g: 2 * g)
        seen = []
        model.norm.weight.register_post_accumulate_grad_hook(seen.append)
        if release:
            prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True)
        train(model, optimizer, 3)
        assert len(seen) == 3
        model.first.requires_grad_(True)  # thawed: its gradient waits for step()
        train(model, optimizer, 1)
        assert optimizer.state[model.first.weight]["step"] == 1
        pair.append((model, optimizer))
    assert_same(*pair)


def test_a_compiled_model() -> None:
    pair = []
    for release in (False, True):
        model, optimizer = make(release=release)
        if release:
            prepare_for_gradient_release(model, optimizer)
        train(torch.compile(model, backend="aot_eager"), optimizer, 3)
        pair.append((model, optimizer))
    assert_same(*pair)


class Adapted(nn.Module):
    """LoRA's way: a large frozen weight, two small trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(128, 128).requires_grad_(False)
        self.down = nn.Linear(128, 4, bias=False)
        self.up = nn.Linear(4, 128, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_beside_frozen_weights() -> None:
    pair = []
    for release in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 128), Adapted(), Adapted())
        model[0].requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = AdamW(trained, lr=1e-2, gradient_release=release, **EAGER)
        if release:
            prepare_for_gradient_release(model, optimizer)
        for i in range(3):
            model(batch(i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.append((trained, optimizer))
    assert len(pair[1][1].state) == 4
    for p, q in zip(pair[0][0], pair[1][0]):
        assert torch.equal(p, q)


def constant(optimizer):
    return lr_scheduler.ConstantLR(optimizer, factor=0.3, total_iters=5)


def chain(optimizer):
    return [constant(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.8)]


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.9**i),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda i: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": constant,
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, chain(o), milestones=[4]),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(chain(o), optimizer=o),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=10),
}


def test_the_list_of_schedulers_is_torchs() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_reaches_the_hooks(name: str) -> None:
    pair, rates = [], []
    for release in (False, True):
        model, optimizer = make(release=release)
        scheduler = SCHEDULERS[name](optimizer)
        if release:
            prepare_for_gradient_release(model, optimizer)
        seen = []
        (group,) = optimizer.param_groups
        for i in range(8):
            seen.append((group["lr"], group["betas"]))
            train(model, optimizer, 1, start=i)
            scheduler.step(*[1.0] if name == "ReduceLROnPlateau" else [])
        pair.append((model, optimizer))
        rates.append(seen)
    assert rates[0] == rates[1]
    assert len(set(rates[1])) > 1
    assert_same(*pair)


@pytest.mark.parametrize("way", [None, "buffer", "states"])
def test_a_loop_without_step_draws_no_warning_of_a_scheduler(way: str | None) -> None:
    """The loop of optimi's own page: backward, then the scheduler. Warnings are errors."""
    model, optimizer = make()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.8)
    sums = {"accumulation": way, "accumulation_steps": 2} if way else {}
    prepare_for_gradient_release(model, optimizer, **sums)
    for i in range(4):
        model(batch(i)).square().mean().backward()
        if way is None or i % 2:
            scheduler.step()


@pytest.mark.parametrize("way", [None, "buffer", "optimi's flag"])
def test_a_scheduler_before_the_first_update_draws_it(way: str | None) -> None:
    model, optimizer = make()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.8)
    sums = {"accumulation": way, "accumulation_steps": 2} if way == "buffer" else {}
    prepare_for_gradient_release(model, optimizer, **sums)
    optimizer.optimizer_accumulation = way == "optimi's flag"
    if way:
        model(batch(0)).square().mean().backward()
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@pytest.mark.parametrize("pending_bytes", [0, 600, 1 << 20])
def test_small_gradients_wait_for_no_more_bytes(
    pending_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimi_func.gradient_release.runner.PENDING_BYTES", pending_bytes)
    model, optimizer = make()
    calls = []
    original = optimizer.update

    def counting(params, *rest, **options) -> None:
        calls.append(len(params))
        original(params, *rest, **options)

    optimizer.update = counting
    prepare_for_gradient_release(model, optimizer)
    train(model, optimizer, 1)
    large = sum(p.numel() >= 8192 for p in model.parameters())
    small = sum(p.numel() < 8192 for p in model.parameters())
    assert sum(calls) == large + small
    if pending_bytes == 0:
        assert calls == [1] * (large + small)
    elif pending_bytes == 1 << 20:
        assert sorted(calls) == [1] * large + [small]


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ZeroDivisionError("in the middle of backward")


def test_an_exception_in_the_middle_of_backward_leaks_nothing() -> None:
    model, optimizer = make()
    prepare_for_gradient_release(model, optimizer)
    train(model, optimizer, 2)
    before = copy.deepcopy(model.state_dict())
    hidden = Bad.apply(model.first(batch(0)).relu())
    loss = model.last(model.norm(model.middle(hidden))).mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"middle.weight"}
    with pytest.warns(UserWarning, match=r"did not finish.* before it failed are applied"):
        train(model, optimizer, 1)
    # One step each since then: the small gradients of the failed backward are gone.
    steps = {k: int(optimizer.state[p]["step"]) for k, p in model.named_parameters()}
    assert steps.pop("middle.weight") == 4
    assert set(steps.values()) == {3}


def test_hyperparameters_are_looked_up_when_the_hooks_run() -> None:
    model, optimizer = make(SGD)
    prepare_for_gradient_release(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # replaces the groups
    assert len(optimizer.releases) == 1
    assert copy.deepcopy(optimizer).releases == []
    optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, 1)
    assert not torch.equal(model.last.weight, before["last.weight"])


def test_runs_resume_in_the_other_mode() -> None:
    straight = make(release=False)
    train(*straight, 10)
    for first, second in ((True, False), (False, True)):
        model, optimizer = make(release=first)
        if first:
            prepare_for_gradient_release(model, optimizer)
        train(model, optimizer, 5)
        twin, other = make(release=second)
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        if second:
            prepare_for_gradient_release(twin, other)
        train(twin, other, 5, start=5)
        assert_same(straight, (twin, other))


def test_optimizer_accumulation_moves_the_state_alone() -> None:
    model, optimizer = make(weight_decay=0.1)
    prepare_for_gradient_release(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    optimizer.optimizer_accumulation = True
    for i in range(3):
        model(batch(i)).mean().backward()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert optimizer.state[model.last.weight]["step"] == 3
    optimizer.optimizer_accumulation = False
    model(batch(3)).mean().backward()
    assert not torch.equal(model.last.weight, before["last.weight"])


def test_closures_update_inside() -> None:
    pair = []
    for release in (False, True):
        model, optimizer = make(release=release)
        if release:
            prepare_for_gradient_release(model, optimizer)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(batch(0)).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        pair.append((model, optimizer))
    assert_same(*pair)


def test_partial_training_and_two_optimizers() -> None:
    torch.manual_seed(0)
    model = Net()
    model.first.requires_grad_(False)
    one = AdamW(model.middle.parameters(), lr=1e-2, gradient_release=True, **EAGER)
    prepare_for_gradient_release(model, one)
    two = SGD(model.last.parameters(), lr=1e-2, gradient_release=True, **EAGER)
    prepare_for_gradient_release(model, two)
    model(batch(0)).mean().backward()
    assert model.first.weight.grad is None
    assert model.norm.weight.grad is not None
    assert model.last.weight.grad is None
    assert one.state[model.middle.weight]["step"] == 1
    remove_gradient_release(model)
    assert not model.last.weight._post_accumulate_grad_hooks


def test_a_failing_update_names_its_parameter_and_changes_nothing() -> None:
    model, optimizer = make()
    prepare_for_gradient_release(model, optimizer)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = -1.0
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"middle\.weight.*Invalid learning rate"):
        model(batch(0)).mean().backward()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_checkpointing_and_autocast() -> None:
    pair = []
    for release in (False, True):
        model, optimizer = make(release=release)
        if release:
            prepare_for_gradient_release(model, optimizer)
        for i in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = checkpoint(model, batch(i), use_reentrant=False)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.append((model, optimizer))
    assert_same(*pair)


def test_no_moment_holds_all_gradients() -> None:
    """Counted from the gradients alive at each update, not from a clock or a profiler."""
    blocks = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(8)])
    optimizer = SGD(blocks.parameters(), lr=1e-3, gradient_release=True, **EAGER)
    alive = []
    original = optimizer.update

    def counting(params, grads, *rest, **options) -> None:
        left = sum(p.grad is not None for p in blocks.parameters())
        alive.append(left + len(grads))
        original(params, grads, *rest, **options)

    optimizer.update = counting
    prepare_for_gradient_release(blocks, optimizer)
    blocks(torch.randn(4, 128)).mean().backward()
    assert alive == [1] * 8


def peak(model, optimizer, trace) -> float:
    """Peak of backward and update above what was there, as a share of the gradients."""
    x = torch.randn(32, 256)
    with profile(profile_memory=True) as recorded:
        for _ in range(3):
            loss = model(x).square().mean()
            with record_function("measured"):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    recorded.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    part = max((e for e in events if e["name"] == "measured"), key=lambda e: e["ts"])
    memory = [e for e in events if e["name"] == "[memory]"]
    sizes = sorted((e["ts"], e["args"]["Total Allocated"]) for e in memory)
    before = [size for when, size in sizes if when < part["ts"]][-1]
    end = part["ts"] + part["dur"]
    most = max(size for when, size in sizes if part["ts"] <= when <= end)
    return (most - before) / sum(p.nbytes for p in model.parameters())


@pytest.mark.kernels
def test_the_peak_is_a_fifth_of_the_gradients_at_most(tmp_path) -> None:
    """By the profiler's count of bytes, on eight blocks of two layers."""
    shares = {}
    for release in (False, True):
        layers = []
        for _ in range(8):
            layers += [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)]
        model = nn.Sequential(*layers)
        optimizer = AdamW(model.parameters(), lr=1e-3, gradient_release=release)
        if release:
            prepare_for_gradient_release(model, optimizer)
        shares[release] = peak(model, optimizer, tmp_path / "trace.json")
    assert shares[False] > 0.8
    assert shares[True] <= 0.2
