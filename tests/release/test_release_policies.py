"""Accumulation, clipping, norms and skipping, compared with plain p.grad code."""

import copy
import random

import pytest
import reference
import torch
from cases import CLASSES, ITERATED, NAMES, REFUSE_STATES
from released import EAGER, Net, assert_same, batch, flat, make, prepared, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import optimi_func
from optimi_func import SGD, AdamW, adamw, prepare_for_gradient_release
from optimi_func.core.rule import WHOLE_BATCH

MICRO = 4
BUFFER = {"accumulation": "buffer", "accumulation_steps": MICRO}
STATES = {"accumulation": "states", "accumulation_steps": MICRO}


def loss_of(model, i):
    y = model(batch(i, next(model.parameters()).dtype))
    y = y.float() if y.dtype == torch.bfloat16 else y
    return y.square().mean() / MICRO


def plainly(model, optimizer, steps, clip=lambda params: None, micro=MICRO):
    """Gradients added in p.grad, clipped there, and one ordinary step."""
    for step in range(steps):
        for i in range(micro):
            loss_of(model, step * micro + i).backward()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()


def released(model, optimizer, steps, micro=MICRO, **options):
    handle = prepare_for_gradient_release(model, optimizer, **options)
    run(handle, model, range(steps * micro), micro)
    return handle


def run(handle, model, backwards, micro=MICRO):
    for i in backwards:
        handle.backward(lambda at=i: loss_of(model, at))
        if (i + 1) % micro == 0:
            handle.optimizer.step()
            handle.optimizer.zero_grad()


def two(cls=AdamW, dtype=torch.float32, **options):
    return [make(cls, dtype, release, **options) for release in (False, True)]


def error(one, other, start):
    """Return the distance between two models, as a share of the first one's movement."""
    return ((flat(one) - flat(other)).norm() / (flat(one) - start).norm()).item()


def momentum_of(name):
    return {"momentum": 0.9} if name == "sgd" else {}


# Accumulation in a buffer


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_is_true_accumulation_bit_for_bit(name: str) -> None:
    one, other = two(CLASSES[name], **momentum_of(name))
    plainly(*one, 5)
    handle = released(*other, 5, **BUFFER)
    assert_same(one, other)
    assert handle.state_dict()["buffer"] == {}
    assert handle.state_dict()["position"] == 0


@pytest.mark.parametrize("buffer_dtype", [None, torch.bfloat16])
def test_the_sum_of_bfloat16_gradients_has_the_dtype_asked_for(buffer_dtype) -> None:
    (model, optimizer), other = two(dtype=torch.bfloat16)
    params = list(model.parameters())
    for step in range(5):
        sums = [torch.zeros_like(p, dtype=buffer_dtype or torch.float32) for p in params]
        for i in range(MICRO):
            grads = torch.autograd.grad(loss_of(model, step * MICRO + i), params)
            sums = [s.add_(g) for s, g in zip(sums, grads)]
        optimizer.update(params, sums, [WHOLE_BATCH] * len(params), True, True)
    released(*other, 5, **BUFFER, buffer_dtype=buffer_dtype)
    assert_same((model, optimizer), other)


def test_the_dtype_of_the_sum_changes_the_answer() -> None:
    ends = []
    for dtype in (None, torch.bfloat16, torch.float64):
        model, optimizer = make(SGD)
        start = flat(model)
        released(model, optimizer, 3, **BUFFER, buffer_dtype=dtype)
        ends.append(model)
    assert 1e-4 < error(ends[0], ends[1], start) < 1e-2
    assert 1e-9 < error(ends[0], ends[2], start) < 1e-5


@pytest.mark.parametrize("steps", [MICRO, None, 7])
def test_step_ends_an_open_cycle_and_the_next_backward_opens_one(steps) -> None:
    one, other = two()
    plainly(*one, 2)
    plainly(*one, 3, micro=3)
    options = {"accumulation": "buffer", "accumulation_steps": steps}
    handle = prepare_for_gradient_release(*other, **options)
    run(handle, other[0], range(2 * MICRO))
    run(handle, other[0], range(9), micro=3)
    assert_same(one, other)


