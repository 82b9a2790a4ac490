"""What holds on a CUDA device alone: graphs of a whole step, no waiting, few launches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CLASSES
from torch import Tensor
from torch.autograd import DeviceType

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

SHAPES = [(16,), (3, 4), (), (7,), (300, 300), (128, 128)]
STEPS = 4  # until everything is compiled, and what is small lies side by side


def params(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [p.to(device).requires_grad_() for p in made]


def fill(ps: list[Tensor], t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in ps:
        g = torch.randn(p.shape, generator=generator)
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(g)


def rates(t: int) -> float:
    return 0.1 / (1 + t)


def on_host(name: str, steps: int) -> list[Tensor]:
    ps = params("cpu")
    optimizer = CLASSES[name](ps, lr=0.1, weight_decay=0.01, compile=False)
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = rates(t)
        fill(ps, t)
        optimizer.step()
    return ps


HOW: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "foreach": {"foreach": True},
    "eager": {"compile": False},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CLASSES)
def test_a_captured_step_follows_its_schedule(name: str, how: str) -> None:
    ps = params("cuda")
    lr = torch.tensor(0.1, device="cuda")
    options = HOW[how]
    optimizer = CLASSES[name](ps, lr=lr, weight_decay=0.01, capturable=True, **options)

    def prepare(t: int) -> None:
        lr.fill_(rates(t))
        fill(ps, t)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for t in range(STEPS):
            prepare(t)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for t in range(STEPS, STEPS + 8):
        prepare(t)
        graph.replay()
    for p, q in zip(ps, on_host(name, STEPS + 8)):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-4, atol=1e-5)
    assert all(optimizer.state[p]["step"].item() == STEPS + 8 for p in ps)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "stableadamw"])
def test_a_captured_step_keeps_its_numbers(name: str, how: str) -> None:
    """Numbers of the host are the graph's own: they are in no memory that may go."""
    ends = []
    for device in ("cpu", "cuda"):
        ps = params(device)
        optimizer = CLASSES[name](ps, lr=0.1, capturable=True, **HOW[how])
        for t in range(STEPS):
            fill(ps, t)
            optimizer.step()
        step = optimizer.step
        if device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with pytest.warns(UserWarning, match="all its replays"):
                with torch.cuda.graph(graph):
                    optimizer.step()
            step = graph.replay
            junk = [torch.full((64,), float("nan"), device="cuda") for _ in range(1000)]
            del junk
        for t in range(STEPS, STEPS + 8):
            fill(ps, t)
            step()
        ends.append(ps)
    for p, q in zip(*ends):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_a_capture_of_counts_on_the_host_is_refused(how: str) -> None:
    step, ps = _steps("adamw", **HOW[how])
    before = [p.detach().clone() for p in ps]
    with pytest.raises(RuntimeError, match="capturable=False"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
    torch.cuda.synchronize()
    assert all(map(torch.equal, ps, before))


def _launches(step: Callable[[], None]) -> list[str]:
    """What a step has the GPU do."""
    with torch.profiler.profile() as profiled:
        step()
        torch.cuda.synchronize()
    return [e.name for e in profiled.events() if e.device_type == DeviceType.CUDA]


def test_the_numbers_of_all_groups_are_one_upload() -> None:
    ps = params("cuda")
    groups = [{"params": ps[i : i + 2], "lr": 0.1 * (i + 1)} for i in (0, 2, 4)]
    optimizer = CLASSES["adamw"](groups, lr=0.1, compile=True)
    for t in range(STEPS):
        fill(ps, t)
        optimizer.step()
    assert sum("HtoD" in name for name in _launches(optimizer.step)) == 1


def test_a_mean_costs_two_launches_a_tensor() -> None:
    counts: list[int] = []
    for count in (3, 10):
        ps = [torch.ones(300, 300, device="cuda", requires_grad=True) for _ in range(count)]
        optimizer = CLASSES["stableadamw"](ps, lr=0.1, compile=True)
        for t in range(STEPS):
            fill(ps, t)
            optimizer.step()
        counts.append(len(_launches(optimizer.step)))
    assert counts[1] - counts[0] == 7 * 3  # and its move is one


def _steps(
    name: str, lr: Any = 0.1, **options: Any
) -> tuple[Callable[[], None], list[Tensor]]:
    ps = params("cuda")
    optimizer = CLASSES[name](ps, lr=lr, **options)
    for t in range(STEPS):
        fill(ps, t)
        optimizer.step()
    return optimizer.step, ps


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CLASSES)
def test_no_step_waits_for_the_device(
    name: str, how: str, capturable: bool, tensor_lr: bool
) -> None:
    lr = torch.tensor(0.1, device="cuda") if tensor_lr else 0.1
    step, _ = _steps(name, lr=lr, capturable=capturable, **HOW[how])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_small_tensors_share_their_launches() -> None:
    counts: list[int] = []
    for copies in (10, 200):
        ps = [torch.ones(16, device="cuda", requires_grad=True) for _ in range(copies)]
        optimizer = CLASSES["adamw"](ps, lr=0.1, compile=True)
        for t in range(STEPS):
            fill(ps, t)
            optimizer.step()
        with torch.profiler.profile() as profiled:
            optimizer.step()
            torch.cuda.synchronize()
        kernels = [e for e in profiled.events() if e.device_type == DeviceType.CUDA]
        counts.append(len(kernels))
    # torch's own copies take some 30 to 100 tensors a launch.
    assert counts[1] < counts[0] + 30
