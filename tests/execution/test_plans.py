"""Plans: what is launched again at the next step, and who may disturb that."""

import copy
import gc
import inspect
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CLASSES, ELEMENTWISE, MEASURED, TOLERANCE
from many_sizes import assert_alike, fill, params, train
from tiers import built, row
from torch import Tensor

from optimi_func import SGD, AdamW, StableAdamW
from optimi_func.classes import stepping
from optimi_func.core import checks
from optimi_func.core.rule import WHOLE_BATCH
from optimi_func.execution import kernels
from optimi_func.execution import plans as plans_
from optimi_func.execution.eager import EagerLaunch
from optimi_func.execution.launches import (
    KernelLaunch,
    Launch,
    ListLaunch,
)
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.plans import Plan
from optimi_func.execution.tensors import uncollected

# List kernels; kernels of one tensor, as where there are no list kernels; and foreach.
WAYS: dict[str, Any] = {
    "lists": {"compile": None},
    "tensors": {"compile": None},
    "foreach": {"foreach": True},
}
EAGER = {"compile": False}


# Kernels of one tensor are others than those of lists.
TIERS = {"lists": "kernels", "tensors": "full", "foreach": ""}


@pytest.fixture(params=[row(way, id=way, tier=TIERS[way]) for way in WAYS])
def how(request, monkeypatch) -> dict[str, Any]:
    """Options of an optimizer that steps in one of the ways."""
    if request.param == "tensors":
        monkeypatch.setattr(kernels, "LISTED", set())
    return WAYS[request.param]


def plans(optimizer: Any) -> list[Plan]:
    return list(optimizer._plans.values())


def launches(optimizer: Any) -> list[Launch]:
    (plan,) = plans(optimizer)
    ((_, (found, _)),) = plan._cached.values()
    return found


# A kernel costs seconds: lists and single tensors have those whose means or second kernel
# make a step of another form, and one without state, in the full run; the rest soak.
# test_list_kernels.py has every rule's kernel for lists in float64.
FULL = {
    "lists": {
        torch.float64: ["adamw", "stableadamw", "ranger", "sgd"],
        torch.bfloat16: ["adamw", "stableadamw"],
    },
    "tensors": {
        torch.float64: ["adamw", "stableadamw", "ranger"],
        torch.bfloat16: ["adamw"],
    },
    "foreach": {torch.float64: [*ELEMENTWISE], torch.bfloat16: [*ELEMENTWISE]},
}


def tier_of(way: str, name: str, dtype: torch.dtype) -> str:
    if name not in FULL[way][dtype]:
        return "soak"
    if way == "lists" and name == "adamw":
        return "kernels"
    return "" if way == "foreach" else "full"


ROWS = built(
    [
        row(way, name, dtype, id=f"{way}-{name}-{dtype}", tier=tier_of(way, name, dtype))
        for way in WAYS
        for name in ELEMENTWISE
        for dtype in (torch.float64, torch.bfloat16)
    ]
)


@pytest.mark.parametrize(("how", "name", "dtype"), ROWS, indirect=["how"])
def test_the_same_steps_as_one_by_one(name: str, dtype: torch.dtype, how: Any) -> None:
    ps, qs = params(dtype), params(dtype)
    ours, plain = (
        CLASSES[name](xs, lr=0.05, weight_decay=0.1, **way)
        for xs, way in ((ps, how), (qs, EAGER))
    )
    train(ours, ps, 0, 8)
    train(plain, qs, 0, 8)
    if how is WAYS["lists"] and name != "ranger":
        filled = [i for i, p in enumerate(ps) if p.numel()]
        assert [type(x) for x in launches(ours)] == [ListLaunch]
        assert launches(ours)[0].positions == filled
    elif how is WAYS["tensors"] and name not in ("ranger", *MEASURED):
        assert {type(x) for x in launches(ours)} == {KernelLaunch, EagerLaunch}
    # Kernels add up means in an order of their own, and few elements are rounded apart.
    exact = dtype == torch.bfloat16 and name not in MEASURED
    assert_alike(ps, qs, 0.0 if exact else TOLERANCE[dtype])
    for p, q in zip(ps, qs):
        assert ours.state[p]["step"].item() == plain.state[q]["step"].item() == 8


