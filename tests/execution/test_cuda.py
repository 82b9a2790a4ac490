"""What holds on a CUDA device alone: graphs of a whole step, no waiting, few launches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import CLASSES, ELEMENTWISE, MEASURED
from torch import Tensor
from torch.autograd import DeviceType

from optimi_func import prepare_for_gradient_release
from optimi_func.execution import executors
from optimi_func.execution.triton_list import TritonListKernel

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
@pytest.mark.parametrize("name", ELEMENTWISE)
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
    assert counts[1] - counts[0] == 7 * 2  # they move together


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
@pytest.mark.parametrize("name", ELEMENTWISE)
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


@pytest.mark.parametrize("name", [x for x in ELEMENTWISE if x not in MEASURED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_one_launch(name: str, dtype: torch.dtype) -> None:
    """Whatever the number of tensors and their sizes; Ranger's two kinds of step too."""
    ps = [torch.ones(n, device="cuda", dtype=dtype) for n in (1, 16, 1003, 90_000) * 30]
    optimizer = CLASSES[name]([p.requires_grad_() for p in ps], lr=0.1, compile=True)
    for t in range(8):
        fill(ps, t)
        optimizer.step()
    kernels = [x for x in _launches(optimizer.step) if not x.startswith("Mem")]
    assert len(kernels) == 1, kernels


# One launch for a list of tensors


# Of one element, of whole blocks, and of lengths that no block divides.
ODD = [1, 2, 16, 1003, 1024, 2048, 5003, 90_000]


def odd(dtype: torch.dtype, off: int) -> list[Tensor]:
    """Parameters that begin so many elements behind an aligned address."""
    own = torch.Generator().manual_seed(0)
    made = [torch.randn(n + off, generator=own).to("cuda", dtype)[off:] for n in ODD]
    return [p.requires_grad_() for p in made]


