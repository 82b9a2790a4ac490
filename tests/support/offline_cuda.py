"""What Inductor writes for an H100, and Triton makes of it, on a machine without a GPU.

The device is pretended by mocks of private parts of torch and triton: `why_not` says where
these are not the versions that the mocks were written for. They are imported where they
are used: this module can be imported without them.
"""

import importlib.util
import re
import subprocess
import sys
import types
from array import array
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import ptx
import torch
from torch import Tensor

from optimi_func.core.rule import Scalars
from optimi_func.execution import inductor, kernels, triton_list
from optimi_func.execution.kernels import KernelKey
from optimi_func.execution.triton_list import DeviceTable

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
SM = 10 * CAPABILITY[0] + CAPABILITY[1]
AMPERE = 80  # the oldest architecture that computes with bfloat16
WARP = 32
_TORCH, _TRITON = "2.13.0", "3.9.0"

# Of an H100, what Inductor and its choice of blocks ask for.
_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    warp_size=WARP,
    regs_per_multiprocessor=65536,
    total_memory=80 << 30,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


def why_not(triton_version: str) -> str:
    """Why the mocks do not fit here, or nothing."""
    found = torch.__version__.split("+")[0], triton_version
    if found == (_TORCH, _TRITON):
        return ""
    return (
        f"the mocks are of private parts of torch {_TORCH} and triton {_TRITON}, here are "
        f"torch {found[0]} and triton {found[1]}"
    )


class _Generated(BaseException):
    """Inductor has written its code; nothing after that is wanted."""


@contextmanager
def pretended_device() -> Generator[None]:
    """Torch and triton believe in one H100, as far as compilation goes."""
    import triton
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from triton.backends.compiler import GPUTarget

    def always(x: Any) -> Any:
        return staticmethod(lambda *_, **__: x)

    class Interface(device_interface.CudaInterface):
        class Worker(device_interface.CudaInterface.Worker):
            current_device = always(0)
            get_device_properties = always(_PROPERTIES)

        is_available = is_triton_capable = is_bf16_supported = always(True)
        raise_if_triton_unavailable = always(None)
        current_device = always(0)
        get_device_properties = always(_PROPERTIES)
        get_compute_capability = always(SM)
        get_multi_processor_count = always(_PROPERTIES.multi_processor_count)

    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", SM, WARP), get_current_device=lambda: 0
    )
    register = device_interface.register_interface_for_device
    known = dict(device_interface.get_registered_device_interfaces())
    with ExitStack() as stack:

        def patch(*args: Any, **options: Any) -> None:
            stack.enter_context(mock.patch.object(*args, **options))

        for name in ("cuda", "cuda:0"):
            register(name, Interface)
            own = known.get(name, device_interface.CudaInterface)
            stack.callback(register, name, own)
        patch(torch.cuda, "get_device_properties", lambda *_: _PROPERTIES)
        patch(torch.cuda, "get_device_capability", lambda *_: CAPABILITY)
        patch(triton.runtime.driver, "_active", driver)
        patch(triton_helpers, "set_driver_to_gpu", lambda: None)
        if torch.version.cuda is None:
            # Two of Tensor's methods take a device guard, which a CPU build does not have.
            for kind in (FakeTensor, FunctionalTensor):
                patch(kind, "copy_", _copy_, create=True)
                patch(kind, "__getitem__", _getitem, create=True)
        yield


def _copy_(self: Any, source: Any, non_blocking: bool = False) -> Any:
    return torch.ops.aten.copy_.default(self, source)


def _getitem(self: Any, index: Any) -> Any:
    if isinstance(index, slice) and index.step is None:
        stop = sys.maxsize if index.stop is None else index.stop
        return torch.ops.aten.slice.Tensor(self, 0, index.start, stop)
    return torch.Tensor.__getitem__(self, index)


class Build(NamedTuple):
    """A kernel in one of the configurations that Inductor would try."""

    ptx: ptx.Program
    text: str
    block: int  # elements of a block
    threads: int
    registers: int
    spilled: int  # bytes


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built(
    source: Any, options: dict[str, Any], block: int, path: Path, sm: int = SM
) -> Build:
    """Assembled for an architecture, that of the device by default."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    binary = compile(source, target=GPUTarget("cuda", sm, WARP), options=options)
    cubin = path.with_suffix(f".{sm}.cubin")
    cubin.write_bytes(binary.asm["cubin"])
    text = binary.asm["ptx"]
    threads = WARP * options["num_warps"]
    return Build(ptx.Program(text), text, block, threads, *_resources(cubin))


class Kernel:
    """A Triton kernel that Inductor wrote, assembled.

    It takes the place of the launcher in Inductor's code, and runs in numpy.
    """

    def __init__(self, program: "Program", name: str, path: Path) -> None:
        from triton.compiler import ASTSource

        tuner = getattr(_module(path), name)
        assert tuner.inductor_meta["grid_type"] == "Grid1D"
        self.name, self._program = name, program
        # Where the library looks for the launcher's source.
        self.triton_meta, self.filename = tuner.triton_meta, str(path)
        self._sources: list[tuple[Any, dict[str, Any], int, Path]] = []
        for config in tuner.configs:
            meta = tuner._create_compile_meta(config)
            source = ASTSource(
                tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]
            )
            options = tuner._create_compile_options(config, meta)
            self._sources.append((source, options, config.kwargs["XBLOCK"], path))
        self.builds = self.built_for(SM)
        signature = tuner.triton_meta["signature"]
        self._parameters = [x for x in signature if x not in tuner.configs[0].kwargs]
        constants = [x for x, kind in signature.items() if kind == "constexpr"]
        self._given = [i for i, x in enumerate(self._parameters) if x not in constants]

    def built_for(self, sm: int) -> list[Build]:
        """It in every configuration, assembled for an architecture."""
        return [_built(*x, sm) for x in self._sources]

    def run(self, *arguments: Any, stream: int) -> None:
        """Launch it on tensors of the CPU."""
        run = self._program.running
        assert run is not None and stream == 0
        run.launches.append(self.name)
        build = self.builds[min(run.build, len(self.builds) - 1)]
        length = arguments[self._parameters.index("xnumel")]
        given = [arguments[i] for i in self._given]
        # Triton adds two pointers to memory of its own, which these do not use.
        numbers = [run.memory.add(x) if isinstance(x, Tensor) else x for x in given]
        blocks = -(-length // build.block)
        build.ptx.run([*numbers, 0, 0], blocks, build.threads, run.memory)


def _resources(cubin: Path) -> tuple[int, int]:
    """Registers a thread and spilled bytes of assembled code."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    done = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    )
    usage = done.stdout + done.stderr
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2]) + int(found[3])


