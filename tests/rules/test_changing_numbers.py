"""What a value decides once, and hyperparameters that change afterwards."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from optimi_func import compiled, prepare_for_gradient_release
from optimi_func.rules import Float, Optimizer, Shaped, choice


class Bounded(Optimizer):
    """Refuses a large lr, and takes another branch for a small one."""

    seen: Float = Float(1.0)

    def check(self) -> None:
        if self.lr > 1:
            raise ValueError("lr must be at most 1")

    @choice
    def small(self) -> bool:
        return self.lr < 0.01 * self.seen

    def direction(self, g: Tensor) -> Tensor:
        return 2 * g if self.small else g


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, dtype=torch.float64))


def made(lr: Any = 0.5, **options: Any) -> tuple[nn.Parameter, Any]:
    w = weight()
    return w, Bounded([w], lr=lr, compile=False, **options)


def step(w: nn.Parameter, optimizer: Any) -> float:
    """Return the move of a step by the gradient 1."""
    before = w.item()
    w.grad = torch.ones_like(w)
    optimizer.step()
    return before - w.item()


def by_group(w: nn.Parameter, optimizer: Any, lr: float) -> None:
    optimizer.param_groups[0]["lr"] = lr


def by_scheduler(w: nn.Parameter, optimizer: Any, lr: float) -> None:
    group = optimizer.param_groups[0]
    factor = lr / group.get("initial_lr", group["lr"])
    LambdaLR(optimizer, lambda epoch: factor)


def by_state_dict(w: nn.Parameter, optimizer: Any, lr: float) -> None:
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = lr
    optimizer.load_state_dict(saved)


def by_tensor(w: nn.Parameter, optimizer: Any, lr: float) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(lr, dtype=torch.float64)


Change = Callable[[nn.Parameter, Any, float], None]
CHANGES: dict[str, Change] = {
    "group": by_group,
    "scheduler": by_scheduler,
    "state_dict": by_state_dict,
    "tensor": by_tensor,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_choice_follows_lr(change: str) -> None:
    w, optimizer = made()
    assert step(w, optimizer) == 0.5
    for lr, factor in ((0.25, 1), (0.001, 2), (0.5, 1), (0.002, 2)):
        CHANGES[change](w, optimizer, lr)
        assert step(w, optimizer) == pytest.approx(lr * factor, rel=1e-12)


@pytest.mark.parametrize("change", CHANGES)
def test_check_is_asked_of_every_lr(change: str) -> None:
    w, optimizer = made()
    step(w, optimizer)
    before = w.item()

    def large() -> None:
        CHANGES[change](w, optimizer, 5.0)
        step(w, optimizer)

    with pytest.raises(ValueError, match="lr must be at most 1"):
        large()
    assert w.item() == before


def test_other_instances_and_values_decide_for_themselves() -> None:
    """Values of equal other numbers share what is decided, but for what lr decides."""
    w, optimizer = made(0.5)
    step(w, optimizer)
    with pytest.raises(ValueError, match="lr must be at most 1"):
        made(5.0)
    with pytest.raises(ValueError, match="lr must be at most 1"):
        Bounded.pure.kept(lr=5.0)
    other = made(0.001)
    assert step(*other) == pytest.approx(0.002)
    for value in (Bounded.pure.kept(lr=0.001), pickle.loads(pickle.dumps(other[1]))):
        assert value is not None
    assert (
        Bounded.pure.kept(lr=0.001).rule is other[1].bound_of(other[1].param_groups[0]).rule
    )
    again = copy.deepcopy(other[1])
    again.param_groups[0]["lr"] = 0.5
    (v,) = again.param_groups[0]["params"]
    assert step(v, again) == pytest.approx(0.5)


def test_a_choice_follows_other_numbers() -> None:
    w, optimizer = made(0.5)
    assert step(w, optimizer) == 0.5
    optimizer.param_groups[0]["seen"] = 100.0
    assert step(w, optimizer) == 1.0


def test_under_gradient_release() -> None:
    w = weight()
    model = nn.ParameterList([w])
    optimizer = Bounded(model.parameters(), lr=0.5, compile=False, gradient_release=True)
    with prepare_for_gradient_release(model, optimizer):
        for lr, factor in ((0.5, 1), (0.001, 2), (0.25, 1)):
            optimizer.param_groups[0]["lr"] = lr
            before = w.item()
            w.sum().backward()
            assert before - w.item() == pytest.approx(lr * factor, rel=1e-12)


class Ranked(Optimizer):
    """Has state of a shape that a hyperparameter decides, and that lr may decide."""

    rank: float = 2.0

    class State(NamedTuple):
        q: Shaped

    def init(self, p: Tensor) -> Any:
        return self.State((int(self.rank), p.shape[1]))

    def direction(self, g: Tensor) -> Tensor:
        return g

    def whole(self, d: Tensor, s: State) -> Any:
        return d, s._replace(q=s.q + 1.0)


def ranked(**options: Any) -> tuple[nn.Parameter, Any]:
    w = nn.Parameter(torch.ones(3, 4))
    optimizer = Ranked([("w", w)], lr=0.1, rank=1.0, compile=False, **options)
    w.grad = torch.ones(3, 4)
    optimizer.step()
    return w, optimizer


def test_state_of_a_shape_that_a_number_decides_is_loaded() -> None:
    _, optimizer = ranked()
    v, resumed = ranked()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[v]["q"].shape == (1, 4) and resumed.state[v]["q"][0, 0] == 1.0
    resumed.load_fitting(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(resumed.decoded_state_dict())
    resumed.step()
    assert torch.equal(resumed.state[v]["q"], torch.full((1, 4), 2.0))
    resumed.reset(v)
    assert torch.equal(resumed.state[v]["q"], torch.zeros(1, 4))
    late = nn.Parameter(torch.ones(2, 5))
    late.grad = torch.ones(2, 5)
    resumed.add_param_group({"params": [("late", late)], "rank": 3.0})
    resumed.step()
    assert resumed.state[late]["q"].shape == (3, 5)
    assert resumed.describe()
    with pytest.raises(ValueError, match="q"):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["rank"] = 2.0  # which the saved state does not fit
        ranked()[1].load_state_dict(saved)


def test_trees_of_a_shape_that_a_number_decides() -> None:
    w, optimizer = ranked()
    value, state = optimizer.functional()
    params, grads = {"w": w.detach()}, {"w": torch.ones(3, 4)}
    params, state = value.step(params, grads, state)
    assert torch.equal(state.leaves["w"].rule_state.q, torch.full((1, 4), 2.0))
    optimizer.load_functional(state)
    assert torch.equal(optimizer.state[w]["q"], torch.full((1, 4), 2.0))
    fresh = value.init(params)
    assert fresh.leaves["w"].rule_state.q.shape == (1, 4)
    other = Ranked.pure(lr=0.1, rank=2.0)
    for take in (value.step, other.step):
        take(params, grads, (value if take == value.step else other).init(params))
    with pytest.raises(ValueError, match="q"):
        other.step(params, grads, state)


def test_gradient_release_accepts_a_state_of_such_a_shape() -> None:
    value, model = Ranked.pure(lr=0.1, rank=1.0), nn.Linear(4, 3, bias=False)
    state = value.init(dict(model.named_parameters()))
    with prepare_for_gradient_release(model, value) as handle:
        handle.state = state
        assert handle.state is state


@pytest.mark.full
def test_a_compiled_training_step_accepts_a_state_of_such_a_shape() -> None:
    value, model = Ranked.pure(lr=0.1, rank=1.0), nn.Linear(4, 3, bias=False)
    step = compiled.train_step(model, lambda output, batch: output.sum(), value)
    state, _ = step(step.init(), torch.ones(2, 4))
    assert torch.equal(state.optimizer.leaves["weight"].q, torch.ones(1, 4))


@pytest.mark.full
def test_compiled_steps_of_such_trees() -> None:
    value = Ranked.pure(lr=0.1, rank=1.0)
    params, grads = {"w": torch.ones(3, 4)}, {"w": torch.ones(3, 4)}
    state = value.init(params)
    for take in (compiled.step, compiled.step_):
        _, new = take(value, params, grads, state)
        assert torch.equal(new.leaves["w"].rule_state.q, torch.ones(1, 4))


class Started(Optimizer):
    """Only the init reads lr."""

    class State(NamedTuple):
        first: Tensor

    def init(self, p: Tensor) -> State:
        return self.State(torch.zeros_like(p) + self.lr + self.weight_decay)

    def direction(self, g: Tensor, s: State) -> tuple[Tensor, State]:
        return s.first + 0.0 * g, s


def test_an_init_reads_the_rates_of_now() -> None:
    w = weight()
    optimizer = Started([w], lr=1.0, compile=False)
    assert step(w, optimizer) == 1.0
    optimizer.param_groups[0]["lr"] = 0.5
    assert step(w, optimizer) == 0.5  # its state is that of before
    later = weight()
    optimizer.add_param_group({"params": [later]})
    for lr in (0.25, 0.125):
        optimizer.param_groups[1]["lr"] = lr
        optimizer.reset(later)
        assert step(later, optimizer) == lr * lr
    other = weight()
    assert step(other, Started([other], lr=0.5, compile=False)) == 0.25


LRS: dict[str, Any] = {
    "number": 0.5,
    "tensor": torch.tensor(0.5),
    "schedule": lambda t: 0.5 / (1 + t),
}


@pytest.mark.parametrize("kind", LRS)
def test_an_init_reads_the_rates_of_a_value(kind: str) -> None:
    lr = LRS[kind]
    value, other = Started.pure(lr=lr), Started.pure(lr=0.25).with_lr(0.75)
    params = {"w": torch.zeros(2)}
    assert value.init(params).leaves["w"].first.tolist() == [0.5, 0.5]
    assert other.init(params).leaves["w"].first.tolist() == [0.75, 0.75]
    assert other.with_lr(2.0).init(params).leaves["w"].first.tolist() == [2.0, 2.0]


def test_a_schedule_that_check_or_a_choice_reads_is_named() -> None:
    class Chooses(Optimizer):
        @choice
        def small(self) -> bool:
            return self.lr < 0.1

        def direction(self, g: Tensor) -> Tensor:
            return 2 * g if self.small else g

    class Checks(Optimizer):
        def check(self) -> None:
            if self.lr > 1:
                raise ValueError("lr must be at most 1")

        def direction(self, g: Tensor) -> Tensor:
            return g

    for cls, what in ((Chooses, "a choice"), (Checks, "check")):
        with pytest.raises(TypeError, match=f"{what} reads lr, which is a schedule"):
            cls.pure(lr=lambda t: 0.5)
        assert cls.pure(lr=0.5).lr == 0.5
