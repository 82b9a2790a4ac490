"""Names and arguments that are there no more: errors say what to use."""

from collections.abc import Callable

import pytest
import torch

from optimi_func import Adam, AdamW, adamw

W = torch.ones(2, requires_grad=True)
REACHED: dict[str, tuple[Callable[[], object], str]] = {
    "Adam(modulus=)": (lambda: Adam([W], modulus=True), "use none: both parts"),
    "AdamW(modulus=)": (lambda: AdamW([W], modulus=False), "use none: both parts"),
    "adamw(modulus=)": (lambda: adamw(lr=0.1, modulus=True), "use none: both parts"),
}


@pytest.mark.parametrize("name", REACHED)
def test_what_is_removed_says_what_to_use(name: str) -> None:
    reach, said = REACHED[name]
    with pytest.raises((AttributeError, ImportError, TypeError), match=said):
        reach()
