"""Names and arguments that are gone: errors say what to use."""

from collections.abc import Callable

import pytest
import torch

import optimi_func


def made() -> optimi_func.AdamW:
    return optimi_func.AdamW([torch.nn.Parameter(torch.ones(2))], compile=False)


REMOVED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "track": (lambda: made().track(), AttributeError, r"use optimi_func.Stats\("),
    "stats": (lambda: made().stats(), AttributeError, r"use optimi_func.Stats\("),
}


@pytest.mark.parametrize("name", REMOVED)
def test_errors_say_what_to_use(name: str) -> None:
    reach, error, text = REMOVED[name]
    with pytest.raises(error, match=text):
        reach()
