"""Faster C++ for bfloat16 on x86 (cpp/bfloat16.cpp): the bits of at::vec's functions."""

import ctypes
import logging
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from optimi_func import AdamW
from optimi_func.execution import bfloat16, inductor, kernels
from optimi_func.execution.list_kernel import ListKernel

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
        pytest.skip(f"this processor has no {processor}")
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
    monkeypatch.setattr(bfloat16, "_failed", failed)
    return failed


def warnings_of(caplog: Any) -> list[str]:
    found = [r for r in caplog.records if "take up to twice as long" in r.getMessage()]
    assert all(r.levelno == logging.WARNING for r in found)
    return [r.getMessage() for r in found]


def step(dtype: torch.dtype) -> list[torch.Tensor]:
    """One compiled step of AdamW, whose results it returns."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(1003, generator=generator).to(dtype).requires_grad_()
    p.grad = torch.randn(1003, generator=generator).to(dtype)
    optimizer = AdamW([p], lr=0.1, weight_decay=0.1, compile=True)
    optimizer.step()
    return [p.detach(), *optimizer.state[p].values()]


def libraries(dtype: str) -> list[Any]:
    found = [entry for entry in kernels._kernels.values() if dtype in entry[0]]
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
    monkeypatch.setattr(inductor, "_compile", compile_)
    monkeypatch.setattr(inductor, "native", lambda: None)
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
    monkeypatch.setattr(kernels, "_kernels", {})
    assert all(map(torch.equal, step(torch.bfloat16), expected))
    (text,) = warnings_of(caplog)
    assert "this compiler is too old" in text
    assert not any(hasattr(x, "optimi_bfloat16") for x in libraries("bfloat16"))
