"""`track()` and `stats()`: norms and shares, against loops over the parameters."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import stats_worlds
import torch
import worlds
from cases import CLASSES
from layers import loss_of, net
from released import make
from torch import Tensor, nn

import optimi_func
from optimi_func import (
    SGD,
    AdamW,
    MuonAdamW,
    Prodigy,
    ScheduleFreeAdamW,
    prepare_for_gradient_release,
)
from optimi_func.classes import stats

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from harness import peak_bytes

EAGER: dict[str, Any] = {"compile": False}


def masters(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    return {k: x.double() for k, x in optimizer.master_state_dict(model).items()}


def norms(some: list[Tensor]) -> float:
    return sum(x.double().square().sum().item() for x in some) ** 0.5


def assert_norms(
    model: nn.Module, found: dict[str, float], keys: list[str], *moved: Any
) -> None:
    grads, before, after = moved
    moves = [after[k] - before[k] for k in keys]
    assert found["grad_norm"] == pytest.approx(norms([grads[k] for k in keys]), rel=1e-5)
    assert found["update_norm"] == pytest.approx(norms(moves), rel=1e-4)
    weights = [model.get_parameter(k).detach() for k in keys]  # without compensations
    assert found["param_norm"] == pytest.approx(norms(weights), rel=1e-5)


STORED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "foreach": (torch.float32, {"foreach": True}),
    "capturable": (torch.float32, {"capturable": True, **EAGER}),
    "kahan": (torch.bfloat16, EAGER),
    "exact": (torch.bfloat16, {"storage": "exact", **EAGER}),
    "compact": (torch.bfloat16, {"storage": "compact", **EAGER}),
    "plain": (torch.bfloat16, {"kahan_sum": False, **EAGER}),
}


def tracked_run(optimizer: Any, model: nn.Module) -> None:
    """Take three measured steps, and compare every key."""
    for i in range(3):
        optimizer.track()
        loss_of(model, i).backward()
        grads = {
            k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None
        }
        before = masters(model, optimizer)
        optimizer.step()
        after, names = masters(model, optimizer), list(grads)
        found = optimizer.stats(by="parameter")
        assert set(found) == {*names, "all"}
        for name in names:
            assert_norms(model, found[name], [name], grads, before, after)
        assert_norms(model, found["all"], names, grads, before, after)
        found = optimizer.stats(by=["0.*", "*.weight"])
        kinds = {"0.*": ["0.weight", "0.bias"], "*.weight": []}
        kinds["*.weight"] = [k for k in names if k.endswith("weight") and k[0] != "0"]
        kinds["rest"] = [k for k in names if k[0] != "0" and k.endswith("bias")]
        for kind, keys in kinds.items():
            assert_norms(model, found[kind], keys, grads, before, after)
        optimizer.zero_grad()


@pytest.mark.parametrize("how", STORED)
def test_norms_of_a_step(how: str) -> None:
    dtype, options = STORED[how]
    options = {**EAGER, **options} if how != "foreach" else options
    model = net(dtype)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, **options)
    tracked_run(optimizer, model)


FAST = ("adamw", "muon", "prodigy", "adafactor")


@pytest.mark.parametrize(
    "name",
    [x if x in FAST else pytest.param(x, marks=pytest.mark.full) for x in CLASSES],
)
def test_tracked_steps_are_the_same_steps(name: str) -> None:
    cls: Any = getattr(optimi_func, CLASSES[name].__name__)
    ends: list[Any] = []
    for on in (False, True):
        model = net()
        params = [p for p in model.parameters() if p.dim() > 1]
        optimizer = cls(params, lr=1e-2, **EAGER)
        optimizer.track(on)
        for i in range(3):
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(params)
    assert all(map(torch.equal, *ends))
    (group, total) = optimizer.stats().values()
    assert group == total and total["grad_norm"] > 0


def test_groups_and_rates() -> None:
    model = net()
    optimizer = MuonAdamW(model, lr=1e-2, lr_multipliers={"0.bias": 0.5}, **EAGER)
    optimizer.track()
    loss_of(model, 0).backward()
    optimizer.step()
    found = optimizer.stats()
    assert found["0 muon"]["lr"] == 1e-2 and "lr" not in found["all"]
    half = [x["lr"] for x in found.values() if x.get("lr") == 5e-3]
    assert len(half) == 1
    prodigy = Prodigy(net().parameters(), lr=torch.tensor(0.5), d0=1e-3, **EAGER)
    prodigy.track()
    for p in prodigy.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    prodigy.step()
    assert prodigy.stats()["0"]["lr"] == pytest.approx(0.5e-3)
    unnamed = prodigy.stats(by="parameter")
    assert "0.1" in unnamed and "clipped" not in unnamed["all"]


def test_of_schedule_free_it_is_the_parameter_to_train() -> None:
    model = net(torch.bfloat16)
    tracked_run(ScheduleFreeAdamW(model.named_parameters(), lr=1e-2, **EAGER), model)


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_global_norm": 0.01}, {"clip_param_norm": 1.0}, {"clip_value": 1e-3}],
    ids=str,
)
@pytest.mark.parametrize("steps", [None, 2])
def test_release_measures_what_a_step_does(options: Any, steps: int | None) -> None:
    """The same norms as of the ordinary step with the gradients that release applies."""
    ends = []
    for release in (True, False):
        model, optimizer = make(release=release)
        optimizer.track()
        data = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(3))
        if release:
            how = {"accumulation": "buffer", "accumulation_steps": steps} if steps else {}
            handle = prepare_for_gradient_release(model, optimizer, **how, **options)
            for x in data[: steps or 1]:
                handle.backward(lambda x=x, model=model: model(x).square().mean())
        else:
            for x in data[: steps or 1]:
                model(x).square().mean().backward()
            params = list(model.parameters())
            if limit := options.get("clip_global_norm"):
                nn.utils.clip_grad_norm_(params, limit)
            for p in params:
                nn.utils.clip_grad_norm_(p, options.get("clip_param_norm", 1e9))
                nn.utils.clip_grad_value_(p, options.get("clip_value", 1e9))
        optimizer.step()  # finds nothing under release, and forgets nothing
        ends.append(optimizer.stats(by="parameter"))
    released, stepped = ends
    names = [k for k in options if "norm" in k]
    assert ("clipped" in released["all"]) == bool(names)
    for key, one in stepped.items():
        for name, x in one.items():
            assert released[key][name] == pytest.approx(x, rel=1e-4), (key, name)
    if "clip_global_norm" in options:
        assert released["all"]["clipped"] == 1.0
    if "clip_param_norm" in options:
        assert 0.0 < released["all"]["clipped"] < 1.0


def test_shares_of_clipped_and_skipped_updates() -> None:
    model = net()
    optimizer = AdamW(model.named_parameters(), gradient_release=True, **EAGER)
    options: dict[str, Any] = {"skip_nonfinite": True, "clip_param_norm": 1e-2}
    handle = prepare_for_gradient_release(model, optimizer, **options)
    loss_of(model, 0).mul(float("nan")).backward()  # before track(): not counted
    optimizer.step()
    optimizer.track()
    for factor in (1e-6, 1.0, 1.0, float("inf")):
        (factor * loss_of(model, 0)).backward()
        optimizer.step()
    found = optimizer.stats(by="parameter")
    for name, one in found.items():
        if name != "all":
            assert one["clipped"] == pytest.approx(2 / 3) and one["skipped"] == 0.25
    assert found["all"]["skipped"] == 0.25 and handle.skipped["0.weight"] == 2
    assert found["all"]["grad_norm"] < 0.1  # of the last step that was taken

    for way in (EAGER, {"capturable": True, **EAGER}):
        model = net()
        options = {"skip_nonfinite": "step", **way}
        ordinary = SGD(model.parameters(), lr=0.1, **options)
        ordinary.track()
        for factor in (1.0, float("nan"), 1.0, 1.0):
            (factor * loss_of(model, 0)).backward()
            ordinary.step()
            ordinary.zero_grad()
        assert ordinary.stats()["all"]["skipped"] == 0.25


def test_a_step_forgets_the_one_before() -> None:
    """Heads that take turns: the norms are those of the last step's parameters."""
    one, two = (nn.Parameter(torch.full((3,), x)) for x in (1.0, 2.0))
    optimizer = SGD([("one", one), ("two", two)], lr=0.1, compile=False)
    optimizer.track()
    one.grad = torch.ones(3)
    optimizer.step()
    one.grad, two.grad = None, torch.ones(3)
    optimizer.step()
    found = optimizer.stats(by="parameter")
    assert found["one"]["param_norm"] == 0.0 and "lr" not in found["one"]
    assert found["two"]["param_norm"] == found["all"]["param_norm"] > 3
    optimizer.step(lambda: 0.0)
    assert optimizer.stats() == optimizer.stats()
    optimizer.track(False)
    with pytest.raises(RuntimeError, match=r"stats\(\) of no step: call optimizer.track"):
        optimizer.stats()


