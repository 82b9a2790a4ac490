"""How far moments in 8 bits move AdamW's updates, on gradients that strain codes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import optimi_func
from optimi_func import Storage

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_of_errors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/storage.py, whose table has these numbers too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    import storage

    yield storage
    for name in ("storage", "step_time", "harness"):
        if name not in known:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("kind", "error", "largest"),
    [
        ("stationary", 0.12, 1.7),
        ("spikes", 0.5, 8.0),
        ("1e-8", 0.12, 1.7),
        ("falls", 0.2, 1.7),
    ],
)
def test_updates_stay_near_float32s(
    benchmark_of_errors: Any, kind: str, error: float, largest: float
) -> None:
    found = benchmark_of_errors.errors(["8bit"], kind)["8bit"]
    assert 0 < found["error"] <= error
    assert 1 < found["largest"] <= largest


def test_what_is_measured_is_stored_in_codes() -> None:
    p = torch.zeros(512, 64)
    state = optimi_func.adamw_init(p, storage=Storage(moments="8bit"))
    assert [x.dtype for x in state.leaves.exp_avg] == [torch.int8, torch.float32]
    assert [x.dtype for x in state.leaves.exp_avg_sq] == [torch.uint8, torch.float32]


def test_the_measure_tells_codes_apart(benchmark_of_errors: Any) -> None:
    """A second moment that rounds to 0, and a map that falls in powers of ten."""
    names = ["8bit", "FlashOptim, simulated", "bitsandbytes, simulated"]
    found = benchmark_of_errors.errors(names, "stationary", steps=60)
    own, *others = [found[name] for name in names]
    for other in others:
        assert other["error"] > 1.5 * own["error"]
        assert other["largest"] > 2 * own["largest"]