class Run:
    """What happens in one call of Inductor's code."""

    def __init__(self, build: int) -> None:
        self.build = build  # which configuration of every kernel
        self.launches: list[str] = []
        self.scratch: list[Tensor] = []
        self.memory = ptx.Memory()


class Program:
    """What Inductor wrote for one kernel of this package: its code, and Triton kernels."""

    def __init__(self, key: KernelKey, scalars: Scalars, folder: Path) -> None:
        from torch._inductor.async_compile import AsyncCompile

        self.running: Run | None = None
        self._folder, self._row = folder, key.row
        self.kernels: dict[str, Kernel] = {}
        source, self._order = _generated(key, scalars)

        def assembled(_: Any, name: str, text: str, **options: Any) -> Kernel:
            path = folder / f"{name}.py"
            path.write_text(text)
            self.kernels[name] = Kernel(self, name, path)
            return self.kernels[name]

        with (
            pretended_device(),
            mock.patch.object(AsyncCompile, "triton", assembled),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _first, create=True),
        ):
            self._scope: dict[str, Any] = {"__name__": key.name}
            exec(compile(source, key.name, "exec"), self._scope)
        self._scope["empty_strided_cuda"] = self._allocated

    def _allocated(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        assert self.running is not None
        x = torch.empty_strided(size, stride, dtype=dtype).fill_(float("nan"))
        self.running.scratch.append(x)
        return x

    def run(self, arguments: list[Tensor], build: int) -> Run:
        """Call Inductor's code with the kernel's arguments, on the CPU."""
        self.running = run = Run(build)
        length = arguments[1].numel() // self._row
        with _no_device():
            self._scope["call"]([length if i < 0 else arguments[i] for i in self._order])
        self.running = None
        return run

    def list_kernel(self, example: list[Tensor]) -> "ListKernel | None":
        """What the library makes of it."""
        with _no_device():
            found = triton_list._parts(self._scope["call"], self._order, example)
        if found is None:
            return None
        text, pointers, options = found
        source = triton_list.list_source(text, pointers)
        assert source is not None
        path = self._folder / "list_kernel.py"
        path.write_text(source)
        return ListKernel(path, options)


class ListKernel:
    """A list kernel for numbers in float32, assembled, and run in numpy."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        from triton.compiler import ASTSource

        self.path = path
        constants = {"XBLOCK": triton_list.BLOCK, "REST": triton_list.REST}
        signature = {
            **{"scalars": "*fp32", "gradients": "*i64", "table": "*i64", "rows": "*i32"},
            **{"count": "i32", "per_row": "i32"},
            **dict.fromkeys(constants, "constexpr"),
        }
        # What Triton finds out at a launch.
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
        with pretended_device():
            function = _module(path).all_blocks
            source = ASTSource(function, signature, constants, aligned)
            self.build = _built(source, options, triton_list.BLOCK, path)

    def run(
        self, numbers: Tensor, table: DeviceTable, columns: list[list[Tensor]]
    ) -> ptx.Memory:
        """One launch for columns of tensors."""
        memory = ptx.Memory()
        gradients = array("q", map(Tensor.data_ptr, columns[1]))
        for x in chain.from_iterable(columns):
            memory.add(x)
        given = [memory.add(x) for x in (numbers, *table.arguments(gradients))]
        values = [*given, table.count, numbers.stride(0), 0, 0]
        self.build.ptx.run(values, table.blocks, self.build.threads, memory)
        return memory


@contextmanager
def _no_device() -> Generator[None]:
    with (
        mock.patch.object(torch.cuda, "_DeviceGuard", lambda _: nullcontext()),
        mock.patch.object(torch.cuda, "set_device", lambda _: None),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _first, create=True),
    ):
        yield


def _first(_: int) -> int:
    return 0


def _generated(key: KernelKey, scalars: Scalars) -> tuple[str, list[int]]:
    """Inductor's code, and for each of its arguments the index of ours, -1 the length."""
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import FakeTensorMode

    lower = inductor.lower
    order: list[int] = []

    def recorded(graph: Any, *more: Any) -> Any:
        names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
        places = [re.fullmatch(r"l_tensors_(\d+)_", name) for name in names]
        order.clear()
        order.extend(-1 if place is None else int(place[1]) for place in places)
        return lower(graph, *more)

    def stopped(self: Any) -> Any:
        code, _ = self.codegen()
        raise _Generated(code.value)

    with (
        pretended_device(),
        mock.patch.object(GraphLowering, "compile_to_module", stopped),
        mock.patch.object(inductor, "lower", recorded),
        FakeTensorMode(),
    ):
        try:
            kernels._compile(key, scalars)
        except _Generated as found:
            return found.args[0], order
    raise AssertionError("Inductor was not asked for any code")