def test_tensors_of_the_state_stay_the_objects_they_are(how) -> None:
    ps = params()
    optimizer = AdamW(ps, lr=0.1, **how)
    train(optimizer, ps, 0, 1)
    before = {p: dict(optimizer.state[p]) for p in ps}
    train(optimizer, ps, 1, 3)
    where = {p: optimizer.state[p]["exp_avg"].data_ptr() for p in ps}
    train(optimizer, ps, 4, 2)
    for p in ps:
        assert optimizer.state[p]["exp_avg"].data_ptr() == where[p]
        assert list(before[p]) == list(optimizer.state[p])
        assert all(x is before[p][k] for k, x in optimizer.state[p].items())
    saved = optimizer.state_dict()["state"]
    for entry in saved.values():
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in entry.values())
    assert saved[0]["exp_avg"].equal(optimizer.state[ps[0]]["exp_avg"])


def _set(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], None]:
    def edit(optimizer: Any, p: Tensor) -> None:
        optimizer.state[p][key] = change(optimizer.state[p][key])

    return edit


def _data(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], None]:
    def edit(optimizer: Any, p: Tensor) -> None:
        p.data = change(p.data)

    return edit


def _freeze(optimizer: Any, p: Tensor) -> None:
    fill([p], 50)
    optimizer.step()  # of this one alone: the others have no gradient
    p.grad = None


def _reload(optimizer: Any, p: Tensor) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))


def _clear(optimizer: Any, p: Tensor) -> None:
    del p
    optimizer.state.clear()


def _first_step(optimizer: Any) -> Tensor:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]


EDITS: dict[str, Callable[[Any, Tensor], Any]] = {
    "state replaced": _set("exp_avg", lambda x: x + 1),
    "state written to": lambda o, p: o.state[p]["exp_avg"].add_(1),
    "state's data": lambda o, p: setattr(
        o.state[p]["exp_avg"], "data", o.state[p]["exp_avg"] + 1
    ),
    "state's dtype": _set("exp_avg_sq", lambda x: x.float()),
    "count replaced": _set("step", lambda x: x + 3),
    "count written to": lambda o, p: o.state[p]["step"].fill_(20.0),
    "count's data": lambda o, p: setattr(o.state[p]["step"], "data", torch.tensor(7.0)),
    "count's data written to": lambda o, p: o.state[p]["step"].data.fill_(20.0),
    "count written to by numpy": lambda o, p: o.state[p]["step"].numpy().fill(20.0),
    "first count's data": lambda o, p: _first_step(o).data.fill_(20.0),
    "field gone": lambda o, p: o.state[p].pop("exp_avg"),
    "entry gone": lambda o, p: o.state.pop(p),
    "all gone": _clear,
    "a field more": lambda o, p: o.state[p].update(mine=torch.zeros(p.shape)),
    "reloaded": _reload,
    "p written to": _data(lambda x: x.mul_(0.5)),
    "p elsewhere": _data(torch.clone),
    "p transposed": _data(lambda x: x.t() if x.shape == x.t().shape else x),
    "p strided": _data(lambda x: torch.stack([x, x], -1)[..., 0]),
    "p is float32": _data(lambda x: x.float()),
    "amsgrad": lambda o, p: o.param_groups[0].update(amsgrad=True),
    "frozen for a step": _freeze,
    "lr": lambda o, p: o.param_groups[0].update(lr=torch.tensor(0.3)),
}


# These take another kernel after the edit: seconds, for what is noticed as with lists.
COMPILING = ("state's dtype", "p is float32", "amsgrad")


def edited_tier(way: str, name: str) -> str:
    if way == "foreach" or name not in COMPILING:
        return TIERS[way]
    return "soak" if way == "tensors" else "full"


EDITED = built(
    [
        row(way, edit, id=f"{way}-{name}", tier=edited_tier(way, name))
        for way in WAYS
        for name, edit in EDITS.items()
    ]
)


