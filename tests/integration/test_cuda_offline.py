"""The CUDA kernels without a GPU: generated for an H100, assembled, and run in numpy.

What is here is what Inductor and Triton make of the kernels, for the two versions that the
mocks were written for. How fast they are only a GPU tells.
"""

import re
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import offline_cuda
import pytest
import torch
from kernel_keys import arguments, key_of
from torch import Tensor
from torch.utils import _pytree as pytree
from traced import trace

import optimi_func
from optimi_func.core.hooks import keyed
from optimi_func.core.leaf import (
    FACTS,
    compute_dtype,
    init_leaf,
    leaf_step,
    rates,
    requests,
    rounds_in,
)
from optimi_func.core.packed import Packed, fill
from optimi_func.core.rule import Leaf, Rule, Scalars, Storage
from optimi_func.core.storage import storage_of, tensors_of
from optimi_func.execution.kernels import KernelKey
from optimi_func.execution.triton_list import BLOCK, DeviceTable

triton = pytest.importorskip("triton")
why_not = offline_cuda.why_not(triton.__version__)
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(why_not), reason=why_not)]

LENGTHS = [2, 1000, 5003]  # the last is divided by no block
T = 3  # the step that is looked at; those before make the state
ROUNDING = 2.0  # units of the last place that the device's own roundings may differ by

Case = tuple[optimi_func.FunctionalOptimizer, torch.dtype, Storage | str]
F32, BF16 = torch.float32, torch.bfloat16
PLAIN: dict[str, Case] = {
    "adamw float32": (optimi_func.adamw(lr=1e-2), F32, Storage()),
    "adamw bfloat16": (optimi_func.adamw(lr=1e-4), BF16, Storage()),
    "stableadamw float32": (optimi_func.stableadamw(lr=1e-2), F32, Storage()),
    "lamb float32": (optimi_func.lamb(lr=1e-2), F32, Storage()),  # four means
    "cautious adamw bfloat16": (optimi_func.adamw(lr=1e-4, cautious=True), BF16, Storage()),
    "lion float32": (optimi_func.lion(lr=1e-2), F32, Storage()),
    # Those with the most tensors, which need the most registers.
    "adan bfloat16": (optimi_func.adan(lr=1e-4), BF16, Storage()),
    "ranger float32": (optimi_func.ranger(lr=1e-2), F32, Storage()),
}
# Which a kernel decodes and encodes.
CODED: dict[str, Case] = {
    "adamw compact": (optimi_func.adamw(lr=1e-2), BF16, "compact"),
    "adamw exact": (optimi_func.adamw(lr=1e-2), BF16, "exact"),
    "adamw 8bit": (optimi_func.adamw(lr=1e-2), F32, Storage(moments="8bit")),
    "stableadamw compact": (optimi_func.stableadamw(lr=1e-2), BF16, "compact"),
    "lion exact 8bit": (optimi_func.lion(lr=1e-2), BF16, Storage("exact", "8bit")),
}
CASES = PLAIN | CODED
CODES = (1 << 13) + 64  # a length with codes, of which the last block is not whole
plain = pytest.mark.parametrize("made", PLAIN, indirect=True)
coded = pytest.mark.parametrize("made", CODED, indirect=True)


def leaves(case: str, n: int) -> tuple[Leaf, Tensor]:
    """A parameter with its state after some steps, and its gradient."""
    optimizer, dtype, storage = CASES[case]
    own = torch.Generator().manual_seed(n)
    p = torch.randn(n, generator=own).to(dtype)
    numbers, stored_as = optimizer.init_numbers, storage_of(storage, None, None)
    leaf = init_leaf(optimizer.rule, numbers, p, stored_as)
    for t in range(1, T):
        g = torch.randn(n, generator=own).to(dtype)
        now = scalars(case, t)
        leaf = leaf_step(optimizer.rule, leaf, g, now, True)
    return leaf, torch.randn(n, generator=own).to(dtype)


