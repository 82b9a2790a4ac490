"""The step in backward: equal to the ordinary one, and never silently something else."""

import contextlib
import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from cases import CLASSES
from measured import peak_bytes
from released import EAGER, Net, assert_same, batch, both, flat, make, of, prepared, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import optimi_func
from optimi_func import (
    SGD,
    AdamW,
    StableAdamW,
    prepare_for_gradient_release,
    remove_gradient_release,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", CLASSES.values())
def test_release_is_the_ordinary_step_bit_for_bit(cls, dtype) -> None:
    def run(model, optimizer):
        train(model, optimizer, 20, scheduler=lr_scheduler.ExponentialLR(optimizer, 0.9))

    both(run, partial(make, cls, dtype))


@pytest.mark.kernels
@pytest.mark.parametrize("options", [EAGER, {"compile": True}], ids=str)
def test_small_gradients_keep_their_memory_order(options) -> None:
    """A mean over a channels_last gradient is summed in its order, also while it waits."""

    def conv(release):
        torch.manual_seed(0)
        model = nn.Conv2d(4, 16, 3).to(memory_format=torch.channels_last)
        return of(model, StableAdamW, release, **options)

    def run(model, optimizer):
        for i in range(6):
            x = 3.0**i * torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    both(run, conv)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["adamw", "stableadamw"])
def test_compiled_release_makes_no_further_graph(name: str, graphs) -> None:
    made = []

    def run(model, optimizer):
        train(model, optimizer, 6)
        made.append(graphs())

    both(run, partial(make, CLASSES[name], compile=True))
    assert made[0] == made[1]


def test_gradients_are_gone_and_the_hooks_can_be() -> None:
    model, optimizer, handle = prepared()
    model(batch(0)).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    before = flat(model)
    model(batch(1)).mean().backward()
    assert torch.equal(flat(model), before)
    optimizer.step()
    assert not torch.equal(flat(model), before)
    with pytest.warns(UserWarning, match="has no hooks"):
        remove_gradient_release(model)
    with prepare_for_gradient_release(model, optimizer):
        pass
    prepare_for_gradient_release(model, optimizer)
    remove_gradient_release(model)
    assert not model.first.weight._post_accumulate_grad_hooks


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inside", [lambda m: m, nn.Sequential])
def test_ddp_is_refused_by_name(inside) -> None:
    with pytest.raises(ValueError, match="FSDP2"):
        prepared(of(inside(DistributedDataParallel(Net()))))
    # With a process group but no wrapper all is well.
    model, optimizer, _ = prepared()
    train(model, optimizer, 1)


@pytest.mark.usefixtures("one_process")
def test_ddp_wrapped_later_is_refused_in_its_first_backward() -> None:
    model, _, _ = prepared()
    wrapped = DistributedDataParallel(model)
    for i in range(2):
        with pytest.raises(RuntimeError, match=r"got its gradient back.*FSDP2"):
            wrapped(batch(i)).mean().backward()
        model.zero_grad()
    # Where gradients are only summed up, it comes before any write.
    model, _, _ = prepared(accumulation="buffer", accumulation_steps=2)
    wrapped, before = DistributedDataParallel(model), flat(model)
    with pytest.raises(RuntimeError, match=r"got its gradient back.*FSDP2"):
        wrapped(batch(0)).mean().backward()
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("ask", ["step", "unscale_", "paused"])
def test_a_scaler_is_refused_at_its_step(ask: str) -> None:
    model, optimizer, handle = prepared()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(batch(0)).mean()).backward()
    off.step(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    # Nothing leads from a loss to what has scaled it.
    with handle.paused() if ask == "paused" else contextlib.nullcontext():
        scaler.scale(model(batch(0)).mean()).backward()
    if ask == "unscale_":
        scaler.unscale_(optimizer)  # finds no gradients, and does nothing
    words = r"except in handle\.paused.*GradScaler to unscale.*remove\(\).*bfloat16"
    with pytest.raises(RuntimeError, match=words):
        scaler.step(optimizer)
    # Without the hooks it is welcome.
    handle.remove()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[model.last.weight]["step"] == (2 if ask == "paused" else 3)


def test_what_a_loop_gets_wrong_is_said_once() -> None:
    model, optimizer, _ = prepared()
    model(batch(0)).mean().backward()
    model(batch(1)).mean().backward()
    with pytest.warns(UserWarning, match="2 backwards since.*accumulation='buffer'"):
        optimizer.step()
    train(model, optimizer, 1)
    # As fully_shard does, after prepare: other parameters in their place.
    model, optimizer, _ = prepared()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    model(batch(0)).mean().backward()
    optimizer.step()  # the first may be a scheduler's dummy
    with pytest.warns(UserWarning, match="before any hook has run"):
        optimizer.step()


@pytest.mark.full
def test_a_compiled_training_step_runs_the_hooks_as_they_are() -> None:
    def run(model, optimizer):
        @torch.compile(backend="aot_eager")
        def one(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for i in range(3):
            one(batch(i))

    both(run)


def test_a_compiled_model_is_released() -> None:
    both(lambda model, o: train(torch.compile(model, backend="aot_eager"), o, 3))


def test_compiled_autograd_is_refused() -> None:
    model, _, _ = prepared()
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(RuntimeError, match="compiled autograd"):
            torch.compile(lambda x: compiled(x).mean().backward(), backend="eager")(
                batch(0)
            )


# Checkpointing


def blocks(count=3):
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(count)]
    )


