"""Numbers, counts and fields in forms that users give them, and what is refused first."""

import copy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tiers import row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import optimi_func as T

EAGER: dict[str, Any] = {"compile": False}


def pair() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.full((2,), 2.0))]


def step(optimizer: Any, ps: list[Any]) -> None:
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()


NUMBERS = [np.float32(0.125), np.float64(0.125), np.array(0.125), np.array(0.125, "f")]


@pytest.mark.parametrize("how", [EAGER, {"foreach": True}], ids=str)
@pytest.mark.parametrize("lr", NUMBERS, ids=lambda x: f"{type(x).__name__}-{x.dtype}")
def test_numbers_of_numpy_are_numbers(lr: Any, how: dict[str, Any]) -> None:
    ps, qs = pair(), pair()
    known = T.AdamW(qs, lr=0.125, weight_decay=0.125, **how)
    given = T.AdamW(ps, lr=lr, weight_decay=lr, betas=(lr, lr), **how)
    known.param_groups[0]["betas"] = (0.125, 0.125)
    for _ in range(2):
        step(given, ps)
        step(known, qs)
        # Written later, as schedules of one's own do.
        given.param_groups[0].update(lr=lr, weight_decay=lr, betas=(lr, lr))
    assert all(map(torch.equal, ps, qs))
    value = T.adamw(lr=lr, weight_decay=lr, betas=(lr, lr))
    assert value == T.adamw(lr=0.125, weight_decay=0.125, betas=(0.125, 0.125))
    assert type(value.lr) is type(value.betas[0]) is float


def test_an_array_that_is_written_to_is_read_again() -> None:
    (w, _), lr = pair(), np.array(0.0)
    optimizer = T.SGD([w], lr=1.0, **EAGER)
    optimizer.param_groups[0]["lr"] = lr
    step(optimizer, [w])
    lr[...] = 0.5
    step(optimizer, [w])
    assert torch.equal(w, torch.full((3,), 0.5))


def test_a_schedule_in_a_group_is_refused_by_name() -> None:
    w, _ = pair()
    optimizer = T.SGD([w], lr=1.0, **EAGER)
    optimizer.param_groups[0]["lr"] = lambda t: 0.1
    with pytest.raises(TypeError, match=r"a group has lr=.*torch.optim.lr_scheduler"):
        step(optimizer, [w])
    assert torch.equal(w, torch.ones(3))
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError, match="in the pure API schedules"):
        step(optimizer, [w])


COUNTS = [
    *(torch.tensor(4), torch.tensor([4]), torch.tensor([4.0])),
    *(torch.tensor(4, dtype=torch.int32), torch.tensor(4, dtype=torch.uint8)),
    *(torch.tensor(4.0, dtype=torch.bfloat16), torch.tensor(4.0, dtype=torch.float64)),
]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
@pytest.mark.parametrize(
    "value",
    [10**400, Fraction(1, 10), torch.ones(2), torch.ones(0), {}, [0.1]],
    ids=lambda x: f"{x!r:.20}",
)
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    optimizer = T.AdamW([w], lr=0.1, **EAGER)
    for first in (True, False):
        kept = w.detach().clone()
        usual = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises((ValueError, TypeError), match=f"{name}="):
            optimizer.step()
        assert torch.equal(w, kept) and (len(optimizer.state) == 0) is first
        optimizer.param_groups[0][name] = usual
        optimizer.step()
    if not isinstance(value, (Tensor, dict, list)):
        with pytest.raises((ValueError, TypeError), match=f"{name}="):
            T.adamw(**{"lr": 0.1, name: value})


