"""The door of all optimizers: fields, choices, subclasses, mixins, functions of a class."""

import inspect
import math
from abc import ABC, abstractmethod
from collections import namedtuple
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from cases import DEFAULTS, OPTIONS, Case
from torch import Tensor

import optimi_func
from optimi_func import Adafactor, AdamW, functional, optim, prepare_for_gradient_release
from optimi_func.core.tree import LeafState, TreeState
from optimi_func.optimizers import adam as adam_file
from optimi_func.rules import (
    Betas,
    Body,
    Float,
    Optimizer,
    choice,
    functions,
    root,
    rounded,
    where,
)
from optimi_func.rules.methods import Methods

BODIES = {
    name: getattr(functional, name)
    for name in sorted(functional.__dict__)
    if hasattr(getattr(functional, name), "owner")
}
OF_BODIES = [case for case in (*DEFAULTS, *OPTIONS) if case.name in BODIES]


class Decaying(Body):
    weight_decay: Float = Float(0.0)


class Momentum(Decaying, name="momentum"):
    """SGD with a choice, a number of bounds, and an option of the decay alone."""

    betas: Betas = Betas(0.5, 0.75)
    momentum: Float = Float(0.9, "momentum factor", below=1.0)
    dampening: Float = Float(0.25, "", bool, type(None))
    decouple_wd: bool = False

    @choice
    def averages(self) -> bool:
        """True if there is a momentum."""
        return callable(self.momentum) or bool(self.momentum != 0)

    class Buffer(NamedTuple):
        buffer: Tensor

    class Nothing(NamedTuple):
        pass

    @property
    def State(self) -> Any:
        return self.Buffer if self.averages else self.Nothing

    def usual_decay(self):
        return "decoupled" if self.decouple_wd else "l2"

    def direction(self, g: Tensor, s: Any, t: float):
        if not self.averages:
            return g, self.State()
        tau = self.dampening
        if tau is None or isinstance(tau, bool):
            tau = 1 - self.momentum if tau else 0.0
        b = self.momentum * s.buffer + where(t == 1, 1.0, 1.0 - tau) * g
        return b, self.State(b)

    def accumulate(self, g: Tensor, s: Any, t: float):
        if not self.averages:
            return g, self.State()
        b = 1.0 * s.buffer + where(t == 1, 1.0, 1.0 - self.dampening) * g
        return b, self.State(b)


momentum, momentum_init, momentum_step = functions(Momentum)


def test_numbers_are_those_that_methods_read() -> None:
    assert momentum(lr=0.1).rule.numbers == ("momentum", "dampening")
    assert momentum(lr=0.1, dampening=True).rule.numbers == ("momentum",)
    assert momentum(lr=0.1, momentum=0.0).rule.numbers == ()
    assert momentum(lr=0.1, momentum=lambda step: 0.0 * step).rule.state._fields
    assert not momentum(lr=0.1, momentum=0.0).rule.state._fields


def test_a_rule_is_shared_by_options_that_no_method_reads() -> None:
    rule = momentum(lr=0.1).rule
    assert momentum(lr=0.1, decouple_wd=True).rule is rule
    assert momentum(lr=0.1, dampening=0.5).rule is rule
    assert momentum(lr=0.1, dampening=False).rule is not rule
    assert momentum(lr=0.1, decouple_wd=True).decay == "decoupled"
    # adam and adamw differ in their decay alone.
    assert optimi_func.adam(lr=0.1).rule.digest == optimi_func.adamw(lr=0.1).rule.digest


def test_the_init_takes_what_the_state_depends_on() -> None:
    assert [*inspect.signature(momentum_init).parameters][:2] == ["params", "momentum"]
    params = {"w": torch.ones(2)}
    assert not momentum_init(params, momentum=0.0).leaves["w"].rule_state
    assert momentum_init(params).leaves["w"].buffer.tolist() == [0.0, 0.0]
    assert [*inspect.signature(optimi_func.adam_init).parameters][1] == "amsgrad"


