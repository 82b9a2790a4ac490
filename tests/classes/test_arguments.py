"""Arguments in forms that users and torch.optim's programs give them; what is refused."""

import inspect
import json
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import CLASSES, MATRICES, NAMES, SOME
from tiers import built, row
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import optimi_func as T
from optimi_func import SGD, Adam, AdamW, Lion, Mixed, Muon, RAdam, adamw
from optimi_func.classes.stepping import executor_of
from optimi_func.rules import Optimizer

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


COUNTS = [
    *(torch.tensor(4), torch.tensor([4]), torch.tensor([4.0])),
    *(torch.tensor(4, dtype=torch.int32), torch.tensor(4, dtype=torch.uint8)),
    *(torch.tensor(4.0, dtype=torch.bfloat16), torch.tensor(4.0, dtype=torch.float64)),
]


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


# What somebody writes into an entry between two steps, or has in a file.
COUNT = r"\['step'\]"


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
    """Memory that is out when a tensor of 9500 elements is to be computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if (
            isinstance(found, Tensor)
            and found.shape == (9500,)
            and "detach" not in str(func)
        ):
            raise torch.OutOfMemoryError("no memory is left")
        return found


def test_an_error_within_a_step_says_what_was_updated() -> None:
    # Too large to be joined.
    ps = [torch.nn.Parameter(torch.ones(n)) for n in (9000, 9500, 9200)]
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


# What torch.optim's classes take


class ListConfig(Sequence[float]):
    """omegaconf's, as far as an optimizer sees it: a sequence, and no list."""

    def __init__(self, items: list[float]) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(1, 3))]


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW, RAdam])
def test_lr_has_torchs_default(cls: Any) -> None:
    theirs = getattr(torch.optim, cls.__name__)(params())
    assert cls(params()).param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 1e-3


BETAS = [[0.9, 0.95], ListConfig([0.9, 0.95]), np.array([0.9, 0.95])]
BETAS += [(np.float64(0.9), np.float64(0.95))]


@pytest.mark.parametrize("betas", BETAS, ids=lambda x: type(x).__name__)
def test_betas_of_any_sequence(betas: Any) -> None:
    ps = params()
    optimizer = AdamW(ps, lr=np.float32(0.5), betas=betas, eps=np.float64(1e-4), **EAGER)
    group = AdamW([{"params": params(), "betas": betas}], lr=1, **EAGER).param_groups[0]
    for found in (optimizer.defaults, optimizer.param_groups[0]):
        assert found["betas"] == (0.9, 0.95) and type(found["lr"]) is float
    assert group["betas"] == (0.9, 0.95) and type(group["betas"][0]) is float
    ps[0].grad = torch.ones(1, 3)
    optimizer.step()
    assert ps[0][0, 0] < 1
    json.dumps(optimizer.defaults)


def test_what_others_put_into_a_group_is_theirs() -> None:
    given = {"params": params(), "layers": ["a"], "scale": np.float32(2.0)}
    optimizer = AdamW([given], lr=0.1)
    (group,) = optimizer.param_groups
    assert group is given and group["layers"] == ["a"]
    assert type(group["scale"]) is np.float32


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_json(name: str) -> None:
    made = CLASSES[name](params(), lr=0.1, state_dtype=torch.float32)
    assert json.loads(json.dumps(made.defaults))["lr"] == 0.1
    named = CLASSES[name](params(), lr=0.1, state_dtype="float32")
    for optimizer in (made, named):
        assert optimizer.param_groups[0]["state_dtype"] == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_fused_asks_for_the_compiled_step(name: str) -> None:
    for fused in (None, False):
        made = CLASSES[name](params(), lr=0.1, fused=fused, differentiable=False)
        assert made.param_groups[0]["compile"] is None
        CLASSES[name](params(), lr=0.1, fused=fused, **EAGER)
    for made in (
        CLASSES[name](params(), lr=0.1, fused=True),
        CLASSES[name]([{"params": params(), "fused": True}], lr=0.1),
    ):
        assert executor_of(made.param_groups[0]) == "kernels"
        (group,) = made.param_groups
        assert group["fused"] and group["triton"] is None and "runs: comp" in repr(made)
        group["fused"] = False  # which is read at every step
        assert executor_of(group) == "auto"


