"""Gradients that a loop throws away or looks at: `handle.paused()`."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from released import EAGER, Net, assert_same, batch, make, of, prepared, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from optimi_func import (
    SGD,
    AdamW,
    Mixed,
    adamw,
    lion,
    prepare_for_gradient_release,
)

BUFFER = {"accumulation": "buffer"}


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 16))
    return generator, nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1))


def optimizer_of(model: nn.Module, release: bool, mixed: bool) -> Any:
    options = {"gradient_release": release, **EAGER}
    if not mixed:
        return AdamW(model.parameters(), lr=1e-2, betas=(0.5, 0.9), **options)
    parts = ("*.weight", adamw(lr=1e-2)), ("*.bias", lion(lr=1e-3))
    return Mixed(model.named_parameters(), *parts, **options)


def gan(way: str, apart: bool = False, mixed: bool = False, **options: Any) -> Any:
    """Train a generator and a discriminator in the ordinary way, paused or toggled.

    Args:
        way: "ordinary", or what keeps the generator's loss from moving the discriminator:
            "paused", "toggled", or nothing ("released").
        apart: The discriminator's loss has two backwards, as in PyTorch's DCGAN tutorial.
    """
    G, D = networks()
    og, od = (optimizer_of(m, way != "ordinary", mixed) for m in (G, D))
    if way != "ordinary":
        prepare_for_gradient_release(G, og)
        handle = prepare_for_gradient_release(D, od, **options)
    for i in range(4):
        torch.manual_seed(i)
        z, x = torch.randn(8, 4), torch.randn(8, 16)
        if way == "toggled":
            D.requires_grad_(False)
        loss = F.softplus(-D(G(z))).mean()
        if way == "paused":
            with handle.paused():
                loss.backward()
        else:
            loss.backward()
        D.requires_grad_(True)
        og.step()
        og.zero_grad()
        od.zero_grad()
        losses = F.softplus(-D(x)).mean(), F.softplus(D(G(z).detach())).mean()
        for part in losses if apart else [sum(losses)]:
            part.backward()
        od.step()
        od.zero_grad()
    return (G, og), (D, od)


@pytest.mark.parametrize("way", ["paused", "toggled"])
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({}, {}),
        ({}, {"clip_param_norm": 1e6, "grad_norm": True}),
        ({"mixed": True}, {}),
        ({"apart": True}, BUFFER),
    ],
    ids=["adamw", "norms", "mixed", "two backwards"],
)
def test_a_gan_ends_as_in_the_ordinary_run(way: str, how: Any, options: Any) -> None:
    for one, other in zip(gan("ordinary", **how), gan(way, **how, **options)):
        assert_same(one, other)


def test_a_gan_that_pauses_nothing_is_told_how() -> None:
    with pytest.warns(UserWarning) as said:
        _, (D, _) = gan("released")
    texts = [str(w.message) for w in said]
    assert len(texts) == 2 and all("handle.paused()" in text for text in texts)
    assert texts[0].startswith("zero_grad() between a backward and step() drops nothing")
    assert texts[1].startswith("2 backwards since the last step()")
    _, (right, _) = gan("ordinary")
    assert not torch.equal(D[0].weight, right[0].weight)


def losses_of(release: bool) -> tuple[Any, Any, list[Tensor]]:
    """Train with a probe of another loss's gradient before every step."""
    model, optimizer = make(release=release)
    paused = no_pause
    if release:
        paused = prepare_for_gradient_release(model, optimizer).paused
    seen: list[Tensor] = []
    for i in range(3):
        with paused():
            model(batch(50 + i)).abs().mean().backward()
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        train(model, optimizer, 1, start=i)
    return model, optimizer, seen


def no_pause() -> Any:
    return torch.enable_grad()


def loss_of(model: nn.Module, i: int) -> Tensor:
    return model(batch(i)).square().mean()


def test_a_probe_sees_the_gradients_and_moves_nothing() -> None:
    (*one, probed), (*other, seen) = losses_of(False), losses_of(True)
    assert_same(one, other)
    assert all(map(torch.equal, probed, seen)) and len(seen) == 3 * 7


@pytest.mark.parametrize("policy", [{}, BUFFER, {"clip_global_norm": 1e6}], ids=str)
def test_gradients_that_nobody_drops_join_the_next_step(policy: Any) -> None:
    ends = []
    for release in (False, True):
        model, optimizer = make(release=release)
        if release:
            handle = prepare_for_gradient_release(model, optimizer, **policy)
        for i in range(0, 6, 2):
            one, other = (partial(loss_of, model, j) for j in (i, i + 1))
            if release:
                with handle.paused():
                    one().backward()
                handle.backward(other)
            else:
                one().backward()
                other().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((model, optimizer))
    assert_same(*ends)