@pytest.mark.parametrize("options", [BUFFER, STATES])
def test_what_the_last_backward_gives_no_gradient_moves_all_the_same(options) -> None:
    one, other = two(SGD, momentum=0.9, weight_decay=0.1)
    handle = prepare_for_gradient_release(*other, **options)
    for step in range(3):
        for model in (one[0], other[0]):
            for i in range(MICRO):
                x = batch(step * MICRO + i)
                # The last goes through the last layer alone, the one before skips it.
                hidden = torch.ones(8, 128) if i == 3 else model.norm(model.first(x))
                (hidden if i == 2 else model.last(hidden)).square().mean().backward()
        one[1].step()
        one[1].zero_grad()
        assert handle.state_dict()["position"] == 0
    for p, q in zip(one[0].parameters(), other[0].parameters()):
        assert torch.allclose(p, q, rtol=0, atol=1e-7)
    assert other[1].state_dict()["state"].keys() == one[1].state_dict()["state"].keys()
    counts = {int(s["step"]) for s in other[1].state_dict()["state"].values()}
    assert counts == {3}


def test_the_buffer_is_freed_as_the_last_backward_passes() -> None:
    blocks = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(6)])
    optimizer = SGD(blocks.parameters(), lr=1e-3, gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(
        blocks, optimizer, accumulation="buffer", accumulation_steps=2
    )
    held = []
    original = optimizer.update

    def counting(*rest, **options) -> None:
        held.append(len(handle.state_dict()["buffer"]))
        original(*rest, **options)

    handle._runner.update = counting
    for _ in range(2):
        blocks(torch.randn(4, 128)).mean().backward()
    assert held == [6, 5, 4, 3, 2, 1]
    assert handle.state_dict()["buffer"] == {}


def test_removing_the_hooks_hands_the_sums_over() -> None:
    one, other = two()
    plainly(*one, 1)
    handle = prepare_for_gradient_release(*other, **BUFFER)
    run(handle, other[0], range(3))
    handle.remove()
    assert other[0].last.weight.grad is not None
    loss_of(other[0], 3).backward()
    other[1].step()
    assert_same(one, other)


# Accumulation in the state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decouple_wd": True},
        {"dampening": True},
        {"dampening": True, "torch_init": True},
        {"dampening": 0.5},
        {"maximize": True, "lr": 1e-4},
    ],
    ids=str,
)
def test_states_are_exact_for_sgd_with_momentum(options) -> None:
    one, other = two(SGD, momentum=0.9, **options)
    start = flat(one[0])
    plainly(*one, 20)
    released(*other, 20, **STATES)
    assert error(one[0], other[0], start) < 1e-6
    # And not because a step is a step: each part as a step of its own is another.
    third = make(SGD, momentum=0.9, **options)
    handle = prepare_for_gradient_release(*third)
    run(handle, third[0], range(20 * MICRO), micro=1)
    assert error(one[0], third[0], start) > 1e-2


