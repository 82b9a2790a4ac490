"""Faster C++ for bfloat16 on x86: the bits of at::vec's functions and of the graph."""

import ctypes
import logging
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from optimi_func import AdamW
from optimi_func.core.codes import round_to, to, widen
from optimi_func.core.runtime import runtime
from optimi_func.execution import bfloat16, inductor
from optimi_func.execution.list_kernel import TRIAL, ListKernel

BITS = Path(__file__).parents[1] / "support" / "bfloat16_bits.cpp"
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the header is for x86")
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
# As Inductor compiles; the flags about arithmetic decide what compilers may assume.
FLAGS = (
    "-O3 -std=c++20 -shared -fPIC -fno-trapping-math -funsafe-math-optimizations "
    "-ffinite-math-only -fno-signed-zeros -fno-finite-math-only "
    "-fno-unsafe-math-optimizations -ffp-contract=off -fno-tree-loop-vectorize "
    "-DTORCH_INDUCTOR_CPP_WRAPPER -DSTANDALONE_TORCH_HEADER "
    "-DC10_USING_CUSTOM_GENERATED_MACROS"
).split()
AVX512 = "-DCPU_CAPABILITY_AVX512 -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma".split()
PROCESSORS = {
    "avx512_bf16": [*AVX512, "-mavx512bf16"],
    "avx512bw": AVX512,
    "avx2": "-DCPU_CAPABILITY_AVX2 -mavx2 -mfma -mf16c".split(),
}


def has(flag: str) -> bool:
    """Return True if this processor has instructions of that name in /proc/cpuinfo."""
    try:
        return flag in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


