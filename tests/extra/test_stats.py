"""`Stats`: norms and shares, against loops over the parameters."""

import copy
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
    Stats,
    prepare_for_gradient_release,
)
from optimi_func.transforms import clip_global_norm

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
    measured = Stats(optimizer)
    for i in range(3):
        measured.track()
        loss_of(model, i).backward()
        grads = {
            k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None
        }
        before = masters(model, optimizer)
        optimizer.step()
        after, names = masters(model, optimizer), list(grads)
        found = measured.stats(by="parameter")
        assert set(found) == {*names, "all"}
        for name in names:
            assert_norms(model, found[name], [name], grads, before, after)
        assert_norms(model, found["all"], names, grads, before, after)
        found = measured.stats(by=["0.*", "*.weight"])
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
        (measured := Stats(optimizer)).track(on)
        for i in range(3):
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(params)
    assert all(map(torch.equal, *ends))
    (group, total) = measured.stats().values()
    assert group == total and total["grad_norm"] > 0


def test_groups_and_rates() -> None:
    model = net()
    optimizer = MuonAdamW(model, lr=1e-2, lr_multipliers={"0.bias": 0.5}, **EAGER)
    (measured := Stats(optimizer)).track()
    loss_of(model, 0).backward()
    optimizer.step()
    found = measured.stats()
    assert found["0 muon"]["lr"] == 1e-2 and "lr" not in found["all"]
    half = [x["lr"] for x in found.values() if x.get("lr") == 5e-3]
    assert len(half) == 1
    prodigy = Prodigy(net().parameters(), lr=torch.tensor(0.5), d0=1e-3, **EAGER)
    (measured := Stats(prodigy)).track()
    for p in prodigy.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    prodigy.step()
    assert measured.stats()["0"]["lr"] == pytest.approx(0.5e-3)
    assert "0.1" in measured.stats(by="parameter")


def test_of_schedule_free_it_is_the_parameter_to_train() -> None:
    model = net(torch.bfloat16)
    tracked_run(ScheduleFreeAdamW(model.named_parameters(), lr=1e-2, **EAGER), model)


@pytest.mark.parametrize("options", [{}, {"clip_param_norm": 1.0}], ids=str)
@pytest.mark.parametrize("steps", [None, 2])
def test_release_measures_what_a_step_does(options: Any, steps: int | None) -> None:
    """The norms of the ordinary step with the gradients that release applies."""
    ends = []
    for release in (True, False):
        model, optimizer = make(release=release)
        data = torch.randn(3, 2, 8, 16, generator=torch.Generator().manual_seed(3))
        if release:
            how = {"accumulation": "buffer", "accumulation_steps": steps} if steps else {}
            prepare_for_gradient_release(model, optimizer, **how, **options)
        (measured := Stats(optimizer)).track()
        for batches in data:
            for x in batches[: steps or 1]:
                model(x).square().mean().backward()
            params = [] if release else list(model.parameters())
            for p in params:
                nn.utils.clip_grad_norm_(p, options.get("clip_param_norm", 1e9))
            optimizer.step()  # finds nothing under release
            optimizer.zero_grad()
            ends.append(measured.stats(by="parameter"))
    for released, stepped in zip(ends[:3], ends[3:]):
        for key, one in stepped.items():
            assert one.pop("grad_norm") > 0
            assert released[key] == pytest.approx(one, rel=1e-4), key


def test_step_ends_an_open_cycle_before_it_is_measured() -> None:
    model, optimizer = make(release=True)
    prepare_for_gradient_release(model, optimizer, accumulation="buffer")
    (measured := Stats(optimizer)).track()
    model(torch.ones(8, 16)).square().mean().backward()
    assert measured.stats()["all"]["param_norm"] == 0.0
    optimizer.step()
    assert measured.stats()["all"]["update_norm"] > 0.0


def test_of_prodigy_the_rate_is_that_of_the_step_under_release() -> None:
    model = net()
    optimizer = Prodigy(model.parameters(), d0=1e-3, gradient_release=True, **EAGER)
    prepare_for_gradient_release(model, optimizer)
    measured = Stats(optimizer)
    for i in range(4):
        d = optimizer.param_groups[0]["d"]
        measured.track()
        loss_of(model, i).backward()
        optimizer.step()
        assert measured.stats()["0"]["lr"] == pytest.approx(d)
    assert optimizer.param_groups[0]["d"] > 1e-3


