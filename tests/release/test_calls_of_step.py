"""Every way to call step() under release, and first steps: as without release."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CLASSES
from released import EAGER, Net, assert_same, batch, both, flat, make, prepared, train
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from optimi_func import SGD, clip_grad_norm_, prepare_for_gradient_release


class Scaled(SGD):
    """A class whose own step has another argument in the place of `param`."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        return super().step(closure)


def scheduled(optimizer: Any) -> None:
    """A scheduler puts a wrapper in the place of `step`."""
    LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step(None, None)


CALLS: dict[str, Callable[[Any], object]] = {
    "step()": lambda o: o.step(),
    "step(None)": lambda o: o.step(None),
    "step(None, None)": lambda o: o.step(None, None),
    "step(closure=None)": lambda o: o.step(closure=None),
    "step(param=None)": lambda o: o.step(param=None),
    "step(None, param=None)": lambda o: o.step(None, param=None),
    "step(closure)": lambda o: o.step(lambda: torch.zeros(())),
    "step(closure, None)": lambda o: o.step(lambda: torch.zeros(()), None),
    "a scheduler's": scheduled,
    "the class's function": lambda o: type(o).step(o, None, None),
}
MODES = [
    {"accumulation": "buffer"},
    {"accumulation": "states"},
    {"accumulation": "buffer", "accumulation_steps": 9},
    {"accumulation": "buffer", "clip_global_norm": 0.01},
    {"accumulation": "buffer", "skip_nonfinite": "step"},
]


def accumulated(mode: dict[str, Any], call: Callable[[Any], object], cls: Any = SGD) -> Any:
    """Two backwards, of which the second leaves out a parameter, and a call."""
    model, optimizer, handle = prepared(make(cls, momentum=0.9), **mode)
    for i in range(2):
        model.norm.weight.requires_grad_(i == 0)
        model(batch(i)).square().mean().backward()
    assert handle.accumulating
    call(optimizer)
    return model, optimizer, handle


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_step_ends_the_cycle(call: str, mode: dict[str, Any]) -> None:
    model, optimizer, handle = accumulated(mode, CALLS[call])
    assert not handle.accumulating
    assert_same((model, optimizer), accumulated(mode, CALLS["step()"])[:2])


@pytest.mark.parametrize("scale", [(None, 2.0), (None, None), ()], ids=str)
def test_a_step_with_other_arguments_ends_it_too(scale: tuple[Any, ...]) -> None:
    mode = MODES[0]
    model, optimizer, handle = accumulated(mode, lambda o: o.step(*scale), Scaled)
    assert not handle.accumulating
    assert_same((model, optimizer), accumulated(mode, CALLS["step()"])[:2])


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_a_step_of_one_parameter_does_not_end_it(mode: dict[str, Any]) -> None:
    extra = nn.Parameter(torch.ones(2))
    model, optimizer, handle = accumulated(mode, lambda o: None)
    optimizer.add_param_group({"params": [extra], "lr": 1.0, "weight_decay": 0.0})
    before = flat(model)
    for call in (
        lambda: optimizer.step(None, extra),
        lambda: optimizer.step(param=extra),
    ):
        extra.grad = torch.ones(2)
        call()
    assert handle.accumulating and torch.equal(flat(model), before)
    assert optimizer.state[extra]["step"] == 2


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_a_cycle_ends_after_a_backward_that_failed(mode: dict[str, Any]) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise OSError("as a lost worker")

    model, optimizer, handle = prepared(make(SGD, momentum=0.9), **mode)
    model(batch(0)).square().mean().backward()
    hidden = Fails.apply(model.first(batch(1)).relu())
    with pytest.raises(OSError, match="lost worker"):
        model.last(model.norm(model.middle(hidden))).square().mean().backward()
    assert handle.accumulating
    optimizer.step(None, None)
    assert not handle.accumulating
    before = flat(model)
    optimizer.step()
    assert torch.equal(flat(model), before)  # nothing is left


@pytest.mark.parametrize("cls", CLASSES.values())
@pytest.mark.parametrize("zeros", ["all", "most"])
def test_a_first_step_with_lr_0_is_the_ordinary_one(cls: Any, zeros: str) -> None:
    """Also if its gradients are zeros: it is counted, and the state is the same."""

    def run(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for i in range(2):
            out = model(batch(i)).square().mean()
            out = 0.0 * out if zeros == "all" else out * 0.0 + model.last.weight.sum()
            out.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 0:
                assert optimizer.state[model.first.weight]["step"] == 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-2

    both(run, lambda release: make(cls, release=release))


def test_a_trial_step_of_checkpoints_is_still_none() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    for release in (False, True):
        model, optimizer = make(release=release)
        if release:
            prepare_for_gradient_release(model, optimizer)
        before = flat(model)
        get_optimizer_state_dict(model, optimizer)
        assert all(x["step"] == 0 for x in optimizer.state.values())
        assert len(optimizer.state) == len([*model.parameters()])
        assert torch.equal(flat(model), before)


@pytest.mark.filterwarnings("ignore:foreach=True updates many")
@pytest.mark.parametrize("name", ["adamw", "lion", "stableadamw", "prodigy", "muon"])
def test_foreach_under_release_is_the_ordinary_step(name: str) -> None:
    """Bit for bit; it would not be if release compiled what step() runs eagerly."""

    def made(release: bool) -> Any:
        return make(CLASSES[name], release=release, foreach=True, compile=None)

    both(lambda model, optimizer: train(model, optimizer, 5), made)


def test_numpys_numbers_are_the_same_in_both_passes() -> None:
    numpy = pytest.importorskip("numpy")
    ends = []
    for release in (False, True):
        numpy.random.seed(0)
        model, optimizer = make(SGD, release=release)
        if release:
            handle = prepare_for_gradient_release(model, optimizer)

        def loss_fn(model: Net = model) -> Tensor:
            return model(batch(0) * float(numpy.random.rand())).square().mean()

        for _ in range(2):
            if release:
                handle.backward(loss_fn, clip_global_norm=1e9)
            else:
                loss_fn().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((flat(model), float(numpy.random.rand())))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_a_removal_that_finds_nothing_warns(recwarn: pytest.WarningsRecorder) -> None:
    from optimi_func import remove_gradient_release

    model, _, _ = prepared(make(**EAGER))
    remove_gradient_release(model)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="no hooks of prepare_for_gradient_release"):
        remove_gradient_release(model)


def test_our_clipping_of_paused_and_of_removed_releases() -> None:
    model, optimizer, handle = prepared(make(SGD))
    with handle.paused():
        model(batch(0)).square().mean().backward()
    norm = clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    handle.remove()
    optimizer.zero_grad()
    model(batch(0)).square().mean().backward()
    assert clip_grad_norm_(model.parameters(), 1e-3) == norm
