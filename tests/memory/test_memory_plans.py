"""`optimi_func.memory.plan`: the order of recipes, `apply`, the table and refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from planned import FEW, MANY, Net, by_name, squared
from refusals import Scene, refuses
from torch import Tensor, nn

import optimi_func
from optimi_func import SGD, AdamW, MuonAdamW, Storage
from optimi_func.memory import plan
from optimi_func.memory.recipes import WAYS

ORDER = [
    "float32",
    "bfloat16 exact",
    "float32 + 8bit",
    "bfloat16 exact + 8bit",
    "bfloat16 kahan",
    "bfloat16 kahan + 8bit",
    "bfloat16 compact",
    "bfloat16 plain",
]


def in_order(names: list[str]) -> list[str]:
    """Those with hooks after the others, and plain ones last."""
    return sorted(names, key=lambda name: ("plain" in name, "release" in name))


def test_recipes_are_in_the_order_of_fidelity() -> None:
    model = nn.Linear(256, 256)
    names = [recipe.name for recipe in plan(model, AdamW, "1GB").recipes]
    assert names == in_order([name + end for name in ORDER for end in ("", ", release")])
    found = plan(model, AdamW, "1GB", accumulation_steps=4).recipes
    names = [recipe.name for recipe in found]
    ends = ["", ", release, float32 sums", ", release, bfloat16 sums"]
    # p.grad adds up in bfloat16 where that is the parameter's dtype.
    low = [ends[1], ends[0], ends[2]]
    expected = [n + end for n in ORDER for end in (low if n.startswith("b") else ends)]
    assert names == in_order(expected)
    for recipe in found:
        sums = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        assert recipe.buffer_dtype == sums.get(recipe.name.split(", ")[-1].split()[0]) or (
            not recipe.gradient_release
        )


def test_only_what_the_rule_can_honour_is_planned() -> None:
    model = nn.Linear(256, 256)
    every = plan(model, SGD, "1GB", lr=1.0).recipes
    plain = [r.storage for r in every if not r.gradient_release]
    assert plain == [None, "exact", Storage("kahan"), "compact", Storage("plain")]
    momentum = plan(model, SGD, "1GB", lr=1.0, momentum=0.9)
    own = [r.storage for r in momentum.recipes if not r.gradient_release]
    assert own == [way[2] for way in WAYS]


def test_the_best_is_the_most_faithful_that_fits() -> None:
    found = plan(Net(), AdamW, "1GB", squared, FEW, device="cpu")
    assert found.best is found.recipes[0]
    peaks = [recipe.peak for recipe in found.recipes]
    for limit in {*peaks, *(peak - 1 for peak in peaks)} - {min(peaks) - 1}:
        best = found.within(limit).best
        fitting = [i for i, peak in enumerate(peaks) if peak <= limit]
        assert best.name == found.recipes[fitting[0]].name and best.fits


def test_a_budget_that_is_too_small_is_named_with_one_that_is_not() -> None:
    found = plan(Net(), AdamW, "1kB")
    least = min(recipe.peak for recipe in found.recipes)
    with pytest.raises(ValueError, match=f"budget=1000: .* Allowed are {least} bytes"):
        print(found.best)
    assert found.within(least).best.peak == least
    assert "best: none fits" in str(found)


def test_apply_makes_what_was_planned() -> None:
    model = Net()
    found = by_name(plan(model, AdamW, "1GB", betas=(0.8, 0.9), compile=False))
    optimizer, release = found["bfloat16 compact, release"].apply(model, lr=1e-2)
    assert isinstance(optimizer, AdamW) and release is not None
    (group,) = optimizer.param_groups
    assert group["storage"] == "compact" and group["lr"] == 1e-2
    assert group["betas"] == (0.8, 0.9)
    before = model.blocks[0].expand.weight.detach().clone()
    assert before.dtype == torch.bfloat16
    squared(model, FEW.bfloat16()).backward()
    assert not torch.equal(model.blocks[0].expand.weight, before)
    release.remove()

    model = Net()
    optimizer, release = found["float32"].apply(model, lr=1e-2)
    assert release is None and next(model.parameters()).dtype == torch.float32
    assert found["float32"].keywords == {"betas": (0.8, 0.9), "compile": False}


def test_apply_prepares_the_accumulation() -> None:
    model = Net()
    found = by_name(plan(model, AdamW, "1GB", accumulation_steps=3, compile=False))
    _, release = found["float32, release, bfloat16 sums"].apply(model)
    assert release is not None
    o = release.options
    assert (o.accumulation, o.accumulation_steps) == ("buffer", 3)
    assert o.buffer_dtype == torch.bfloat16
    release.remove()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_column_says_what_makes_a_recipe_slower(device: str) -> None:
    found = by_name(plan(nn.Linear(256, 256), AdamW, "1GB", device=device))
    for name, recipe in found.items():
        reasons = recipe.slower.split(", ")
        slow = "float32" if device == "cuda" else "bfloat16"
        assert (f"{slow} products" in reasons) == name.startswith(slow)
        assert ("codes" in reasons) == ("8bit" in name or "compact" in name)
        compensated = name.startswith("bfloat16") and "plain" not in name
        assert ("compensation" in reasons) == compensated
        assert ("hooks" in reasons) == recipe.gradient_release
    fastest = "bfloat16 plain" if device == "cuda" else "float32"
    assert found[fastest].slower == "-"


def test_hooks_are_no_best_recipe_while_a_storage_fits() -> None:
    """Float32 weights with hooks are not what someone with a small GPU would take."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(96)])
    found = plan(model, AdamW, "24GB")
    assert found.best.name == "bfloat16 exact" and "hooks" not in found.best.slower
    assert by_name(found)["float32, release"].fits and not by_name(found)["float32"].fits


