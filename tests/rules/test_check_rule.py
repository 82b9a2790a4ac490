"""`check_rule` passes rules of the package, and catches each kind of mistake by a row."""

import re
from typing import Any, NamedTuple

import pytest
import reference
import torch
from cases import CLASSES, Case
from tiers import few
from torch import Tensor

from optimi_func import Adam
from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.math import moment, power, root, second_moment
from optimi_func.core.rule import Direction, Rule, Scalar
from optimi_func.rules import Body, Optimizer, SecondMoment
from optimi_func.testing import check_rule

ROWS = [
    "repeated",
    "inputs kept",
    "results apart",
    "reference",
    "elementwise",
    "lr of 0",
    "permuted",
    "list in two",
    "parabola",
    "vmap",
    "derivatives",
    "numbers of 0",
]
ROWS += ["accumulate"]
for _name in ("float64", "float32", "bfloat16", "bfloat16 exact", "bfloat16 compact"):
    ROWS += [_name, f"{_name}, foreach", f"{_name}, kernels"]
ROWS += ["decay", "resumed", "release", "release, two parts"]


class State(NamedTuple):
    m: Tensor
    v: Tensor


class Coeffs(NamedTuple):
    beta: Scalar
    rest: Scalar
    debias: Scalar


def init(p: Tensor, kept: Any, numbers: object) -> State:
    del numbers
    return State(moment(p, kept), second_moment(p, kept))


def coeffs(t: Scalar, *, beta: Scalar) -> Coeffs:
    return Coeffs(beta, 1.0 - beta, 1.0 / (1.0 - power(beta, t)))


def direction(g: Tensor, s: State, c: Coeffs) -> Direction:
    m = c.beta * s.m + c.rest * g
    v = c.beta * s.v + c.rest * g * g
    return Direction(c.debias * m / (root(c.debias * v) + 1e-3), State(m, v))


def accumulate(c: Coeffs) -> Coeffs:
    return c._replace(beta=1.0)


def loop(params: list[Tensor], grads: list[list[Tensor]], lr: float, beta: float):
    ends = []
    for i, p in enumerate(params):
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for t, step in enumerate(grads, 1):
            m = beta * m + (1 - beta) * step[i]
            v = beta * v + (1 - beta) * step[i] ** 2
            d = m / (1 - beta**t) / ((v / (1 - beta**t)).sqrt() + 1e-3)
            p = p - lr * d
        ends.append(p)
    return ends


RIGHT: dict[str, Any] = {
    "init": init,
    "coeffs": coeffs,
    "direction": direction,
    "accumulate": accumulate,
}


def class_of(**changed: Any) -> type[BaseOptimizer]:
    made = Rule(name="tried", state=State, numbers=("beta",), **{**RIGHT, **changed})

    class Tried(Body):
        beta: float = 0.9
        weight_decay: float = 0.0

        def direction(self, g: Tensor) -> Tensor:
            return g

    tried: Any = Tried.pure
    tried.rule = made  # in the place of the one that is traced from `direction`
    return Tried


def with_direction(change: Any) -> dict[str, Any]:
    return {"direction": lambda g, s, c: change(direction(g, s, c), g, s, c)}


def in_place(g: Tensor, s: State, c: Coeffs) -> Direction:
    m = s.m.mul_(c.beta).add_(c.rest * g)
    return direction(g, s, c)._replace(d=m, state=State(m, s.v))


calls: list[int] = []


def counts(d: Direction, g: Tensor, s: State, c: Coeffs) -> Direction:
    """What a step does depends on those before it, in Python."""
    calls.append(1)
    return d._replace(d=d.d * (1 + 1e-3 * len(calls)))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "another formula": (
        with_direction(lambda d, g, s, c: d._replace(d=1.01 * d.d)),
        "reference",
    ),
    "no bias correction": (
        {"coeffs": lambda t, *, beta: Coeffs(beta, 1 - beta, 1.0)},
        "reference",
    ),
    "not elementwise": (
        with_direction(
            lambda d, g, s, c: d._replace(d=d.d / (1 + d.d.square().sum()).sqrt())
        ),
        "elementwise",
    ),
    "a state written in place": ({"direction": in_place}, "inputs kept"),
    "a counter of its own": (with_direction(counts), "vmap"),
    "a root without a derivative at 0": (
        {
            "direction": lambda g, s, c: Direction(
                g / (1e-3 + (c.beta * s.v + g * g).sqrt()),
                State(g + s.m, c.beta * s.v + g * g),
            )
        },
        "derivatives",
    ),
    "a number taken out of the graph": (
        {"coeffs": lambda t, *, beta: coeffs(t, beta=float(beta))},
        "derivatives",
    ),
    "a branch on values": (
        with_direction(
            lambda d, g, s, c: d if (s.m.abs().sum() < 1e3) else d._replace(d=g)
        ),
        "vmap",
    ),
    "decays once more for each part": ({"accumulate": lambda c: c}, "accumulate"),
    "steps that grow the loss": (
        with_direction(lambda d, g, s, c: d._replace(d=-d.d)),
        "parabola",
    ),
    "a second moment that underflows": (
        {
            "init": lambda p, kept: State(
                moment(p, kept),
                torch.zeros_like(
                    p, dtype=p.dtype if p.dtype != torch.bfloat16 else torch.float16
                ),
            ),
            "direction": lambda g, s, c: Direction(
                g / (root(c.beta * s.v + 1e-9 * g * g) + 1e-9),
                State(s.m + g, c.beta * s.v + 1e-9 * g * g),
            ),
        },
        "bfloat16",
    ),
}


