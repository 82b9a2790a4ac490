"""Each parameter keeps its own state through torch.distributed.checkpoint, beside torch's.

Weights after a load and further steps are those of the run that was not interrupted, bit
for bit, whatever order, groups and pipeline stages its parameters had when they were saved.
"""

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as sd
from torch import Tensor, nn

import optimi_func
from optimi_func import AdamW, MuonAdamW, Prodigy, join_modules
from optimi_func.classes.base import BaseOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WHOLE = ("tok", "wq", "wk", "wv", "out")
OPTIONS = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
Make = Callable[[nn.Module], Any]
Run = tuple[nn.Module, Any]


def noise(name: str, t: int, like: Tensor) -> Tensor:
    seed = torch.Generator().manual_seed(zlib.crc32(name.encode()) + 1000 * t)
    return torch.randn(like.shape, generator=seed, dtype=like.dtype)


def network(names: tuple[Any, ...]) -> nn.Module:
    """A model, or a pipeline stage, whose layers are defined in this order.

    With tuples of names, stages that are joined to one.
    """
    if isinstance(names[0], tuple):
        return join_modules(map(network, names))
    model = nn.Module()
    for name in names:
        layer = nn.Linear(4, 3 if name == "out" else 4, bias=False)
        model.add_module(name, nn.Embedding(6, 4) if name == "tok" else layer)
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(noise(name, 0, p))
    return model


def train(runs: list[Run], steps: range) -> None:
    for model, optimizer in runs:
        for t in steps:
            for name, p in model.named_parameters():
                p.grad = noise(name, t + 1, p)
            optimizer.step()
        optimizer.zero_grad()


def grouped(model: nn.Module, first: tuple[str, ...], named: bool) -> list[Any]:
    """One group, or two of which one has the layers of `first`."""
    pairs = list(model.named_parameters())
    parts = [
        [x for x in pairs if (x[0][:-7] in first) == inside] for inside in (True, False)
    ]
    given = [part if named else [p for _, p in part] for part in parts]
    return [{"params": part} for part in given if part]


def adamw(cls: Any, named: bool, first: tuple[str, ...] = ()) -> Make:
    own = {"compile": False} if cls is AdamW else {}
    return lambda model: cls(grouped(model, first, named), **OPTIONS, **own)


def muon(first: tuple[str, ...]) -> Make:
    """MuonAdamW with twice the rate for the layers of `first`."""

    def make(model: nn.Module) -> Any:
        names = [name for name, _ in model.named_parameters()]
        return MuonAdamW(
            *(model, 0.05),
            include=[name for name in names if name[0] == "w"],
            exclude=[name for name in names if name[0] != "w"],
            lr_multipliers={f"{name}.weight": 2.0 for name in first},
            ns_dtype="float64",
            compile=False,
        )

    return make


@dataclass
class Change:
    """The stages and the first group before and after."""

    stages: tuple[tuple[Any, ...], ...] = (WHOLE,)
    first: tuple[str, ...] = ()
    new_stages: tuple[tuple[Any, ...], ...] = (WHOLE,)
    new_first: tuple[str, ...] = ()


STAGES = ("tok", "wq"), ("wk", "wv", "out")
CHANGES = {
    "none": Change(),
    "another order": Change(new_stages=(("out", "wv", "tok", "wk", "wq"),)),
    "1 group to 2": Change(new_first=("wq", "out")),
    "2 groups to 1": Change(first=("wq", "out")),
    "2 groups to 2": Change(first=("wq", "out"), new_first=("wv", "out")),
    "stages to the whole": Change(stages=STAGES),
    "the whole to stages": Change(new_stages=STAGES),
    "joined stages to the whole": Change(stages=(STAGES,)),
    "the whole to joined stages": Change(new_stages=(STAGES[::-1],)),
}
FORMS = {
    "nested": sd.StateDictOptions(),
    "flat": sd.StateDictOptions(flatten_optimizer_state_dict=True),
    "full": sd.StateDictOptions(full_state_dict=True),
}


def joined(states: list[Any], how: sd.StateDictOptions) -> dict[str, Any]:
    """One state of those of all stages."""
    if how.flatten_optimizer_state_dict:
        return {k: x for state in states for k, x in state.items()}
    entries = {k: x for state in states for k, x in state["state"].items()}
    return {
        "state": entries,
        "param_groups": [g for s in states for g in s["param_groups"]],
    }


def carry(old: list[Run], new: list[Run], form: str, folder: Path | None) -> None:
    """Load the state of old runs into new ones, through a file if there is a folder."""
    how = FORMS[form]
    states = [sd.get_optimizer_state_dict(*run, options=how) for run in old]
    state = joined(states, how)
    if folder is not None:
        dcp.save(state, checkpoint_id=folder)
    for run in new:
        into = copy.deepcopy(state)
        if folder is not None:
            into = sd.get_optimizer_state_dict(*run, options=how)
            dcp.load(into, checkpoint_id=folder)
        sd.set_optimizer_state_dict(*run, into, options=how)