def with_head(head: bool) -> nn.Module:
    return nn.ModuleList([blocks(), nn.Linear(128, 2) if head else nn.Identity()])


def checkpointed(model, x, reentrant):
    for block in model:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


def loss_of(model, i: int, reentrant: bool):
    torch.manual_seed(i)
    x = torch.randn(4, 128, requires_grad=True)
    return model[1](checkpointed(model[0], x, reentrant)).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_checkpointing_block_by_block(reentrant: bool, head: bool) -> None:
    """A head outside of the blocks shows the hooks the outer backward; else none does."""

    def run(model, optimizer):
        for i in range(4):
            loss_of(model, i, reentrant).backward()
            optimizer.step()
            optimizer.zero_grad()

    both(run, lambda release: of(with_head(head), release=release))


def test_a_second_gradient_in_one_backward_is_refused() -> None:
    block = blocks(1)
    model, optimizer, _ = prepared(of(nn.ModuleList([block, nn.Linear(128, 2)])))
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
    block, optimizer, _ = prepared(of(blocks(1)))
    x = torch.randn(4, 128, requires_grad=True)
    checkpointed(nn.ModuleList([block, block]), x, True).sum().backward()
    assert optimizer.state[block[0][0].weight]["step"] == 2
    with pytest.warns(UserWarning, match="2 backwards since.*the same parameters"):
        optimizer.step()


@pytest.mark.parametrize("head", [False, True])
def test_reentrance_and_what_a_whole_backward_is_needed_for(head: bool) -> None:
    ends = []
    for reentrant in (False, True):
        how = {"grad_norm": True, "clip_param_norm": 1e-3}
        model, optimizer, handle = prepared(of(with_head(head)), **how)
        for i in range(3):
            loss_of(model, i, reentrant).backward()
            if head or not reentrant:
                optimizer.step()
            elif i == 0:
                with pytest.warns(UserWarning, match="3 backwards.*use_reentrant=False"):
                    optimizer.step()
        ends.append((flat(model), handle.grad_norm.double()))
    if head:
        # The head's gradients come first: the backwards of blocks belong to theirs.
        torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_checkpointing_and_autocast() -> None:
    def run(model, optimizer):
        for i in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = checkpoint(model, batch(i), use_reentrant=False)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    both(run)


# Errors and other backwards


def test_an_error_at_the_end_of_a_backward_ends_it() -> None:
    model, optimizer, handle = prepared()

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
    prepared(of(model, SGD, lr=1.0))
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


def test_an_inner_loop_with_steps_of_its_own() -> None:
    inner, optimizer, _ = prepared(of(nn.Linear(2, 1, bias=False), SGD, lr=1.0))
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


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ZeroDivisionError("in the middle of backward")


def test_an_exception_in_the_middle_of_backward_leaks_nothing() -> None:
    model, optimizer = make()
    waiting = []

    def on_gradient(p) -> None:
        waiting.append(weakref.ref(p.grad))

    model.last.weight.register_post_accumulate_grad_hook(on_gradient)
    prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True)
    train(model, optimizer, 2)
    before = copy.deepcopy(model.state_dict())
    hidden = Bad.apply(model.first(batch(0)).relu())
    loss = model.last(model.norm(model.middle(hidden))).mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert len(waiting) == 3 and waiting[-1]() is None
    assert all(p.grad is None for p in model.parameters())
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"middle.weight"}
    with pytest.warns(UserWarning, match=r"did not finish.* before it failed are applied"):
        train(model, optimizer, 1)
    # One step each since then: the small gradients of the failed backward are gone.
    steps = {k: int(optimizer.state[p]["step"]) for k, p in model.named_parameters()}
    assert steps.pop("middle.weight") == 4
    assert set(steps.values()) == {3}