def test_fields_are_no_attributes_of_an_optimizer() -> None:
    optimizer = Momentum([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(AttributeError, match="'Momentum' object has no attribute 'betas'"):
        optimizer.betas  # noqa: B018
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)


def test_a_subclass_that_extends_a_step_is_the_same_optimizer() -> None:
    class Counting(optimi_func.AdamW):
        steps = 0

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1, compile=False)

        def step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().step(*args, **kwargs)

    mine, theirs = (x(lr=0.1).rule for x in (Counting.factory, optimi_func.adamw))
    assert mine.digest == theirs.digest
    w = torch.ones(2, requires_grad=True)
    optimizer = Counting([w])
    optimizer.step(w.sum().backward)
    assert optimizer.steps == 1 and w.detach().max() < 1.0


class Twice(Decaying, name="twice"):
    """Its accumulate takes the gradient twice."""

    class State(NamedTuple):
        buffer: Tensor

    def direction(self, g: Tensor, s: Any):
        return s.buffer + g, self.State(s.buffer + g)

    def accumulate(self, g: Tensor, s: Any):
        return s.buffer + 2 * g, self.State(s.buffer + g)


def test_a_further_part_has_the_scalars_of_the_first_and_a_kernel_of_its_own() -> None:
    for value in optimi_func.lion(lr=0.1), optimi_func.adamw(lr=0.1), Twice.pure(lr=0.1):
        coeffs, _ = value.advance(2.0, value.rule.running())
        assert "further" not in coeffs._fields  # a usual step packs numbers alone
        again = value.rule.accumulate(coeffs)
        assert again.further is True and [*again][: len(coeffs)] == [*coeffs]


@pytest.mark.parametrize("cls", [Momentum, Twice], ids=lambda x: x.__name__)
def test_parts_of_a_gradient_in_the_state(cls: Any) -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = cls(layer.parameters(), lr=1.0, gradient_release=True, compile=False)
    options: Any = {"accumulation": "states", "accumulation_steps": 2}
    before = layer.weight.detach().clone()
    with prepare_for_gradient_release(layer, optimizer, **options):
        for x in (1.0, 3.0):
            layer(torch.full((1, 2), x)).sum().backward()
    moved = before - layer.weight.detach()
    torch.testing.assert_close(moved, torch.full((1, 2), 4.0 if cls is Momentum else 7.0))


@pytest.mark.parametrize("case", OF_BODIES, ids=lambda x: x.id)
@pytest.mark.parametrize("kept", [None, 0.0, 0.9])
def test_plain_coefficients_are_those_of_tensors_work(case: Case, kept: Any) -> None:
    """A function of floats, and the general one, to the bit."""
    value, usual = case.functional(0.1), inspect.signature(case.factory).parameters
    for name in ("betas", "momentum") if kept is not None else ():
        if name in usual:
            new = (kept,) * len(usual[name].default) if name == "betas" else kept
            try:
                value = replace(value, **{name: new})
            except ValueError:  # Schedule-Free takes none of 0
                return
    assert value._plain is not None
    running = value.rule.running()
    for t in (1.0, 2.0, 7.0, 5000.0):
        found = value.advance(t, running)
        assert found == value.rule.advance(t, 0.1, running, value.numbers)
        assert {*map(type, chain(*found))} <= {float, tuple, bool}
        running = found[1]


def test_plain_coefficients_leave_to_tensors_where_python_raises() -> None:
    class Inverse(Decaying, name="inverse"):
        power: Float = Float(0.5)

        def direction(self, g: Tensor, t: float):
            return 1 / (t - 1) ** self.power * g

    value = Inverse.pure(lr=0.1)
    assert value.advance(1.0, ())[0] == (math.inf,)
    assert value.advance(5.0, ())[0] == (0.5,)


def test_hyperparameters_may_have_any_name() -> None:
    class Named(Decaying, name="named"):
        pow: Float = Float(2.0)
        x0: Float = Float(0.5)
        kind: Float = Float(0.25)
        r: Float = Float(3.0)

        class Running(NamedTuple):
            total: float = 0.0

        def direction(self, g: Tensor, t: float, r: Any):
            total = r.total + self.lr
            return (t**self.pow + self.x0 + self.kind) * self.r * g, self.Running(total)

        def after(self, x: Tensor, u: Tensor, s: Any, r: Any):
            return r.total * u, s

    value = Named.pure(lr=0.5)
    before = value.rule.running(2.0)
    for found in (
        value.advance(3.0, before),
        value.rule.advance(3.0, 0.5, before, value.numbers),
    ):
        coeffs, after = found
        assert {*coeffs} == {(9.0 + 0.75) * 3.0, 2.0} and after == (2.5,)


