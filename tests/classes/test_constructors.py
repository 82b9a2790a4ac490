"""What constructors take and say: frozen codes, near misses, repr, types."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CLASSES, NAMES
from torch import Tensor, nn

import optimi_func
from optimi_func import (
    SGD,
    AdamW,
    Mixed,
    Muon,
    Storage,
    adamw,
    adamw_init,
    memory,
    muon,
    prepare_for_gradient_release,
)
from optimi_func.core.rule import Options
from optimi_func.pure.functional import FunctionalOptimizer

EAGER: dict[str, Any] = {"compile": False}
CODES = (torch.uint8, torch.int64, torch.float8_e4m3fn, torch.complex64)


class Quantized(nn.Module):
    """A frozen weight in codes with an adapter, as QLoRA makes of a linear layer."""

    def __init__(self, dtype: torch.dtype, in_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        codes = torch.randint(5, (8, 4)).to(dtype)
        self.packed = nn.Parameter(codes, requires_grad=False)
        self.down = nn.Linear(4, 2, bias=False, dtype=in_dtype)
        self.up = nn.Linear(2, 8, bias=False, dtype=in_dtype)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed.real if self.packed.is_complex() else self.packed
        return x @ packed.to(x.dtype).T + self.up(self.down(x))


def backward(model: nn.Module, i: int, dtype: torch.dtype = torch.float32) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i)).to(dtype)
    model(x).float().square().mean().backward()


@pytest.mark.parametrize("name", NAMES)
def test_frozen_codes_are_taken_and_left_alone(name: str) -> None:
    model = Quantized(torch.uint8)
    before = model.packed.detach().clone()
    optimizer = CLASSES[name](model.named_parameters(), lr=0.1, **EAGER)
    assert "uint8" in optimizer.describe()
    optimizer.init_state()
    backward(model, 0)
    optimizer.step()
    assert torch.equal(model.packed, before) and model.packed not in optimizer.state


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_frozen_codes_are_saved_loaded_and_released(dtype: torch.dtype) -> None:
    model, twin = Quantized(dtype), Quantized(dtype)
    optimizer = AdamW(model.named_parameters(), lr=0.1, **EAGER)
    released = AdamW(twin.named_parameters(), lr=0.1, gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(twin, released)
    for i in range(3):
        backward(model, i)
        backward(twin, i)
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)
    handle.remove()
    state = optimizer.state_dict()
    assert optimizer.load_state_dict(state) == ([], [])
    assert len(optimizer.decoded_state_dict()["state"]) == 2
    assert len(optimizer.torch_state_dict()["state"]) == 2
    assert set(optimizer.functional()[1].leaves) == {"down.weight", "up.weight"}
    masters = optimizer.master_state_dict(model)
    optimizer.load_master_state_dict(model, masters)
    kept = torch.float32 if dtype == torch.float8_e4m3fn else dtype
    assert masters["packed"].dtype == kept and torch.equal(model.packed, twin.packed)


@pytest.mark.parametrize("dtype", CODES[:3], ids=str)
def test_recipes_do_not_cast_frozen_codes(dtype: torch.dtype) -> None:
    model = Quantized(dtype)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    plan = memory.plan(model, AdamW, "1MB", loss, torch.ones(3, 4))
    sizes = {r.dtype: r.parameters for r in plan.recipes}
    for kind, size in sizes.items():
        assert size == 32 * dtype.itemsize + 24 * kind.itemsize
    (recipe, *_) = [r for r in plan.recipes if r.dtype == torch.bfloat16]
    before = model.packed.detach().clone()
    optimizer, _ = recipe.apply(model, lr=0.1, **EAGER)
    assert model.packed.dtype == dtype and torch.equal(model.packed, before)
    assert model.up.weight.dtype == torch.bfloat16
    backward(model, 0, torch.bfloat16)
    optimizer.step()


def test_frozen_low_precision_does_not_warn_of_moments_that_it_has_not() -> None:
    frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    AdamW([frozen, nn.Parameter(torch.ones(2))], betas=(0.9, 0.999))
    with pytest.warns(UserWarning, match="bfloat16 state"):
        AdamW(
            [frozen.clone().requires_grad_().detach().requires_grad_()], betas=(0.9, 0.999)
        )


def bytes_of(optimizer: Any) -> list[int]:
    rows = optimizer.describe().splitlines()
    return [int(row.split()[-2].replace(",", "")) for row in rows if row.split()[0] == "0"]


@pytest.mark.parametrize("how", [{}, {"storage": Storage(moments="8bit")}], ids=str)
def test_describe_counts_no_state_of_frozen_parameters(how: dict[str, Any]) -> None:
    """Before a step, after it, and of a model with adapters passed as a whole."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 10))
    model[0].requires_grad_(False)
    optimizer = AdamW(model.named_parameters(), lr=1e-3, **how, **EAGER)
    held = sum(p.nbytes for p in model.parameters())
    held += 8 * sum(p.numel() for p in model[1].parameters())  # too small for codes
    assert bytes_of(optimizer) == [held]
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    assert bytes_of(optimizer) == [held]
    entries = [optimizer.state.get(p, {}) for p in model.parameters()]
    state = sum(x.nbytes for e in entries for k, x in e.items() if k != "step")
    assert held == state + sum(p.nbytes for p in model.parameters())
    model[1].requires_grad_(False)  # what it has, it keeps
    assert bytes_of(optimizer) == [held]
    model[0].weight.requires_grad_(True)
    each = 2 + 8 / 64 if how else 8
    assert bytes_of(optimizer) == [held + each * 128 * 128]