# Lives


@pytest.mark.kernels
@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_everything_is_let_go(pure: bool, removed: bool) -> None:
    """Removed hooks keep nothing alive, and neither does a model that is dropped."""
    model, optimizer = of(nn.Linear(100, 100))
    if pure:
        optimizer = optimi_func.adamw(lr=0.1)
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
    model, optimizer = prepared()[:2]
    gc.collect()
    train(model, optimizer, 1)
    assert optimizer.state[model.last.weight]["step"] == 1


# Models and loops


def test_other_peoples_gradient_hooks_and_frozen_layers() -> None:
    def run(model, optimizer):
        train(model, optimizer, 3)
        assert len(model.seen) == 3
        model.first.requires_grad_(True)  # thawed: its gradient waits for step()
        train(model, optimizer, 1)
        assert optimizer.state[model.first.weight]["step"] == 1

    def frozen(release):
        model, optimizer = make(SGD, release=release)
        model.first.requires_grad_(False)
        model.last.weight.register_hook(lambda g: 2 * g)
        model.seen = []
        model.norm.weight.register_post_accumulate_grad_hook(model.seen.append)
        return model, optimizer

    both(run, frozen, ignore_existing_hooks=True)


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
    def adapted(release):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 128), Adapted(), Adapted())
        model[0].requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, AdamW(trained, lr=1e-2, gradient_release=release, **EAGER)

    _, optimizer = both(partial(train, steps=3), adapted)
    assert len(optimizer.state) == 4


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


def test_hyperparameters_are_looked_up_when_the_hooks_run() -> None:
    model, optimizer, _ = prepared(make(SGD))
    optimizer.load_state_dict(optimizer.state_dict())  # replaces the groups
    assert len(optimizer.releases) == 1
    assert copy.deepcopy(optimizer).releases == []
    for lr in (0.0, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        before = flat(model)
        train(model, optimizer, 1)
        assert torch.equal(flat(model), before) == (lr == 0.0)


@pytest.mark.parametrize("first", [False, True])
def test_runs_resume_in_the_other_mode(first: bool) -> None:
    straight = make(release=False)
    train(*straight, 10)
    one, other = make(release=first), make(release=not first)
    prepared(one if first else other)
    train(*one, 5)
    for part, its in zip(other, one):
        part.load_state_dict(its.state_dict())
    train(*other, 5, start=5)
    assert_same(straight, other)


def test_partial_training_and_two_optimizers() -> None:
    torch.manual_seed(0)
    model = Net()
    model.first.requires_grad_(False)
    one, two = of(model.middle)[1], of(model.last, SGD)[1]
    for optimizer in (one, two):
        prepare_for_gradient_release(model, optimizer)
    model(batch(0)).mean().backward()
    assert model.first.weight.grad is None
    assert model.norm.weight.grad is not None
    assert model.last.weight.grad is None
    assert one.state[model.middle.weight]["step"] == 1
    remove_gradient_release(model)
    assert not model.last.weight._post_accumulate_grad_hooks


# Memory


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


@pytest.mark.kernels
def test_the_peak_is_a_fifth_of_the_gradients_at_most() -> None:
    """By the profiler's count of bytes, on eight blocks of two layers."""

    def training(release: bool):
        layers = []
        for _ in range(8):
            layers += [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)]
        model, optimizer = of(nn.Sequential(*layers), release=release, compile=None)
        if release:
            prepare_for_gradient_release(model, optimizer)
        losses = []

        def step() -> None:
            losses.pop().backward()
            optimizer.step()
            optimizer.zero_grad()

        x = torch.randn(32, 256)
        return lambda: losses.append(model(x).square().mean()), step

    gradients = 8 * 4 * (2 * 256 * 512 + 256 + 512)
    standard, released = (
        peak_bytes(partial(training, release), 3) / gradients for release in (False, True)
    )
    assert standard > 0.8 and released <= 0.2