@pytest.mark.parametrize("index", [1, 6, 8], ids=["3x4", "4x4", "100x100"])
@pytest.mark.parametrize(("how", "edit"), EDITED, indirect=["how"])
def test_edits_are_noticed(how, edit: Callable[[Any, Tensor], Any], index: int) -> None:
    made = []
    for way in (how, EAGER):
        ps = params()
        optimizer = AdamW(ps, lr=0.05, weight_decay=0.1, **way)
        train(optimizer, ps, 0, 4)
        for p in ps:
            p.grad = None
        edit(optimizer, ps[index])
        train(optimizer, ps, 4, 4)
        made.append((ps, optimizer))
    (ps, ours), (qs, plain) = made
    wide = all(x.dtype == torch.float64 for x in _tensors(plain, qs))
    tolerance = 1e-12 if wide else 1e-6
    assert_alike(ps, qs, tolerance)
    for p, q in zip(ps, qs):
        for key in plain.state[q]:
            torch.testing.assert_close(
                ours.state[p][key], plain.state[q][key], rtol=tolerance, atol=tolerance
            )


def _tensors(optimizer: Any, ps: list[Tensor]) -> list[Tensor]:
    fields = [x for p in ps for k, x in optimizer.state[p].items() if k != "step"]
    return [*ps, *fields]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_share_nothing(how, copier: Callable[[Any], Any]) -> None:
    ps = params()
    optimizer = AdamW(ps, lr=0.05, **how)
    train(optimizer, ps, 0, 4)
    twin = copier(optimizer)
    qs = twin.param_groups[0]["params"]
    train(twin, qs, 4, 3)
    train(optimizer, ps, 4, 3)
    assert_alike(ps, qs, 0.0)
    for one, xs in ((optimizer, ps), (twin, qs)):
        assert all(one.state[p]["step"] == 7 for p in xs)


GRADS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda p: torch.tensor(0.5, dtype=p.dtype).expand(p.shape),
    "strided": lambda p: torch.full((*p.shape, 2), 0.5, dtype=p.dtype)[..., 0],
    "transposed": lambda p: torch.full(p.shape[::-1], 0.5, dtype=p.dtype).permute(
        *reversed(range(p.dim()))
    ),
    "negated": lambda p: torch._neg_view(torch.full(p.shape, -0.5, dtype=p.dtype)),
    "zero": lambda p: torch._efficientzerotensor(p.shape, dtype=p.dtype),
}


@pytest.mark.parametrize("grad", GRADS.values(), ids=GRADS)
def test_gradients_of_every_make(grad: Callable[[Tensor], Tensor], how: Any) -> None:
    ends = []
    for way in (how, EAGER):
        ps = params()
        optimizer = AdamW(ps, lr=0.05, **way)
        train(optimizer, ps, 0, 4)
        for _ in range(2):  # the second is a launch that was remembered
            for index in (0, 1, 6, 8):
                ps[index].grad = grad(ps[index])
            optimizer.step()
        ends.append(ps)
    assert_alike(*ends)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_there_twice_steps_twice() -> None:
    ends = []
    for way in ({}, EAGER):
        ps = params()[:4]
        optimizer = AdamW([*ps, ps[0]], lr=0.05, **way)
        train(optimizer, ps, 0, 6)
        ends.append([*ps, optimizer.state[ps[0]]["step"]])
    assert_alike(*ends)


@pytest.mark.full
def test_a_wider_gradient_and_a_mixture_of_them(how) -> None:
    ends = []
    for way in (how, EAGER):
        ps = params(torch.bfloat16)
        optimizer = AdamW(ps, lr=0.05, **way)
        for count in (len(ps), 5):
            for _ in range(4):
                grads = [
                    torch.full(p.shape, 0.3, dtype=torch.float32 if i < count else p.dtype)
                    for i, p in enumerate(ps)
                ]
                optimizer.update(ps, grads, [WHOLE_BATCH] * len(ps), write=True, count=True)
        ends.append(ps)
    assert_alike(*ends, 0.0)


