"""Prepared twice, as where a notebook's cell is run again; and never prepared."""

import gc
import warnings

import pytest
import torch
from torch import Tensor, nn

from optimi_func import (
    SGD,
    AdamW,
    prepare_for_gradient_release,
    remove_gradient_release,
    sgd,
)

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
    with pytest.raises(ValueError, match="already, to sgd"):
        prepare_for_gradient_release(model, optimizer)
    handle.remove()
    with prepare_for_gradient_release(model, optimizer):
        backward(model)
    assert optimizer.state[model.bias]["step"] == 1


def test_hooks_of_others_stay_and_are_still_told_of() -> None:
    model, seen = nn.Linear(2, 1), []
    model.weight.register_post_accumulate_grad_hook(seen.append)
    optimizer = SGD(model.parameters(), lr=0.5, **RELEASE)
    with pytest.raises(ValueError, match="ignore_existing_hooks=True"):
        prepare_for_gradient_release(model, optimizer)
    with prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True):
        backward(model)
    assert seen == [model.weight] and model.weight.grad is None


def test_through_another_module_around_the_same_parameters() -> None:
    """torch.compile(model) in a notebook cell makes a new module each time."""
    inner = nn.Linear(2, 1)
    first = SGD(inner.parameters(), lr=0.5, **RELEASE)
    wrapper = nn.Sequential(inner)
    prepare_for_gradient_release(wrapper, first)
    second = SGD(inner.parameters(), lr=0.25, **RELEASE)
    again = nn.Sequential(inner)
    with pytest.raises(ValueError, match="released already"):
        prepare_for_gradient_release(again, second)
    remove_gradient_release(again)
    with prepare_for_gradient_release(again, second):
        backward(inner)
    assert second.state[inner.weight]["step"] == 1 and not first.releases


def test_a_part_of_a_released_model_does_not_take_the_whole_off() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = SGD(model.parameters(), lr=0.5, **RELEASE)
    with prepare_for_gradient_release(model, optimizer):
        with pytest.warns(UserWarning, match="no gradient release hooks"):
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


def test_never_prepared_is_said_at_the_first_step_with_gradients() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.5, **RELEASE)
    optimizer.step()  # a scheduler's dummy
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        optimizer.step(param=p)  # hooks of one's own
        p.grad = None
    optimizer.step()
    backward(model)
    with pytest.warns(UserWarning, match=r"no model was prepared.*prepare_for_gradient"):
        optimizer.step()
    optimizer.step()  # said once


def test_prepared_once_is_never_unprepared() -> None:
    for steps in (0, 1):
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.5, **RELEASE)
        with prepare_for_gradient_release(model, optimizer):
            for _ in range(steps):
                backward(model)
                optimizer.step()
        backward(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert not optimizer._optimizer_step_post_hooks


def test_backward_asks_for_the_function_and_not_for_its_loss() -> None:
    model = nn.Linear(2, 1)
    handle = prepare_for_gradient_release(model, sgd(lr=0.5))
    before = weights(model)
    with pytest.raises(TypeError, match=r"got a Tensor: allowed is a function"):
        handle.backward(model(torch.ones(1, 2)).sum())
    assert all(map(torch.equal, before, weights(model)))
    handle.remove()
