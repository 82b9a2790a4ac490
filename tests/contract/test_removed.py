"""Names and arguments that are no more: the error says what to use."""

import pytest

ROWS: list[tuple[str, str]] = [
    ("from optimi_func.population import from_class", "optimizer.functional"),
    ("from optimi_func.population import load_member", "optimizer.load_functional"),
    ("from optimi_func.population import state_dicts", "for name, p in members.params"),
    ("import optimi_func; optimi_func.population.unstack", "lambda x: x"),
]


@pytest.mark.parametrize(("program", "text"), ROWS)
def test_what_is_used_instead_is_told(program: str, text: str) -> None:
    with pytest.raises((AttributeError, ImportError, TypeError), match=text) as told:
        exec(program, {})
    assert "removed in 0.3: use " in str(told.value)