def trained(name: str, dtype: torch.dtype, off: int) -> list[Tensor]:
    """Parameters and state after some steps."""
    ps = odd(dtype, off)
    optimizer = CLASSES[name](ps, lr=0.01, weight_decay=0.01, compile=True)
    for t in range(8):
        fill(ps, t)
        optimizer.step()
    state = [x for p in ps for x in optimizer.state[p].values() if x.shape == p.shape]
    return [*ps, *state]


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_list_is_bit_for_bit_its_tensors(
    name: str, dtype: torch.dtype, off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = trained(name, dtype, off)
    kinds: list[type] = []

    def single(*given: Any) -> Any:
        found = kernel(*given)
        kinds.append(type(found))
        return getattr(found, "single", found)

    kernel = executors.kernel
    monkeypatch.setattr(executors, "kernel", single)
    # Large ones alone: copies of small ones have their own test.
    monkeypatch.setattr(executors, "SMALL", 2)
    one_by_one = trained(name, dtype, off)
    assert TritonListKernel in kinds
    for x, y in zip(together, one_by_one):
        if x.numel() > 1:  # for which there is no kernel of one tensor
            assert x.equal(y)


def _backward_and_step(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "stableadamw"])
def test_a_graph_of_backward_and_step(name: str) -> None:
    """Gradients that lie in the graph's own memory, whose addresses it has to keep."""
    ends: list[list[Tensor]] = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 7)).cuda()
        lr = torch.tensor(0.01, device="cuda")
        ps = list(model.parameters())
        optimizer = CLASSES[name](ps, lr=lr, capturable=True, compile=True)
        x = torch.ones(5, 33, device="cuda")
        step = partial(_backward_and_step, model, optimizer, x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(STEPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        again: Callable[[], Any] = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            again = graph.replay
        for t in range(STEPS):
            x.fill_(1.0 + t)
            again()
            # Whatever is allocated now would be found by a graph that kept no memory.
            junk = [torch.full((64,), 7, device="cuda") for _ in range(100)]
            del junk
        ends.append([p.detach().clone() for p in ps])
    for p, q in zip(*ends):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


# Against float64


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-4}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_rule_in_every_dtype(name: str, dtype: torch.dtype, how: str) -> None:
    """From what is exact in bfloat16, which has its compensation and float32 moments."""
    ends: list[list[Tensor]] = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        own = torch.Generator().manual_seed(0)

        def some(
            n: int, device: str = device, kind: torch.dtype = kind, own: Any = own
        ) -> Tensor:
            return torch.randn(n, generator=own).bfloat16().to(device, kind)

        ps = [some(n).requires_grad_() for n in ODD]
        options: dict[str, Any] = HOW[how] if device == "cuda" else {"compile": False}
        if kind == torch.bfloat16:
            options = {**options, "state_dtype": torch.float32}
        optimizer = CLASSES[name](ps, lr=1e-3, **options)
        for _ in range(STEPS):
            for p in ps:
                p.grad = some(len(p))
            optimizer.step()
        sums = [p.detach().double() for p in ps]
        if kind == torch.bfloat16:
            comps = [optimizer.state[p]["kahan_comp"].double() for p in ps]
            sums = [p + comp for p, comp in zip(sums, comps)]
        ends.append([x.cpu() for x in sums])
    for p, q in zip(*ends):
        torch.testing.assert_close(p, q, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("how", HOW)
def test_steps_too_small_for_bfloat16_add_up(how: str) -> None:
    p = torch.ones(5003, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    optimizer = CLASSES["sgd"]([p], lr=1e-4, momentum=0.0, **HOW[how])
    p.grad = torch.ones_like(p)
    for _ in range(300):
        optimizer.step()
    whole = p.detach().double() + optimizer.state[p]["kahan_comp"].double()
    torch.testing.assert_close(whole, torch.full_like(whole, 0.97), rtol=1e-3, atol=0.0)


# Streams, devices, memory


@pytest.mark.parametrize("release", [False, True])
def test_steps_on_a_side_stream(release: bool) -> None:
    """Gradient release steps in hooks, on the streams of the backward's nodes."""
    ends: list[list[Tensor]] = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.manual_seed(0)
        shapes = [(300, 300)] * 4
        model = torch.nn.Sequential(*[torch.nn.Linear(*shape) for shape in shapes]).cuda()
        optimizer = CLASSES["adamw"](
            model.parameters(), lr=1e-2, gradient_release=release, compile=True
        )
        if release:
            prepare_for_gradient_release(model, optimizer)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for t in range(2 * STEPS):
                own = torch.Generator().manual_seed(t)
                x = torch.randn(64, 300, generator=own).cuda()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        ends.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*ends):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_two_devices_in_one_list(name: str, how: str) -> None:
    ends: list[list[Tensor]] = []
    for devices in (("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")):
        ps = [p.detach().to(devices[i % 2]) for i, p in enumerate(params("cpu"))]
        ps = [p.requires_grad_() for p in ps]
        optimizer = CLASSES[name](ps, lr=0.1, **HOW[how])
        for t in range(STEPS):
            fill(ps, t)
            optimizer.step()
        ends.append([p.detach().cpu() for p in ps])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_compiled_step_needs_no_memory(name: str) -> None:
    n = 1 << 20
    ps = [torch.ones(n, device="cuda", requires_grad=True) for _ in range(8)]
    optimizer = CLASSES[name](ps, lr=0.1, compile=True)
    for t in range(8):
        fill(ps, t)
        optimizer.step()
    torch.cuda.synchronize()
    for _ in range(7):  # of Ranger, both kinds of step
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        # Numbers and a table; a tensor has 4 MiB.
        assert torch.cuda.max_memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("how", ["compile", "foreach", "eager"])
def test_whole_maps_are_those_of_the_cpu(how: str) -> None:
    """Equal shapes in one batch, in float32; bfloat16 where nothing else is asked for."""
    options = {"compile": {"compile": True}, "foreach": {"foreach": True}}
    way = options.get(how, {"compile": False})
    shapes = [(130, 70), (70, 130), (130, 70), (6, 5, 4), (8, 3, 3, 3), (130, 70)]
    ends = []
    for device, more in (
        ("cpu", {"compile": False}),
        ("cuda", {"ns_dtype": torch.float32, **way}),
        ("cuda", {**way, "capturable": True}),
    ):
        torch.manual_seed(0)
        ps = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
        optimizer = CLASSES["muon"](ps, lr=0.02, **more)
        for i in range(4):
            torch.manual_seed(i)
            for p in ps:
                p.grad = torch.randn(p.shape).to(device)
            optimizer.step()
        ends.append([p.detach().cpu() for p in ps])
    for cpu, same, low in zip(*ends):
        torch.testing.assert_close(same, cpu, rtol=1e-3, atol=1e-4)
        assert (low - cpu).norm() < 5e-2 * 0.02 * 4 * cpu.numel() ** 0.5