class Given(nn.Module):
    """A model whose gradient is what it is given, wherever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)
        self.w = nn.Parameter(w)

    def forward(self, g):
        return (self.w * g).sum()


def given(steps):
    torch.manual_seed(7)
    return torch.randn(steps, MICRO, 3, 3, dtype=torch.float64)


FIRST_MOMENT = {
    "sgd": "momentum_buffer",
    **dict.fromkeys(ITERATED, "momentum_buffer"),
    **{n: "exp_avg" for n in NAMES if n not in (*REFUSE_STATES, *ITERATED)},
}


@pytest.mark.parametrize("name", FIRST_MOMENT)
def test_the_first_moment_is_exact(name: str) -> None:
    options = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    states = []
    for release in (False, True):
        model = Given()
        optimizer = CLASSES[name](
            model.parameters(), lr=0.01, gradient_release=release, **options, **EAGER
        )
        if release:
            prepare_for_gradient_release(model, optimizer, **STATES)
        for parts in given(20):
            for g in parts:
                model(g).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(optimizer.state[model.w])
    field = FIRST_MOMENT[name]
    assert torch.allclose(states[0][field], states[1][field], rtol=1e-12, atol=1e-14)
    assert states[0]["step"] == states[1]["step"] == 20


@pytest.mark.parametrize("closed", ["by the last part", "by step()"])
def test_adamw_in_states_is_adam_accumulation(closed: str) -> None:
    """AdamA, arXiv:2305.19982: m of the whole gradient, v of the squares of its parts."""
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    model = Given()
    start = model.w.detach().clone()
    optimizer = AdamW(model.parameters(), gradient_release=True, **options, **EAGER)
    steps = MICRO if closed == "by the last part" else None
    prepare_for_gradient_release(
        model, optimizer, accumulation="states", accumulation_steps=steps
    )
    for parts in given(20):
        for g in parts:
            model(g).backward()
        optimizer.step()
    expected = reference.adam_accumulation(start, given(20), **options)
    moved = (model.w.detach() - start).norm()
    assert (model.w - expected).norm() / moved < 1e-12


@pytest.mark.parametrize("name", ["lion", "nesterov"])
def test_the_last_part_leans_alone(name: str) -> None:
    """If a rule reads the gradient and not only its state, it sees the last part."""
    model = Given()
    start = model.w.detach().clone()
    if name == "lion":
        options = {"betas": (0.9, 0.95)}
        cls, expected = CLASSES["lion"], reference.lion_accumulation
    else:
        options, cls = {"momentum": 0.9}, SGD
        expected = reference.nesterov_accumulation
    nesterov = {"nesterov": True} if name == "nesterov" else {}
    optimizer = cls(
        model.parameters(), lr=0.01, gradient_release=True, **options, **nesterov, **EAGER
    )
    prepare_for_gradient_release(model, optimizer, **STATES)
    for parts in given(20):
        for g in parts:
            model(g).backward()
        optimizer.step()
    end = expected(start, given(20), lr=0.01, **options)
    assert (model.w - end).norm() / (end - start).norm() < 1e-12


def test_lion_without_memory_still_has_a_direction() -> None:
    model, optimizer = make(CLASSES["lion"], betas=(0.9, 0.0))
    released(model, optimizer, 2, **STATES)
    assert flat(model).isfinite().all()


def test_policies_are_chosen_on_the_handle_between_cycles() -> None:
    model, optimizer, handle = prepared()
    handle.accumulation = "buffer"
    handle.accumulation_steps = MICRO
    run(handle, model, range(2))
    assert handle.accumulation == "buffer"
    optimizer.step()
    handle.accumulation = "states"
    assert handle.accumulation_steps == MICRO
    handle.accumulation = None
    assert handle.accumulation_steps is None
    run(handle, model, range(1))
    assert {int(s["step"]) for s in optimizer.state.values()} == {2}


def test_closures_accumulate() -> None:
    """Lightning calls the closure without step() for all backwards but the last."""
    one, other = two()
    plainly(*one, 3)
    prepare_for_gradient_release(*other, **BUFFER)
    model, optimizer = other
    for i in range(3 * MICRO):

        def closure(i=i):
            loss = loss_of(model, i)
            loss.backward()
            return loss

        if (i + 1) % MICRO:
            closure()
        else:
            optimizer.step(closure)
    assert_same(one, other)


def test_a_narrow_sum_is_widened_where_step_ends_the_cycle() -> None:
    for dtype, narrow in (
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
    ):
        model, optimizer = make(SGD, dtype)
        start = flat(model)
        handle = prepare_for_gradient_release(
            model, optimizer, accumulation="buffer", buffer_dtype=narrow
        )
        for i in range(2):
            model(batch(i, dtype)).square().mean().backward()
        optimizer.step()
        assert not torch.equal(flat(model), start)
        assert handle.state_dict()["buffer"] == {}


def test_float16_sums_do_not_overflow() -> None:
    model = nn.Linear(1, 1, bias=False).half()
    optimizer = SGD(model.parameters(), lr=1e-5, gradient_release=True, **EAGER)
    prepare_for_gradient_release(
        model, optimizer, **{**BUFFER, "accumulation_steps": 2}, buffer_dtype=torch.bfloat16
    )
    for _ in range(2):
        (model.weight * 40000.0).sum().backward()
    assert model.weight.isfinite().all()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ZeroDivisionError


def test_a_last_backward_that_fails_keeps_the_sums() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
    optimizer = SGD(model.parameters(), lr=1.0, gradient_release=True, **EAGER)
    prepare_for_gradient_release(
        model, optimizer, accumulation="buffer", accumulation_steps=3
    )
    first, second = model
    for _ in range(2):
        (first.sum() + second.sum()).backward()
    with pytest.raises(ZeroDivisionError):
        (second * Failing.apply(first)).sum().backward()
    with pytest.warns(UserWarning, match="did not finish"):
        (first.sum() + second.sum()).backward()
    assert first.tolist() == second.tolist() == [-2.0, -2.0]


def test_an_update_that_fails_keeps_the_sums() -> None:
    one, other = two()
    plainly(*one, 1)
    prepare_for_gradient_release(*other, **BUFFER)
    for i in range(MICRO - 1):
        loss_of(other[0], i).backward()
    other[1].param_groups[0]["lr"] = -1.0
    with pytest.raises(RuntimeError, match="Invalid learning rate"):
        loss_of(other[0], MICRO - 1).backward()
    other[1].param_groups[0]["lr"] = 1e-2
    with pytest.warns(UserWarning, match="did not finish"):
        loss_of(other[0], MICRO - 1).backward()
    assert_same(one, other)


def test_a_cycle_can_be_discarded() -> None:
    one, other = two()
    plainly(*one, 1)
    handle = prepare_for_gradient_release(*other, **BUFFER)
    loss_of(other[0], 50).backward()
    with pytest.warns(UserWarning, match=r"zero_grad.*does not drop.*discard.*paused"):
        other[1].zero_grad()
    handle.discard()
    run(handle, other[0], range(MICRO))
    assert_same(one, other)


# Clipping

LIMITS = {"clip_param_norm": 0.02, "clip_value": 0.002, "clip_global_norm": 0.05}
GLOBAL_NORM = {"clip_global_norm": LIMITS["clip_global_norm"]}


def clip_plainly(policy):
    limit = LIMITS[policy]
    if policy == "clip_param_norm":
        return lambda ps: [nn.utils.clip_grad_norm_([p], limit) for p in ps]
    if policy == "clip_value":
        return lambda ps: nn.utils.clip_grad_value_(ps, limit)
    return lambda ps: nn.utils.clip_grad_norm_(ps, limit)


@pytest.mark.parametrize("accumulation", ["none", "buffer", "flag"])
@pytest.mark.parametrize("policy", LIMITS)
def test_each_cell_of_the_clipping_table(policy: str, accumulation: str) -> None:
    micro = 1 if accumulation == "none" else MICRO
    options = {policy: LIMITS[policy], **(BUFFER if accumulation == "buffer" else {})}
    one, other = two(SGD, torch.float64, momentum=0.9)
    start = flat(one[0])
    plainly(*one, 6, clip_plainly(policy), micro)
    if accumulation == "flag":
        handle = prepare_for_gradient_release(*other, **options)
        for i in range(6 * micro):
            other[1].optimizer_accumulation = (i + 1) % micro != 0
            handle.backward(lambda i=i: loss_of(other[0], i))
        assert error(one[0], other[0], start) > 1e-3
        return
    released(*other, 6, micro, **options)
    unclipped = make(SGD, torch.float64, release=False, momentum=0.9)
    plainly(*unclipped, 6, micro=micro)
    # The limit did something, and it did the same thing.
    assert error(one[0], unclipped[0], start) > 0.1
    assert error(one[0], other[0], start) < 1e-12


def test_one_pass_is_enough_when_step_ends_the_cycle() -> None:
    one, other = two()
    plainly(*one, 3, clip_plainly("clip_global_norm"))
    handle = prepare_for_gradient_release(*other, accumulation="buffer", **GLOBAL_NORM)
    for i in range(3 * MICRO):
        loss_of(other[0], i).backward()
        if (i + 1) % MICRO == 0:
            other[1].step()
    assert_same_to(one, other, 1e-6)
    assert handle.state_dict()["buffer"] == {}


def assert_same_to(one, other, tolerance):
    for p, q in zip(one[0].parameters(), other[0].parameters()):
        assert torch.allclose(p, q, rtol=0, atol=tolerance)


class Noisy(nn.Module):
    """Dropout, BatchNorm and a coin of Python's: all that must be the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 128)
        self.norm = nn.BatchNorm1d(128)
        self.two = nn.Linear(128, 4)

    def forward(self, x):
        x = self.one(x) * random.choice((0.5, 2.0))
        return self.two(nn.functional.dropout(self.norm(x).relu(), 0.3))


