"""The eager pure step: what it costs is counted, and that its short cuts change nothing."""

import gc
import sys
from typing import Any, NamedTuple

import pytest
import torch
from cases import CASES, MATRICES, NAMES, Case
from counted import allowed, operations, usual
from tiers import few
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import optimi_func
from optimi_func import adamw_init, adamw_step, schedules
from optimi_func.core import tree
from optimi_func.core.packed import Packed
from optimi_func.pure import functional
from optimi_func.rules import Float, Moment, Optimizer, functions

# Operations of a leaf of float32, with the default hyperparameters: those of its program
# and new tensors, or those of `leaf_step` and a map. Of rules that differ in form; all
# others have at most what `counted.allowed` says.
OPERATIONS = {"adamw": 22, "lion": 14, "sgd": 10, "stableadamw": 38, "ranger": 26}
OPERATIONS |= {"schedule_free_adamw": 26, "muon": 40, "soap": 65}
OPERATIONS["kron"] = 437  # most of which draw noise, as its loop does in another way


class Watched(TorchDispatchMode):
    """A mode that sees the operations, as make_fx does, so that no short cut is taken."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def leaves(n: int, *shape: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.randn(*shape) for i in range(n)}


@pytest.mark.parametrize("name", NAMES)
def test_operations_of_a_leaf(name: str) -> None:
    step = usual(name).functional(lr=0.1)
    counts: list[int] = []
    for n in (2, 5):
        p, g = leaves(n, 100, 100), leaves(n, 100, 100)  # too large to be joined
        _, state = step.step(p, g, step.init(p))
        counts.append(operations(lambda: step.step(p, g, state)))  # noqa: B023
    each, rest = divmod(counts[1] - counts[0], 3)
    # Of running scalars each leaf has a copy of its own.
    own = len(step.rule.running._fields)
    assert rest == 0
    if name in OPERATIONS:
        assert each - own == OPERATIONS[name]
    else:
        assert each - own <= allowed(name), "leave out what defaults do not need"


class Swapping(Optimizer):
    """A rule whose results are the tensors that it is given."""

    lr: Float = Float(1e-3)

    class State(NamedTuple):
        a: Moment
        b: Moment
        c: Moment

    def direction(self, g: Any, s: Any, x: Any) -> Any:
        return s.a, self.State(s.b, s.b, x)


def test_calls_of_a_leaf() -> None:
    """Of Python functions, for a rule of a user: the rest of a leaf is torch."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name[0] != "<"

    counts: list[int] = []
    for n in (2, 5):
        p, g = leaves(n, 4, 4), leaves(n, 4, 4)
        optimizer = functions(Swapping)[0](lr=0.1)
        _, state = optimizer.step(p, g, optimizer.init(p))
        calls = 0
        # The collector runs other tests' finalizers, which are calls too.
        gc.disable()
        sys.setprofile(count)
        try:
            optimizer.step(p, g, state)
        finally:
            sys.setprofile(None)
            gc.enable()
        counts.append(calls)
    # Its LeafState, and the memory of the five tensors that it reads and the four that it
    # writes, which are joined with those of others: no rule is called.
    each = (counts[1] - counts[0]) / 3
    assert each == 10


