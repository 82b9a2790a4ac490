"""CUDA kernels of parameters and moments in codes, without a GPU: one launch a tensor."""

from pathlib import Path
from typing import Any, NamedTuple

import offline_cuda
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func.core.leaf import init_leaf, leaf_step, rates, whole_means
from optimi_func.core.packed import Packed, fill
from optimi_func.core.rule import Leaf, Rule, Scalars, Storage
from optimi_func.core.storage import flat_leaf, storage_of
from optimi_func.execution.kernels import KernelKey

triton = pytest.importorskip("triton")
why_not = offline_cuda.why_not(triton.__version__)
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(why_not), reason=why_not)]

N = (1 << 13) + 64  # the last block is not whole
T = 3
LR = 1e-2

CASES: dict[str, tuple[optimi_func.FunctionalOptimizer, Any, torch.dtype]] = {
    "adamw compact": (optimi_func.adamw(lr=LR), "compact", torch.bfloat16),
    "adamw exact": (optimi_func.adamw(lr=LR), "exact", torch.bfloat16),
    "adamw 8bit": (optimi_func.adamw(lr=LR), Storage(moments="8bit"), torch.float32),
    "stableadamw compact": (optimi_func.stableadamw(lr=LR), "compact", torch.bfloat16),
    "lion exact 8bit": (optimi_func.lion(lr=LR), Storage("exact", "8bit"), torch.bfloat16),
}


def scalars(case: str, t: int) -> Scalars:
    optimizer, *_ = CASES[case]
    now = rates(LR, 0.1, optimizer.decay, LR, False, False, False)
    coeffs, _ = optimizer.advance(float(t), optimizer.rule.running())
    return Scalars(coeffs, now, 0.3)


def leaves(case: str) -> tuple[Leaf, Tensor]:
    """A parameter with its state after some steps, and its gradient."""
    optimizer, storage, dtype = CASES[case]
    own = torch.Generator().manual_seed(0)
    p = torch.randn(N, generator=own).to(dtype)
    leaf = init_leaf(optimizer.rule, p, storage_of(storage, None, None))
    for t in range(1, T):
        g = torch.randn(N, generator=own).to(dtype)
        leaf = leaf_step(optimizer.rule, leaf, g, scalars(case, t), True, whole_means)
    return leaf, torch.randn(N, generator=own).to(dtype)


class Made(NamedTuple):
    """A case, with what Inductor wrote for each of its passes."""

    case: str
    rule: Rule
    programs: dict[KernelKey, Any]


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    case, folder = request.param, tmp_path_factory.mktemp("kernels")
    rule = CASES[case][0].rule
    leaf, g = leaves(case)
    p, *rest = flat_leaf(leaf)
    dtypes = tuple(x.dtype for x in (p, g, *rest))
    codes = tuple([not isinstance(x, Tensor) for x in leaf.state])
    now = scalars(case, T)
    statics = Packed(now).statics
    programs: dict[KernelKey, Any] = {}
    for part in [0, None] if rule.means else [None]:
        device = offline_cuda.DEVICE
        key = KernelKey(rule, statics, True, True, dtypes, device, part, codes)
        own = Path(folder, "move" if part is None else "mean")
        own.mkdir()
        programs[key] = offline_cuda.Program(key, now, own)
    return Made(case, rule, programs)


def stepped(made: Made, build: int) -> tuple[list[Tensor], dict[KernelKey, Any]]:
    """All tensors after the step on the device, and what happened in each pass."""
    leaf, g = leaves(made.case)
    p, *rest = flat_leaf(leaf)
    tensors = [x.clone() for x in (p, g, *rest)]
    numbers = Packed(scalars(made.case, T)).tensor(torch.float32, p.device)
    if made.rule.means:
        numbers = torch.cat([numbers, numbers.new_zeros(1)])
    runs = {key: x.run([numbers, *tensors], build) for key, x in made.programs.items()}
    return tensors, runs


def test_a_move_is_one_kernel_without_scratch(made: Made) -> None:
    """Decoded, stepped and encoded again in registers, none of which are spilled."""
    _, runs = stepped(made, 0)
    for key, run in runs.items():
        if key.round is None:
            assert len(run.launches) == 1 and not run.scratch
        else:
            assert sum(x.numel() for x in run.scratch) <= 256
        for kernel in made.programs[key].kernels.values():
            assert all(build.spilled == 0 for build in kernel.builds)
            assert 0 < min(build.registers for build in kernel.builds) <= 128


def test_each_byte_is_read_and_written_once(made: Made) -> None:
    tensors, runs = stepped(made, 0)
    for key, run in runs.items():
        if key.round is not None:
            continue
        loaded = {i: run.memory.loaded[x.data_ptr()] for i, x in enumerate(tensors)}
        stored = {i: run.memory.stored[x.data_ptr()] for i, x in enumerate(tensors)}
        for i, x in enumerate(tensors):
            # A scale is one for all threads of its group.
            assert loaded[i] == x.nbytes * (1 if len(x) == N else 64)
            assert stored[i] == (0 if i == 1 else x.nbytes)  # all but the gradient


def test_it_computes_what_eager_does(made: Made) -> None:
    leaf, g = leaves(made.case)
    packed = Packed(scalars(made.case, T))
    values = packed.tensor(torch.float32, torch.device("cpu")).unbind()
    now = fill(packed.statics, pytree.tree_structure(packed.scalars), values)
    want = flat_leaf(leaf_step(made.rule, leaf, g, now, True, whole_means))
    start = leaf.p
    kernels = [k for program in made.programs.values() for k in program.kernels.values()]
    # The interpreter has no matrices; the smallest blocks need none.
    builds = [
        i
        for i in range(max(len(k.builds) for k in kernels))
        if not any("ldmatrix" in k.builds[min(i, len(k.builds) - 1)].text for k in kernels)
    ]
    assert 0 in builds
    for build in builds:
        (p, _, *rest), _ = stepped(made, build)
        moved, expected = p.double() - start.double(), want[0].double() - start.double()
        if p.dtype == torch.float32:
            assert (moved - expected).abs().max() < 1e-4 * expected.abs().max()
        else:
            # A sum that lies between two bfloat16 numbers may be rounded to either.
            assert (moved != expected).double().mean() < 1e-2
            assert (moved - expected).norm() < 0.05 * expected.norm()
        for x, y in zip(rest, want[1:]):
            if x.dtype.is_floating_point:
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
            elif x.dtype != torch.int16 and x is not rest[-1]:
                apart = (x.int() - y.int()).abs()
                assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-2
