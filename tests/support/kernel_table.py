"""The kernels that `make test` compiles, each once, in one process.

A kernel costs seconds, so tests share these few. A test that steps through them is marked
`kernels`; a test that compiles anything else is marked `full` and runs in `make test-all`.
`conftest.py` fails a test that compiles without its mark.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from optimi_func.core.runtime import runtime
from optimi_func.execution import kernels

# `KernelKey.name`: the rule, its dtypes, then what it writes and what it is given.
TABLE = frozenset(
    {
        "adam_float32_write_in_place",
        "adam_float32_write",
        "adam_float64_write_in_place",
        "adam_bfloat16_write_in_place_compensated",
        # Of a compact state, which is decoded before and encoded after it.
        "adam_float32_bfloat16_write_in_place",
        "adam_float32_bfloat16_write",
        "stableadamw_float32_write_in_place",
        "stableadamw_float32_write_in_place_mean_measure",
        "ranger_float32_write_in_place_False",
        "ranger_float32_write_in_place_True",
        "sgd_float32_write_in_place",
        "sgd_momentum_float32_write_in_place",
        "lion_bfloat16_write_in_place_compensated",
        "schedule_free_adamw_float32_write_in_place",
        "muon_direction_float32_in_place",
        # Of all maps that are given the gradient.
        "sgd_direction_float32_in_place",
        "move_float32_write_in_place",
        "adafactor_float32_write_in_place_61_89",
    }
)
# AdamW's kernels are Adam's, under the name of whichever is first.
TABLE |= {x.replace("adam_", "adamw_", 1) for x in TABLE if x.startswith("adam_")}

ADVICE = (
    "mark it `full` (`make test-full` then runs it), pass compile=False, or take a kernel "
    "of tests/support/kernel_table.py and mark the test `kernels`"
)


def _graphs() -> int:
    """Count the graphs that Inductor was asked for in this process."""
    counters = torch._dynamo.utils.counters["inductor"]
    return sum(counters[f"fxgraph_cache_{how}"] for how in ("hit", "miss", "bypass"))


@contextmanager
def guarded(marked: bool) -> Iterator[None]:
    """Fail a test that compiles a kernel that is not in the table, or any without a mark.

    Args:
        marked: True if the test is marked `kernels`.
    """
    compile_kernel = kernels._compile

    def checked(key: Any, scalars: Any) -> Any:
        # pytest.fail raises no Exception, so that no fallback to the eager step hides it.
        if not marked:
            pytest.fail(f"this test compiles the kernel {key.name}: {ADVICE}")
        if key.name not in TABLE:
            pytest.fail(f"the kernel {key.name} is not in the table: {ADVICE}")
        return compile_kernel(key, scalars)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_compile", checked)
        if not marked:
            # Also of a kernel that an earlier test has compiled: the order must not matter.
            patch.setattr(runtime, "kernels", {})
        before = 0 if marked else _graphs()
        yield
    if not marked and _graphs() > before:
        pytest.fail(f"this test compiles a graph with Inductor: {ADVICE}")