def runs_of(stages: Any, make: Make) -> list[Run]:
    return [(model, make(model)) for model in map(network, stages)]


def weights(runs: list[Run]) -> dict[str, Tensor]:
    return {n: p.detach().clone() for m, _ in runs for n, p in m.named_parameters()}


def error_of(change: Change, old: Any, new: Any, form: str, folder: Path | None) -> float:
    """The largest difference of a weight to the uninterrupted run."""
    before = runs_of(change.stages, old(change.first))
    train(before, range(3))
    after = runs_of(change.new_stages, new(change.new_first))
    saved = weights(before)
    with torch.no_grad():
        for model, _ in after:
            for name, p in model.named_parameters():
                p.copy_(saved[name])
    carry(before, after, form, folder)
    for _, optimizer in [*before, *after]:
        for group in optimizer.param_groups:
            group["lr"] = 0.05  # as a scheduler does; of joined groups one's was loaded
    train(before, range(3, 6))
    train(after, range(3, 6))
    wanted, found = weights(before), weights(after)
    assert wanted.keys() == found.keys()
    assert all((wanted[k] - saved[k]).abs().max() > 1e-3 for k in wanted)
    return max((wanted[k] - found[k]).abs().max().item() for k in wanted)


def attempt(change: str, old: Any, new: Any, form: str, folder: Path | None) -> Any:
    """The error of the weights, or the name of what was raised."""
    try:
        return error_of(CHANGES[change], old, new, form, folder)
    except (dcp.CheckpointException, KeyError, ValueError) as e:
        return type(e).__name__


IN_FILE = pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
FORM = pytest.mark.parametrize("form", FORMS)
JOINS = pytest.mark.filterwarnings("ignore:param_groups")


@JOINS
@IN_FILE
@FORM
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("named", [False, True], ids=["", "named"])
def test_adamw_goes_on_where_torchs_does(named, change, form, in_file, tmp_path) -> None:
    theirs, ours = (
        attempt(change, side, side, form, tmp_path / cls.__module__ if in_file else None)
        for cls in (torch.optim.AdamW, AdamW)
        for side in [partial(adamw, cls, named)]
    )
    if theirs == "KeyError" and form == "nested":
        # torch gives the options of a group that is divided to one of its parts.
        assert ours == (0.0 if named else "ValueError")
    else:
        assert ours == theirs
    assert theirs == 0.0 or "to 2" in change or (named and form == "full")


# A state that is not flat has groups by their number, and lists of names by their length.
BY_NUMBER = {
    ("nested", "1 group to 2", True): "CheckpointException",
    ("nested", "2 groups to 1", True): "CheckpointException",
    ("nested", "stages to the whole", True): "CheckpointException",
    ("nested", "the whole to stages", True): "ValueError",
    ("full", "1 group to 2", False): "KeyError",
    ("full", "1 group to 2", True): "CheckpointException",
    ("full", "2 groups to 1", True): "CheckpointException",
    ("full", "2 groups to 2", False): "KeyError",
    ("full", "2 groups to 2", True): "KeyError",
    ("full", "stages to the whole", True): "CheckpointException",
    ("full", "the whole to stages", False): "KeyError",
    ("full", "the whole to stages", True): "KeyError",
}


@JOINS
@IN_FILE
@FORM
@pytest.mark.parametrize("change", CHANGES)
def test_muonadamw_goes_on(change, form, in_file, tmp_path) -> None:
    """A multiplier for the first group comes, goes, or moves to other layers."""
    found = attempt(change, muon, muon, form, tmp_path if in_file else None)
    assert found == BY_NUMBER.get((form, change, in_file), 0.0)


def test_hyperparameters_of_joined_groups_are_named() -> None:
    """torch passes on those of one group, and neither library knows the other's."""
    old, new = (runs_of([WHOLE], muon(first)) for first in (("wq",), ()))
    train(old, range(2))
    for form, rate in (("nested", 0.05), ("flat", 0.1)):
        with pytest.warns(UserWarning, match=rf"param_groups\[0\] joins .*lr={rate}$"):
            carry(old, new, form, None)
        assert new[0][1].param_groups[0]["lr"] == rate


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_names_of_ones_own_are_in_the_models_order(form: str) -> None:
    """They are not the model's, by which torch finds entries."""

    def make(model: nn.Module) -> Any:
        pairs = [(f"p{zlib.crc32(n.encode())}", p) for n, p in model.named_parameters()]
        return AdamW(pairs, **OPTIONS, compile=False)

    change = CHANGES["another order"]
    assert error_of(change, lambda first: make, lambda first: make, form, None) == 0.0


