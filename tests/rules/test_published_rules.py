"""Rules of papers, as users write them, beside loops of plain tensors."""

from typing import Any

import pytest
from own_rules import LARS, RULES, lars
from tiers import row

from optimi_func import testing
from optimi_func.testing import check_rule

QUICK = ("LARS", "NormedLAMB", "GaLore", "SGLD")
ROWS = [
    row(*x, id=(name := x[0].__name__), tier="" if name in QUICK else "full") for x in RULES
]


@pytest.mark.parametrize(("cls", "loop", "hyper"), ROWS)
def test_rules_of_papers(
    cls: Any, loop: Any, hyper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "_SHAPES", ((7, 5), (5,), (), (0,)))
    check_rule(cls, loop, compile=False, **hyper)


@pytest.mark.full
def test_kernels_measure_before_the_direction() -> None:
    check_rule(LARS, lars)