W = nn.Parameter(torch.ones(2))


def test_other_names_that_are_not_here() -> None:
    assert not hasattr(optimi_func, "Adamw") and not hasattr(optimi_func, "__wrapped__")
    exec("from optimi_func import testing, warm")  # modules that it does not import


def test_compiled_has_the_functions_that_make_states() -> None:
    for name in NAMES:
        init = getattr(optimi_func, f"{name}_init")
        assert getattr(optimi_func.compiled, f"{name}_init") is init


@pytest.mark.parametrize("name", NAMES)
def test_values_have_the_lr_of_their_class(name: str) -> None:
    of_class = inspect.signature(CLASSES[name]).parameters["lr"].default
    factory = getattr(optimi_func, name)
    given = inspect.signature(factory).parameters["lr"].default
    if of_class is inspect.Parameter.empty:
        assert given is of_class
        return
    assert given == of_class and repr(factory()) == f"{name}(lr={of_class})"
    p = {"w": torch.eye(2)}
    step, state = getattr(optimi_func, f"{name}_step"), factory().init(p)
    for _ in range(2):
        new, expected = step(p, p, state), step(p, p, state, lr=of_class)
        assert torch.equal(new[0]["w"], expected[0]["w"])


SWITCHES = [x.name for x in fields(FunctionalOptimizer) if x.type is bool]
MODES = [
    name for name, kind in Options.__annotations__.items() if kind in (bool, bool | None)
]


@pytest.mark.parametrize("value", ["yes", [1], 2, 1.0, 0.0], ids=repr)
@pytest.mark.parametrize("name", [*SWITCHES, *MODES, "amsgrad"])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    text = rf"Invalid {name}: {name}=.*: allowed are .*True and False"
    with pytest.raises(TypeError, match=text):
        AdamW([W], lr=0.1, **{name: value})
    if name not in MODES:
        with pytest.raises(TypeError, match=text):
            adamw(lr=0.1, **{name: value})


@pytest.mark.parametrize("value", ["yes", [1], 2], ids=repr)
def test_pure_states_check_kahan_sum(value: Any) -> None:
    for init in (adamw_init, adamw(lr=0.1).init):
        with pytest.raises(TypeError, match=r"kahan_sum=.*: allowed are None, True and Fa"):
            init({"w": W}, kahan_sum=value)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps", "betas", "max_lr"])
def test_a_number_is_of_one_element(name: str) -> None:
    text = f"Tensor {name} must be 1-element"
    with pytest.raises(ValueError, match=text):
        AdamW([W], **{name: torch.ones(2)})


def test_a_misspelt_key_of_a_group_is_told() -> None:
    named = [("w", W)]
    with pytest.warns(UserWarning, match="'weigth_decay', unused: did you mean 'weight_d"):
        AdamW([{"params": named, "weigth_decay": 0.1}])
    optimizer = AdamW([W])
    with pytest.warns(UserWarning, match="'maximise', unused: did you mean 'maximize'"):
        optimizer.add_param_group({"params": [torch.ones(1)], "maximise": True})
    with pytest.warns(UserWarning, match="'momentun', unused: did you mean 'momentum'"):
        group = {"params": [("m", nn.Parameter(torch.ones(2, 2)))], "momentun": 0.1}
        Mixed([group], ("*", muon(lr=0.1)))
    others = ("initial_lr", "lr_scale", "name", "min_lr", "max_momentum", "base_momentum")
    AdamW([{"params": named, **dict.fromkeys(others, 1.0)}])


def test_repr_says_how_a_group_runs_and_what_is_kept() -> None:
    """With hyperparameters and others' keys, without options that have their default."""
    model = nn.Linear(128, 64).bfloat16()
    named = [{"params": model.named_parameters(), "lr_scale": 0.5}]
    optimizer = AdamW(named, lr=0.1, storage="compact", betas=(0.9, 0.95), **EAGER)
    expected = """AdamW (
Parameter Group 0
    params: 2
    dtypes: bfloat16
    runs: eager
    betas: (0.9, 0.95)
    compile: False
    eps: 1e-06
    lr: 0.1
    lr_scale: 0.5
    storage: compact
    weight_decay: 0.01
)"""
    assert repr(optimizer) == expected
    model(torch.ones(1, 128).bfloat16()).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["others"] = "value"
    kinds = "bfloat16, float32, int8, uint8"
    assert repr(optimizer) == expected.replace("dtypes: bfloat16", f"dtypes: {kinds}")
    assert "runs: eager" in repr(SGD([W], lr=0.1, foreach=True))
    assert "runs: compiled\n" in repr(SGD([W], lr=0.1, compile=True))
    assert "runs: compiled if a compiler is found" in repr(SGD([W], lr=0.1))
    both = Mixed(
        [("w", nn.Parameter(torch.ones(2, 2)))], ("w", muon(lr=0.1, nesterov=False))
    )
    assert "rule: muon" in repr(both) and "nesterov: False" in repr(both)
    assert "maximize" not in repr(both)
    alone = Muon([nn.Parameter(torch.ones(2, 2))], lr=0.1, nesterov=False)
    assert "nesterov: False" in repr(alone) and "momentum: 0.95" in repr(alone)
    assert "betas: (0.9, 0.99)\n    eps: 1e-06\n    lr: 0.001" in repr(AdamW([W]))
    assert "amsgrad" not in repr(AdamW([W])) and "max_lr" not in repr(AdamW([W]))
    alone.param_groups[0]["lr"] = -1.0
    assert "lr: -1.0" in repr(alone)


