"""Names and arguments that are gone: what an error says to use instead."""

from importlib import import_module

import pytest

import optimi_func

# The module, the name, and a part of what is said.
NAMES = [
    ("optimi_func.transforms", "inject", r"adamw\(lr=lr, .*\)\.step\(params, grads"),
    ("optimi_func.transforms", "InjectState", "0-d tensors for numbers"),
]


@pytest.mark.parametrize(("module", "name", "text"), NAMES)
def test_a_removed_name_says_what_to_use(module: str, name: str, text: str) -> None:
    said = f"module '{module}' has no attribute '{name}', removed in 0.3: use .*{text}"
    with pytest.raises(AttributeError, match=said):
        getattr(import_module(module), name)
    with pytest.raises(ImportError, match=said):
        exec(f"from {module} import {name}")


# How it is called, and a part of what is said.
ARGUMENTS = [
    (lambda: optimi_func.adamw(lr=0.1, betas={"w": (0.9, 0.99)}), r"betas=\{.*partition"),
]


@pytest.mark.parametrize(("call", "text"), ARGUMENTS)
def test_a_removed_argument_says_what_to_use(call, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()