def test_what_cannot_be_honoured_is_refused() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), gradient_release=True, **EAGER)
    with pytest.raises(RuntimeError, match=r"call optimizer.track\(\) before the step"):
        optimizer.stats()
    with pytest.raises(TypeError, match="on='norms'"):
        optimizer.track("norms")  # type: ignore
    optimizer.track()
    assert optimizer.stats()["all"]["param_norm"] == 0.0  # no step yet
    with pytest.raises(ValueError, match="allowed are 'group', 'parameter' and patterns"):
        optimizer.stats(by="*.weight")
    with pytest.raises(ValueError, match="the parameters of group 0 have no names"):
        optimizer.stats(by=["*.weight"])
    with pytest.raises(RuntimeError, match=r"track\(\) with accumulation='states'"):
        optimizer.optimizer_accumulation = True
        loss_of(model, 0).backward()
        optimizer.step()
    optimizer.optimizer_accumulation = False
    handle = prepare_for_gradient_release(
        model, optimizer, accumulation="states", accumulation_steps=2
    )
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="a step's whole gradient never exists"):
        loss_of(model, 0).backward()
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    handle.remove()
    named = AdamW(model.named_parameters(), **EAGER)
    named.track()
    with pytest.raises(ValueError, match=r"\['none'\] match no parameter"):
        named.stats(by=["0.*", "none"])
    again = copy.deepcopy(named)  # a copy measures nothing before its own track()
    with pytest.raises(RuntimeError, match=r"stats\(\) of no step"):
        again.stats()