def test_two_passes_are_one_step_to_everybody_else() -> None:
    ends = []
    for release in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        model = Noisy()
        outside = nn.Parameter(torch.ones(4))
        optimizer = SGD(model.parameters(), lr=1e-1, gradient_release=release, **EAGER)
        if release:
            handle = prepare_for_gradient_release(model, optimizer, grad_norm=True)
        for i in range(4):
            x = batch(i)

            def loss_fn(model=model, outside=outside, x=x):
                return ((model(x) + outside) ** 2).mean()

            if release:
                handle.backward(loss_fn, clip_global_norm=0.1)
                norm = handle.grad_norm
            else:
                loss_fn().backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        ends.append([*model.state_dict().values(), outside.grad, norm, torch.rand(3)])
        ends[-1].append(torch.tensor(random.random()))
    for a, b in zip(*ends):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_first_pass_that_fails_leaves_nothing_behind() -> None:
    model, optimizer, handle = prepared(**GLOBAL_NORM)
    before = flat(model)

    def loss_fn():
        loss = loss_of(model, 0)
        loss.register_hook(lambda g: 1 / 0)
        return loss

    with pytest.raises(ZeroDivisionError):
        handle.backward(loss_fn)
    assert torch.equal(flat(model), before)
    handle.backward(lambda: loss_of(model, 0))  # no warning of an unfinished one
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}


