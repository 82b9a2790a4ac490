"""Gradients that wait on one CUDA stream and are used on another."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from optimi_func import SGD, prepare_for_gradient_release
from optimi_func.core import torch_private
from optimi_func.gradient_release import backward as streams
from optimi_func.gradient_release import runner


class Stream:
    """A stand-in for a CUDA stream that notes the streams it waits for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Any]]:
    """Every tensor whose use on a stream is recorded."""
    found: list[tuple[Tensor, Any]] = []
    monkeypatch.setattr(
        Tensor, "record_stream", lambda x, s: found.append((x, s)), raising=True
    )
    return found


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_end_of_a_backward_waits_for_the_hooks_streams(
    accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks, caller = Stream(), Stream()
    model = torch.nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, gradient_release=True, compile=False)
    options: dict[str, Any] = {}
    if accumulate:
        options = {"accumulation": "buffer", "accumulation_steps": 1}
    handle = prepare_for_gradient_release(model, optimizer, **options)
    monkeypatch.setattr(
        streams,
        "current_stream",
        lambda _: hooks if torch_private.backward_id() != -1 else caller,
    )
    end = handle._runner._finish

    def ended(backward: Any) -> None:
        # Callbacks run after autograd has gone back to the caller's streams.
        monkeypatch.setattr(streams, "current_stream", lambda _: caller)
        end(backward)

    monkeypatch.setattr(handle._runner, "_finish", ended)
    recorded: list[Tensor] = []
    monkeypatch.setattr(runner, "record", recorded.extend)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    assert not model.weight.equal(before)
    assert {x.shape for x in recorded} == {p.shape for p in model.parameters()}
    assert caller.waited == [hooks] and not hooks.waited


def test_waiting_is_for_other_streams_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here, one, two = Stream(), Stream(), Stream()
    monkeypatch.setattr(streams, "current_stream", lambda _: here)
    streams.wait_for([one, here, None, two, one], torch.device("cuda", 0))
    assert len(here.waited) == 2 and set(here.waited) == {one, two}


def test_the_allocator_is_told_of_gpu_tensors_alone(
    used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Stream()
    monkeypatch.setattr(streams, "current_stream", lambda _: here)
    with FakeTensorMode():
        x = torch.ones(2, device="cuda")
    streams.record([x, torch.ones(2)])
    assert len(used) == 1 and used[0][0] is x and used[0][1] is here


def test_nothing_waits_on_a_cpu(used: Any) -> None:
    assert streams.current_stream(torch.device("cpu")) is None
    streams.wait_for([None, None], torch.device("cpu"))
    streams.record([torch.ones(2)])
    assert not used


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("options", [{}, {"clip_param_norm": 1.0}], ids=str)
def test_release_on_a_side_stream(options: dict[str, Any]) -> None:
    """Memory of gradients that waited is not handed out while they are read."""
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(20)]
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = SGD(model.parameters(), lr=0.1, gradient_release=True)
        handle = prepare_for_gradient_release(model, optimizer, **options)
        side = torch.cuda.Stream() if device == "cuda" else None
        for _ in range(5):
            x = torch.full((8, 64), 0.1, device=device)
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = model(x).square().sum()
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
                torch.cuda._sleep(10_000_000)  # the caller's stream lags behind
            loss.backward()
            with torch.cuda.stream(side):
                # Takes whatever memory is free there.
                junk = [torch.full((64, 64), float("nan"), device=device) for _ in layers]
            del junk
        handle.remove()
        ends.append([p.detach().cpu() for p in model.parameters()])
    for p, q in zip(*ends):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