def scalars(case: str, t: int) -> Scalars:
    optimizer, *_ = CASES[case]
    lr: Any = optimizer.lr
    now = rates(lr, 0.1, optimizer.decay, lr, False, False, keyed(optimizer.every_hook))
    coeffs, _ = optimizer.advance(float(t), optimizer.rule.running())
    return Scalars(coeffs, now, *([0.3] if case in CODED else []))


class Made(NamedTuple):
    """A case, with what Inductor wrote for each of its passes."""

    case: str
    rule: Rule
    programs: dict[KernelKey, Any]


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    case, folder = request.param, tmp_path_factory.mktemp("kernels")
    rule = CASES[case][0].rule
    leaf, g = leaves(case, CODES if case in CODED else 2)
    now = scalars(case, T)
    programs: dict[KernelKey, Any] = {}
    rounds = rounds_in(requests(rule, now, True))
    for part in [*rounds, None]:
        key = key_of(rule, Packed(now), leaf, g, part, offline_cuda.DEVICE)
        own = Path(folder, "move" if part is None else f"mean of {part}")
        own.mkdir()
        programs[key] = offline_cuda.Program(key, now, own)
    return Made(case, rule, programs)


def kernels_of(made: Made) -> list[Any]:
    return [k for program in made.programs.values() for k in program.kernels.values()]


def builds(made: Made) -> list[int]:
    """Configurations of its kernels that run here: the interpreter has no matrices."""
    kernels = kernels_of(made)
    return [
        i
        for i in range(max(len(kernel.builds) for kernel in kernels))
        if not any("ldmatrix" in k.builds[min(i, len(k.builds) - 1)].text for k in kernels)
    ]


def length(made: Made) -> int:
    return CODES if made.case in CODED else LENGTHS[-1]


def stepped(made: Made, n: int, build: int) -> tuple[list[Tensor], dict[KernelKey, Any]]:
    """All tensors after the step on the device, and what happened in each pass."""
    leaf, g = leaves(made.case, n)
    tensors = [x.clone() for x in arguments(leaf, g).values()]
    keys = list(made.programs)
    packed = Packed(scalars(made.case, T))
    numbers = packed.tensor(compute_dtype(*keys[0].dtypes), torch.device("cpu"))
    asked = requests(made.rule, packed.scalars, True).items()
    known = [float(n) * (name == FACTS) for name, size in asked for _ in range(size.number)]
    numbers = torch.cat([numbers, numbers.new_tensor(known)])
    runs = {
        key: made.programs[key].run([numbers, *tensors], build) for key in made.programs
    }
    return tensors, runs


def units(x: Tensor, y: Tensor) -> float:
    """The largest difference, in eps of y or of y's root mean square."""
    eps = torch.finfo(y.dtype).eps
    x, y = x.double(), y.double()
    scale = y.abs().clamp_min(float(y.square().mean().sqrt()))
    return float(((x - y).abs() / (scale * eps)).max())


def assert_same(made: Made, x: Tensor, y: Tensor) -> None:
    """Raise unless two kernels of a case have the same bits."""
    if made.rule.name == "lamb":
        # Of two products that are added, either may be contracted.
        assert units(x, y) <= ROUNDING
    else:
        assert x.view(torch.uint8).equal(y.view(torch.uint8))


def test_kernels_are_for_the_device_and_spill_no_register(made: Made) -> None:
    for kernel in kernels_of(made):
        for build in kernel.builds:
            assert f".target sm_{offline_cuda.SM}" in build.text
            assert build.spilled == 0 < build.registers
        assert min(build.registers for build in kernel.builds) <= 128
        assert made.case in CODED or max(x.registers for x in kernel.builds) <= 128


def test_a_move_is_one_kernel_without_scratch(made: Made) -> None:
    """In which codes are decoded, stepped and encoded again in registers."""
    _, runs = stepped(made, length(made), 0)
    for key, run in runs.items():
        if key.round is None:
            assert len(run.launches) == 1 and not run.scratch


