"""What torch.optim's classes take, as configuration files and trainers pass it."""

import json
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import CLASSES, MATRICES, NAMES
from torch._subclasses.fake_tensor import FakeTensorMode

from optimi_func import SGD, Adam, AdamW, Lion, Mixed, Muon, RAdam, adam, adamw
from optimi_func.classes.groups import executor_of
from optimi_func.rules import Optimizer

EAGER = {"compile": False}


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
    with pytest.raises(TypeError, match="state_dtype=single9"):
        CLASSES[name](params(), lr=0.1, state_dtype="single9")


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
    for key, value in {"compile": False, "foreach": True}.items():
        text = rf"{key}={value} and .* fused=True\) .* choose one"
        with pytest.raises(ValueError, match=text):
            CLASSES[name](params(), lr=0.1, fused=True, **{key: value})
        with pytest.raises(ValueError, match=text):
            CLASSES[name]([{"params": params(), "fused": True, key: value}], lr=0.1)
    with pytest.raises(ValueError, match=r"differentiable=True.*pure functions"):
        CLASSES[name](params(), lr=0.1, differentiable=True)


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
    for cls, options, text in (
        (AdamW, {key: False}, f"{key}=False .* decouple_wd, which is True here: allowed"),
        (Coupled, {key: True}, f"{key}=True .*, which is False here: allowed is False"),
        (Adam, {key: True, "decouple_wd": False}, f"{key}=True .*, which is False here"),
    ):
        given = dict(options)
        with pytest.raises(ValueError, match=text):
            made(cls, **options)
        with pytest.raises(ValueError, match=text):
            cls(params(), lr=0.1, **given)
        assert given == options
    ps = [{"params": [("a", torch.nn.Parameter(torch.ones(1, 3)))], key: True}]
    assert "decoupled" not in Mixed(ps, ("*", adamw(lr=0.1))).param_groups[0]
    with pytest.raises(ValueError, match=f"{key}=True .* which is False here"):
        Mixed(ps, ("*", adam(lr=0.1)))


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
            r"=0\.0005 by .*ours \(lr, momentum, weight_decay, d",
        ),
        (SGD, (0.1, 0.9, 5e-4, 0), "weight_decay=0.0005, dampening=0 by position"),
    ],
    ids=str,
)
def test_torchs_positional_order_warns_once(cls: Any, given: Any, text: str) -> None:
    with pytest.warns(UserWarning, match=text) as found:
        cls(params(), *given)
    assert len(found) == 1 and found[0].filename == __file__


@pytest.mark.parametrize(
    ("cls", "given", "named"),
    [
        (AdamW, (1e-3, OURS, 0.01, 1e-8), {}),
        (AdamW, (1e-3, OURS, 0.0, 1e-8), {}),
        (AdamW, (1e-3, OURS), {"weight_decay": 1e-8, "eps": 0.1}),
        (SGD, (0.1, 0.9, 5e-4, True), {}),
        (SGD, (0.1, 0.9, 5e-4, False, True), {}),
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


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"betas": 0.9}, ValueError, r"betas=0\.9: allowed are 2 numbers"),
        ({"betas": "ab"}, TypeError, "betas='ab': allowed are numbers"),
        ({"betas": [0.9]}, ValueError, r"betas=\(0\.9,\): allowed are 2 numbers"),
        (
            {"lr": None},
            TypeError,
            "lr=None: allowed are numbers and tensors of one element",
        ),
        (
            {"lr": True},
            TypeError,
            "lr=True: allowed are numbers and tensors of one element",
        ),
        ({"weight_decay": None}, TypeError, "weight_decay=None: allowed are numbers and"),
        ({"weight_decay": lambda step: 1}, TypeError, "allowed are numbers and tensors"),
    ],
)
def test_errors_say_what_a_class_takes(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text) as found:
        AdamW(params(), **{"lr": 0.1, **options})
    assert "schedule" not in str(found.value)


HOW = {"auto": {}, "eager": EAGER, "foreach": {"foreach": True}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize("name", NAMES)
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