@pytest.mark.full
@X86
@COMPILER
@pytest.mark.parametrize("only", [False, True], ids=["mixed", "bfloat16_only"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_functions_return_the_bits_of_at_vec(processor: str, only: bool, tmp_path) -> None:
    if not has(processor):
        pytest.skip("needs a CPU with AVX512")  # as both rows that AVX2 is not enough for
    library, include = tmp_path / "bits.so", Path(torch.__file__).parent / "include"
    flags = [*FLAGS, *PROCESSORS[processor], "-include", bfloat16.HEADER]
    flags += ["-DOPTIMI_BFLOAT16_ONLY"] if only else []
    more = ["-I", include, "-I", include / "torch/csrc/api/include"]
    subprocess.run(["g++", BITS, *flags, *more, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    found = (ctypes.c_int64 * ctypes.c_int.in_dll(loaded, "functions").value)()
    loaded.count_differences(ctypes.c_int64(100_000), found)
    assert list(found) == [0] * len(found)


@pytest.fixture
def unreported(monkeypatch) -> list[str]:
    """Begin as in a new process, in which the header has not failed."""
    failed: list[str] = []
    monkeypatch.setattr(runtime, "no_conversions", failed)
    return failed


def warnings_of(caplog: Any) -> list[str]:
    found = [r for r in caplog.records if "take up to twice as long" in r.getMessage()]
    assert all(r.levelno == logging.WARNING for r in found)
    return [r.getMessage() for r in found]


def step(dtype: torch.dtype) -> list[Tensor]:
    """One compiled step of AdamW, whose results it returns."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(1003, generator=generator).to(dtype).requires_grad_()
    p.grad = torch.randn(1003, generator=generator).to(dtype)
    optimizer = AdamW([p], lr=0.1, weight_decay=0.1, compile=True)
    optimizer.step()
    return [p.detach(), *optimizer.state[p].values()]


def libraries(dtype: str) -> list[Any]:
    found = [entry for entry in runtime.kernels.values() if dtype in entry[0]]
    return [ctypes.CDLL(x.made_of[0]) for _, x in found if isinstance(x, ListKernel)]


@pytest.mark.kernels
@X86
@pytest.mark.skipif(not has("avx2"), reason="the header is for AVX2 and AVX-512")
def test_kernels_of_bfloat16_are_compiled_with_the_header() -> None:
    """A test of the flag: a torch that drops or quotes its value compiles without it."""
    step(torch.bfloat16)
    step(torch.float32)
    compensated = libraries("bfloat16_write_in_place_compensated")
    assert compensated and all(hasattr(x, "optimi_bfloat16") for x in compensated)
    assert not any(hasattr(x, "optimi_bfloat16") for x in libraries("adamw_float32_write"))


@pytest.mark.parametrize(
    ("dtypes", "elementwise", "machine", "expected"),
    [
        ({torch.bfloat16}, True, "x86_64", ["-include", "-DOPTIMI_BFLOAT16_ONLY"]),
        ({torch.bfloat16}, False, "x86_64", ["-include"]),
        ({torch.bfloat16, torch.float32}, True, "AMD64", ["-include"]),
        ({torch.float32, torch.float16}, True, "x86_64", []),
        ({torch.bfloat16}, True, "aarch64", []),
    ],
)
def test_which_kernels_read_the_header(
    dtypes, elementwise, machine, expected, monkeypatch, unreported, caplog
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    text = " ".join(map(str, bfloat16.header_options(dtypes, elementwise).values()))
    flags = [x for x in ("-include", "-DOPTIMI_BFLOAT16_ONLY") if x in text]
    assert flags == expected
    assert bool(flags) == (str(bfloat16.HEADER) in text)
    assert not warnings_of(caplog)


def test_a_torch_without_the_setting_is_reported_once(
    monkeypatch, unreported, caplog
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(bfloat16, "_FLAG", "no_such_setting")
    for _ in range(2):
        assert bfloat16.header_options({torch.bfloat16}, True) == {}
    (text,) = warnings_of(caplog)
    assert "no_such_setting" in text and torch.__version__ in text


@pytest.mark.parametrize("error", ["C++ compile error: no _mm512_x", "another error"])
def test_only_an_error_of_the_compiler_is_the_headers(
    error: str, monkeypatch, unreported, caplog
) -> None:
    tried: list[bool] = []

    def compile_(function: Any, example: Any, options: dict[str, Any], change: Any) -> Any:
        tried.append("cpp.enable_floating_point_contract_flag" in options)
        if tried[-1]:
            raise RuntimeError(error)
        return function, None

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(inductor, "_run_inductor", compile_)
    monkeypatch.setattr(inductor.cpp, "start", lambda: None)
    monkeypatch.setattr(inductor, "with_vectors", lambda made: made())
    monkeypatch.setattr(inductor, "_width", dict)
    example = [torch.ones(3), torch.ones(9, dtype=torch.bfloat16)]
    for _ in range(2):
        if "another" in error:
            with pytest.raises(RuntimeError, match=error):
                inductor.compile_list_kernel(lambda *xs: None, example, False, True)
        else:
            inductor.compile_list_kernel(lambda *xs: None, example, False, True)
    # The second kernel does not try the header again.
    assert tried == ([True, True] if "another" in error else [True, False, False])
    assert len(warnings_of(caplog)) == ("another" not in error)


@pytest.mark.full
@X86
@COMPILER
def test_a_header_that_does_not_compile_is_left_out(
    unkept, monkeypatch, unreported, caplog, tmp_path
) -> None:
    expected = step(torch.bfloat16)
    broken = tmp_path / "a broken header.cpp"  # the path is quoted
    broken.write_text("#error this compiler is too old\n")
    monkeypatch.setattr(bfloat16, "HEADER", broken)
    monkeypatch.setattr(runtime, "kernels", {})
    assert all(map(torch.equal, step(torch.bfloat16), expected))
    (text,) = warnings_of(caplog)
    assert "this compiler is too old" in text
    assert not any(hasattr(x, "optimi_bfloat16") for x in libraries("bfloat16"))


# Roundings as conversions


def kahan(scalars: Tensor, p: Tensor, g: Tensor, comp: Tensor) -> None:
    """A step of SGD with Kahan summation, in place."""
    lr, _ = scalars.unbind()
    p32, x, wide = widen(p, comp, torch.float32)
    assert wide is not None
    u = wide - lr * (g.float() + 0.0 * x)
    new = round_to(p32 + u, torch.bfloat16)
    comp.copy_(to(u - (new - p32), torch.bfloat16))
    p.copy_(to(new, torch.bfloat16))


def traced(function: Any) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    low = [torch.ones(TRIAL, dtype=torch.bfloat16) for _ in range(3)]
    example = [torch.ones(2), *low]
    return make_fx(function, decomposition_table=DECOMPOSED)(*example), example


def folded(module: torch.fx.GraphModule) -> bool:
    """Convert, and drop conversions to bfloat16 and back, as a compiler would."""
    found = convert_roundings(module)
    convert = torch.ops.prims.convert_element_type.default
    for node in list(module.graph.nodes):
        inner = node.args[0] if node.target == convert else None
        if getattr(inner, "target", None) == convert:
            node.replace_all_uses_with(inner.args[0])
    module.recompile()
    return found


ORDER = [0, 1, 2, 3]
# As Inductor decomposes it.
DECOMPOSED = {
    torch.ops.aten._to_copy.default: lambda x, dtype: (
        torch.ops.prims.convert_element_type.default(x, dtype)
    )
}
convert_roundings = bfloat16.convert_roundings


def test_roundings_become_conversions_with_the_same_bits() -> None:
    module, example = traced(kahan)
    conversions = bfloat16.Conversions()
    assert conversions(module) == {"emulate_precision_casts": True}
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    # p, g and comp are widened, the sum is rounded and widened, and comp is rounded. The
    # rounded sum is stored as it is.
    assert called.count(torch.ops.prims.convert_element_type.default) == 6
    numbers = [x for node in module.graph.nodes for x in node.args if type(x) is float]
    assert 2.0**16 not in numbers
    assert conversions.hold(module, ORDER, example)


@pytest.mark.parametrize("largest", [1.0, 2.0**-100, 2.0**-110, 2.0**-126, 2.0**127])
def test_conversions_round_every_finite_number_as_before(largest: float) -> None:
    """Also subnormal numbers, and those that overflow."""

    def rounds(scalars: Tensor, p: Tensor, x: Tensor) -> None:
        p.copy_(to(round_to(x, torch.bfloat16), torch.bfloat16))

    generator = torch.Generator().manual_seed(0)
    x = largest * torch.empty(100_000).uniform_(-2.0, 2.0, generator=generator)
    x[::3] = x[::3].bfloat16().float() * (1.0 + 2.0**-8)  # halfway, or near it
    x.clamp_(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    p, q = torch.empty(2, 100_000, dtype=torch.bfloat16)
    module = make_fx(rounds, decomposition_table=DECOMPOSED)(x[:1], p, x)
    rounds(x[:1], q, x)
    assert bfloat16.Conversions()(module)
    module(x[:1], p, x)
    assert p.view(torch.int16).equal(q.view(torch.int16))


def test_the_trial_of_conversions_rounds_up_and_down() -> None:
    module, example = traced(kahan)
    seen: list[Tensor] = []

    def kernel(*trial: Tensor) -> None:
        module(*trial)
        seen.append(trial[-1])

    conversions = bfloat16.Conversions()
    conversions(traced(kahan)[0])
    assert conversions.hold(kernel, ORDER, example)
    directions = [(int((x > 0).sum()), int((x < 0).sum())) for x in seen]
    assert len(seen) == 2 and min(map(min, directions)) > 100, directions


def test_conversions_that_a_compiler_drops_are_noticed(monkeypatch) -> None:
    """The compensation would be that of a weight with 24 bits: none."""
    module, example = traced(kahan)
    conversions = bfloat16.Conversions()
    monkeypatch.setattr(bfloat16, "convert_roundings", folded)
    assert conversions(module)
    assert not conversions.hold(module, ORDER, example)


def test_one_lost_bit_is_noticed() -> None:
    module, example = traced(kahan)
    conversions = bfloat16.Conversions()
    conversions(module)

    def kernel(*trial: Tensor) -> None:
        module(*trial)
        trial[-1].view(torch.int16)[17] ^= 1

    assert not conversions.hold(kernel, ORDER, example)


def test_graphs_that_cannot_be_checked_bit_for_bit_stay() -> None:
    def rounds_alike(scalars: Tensor, p: Tensor, g: Tensor, comp: Tensor) -> None:
        kahan(scalars, p, g.exp(), comp)

    def adds_up(scalars: Tensor, p: Tensor, g: Tensor, comp: Tensor) -> None:
        kahan(scalars, p, g - g.float().mean(), comp)

    def rounds_to_float16(scalars: Tensor, p: Tensor, g: Tensor, comp: Tensor) -> None:
        p.copy_(round_to(p.float() - g, torch.float16))

    for function in (rounds_alike, adds_up, rounds_to_float16):
        module, _ = traced(function)
        before = str(module.graph)
        assert bfloat16.Conversions()(module) == {}
        assert str(module.graph) == before


@pytest.mark.full
@X86
@COMPILER
def test_a_kernel_that_lost_its_compensation_is_not_used(
    unkept, monkeypatch, caplog
) -> None:
    """Without its setting Inductor drops the conversions, and the compensation is 0."""
    expected = step(torch.bfloat16)
    graphs: list[bool] = []
    change = bfloat16.Conversions.__call__

    def without_setting(self: bfloat16.Conversions, module: Any) -> dict[str, object]:
        graphs.append(bool(change(self, module)))
        return {}

    monkeypatch.setattr(bfloat16.Conversions, "__call__", without_setting)
    monkeypatch.setattr(runtime, "said", set())
    monkeypatch.setattr(runtime, "kernels", {})
    assert all(map(torch.equal, step(torch.bfloat16), expected))
    assert graphs == [True]
    (text,) = [r.getMessage() for r in caplog.records if "compiled again" in r.getMessage()]
    assert "adamw_bfloat16_write_in_place_compensated" in text
    assert expected[-1].count_nonzero() > 900