TYPED = """
from typing import assert_type

from torch import Tensor

from optimi_func import AdamW, Storage, TreeState, adamw, adamw_step, compiled, lion_step
from adamp import AdamP
from lars import LARS
from optimi_func.rules import maximum, minimum

Tree = dict[str, Tensor]


def right(params: Tree, grads: Tree, state: TreeState) -> None:
    assert_type(adamw_step(params, grads, state, lr=0.1), tuple[Tree, TreeState])
    assert_type(lion_step((params["a"],), grads, state, lr=0.1)[0], tuple[Tensor])
    assert_type(compiled.adamw_step(params, grads, state, lr=0.1)[0], Tree)
    assert_type(compiled.adamw_step_(params, grads, state, lr=0.1)[0], Tree)
    assert_type(adamw(lr=0.1).step(params, grads, state)[0], Tree)
    assert_type(adamw(lr=0.1).eval_params(params, state), Tree)
    _ = AdamW([params["a"]], storage="compact")
    _ = AdamW([params["a"]], storage=Storage(moments="8bit"))
    _ = LARS([params["a"]], 0.1, 0.8, storage="compact", gradient_release=True)
    _ = AdamP([params["a"]], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    assert_type(LARS.pure(lr=0.1, trust=0.1).step(params, grads, state)[0], Tree)
    assert_type(maximum(params["a"], 0.1), Tensor)
    assert_type(minimum(maximum(0.5, 1.0), params["a"]), Tensor)


def wrong(params: Tree, grads: Tree, state: TreeState) -> None:
    _ = adamw_step(params, grads, state, lr="a")
    _ = AdamW([params["a"]], storage="8bit")
    _ = adamw(lr=0.1).init(params, storage="8bit")
    _ = LARS([params["a"]], lr=0.1, momentun=0.8)
    _ = LARS.pure(lr=0.1, momentun=0.8)
    _ = AdamP([params["a"]], lr=0.1, betas=0.9)
"""


@pytest.mark.full
def test_type_checkers_know_trees_and_storages(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    root = Path(optimi_func.__file__).parents[1]
    paths = [str(root), str(root / "examples" / "rules")]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": paths}))
    command = ["-m", "basedpyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=tmp_path
    )
    wrong = [line for line in done.stdout.splitlines() if "- error" in line]
    lines = [int(line.split(".py:")[1].split(":")[0]) for line in wrong]
    first = TYPED[: TYPED.index("def wrong")].count("\n") + 2
    assert lines == [first + i for i in range(6)], done.stdout


def test_flags_are_no_numbers() -> None:
    """0 and 1 of a file of settings are flags; 1.0 was meant for another argument."""
    ends: list[Tensor] = []
    for flag in (1, True, False):
        p = torch.nn.Parameter(torch.ones(2))
        options = {"momentum": 0.9, "nesterov": flag, "compile": False}
        optimizer = optimi_func.SGD([p], lr=0.1, **options)
        for _ in range(2):
            p.grad = torch.ones(2)
            optimizer.step()
        ends.append(p)
    assert torch.equal(*ends[:2]) and not torch.equal(*ends[1:])


def test_the_base_tells_every_option() -> None:
    """The reference shows them once."""
    base = inspect.getdoc(optimi_func.optimizers.BaseOptimizer) or ""
    listed = base.split("Every optimizer takes these options:")[1].split("Raises:")[0]
    options = set(re.findall(r"^    (\w+): ", listed, re.M)) - {"lr"}
    taken = set(inspect.signature(optimi_func.Lion).parameters)
    own = {"params", "lr", "betas", "weight_decay", "mars"}
    assert len(options) > 12 and options == taken - own


def test_options_of_mixed_are_those_of_every_optimizer() -> None:
    """Type checkers read the one spelling, and constructors of classes the other."""
    taken = inspect.signature(optimi_func.AdamW).parameters
    for made in (Mixed, optimi_func.MuonAdamW):
        shown = inspect.signature(made).parameters
        for name, annotation in Options.__annotations__.items():
            spelled = getattr(annotation, "__forward_arg__", annotation)
            assert spelled == taken[name].annotation == shown[name].annotation, name
            assert taken[name].default == shown[name].default, name