def test_equal_scalar_work_is_done_once() -> None:
    class Twice(Decaying, name="twice"):
        beta: Float = Float(0.5)

        def direction(self, g: Tensor, t: float):
            return (
                (1 - self.beta**t) * g + g / (1 - self.beta**t) + (1.0 - self.beta**t) * g
            )

    made = Methods(Twice, {"beta": 0.5}, {})
    assert len(made.rule().coeffs(1.0, beta=0.5)) == 2  # 1 and 1.0 are not the same
    scalars = made.trace.code.partition("def coeffs")[2]
    assert scalars.count(" = ") == 3 and scalars.count("power") == 1, scalars


class Bounded(Decaying, name="bounded"):
    """SGD with steps, decay included, of a root mean square of at most 0.125."""

    def direction(self, g: Tensor):
        return g

    def after(self, mean: Any, u: Tensor):
        return u / (root(mean(u * u)) / 0.125).clamp_min(1.0)


@pytest.mark.parametrize("how", [{}, {"cautious": True}, {"cautious_decay": True}])
def test_means_of_the_update_scale_all_of_it(how: dict[str, Any]) -> None:
    x, g = torch.tensor([3.0, -4.0, 1.0]).double(), torch.tensor([2.0, 1.0, -4.0]).double()
    value = Bounded.pure(lr=0.5, weight_decay=0.25, **how)
    usual = optimi_func.sgd(lr=0.5, weight_decay=0.25, decouple_wd=True, **how)
    want = usual.step(x, g, usual.init(x))[0] - x
    found = value.step(x, g, value.init(x))[0] - x
    assert found.square().mean().sqrt().item() == pytest.approx(0.125)
    torch.testing.assert_close(found / found.norm(), want / want.norm())
    own: dict[str, Any] = {"weight_decay": 0.25, "compile": False, **how}
    optimizer = Bounded([w := x.clone().requires_grad_()], lr=0.5, **own)
    w.grad = g
    optimizer.step()
    torch.testing.assert_close(w.detach() - x, found)
    none = torch.zeros(3)
    assert not value.step(none, none, value.init(none))[0].any()


class Pulled(Decaying, name="pulled"):
    """SGD that goes back to its start at every k-th step."""

    k: Float = Float(3.0, least=1.0)

    class State(NamedTuple):
        start: Tensor

    def init(self, p: Tensor) -> Any:
        return self.State(p)

    def direction(self, g: Tensor, s: State):
        return g, s

    def due(self, t: float):
        return t % self.k == 0

    def after(self, x: Tensor, u: Tensor, s: State):
        return s.start - x, s


def test_after_acts_at_the_steps_that_are_due() -> None:
    value = Pulled.pure(lr=0.5)
    w, many = torch.ones(2), torch.ones(3, 2)
    state, states = value.init(w), torch.vmap(value.init)(many)
    capturable = torch.ones(2, requires_grad=True)
    optimizer = Pulled([capturable], lr=0.5, capturable=True, compile=False)
    for t, want in (1.0, 0.5), (2.0, 0.0), (3.0, 1.0), (4.0, 0.5):
        coeffs, _ = value.advance(t, ())
        assert [x for x in coeffs if isinstance(x, bool)] == [t == 3.0]
        w, state = value.step(w, torch.ones(2), state)
        many, states = torch.vmap(value.step)(many, torch.ones(3, 2), states)
        capturable.grad = torch.ones(2)
        optimizer.step()
        assert {*w.tolist(), *many.flatten().tolist(), *capturable.tolist()} == {want}


def test_due_is_a_condition_of_scalars() -> None:
    class Odd(Pulled):
        k: Float = Float(2.0)

        def due(self, t: float):
            return t % self.k

    with pytest.raises(
        TypeError, match=r"Odd\.due returned .*: allowed is a condition on t"
    ):
        Odd.pure(lr=0.1)


def test_rounded_work_is_left_to_the_tensors() -> None:
    class Product(Decaying, name="product"):
        factor: Float = Float(0.1)
        other: Float = Float(0.3)

        def direction(self, g: Tensor):
            return rounded(self.factor) * self.other * g

    coeffs, _ = Product.pure(lr=0.1).advance(1.0, ())
    assert coeffs == (0.1, 0.3)


