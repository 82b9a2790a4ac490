"""States that somebody has tampered with: what raises has changed nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CLASSES, MATRICES
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimi_func import AdamW, Storage

EAGER = {"lr": 1e-2, "compile": False}


def made(name: str, **options: Any) -> tuple[nn.Module, Any]:
    """A model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    named = [
        (n, p) for n, p in model.named_parameters() if name not in MATRICES or p.dim() > 1
    ]
    optimizer = CLASSES[name](named, **EAGER, **options)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    """Weights, state and groups, by identity and by value, and counters."""
    entries = [(id(p), id(entry), [*entry.items()]) for p, entry in optimizer.state.items()]
    groups = [(id(group), [*group.items()]) for group in optimizer.param_groups]
    hooks = len(optimizer._optimizer_load_state_dict_pre_hooks)
    leaves = pytree.tree_leaves([[*model.parameters()], entries, groups, hooks])
    copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
    places = [id(x) for x in leaves if isinstance(x, Tensor)]
    return [*places, *copies, optimizer.skipped_steps]


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for x, y in zip(one, other):
        assert torch.equal(x, y) if isinstance(x, Tensor) else (x is y or x == y)


ODD: dict[str, Any] = {
    "a string": "x",
    "an empty dict": {},
    "an empty list": [],
    "an object": object(),
    "NaN": float("nan"),
    "far below 0": -1e9,
    "complex": 1j,
    "two numbers": torch.ones(2),
    "sparse": torch.ones(1).to_sparse(),
    "without memory": torch.ones((), device="meta"),
}
LIKE: dict[str, Callable[[Tensor], Any]] = {
    "another shape": lambda x: torch.ones(3, 5, 2),
    "whole numbers": lambda x: torch.ones_like(x, dtype=torch.int32),
    "sparse alike": lambda x: torch.ones_like(x).reshape(-1).to_sparse(),
    "alike without memory": lambda x: torch.ones_like(x, device="meta"),
    "complex alike": lambda x: torch.ones_like(x) * 1j,
}
# What may be anything, because it is not loaded, or is computed again.
FREE = {"params", "param_names", "d"}
NO_HOOKS = "hooks an empty list"  # which is allowed
# The first two have one meaning, and the second counts.
PAIR = {"decouple_wd", "decoupled_weight_decay"}
WRONG_STATES: dict[str, Callable[[Any], object]] = {
    "no state": lambda s: s.pop("state"),
    "no groups": lambda s: s.pop("param_groups"),
    "groups in a dict": lambda s: s.update(param_groups={}),
    "numbers for groups": lambda s: s.update(param_groups=[1]),
    "None for groups": lambda s: s.update(param_groups=None),
    "a list for a state": lambda s: s.update(state=[]),
    "a list for an entry": lambda s: s["state"].update({0: []}),
    "a number for an entry": lambda s: s["state"].update({0: 5}),
    "fewer parameters": lambda s: s["param_groups"][0].update(params=[0]),
    "None for parameters": lambda s: s["param_groups"][0].update(params=None),
    "lists for parameters": lambda s: s["param_groups"][0].update(params=[[0], [1]]),
    "fewer names": lambda s: s["param_groups"][0].update(param_names=["a"]),
    "None for names": lambda s: s["param_groups"][0].update(param_names=None),
    "a group twice": lambda s: s["param_groups"].append(s["param_groups"][0]),
    "another group": lambda s: s["param_groups"].append({"params": [], "lr": 1.0}),
}


def tampered(good: Any, optimizer: Any) -> list[tuple[str, Any]]:
    """Copies of a state, each with one thing wrong."""
    found: list[tuple[str, Any]] = []
    usual = optimizer._arguments
    for key, value in good["param_groups"][0].items():
        plain = isinstance(value, int | float | tuple) and key not in FREE
        plain = plain and not (key == "decouple_wd" and PAIR <= {*good["param_groups"][0]})
        for kind, odd in ODD.items() if plain and key in usual else ():
            bad = copy.deepcopy(good)
            bad["param_groups"][0][key] = odd
            found += [(f"{key} is {kind}", bad)] * (f"{key} {kind}" != NO_HOOKS)
    for key, value in good["state"][0].items():
        for kind in (*ODD, *LIKE):
            bad = copy.deepcopy(good)
            bad["state"][0][key] = LIKE[kind](value) if kind in LIKE else ODD[kind]
            found.append((f"{key} is {kind}", bad))
    for kind, change in WRONG_STATES.items():
        bad = copy.deepcopy(good)
        change(bad)
        found.append((kind, bad))
    return found