def test_a_closure_and_transforms() -> None:
    """The norm is of p.grad, which the closure makes, and transforms do not change."""
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = SGD([w], lr=1.0, transforms=[clip_global_norm(1.0)], **EAGER)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum() / 2
        loss.backward()
        return loss

    (measured := Stats(optimizer)).track()
    optimizer.step(closure)
    found = measured.stats()["all"]
    assert found["grad_norm"] == 5.0
    assert found["update_norm"] == pytest.approx(1.0, rel=1e-5)


def test_shares_of_skipped_updates() -> None:
    model = net()
    optimizer = AdamW(model.named_parameters(), gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(model, optimizer, skip_nonfinite=True)
    measured = Stats(optimizer)
    loss_of(model, 0).mul(float("nan")).backward()  # before track(): not counted
    optimizer.step()
    measured.track()
    for factor in (1e-6, 1.0, 1.0, float("inf")):
        (factor * loss_of(model, 0)).backward()
        optimizer.step()
    found = measured.stats(by="parameter")
    assert {one["skipped"] for one in found.values()} == {0.25}
    assert handle.skipped["0.weight"] == 2
    assert found["all"]["update_norm"] > 0.0  # of the last step that was taken

    for way in (EAGER, {"capturable": True, **EAGER}):
        model = net()
        options = {"skip_nonfinite": "step", **way}
        ordinary = SGD(model.parameters(), lr=0.1, **options)
        (measured := Stats(ordinary)).track()
        for factor in (1.0, float("nan"), 1.0, 1.0):
            (factor * loss_of(model, 0)).backward()
            ordinary.step()
            ordinary.zero_grad()
        assert measured.stats()["all"]["skipped"] == 0.25


def test_a_step_forgets_the_one_before() -> None:
    """Heads that take turns: the norms are those of the last step's parameters."""
    one, two = (nn.Parameter(torch.full((3,), x)) for x in (1.0, 2.0))
    optimizer = SGD([("one", one), ("two", two)], lr=0.1, compile=False)
    (measured := Stats(optimizer)).track()
    one.grad = torch.ones(3)
    optimizer.step()
    one.grad, two.grad = None, torch.ones(3)
    optimizer.step()
    found = measured.stats(by="parameter")
    assert found["one"]["param_norm"] == 0.0 and "lr" not in found["one"]
    assert found["two"]["param_norm"] == found["all"]["param_norm"] > 3
    optimizer.step(lambda: 0.0)
    assert measured.stats() == measured.stats()
    measured.track(False)
    with pytest.raises(RuntimeError, match=r"stats\(\) of no step: call track"):
        measured.stats()
    assert not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def test_what_cannot_be_honoured_is_refused() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), gradient_release=True, **EAGER)
    with pytest.raises(TypeError, match="Stats got SGD"):
        Stats(torch.optim.SGD(model.parameters()))  # type: ignore
    measured = Stats(optimizer)
    with pytest.raises(RuntimeError, match=r"call track\(\) before the step"):
        measured.stats()
    with pytest.raises(TypeError, match="on='norms'"):
        measured.track("norms")  # type: ignore
    measured.track()
    assert measured.stats()["all"]["param_norm"] == 0.0  # no step yet
    with pytest.raises(ValueError, match="allowed are 'group', 'parameter' and patterns"):
        measured.stats(by="*.weight")
    with pytest.raises(ValueError, match="the parameters of group 0 have no names"):
        measured.stats(by=["*.weight"])
    loss_of(model, 0).backward()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"track\(\) with step\(param=...\)"):
        optimizer.step(param=model[0].weight)
    with pytest.raises(RuntimeError, match=r"track\(\) with optimizer_accumulation=True"):
        optimizer.optimizer_accumulation = True
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    named = AdamW(model.named_parameters(), **EAGER)
    (measured := Stats(named)).track()
    with pytest.raises(ValueError, match=r"\['none'\] match no parameter"):
        measured.stats(by=["0.*", "none"])
    assert not copy.deepcopy(named)._optimizer_step_pre_hooks  # a copy measures nothing


CHECKS = [stats_worlds.shards, stats_worlds.replicas]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(CHECKS, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.full
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_processes_measure_whole_tensors(name: str, two: dict[str, str]) -> None:
    assert not two[name], two[name]
