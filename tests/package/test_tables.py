"""Places that CONTRIBUTING lists for options and formats, and that no other test misses."""

import inspect
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from cases import CASES
from torch import Tensor

import optimi_func
from optimi_func import AdamW, MuonAdamW
from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.codes import CODECS, COMP_CODES, MOMENTS, PARAMS
from optimi_func.core.rule import MomentStorage, Options, ParamStorage
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.rules import Optimizer

SHARED = {x.name: x for x in fields(FunctionalOptimizer)}
SWITCHES = [name for name, x in SHARED.items() if x.type is bool]
# The options of the param groups that could have been pickled first.
FIRST = {"lr", "decouple_lr", "max_lr", "maximize", "cautious_decay", "corrected_decay"}
FIRST |= {"cautious", *Options.__annotations__}
# A switch of weight decay needs decay, and one of schedules an lr that is not max_lr.
USUAL: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "max_lr": 0.2}


class OwnDecay(Optimizer, decay="own"):
    """Decay that no option of decay can change."""

    def direction(self, g: Tensor, x: Tensor) -> Tensor:
        return g + self.weight_decay * x


def test_an_option_changes_the_update_or_how_it_runs() -> None:
    of_classes = {*BaseOptimizer._arguments} - {"params"}
    assert of_classes == ({*SHARED} - {"weight_decay"}) | {*Options.__annotations__}


def test_muonadamw_takes_every_option() -> None:
    names = {*BaseOptimizer._arguments} - {"params"}
    assert names <= {*inspect.signature(MuonAdamW).parameters}


@pytest.mark.filterwarnings("ignore:.*weight_decay|max_lr")
@pytest.mark.parametrize("switch", SWITCHES)
def test_torch_refuses_a_switch_that_it_lacks(switch: str) -> None:
    if switch in inspect.signature(torch.optim.AdamW).parameters:
        return
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.ones(2)
    optimizer = AdamW([w], compile=False, **USUAL, **{switch: True})
    optimizer.step()
    with pytest.raises(ValueError, match=f"cannot go on with {switch}=True"):
        optimizer.torch_state_dict()


@pytest.mark.filterwarnings("ignore:.*weight_decay|max_lr")
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon", "adan", "own"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_the_step_or_is_refused(switch: str, name: str) -> None:
    make = OwnDecay.pure if name == "own" else getattr(optimi_func, name)

    def steps(**options: bool) -> Tensor:
        torch.manual_seed(0)
        w = torch.randn(6, 5)
        own = {"momentum": 0.9} if name == "sgd" else {}
        optimizer = make(**USUAL, **own, **options)
        state = optimizer.init(w)
        for _ in range(3):
            w, state = optimizer.step(w, torch.randn(6, 5), state)
        return w

    try:
        found = steps(**{switch: True})
    except ValueError as error:
        assert switch in str(error)
        return
    assert not torch.equal(found, steps())


def test_every_switch_is_compared_with_the_reference() -> None:
    assert {*SWITCHES} <= {option for case in CASES for option in case.options}


def test_optimizers_of_before_an_option_step_on() -> None:
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.ones(2)
    optimizer = AdamW([w], lr=0.1, compile=False)
    before = dict(optimizer.param_groups[0])
    for name in {*BaseOptimizer._arguments} - FIRST - {"params"}:
        optimizer.param_groups[0].pop(name, None)
    again = pickle.loads(pickle.dumps(optimizer))
    (p,) = again.param_groups[0]["params"]
    p.grad = torch.ones(2)
    again.step()
    assert {**again.param_groups[0], "params": [w]} == before


def test_formats_are_listed_alike() -> None:
    """As a type, in the tables of `core.codes`, and in C++."""
    assert get_args(ParamStorage) == (*PARAMS,)
    names = [name for x in get_args(MomentStorage) for name in get_args(x)]
    assert names == [*MOMENTS]
    kinds = [kind for pair in MOMENTS.values() for kind in pair]
    assert [*CODECS.values()] == kinds
    assert [kind.zeros(torch.ones(64)).q.dtype for kind in kinds] == [*CODECS]
    source = Path(optimi_func.__file__).parent / "execution" / "cpp" / "codecs.cpp"
    table = source.read_text().split("static const Codec CODECS[] = {")[1].split("\n};")[0]
    rows = 3 + len(kinds) + len(COMP_CODES)
    assert len(re.findall(r"^    \{", table, re.M)) == rows
    assert {torch.int32, torch.int64}.isdisjoint(COMP_CODES), "random bits and their seed"
