"""What is said to those who pass something else, and how values read."""

import pytest
import torch

import optimi_func
from optimi_func import adamw, detach, sgd, unroll
from optimi_func.compiled import train_step
from optimi_func.schedules import cosine, linear, one_cycle, warmup_cosine


@pytest.mark.parametrize(
    "text",
    [
        "adamw(lr=0.001)",
        "adamw(lr=0.001, weight_decay=0.1, betas=(0.9, 0.95))",
        "sgd(lr=0.1, maximize=True, momentum=0.9)",
        "adan(lr=1, decouple_lr=True, max_lr=2.0)",
        "lion(lr={'w': 0.1})",
        "ranger(lr=0.1, k=5)",
    ],
)
def test_a_value_reads_like_the_call_that_makes_it(text: str) -> None:
    assert repr(eval(text, vars(optimi_func))) == text


def test_tensors_read_as_such() -> None:
    assert repr(adamw(lr=torch.tensor(0.5))) == "adamw(lr=tensor(0.5000))"


def test_a_module_is_no_parameter_tree() -> None:
    model = torch.nn.Linear(2, 1)
    text = r"module Linear: .*dict\(model\.named_parameters\(\)\)"
    with pytest.raises(TypeError, match=text):
        adamw(lr=0.1).init(model)
    with pytest.raises(TypeError, match=text):
        optimi_func.adamw_step(model, None, None, lr=0.1)


def test_errors_of_adamw_do_not_speak_of_adam() -> None:
    params = {"w": torch.ones(2)}
    for state in ({}, optimi_func.sgd_init(params)):
        with pytest.raises((TypeError, ValueError), match="init") as found:
            adamw(lr=0.1).step(params, params, state)
        assert "adam" not in str(found.value)
    ps = [torch.ones(2, requires_grad=True)]
    saved = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match="the optimizer needs"):
        optimi_func.AdamW(ps, lr=0.1).load_state_dict(saved)


@pytest.mark.parametrize("loss_fn", [lambda y: y, lambda: 0, lambda y, x, z: y])
def test_a_loss_of_another_arity_is_refused_at_once(loss_fn) -> None:
    with pytest.raises(TypeError, match=r"two arguments, loss_fn\(output, batch\)"):
        train_step(torch.nn.Linear(2, 1), loss_fn, sgd(lr=0.1))


def loss_fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (p - x).square().sum()


def test_one_batch_for_so_many_steps() -> None:
    p, x = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    once = unroll(sgd(lr=0.1), loss_fn, p, None, x, steps=5)
    listed = unroll(sgd(lr=0.1), loss_fn, p, None, [x] * 5)
    assert torch.equal(once.params, listed.params) and len(once.losses) == 5
    for steps in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"steps={steps}: allowed are whole numbers"):
            unroll(sgd(lr=0.1), loss_fn, p, None, x, steps=steps)
    with pytest.raises(TypeError, match=r"batches=5: allowed is an iterable.*steps="):
        unroll(sgd(lr=0.1), loss_fn, p, None, 5)


def test_detached_between_outer_steps() -> None:
    lr = torch.tensor(0.1, requires_grad=True)
    optimizer = sgd(lr=lr, momentum=0.9)
    params, state = {"w": torch.ones(2)}, optimizer.init({"w": torch.ones(2)})
    for _ in range(2):
        params, state = detach((params, state))
        assert (
            not params["w"].requires_grad and not state.leaves["w"].momentum_buffer.grad_fn
        )
        params, state = optimizer.step(params, params, state)
        assert params["w"].requires_grad
        params["w"].sum().backward()  # through this step alone: no graph is freed before
    assert lr.grad is not None
    assert type(state) is optimi_func.TreeState


def test_schedules_take_what_the_field_has_by_position() -> None:
    pairs = [
        (linear(0.0, 1.0, 4), linear(0.0, 1.0, steps=4)),
        (cosine(1.0, 0.0, 4), cosine(1.0, 0.0, steps=4)),
        (warmup_cosine(1.0, 2, 6), warmup_cosine(1.0, warmup=2, total=6)),
        (one_cycle(1.0, 10), one_cycle(1.0, total=10)),
    ]
    for positional, named in pairs:
        assert [positional(i) for i in range(12)] == [named(i) for i in range(12)]