def test_results_of_a_short_step_share_no_memory() -> None:
    p, g = leaves(2, 3), leaves(2, 3)
    optimizer = functions(Swapping)[0](lr=0.1)
    state = optimizer.init(p)
    for s in state.leaves.values():
        s.a.fill_(1.0), s.b.fill_(2.0)
    new, found = optimizer.step(p, g, state)
    with Watched():
        known = optimizer.step(p, g, state)
    every = pytree.tree_leaves([p, g, state, new, found])
    assert len({x.data_ptr() for x in every}) == len(every)
    pytree.tree_map(torch.testing.assert_close, (new, found), known)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {}),
        ("soap", {}),
        ("schedule_free_adamw", {}),
        ("adamw", {"cautious": True}),
        ("adamw", {"lr": schedules.linear(0.1, 0.2, 9)}),
    ],
)
def test_leaves_are_checked_at_once(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves that differ are checked one by one, for the errors."""
    checked: list[object] = []
    check = tree.check_grad

    def counted(path: object, p: Any, g: Any) -> None:
        checked.append(path)
        check(path, p, g)

    monkeypatch.setattr(tree, "check_grad", counted)
    optimizer = getattr(optimi_func, name)(**{"lr": 0.1, **options})
    p: Any = [torch.ones(4, 2), torch.ones(3, 5)]
    optimizer.step(p, p, optimizer.init(p))
    optimizer.step(p, [None, p[1]], optimizer.init(p))
    assert not checked
    optimizer.step(p, [x.double() for x in p], optimizer.init(p))
    assert len(checked) == 2


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), schedules.linear(0.1, 0.2, 9)])
def test_scalars_are_cast_once(lr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a dtype and device, whatever the number of leaves."""
    made_in: list[torch.dtype] = []
    pack = Packed._pack

    def counted(self: Packed, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made_in.append(dtype)
        return pack(self, dtype, device)

    monkeypatch.setattr(Packed, "_pack", counted)
    for n in (1, 5):
        p = {**leaves(n, 3), "wide": torch.randn(3).double()}
        state = adamw_init(p)
        made_in.clear()
        adamw_step(p, p, state, lr=lr)
        assert made_in == [torch.float32, torch.float64]


def test_a_derivative_passes_through_casts_of_its_own() -> None:
    """It is summed over the leaves in the dtype of the hyperparameter."""
    p = {f"w{i}": torch.tensor(1.0 + 2.0**-20 * i) for i in range(50)}
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    new, _ = optimi_func.sgd_step(p, p, optimi_func.sgd_init(p), lr=lr)
    torch.stack([x.double() for x in new.values()]).sum().backward()
    assert lr.grad == -torch.stack([x.double() for x in p.values()]).sum()


def test_equal_numbers_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    check = functional.checks.check_number

    def counted(label: str, name: str, *rest: Any, **more: Any) -> None:
        checks.append(name)
        check(label, name, *rest, **more)

    monkeypatch.setattr(functional.checks, "check_number", counted)
    p = leaves(1, 3)
    state = adamw_init(p)

    def step(**numbers: Any) -> list[str]:
        checks.clear()
        adamw_step(p, p, state, **numbers)
        return sorted(checks)

    given: dict[str, Any] = {"betas": (0.81, 0.92), "eps": 3e-7}
    every = ["betas[0]", "betas[1]", "eps", "lr", "weight_decay"]
    assert step(lr=0.013, **given) == every
    assert step(lr=0.013, **given) == []
    assert step(lr=0.014, **given) == ["lr"]
    assert step(lr=0.014, **{**given, "eps": 4e-7}) == every
    for lr in (torch.tensor(0.1), lambda step: 0.1 + 0 * step, {"w0": 0.1}):
        # Its value is checked at every step, with the others.
        first, again = step(lr=lr, **given), step(lr=lr, **given)
        assert first == again
        assert set(first) == set(every)


def test_kept_values_accept_no_more_than_fresh_ones() -> None:
    p = leaves(1, 3)
    state = adamw_init(p)
    adamw_step(p, p, state, lr=1.0, weight_decay=1, betas=(0.0, 0.5))
    refused: tuple[dict[str, Any], ...] = (
        {"lr": True},
        {"lr": float("nan")},
        {"lr": -1.0},
        {"lr": 1.0, "weight_decay": True},
        {"lr": 1.0, "weight_decay": 1, "betas": (False, 0.5)},
        {"lr": 0.0, "decouple_lr": True},
    )
    for wrong in refused:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match="Invalid"):
                adamw_step(p, p, state, **wrong)
    # Its lr is the largest, as in a fresh value.
    adamw_step(p, p, state, lr=0.5, decouple_lr=True, weight_decay=1e-5)
    numbers: dict[str, Any] = {"decouple_lr": True, "weight_decay": 1e-5}
    new, _ = adamw_step(p, p, state, lr=0.25, **numbers)
    fresh, _ = optimi_func.adamw(lr=0.25, **numbers).step(p, p, state)
    assert torch.equal(new["w0"], fresh["w0"])


def test_warnings_are_looked_for_once_and_given_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    look = optimi_func.adamw.likely_mistakes

    def counted(self: Any) -> list[str]:
        looked.append(1)
        return look(self)

    monkeypatch.setattr(optimi_func.adamw, "likely_mistakes", counted)
    p = leaves(1, 3)
    state, optimizer = adamw_init(p), optimi_func.adamw(lr=0.1, max_lr=0.2)
    for _ in range(3):
        with pytest.warns(UserWarning, match=r"max_lr=0\.2 has no effect"):
            optimizer.step(p, p, state)
    assert len(looked) == 1


def test_paths_are_found_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    paths = tree.paths_in

    def counted(*args: Any) -> list[str]:
        found.append(1)
        return paths(*args)

    monkeypatch.setattr(tree, "paths_in", counted)
    for dtype in (torch.float32, torch.bfloat16):
        p = {"a": [torch.ones(2, dtype=dtype), torch.ones(3, dtype=dtype)]}
        state = adamw_init(p)
        adamw_step(p, p, state, lr=0.1)
        assert not found
        g = {"a": [torch.ones(2, dtype=dtype), torch.ones(4, dtype=dtype)]}
        with pytest.raises(ValueError, match=r"grads\['a'\]\[1\] has shape \(4,\)"):
            adamw_step(p, g, state, lr=0.1)
        assert found
        found.clear()


# A case takes a tenth of a second: every second one in `make test`.
@pytest.mark.parametrize("case", few(CASES, [c.id for c in CASES[::2]], lambda c: c.id))
@pytest.mark.filterwarnings("ignore:eps=", "ignore:weight_decay=")
def test_short_cuts_change_no_bit(case: Case) -> None:
    """Nor the sign of a zero, nor what infinite parameters and gradients do."""
    odd = torch.tensor([0.0, -0.0, 1.5, -2.5, torch.inf, -torch.inf, torch.nan])
    p_odd, g_odd = torch.cartesian_prod(odd, odd).T.reshape(2, 7, 7)
    optimizer = case.functional()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        p = {"odd": p_odd.to(dtype), "usual": torch.randn(7, 3).to(dtype)}
        g = {"odd": g_odd.to(dtype), "usual": torch.randn(7, 3).to(dtype)}
        if case.name not in MATRICES:
            p["0-d"], g["0-d"] = torch.randn(2).to(dtype).unbind()
        if isinstance(case.options.get("split"), dict):  # of five columns
            p, g = ({"odd": x["odd"][:, :5].clone()} for x in (p, g))
        q, state = p, optimizer.init(p)
        twin = state
        for _ in range(7):
            p, state = optimizer.step(p, g, state)
            with Watched():
                q, twin = optimizer.step(q, g, twin)
            for x, y in zip(*map(pytree.tree_leaves, ((p, state), (q, twin)))):
                same = (x == y) & (x.signbit() == y.signbit())
                assert (same | (x.isnan() & y.isnan())).all()
