"""The optimizers: one file for each class and its pure functions (see `functional`)."""

import sys
from typing import Any

from optimi_func.classes.base import BaseOptimizer as BaseOptimizer


def __getattr__(name: str) -> Any:
    """Return a class of `optimi_func`, which programs may import from here."""
    found = vars(sys.modules["optimi_func"]).get(name)
    if isinstance(found, type) and issubclass(found, BaseOptimizer):
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