def moved(cls: Any, groups: Any, **options: Any) -> float:
    (p,) = groups[0]["params"]
    optimizer = cls(groups, **options)
    for i in range(7):  # RAdam's first steps add decay of either kind alike
        p.grad = torch.full_like(p, 0.5 - i)
        optimizer.step()
    return p.detach()[0, 0].item()


@pytest.mark.parametrize("cls", [Adam, RAdam])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("in_group", [True, False])
def test_decoupled_weight_decay_is_torchs(cls: Any, decoupled: bool, in_group: Any) -> None:
    theirs = getattr(torch.optim, cls.__name__)
    same = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.3}
    own = {"decoupled_weight_decay": decoupled}
    group, rest = (own, {}) if in_group else ({}, own)
    expected = moved(theirs, [{"params": params(), **group}], **same, **rest)
    found = moved(cls, [{"params": params(), **group}], **same, **rest, **EAGER)
    other = {"decoupled_weight_decay": not decoupled}
    assert found == pytest.approx(expected, rel=1e-6)
    assert abs(moved(cls, [{"params": params()}], **same, **other, **EAGER) - found) > 1e-3


def test_decoupled_weight_decay_of_other_optimizers() -> None:
    class Coupled(Optimizer, decay="l2"):
        def direction(self, g: torch.Tensor) -> Any:
            return g.sign()

    def made(cls: Any, **options: Any) -> Any:
        return cls([{"params": params(), **options}], lr=0.1).param_groups[0]

    key = "decoupled_weight_decay"
    assert key not in made(AdamW, **{key: True})  # torch's AdamW has it in its groups
    assert key not in made(Coupled, **{key: False})
    assert made(Adam, decouple_wd=True, **{key: True})["decouple_wd"] is True
    ps = [{"params": [("a", torch.nn.Parameter(torch.ones(1, 3)))], key: True}]
    assert "decoupled" not in Mixed(ps, ("*", adamw(lr=0.1))).param_groups[0]


B, OURS = (0.9, 0.999), (0.9, 0.99)


@pytest.mark.parametrize(
    ("cls", "given", "text"),
    [
        (Adam, (1e-3, B, 1e-8, 1e-4), r"weight_decay=1e-08, eps=0\.0001 by position"),
        (
            AdamW,
            (1e-3, B, 1e-8),
            r"order is \(lr, betas, eps, weight_decay\), ours \(lr, b",
        ),
        (AdamW, (1e-3, B, 1e-7), "weight_decay=1e-07"),
        (AdamW, (1e-3, B, 1e-5, 0), "weight_decay=1e-05, eps=0 by position"),
        (AdamW, (1e-3, B, 1e-8, 1e-2), "weight_decay=1e-08, eps=0.01 by position"),
        (AdamW, (1e-3, B, 1e-2, 1e-3), "weight_decay=0.01, eps=0.001 by position"),
        (RAdam, (1e-3, B, 1e-8, 0.0), "weight_decay=1e-08"),
        (
            SGD,
            (0.1, 0.9, 0, 5e-4, True),
            r"=0\.0005, dec.* by .*ours \(lr, momentum, weight_decay, d",
        ),
        (SGD, (0.1, 0.9, 5e-4, 0), "weight_decay=0.0005, dampening=0 by position"),
        (SGD, (0.1, 0.9, 0.1), r"weight_decay=0\.1 by position"),
        (SGD, (0.1, 0.9, 1), "weight_decay=1 by position"),
        (
            SGD,
            (0.1, 0.9, 0, 0, True),
            r"decouple_wd=True by .*, nesterov\), ours .*dampening, decouple_wd\)",
        ),
        (Adam, (1e-3, B, 0.0, 0.0, True), r"decouple_wd=True by .*, amsgrad\), ours"),
        (AdamW, (1e-3, B, 0, 0, True), r"decouple_lr=True by .*, amsgrad\), ours"),
    ],
    ids=str,
)
def test_torchs_positional_order_warns_once(cls: Any, given: Any, text: str) -> None:
    with pytest.warns(UserWarning, match=text) as found:
        cls(params(), *given)
    assert len(found) == 1 and found[0].filename == __file__


