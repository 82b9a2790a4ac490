"""What tests of rules share."""

import pytest

from optimi_func import testing


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_rule` without its large matrix, which takes most of its time."""
    monkeypatch.setattr(testing, "_SHAPES", ((7, 5), (5,), (), (0,)))