# Numbers that some option allows, and what torch.distributed.checkpoint writes for options
# that torch lacks.
ALLOWED = {"NaN", "far below 0", "an empty dict", "whole numbers", "sparse"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CLASSES)
def test_a_load_that_raises_has_changed_nothing(name: str) -> None:
    model, optimizer = made(name)
    good = copy.deepcopy(optimizer.state_dict())
    before, loaded = everything(model, optimizer), list[str]()
    for text, bad in tampered(good, optimizer):
        try:
            optimizer.load_state_dict(bad)
        except Exception:
            assert_same(before, everything(model, optimizer))
        else:
            loaded.append(text)
            model, optimizer = made(name)
            before = everything(model, optimizer)
    policy = ("foreach", "compile", "triton", "capturable", "gradient_release", "fused")
    odd = [x for x in loaded if x.split(" is ")[0] not in policy]
    assert [x for x in odd if x.split(" is ")[-1] not in ALLOWED] == []


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("key", [1, "0", 9])
def test_an_entry_that_no_group_lists_is_no_other_parameters(key: Any, named: bool) -> None:
    """torch gives the entry 1 to the second parameter, also if the file lists [0, 2]."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    saved: dict[str, Any] = AdamW(params, **EAGER).state_dict()
    saved["param_groups"][0]["params"] = [0, 2] if key == 1 else [6, 7]
    wrong = {"step": torch.tensor(3.0), "exp_avg": torch.ones(3), "exp_avg_sq": None}
    saved["state"] = {key: wrong, "mine": {"x": 1}}
    given: Any = [("a", params[0]), ("b", params[1])] if named else params
    if named:
        saved["param_groups"][0]["param_names"] = ["a", "b"]
    optimizer = AdamW(given, **EAGER)
    with pytest.warns(UserWarning, match=rf"1 entries of the state are .*\[{key!r}\]"):
        optimizer.load_state_dict(saved)
    assert dict(optimizer.state) == {"mine": {"x": 1}}


def test_decay_of_a_group_that_leaves_it_open_is_the_optimizers() -> None:
    for name, decouple_wd in (("sgd", False), ("sgd", True), ("rmsprop", False)):
        _, optimizer = made(name, decouple_wd=decouple_wd)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["decouple_wd"] = {}
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["decouple_wd"] is decouple_wd


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_interrupt_within_a_load_changes_nothing(kind: Any) -> None:
    """From somebody's hook, and from a state that ends what all groups have in common."""
    model, optimizer = made("prodigy")
    other = copy.deepcopy(optimizer.state_dict())
    other["param_groups"][0]["lr"] = 3.0

    def raising(*_: object) -> None:
        raise kind("no")

    before = everything(model, optimizer)
    for register in (
        optimizer.register_load_state_dict_pre_hook,
        optimizer.register_load_state_dict_post_hook,
    ):
        with register(raising), pytest.raises(kind):
            optimizer.load_state_dict(other)
        assert_same(before, everything(model, optimizer))
    optimizer.load_state_dict(other)
    assert optimizer.param_groups[0]["lr"] == 3.0


@pytest.mark.filterwarnings("error")
def test_a_warning_that_raises_changes_nothing() -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = AdamW(model.named_parameters(), **EAGER)
    optimizer.init_state()
    other = copy.deepcopy(optimizer.state_dict())
    other["param_groups"][0]["betas"] = (0.9, 0.9999)
    before = everything(model, optimizer)
    with pytest.raises(UserWarning, match="betas"):
        optimizer.load_state_dict(other)
    assert_same(before, everything(model, optimizer))


# Compensations that a file lacks


def narrow(storage: Any) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    wide = nn.Linear(8, 8)
    model = copy.deepcopy(wide).bfloat16()
    return wide, model, AdamW(model.named_parameters(), storage=storage, **EAGER)


STORAGES = ["exact", Storage("kahan"), Storage("kahan8")]


