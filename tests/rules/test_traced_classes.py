"""A rule is what its class computes: subclasses, mixins, constants, decorators."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import optimi_func
from optimi_func import Adafactor, AdamW, optim
from optimi_func.rules import Optimizer, choice


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


class Helper(Scaled):
    def look(self, g: Tensor) -> Tensor:
        return 3 * g


class Constant(Scaled):
    scale = 4.0


class Kind(Scaled):
    kind: ClassVar[float] = 5.0


class Offset(Scaled):
    @property
    def offset(self) -> float:
        return 7.0


class More(Scaled):
    more = 13.0


class Mixed(Looks, Scaled):
    pass


class Defaults(Halves, Scaled):
    pass


class After(Doubles, Scaled):
    pass


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


@doubled
class Decorated(Scaled):
    pass


def directed(cls: Any) -> Any:
    cls.direction = lambda self, g: self.other * g
    return cls


@directed
class Directed(Optimizer):
    other: float = 19.0


FACTORS = {
    Scaled: 1.0,
    Helper: 3.0,
    Constant: 2.0,
    Kind: 5.0,
    Offset: 7.0,
    More: 13.0,
    Mixed: 11.0,
    Defaults: 0.5,
    After: 2.0,
    Both: 3.0,
    Concrete: 17.0,
    Decorated: 2.0,
    Directed: 19.0,
}


def moved(cls: Any, **options: Any) -> float:
    """How far an element with the gradient 1 moves, by the class and by its value."""
    p, w = torch.zeros(2), torch.zeros(2, requires_grad=True)
    value = cls.pure(lr=1.0, **options)
    w.grad = torch.ones(2)
    cls([w], lr=1.0, compile=False, **options).step()
    assert w.tolist() == value.step(p, torch.ones(2), value.init(p))[0].tolist()
    return -w[0].item()


@pytest.mark.parametrize("cls", FACTORS, ids=lambda x: x.__name__)
def test_a_class_steps_by_what_it_computes(cls: Any) -> None:
    assert moved(cls) == FACTORS[cls]


def test_fields_of_all_bases_are_arguments() -> None:
    assert moved(Both, gamma=1.0, beta=0.25) == 0.5
    assert moved(Defaults, beta=1.0) == 2.0
    with pytest.raises(TypeError, match=r"Both has no argument 'gama': did you .*'gamma'"):
        Both([torch.zeros(1)], lr=1.0, gama=1.0)  # type: ignore


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