def failing(**changed: Any) -> list[str]:
    """The rows that fail."""
    try:
        check_rule(class_of(**changed), loop, compile=False, beta=0.9, steps=6)
    except AssertionError as error:
        first, *rows = str(error).split("\n")
        assert first == f"Tried, {len(rows)} rows:"
        return [row.split(": ")[0] for row in rows]
    return []


def test_a_right_rule_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing() == []
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["row", "error", "allowed"]
    assert [row[:26].strip() for row in rows] == [x for x in ROWS if "kernels" not in x]
    assert not any("wrong" in row for row in rows)


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_caught(
    name: str, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, row = MISTAKES[name]
    found = failing(**changed)
    assert row in found
    out = capsys.readouterr().out
    assert [x[:26].strip() for x in out.splitlines() if x.endswith("  wrong")] == found


class Kept(Optimizer):
    """Steps that leave the mean square of a tensor as it is."""

    def direction(self, g: Tensor, s: Any):
        return g, s

    def after(self, mean: Any, x: Tensor, u: Tensor, s: Any):
        y = x + u
        return ((mean(x * x) + 1e-6) / (mean(y * y) + 1e-6)) ** 0.5 * y - x, s


def test_means_after_the_direction_have_no_row_of_halves(
    small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    check_rule(Kept, compile=False)
    assert "elementwise" not in capsys.readouterr().out


def test_the_message_names_the_row_and_the_largest_difference(small: None) -> None:
    wrong = class_of(**MISTAKES["another formula"][0])
    with pytest.raises(
        AssertionError, match=r"Tried, 1 rows:\nreference: error 1\.0e-02 ab"
    ) as e:
        check_rule(wrong, loop, compile=False, beta=0.9, steps=6)
    assert "largest difference 0.00" in str(e.value)
    raising = class_of(**MISTAKES["a branch on values"][0])
    with pytest.raises(AssertionError, match=r"vmap: \w+: "):
        check_rule(raising, compile=False, beta=0.9, steps=6)


def test_hyperparameters_and_steps_change_what_is_tried(small: None) -> None:
    check_rule(class_of(), loop, compile=False, lr=0.01, beta=0.5, steps=6)
    with pytest.raises(AssertionError, match="reference: error"):
        check_rule(
            class_of(), lambda p, g, lr, beta: loop(p, g, lr, 0.8), compile=False, beta=0.5
        )
    with pytest.raises(ValueError, match="steps=5: allowed are whole numbers from 6"):
        check_rule(class_of(), steps=5)
    with pytest.raises(ValueError, match=r"Invalid learning rate: lr=-1"):
        check_rule(class_of(), lr=-1.0)


@pytest.mark.parametrize("name", few(CLASSES, ("adamw", "schedule_free_adamw"), str))
def test_rules_of_the_package_pass(name: str, small: None) -> None:
    """Options and bounds of its own are beside its loop."""
    loop, value = getattr(reference, name), Case(name).functional()

    def paper(params: list[Tensor], grads: list[list[Tensor]], **options: Any) -> Any:
        lists = [(p, gs) for p, *gs in zip(params, *grads)]
        # A loop need not know what a tensor without elements is.
        return [loop(p, gs, **options)[-1] if p.numel() else p for p, gs in lists]

    # Loops are over one parameter, the first of a list.
    alone = value.rule.join is None and not value.rule.draws
    options = {"steps": 6, **getattr(loop, "check", {})}
    check_rule(CLASSES[name], paper if alone else None, compile=False, **options)


def test_allowed_sets_the_bounds_of_rows(
    small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = class_of(**MISTAKES["another formula"][0])
    options: dict[str, Any] = {"compile": False, "beta": 0.9, "steps": 6}
    check_rule(wrong, loop, allowed={"reference": 0.05}, **options)
    assert re.search(r"reference +1\.0e-02 +5e-02\n", capsys.readouterr().out)
    with pytest.raises(AssertionError, match=r"^Tried, 2 rows:\nreference: .*[0-9]\n") as e:
        check_rule(wrong, loop, allowed={"bfloat16": 0.0}, **options)
    ends = (
        r"\nbfloat16: error .* above 0e\+00, .* \(if the direction jumps, raise allowed=\)$"
    )
    assert re.search(ends, str(e.value))
    with pytest.raises(
        ValueError, match=r"allowed has \['bf16'\]: the rows are repeated, "
    ):
        check_rule(wrong, loop, allowed={"bf16": 1.0}, **options)


class Scaled(Optimizer):
    def direction(self, g: Tensor, loss: Tensor):
        return g * loss


def test_extras_that_are_missing_are_named_at_once(
    small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TypeError, match="Scaled takes loss: give check_rule extras=, "):
        check_rule(Scaled)
    assert capsys.readouterr().out == ""
    given = lambda g: {"loss": torch.tensor(0.5).double()}  # noqa: E731
    check_rule(Scaled, extras=given, steps=6, compile=False)


class Own(Optimizer):
    beta: float = 0.9

    class State(NamedTuple):
        m: Tensor
        v: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b = self.beta
        m, v = b * s.m + (1 - b) * g, b * s.v + (1 - b) * g * g
        d = m / (1 - b**t) / ((v / (1 - b**t)).sqrt() + 1e-3)
        return d, self.State(m, v)

    def accumulate(self, g: Tensor, s: State, t: float):
        b = self.beta
        m, v = s.m + (1 - b) * g, s.v + (1 - b) * g * g
        d = m / (1 - b**t) / ((v / (1 - b**t)).sqrt() + 1e-3)
        return d, self.State(m, v)


class Twice(Own):
    """Its state decays once more for each part of a gradient."""

    def accumulate(self, g: Tensor, s: Own.State, t: float):
        return self.direction(g, s, t)


def test_class_bodies_are_checked(small: None) -> None:
    check_rule(Own, loop, compile=False, beta=0.9, steps=6)
    with pytest.raises(AssertionError, match=r"^Twice, 1 rows:\naccumulate: error"):
        check_rule(Twice, loop, compile=False, beta=0.9, steps=6)


@pytest.mark.parametrize(
    ("factors", "rows"),
    [
        (lambda count: [2.0] + [1.0] * (count - 1), {"permuted", "list in two"}),
        (lambda count: [1.0 / count] * count, {"list in two"}),
    ],
    ids=["first", "count"],
)
def test_a_parameter_moves_by_itself(
    factors: Any, rows: set[str], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its place in the list nor the number of the others changes its step."""
    step = Own.pure.step

    def placed(self: Any, params: Any, grads: Any, state: Any) -> Any:
        grads = [x * g for x, g in zip(factors(len(grads)), grads)]
        return step(self, params, grads, state)

    monkeypatch.setattr(Own.pure, "step", placed)
    with pytest.raises(AssertionError) as error:
        check_rule(Own, compile=False, beta=0.9, steps=6)
    found = {row.split(": ")[0] for row in str(error.value).split("\n")}
    assert {"permuted", "list in two"} & found == rows


class Zeroed(Optimizer):
    """Its coefficients branch on a number that is no tensor."""

    beta: float = 0.9

    class State(NamedTuple):
        m: Tensor

    def coeffs(self, t: float) -> dict[str, Any]:
        plain = isinstance(self.beta, float) and self.beta == 0.0
        return {"factor": 2.0 if plain else 1.0}

    def direction(self, g: Tensor, s: State, c: Any):
        m = self.beta * s.m + (1 - self.beta) * g
        return c["factor"] * m, self.State(m)


class Shrinks(Own):
    """Its class decays, and its value does not."""

    def step(self, *args: Any, **more: Any) -> Any:
        super().step(*args, **more)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"] if group["weight_decay"] else ():
                    p.mul_(0.9)


class Loses(Own):
    """A resumed run begins one of its moments anew."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for entry in self.state.values():
            entry["v"].zero_()


class Spoils(Own):
    """One of them is NaN after each step of a resumed run."""

    resumed = False

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.resumed = True

    def step(self, *args: Any, **more: Any) -> Any:
        super().step(*args, **more)
        for entry in self.state.values() if self.resumed else ():
            entry["v"].fill_(float("nan"))


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Zeroed, r"(?m)^numbers of 0: .*, most in beta$"),
        (Shrinks, r"^Shrinks, 1 rows:\ndecay: error"),
        (Loses, r"^Loses, 1 rows:\nresumed: .*, most in v$"),
        (Spoils, r"^Spoils, 1 rows:\nresumed: error nan .*, most in v$"),
    ],
)
def test_the_field_or_the_number_is_named(cls: Any, said: str, small: None) -> None:
    with pytest.raises(AssertionError, match=said):
        check_rule(cls, compile=False, beta=0.9, steps=6)


class Still(Optimizer):
    def direction(self, g: Tensor):
        return 0.0 * g


class Replaced(Optimizer):
    def direction(self, g: Tensor, norm: Tensor):
        return g

    def after(self, x: Tensor, u: Tensor, norm: Tensor):
        return -0.01 * x / norm


def test_a_rule_that_moves_nothing_is_named_once(small: None) -> None:
    with pytest.raises(AssertionError, match=r"^Still, 1 rows:\nrepeated: no parameter"):
        check_rule(Still, compile=False, steps=6)


def test_extras_of_all_gradients_and_no_decay(
    small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(grads: list[Tensor]) -> dict[str, Any]:
        return {"norm": 1.0 + torch.stack([g.norm() for g in grads]).norm()}

    with pytest.raises(AssertionError, match=r"^Replaced, 1 rows:\nlr of 0: error"):
        check_rule(Replaced, compile=False, steps=6, extras=given)
    allowed = {"lr of 0": 0.1}
    check_rule(Replaced, compile=False, steps=6, extras=given, allowed=allowed)
    rows = [x[:26].strip() for x in capsys.readouterr().out.splitlines()]
    assert "elementwise" in rows and "decay" not in rows


def test_a_derivative_names_its_number(small: None) -> None:
    cut = class_of(coeffs=lambda t, *, beta: coeffs(t, beta=float(beta)))
    with pytest.raises(AssertionError, match=r"derivatives: .*most in beta \(if"):
        check_rule(cut, compile=False, steps=6)


def adam(params: list[Tensor], grads: list[list[Tensor]], lr: float) -> list[Tensor]:
    for i, p in enumerate(params):
        m = v = torch.zeros_like(p)
        for t, step in enumerate(grads, 1):
            m, v = 0.9 * m + 0.1 * step[i], 0.999 * v + 0.001 * step[i] ** 2
            p = p - lr * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        params[i] = p
    return params


def test_classes_of_torch_are_checked(
    small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    check_rule(torch.optim.Adam, adam, steps=6)
    rows = [x[:26].strip() for x in capsys.readouterr().out.splitlines()[1:]]
    assert rows == ["repeated", "reference", "foreach", "float32", "resumed"]
    with pytest.raises(AssertionError, match=r"^AdamW, 1 rows:\nreference: error"):
        check_rule(torch.optim.AdamW, adam, steps=6)


class Small(Optimizer):
    """It moves by less than a spacing of bfloat16 a step."""

    def direction(self, g: Tensor):
        return 0.02 * g


class Divided(Optimizer):
    def direction(self, g: Tensor):
        return g * self.lr / self.lr


class Names(Optimizer):
    steps: float = 1.0
    grads: float = 1.0
    start: float = 1.0

    def direction(self, g: Tensor):
        return self.steps * self.grads * self.start * g


def test_rows_in_bfloat16_compare_moves_with_compensations(small: None) -> None:
    check_rule(Small, compile=False, lr=0.1, steps=6)


def test_nan_at_an_lr_of_0_is_caught(small: None) -> None:
    with pytest.raises(AssertionError, match=r"1 rows:\nlr of 0: error nan "):
        check_rule(Divided, compile=False, steps=6)


def test_hyperparameters_may_have_the_names_of_arguments(small: None) -> None:
    def scaled(ps: Any, gs: Any, **hyper: float) -> list[Tensor]:
        factor = hyper["lr"] * hyper["steps"] * hyper["grads"] * hyper["start"]
        return [p - factor * sum(g[i] for g in gs) for i, p in enumerate(ps)]

    hyper = {"steps": 2.0, "grads": 0.5, "start": 3.0}
    check_rule(Names, scaled, compile=False, hyper=hyper, steps=6)


@pytest.mark.full
def test_kernels_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    check_rule(Adam, betas=(0.8, 0.9), weight_decay=0.1)
    rows = [row[:26].strip() for row in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if "kernels" in row] == [x for x in ROWS if "kernels" in x]