@pytest.mark.parametrize("form", ["nested", "full"])
def test_a_state_of_torchs_function_loads_by_its_names(form: str) -> None:
    """Without set_optimizer_state_dict, which puts entries in the optimizer's order."""
    old = runs_of([WHOLE], adamw(AdamW, True, ("wq",)))
    train(old, range(2))
    saved = sd.get_optimizer_state_dict(*old[0], options=FORMS[form])
    (model, optimizer), *_ = runs_of([WHOLE[::-1]], adamw(AdamW, True, ("wv", "tok")))
    optimizer.load_state_dict(copy.deepcopy(saved))
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.state[p]["exp_avg"], saved["state"][name]["exp_avg"])


# From torch.optim and back, with the planners that torch.distributed.checkpoint has

IN_TORCH = ("ASGD", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam")
IN_TORCH += ("RMSprop", "Rprop")


def usual(cls: Any) -> Make:
    own = {"compile": False} if issubclass(cls, BaseOptimizer) else {}
    return lambda model: cls(model.named_parameters(), lr=0.05, **own)


@IN_FILE
@FORM
@pytest.mark.parametrize("back", [False, True], ids=["from torch", "to torch"])
@pytest.mark.parametrize("name", IN_TORCH)
def test_torchs_class_and_ours(name, back, form, in_file, tmp_path) -> None:
    if (form, back, in_file) == ("flat", False, False):
        return  # torch asks a flat state that is no file for every option of ours
    theirs, ours = getattr(torch.optim, name), getattr(optimi_func, name)
    old, new = (usual(cls) for cls in ((ours, theirs) if back else (theirs, ours)))
    folder = tmp_path / "saved" if in_file else None
    change = CHANGES["another order"]
    error = error_of(change, lambda first: old, lambda first: new, form, folder)
    assert error < 1e-7


@pytest.mark.parametrize("back", [False, True], ids=["from torch", "to torch"])
@pytest.mark.parametrize("form", FORMS)
def test_torch_is_not_given_what_it_cannot_do(form: str, back: bool, tmp_path) -> None:
    """Nor is an option of ours left at its value where a file has none."""
    cautious = lambda model: AdamW(  # noqa: E731
        model.named_parameters(), lr=0.05, cautious=True, compile=False
    )
    for other in (torch.optim.AdamW, AdamW):
        makes = [usual(other), cautious][:: -1 if back else 1]
        old, new = (runs_of([WHOLE], make) for make in makes)
        train(old, range(2))
        with pytest.raises(dcp.CheckpointException, match="Missing key"):
            carry(old, new, form, tmp_path / other.__module__)


def test_options_of_ours_in_a_state_dict() -> None:
    w = torch.ones(3, requires_grad=True)
    optimizer = AdamW([w], lr=0.1, state_dtype="float64", compile=False)
    (saved,) = optimizer.state_dict()["param_groups"]
    names = {*torch.optim.AdamW([w]).state_dict()["param_groups"][0]}
    (group,) = optimizer.param_groups
    assert {*saved} == {*group} | names
    assert saved == {**saved, **group, "state_dtype": "torch.float64", "params": [0]}
    other = AdamW([w], lr=0.3, cautious=True, compile=False)
    other.load_state_dict(optimizer.state_dict())
    assert not other.param_groups[0]["cautious"] and other.param_groups[0]["lr"] == 0.1
    assert {*other.param_groups[0]} == {*optimizer.param_groups[0]}


@pytest.mark.parametrize("form", FORMS)
def test_only_torchs_checkpoints_see_options_left_out(form: str) -> None:
    (model, optimizer), new = runs_of([WHOLE], adamw(AdamW, True)) * 2
    train([(model, optimizer)], range(1))
    theirs = torch.optim.AdamW(model.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    assert {} not in theirs.param_groups[0].values()
    carry([(model, optimizer)], [new], form, None)
    assert {} not in optimizer.param_groups[0].values()
    assert {} not in optimizer.state_dict()["param_groups"][0].values()
    shown = sd.get_optimizer_state_dict(model, optimizer, options=FORMS[form])
    groups = [shown] if form == "flat" else shown["param_groups"]
    assert {} in groups[0].values()


@IN_FILE
@FORM
@pytest.mark.parametrize("cls", [AdamW, Prodigy])
def test_schedules_are_kept_and_not_saved(cls, form, in_file, tmp_path) -> None:
    betas = (lambda t: 1.0 - 0.5 / (t + 1.0)), 0.99
    make = lambda m: cls(m.named_parameters(), 0.05, betas=betas, compile=False)  # noqa: E731
    before, after = runs_of([WHOLE], make), runs_of([WHOLE], make)
    train(before, range(2))
    after[0][0].load_state_dict(before[0][0].state_dict())
    carry(before, after, form, tmp_path if in_file else None)
    assert after[0][1].param_groups[0]["betas"] == betas
    train([*before, *after], range(2, 4))
    wanted, found = weights(before), weights(after)
    assert all(torch.equal(wanted[k], found[k]) for k in wanted)
