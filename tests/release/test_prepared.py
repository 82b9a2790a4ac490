"""Prepared twice, as where a notebook's cell is run again; copies of what is prepared."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from optimi_func import (
    SGD,
    AdamW,
    prepare_for_gradient_release,
    remove_gradient_release,
    sgd,
)
from optimi_func.gradient_release import GradientRelease

RELEASE = {"gradient_release": True, "compile": False}


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ignoring", [False, True])
def test_the_cell_run_twice_says_what_to_call(ignoring: bool) -> None:
    model = nn.Linear(2, 1)

    def cell(lr: float) -> SGD:
        optimizer = SGD(model.parameters(), lr=lr, **RELEASE)
        prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=ignoring)
        return optimizer

    first = cell(0.5)
    with pytest.raises(ValueError, match=r"already, to SGD.*remove_gradient_release\("):
        cell(0.1)
    before = weights(model)
    backward(model)
    assert all(torch.equal(q, p - 0.5) for p, q in zip(before, weights(model)))
    remove_gradient_release(model)
    assert not first.releases
    second, before = cell(0.125), weights(model)
    backward(model)
    assert all(torch.equal(q, p - 0.125) for p, q in zip(before, weights(model)))
    assert second.state[model.weight]["step"] == 1


def test_a_pure_optimizer_in_place_of_a_class_too() -> None:
    model = nn.Linear(2, 1)
    handle = prepare_for_gradient_release(model, sgd(lr=0.5))
    optimizer = AdamW(model.parameters(), lr=0.1, **RELEASE)
    handle.remove()
    with prepare_for_gradient_release(model, optimizer):
        backward(model)
    assert optimizer.state[model.bias]["step"] == 1


def test_through_another_module_around_the_same_parameters() -> None:
    """torch.compile(model) in a notebook cell makes a new module each time."""
    inner = nn.Linear(2, 1)
    first = SGD(inner.parameters(), lr=0.5, **RELEASE)
    wrapper = nn.Sequential(inner)
    prepare_for_gradient_release(wrapper, first)
    second = SGD(inner.parameters(), lr=0.25, **RELEASE)
    again = nn.Sequential(inner)
    remove_gradient_release(again)
    with prepare_for_gradient_release(again, second):
        backward(inner)
    assert second.state[inner.weight]["step"] == 1 and not first.releases


def test_a_part_of_a_released_model_does_not_take_the_whole_off() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = SGD(model.parameters(), lr=0.5, **RELEASE)
    with prepare_for_gradient_release(model, optimizer):
        with pytest.warns(UserWarning, match=r"\(Linear\): the model has no hooks"):
            remove_gradient_release(model[0])
        assert optimizer.releases


def test_a_dead_optimizers_hooks_come_off_by_themselves() -> None:
    inner = nn.Linear(2, 1)
    first = SGD(inner.parameters(), lr=0.5, **RELEASE)
    prepare_for_gradient_release(nn.Sequential(inner), first)  # the module is gone
    del first
    gc.collect()
    second = SGD(inner.parameters(), lr=0.25, **RELEASE)
    before = weights(inner)
    with prepare_for_gradient_release(inner, second):
        backward(inner)
    assert all(torch.equal(q, p - 0.25) for p, q in zip(before, weights(inner)))
    # Of the dead one nothing is left to raise.
    backward(inner)
    assert inner.weight.grad is not None


class Prepared(nn.Module):
    """A module that keeps its handle, as a LightningModule may."""

    def __init__(self, pure: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        optimizer: Any = sgd(lr=0.5, momentum=0.9, nesterov=False)
        if not pure:
            optimizer = SGD(self.parameters(), lr=0.5, momentum=0.9, **RELEASE)
        self.handle = prepare_for_gradient_release(self, optimizer, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, pickled]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copied_handle_has_no_hooks(copied: Any) -> None:
    model = Prepared()
    backward(model)
    twin = copied(model)
    handle = twin.handle
    assert handle.params == dict(twin.named_parameters())
    before = weights(twin)
    backward(twin)
    assert all(map(torch.equal, before, weights(twin)))
    handle.optimizer.step()  # the ordinary step
    handle.remove()
    # The original goes on as before, and the copy can be prepared.
    backward(model)
    assert all(map(torch.equal, weights(model), weights(twin)))
    twin.zero_grad()
    twin.handle = prepare_for_gradient_release(twin, handle.optimizer)
    for module in (model, twin):
        module.handle.backward(lambda m=module: m(torch.ones(1, 2)).sum())
    assert all(map(torch.equal, weights(model), weights(twin)))


def test_a_module_with_a_handle_can_be_averaged() -> None:
    model = Prepared()
    average = AveragedModel(model)
    for _ in range(2):
        backward(model)
        average.update_parameters(model)
    assert int(average.n_averaged) == 2 and average.module.layer.weight.grad is None


@pytest.mark.parametrize("copied", COPIES)
def test_a_copied_handle_has_what_it_carried(copied: Any) -> None:
    """Nothing is compiled: the last backward, which would step, is not run."""
    model = Prepared(pure=True, accumulation="buffer", accumulation_steps=2)
    model.handle.state.step.fill_(3.0)
    backward(model)
    twin: GradientRelease = copied(model).handle
    assert twin.options == model.handle.options and twin.state.step == 3
    assert twin.state.step is not model.handle.state.step
    one, other = model.handle.state_dict(), twin.state_dict()
    sums, copies = one.pop("buffer"), other.pop("buffer")
    assert one == other and one["position"] == 1 and len(sums) == 2
    for name, x in sums.items():
        assert torch.equal(x, copies[name]) and x is not copies[name]