# Each is a usual value and none is the default, so that one in another's place is seen.
POSITIONAL: dict[str, Any] = {
    "betas": (0.8, 0.98),
    "eps": 1e-9,
    "weight_decay": 5e-4,
    "amsgrad": True,
    "momentum": 0.8,
    "dampening": 0.5,
    "nesterov": True,
    "decoupled_weight_decay": True,
    "lambd": 1e-3,
    "alpha": 0.6,
    "t0": 100.0,
    "foreach": True,
    "maximize": True,
    "capturable": True,
    "differentiable": True,
    "rho": 0.8,
    "lr_decay": 0.1,
    "initial_accumulator_value": 0.2,
    "momentum_decay": 5e-3,
    "centered": True,
    "etas": (0.4, 1.3),
    "step_sizes": (1e-5, 10.0),
    "beta2_decay": -0.7,
    "d": 2.0,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_steps": 4,
    "adjust_lr_fn": "original",
}
SHARED = [x for x in torch.optim.__all__ if isinstance(getattr(T, x, None), type)]


@pytest.mark.parametrize("name", [x for x in SHARED if x not in ("LBFGS", "Optimizer")])
def test_torchs_positional_arguments_arrive_or_are_noticed(name: str) -> None:
    """All prefixes of torch's order, also with its decay and dampening at 0."""
    cls, theirs = getattr(T, name), getattr(torch.optim, name)
    names = [
        key
        for key, p in inspect.signature(theirs).parameters.items()
        if p.kind != p.KEYWORD_ONLY
    ][2:]
    usual = POSITIONAL | ({"eps": (None, 1e-4)} if name == "Adafactor" else {})
    zeros = {"weight_decay": 0, "dampening": 0}
    for values in (usual, usual | zeros, usual | zeros | {"eps": 0.0}):
        for count in range(1, len(names) + 1):
            given = {key: values[key] for key in names[:count]}
            if [*given.items()][-1] == ("eps", 0.0):
                continue  # nobody can tell it from a weight_decay of 0 in our order
            w = torch.ones(2, 2, requires_grad=True)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                try:
                    group = cls([w], 0.1, *given.values()).param_groups[0]
                except (TypeError, ValueError):
                    continue
            if any("by position" in str(x.message) for x in found):
                continue
            names_here = {"decoupled_weight_decay": "decouple_wd"}
            assert {k: group[names_here.get(k, k)] for k in given} == given