def test_two_passes_with_a_layer_frozen_later() -> None:
    model, _, handle = prepared(**GLOBAL_NORM)
    model.first.requires_grad_(False)
    before = flat(model)
    handle.backward(lambda: loss_of(model, 0))
    assert not torch.equal(flat(model), before)


def test_two_passes_of_checkpoints_without_reentrance() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=1.0, gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(model, optimizer, clip_global_norm=1.0)
    before, x = flat(model), batch(0).requires_grad_()
    handle.backward(lambda: model[1](checkpoint(model[0], x, use_reentrant=False)).sum())
    assert not torch.equal(flat(model), before)


class Counting(nn.Module):
    """Buffers of every kind: none yet, made in forward, replaced, not to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.register_buffer("late", None)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1).expand(16))
        with torch.inference_mode():
            self.register_buffer("frozen", torch.ones(16))

    def forward(self, x):
        self.late = torch.ones(()) if self.late is None else self.late + 1
        if not hasattr(self, "lazy"):
            self.register_buffer("lazy", torch.zeros(()))
        self.lazy += 1
        self.count = self.count + 1
        return self.layer(x * self.mask * self.frozen.clone())


def test_two_passes_put_every_buffer_back() -> None:
    model = Counting()
    optimizer = SGD(model.parameters(), lr=0.1, gradient_release=True, **EAGER)
    handle = prepare_for_gradient_release(model, optimizer, clip_global_norm=1.0)
    mask = model.mask
    version = mask._version
    handle.backward(lambda: model(batch(0)).sum())
    assert model.late == model.lazy == model.count == 1
    assert model.mask is mask and mask._version == version


def test_two_passes_add_to_a_gradient_that_is_there() -> None:
    ends = []
    for limit in (None, 1e9):
        model, _, handle = prepared(make(SGD), clip_global_norm=limit)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        handle.backward(lambda model=model: loss_of(model, 0))
        ends.append(flat(model))
    assert torch.allclose(*ends, atol=1e-7)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_norm_that_overflows_clips_what_is_not_skipped(where: str) -> None:
    options = {"capturable": True} if where == "device" else {}
    model = nn.Linear(3, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, gradient_release=True, **options, **EAGER)
    handle = prepare_for_gradient_release(
        model, optimizer, clip_global_norm=1.0, skip_nonfinite=True
    )
    before = flat(model)
    handle.backward(lambda: model(torch.full((1, 3), 1e25)).sum())
    assert torch.equal(flat(model), before)  # as with torch: infinity clips to nothing
    assert handle.skipped == {}


@pytest.mark.parametrize("where", ["host", "device"])
def test_what_is_skipped_scales_nothing(where: str) -> None:
    options = {"capturable": True} if where == "device" else {}
    one, other = two(SGD, **options)
    handle = prepare_for_gradient_release(*other, skip_nonfinite=True, **GLOBAL_NORM)
    hooks = [m.last.weight.register_hook(lambda g: g * torch.nan) for m in (other[0],)]
    handle.backward(lambda: loss_of(other[0], 0))
    hooks[0].remove()
    loss_of(one[0], 0).backward()
    one[0].last.weight.grad = None
    clip_plainly("clip_global_norm")([p for p in one[0].parameters() if p.grad is not None])
    one[1].step()
    assert_same_to(one, other, 1e-7)
    assert handle.skipped == {"last.weight": 1}


def test_settings_of_one_call_do_not_stay() -> None:
    model, _, handle = prepared()
    usual = handle.options
    loss = handle.backward(lambda: loss_of(model, 0), clip_global_norm=1.0)
    assert handle.options == usual
    assert loss.item() > 0 and not loss.requires_grad


# Norms


@pytest.mark.parametrize("options", [{}, BUFFER, STATES])
def test_the_norm_is_what_clipping_would_have_returned(options) -> None:
    one, other = two(momentum=0.9, cls=SGD)
    handle = prepare_for_gradient_release(*other, grad_norm=True, **options)
    assert handle.grad_norm is None
    for i in range(2 * MICRO):
        loss_of(one[0], i).backward()
        loss_of(other[0], i).backward()
        params = list(one[0].parameters())
        if options == STATES:
            params = [p.detach().clone().requires_grad_() for p in params]
            grads = torch.autograd.grad(loss_of(one[0], i), list(one[0].parameters()))
            for p, g in zip(params, grads):
                p.grad = g
        expected = nn.utils.clip_grad_norm_(params, float("inf"))
        assert torch.allclose(handle.grad_norm, expected, rtol=1e-5)
        if not options or (i + 1) % MICRO == 0:
            one[1].step()
            one[1].zero_grad()


# Skipping


def poison(model, name, value):
    """Make one gradient of the next backward contain a value."""
    p = dict(model.named_parameters())[name]

    def spoil(g):
        handle.remove()
        g = g.clone()
        g.view(-1)[0] = value
        return g

    handle = p.register_hook(spoil)


SKIPS = {
    "host": {},
    "device": {"capturable": True},
}


@pytest.mark.parametrize("name", ["last.weight", "middle.weight", "norm.bias"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("where", SKIPS)
def test_a_gradient_that_is_not_finite_is_skipped(name, value, where) -> None:
    model, optimizer, handle = prepared(
        make(weight_decay=0.1, **SKIPS[where]), skip_nonfinite=True
    )
    train(model, optimizer, 2)
    poison(model, name, value)
    p = dict(model.named_parameters())[name]
    before = [p.detach().clone(), *(x.clone() for x in optimizer.state[p].values())]
    others = [q.detach().clone() for q in model.parameters() if q is not p]
    train(model, optimizer, 1)
    after = [p.detach(), *optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    moved = [q for q in model.parameters() if q is not p]
    assert not any(torch.equal(a, b) for a, b in zip(others, moved))
    assert handle.skipped == {name: 1}
    train(model, optimizer, 1)
    assert optimizer.state[p]["step"] == 3
    assert handle.skipped == {name: 1}


@pytest.mark.parametrize("where", SKIPS)
@pytest.mark.parametrize("name", NAMES)
def test_skipping_changes_nothing_where_all_is_finite(name, where) -> None:
    one = make(CLASSES[name], torch.bfloat16, False, **SKIPS[where])
    other = make(CLASSES[name], torch.bfloat16, True, **SKIPS[where])
    train(*one, 7)
    prepare_for_gradient_release(*other, skip_nonfinite=True)
    train(*other, 7)
    assert_same(one, other)


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "stableadamw"])
def test_a_kernel_skips_on_the_device(name: str, graphs) -> None:
    model, optimizer, handle = prepared(
        make(CLASSES[name], torch.bfloat16, capturable=True, compile=True),
        skip_nonfinite=True,
    )
    names = ["middle.weight", "last.weight", "norm.bias"]
    train(model, optimizer, 2)
    made = graphs()
    params = {n: p for n, p in model.named_parameters() if n in names}
    before = {n: p.detach().clone() for n, p in params.items()}
    states = {n: copy.deepcopy(optimizer.state[p]) for n, p in params.items()}
    for n in names:
        poison(model, n, float("nan"))
    train(model, optimizer, 1)
    for n, p in params.items():
        assert torch.equal(p, before[n])
        for field, x in optimizer.state[p].items():
            assert torch.equal(x, states[n][field])
    assert handle.skipped == dict.fromkeys(names, 1)
    train(model, optimizer, 1)
    assert all(not torch.equal(p, before[n]) for n, p in params.items())
    assert graphs() == made


def test_large_finite_gradients_are_not_skipped() -> None:
    model, optimizer, handle = prepared(skip_nonfinite=True)
    poison(model, "last.weight", 3e38)  # its square is inf
    train(model, optimizer, 1)
    assert handle.skipped == {}
    assert optimizer.state[model.last.weight]["step"] == 1


@pytest.mark.parametrize("options", [BUFFER, STATES])
@pytest.mark.parametrize("poisoned", [0, 1, MICRO - 1])
def test_skipping_while_accumulating(options, poisoned: int) -> None:
    model, optimizer, handle = prepared(skip_nonfinite=True, **options)
    for i in range(MICRO):
        if i == poisoned:
            poison(model, "last.weight", float("nan"))
        loss_of(model, i).backward()
    # The sum is lost; of the parts only one.
    steps = {"buffer": set(), "states": {1}}[handle.accumulation]
    assert {int(optimizer.state[model.last.weight].get("step", 0))} - {0} == steps
    assert handle.skipped == {"last.weight": 1}
    assert flat(model).isfinite().all()
    assert not handle.state_dict()["buffer"] and not handle.state_dict()["begun"]


def test_states_leave_out_the_last_part_too() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    optimizer = SGD(
        model.parameters(), lr=1.0, momentum=0.5, gradient_release=True, **EAGER
    )
    prepare_for_gradient_release(
        model,
        optimizer,
        accumulation="states",
        accumulation_steps=2,
        skip_nonfinite=True,
    )
    for g in (1.0, float("nan"), 1.0, 1.0):
        (model[0] * g).sum().backward()
    assert model[0].item() == -3.5
    assert optimizer.state[model[0]]["step"] == 2


def test_a_norm_stays_when_step_ends_a_cycle_of_states() -> None:
    model, optimizer, handle = prepared(accumulation="states", grad_norm=True)
    loss_of(model, 0).backward()
    norm = handle.grad_norm
    optimizer.step()
    assert torch.equal(handle.grad_norm, norm) and norm > 0


# What the handle carries


@pytest.mark.parametrize("options", [BUFFER, STATES])
@pytest.mark.parametrize("stop", [1, 5, 8])
def test_a_run_resumes_inside_a_cycle(options, stop, tmp_path) -> None:
    options = {**options, "grad_norm": True}
    straight = make()
    handle = prepare_for_gradient_release(*straight, **options)
    run(handle, straight[0], range(12))
    first = make()
    handle = prepare_for_gradient_release(*first, **options)
    run(handle, first[0], range(stop))
    path = tmp_path / "checkpoint.pt"
    saved = {"model": first[0].state_dict(), "handle": handle.state_dict()}
    saved["optimizer"] = first[1].state_dict()
    torch.save(saved, path)
    second = make()
    handle = prepare_for_gradient_release(*second, **options)
    loaded = torch.load(path, weights_only=True)
    second[0].load_state_dict(loaded["model"])
    second[1].load_state_dict(loaded["optimizer"])
    handle.load_state_dict(loaded["handle"])
    run(handle, second[0], range(stop, 12))
    assert_same(straight, second)


def test_skips_resume_also_from_a_file_of_version_0_2() -> None:
    model, _, handle = prepared(skip_nonfinite=True)
    poison(model, "last.weight", float("nan"))
    loss_of(model, 0).backward()
    for more in ({}, {"last_norm": None}, {"last_norm": torch.ones(())}):
        with prepare_for_gradient_release(*make(), skip_nonfinite=True) as fresh:
            fresh.load_state_dict({**handle.state_dict(), **more})
            assert fresh.skipped == {"last.weight": 1}


def test_a_state_loads_once_a_layer_is_frozen() -> None:
    model, optimizer, handle = prepared(skip_nonfinite=True)
    for name in ("last.weight", "first.weight"):
        poison(model, name, float("nan"))
    loss_of(model, 0).backward()
    saved = handle.state_dict()
    counts = handle.skipped
    assert counts["last.weight"] == 1 and len(counts) > 1
    later, optimizer = make()
    for name, p in later.named_parameters():
        p.requires_grad_(name.startswith("last"))
    handle = prepare_for_gradient_release(later, optimizer, skip_nonfinite=True)
    handle.load_state_dict(saved)
    assert handle.skipped == {n: k for n, k in counts.items() if n.startswith("last")}


def test_a_handle_says_what_it_is() -> None:
    model, _, handle = prepared()
    count = len(list(model.parameters()))
    assert repr(handle) == f"GradientRelease(AdamW, {count} parameters, attached=True)"
    handle.remove()
    assert "attached=False" in repr(handle)


# A pure optimizer behind the hooks


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, BUFFER])
def test_a_functional_optimizer_is_the_pure_step(options, dtype) -> None:
    optimizer = adamw(lr=lambda step: 1e-2 * 0.9**step, weight_decay=0.1)
    torch.manual_seed(0)
    model, twin = Net().to(dtype), Net().to(dtype)
    twin.load_state_dict(model.state_dict())
    start = flat(model)
    params = dict(twin.named_parameters())
    state = optimizer.init(params)
    handle = prepare_for_gradient_release(model, optimizer, **options)
    micro = MICRO if options else 1
    for step in range(4):
        sums = None
        for i in range(micro):
            loss_of(model, step * micro + i).backward()
            grads = torch.autograd.grad(
                loss_of(twin, step * micro + i), list(params.values())
            )
            wide = [g.float() if options else g for g in grads]
            sums = wide if sums is None else [s + g for s, g in zip(sums, wide)]
        grads = dict(zip(params, sums))
        moved, state = optimizer.step(params, grads, state)
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(moved[name])
    # The kernel and the pure step round differently, and Adam magnifies small gradients.
    assert error(twin, model, start) < (1e-5 if dtype == torch.float32 else 1e-3)
    assert handle.state.step == state.step == 4
    for name in params:
        mine, pure = handle.state.leaves[name], state.leaves[name]
        assert torch.allclose(mine.exp_avg, pure.exp_avg, rtol=1e-2, atol=1e-6)


@pytest.mark.full
def test_a_functional_state_can_be_replaced_and_a_cycle_ended() -> None:
    optimizer = optimi_func.sgd(lr=0.1, momentum=0.9)
    model = Net()
    handle = prepare_for_gradient_release(model, optimizer, accumulation="states")
    loss_of(model, 0).backward()
    assert handle.state.step == 0
    handle.step()
    assert handle.state.step == 1
    fresh = optimizer.init(dict(model.named_parameters()))
    handle.state = fresh
    assert handle.state is fresh


@pytest.mark.kernels
def test_a_functional_optimizer_joins_and_skips() -> None:
    model = Net()
    handle = prepare_for_gradient_release(
        model, adamw(lr=1e-2), skip_nonfinite=True, clip_param_norm=1.0
    )
    before = model.last.weight.detach().clone()
    poison(model, "last.weight", float("nan"))
    loss_of(model, 0).backward()
    assert torch.equal(model.last.weight, before)
    assert handle.skipped == {"last.weight": 1}


# Graphs


@pytest.mark.full
def test_policies_make_no_graph_of_their_own(graphs) -> None:
    model, optimizer = make(compile=True)
    train(model, optimizer, 1)
    made = graphs()
    released(model, optimizer, 2, **BUFFER, **GLOBAL_NORM)
    optimi_func.remove_gradient_release(model)
    options = {"grad_norm": True, "clip_param_norm": 0.1, "skip_nonfinite": True}
    released(model, optimizer, 2, 1, **options)
    assert graphs() == made
    optimi_func.remove_gradient_release(model)
    released(model, optimizer, 2, **STATES)
    # The first part and a further one move the state alone, and the last one all; who ran
    # before may have them.
    assert graphs() <= made + 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        {"skip_nonfinite": True},
        {"clip_param_norm": 0.05, "grad_norm": True},
        {"clip_param_norm": 0.02, "skip_nonfinite": True},
        BUFFER,
    ],
    ids=str,
)
def test_no_hook_waits_for_the_device(options) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=True)
    handle = prepare_for_gradient_release(model, optimizer, **options)
    x = torch.randn(8, 16, device="cuda")
    model(x).square().mean().backward()  # compiles
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2 * MICRO):
            model(x).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert flat(model).isfinite().all()
    assert handle.skipped == {}


def test_gradients_are_measured_before_they_are_clipped() -> None:
    """Or the norm would be that of the limits, and inf would pass as the limit."""
    model, optimizer = make(SGD)
    options = {"clip_value": 1e-3, "skip_nonfinite": True, "grad_norm": True}
    handle = prepare_for_gradient_release(model, optimizer, **options)
    params = list(model.parameters())
    grads = torch.autograd.grad(loss_of(model, 0), params)
    loss_of(model, 0).backward()
    expected = nn.utils.get_total_norm(grads)
    assert torch.allclose(handle.grad_norm, expected, rtol=1e-5)
    poison(model, "last.weight", float("-inf"))
    before = model.last.weight.detach().clone()
    loss_of(model, 0).backward()
    assert model.last.weight.equal(before) and handle.skipped == {"last.weight": 1}


def test_the_norm_counts_what_the_last_backward_gives_no_gradient() -> None:
    model, _, handle = prepared(make(SGD), grad_norm=True, **BUFFER)
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for i in range(MICRO):
        loss = loss_of(model, i) if i + 1 < MICRO else model.last.weight.sum()
        grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        total = [x if g is None else x + g for x, g in zip(total, grads)]
        loss.backward()
    assert torch.allclose(handle.grad_norm, nn.utils.get_total_norm(total), rtol=1e-5)