def test_pauses_nest_and_end_with_an_exception() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=1.0, gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(model, optimizer)
    before = model.weight.detach().clone()

    def backward() -> None:
        model(torch.ones(1, 2)).sum().backward()

    with handle.paused():
        with pytest.raises(ZeroDivisionError), handle.paused():
            backward()
            raise ZeroDivisionError
        backward()
        # Autograd's threads are others than the one that pauses.
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0))
    assert torch.equal(model.weight, before) and not optimizer.state
    model.zero_grad()
    backward()
    assert torch.equal(model.weight, before - 1) and model.weight.grad is None


def test_a_running_backward_cannot_be_paused() -> None:
    model, _, handle = prepared()

    def pause(_: Tensor) -> None:
        with handle.paused():
            raise AssertionError("entered")

    hook = model.first.weight.register_hook(pause)
    with pytest.raises(RuntimeError, match=r"paused\(\) inside a backward"):
        model(batch(0)).mean().backward()
    hook.remove()
    with handle.paused():
        model(batch(0)).mean().backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("accumulation", ["buffer", "states"])
def test_an_open_cycle_waits(accumulation: str) -> None:
    ends = []
    for probed in (False, True):
        model, optimizer, handle = prepared(accumulation=accumulation, accumulation_steps=2)
        for i in range(4):
            model(batch(i)).square().mean().backward()
            if probed:
                position = handle.state_dict()["position"]
                with handle.paused():
                    model(batch(50 + i)).square().mean().backward()
                assert handle.state_dict()["position"] == position
                model.zero_grad()
        ends.append((model, optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("accumulation", ["buffer", "states"])
def test_a_cycle_and_gradients_aside_are_not_two_steps(accumulation: str) -> None:
    model, optimizer, handle = prepared(accumulation=accumulation)
    model(batch(0)).square().mean().backward()
    with handle.paused():
        model(batch(1)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"in two steps: drop one.*zero_grad\(\)"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    # With one more backward it is one step of all three.
    model(batch(2)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model.last.weight]["step"] == 1
    assert not torch.equal(before[0], model.first.weight)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_paused_a_backward_is_as_without_release() -> None:
    """Nothing is measured twice, and second derivatives may be asked for."""
    model, optimizer, handle = prepared(clip_global_norm=0.1)
    calls: list[Tensor] = []

    def loss_fn() -> Tensor:
        calls.append(model(batch(0)).square().mean())
        return calls[-1]

    handle.backward(loss_fn)
    assert len(calls) == 2
    optimizer.step()
    with handle.paused():
        handle.backward(loss_fn)
        assert len(calls) == 3
        optimizer.zero_grad()
        loss_fn().backward(create_graph=True)
    assert all(p.grad.requires_grad for p in model.parameters())
    optimizer.zero_grad()


def test_backwards_that_are_all_paused_are_backwards() -> None:
    """The hooks have run, so that nothing is wrong with the model's parameters."""
    model, optimizer, handle = prepared()
    for i in range(3):
        with handle.paused():
            model(batch(i)).mean().backward()
        optimizer.zero_grad()
        optimizer.step()
    assert not optimizer.state


def test_zero_grad_in_its_usual_places_says_nothing() -> None:
    for first in (False, True):
        model, optimizer, _ = prepared()
        for i in range(3):
            if first:
                optimizer.zero_grad()
            model(batch(i)).mean().backward()
            optimizer.step()
            if not first:
                optimizer.zero_grad()

        def closure(model: Net = model, optimizer: AdamW = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(0)).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure)


@pytest.mark.usefixtures("one_process")
def test_a_sharded_model_is_paused() -> None:
    straight = make(SGD, release=False)
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model, optimizer, handle = prepared(of(model, SGD))
    for i in range(2):
        with handle.paused():
            model(batch(50 + i)).abs().mean().backward()
        straight[0](batch(50 + i)).abs().mean().backward()
        for p, q in zip(straight[0].parameters(), model.parameters()):
            assert torch.equal(p.grad, q.grad.full_tensor())
        if i:  # the first is left, and joins the step
            optimizer.zero_grad()
            straight[1].zero_grad()
        train(*straight, 1, start=i)
        train(model, optimizer, 1, start=i)
    for p, q in zip(straight[0].parameters(), model.parameters()):
        assert torch.equal(p, q.full_tensor())


def test_a_loop_that_drops_applied_gradients_is_told_once() -> None:
    """As by `continue` after a backward, or after a probe."""
    model, optimizer, _ = prepared()
    model(batch(0)).mean().backward()
    with pytest.warns(UserWarning, match=r"drops nothing.*with handle\.paused\(\)"):
        optimizer.zero_grad()
    optimizer.zero_grad()
