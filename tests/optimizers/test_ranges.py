"""Numbers out of range are refused by every rule, option and way to set them.

What an option takes is said here, and not read from the package: a number is finite and at
least 0, unless TAKES has other values. A new optimizer is covered by itself, and needs a
line only if one of its options takes more or less.
"""

import math
from typing import Any

import pytest
import torch
from cases import CLASSES, NAMES
from refusals import refused

# Prodigy's is a subclass with other defaults, whose numbers have the same ranges.
RULES: dict[str, Any] = CLASSES

PROBES = (-1.0, 0.0, 0.5, 1.0, 1.5, math.inf)
USUAL = (0.0, 0.5, 1.0, 1.5)
SHARE = (0.0, 0.5)  # in [0, 1)
INSIDE = (0.5,)  # in (0, 1)
PART = (0.0, 0.5, 1.0)  # in [0, 1]
# The probes that an option takes, also of one rule or of one number of several.
TAKES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("betas", "momentum", "beta1", "beta3", "row_beta"), SHARE),
    **dict.fromkeys(("schedule_free_adamw.betas[0]", "schedule_free_sgd.momentum"), INSIDE),
    **dict.fromkeys(("ranger.alpha", "rho", "precond_update_prob"), PART),
    "schedule_free_radam.betas[0]": INSIDE,
    "rmsprop.momentum": USUAL,
    "element_beta": SHARE,
    "normuon.element_beta": (),  # its rows have means of their own
    "etas[0]": INSIDE,
    "etas[1]": (1.5,),
    "step_sizes": (*USUAL, math.inf),
    "clip_threshold": (0.5, 1.0, 1.5, math.inf),
    "growth_rate": (1.0, 1.5, math.inf),
    **dict.fromkeys(("d0", "d_coef"), USUAL[1:]),
    "k": (1.0,),  # 1.5 is no whole number
    "dampening": (-1.0, *USUAL),
    "t0": (-1.0, *USUAL, math.inf),
    "decay_rate": (-1.0, 0.0),
    "shampoo_beta": (-1.0, *SHARE),
}
# What is no number. The classes say it of trees; the pure rates may be some.
NO_NUMBERS = ("a", None, 1j, [0.1], {"a": 0.5}, True)
NONE = ("max_lr", "mars", "beta1", "beta3", "element_beta")  # None is their default
ROWS = [
    (name, field.name)
    for name in NAMES
    for field in RULES[name]._arguments.values()
    if field.number or field.name == "max_lr"
] + [(name, "lr") for name in ("adan", "lion")]


def wrong(name: str, option: str, place: str) -> list[tuple[Any, type[Exception]]]:
    """The values that an option refuses, each with the error that it raises."""
    keys = (f"{name}.{place}", place, f"{name}.{option}", option)
    takes = next((TAKES[k] for k in keys if k in TAKES), USUAL)
    bad: list[Any] = [x for x in (*PROBES, math.nan) if x not in takes]
    other = [x for x in NO_NUMBERS if not (x is None and option in NONE)]
    other = [x for x in other if not (x is True and option == "dampening")]
    return [*[(x, ValueError) for x in bad], *[(x, TypeError) for x in other]]


@pytest.mark.parametrize(("name", "option"), ROWS)
def test_a_value_out_of_range_is_refused_by_name(name: str, option: str) -> None:
    cls, p = RULES[name], torch.ones(2, 2, requires_grad=True)
    p.grad = torch.ones(2, 2)
    optimizer = cls([p], lr=0.1, compile=False)
    optimizer.step()
    (group,) = optimizer.param_groups
    usual = group[option]
    several = isinstance(usual, tuple)
    for i in range(len(usual) if several else 1):
        place = f"{option}[{i}]" if several else option
        for value, error in wrong(name, option, place):

            def given(x: Any, i: int = i) -> dict[str, Any]:
                x = tuple(x if j == i else y for j, y in enumerate(usual)) if several else x
                return {"lr": 0.1, option: x}

            text = rf"(?s){option}(\[{i}\])?=.*: allowed (is|are|as) "
            ways: list[Any] = [
                lambda given=given, value=value: cls([p], **given(value)),
                lambda given=given, value=value: cls.pure(**given(value)),
            ]
            if option in ("lr", "weight_decay") and isinstance(value, list | dict):
                ways.pop()
            if error is ValueError and option != "k":  # whose tensors may be any
                tensor = torch.tensor(value, dtype=torch.float64)
                ways += [lambda given=given, x=tensor: cls.pure(**given(x))]
            for way in ways:
                refused(way, error, text)
            group[option] = given(value)[option]
            refused(optimizer.step, error, text, [p, list(optimizer.state.values())])
            group[option] = usual
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_what_options_take_is_taken() -> None:
    """Otherwise a bound that is too narrow would be seen by no row."""
    for name, option in ROWS:
        usual = RULES[name].pure(lr=0.1)
        for x in () if isinstance(getattr(usual, option), tuple) else PROBES:
            if x in [value for value, _ in wrong(name, option, option)]:
                continue
            RULES[name].pure(**{"lr": 0.1, option: x})
