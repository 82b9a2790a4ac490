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


@pytest.mark.parametrize("how", ["compiled", "foreach"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_captured_step_follows_its_schedule(name: str, how: str) -> None:
    ps = params("cuda")
    lr = torch.tensor(0.1, device="cuda")
    options: dict[str, Any] = {"foreach": True} if how == "foreach" else {"compile": True}
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


def _steps(name: str, **options: Any) -> tuple[Callable[[], None], list[Tensor]]:
    ps = params("cuda")
    optimizer = CLASSES[name](ps, lr=0.1, **options)
    for t in range(STEPS):
        fill(ps, t)
        optimizer.step()
    return optimizer.step, ps


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("how", ["compiled", "foreach"])
@pytest.mark.parametrize("name", CLASSES)
def test_no_step_waits_for_the_device(name: str, how: str, capturable: bool) -> None:
    options: dict[str, Any] = {"foreach": True} if how == "foreach" else {"compile": True}
    step, _ = _steps(name, capturable=capturable, **options)
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
