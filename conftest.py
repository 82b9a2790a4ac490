"""What the doctests of the package have imported."""

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def torch_in_doctests(doctest_namespace: dict[str, Any]) -> None:
    """Doctests may write `torch.ones(2)` where their module imports only some names."""
    doctest_namespace["torch"] = torch