@pytest.mark.parametrize("case", OF_BODIES, ids=lambda x: x.id)
def test_methods_of_the_package_are_tried_here(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first use they are not, which would take longer."""
    value: Any = case.functional()
    for name, x in ("at_definition", True), ("_rules", {}), ("_known", []):
        monkeypatch.setattr(value.owner, name, x)
    rule = value.owner.rule_for(value.owner.statics_of(value))
    assert rule is not value.rule and rule.digest == value.rule.digest
    assert rule.name == case.name


def test_trees_that_were_saved_by_other_names_of_the_state() -> None:
    assert adam_file.State is optimi_func.Adam.Plain
    one, kind = torch.ones(2), namedtuple("State", ("exp_avg",))
    state = TreeState(torch.ones(()), LeafState(kind(one), None))
    found, state = optimi_func.lion_step(one, one, state, lr=0.1)
    assert found.tolist() == pytest.approx([0.9, 0.9])
    assert type(state.leaves.rule_state) is kind


@pytest.mark.full
def test_a_rule_that_a_graph_meets_first_is_traced_then() -> None:
    class Late(Decaying, name="late"):
        nesterov: bool = False

        def direction(self, g: Tensor):
            return 2 * g if self.nesterov else g

    _, late_init, late_step = functions(Late)
    params = {"w": torch.ones(2)}
    state = late_init(params)

    @torch.compile(backend="eager", fullgraph=True)
    def step(params: Any, state: Any) -> Any:
        return late_step(params, params, state, lr=0.25, nesterov=True)

    assert len(Late._rules) == 1
    assert step(params, state)[0]["w"].tolist() == [0.5, 0.5]
    assert step(params, state)[0]["w"].tolist() == [0.5, 0.5]
    assert len(Late._rules) == 2


class Scaled(Optimizer):
    beta: float = 0.5
    scale = 2.0
    kind: ClassVar[float] = 1.0

    @property
    def offset(self) -> float:
        return 1.0

    def look(self, g: Tensor) -> Tensor:
        return g

    def direction(self, g: Tensor):
        factor = self.scale * self.kind * self.offset * getattr(self, "more", 1.0)
        return self.look(g) * factor * self.beta


class Other(Optimizer):
    gamma: float = 3.0

    def direction(self, g: Tensor):
        return self.gamma * g


class Looks:
    def look(self, g: Tensor) -> Tensor:
        return 11 * g


class Halves:
    beta = 0.25


class Doubles:
    def after(self, x: Tensor, u: Tensor) -> Tensor:
        return 2 * u


class Both(Scaled, Other):
    def look(self, g: Tensor) -> Tensor:
        return self.gamma * g


class Abstract(Optimizer, ABC):
    @abstractmethod
    def look(self, g: Tensor) -> Tensor: ...


class Concrete(Abstract):
    def look(self, g: Tensor) -> Tensor:
        return 17 * g

    def direction(self, g: Tensor):
        return self.look(g)


def doubled(cls: Any) -> Any:
    before = cls.direction
    cls.direction = lambda self, g: 2 * before(self, g)
    return cls


def directed(cls: Any) -> Any:
    cls.direction = lambda self, g: self.other * g
    return cls


@directed
class Directed(Optimizer):
    other: float = 19.0


def over(*bases: type, **body: Any) -> Any:
    return type("Written", bases, body)


STEPS: dict[str, tuple[Any, float]] = {  # classes and how far they step
    "as it is": (Scaled, 1.0),
    "a helper": (over(Scaled, look=lambda self, g: 3 * g), 3.0),
    "a constant": (over(Scaled, scale=4.0), 2.0),
    "a ClassVar": (over(Scaled, kind=5.0, __annotations__={"kind": ClassVar[float]}), 5.0),
    "a property": (over(Scaled, offset=property(lambda self: 7.0)), 7.0),
    "a new attribute": (over(Scaled, more=13.0), 13.0),
    "a mixin": (over(Looks, Scaled), 11.0),
    "a default of a mixin": (over(Halves, Scaled), 0.5),
    "a method of a mixin": (over(Doubles, Scaled), 2.0),
    "two rules": (Both, 3.0),
    "an abstract base": (Concrete, 17.0),
    "a decorator": (doubled(over(Scaled)), 2.0),
    "a decorator that writes the direction": (Directed, 19.0),
}


def moved(cls: Any, **options: Any) -> float:
    """How far an element with the gradient 1 moves, by the class and by its value."""
    p, w = torch.zeros(2), torch.zeros(2, requires_grad=True)
    value = cls.pure(lr=1.0, **options)
    w.grad = torch.ones(2)
    cls([w], lr=1.0, compile=False, **options).step()
    assert w.tolist() == value.step(p, torch.ones(2), value.init(p))[0].tolist()
    return -w[0].item()


@pytest.mark.parametrize("written", STEPS)
def test_a_class_steps_by_what_it_computes(written: str) -> None:
    cls, far = STEPS[written]
    assert moved(cls) == far


def test_fields_of_all_bases_are_arguments() -> None:
    assert moved(Both, gamma=1.0, beta=0.25) == 0.5
    assert moved(over(Halves, Scaled), beta=1.0) == 2.0


def test_a_mixin_may_check() -> None:
    class Checks:
        beta: float

        def check(self) -> None:
            if self.beta > 0.6:
                raise ValueError("beta is above 0.6")

    cls: Any = type("Checked", (Checks, Scaled), {})
    assert moved(cls) == 1.0
    with pytest.raises(ValueError, match=r"beta is above 0\.6"):
        cls.pure(lr=1.0, beta=0.75)


def test_a_mixin_may_choose() -> None:
    class Chosen(Scaled):
        @choice
        def large(self) -> bool:
            return bool(self.beta > 0.6)

        def look(self, g: Tensor) -> Tensor:
            return 2 * g if self.large else g

    class Never(Chosen):
        large: ClassVar[Any] = False

    assert moved(Chosen, beta=1.0) == 4.0 and moved(Never, beta=1.0) == 2.0


def test_equal_rules_share_kernels() -> None:
    class Same(Scaled):
        unused = 1.0

    class Logs(Adafactor):
        log: ClassVar[list[str]] = []

    for one, other in (Same, Scaled), (Logs, Adafactor):
        rules: Any = [x.factory(lr=0.1).rule for x in (one, other)]
        assert rules[0].digest == rules[1].digest != ""
        one, other = (getattr(rule.whole, "digest", "") for rule in rules)
        assert one == other
    assert optim.SGD.factory is optimi_func.sgd  # type: ignore


def test_an_assignment_that_no_rule_sees_raises() -> None:
    class Used(Scaled):
        scale = 1.0

    class Base(Scaled):
        scale = 1.0

    class Sub(Base):
        pass

    Used.scale = 6.0  # as a decorator does
    assert moved(Used) == 3.0
    assert moved(Sub) == 0.5
    for cls, name in (Used, "scale"), (Used, "anything"), (Base, "look"), (AdamW, "moves"):
        before = dict(vars(cls))
        with pytest.raises(TypeError, match=rf"{cls.__name__}\.{name} = \.\.\. after"):
            setattr(cls, name, 2.0)
        assert dict(vars(cls)) == before
    Used.step = Used.step  # type: ignore[method-assign]  # as torch's hooks do


def test_a_subclass_of_an_optimizer_is_tried_as_any_rule() -> None:
    class Normed(AdamW):
        def direction(self, g: Tensor, s: Any):
            return g / g.norm(), s

    with pytest.raises(TypeError, match=r"Normed\.direction .* is not elementwise"):
        Normed.pure(lr=0.1)


def test_a_constructor_of_the_users_stays() -> None:
    class Own(Optimizer):
        beta: float = 0.5

        def __init__(self, params: Any, rate: float, beta: float = 0.25) -> None:
            super().__init__(params, lr=rate, beta=beta, compile=False)  # type: ignore
            self.made = True

        def direction(self, g: Tensor):
            return self.beta * g

    class Further(Own):
        helper = 1.0

    class Torchs(optim.SGD):
        helper = 1.0

    w = torch.zeros(1, requires_grad=True)
    for cls in Own, Further:
        optimizer: Any = cls([w], 0.5)
        group = optimizer.param_groups[0]
        assert optimizer.made and (group["lr"], group["beta"]) == (0.5, 0.25)
    group = Torchs([w], 0.1, 0.9, 0, 0.5).param_groups[0]
    assert group["weight_decay"] == 0.5
