"""What torch.optim's classes take, as configuration files and trainers pass it."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import CLASSES, MATRICES, NAMES
from torch._subclasses.fake_tensor import FakeTensorMode

from optimi_func import SGD, Adam, AdamW, RAdam

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
def test_fused_and_differentiable_as_torch_has_them_by_default(name: str) -> None:
    for fused in (None, False):
        CLASSES[name](params(), lr=0.1, fused=fused, differentiable=False)
    with pytest.raises(
        ValueError, match=r"fused=True: allowed are None and False.*compile"
    ):
        CLASSES[name](params(), lr=0.1, fused=True)
    with pytest.raises(ValueError, match=r"differentiable=True.*pure functions"):
        CLASSES[name](params(), lr=0.1, differentiable=True)


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
        ({"eps": lambda step: 1}, TypeError, "allowed are numbers and tensors"),
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
