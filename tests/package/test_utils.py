"""Param groups without decay, and models in low precision."""

import pytest
import torch
from refusals import Scene, refuses
from torch import nn

from optimi_func import (
    AdamW,
    Mixed,
    adamw,
    hidden_matrices,
    muon,
    param_groups_by_name,
    param_groups_weight_decay,
    to_low_precision,
)


def test_groups() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
    model[0].weight.requires_grad_(False)
    none, some = param_groups_weight_decay(model, 0.1)
    assert none["weight_decay"] == 0.0
    assert some["weight_decay"] == 0.1
    assert [n for n, _ in none["params"]] == ["0.bias", "1.weight", "1.bias"]
    assert [(n, tuple(p.shape)) for n, p in some["params"]] == [("2.weight", (5, 4))]
    none, some = param_groups_weight_decay(model, 0.1, additional_layers=["2."])
    assert len(none["params"]) == 4
    assert not some["params"]
    AdamW(param_groups_weight_decay(model), lr=0.1)


def test_words_that_are_none() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"'embbed', which is in no parameter's name"):
        param_groups_weight_decay(model, 0.1, ["embbed", "1."])


def test_groups_have_the_names_by_which_the_package_finds_parameters() -> None:
    """`Mixed` and `hidden_matrices`, states in other groups, and `functional()`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = AdamW(model.named_parameters(), lr=0.1, compile=False)
    model(torch.ones(1, 3)).sum().backward()
    plain.step()
    grouped = AdamW(param_groups_weight_decay(model, 0.1), lr=0.1, compile=False)
    state = plain.state_dict()
    del state["param_groups"][0]["weight_decay"]  # the groups' own stay
    grouped.load_state_dict(state)
    for p in model.parameters():
        assert torch.equal(grouped.state[p]["exp_avg"], plain.state[p]["exp_avg"])
    assert set(grouped.functional()[1].leaves) == {n for n, _ in model.named_parameters()}
    matrices = (hidden_matrices(model), muon(lr=0.1))
    groups = param_groups_weight_decay(model, 0.3)
    optimizer = Mixed(groups, matrices, rest=adamw(lr=0.1), compile=False)
    found = {
        g["rule"]: (g["param_names"], g["weight_decay"]) for g in optimizer.param_groups[1:]
    }
    assert found == {"muon": (["0.weight"], 0.3), "adamw": (["2.weight"], 0.3)}
    assert optimizer.param_groups[0]["param_names"] == ["0.bias", "2.bias"]
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    torch.optim.AdamW(param_groups_weight_decay(model, 0.1))


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 3, bias=False), nn.LayerNorm(3)], ids=["matrices", "vectors"]
)
def test_a_group_may_be_empty(model: nn.Module) -> None:
    """As that without decay is for adapters, which have no biases."""
    torch.optim.AdamW(param_groups_weight_decay(model, 0.1))
    optimizer = AdamW(param_groups_weight_decay(model, 0.1), lr=0.1, compile=False)
    optimizer.init_state()
    again = AdamW(param_groups_weight_decay(model, 0.2), lr=0.2, compile=False)
    again.load_state_dict(optimizer.state_dict())
    assert [group["weight_decay"] for group in again.param_groups] == [0.0, 0.1]
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.1]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.ones(2))
        self.register_buffer("index", torch.arange(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.rope = Rotary()
        self.other = Rotary()
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {k: v.dtype for k, v in model.state_dict().items()}


def test_low_precision() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    model = Model()
    values = model.embedding.weight.detach().clone()
    weight = model.embedding.weight
    assert to_low_precision(model) is model
    found = dtypes(model)
    assert found["embedding.weight"] == f32
    # Tied to an embedding, whichever is found first.
    assert model.head.weight is model.embedding.weight is weight
    assert torch.equal(weight, values)
    assert found["norm.weight"] == found["norm.running_mean"] == bf16
    assert found["norm.num_batches_tracked"] == torch.int64
    assert found["rope.freqs"] == f32
    assert found["rope.index"] == torch.int64
    assert found["other.freqs"] == bf16


def test_low_precision_options() -> None:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    # One string is one word, not its letters: "o" is in "norm" and "other".
    found = dtypes(to_low_precision(Model(), fp32_buffers="rope"))
    assert (found["rope.freqs"], found["other.freqs"]) == (f32, bf16)
    assert found["norm.running_mean"] == bf16
    found = dtypes(to_low_precision(Model(), fp32_buffers=Rotary))
    assert found["rope.freqs"] == found["other.freqs"] == f32
    found = dtypes(to_low_precision(Model(), fp32_buffers=None, fp32_modules=None))
    assert found["rope.freqs"] == found["embedding.weight"] == bf16
    found = dtypes(to_low_precision(Model(), f16, fp32_modules=[nn.BatchNorm1d]))
    assert found["norm.weight"] == found["norm.running_mean"] == f32
    assert found["embedding.weight"] == f16


BAD = {
    "to_low_precision(Model(), fp32_modules='x')": "TypeError: fp32_modules holds 'x'",
    "to_low_precision(Model(), fp32_modules=5)": "TypeError: fp32_modules holds 5",
    "to_low_precision(Model(), fp32_buffers=[torch.ones(1)])": (
        "TypeError: fp32_buffers holds"
    ),
    "to_low_precision(Model(), 'bfloat16')": "TypeError: dtype='bfloat16'",
    "to_low_precision(Model().parameters())": (
        "TypeError: to_low_precision: model=a generator: allowed"
    ),
    "param_groups_weight_decay(Model(), -1)": "weight_decay=-1",
    "param_groups_weight_decay(Model(), '.1')": (
        r"TypeError: weight_decay='\.1': allowed are numbers"
    ),
    "param_groups_weight_decay(Model(), 0.1, 'head')": (
        "TypeError: additional_layers='head'"
    ),
    "param_groups_weight_decay(Model().parameters(), 0.1)": (
        r"TypeError: decay: model=a generator: allowed is a torch\.nn"
    ),
    "param_groups_by_name(Model().named_parameters(), {'0.*': 0.1})": (
        r"TypeError: '0\.\*' has 0.1: allowed are dicts of options"
    ),
    "param_groups_by_name(Model().named_parameters(), {'norms': {}})": (
        "options has 'norms', which is none"
    ),
}


@refuses(BAD)
def test_bad_arguments() -> Scene:
    return {"param_groups_by_name": param_groups_by_name}


@pytest.mark.kernels
def test_warnings_are_of_the_line_that_led_to_them() -> None:
    """However deep within the package, and behind torch's own wrappers, they arise."""
    w = torch.ones(2, requires_grad=True)
    fused = {"foreach": True, "gradient_release": True}

    def make() -> AdamW:
        return AdamW([w], lr=0.1, max_lr=1.0, **fused)

    def add(optimizer: AdamW) -> None:
        optimizer.add_param_group({"params": [w.detach().requires_grad_()], **fused})

    with pytest.warns(UserWarning) as made:
        optimizer = make()
    with pytest.warns(UserWarning) as added:
        add(optimizer)
    for caught, function in ((made, make), (added, add)):
        first, last = function.__code__.co_firstlineno, function.__code__.co_firstlineno + 3
        for warning in caught:
            assert warning.filename == __file__
            assert first <= warning.lineno <= last


def test_groups_by_name_keep_names_and_options_for_any_class() -> None:
    model = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2))
    options = {"0.*": {"betas": (0.5, 0.6)}, "*.bias": {"weight_decay": 0.0, "lr": 0.1}}
    for make in (AdamW, torch.optim.AdamW):
        optimizer = make(param_groups_by_name(model.named_parameters(), options), lr=1e-3)
        groups = [
            (g["param_names"], g["lr"], g["weight_decay"], g["betas"])
            for g in optimizer.param_groups
        ]
        usual = optimizer.defaults["betas"]
        assert groups == [
            (["0.weight"], 1e-3, 1e-2, (0.5, 0.6)),
            (["1.bias"], 0.1, 0.0, usual),
            (["1.weight"], 1e-3, 1e-2, usual),
        ]