@pytest.mark.full
def test_a_step_that_some_parameters_skip_parts_their_counts(how) -> None:
    ends = []
    for way in (how, EAGER):
        ps = params()
        optimizer = AdamW(ps, lr=0.05, capturable=True, **way)
        for t in range(8):
            fill(ps, t)
            kept = [WHOLE_BATCH] * len(ps)
            if t in (2, 5):
                # Of every third parameter the gradient is not finite.
                flags = [torch.tensor(i % 3 > 0) for i in range(len(ps))]
                kept = [WHOLE_BATCH._replace(finite=flag) for flag in flags]
            grads = [p.grad for p in ps]
            optimizer.update(ps, grads, kept, write=True, count=True)
        ends.append([*ps, *(optimizer.state[p]["step"] for p in ps)])
        assert optimizer.state[ps[0]]["step"] == 6 and optimizer.state[ps[1]]["step"] == 8
    assert_alike(*ends)
    plain = params()
    reference = AdamW(plain, lr=0.05, **EAGER)
    for t in range(8):
        fill(plain, t)
        for p in plain[::3] if t in (2, 5) else []:
            p.grad = None
        reference.step()
    assert_alike(plain, ends[0])


CHOICES: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.2},
    "lr as a tensor": {"lr": torch.tensor(0.2, dtype=torch.float64)},
    "betas": {"betas": (0.5, 0.9)},
    "decay": {"weight_decay": 0.3},
    "maximize": {"maximize": True},
    "rule": {"amsgrad": True},
    "counts on the device": {"capturable": True},
    "foreach": {"foreach": True, "compile": None},
    "eager": {"compile": False},
}


@pytest.mark.full
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_steps_that_are_repeated_take_new_numbers_and_choices(choice, monkeypatch) -> None:
    """Two groups; only the second one's choice changes, and back again."""
    ends = []
    prepared: list[int] = []
    make = plans_.plan_launches
    monkeypatch.setattr(
        plans_, "plan_launches", lambda *args: prepared.append(1) or make(*args)
    )
    for way in (WAYS["lists"], EAGER):
        ps = params()
        groups = [{"params": ps[:5]}, {"params": ps[5:], "betas": (0.8, 0.95)}]
        optimizer = AdamW(groups, lr=0.05, weight_decay=0.1, **way)
        train(optimizer, ps, 0, 4)
        prepared.clear()
        train(optimizer, ps, 4, 3)
        assert not prepared
        group = optimizer.param_groups[1]
        before = {name: group[name] for name in choice}
        group.update(choice if way is not EAGER else {**choice, "compile": False})
        if way is EAGER:
            group["foreach"] = None
        train(optimizer, ps, 7, 3)
        group.update(before)
        train(optimizer, ps, 10, 3)
        ends.append(ps)
    assert_alike(*ends)


def test_a_sparse_gradient_is_refused_before_any_write(how) -> None:
    ps = params()
    optimizer = AdamW(ps, lr=0.05, **how)
    train(optimizer, ps, 0, 4)
    before = [p.detach().clone() for p in ps]
    ps[1].grad = torch.ones(3, 4, dtype=torch.float64).to_sparse()
    with pytest.raises(TypeError, match="layout"):
        optimizer.step()
    assert_alike(ps, before, 0.0)


def some_of(ps: list[Tensor], t: int) -> list[int]:
    """Three lists in turn, then one that has not been before at each step."""
    if t < 9:
        return [[0, 1, 2, 3], [0, 1, 4, 5], [3, 4, 6]][t % 3]
    return [i for i in range(len(ps)) if (t * 7 + i * i) % 3]


def test_plans_of_lists_that_take_turns_are_kept(how, monkeypatch) -> None:
    made: list[int] = []
    plan = plans_.plan_launches
    monkeypatch.setattr(
        plans_, "plan_launches", lambda *given: made.append(1) or plan(*given)
    )
    ps = params()
    optimizer = AdamW(ps, lr=0.05, **how)
    for t in range(9):
        before = len(made)
        fill(ps, t)
        for i in {*range(len(ps))} - {*some_of(ps, t)}:
            ps[i].grad = None
        optimizer.step()
        # In the second round the counts differ from those of the first.
        assert t < 6 or len(made) == before