@pytest.mark.parametrize(
    ("cls", "given", "named"),
    [
        (AdamW, (1e-3, OURS, 0.01, 1e-8), {}),
        (AdamW, (1e-3, OURS, 0.0, 1e-8), {}),
        (AdamW, (1e-3, OURS), {"weight_decay": 1e-8, "eps": 0.1}),
        (SGD, (0.1, 0.9, 5e-4, True), {}),
        (SGD, (0.1, 0.9, 5e-4, False, True), {}),
        (SGD, (0.1, 0.9, 0.01), {}),
        (SGD, (0.1, 0.9, 0.1, False), {}),
        (SGD, (0.1, 0.9), {"weight_decay": 0.5}),
        (SGD, (0.1, 0.9, 0, False, True), {}),
        (RAdam, (1e-3, OURS, 0.0, 0.0, True), {}),  # decoupled in both orders
        (SGD, (0.1, 0.9), {"dampening": 0.1}),
        (SGD, (0.1, 0.9, 0, 0), {}),  # the same in both orders
        (Lion, (1e-3, OURS, 1e-8), {}),  # torch has none
        (Muon, (1e-3, 1e-8, 0.9), {}),  # in torch's order
    ],
    ids=str,
)
def test_our_order_and_names_do_not_warn(cls: Any, given: Any, named: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(params(), *given, **named)


def test_muons_adjust_lr_fn_of_none_is_torchs() -> None:
    """A tall matrix, whose factor is not 1."""
    found: list[torch.Tensor] = []
    for cls, how in (
        (torch.optim.Muon, {}),
        (Muon, EAGER | {"ns_dtype": "bfloat16"}),
        (Muon, EAGER | {"ns_dtype": "bfloat16", "adjust_lr_fn": "match_rms_adamw"}),
    ):
        p = torch.nn.Parameter(torch.ones(8, 2))
        p.grad = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        cls([p], **{"lr": 0.1, "adjust_lr_fn": None, **how}).step()
        found.append(p.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-3)
    assert (found[2] - found[0]).abs().max() > 0.02
    ours = Muon([torch.nn.Parameter(torch.ones(8, 2))], adjust_lr_fn=None, **EAGER)
    ours.init_state()
    assert ours.torch_state_dict()["param_groups"][0]["adjust_lr_fn"] is None


HOW = {"auto": {}, "eager": EAGER, "foreach": {"foreach": True}}


# Whether a device has memory is asked before a rule is known: by executors, in every way.
MEMORYLESS = built(
    [
        row(name, where, how, id=f"{name}-{where}-{how}", tier=tier)
        for name in NAMES
        for where in ("meta", "fake")
        for how in HOW
        for tier in ["" if how == "auto" or name in SOME else "soak"]
    ]
)


@pytest.mark.parametrize(("name", "where", "how"), MEMORYLESS)
def test_steps_where_there_is_no_memory(name: str, where: str, how: str, recwarn) -> None:
    """As programs do that estimate how much there will be."""
    options = {"momentum": 0.9} if name == "sgd" else {}
    form: dict[str, Any] = {"dtype": torch.bfloat16, "bias": name not in MATRICES}
    real = torch.nn.Linear(3, 2, **form)
    other = CLASSES[name](real.parameters(), lr=0.1, **options, **EAGER)
    real(torch.ones(1, 3).bfloat16()).sum().backward()
    other.step()
    device = "meta" if where == "meta" else "cpu"
    recwarn.clear()
    with FakeTensorMode() if where == "fake" else torch.device("meta"):
        model = torch.nn.Linear(3, 2, **form, device=device)
        optimizer = CLASSES[name](model.parameters(), lr=0.1, **options, **HOW[how])
        for i in range(2):
            if i:
                optimizer.init_state()
            x = torch.ones(1, 3, dtype=torch.bfloat16, device=device)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    kept = optimizer.state[model.weight]
    expected = other.state[real.weight]
    assert {k: (x.shape, x.dtype) for k, x in kept.items()} == {
        k: (x.shape, x.dtype) for k, x in expected.items()
    }
    assert where == "fake" or int(kept["step"]) == 2
    assert not [w for w in recwarn if "compiled" in str(w.message)]


def test_init_state_and_zero_lr_without_memory() -> None:
    model = torch.nn.Linear(3, 2, device="meta")
    optimizer = AdamW(model.parameters(), lr=0.0)
    optimizer.init_state()
    assert optimizer.state[model.weight]["exp_avg"].is_meta
    model(torch.ones(1, 3, device="meta")).sum().backward()
    AdamW(model.parameters(), lr=0.0).step()


def test_what_does_not_fit_is_refused_without_memory_too() -> None:
    model = torch.nn.Linear(3, 2, device="meta")
    optimizer = AdamW(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["exp_avg"] = torch.ones(2, device="meta")
    model(torch.ones(1, 3, device="meta")).sum().backward()
    with pytest.raises(ValueError, match=r"state\[0\]\['exp_avg'\] has shape \(2,\)"):
        optimizer.step()