@pytest.mark.filterwarnings("ignore:betas")
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_file_without_compensations_takes_none_away(storage: Any, begun: bool) -> None:
    wide, model, optimizer = narrow(storage)
    theirs = torch.optim.AdamW(wide.parameters(), lr=1e-3)
    if begun:
        wide(torch.ones(2, 8)).sum().backward()
        theirs.step()
    model.load_state_dict(wide.state_dict())
    optimizer.load_master_state_dict(model, wide.state_dict())
    want = optimizer.master_state_dict(model)
    optimizer.load_state_dict(theirs.state_dict())
    for name, x in optimizer.master_state_dict(model).items():
        assert torch.equal(x, want[name])
    assert optimizer.state[model.weight]["step"] == begun


def test_compensations_of_other_weights_are_dropped_with_a_warning() -> None:
    wide, model, optimizer = narrow("exact")
    optimizer.load_master_state_dict(model, wide.state_dict())
    theirs = torch.optim.AdamW(wide.parameters(), lr=1e-3).state_dict()
    model.load_state_dict({k: x + 1 for k, x in wide.state_dict().items()})
    with pytest.warns(UserWarning, match=r"no 'kahan_comp' of 2 parameters \(weight, "):
        optimizer.load_state_dict(theirs)
    for name, x in optimizer.master_state_dict(model).items():
        assert torch.equal(x, model.get_parameter(name).float())


# Storages of parameters in any layout

SLICES: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": lambda x: torch.stack([x, x], 1)[:, 0],
    "every second": lambda x: x.repeat_interleave(2)[::2],
    "part of each row": lambda x: torch.cat([x, x])[: 2 * 64 * 129].reshape(129, 128)[
        :, :64
    ],
    "turned": lambda x: x[: 64 * 129].reshape(129, 64).T,
    "turned part": lambda x: torch.cat([x, x])[: 2 * 64 * 129].reshape(128, 129)[:64].T,
    "odd rows": lambda x: x[: 8 * 1031].reshape(1031, 8),
    "odd columns": lambda x: x[: 127 * 65].reshape(127, 65),
    "channels last": lambda x: x[: 64 * 130].reshape(2, 65, 8, 8).permute(0, 3, 1, 2),
    "whole": lambda x: x[:8193],
}
KINDS = ["compact", Storage(moments="8bit"), "exact", Storage("kahan8", "bfloat16")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "stableadamw"])
@pytest.mark.parametrize("storage", KINDS, ids=str)
@pytest.mark.parametrize("layout", SLICES)
def test_a_resumed_layout_is_the_run(layout: str, storage: Any, name: str) -> None:
    moments = isinstance(storage, Storage) and storage.param is None
    dtype = torch.float32 if moments else torch.bfloat16
    options = {"momentum": 0.9} if name == "sgd" else {}

    def make() -> tuple[Tensor, Any]:
        x = torch.randn(20_000, generator=torch.Generator().manual_seed(1)).to(dtype)
        w = nn.Parameter(SLICES[layout](x))
        return w, CLASSES[name]([("w", w)], storage=storage, **EAGER, **options)

    (w, straight), generator = make(), torch.Generator().manual_seed(2)
    v, resumed = make()
    for t in range(4):
        g = torch.randn(w.shape, generator=generator).to(dtype)
        if t == 2:
            with torch.no_grad():
                v.copy_(w)
            resumed.load_state_dict(straight.state_dict())
            assert [*resumed.state[v]] == [*straight.state[w]]
        for p, optimizer in ((w, straight), (v, resumed))[: 1 + (t >= 2)]:
            p.grad = g
            optimizer.step()
    assert torch.equal(v, w)
    for key, x in straight.state[w].items():
        assert torch.equal(x, resumed.state[v][key]), key
    resumed.reset(v)
    assert resumed.state[v]["step"] == 0


def test_compact_moments_go_to_torch_by_torch_state_dict() -> None:
    """A plain one loads there too, but torch's step raises, as from_torch.md says."""
    w = nn.Parameter(torch.ones(128, 64))
    ours = AdamW([w], storage=Storage(moments="8bit"), **EAGER)
    w.grad = torch.ones_like(w)
    ours.step()
    theirs = torch.optim.AdamW([w], lr=1e-2, foreach=False)
    theirs.load_state_dict(ours.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()
    theirs.load_state_dict(ours.torch_state_dict())
    theirs.step()
    assert theirs.state[w]["step"] == 2