@plain
def test_an_older_device_takes_the_same_kernel(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compares in bfloat16 where sm_90 can; sm_80 has the same bits without it."""
    want = [stepped(made, LENGTHS[-1], build)[0] for build in builds(made)]
    for kernel in kernels_of(made):
        older = kernel.built_for(offline_cuda.AMPERE)
        assert all(f".target sm_{offline_cuda.AMPERE}" in x.text for x in older)
        monkeypatch.setattr(kernel, "builds", older)
    for build, tensors in zip(builds(made), want):
        for x, y in zip(stepped(made, LENGTHS[-1], build)[0], tensors):
            assert_same(made, x, y)


def test_means_are_few_kernels_with_little_scratch(made: Made) -> None:
    _, runs = stepped(made, length(made), 0)
    for key, run in runs.items():
        if key.round is not None:
            count = requests(made.rule, scalars(made.case, T), True)[key.round].number
            # Of pieces, and of all; of several one each, and one that writes them.
            assert len(run.launches) == (2 if count == 1 else 2 + count)
            # Nothing as long as a parameter.
            most = 256 if made.case in CODED else 128 if count == 1 else 129 * count
            assert sum(x.numel() for x in run.scratch) <= most


@coded
def test_each_byte_of_codes_is_read_and_written_once(made: Made) -> None:
    tensors, runs = stepped(made, CODES, 0)
    memory = list(runs.values())[-1].memory
    for i, x in enumerate(tensors):
        # A scale is one for all threads of its group.
        share = 1 if len(x) == CODES else 64
        assert memory.loaded[x.data_ptr()] == x.nbytes * share
        # All but the gradient.
        assert memory.stored[x.data_ptr()] == (0 if i == 1 else x.nbytes)


@plain
def test_each_element_is_read_and_written_once(made: Made) -> None:
    n = LENGTHS[-1]
    tensors, runs = stepped(made, n, 0)
    for key, run in runs.items():
        own = [x.data_ptr() for x in (*tensors, *run.scratch) if x.numel() == n]
        loaded = sum(run.memory.loaded[x] for x in own) / n
        stored = sum(run.memory.stored[x] for x in own) / n
        assert (loaded, stored) == needed(key, scalars(made.case, T))


def needed(key: KernelKey, now: Scalars) -> tuple[int, int]:
    """Bytes an element that a pass has to read and to write, by the rule's operations."""
    traced = trace(key, now)
    tensors = traced.inputs[-len(key.dtypes) :]
    sizes = {x: dtype.itemsize for x, dtype in zip(tensors, key.dtypes)}
    read = {x for call in traced.calls for x in call.all_input_nodes if x in sizes}
    p, _, *rest = tensors
    results = [] if key.round is not None else traced.outputs
    written = [x for x, result in zip([p, *rest], results) if x is not result]
    return sum(sizes[x] for x in read), sum(sizes[x] for x in written)


def eager(made: Made, n: int) -> list[Tensor]:
    """What the step is on the CPU, by numbers as kernels get them: rounded once."""
    leaf, g = leaves(made.case, n)
    packed = Packed(scalars(made.case, T))
    dtype = compute_dtype(*next(iter(made.programs)).dtypes)
    values = packed.tensor(dtype, torch.device("cpu")).unbind()
    now = fill(packed.statics, pytree.tree_structure(packed.scalars), values)
    return [*tensors_of(leaf_step(made.rule, leaf, g, now, True)).values()]


@plain
@pytest.mark.parametrize("n", LENGTHS)
def test_it_computes_what_eager_does(made: Made, n: int) -> None:
    want = eager(made, n)
    names = ["p", *made.rule.state._fields, "comp"]
    if len(want) == len(names):
        assert want[-1].count_nonzero() > 0.9 * n  # there is something to lose
    for build in builds(made):
        (p, _, *rest), _ = stepped(made, n, build)
        found = {name: units(x, y) for name, x, y in zip(names, [p, *rest], want)}
        assert max(found.values()) <= ROUNDING, found


@coded
def test_codes_are_those_that_eager_makes(made: Made) -> None:
    want, start = eager(made, CODES), leaves(made.case, CODES)[0].p.double()
    assert 0 in builds(made)
    for build in builds(made):
        (p, _, *rest), _ = stepped(made, CODES, build)
        moved, expected = p.double() - start, want[0].double() - start
        if p.dtype == F32:
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


@plain
def test_products_do_meet_sums_in_one_rounding(made: Made) -> None:
    """Triton contracts by default: what is compared above went through that."""
    texts = [build.text for kernel in kernels_of(made) for build in kernel.builds]
    assert any("fma.rn.f32" in text for text in texts)


# One launch for a list of tensors

# One element, less than a block, whole ones, and lengths that no block divides.
ROWS = [1, 16, 1003, 2 * BLOCK, 5003]


@pytest.fixture(scope="module")
def many(made: Made) -> Any:
    """The list kernel of its last pass, which moves."""
    tensors = arguments(*leaves(made.case, 64)).values()
    return moving(made).list_kernel([torch.ones(16), *tensors])


def moving(made: Made) -> Any:
    return list(made.programs.values())[-1]


def of_rows(made: Made) -> tuple[Tensor, list[list[Tensor]]]:
    """A row of numbers for each tensor, a mean of its own among them; and all columns."""
    packed = Packed(scalars(made.case, T))
    values = packed.tensor(torch.float32, torch.device("cpu"))
    numbers = torch.zeros(len(ROWS), 32)
    numbers[:, : len(values)] = values
    numbers[:, len(values)] = torch.arange(len(ROWS)) + 0.5
    columns: list[list[Tensor]] = []
    for n in ROWS:
        columns.append([*arguments(*leaves(made.case, n)).values()])
    return numbers, [list(column) for column in zip(*columns)]


def one_by_one(made: Made, build: int) -> list[list[Tensor]]:
    """The columns after a launch for each row."""
    numbers, columns = of_rows(made)
    columns = [[x.clone() for x in column] for column in columns]
    for row, *tensors in zip(numbers, *columns):
        moving(made).run([row, *tensors], build)
    return columns


@plain
@pytest.mark.parametrize("off", [0, 1])
def test_a_list_is_bit_for_bit_its_tensors(made: Made, many: Any, off: int) -> None:
    numbers, columns = of_rows(made)
    columns = [[torch.cat([x[:1]] * off + [x])[off:] for x in row] for row in columns]
    p, _, *rest = [array("q", map(Tensor.data_ptr, column)) for column in columns]
    table = DeviceTable(torch.device("cpu"), array("q", ROWS), sum(rest, p))
    memory = many.run(numbers, table, columns)
    for build in builds(made):
        for ours, theirs in zip(columns, one_by_one(made, build)):
            for x, y in zip(ours, theirs):
                # What differs, the trial on a GPU would find out, and launch a kernel for
                # each tensor.
                assert_same(made, x, y)
    key = list(made.programs)[-1]
    read = sum(memory.loaded[x.data_ptr()] for column in columns for x in column)
    stored = sum(memory.stored[x.data_ptr()] for column in columns for x in column)
    needs = needed(key, scalars(made.case, T))
    assert (read, stored) == tuple(bytes_ * sum(ROWS) for bytes_ in needs)


@plain
def test_whole_blocks_of_a_list_are_vectors(made: Made, many: Any) -> None:
    key = list(made.programs)[-1]
    read, written = needed(key, scalars(made.case, T))
    found = Counter(re.findall(r"\b(ld|st)\.global\.v4\.b32", many.build.text))
    each = BLOCK // many.build.threads  # elements of a thread
    assert found == {"ld": read * each // 16, "st": written * each // 16}
    assert many.build.spilled == 0 and 0 < many.build.registers <= 96


@plain
def test_a_mean_is_no_list_kernel(made: Made) -> None:
    tensors = arguments(*leaves(made.case, 64)).values()
    for key, program in made.programs.items():
        if key.round is not None:
            assert program.list_kernel([torch.ones(16), *tensors]) is None