@pytest.mark.parametrize("how", [EAGER, {"foreach": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("count", COUNTS, ids=str)
def test_counts_of_any_dtype_go_on(count: Tensor, how: dict[str, Any]) -> None:
    ps, qs = pair(), pair()
    optimizer, known = (
        T.AdamW(ps, lr=0.1, **EAGER | how),
        T.AdamW(qs, lr=0.1, **EAGER | how),
    )
    for some, own in ((optimizer, ps), (known, qs)):
        step(some, own)
    optimizer.state[ps[1]]["step"] = count.clone()
    known.state[qs[1]]["step"] = torch.tensor(4.0)
    for _ in range(2):
        step(optimizer, ps)
        step(known, qs)
    assert all(map(torch.equal, ps, qs))
    assert [float(optimizer.state[p]["step"]) for p in ps] == [3.0, 6.0]
    saved = optimizer.state_dict()
    saved["state"][1]["step"] = count
    known.load_state_dict(saved)
    assert known.state[qs[1]]["step"].shape == () and known.state[qs[1]]["step"] == 4


def test_a_count_that_processes_share_stays_shared() -> None:
    """A3C's SharedAdam keeps it as one element in shared memory."""
    w, _ = pair()
    optimizer = T.Adam([w], lr=0.1, **EAGER)
    shared = torch.zeros(1).share_memory_()
    zeros = {name: torch.zeros(3) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[w] = {"step": shared, **zeros}
    for _ in range(3):
        step(optimizer, [w])
    assert shared.item() == 3


BAD: dict[str, tuple[Any, str]] = {
    "step": (torch.tensor(-1), r"\['step'\] is -1.*allowed is at least 0"),
    "exp_avg": (torch.zeros(2).long(), r"\['exp_avg'\] has dtype torch.int64.*floating"),
    "exp_avg_sq": (torch.zeros(2).bool(), r"\['exp_avg_sq'\] has dtype torch.bool"),
}
BAD["two"] = torch.zeros(2), r"\['step'\] is a tensor of shape \(2,\).*one element"
BAD["a flag"] = torch.tensor(True), r"\['step'\] is a tensor of .* torch.bool"


@pytest.mark.parametrize("how", [EAGER, {"foreach": True}], ids=str)
@pytest.mark.parametrize("case", BAD)
def test_nothing_is_half_updated(case: str, how: dict[str, Any]) -> None:
    ps = pair()
    optimizer = T.AdamW([{"params": [p]} for p in ps], lr=0.1, **how)
    step(optimizer, ps)
    value, text = BAD[case]
    name = case if case in optimizer.state[ps[1]] else "step"
    optimizer.state[ps[1]][name] = value
    before = [p.detach().clone() for p in ps]
    with pytest.raises(ValueError, match=r"state\[0\]" + text):
        step(optimizer, ps)
    assert all(map(torch.equal, ps, before)) and optimizer.state[ps[0]]["step"] == 1


@pytest.mark.parametrize("how", [EAGER, {"foreach": True}], ids=str)
def test_a_count_that_is_no_tensor_is_named(how: dict[str, Any]) -> None:
    ps = pair()
    optimizer = T.AdamW(ps, lr=0.1, **how)
    step(optimizer, ps)
    before = [p.detach().clone() for p in ps]
    for x in (None, 3):
        optimizer.state[ps[1]]["step"] = x
        with pytest.raises(TypeError, match=rf"state\[1\]\['step'\]={x}: allowed is a t"):
            step(optimizer, ps)
    assert all(map(torch.equal, ps, before)) and optimizer.state[ps[0]]["step"] == 1


def test_what_lookahead_keeps_beside_the_fields_loads() -> None:
    """pytorch_optimizer's Lookahead puts momentum_buffer beside AdamW's moments."""
    ps, qs = pair(), pair()
    optimizer, other = T.AdamW(ps, lr=0.1, **EAGER), T.AdamW(qs, lr=0.1, **EAGER)
    step(optimizer, ps)
    for p in ps:
        optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 7.0)
    step(optimizer, ps)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[qs[0]]["momentum_buffer"].tolist() == [7.0] * 3
    saved = optimizer.state_dict()
    del saved["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match="'momentum_buffer'] are another rule's"):
        other.load_state_dict(saved)


def test_a_gradient_whose_square_is_infinite_stops_its_element() -> None:
    """As "Differences from torch.optim" says; torch goes on up to about 6e20."""
    for g, ours, theirs in ((1e19, True, True), (1e20, False, True), (1e21, False, False)):
        for cls, goes_on in ((T.AdamW, ours), (torch.optim.AdamW, theirs)):
            w = torch.nn.Parameter(torch.ones(1))
            options: dict[str, Any] = EAGER if cls is T.AdamW else {"foreach": False}
            optimizer = cls([w], lr=0.1, betas=(0.9, 0.999), weight_decay=0.0, **options)
            w.grad = torch.full((1,), g)
            optimizer.step()
            assert optimizer.state[w]["exp_avg_sq"].isfinite().item() == goes_on


@pytest.mark.parametrize(
    "how",
    [
        row(EAGER, id="eager"),
        row({"foreach": True}, id="foreach"),
        row({"compile": False, "capturable": True}, id="capturable"),
        row({}, id="pure"),
        row({"compile": True}, id="compiled", tier="full"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_adopts_first_gradient_moves_nothing(bad: float, how: dict[str, Any]) -> None:
    """As in the authors' code, whatever the gradient is. A NaN stays in the averages."""
    w, g = torch.nn.Parameter(torch.ones(3)), torch.tensor([2.0, bad, -bad])
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "decouple_wd": True}
    if how:
        optimizer = T.ADOPT([w], **options, **how)
        w.grad = g
        optimizer.step()
        state, p = optimizer.state[w], w.detach()
    else:
        value = T.adopt(**options)
        p, after = value.step(w.detach(), g, value.init(w.detach()))
        state = after.leaves._asdict()
    assert torch.equal(p, torch.ones(3))
    assert torch.equal(state["exp_avg"].nan_to_num(0.0), torch.zeros(3))
    assert torch.equal(state["exp_avg_sq"].nan_to_num(7.0), (g * g).nan_to_num(7.0))


class Full(TorchDispatchMode):
    """Memory that is out when a tensor of five elements is to be computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.shape == (5,) and "detach" not in str(func):
            raise torch.OutOfMemoryError("no memory is left")
        return found


def test_an_error_within_a_step_says_what_was_updated() -> None:
    ps = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5, 2)]
    optimizer = T.AdamW(ps, lr=0.1, **EAGER)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.init_state()
    with Full(), pytest.raises(torch.OutOfMemoryError) as info:
        optimizer.step()
    assert [str(n).split(", others")[0] for n in info.value.__notes__] == [
        "The step is half done: 1 of 3 parameters that go together were updated"
    ]
    assert [p[0].item() != 1 for p in ps] == [True, False, False]
    assert [optimizer.state[p]["step"] for p in ps] == [0, 0, 0]
    # The results of a pure step are new, so nothing is half done.
    value, tree = T.adamw(lr=0.1), [p.detach() for p in ps]
    state = value.init(tree)
    with Full(), pytest.raises(torch.OutOfMemoryError) as info:
        value.step(tree, [p.grad for p in ps], state)
    assert not hasattr(info.value, "__notes__")


@pytest.mark.parametrize("how", [EAGER, {"foreach": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_counts_that_are_none_are_refused(value: float, how: dict[str, Any]) -> None:
    """In a file, and written between two steps."""
    ps = pair()
    options: dict[str, Any] = EAGER | how
    optimizer = T.AdamW(ps, lr=0.1, **options)
    step(optimizer, ps)
    saved, before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in ps]
    text = rf"state\[1\]\['step'\] is {value}: allowed is at least 0, and finite"
    saved["state"][1]["step"].fill_(value)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    optimizer.state[ps[1]]["step"].fill_(value)
    with pytest.raises(ValueError, match=text):
        step(optimizer, ps)
    assert all(map(torch.equal, ps, before)) and optimizer.state[ps[0]]["step"] == 1
    optimizer.state[ps[1]]["step"].fill_(1.0)
    step(optimizer, ps)
    assert [optimizer.state[p]["step"] for p in ps] == [2, 2]


@pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
def test_a_scaler_of_ones_own_is_refused_under_release(name: str) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = T.AdamW([w], lr=0.1, gradient_release=True, **EAGER)
    with T.prepare_for_gradient_release(torch.nn.ParameterList([w]), optimizer) as handle:
        w.sum().backward()
        moved = w.detach().clone()
        setattr(optimizer, name, torch.tensor(2.0))
        with pytest.raises(RuntimeError, match="found_inf or grad_scale with gradient rel"):
            optimizer.step()  # too late
        with pytest.raises(RuntimeError, match="found_inf or grad_scale with gradient rel"):
            w.sum().backward()
        with handle.paused():  # the ordinary step
            w.sum().backward()
            optimizer.step()
    assert torch.equal(w, moved) == (name == "found_inf")
    with pytest.raises(RuntimeError, match="found_inf or grad_scale with gradient rel"):
        optimizer.step(param=w)