def test_the_table() -> None:
    found = plan(Net(), AdamW, "8MB", squared, MANY)
    lines = str(found).splitlines()
    assert lines[0].startswith("Net, 0.40 million parameters, AdamW on cpu; budget 8.00 MB")
    assert lines[1].split() == [
        *("recipe", "parameters", "gradients", "state", "activations", "scratch"),
        *("peak", "in", "fits", "slower", "by"),
    ]
    for recipe, line in zip(found.recipes, lines[2:]):
        assert line.startswith(recipe.name)
        assert line.endswith(f"{'yes' if recipe.fits else 'no'}  {recipe.slower}")
        assert f" ~{recipe.peak / 1e6:.2f} " in line
    assert lines[18] == f"best: {found.best.name}"


SIZES = {"24GB": 24 * 10**9, " 1.5 mb ": 1_500_000, "16GiB": 2**34, 4e9: 4 * 10**9}


def test_sizes() -> None:
    for size, expected in SIZES.items():
        assert plan(nn.Linear(2, 2), AdamW, size).budget == expected


class Asks(nn.Module):
    """A module that asks for a value in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not this one")


REFUSED = {
    "plan(model, AdamW, '1GB', squared, {'x': far})": (
        r"batch\['x'\] is on cuda:0, the model on cpu"
    ),
    "plan(model, AdamW, '1GB', lambda m, x: m(x), x)": (
        r"loss of shape \(2, 4\): allowed is a scalar"
    ),
    "plan(model, AdamW, '1GB', lambda m, x: 1.0, x)": "TypeError: loss_fn returned float",
    "plan(model, AdamW, '1GB', lambda m, x: x.sum(), x)": "depends on no parameter",
    "plan(model, AdamW, '1GB', squared, None)": "loss_fn without batch",
    "plan(model, AdamW, '1GB', None, x)": "batch without loss_fn",
    "plan(model, AdamW, '1GB', 3, x)": "TypeError: loss_fn=3",
    "plan(model, AdamW, '1GB', autocasts, x)": r"loss_fn enters torch.autocast\(.cuda.\)",
    "plan(Uncopied(4, 4), AdamW, '1GB', squared, x)": (
        r"RuntimeError: a Uncopied, cannot be copied.*not this one"
    ),
    "plan(asks, AdamW, '1GB', squared, x)": (
        r"RuntimeError: module 1\.1 \(Asks\)(.|\n)*item\(\)"
    ),
    "plan(model, AdamW, '1GB', lambda m, x: 1 / 0, x)": (
        "RuntimeError: outside of all modules"
    ),
    "plan(model.requires_grad_(False), AdamW, '1GB')": "no parameter to train",
    "plan(nn.LazyLinear(4), AdamW, '1GB')": "weight has no shape yet",
    "plan([model], AdamW, '1GB')": "TypeError: model=list",
    "plan(model, torch.optim.AdamW, '1GB')": (
        "TypeError: optimizer=.*adamw.AdamW.* makes a AdamW: allowed"
    ),
    "plan(nn.Sequential(model, nn.Linear(2, 2, device='meta')), AdamW, '1GB')": (
        r"on \['cpu', 'meta'\]: a plan is for one device"
    ),
    "best.apply(meta)": r"model is on meta.*to_empty",
    "best.apply(Net(), storage='compact')": "storage='compact': recipes decide",
}
for _size in ("24", "GB", "24 G", "-3GB", "1e9GB", 0, -5, "1e999", "-inf"):
    REFUSED[f"plan(model, AdamW, {_size!r})"] = "budget=.*24GB"
for _size in ("inf", "nan"):
    REFUSED[f"plan(model, AdamW, {_size})"] = "budget=.*24GB"
for _size in (24, 24.0, 80_000):  # 24 alone was meant as gigabytes
    REFUSED[f"plan(model, AdamW, {_size})"] = rf'budget={_size} is .*write .*"{_size:g}GB"'
    REFUSED[f"plan(model, AdamW, '1GB').within({_size})"] = "less than a megabyte"
for _size in (None, True, [1]):
    REFUSED[f"plan(model, AdamW, {_size})"] = "TypeError: budget=.*24GB"


@refuses(REFUSED)
def test_what_cannot_be_planned_is_refused() -> Scene:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    asks = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Asks()))
    with optimi_func.core.torch_private.fake_mode():
        far = torch.empty(2, 4, device="cuda")
    with torch.device("meta"):
        meta = Net()
    best = plan(meta, AdamW, "1GB").best

    def autocasts(model: nn.Module, x: Tensor) -> Tensor:
        """Enters it for another device, on which a plan does not run."""
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            return squared(model, x)
        finally:
            torch.set_autocast_enabled("cuda", before)

    return locals()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_optimizer_of_a_model_is_planned_with_the_model(device: str) -> None:
    """As MuonAdamW, whose parts depend on the layers."""
    model = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 96), nn.Linear(96, 8))
    model[2].register_buffer("scale", torch.ones(8))
    model = model.to(device)

    def by_hand(params: Any, **options: Any) -> optimi_func.Mixed:
        matrices = ("1.weight", optimi_func.muon(lr=1e-3))
        rest = optimi_func.adamw(lr=1e-3)
        return optimi_func.Mixed(params, matrices, rest=rest, **options)

    by_names = plan(model, by_hand, "1GB", device="cpu")
    for optimizer in (MuonAdamW, partial(MuonAdamW, momentum=0.9)):
        found = plan(model, optimizer, "1GB", device="cpu")
        assert ", MuonAdamW on cpu" in found.title
        sizes = [(r.name, r.state, r.scratch, r.peak) for r in found.recipes]
        assert sizes == [(r.name, r.state, r.scratch, r.peak) for r in by_names.recipes]
    # The model is what it was, and what is applied to it is what was planned.
    assert {p.device.type for p in model.parameters()} == {device}
    if device == "meta":
        return
    optimizer, release = by_name(found)["float32, release"].apply(
        model, lr=0.01, compile=False
    )
    model(torch.arange(8)).sum().backward()
    held = [x for state in optimizer.state.values() for x in state.values()]
    assert release is not None and optimizer.param_groups[0]["lr"] == 0.01
    assert sum(x.nbytes for x in held if isinstance(x, Tensor)) == found.recipes[0].state


def test_functions_and_partials_make_the_optimizer() -> None:
    model = Net()

    def grouped(params: Any, **options: Any) -> AdamW:
        named = dict(params)
        vectors = {n: p for n, p in named.items() if p.dim() == 1}
        groups = [
            {"params": list(vectors.values()), "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if n not in vectors]},
        ]
        return AdamW(groups, **options)

    whole = plan(model, AdamW, "1GB").recipes
    for optimizer in (grouped, partial(AdamW, lr=1e-4)):
        found = plan(model, optimizer, "1GB").recipes
        assert [r.peak for r in found] == [r.peak for r in whole]
    made, _ = plan(model, grouped, "1GB").recipes[0].apply(model, lr=1e-5)
    assert made.param_groups[0]["weight_decay"] == 0.0
    assert made.param_groups[1]["lr"] == 1e-5