def peak(cls: Any, options: Any, dtype: torch.dtype, on: bool) -> int:
    """Bytes that are live within a step, above those before it."""

    def make() -> Any:
        shapes = [(300, 512)] * 8 + [(800, 512), (512,)]
        params = [nn.Parameter(torch.ones(x, dtype=dtype)) for x in shapes]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = cls(params, lr=1e-2, **options)
        optimizer.track(on)
        return lambda: None, optimizer.step

    return peak_bytes(make, 2)


LIVE: dict[str, Any] = {
    "eager": (SGD, EAGER, torch.float32),
    "kernels": (AdamW, {"compile": True}, torch.bfloat16),
}


@pytest.mark.parametrize(
    "how", ["eager", pytest.param("kernels", marks=pytest.mark.kernels)]
)
def test_a_tracked_step_copies_no_more_than_the_largest_parameter(how: str) -> None:
    """With its compensation; in bfloat16 also a few slices in float32."""
    *_, dtype = LIVE[how]
    # A compiled step allocates nothing.
    step = peak(*LIVE[how], False) if how == "eager" else 0
    more = peak(*LIVE[how], True) - step
    slices = 4 * 4 * stats.SLICE if dtype == torch.bfloat16 else 0
    assert 0 < more <= 4 * 800 * 512 + slices + (1 << 16)


CHECKS = [stats_worlds.shards, stats_worlds.replicas]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(CHECKS, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.full
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_processes_measure_whole_tensors(name: str, two: dict[str, str]) -> None:
    assert not two[name], two[name]