def test_a_state_that_begins_anew_or_is_loaded_keeps_its_launches(how, monkeypatch) -> None:
    made: list[int] = []
    plan = plans_.plan_launches
    monkeypatch.setattr(
        plans_, "plan_launches", lambda *given: made.append(1) or plan(*given)
    )
    ps, qs = ([p for p in params() if p.numel()] for _ in range(2))
    ours, plain = (AdamW(xs, lr=0.05, **kind) for xs, kind in ((ps, how), (qs, EAGER)))
    edits = _clear, _reload, _reload, _clear
    for t, edit in enumerate(edits):
        for optimizer, xs in ((ours, ps), (plain, qs)):
            train(optimizer, xs, 2 * t, 1)
            edit(optimizer, xs[0])
            before = len(made)
            train(optimizer, xs, 2 * t + 1, 1)
            assert len(made) == before
    assert_alike(ps, qs)
    # Two parameters that share a moment take turns, which is another plan.
    first, last = ours.state[ps[0]], ours.state[ps[-1]]
    first["exp_avg"] = last["exp_avg"].view(-1)[: ps[0].numel()].view(ps[0].shape)
    train(ours, ps, 8, 1)
    assert len(made) == before + 1


def _checks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note the paths of the entries that a step checks."""
    seen: list[object] = []
    ensure = stepping.ensure_state
    monkeypatch.setattr(
        stepping, "ensure_state", lambda *given: seen.append(given[2]) or ensure(*given)
    )
    return seen


def test_a_step_checks_entries_that_are_not_as_before(monkeypatch) -> None:
    ps = [p for p in params(torch.float32) if p.numel()]
    optimizer = AdamW(ps, lr=0.05, **EAGER)
    train(optimizer, ps, 0, 1)
    seen = _checks(monkeypatch)
    _reload(optimizer, ps[0])
    train(optimizer, ps, 1, 1)
    assert not seen
    _reload(optimizer, ps[0])
    optimizer.state[ps[0]]["exp_avg"] = optimizer.state[ps[0]]["exp_avg"].double()
    train(optimizer, ps, 2, 1)
    assert len(seen) == len(ps)


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


WRONG: dict[str, tuple[str, Any, str]] = {
    "below 0": ("step", lambda x: x - 9, "allowed is at least 0"),
    "NaN": ("step", lambda x: x * float("nan"), "allowed is at least 0"),
    "a number": ("exp_avg", lambda x: 3.0, "allowed is a tensor"),
    "not writable": ("exp_avg", _inference, "made under inference_mode"),
    "expanded": ("exp_avg", lambda x: x[:1].expand_as(x), "is expanded"),
    "a shape": ("exp_avg", lambda x: x[:1], "has shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_step_after_loading_refuses_what_it_refused_before(name: str) -> None:
    key, change, said = WRONG[name]
    ps = [torch.ones(9, requires_grad=True) for _ in range(3)]
    optimizer = AdamW(ps, lr=0.05, **EAGER)
    train(optimizer, ps, 0, 1)  # whose plan is not asked again before the next
    _reload(optimizer, ps[0])
    optimizer.state[ps[1]][key] = change(optimizer.state[ps[1]][key])
    before = [p.detach().clone() for p in ps]
    with pytest.raises((ValueError, TypeError), match=said):
        train(optimizer, ps, 1, 1)
    assert all(map(torch.equal, before, ps))


EDITS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "none": lambda optimizer, ps: None,
    "a count": lambda optimizer, ps: optimizer.state[ps[1]]["step"].add_(5),
    "a moment": lambda optimizer, ps: optimizer.state[ps[1]].update(
        exp_avg=optimizer.state[ps[1]]["exp_avg"] * 2
    ),
    "an entry": lambda optimizer, ps: optimizer.state.pop(ps[2]),
    "loaded": lambda optimizer, ps: optimizer.load_state_dict(optimizer.state_dict()),
    "lr": lambda optimizer, ps: optimizer.param_groups[0].update(lr=torch.tensor(0.07)),
    "pickled": lambda optimizer, ps: pickle.dumps(optimizer),
    "a list": lambda optimizer, ps: optimizer.param_groups[0].update(params=ps[::-1]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_any_part_of_the_parameters_steps_as_one_by_one(how, edit: str) -> None:
    ends = []
    for way in (how, EAGER):
        ps = params()
        optimizer = AdamW(ps, lr=0.05, weight_decay=0.1, **way)
        for t in range(24):
            fill(ps, t)
            for i in {*range(len(ps))} - {*some_of(ps, t)}:
                ps[i].grad = None
            optimizer.step()
            if t in (7, 14):
                EDITS[edit](optimizer, ps)
        ends.append((ps, optimizer))
    (ps, ours), (qs, plain) = ends
    assert_alike(ps, qs)
    assert [ours.state[p]["step"].item() for p in ps] == [
        plain.state[q]["step"].item() for q in qs
    ]


def test_an_odd_state_of_one_without_a_gradient_is_no_matter(how) -> None:
    ps = params()
    optimizer = AdamW(ps, lr=0.05, **how)
    train(optimizer, ps, 0, 1)
    optimizer.state[ps[0]]["exp_avg"] = torch.ones(17)
    for t in range(1, 4):
        fill(ps, t)
        ps[0].grad = ps[t].grad = None
        optimizer.step()
    assert optimizer.state[ps[5]]["step"] == 4
    fill(ps, 4)
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.step()
    assert optimizer.state[ps[5]]["step"] == 4


@pytest.mark.kernels
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
def test_several_step_counts_are_one_call_of_a_list_kernel(lr: Any, monkeypatch) -> None:
    calls: list[int] = []
    run = ListKernel.run
    monkeypatch.setattr(
        ListKernel, "run", lambda self, *a, **k: calls.append(1) or run(self, *a, **k)
    )
    ends = []
    for way in ({"compile": None}, EAGER):
        ps = params(torch.float32)
        optimizer = AdamW(ps, lr=lr, **way)
        for t in range(6):
            fill(ps, t)
            for p in ps[t + 1 :] if t < 5 else ():
                p.grad = None
            calls.clear()
            optimizer.step()
        ends.append(ps)
        assert len(calls) == (way is not EAGER)
    assert_alike(*ends, 1e-6)


def test_only_equal_step_counts_share_numbers(how) -> None:
    ends = []
    for way in (how, EAGER):
        ps = params()
        optimizer = AdamW(ps, lr=0.05, **way)
        for t in range(8):
            fill(ps, t)
            if t < 3:
                for p in ps[::2]:
                    p.grad = None
            optimizer.step()
        ends.append(ps)
        if way is not EAGER:
            (late,) = [x for x in plans(optimizer) if len(x.counts.at) == len(ps)]
            assert late.counts.at == [0, 1] * 5
    assert_alike(*ends)


def test_a_backward_that_saved_a_small_parameter_or_its_state_raises(how) -> None:
    ps = params()
    optimizer = AdamW(ps, lr=0.05, **how)
    train(optimizer, ps, 0, 4)
    for role in ("p", "exp_avg"):
        x = ps[0] if role == "p" else optimizer.state[ps[0]][role]
        y = (ps[1].sum() * x * x).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@pytest.mark.full
@pytest.mark.parametrize("how", ["lists", "tensors"], indirect=True)
def test_versions_count_what_is_written_and_nothing_else(how) -> None:
    ps = params()
    optimizer = AdamW(ps, lr=0.05, **how)
    train(optimizer, ps, 0, 4)
    small, large = ps[0], ps[8]
    for write in (False, True):
        for _ in range(2):
            fill(ps, 4)
            tensors = [[p, optimizer.state[p]["exp_avg"], p.grad] for p in (small, large)]
            before = [[x._version for x in role] for role in tensors]
            grads = [p.grad for p in ps]
            optimizer.update(ps, grads, [WHOLE_BATCH] * len(ps), write=write, count=write)
            moved = [[x._version for x in role] for role in tensors]
            for (p, m, g), (q, n, h) in zip(before, moved):
                assert (q > p, n > m, h > g) == (write, True, False)


@pytest.mark.parametrize(
    "how",
    [row(way, id=way, tier=TIERS[way]) for way in ("lists", "tensors")],
    indirect=True,
)
def test_steps_allocate_nothing_that_lasts_and_launch_once(how, monkeypatch) -> None:
    shapes = [(16,)] * 200 + [(8, 8)] * 50
    ps = [torch.ones(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    optimizer = AdamW(ps, lr=0.05, compile=True)
    calls: list[int] = []

    def count(owner: Any, name: str) -> None:
        run = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **each: calls.append(1) or run(*args, **each)
        )

    count(KernelLaunch, "run")
    count(ListKernel, "run")
    for t in range(6):
        fill(ps, t)
        calls.clear()
        optimizer.step()
    assert len(calls) == 1
    if how is not WAYS["lists"]:
        return  # with a row of scalars for each
    fill(ps, 6)
    with torch.profiler.profile(profile_memory=True) as profiled:
        optimizer.step()
    made = [e for e in profiled.events() if e.name == "[memory]"]
    asked = [e.cpu_memory_usage for e in profiled.key_averages()]
    assert sum(x for x in asked if x > 0) < 200 * 16  # bytes: the numbers, no more
    assert len(made) < 40


@pytest.mark.full
@pytest.mark.parametrize("cls", [AdamW, StableAdamW, SGD], ids=lambda c: c.__name__)
def test_counts_on_the_device_are_never_read(cls: Any, how: Any, monkeypatch) -> None:
    ends = []
    for options in ({"capturable": True, **how}, EAGER):
        ps = params()
        optimizer = cls(ps, lr=torch.tensor(0.05, dtype=torch.float64), **options)
        train(optimizer, ps, 0, 4)
        for t in range(4, 8):
            fill(ps, t)
            with monkeypatch.context() as patch:
                if options is not EAGER:
                    for name in ("item", "tolist", "__bool__", "__float__"):
                        patch.setattr(Tensor, name, _refuse)
                    # An lr on the device is not read, as those on the CPU are.
                    patch.setattr(checks, "value_of", lambda x: None)
                optimizer.step()
        ends.append((ps, optimizer))
    (ps, ours), (qs, _) = ends
    assert_alike(ps, qs)
    assert all(ours.state[p]["step"] == 8 for p in ps)


def _refuse(*args: Any) -> Any:
    raise AssertionError("the host waits for the device")


def test_nothing_is_kept_alive(how) -> None:
    ps = params()
    optimizer = AdamW(ps, lr=0.05, **how)
    train(optimizer, ps, 0, 4)
    large = weakref.ref(optimizer.state[ps[8]]["exp_avg"])
    optimizer.state[ps[8]]["exp_avg"] = optimizer.state[ps[8]]["exp_avg"].clone()
    gc.collect()
    assert large() is None
    gone = [weakref.ref(p) for p in ps]
    optimizer.param_groups.clear()
    optimizer.state.clear()
    qs = params()[:3]
    optimizer.add_param_group({"params": qs})
    del ps
    train(optimizer, qs, 0, 1)
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_lists_that_never_come_again_are_forgotten(how) -> None:
    ends = []
    for way in (how, EAGER):
        ps = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(20)]
        optimizer = AdamW(ps, lr=0.05, **way)
        for t in range(60):
            fill(ps, t)
            for p in [*ps[: t % 13], *ps[14 + t % 5 :]]:
                p.grad = None
            optimizer.step()
        ends.append(ps)
        assert len(plans(optimizer)) <= 32 + len(ps)
    assert_alike(*ends)


@pytest.mark.kernels
def test_a_repeated_step_calls_few_functions() -> None:
    """Host time is what a step of small tensors costs, and it grew call by call."""
    package = str(Path(inspect.getfile(AdamW)).parents[1])
    ps = params(torch.float32)
    optimizer = AdamW(ps, lr=0.05)
    train(optimizer, ps, 0, 4)
    fill(ps, 4)
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert len(called) <= 35 and len(set(called)) <= 12


def test_an_interrupt_leaves_the_garbage_collector_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt), uncollected():
        pass
    assert gc.isenabled()
